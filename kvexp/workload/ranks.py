"""One process a tensor-parallel rank, each with a measurement of its own on a device of its own."""

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from kvexp.deployment import Deployment
from kvexp.engine import CachePlan
from kvexp.errors import InvalidValue, ProfilerUnavailable
from kvexp.profiler import DeviceFacts, Measurement
from kvexp.results import Profile
from kvexp.workload.building import Rank
from kvexp.workload.forward import Forward
from kvexp.workload.oom import is_out_of_memory
from kvexp.workload.parent import die_with
from kvexp.workload.running import Workload

GRACE_S = 10.0
"""How long ranks may take to end by themselves."""

Open = Callable[[Rank], Measurement]
"""Makes the measurement of one rank, in that rank's process; must pickle."""

Make = Callable[[Workload], Measurement]
"""Makes the measurement of a workload; must pickle."""


def on_ranks(make: Make, deployment: Deployment, forward: Forward) -> Measurement:
    """A measurement here, or one in a process of its own for each tensor-parallel rank."""
    if deployment.tp == 1:
        return make(Workload(deployment, forward))
    return Ranks(partial(_of_rank, make, deployment, forward), deployment.tp)


def _of_rank(make: Make, deployment: Deployment, forward: Forward, rank: Rank) -> Measurement:
    return make(Workload(deployment, forward, rank.index, rank))


class RankFailed(RuntimeError):
    """A rank ended with an error that is none of those kept by kind; the message names both."""


class OutOfMemoryError(RuntimeError):
    """A rank's device ran out of memory."""


class Ranks(Measurement):
    """A measurement of all ranks in step: each stage runs on all of them at once.

    The first rank that fails ends the stage for all.
    """

    def __init__(self, open_rank: Open, size: int) -> None:
        self.size = size
        self._open = open_rank
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._readings: Mapping[str, Any] = {}
        self._notes: tuple[str, ...] = ()
        self._captures = False
        self._first_failure: str | None = None
        self._in_step = True

    def start(self) -> DeviceFacts | None:
        """Start the processes; the smallest card counts."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvexp-ranks-")
        meeting = str(Path(self._folder.name) / "meeting")
        context = get_context("spawn")
        for index in range(self.size):
            ours, theirs = context.Pipe()
            rank = Rank(index=index, size=self.size, meeting=meeting)
            process = context.Process(
                target=_serve, args=(theirs, os.getpid(), self._open, rank), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        found = [facts for facts in self._all("start") if facts is not None]
        self._captures = all(self._all("captures"))
        return min(found, key=lambda facts: (facts.total_bytes, facts.free_bytes), default=None)

    def load(self) -> None:
        """Load every rank's share."""
        self._all("load")

    def warmup(self) -> tuple[Profile, ...]:
        """One profile a rank, in rank order."""
        return tuple(profile for profiles in self._all("warmup") for profile in profiles)

    def allocate(self, plan: CachePlan) -> int | None:
        """Allocate every rank's part of the cache; the bytes of the largest."""
        sizes = [size for size in self._all("allocate", plan) if size is not None]
        return max(sizes, default=None)

    def verify(self) -> bool | None:
        """Run the largest forward on all ranks."""
        return all(self._all("verify"))

    @property
    def captures(self) -> bool:
        """Whether the ranks capture graphs."""
        return self._captures

    def capture(self) -> None:
        """Capture on all ranks."""
        self._all("capture")

    def release(self) -> None:
        """Give the cache back on all ranks."""
        self._all("release")

    def readings(self) -> Mapping[str, Any]:
        """What each rank read, in rank order."""
        if self._pipes and self._in_step:
            self._readings = {"ranks": self._all("readings")}
        return self._readings

    def notes(self) -> tuple[str, ...]:
        """What is to be said of any rank."""
        if self._pipes and self._in_step:
            said = [note for notes in self._all("notes") for note in notes]
            self._notes = tuple(dict.fromkeys(said))
        return self._notes

    def close(self) -> None:
        """End the processes, by force where it must be."""
        pipes, self._pipes = self._pipes, []
        processes, self._processes = self._processes, []
        for pipe in pipes:
            pipe.close()  # a rank that waits for work ends by itself
        for process in processes:
            process.join(GRACE_S if self._in_step else 0)
            if process.is_alive():
                process.kill()
                process.join()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        """Call the same on all ranks and wait for all; their answers in rank order.

        Raises:
            InvalidValue, ProfilerUnavailable, OutOfMemoryError, RankFailed: as a rank did.
        """
        if self._first_failure is not None and not self._in_step:
            raise RankFailed(f"the ranks are out of step since {self._first_failure}")
        for pipe in self._pipes:
            with suppress(BrokenPipeError, ConnectionResetError):  # seen when it is read from
                pipe.send((name, arguments))
        waiting = {pipe: index for index, pipe in enumerate(self._pipes)}
        answers: dict[int, Any] = {}
        failure: Exception | None = None
        while waiting:
            ready = wait(list(waiting), None if failure is None else GRACE_S)
            if not ready:
                break  # these wait for the one that failed
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                index = waiting.pop(pipe)
                problem, answers[index] = self._answer(index, name)
                failure = failure or problem
        if failure is not None:
            self._first_failure = str(failure)
            self._in_step = not waiting and all(each.is_alive() for each in self._processes)
            raise failure
        return [answers[index] for index in sorted(answers)]

    def _answer(self, index: int, name: str) -> tuple[Exception | None, Any]:
        try:
            failure, answer = self._pipes[index].recv()
        except (EOFError, ConnectionResetError):
            return RankFailed(self._died(index, name)), None
        return (failure.on(index) if failure is not None else None), answer

    def _died(self, index: int, name: str) -> str:
        process = self._processes[index]
        process.join(GRACE_S)
        code = process.exitcode
        how = f"status {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return f"rank {index} ended during {name} ({how})"


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way to the parent: its kind, its first cause's text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        text = " ".join(str(error).split()) or type(error).__name__
        for kind in _KEPT:
            if isinstance(error, kind):
                return cls(kind=kind.__name__, text=text)
        if is_out_of_memory(error):
            return cls(kind=OutOfMemoryError.__name__, text=text)
        return cls(kind=RankFailed.__name__, text=f"{type(error).__name__}: {text}")

    def on(self, rank: int) -> Exception:
        kinds: tuple[type[Exception], ...] = (*_KEPT, OutOfMemoryError, RankFailed)
        kind: type[Exception] = next(kind for kind in kinds if kind.__name__ == self.kind)
        return kind(f"rank {rank}: {self.text}")


_KEPT: tuple[type[Exception], ...] = (InvalidValue, ProfilerUnavailable)


def _serve(pipe: Connection, parent: int, open_rank: Open, rank: Rank) -> None:
    """Do what the parent asks until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
    measurement: Measurement | None = None
    try:
        while True:
            name, arguments = pipe.recv()
            try:
                if measurement is None:
                    measurement = open_rank(rank)
                asked = getattr(measurement, name)
                answer = asked(*arguments) if callable(asked) else asked
            except Exception as error:
                pipe.send((_Failure.of(error), None))
            else:
                pipe.send((None, answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is done, or gone
    finally:
        if measurement is not None:
            measurement.close()
