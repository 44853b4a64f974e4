"""Processes of their own for measured points, so that none sees what another kind left behind."""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Any

from kvexp import pipeline
from kvexp.bench import Bench
from kvexp.deployment import Deployment
from kvexp.nvml import host_memory
from kvexp.profiler import Profiler
from kvexp.residual import Held
from kvexp.results import Result, Stage, Status
from kvexp.schema import Run
from kvexp.workload import die_with

GRACE_S = 5.0
"""How long a child may take to end by itself before it is killed."""


GUARD_S = 0.5
"""How often the host's memory is looked at."""

HOST_RESERVE = 0.03
"""The share of the host's memory below which a measurement on unified memory is ended."""


class Worker:
    """Runs measured points in a spawned process, kept while points share a load.

    The process ends when the key changes, when a point ends in another way than the pipeline
    foresees, and at `close`; it is gone when `close` returns, also after KeyboardInterrupt. What
    it left on its devices is then in `endings`. A point whose neighbours moved is measured again,
    once, in a new process.
    """

    def __init__(self, hold: Callable[[int], Held] = Held) -> None:
        self.endings: list[dict[str, Any]] = []
        self._hold = hold
        self._held: Held | None = None
        self._key: str | None = None
        self._child: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._busy = False

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def execute(self, run: Run, engine_name: str) -> Result:
        """`pipeline.execute` in the child; its death, too, becomes a status."""
        deployment = run.engine.resolve(run, engine_name)
        result = self._execute(run, engine_name, deployment)
        if not (moved := contaminations(result)):
            return result
        self.close()
        again = self._execute(run, engine_name, deployment)
        return replace(
            again,
            notes=(*again.notes, "measured twice: the first time was contaminated"),
            readings={**again.readings, "first_neighbours": moved},
        )

    def _execute(self, run: Run, engine_name: str, deployment: Deployment) -> Result:
        key = run.profiler.load_key(deployment, run.engine)
        if key is None or key != self._key:
            self.close()
        self._key = key
        result = None
        try:
            child, pipe = self._started(run.profiler)
            if self._held is None:
                self._held = self._hold(deployment.num_ranks)
            result = self._run(run, engine_name, child, pipe)
        finally:
            if key is None or result is None or result.status not in _REUSABLE:
                self.close()
        return result

    def close(self) -> None:
        """End the child, by force where it must be."""
        child, self._child = self._child, None
        pipe, self._pipe = self._pipe, None
        self._key = None
        if pipe is not None:
            pipe.close()
        if child is not None:
            if not self._busy:
                child.join(GRACE_S)  # a child that waits for work ends by itself
            _end(child)
        self._busy = False
        held, self._held = self._held, None
        if held is not None:
            self.endings.extend(held.give_back())

    def _run(self, run: Run, engine_name: str, child: SpawnProcess, pipe: Connection) -> Result:
        stage = Stage.start
        limit_s = run.profiler.timeout_s
        deadline = monotonic() + limit_s if limit_s is not None else None
        self._busy = True
        try:
            pipe.send((run, engine_name))
            while deadline is None or monotonic() < deadline:
                if self._host_is_full():
                    return Result(status=Status.oom, stage=stage, reason=_HOST_FULL)
                if not pipe.poll(_wait_s(deadline)):
                    continue
                message = pipe.recv()
                if isinstance(message, Result):
                    self._busy = False
                    return message
                stage = message
        except (EOFError, BrokenPipeError, ConnectionResetError):
            child.join(GRACE_S)
            return Result(status=Status.killed, stage=stage, reason=_death(child.exitcode))
        return Result(
            status=Status.timeout,
            stage=stage,
            reason=f"not done after profiler.timeout_s={limit_s:g}",
        )

    def _host_is_full(self) -> bool:
        """Whether a device that shares the host's memory has taken nearly all of it."""
        if self._held is None or not self._held.is_unified or (host := host_memory()) is None:
            return False
        total, available = host
        return available < HOST_RESERVE * total

    def _started(self, profiler: Profiler) -> tuple[SpawnProcess, Connection]:
        """The child, ready for work: what is slow to import is imported before a device is held."""
        if self._child is None or self._pipe is None:
            context = get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._child = context.Process(target=_serve, args=(theirs, os.getpid(), profiler))
            self._child.start()
            theirs.close()
            with suppress(EOFError, ConnectionResetError):  # seen again when it shall work
                self._pipe.recv()
        return self._child, self._pipe


_HOST_FULL = (
    f"less than {HOST_RESERVE:.0%} of the host's memory was left, which the device shares:"
    " the measurement was ended"
)


def _wait_s(deadline: float | None) -> float:
    return GUARD_S if deadline is None else min(GUARD_S, max(0.0, deadline - monotonic()))


def contaminations(result: Result) -> list[Mapping[str, Any]]:
    """What the ranks of a point say of their neighbours, where any of them moved."""
    ranks = result.readings.get("ranks", [result.readings])
    seen = [rank.get("neighbours") or {} for rank in ranks]
    return seen if any(each.get("contaminated") for each in seen) else []


_REUSABLE = (Status.ok, Status.infeasible, Status.invalid)


def _serve(pipe: Connection, parent: int, profiler: Profiler) -> None:
    """Run points until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
    bench = Bench()
    profiler.prepare()
    try:
        pipe.send(None)
        while True:
            run, engine_name = pipe.recv()
            pipe.send(pipeline.execute(run, engine_name, on_stage=pipe.send, bench=bench))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        bench.close()


def _end(child: SpawnProcess) -> None:
    if child.is_alive():
        child.terminate()
    child.join(GRACE_S)
    if child.is_alive():
        child.kill()
        child.join()


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"the process was killed by {signal.Signals(-exitcode).name}"
    return f"the process ended with status {exitcode} before it had a result"
