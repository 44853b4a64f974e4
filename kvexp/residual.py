"""Is a device back where it was once a measurement's process has ended?"""

from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from kvexp.errors import ProfilerUnavailable
from kvexp.nvml import NvmlDevice, open_device
from kvexp.workload import visible_uuids

TOLERANCE_BYTES = 2 << 20
"""One page of the driver."""

WAIT_S = 5.0
"""How long the driver may take to give an ended process's memory back."""


Find = Callable[[], Sequence[NvmlDevice]]


class Baseline:
    """What NVML says is used of some devices, before a process and after it.

    Made before the process starts; this process makes no CUDA context for it.
    """

    def __init__(self, num_devices: int, find: Find | None = None) -> None:
        self._devices: Sequence[NvmlDevice] = ()
        self._reason: str | None = None
        try:
            self._devices = (find or _visible)()[:num_devices]
        except ProfilerUnavailable as reason:
            self._reason = str(reason)
        self._before = [device.read().used_bytes for device in self._devices]

    def after(self, wait_s: float = WAIT_S) -> list[dict[str, Any]]:
        """The residual of each device, waiting a while for it to become zero; leaves NVML.

        A residual need not be the process's: a neighbour can have grown meanwhile.
        """
        until = monotonic() + wait_s
        found = self._residuals()
        while any(is_left(each) for each in found) and monotonic() < until:
            sleep(0.1)
            found = self._residuals()
        for device in self._devices:
            device.close()
        return found or [{"residual_bytes": None, "reason": self._reason}]

    def _residuals(self) -> list[dict[str, Any]]:
        return [
            _residual(device, before)
            for device, before in zip(self._devices, self._before, strict=True)
        ]


def is_left(ending: dict[str, Any]) -> bool:
    """Whether a residual is more than a reading's step."""
    size = ending["residual_bytes"]
    return size is not None and size > TOLERANCE_BYTES


def _residual(device: NvmlDevice, before: int | None) -> dict[str, Any]:
    now = device.read()
    known = before is not None and now.used_bytes is not None
    return {
        "uuid": device.uuid,
        "before_bytes": before,
        "after_bytes": now.used_bytes,
        "residual_bytes": now.used_bytes - before
        if before is not None and now.used_bytes is not None
        else None,
        "reason": None if known else now.reason or "NVML did not answer before",
    }


def _visible() -> Sequence[NvmlDevice]:
    return [open_device(uuid) for uuid in visible_uuids()]
