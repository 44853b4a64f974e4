"""A process that runs already, watched from outside."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from kvexp.contract import (
    CachePlan,
    Deployment,
    DeviceFacts,
    Engine,
    Measurement,
    NvmlDevice,
    Profile,
    ProfilerUnavailable,
    Usage,
    gib,
    open_device,
    visible_uuids,
)
from kvexp_nvml.sampling import Sampler


class Watch(Measurement):
    """The used bytes of one process, beside what the engine's rules say that it takes."""

    def __init__(
        self,
        deployment: Deployment,
        engine: Engine,
        pid: int,
        seconds: float | None,
        interval_s: float,
        devices: Callable[[int], Sequence[NvmlDevice]] | None = None,
    ) -> None:
        self.deployment = deployment
        self.engine = engine
        self.pid = pid
        self.seconds = seconds
        self.interval_s = interval_s
        self._find = devices or visible_devices
        self._devices: Sequence[NvmlDevice] = ()
        self._device: NvmlDevice | None = None
        self._before: Usage | None = None
        self._sampler: Sampler | None = None
        self._watched_s = 0.0
        self._expected_bytes: int | None = None

    def start(self) -> DeviceFacts | None:
        """Find the device on which the process works.

        Raises:
            ProfilerUnavailable: there is no such process, or it works on no visible device.
        """
        if not _lives(self.pid):
            raise ProfilerUnavailable(f"profiler.pid={self.pid}: there is no such process")
        self._devices = self._find(self.pid)
        self._device = self._of_process()
        self._before = before = self._device.read()
        if before.used_bytes is None or before.total_bytes is None or before.free_bytes is None:
            raise ProfilerUnavailable(f"NVML used bytes are unavailable: {before.reason}")
        return DeviceFacts(
            name=self._device.name(),
            total_bytes=before.total_bytes - (before.reserved_bytes or 0),
            free_bytes=before.free_bytes + (before.process_bytes or 0),
        )

    def _of_process(self) -> NvmlDevice:
        working = [device for device in self._devices if self.pid in device.process_ids()]
        if working:
            return working[0]
        if len(self._devices) == 1:
            return self._devices[0]  # it may start later, or have another id in the driver's eyes
        raise ProfilerUnavailable(
            f"profiler.pid={self.pid} works on none of the {len(self._devices)} visible devices"
        )

    def load(self) -> None:
        """Nothing is loaded."""

    def warmup(self) -> tuple[Profile, ...]:
        """Watch until the time is over or the process ends; one profile a rank, by the rules."""
        assert self._device is not None
        sampler = self._sampler = Sampler(self._device.read, self.interval_s)
        started = monotonic()
        sampler.start()
        try:
            while _lives(self.pid) and not self._is_over(monotonic() - started):
                sleep(min(self.interval_s, 0.1))
        finally:
            sampler.stop()
            self._watched_s = monotonic() - started
        profiles = tuple(self._by_rules(shape) for shape in self.engine.ranks(self.deployment))
        requested = self.engine.quota(self.deployment, profiles[0]).requested_bytes
        self._expected_bytes = requested + self.deployment.gpu.context_bytes
        return profiles

    def _is_over(self, passed_s: float) -> bool:
        return self.seconds is not None and passed_s >= self.seconds

    def _by_rules(self, shape: Any) -> Profile:
        return Profile(
            weights=self.engine.predict_weights(self.deployment, shape),
            activation=self.engine.predict_activation(self.deployment, shape),
            non_torch=self.engine.predict_non_torch(self.deployment, shape),
            cudagraph=self.engine.predict_cudagraph(self.deployment, shape),
        )

    def allocate(self, plan: CachePlan) -> int | None:
        """Nothing is allocated."""
        return None

    def notes(self) -> tuple[str, ...]:
        """What was seen, in a line."""
        if self._sampler is None:
            return ()
        peak = self._sampler.peak_process_bytes
        seen = gib(peak) if peak is not None else f"unknown ({self._sampler.reason})"
        expected = (
            f", the engine's share with its context is {gib(self._expected_bytes)}"
            if self._expected_bytes is not None
            else ""
        )
        return (f"process {self.pid} took at most {seen} in {self._watched_s:.1f} s{expected}",)

    def readings(self) -> Mapping[str, Any]:
        """The device and the process, before and at the peak."""
        if self._device is None:
            return {}
        peak = self._sampler.peak_process_bytes if self._sampler is not None else None
        return {
            "nvml": self._device.describe(),
            "watched": {
                "pid": self.pid,
                "seconds": round(self._watched_s, 3),
                "before": asdict(self._before) if self._before is not None else None,
                "sampler": self._sampler.as_dict() if self._sampler is not None else None,
                "expected_bytes": self._expected_bytes,
                "ratio": round(peak / self._expected_bytes, 6)
                if peak is not None and self._expected_bytes
                else None,
            },
        }

    def close(self) -> None:
        """End the sampler, leave NVML."""
        if self._sampler is not None:
            self._sampler.stop()
        for device in self._devices:
            device.close()


def visible_devices(pid: int) -> Sequence[NvmlDevice]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, as NVML knows them.

    Raises:
        ProfilerUnavailable: there is none, or NVML does not answer.
    """
    return [open_device(uuid, pid) for uuid in visible_uuids()]


def _lives(pid: int) -> bool:
    """Whether the process is there and not only waiting to be collected."""
    with suppress(OSError, IndexError):
        told = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return told.rpartition(")")[2].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
