"""The devices of a measurement's process: held for it alone, and as they were afterwards?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from kvexp.errors import ProfilerUnavailable
from kvexp.gpu_lock import GpuLock
from kvexp.nvml import NvmlDevice, open_device
from kvexp.workload import visible_uuids

TOLERANCE_BYTES = 2 << 20
"""One page of the driver."""

WAIT_S = 5.0
"""How long the driver may take to give an ended process's memory back."""


Find = Callable[[], Sequence[str]]


class Held:
    """The first visible devices, held while a process measures on them.

    No other measurement gets them meanwhile, on this machine, by any user. This process makes no
    CUDA context.
    """

    def __init__(self, num_devices: int, find: Find = visible_uuids) -> None:
        """Wait for the devices, and read what is used before the process begins."""
        self._locks: list[GpuLock] = []
        self._devices: list[NvmlDevice] = []
        self._reason: str | None = None
        try:
            uuids = list(find())[:num_devices]
            for uuid in sorted(uuids):  # in one order everywhere, so that no two wait in a ring
                self._locks.append(GpuLock(uuid))
                self._locks[-1].acquire()
            self._devices.extend(open_device(uuid) for uuid in uuids)
        except ProfilerUnavailable as reason:
            self._reason = str(reason)
        except BaseException:
            self._let_go()
            raise
        self._before = [_Used.on(device) for device in self._devices]

    @property
    def is_unified(self) -> bool:
        """Whether any of the devices shares its memory with the host."""
        return any(device.is_unified for device in self._devices)

    def give_back(self, wait_s: float = WAIT_S) -> list[dict[str, Any]]:
        """Let the devices go, the process having ended; the residual of each.

        It is waited for a while to become zero. Neighbours that were there before are counted out;
        a new one is not told from the process.
        """
        until = monotonic() + wait_s
        found = self._residuals()
        while any(is_left(each) for each in found) and monotonic() < until:
            sleep(0.1)
            found = self._residuals()
        self._let_go()
        return found or [{"residual_bytes": None, "reason": self._reason}]

    def _let_go(self) -> None:
        for device in self._devices:
            device.close()
        for lock in self._locks:
            lock.release()

    def _residuals(self) -> list[dict[str, Any]]:
        return [
            _residual(device, before)
            for device, before in zip(self._devices, self._before, strict=True)
        ]


def is_left(ending: dict[str, Any]) -> bool:
    """Whether a residual is more than a reading's step."""
    size = ending["residual_bytes"]
    return size is not None and size > TOLERANCE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class _Used:
    """What is in use on a device, and what of it by processes that the driver lists."""

    used_bytes: int | None
    by_process: Mapping[int, int]
    reason: str | None

    @classmethod
    def on(cls, device: NvmlDevice) -> "_Used":
        usage = device.read()
        return cls(used_bytes=usage.used_bytes, by_process=device.by_process(), reason=usage.reason)


def _residual(device: NvmlDevice, before: _Used) -> dict[str, Any]:
    now = _Used.on(device)
    moved = sum(now.by_process.get(pid, 0) - size for pid, size in before.by_process.items())
    residual = None
    if before.used_bytes is not None and now.used_bytes is not None:
        residual = now.used_bytes - before.used_bytes - moved
    return {
        "uuid": device.uuid,
        "before_bytes": before.used_bytes,
        "after_bytes": now.used_bytes,
        "neighbours_moved_bytes": moved,
        "residual_bytes": residual,
        "reason": None if residual is not None else now.reason or before.reason,
    }
