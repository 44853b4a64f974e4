"""The contract of a profiler plugin: how the memory terms become known."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.deployment import Deployment
from kvexp.engine import CachePlan, Engine
from kvexp.results import Profile, Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """The card at hand, as its driver reports it before anything is loaded."""

    name: str
    total_bytes: int
    free_bytes: int


class EngineRefused(Exception):
    """The engine itself would not go on: the point ends as infeasible, in the engine's words."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Measurement(ABC):
    """One pass through the stages: start, load, warmup, allocate, verify, capture, release, close.

    The first three are called once. The next four are called for every point that shares the
    load (see `Profiler.load_key`), `close` always, whatever happened before. An exception ends the
    point with the stage in which it was raised; `EngineRefused` is the engine's own no.
    """

    reusable: ClassVar[bool] = True
    """False where no second cache can be allocated after `release`."""

    @abstractmethod
    def start(self) -> DeviceFacts | None:
        """Take hold of the device and read it; None where there is none."""

    @abstractmethod
    def load(self) -> None:
        """Put the weights on the device."""

    @abstractmethod
    def warmup(self) -> tuple[Profile, ...]:
        """Run the largest forward the engine would ever run; return one profile a rank."""

    def plan(self, deployment: Deployment, ruled: CachePlan | Refusal) -> CachePlan | Refusal:
        """The plan of the engine at work, where one is; else `ruled`, the one by its rules.

        `deployment` has the totals of the card at hand.
        """
        return ruled

    @abstractmethod
    def allocate(self, plan: CachePlan) -> int | None:
        """Really allocate the cache and return its bytes; None where nothing is allocated."""

    def verify(self) -> bool | None:
        """Run the largest forward again on top of the allocated cache.

        True when it ran, None where nothing can be verified; out of memory is raised.
        """
        return None

    @property
    def captures(self) -> bool:
        """Whether `capture` is wanted."""
        return False

    def capture(self) -> None:
        """Capture CUDA graphs on top of that; out of memory is raised."""
        return

    def release(self) -> None:
        """Give the cache back and keep what was loaded."""
        return

    def readings(self) -> Mapping[str, Any]:
        """Raw counters by stage, as plain data; empty where there are none."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result must know of this measurement."""
        return ()

    def close(self) -> None:
        """Give everything back."""
        return


@dataclass
class Profiler(ABC):
    """One way to learn the profile of a deployment.

    A subclass is a plain dataclass: its fields are its options (`profiler.interval_s=0.02`), its
    entry-point name is its option name (`profiler=nvml`). `timeout_s` ends an isolated point
    that takes longer, as status timeout.
    """

    timeout_s: float | None = None

    isolated: ClassVar[bool] = False
    """True when every point must run in a fresh process, since it touches a device."""

    @classmethod
    def among(cls, others: "Mapping[str, type[Profiler]]") -> "type[Profiler]":
        """The class to compose, where it depends on the profilers that are there."""
        return cls

    def check(self) -> None:
        """Do nothing where this machine can run this profiler.

        Raises:
            ProfilerUnavailable: it cannot; the message says what is missing.
        """
        return

    def prepare(self) -> None:
        """Import what is slow to import, in the process that measures.

        Its device is not held yet, so others can measure meanwhile.
        """
        return

    def load_key(self, deployment: Deployment, engine: Engine) -> str | None:
        """What one load and warm-up depends on: points with equal keys share them.

        None: every point starts from nothing.
        """
        return None

    @abstractmethod
    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """A measurement of `deployment`; nothing happens before its first method is called.

        Raises:
            InvalidValue: the deployment cannot be measured this way.
        """
