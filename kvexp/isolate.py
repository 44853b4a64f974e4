"""A fresh process for every measured point, so that no point sees what another left behind."""

import ctypes
import os
import signal
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from time import monotonic

from kvexp import pipeline
from kvexp.results import Result, Stage, Status
from kvexp.schema import Run

GRACE_S = 5.0
"""How long a child may take to end by itself before it is killed."""


def execute(run: Run, engine_name: str) -> Result:
    """`pipeline.execute` in a spawned child; its death, too, becomes a status.

    The child is gone when this returns, also on KeyboardInterrupt.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_child, args=(theirs, run, engine_name, os.getpid()), daemon=True
    )
    child.start()
    theirs.close()
    stage = Stage.start
    limit_s = run.profiler.timeout_s
    deadline = monotonic() + limit_s if limit_s is not None else None
    try:
        while ours.poll(None if deadline is None else max(0.0, deadline - monotonic())):
            try:
                message = ours.recv()
            except EOFError:
                break
            if isinstance(message, Result):
                child.join(GRACE_S)
                return message
            stage = message
        else:
            return Result(
                status=Status.timeout,
                stage=stage,
                reason=f"not done after profiler.timeout_s={limit_s:g}",
            )
        child.join(GRACE_S)
        return Result(status=Status.killed, stage=stage, reason=_death(child.exitcode))
    finally:
        _end(child)
        ours.close()


def _child(pipe: Connection, run: Run, engine_name: str, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    pipe.send(pipeline.execute(run, engine_name, on_stage=pipe.send))
    pipe.close()


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when the parent is gone, however it went."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _end(child: SpawnProcess) -> None:
    if not child.is_alive():
        return
    child.terminate()
    child.join(GRACE_S)
    if child.is_alive():
        child.kill()
        child.join()


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"the process was killed by {signal.Signals(-exitcode).name}"
    return f"the process ended with status {exitcode} before it had a result"
