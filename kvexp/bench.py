"""What a process keeps loaded from one point to the next."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvexp.deployment import Deployment
from kvexp.engine import CachePlan
from kvexp.profiler import DeviceFacts, Measurement
from kvexp.results import Profile, Refusal
from kvexp.schema import Run


class Bench:
    """Holds one measurement; its first stages run once for all points that share their key."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._measurement: Measurement | None = None
        self._device: DeviceFacts | None = None
        self._profiles: tuple[Profile, ...] | None = None
        self._started = self._loaded = False
        self._readings: Mapping[str, Any] = {}
        self._notes: tuple[str, ...] = ()

    @contextmanager
    def measuring(self, run: Run, deployment: Deployment) -> Iterator[None]:
        """Hold the measurement of a point: the one at hand, or a new one.

        Afterwards the cache is released and the load kept, where the profiler gives a key; an
        exception ends the measurement.
        """
        key = run.profiler.load_key(deployment, run.engine)
        if self._measurement is None or key is None or key != self._key:
            self.close()
            self._measurement, self._key = run.profiler.open(deployment, run.engine), key
        self._readings, self._notes = {}, ()
        try:
            yield
        except BaseException:
            self._readings, self._notes = self.readings(), self.notes()
            self.close()
            raise
        if key is None:
            self.close()
        else:
            self._measurement.release()

    def start(self) -> DeviceFacts | None:
        """The device, taken hold of once."""
        if not self._started:
            self._device, self._started = self._held.start(), True
        return self._device

    def load(self) -> None:
        """Load, once."""
        if not self._loaded:
            self._held.load()
            self._loaded = True

    def warmup(self) -> tuple[Profile, ...]:
        """The profiles of one warm-up."""
        if self._profiles is None:
            self._profiles = self._held.warmup()
        return self._profiles

    def plan(self, deployment: Deployment, ruled: CachePlan | Refusal) -> CachePlan | Refusal:
        """The engine's own plan where it is at work, else the one by its rules."""
        return self._held.plan(deployment, ruled)

    def allocate(self, plan: CachePlan) -> int | None:
        """Allocate the cache of this point."""
        return self._held.allocate(plan)

    def verify(self) -> bool | None:
        """Run the largest forward on top of it."""
        return self._held.verify()

    @property
    def reusable(self) -> bool:
        """Whether a smaller cache can be tried after this one."""
        return self._held.reusable

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs are captured on top of that."""
        return self._held.captures

    def capture(self) -> None:
        """Capture them."""
        self._held.capture()

    def release(self) -> None:
        """Give the cache back."""
        self._held.release()

    def readings(self) -> Mapping[str, Any]:
        """What was read until now."""
        if self._measurement is None:
            return self._readings  # of the one that has failed
        return self._measurement.readings()

    def notes(self) -> tuple[str, ...]:
        """What is to be said of the measurement."""
        return self._measurement.notes() if self._measurement is not None else self._notes

    def close(self) -> None:
        """Give everything back."""
        measurement, self._measurement = self._measurement, None
        self._key = self._device = self._profiles = None
        self._started = self._loaded = False
        if measurement is not None:
            measurement.close()

    @property
    def _held(self) -> Measurement:
        assert self._measurement is not None
        return self._measurement
