"""What the driver counts as used on a device, read through NVML (nvidia-ml-py).

Nothing here makes a CUDA context.
"""

import importlib.metadata
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexp.errors import ProfilerUnavailable


def host_memory() -> tuple[int, int] | None:
    """(total, available) bytes of the host by /proc/meminfo; available counts the file cache."""
    with suppress(OSError, KeyError):
        found = dict(re.findall(r"^(\w+): +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE))
        return int(found["MemTotal"]) << 10, int(found["MemAvailable"]) << 10
    return None


_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """One answer of NVML; what it did not answer is null, and `reason` says why.

    `reserved_bytes` is the driver's own, `process_bytes` that of the process which is watched.
    """

    used_bytes: int | None
    free_bytes: int | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    reason: str | None = None

    @property
    def others_bytes(self) -> int | None:
        """What is used by anything but the watched process; null where its own is unknown."""
        if self.used_bytes is None or self.process_bytes is None:
            return None
        return self.used_bytes - self.process_bytes


def open_device(uuid: str, pid: int | None = None) -> "NvmlDevice":
    """The device of that UUID, `pid` being watched (this process where none is given).

    Raises:
        ProfilerUnavailable: NVML is not there, or does not know the device.
    """
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        raise ProfilerUnavailable("nvidia-ml-py is not installed") from None
    return NvmlDevice(pynvml, uuid, pid)


class NvmlDevice:
    """One device of NVML, found by the UUID that CUDA gives it: never by an index.

    CUDA and NVML count devices in different orders, and CUDA_VISIBLE_DEVICES changes one of them.
    Where CPU and GPU share memory NVML has no used bytes; then the host's are read, without what
    it would give back (its file cache).
    """

    def __init__(self, nvml: Any, uuid: str, pid: int | None = None) -> None:
        """Open the library and the device.

        Raises:
            ProfilerUnavailable: NVML does not answer, or does not know the device.
        """
        self._nvml = nvml
        self._uuid = uuid.removeprefix("GPU-").removeprefix("MIG-")
        self._pid = os.getpid() if pid is None else pid
        self._open = False
        try:
            self._connect()
            self._version_2 = self._answers_version_2()
            self._unified = not self._version_2 and not self._answers_version_1()
        except nvml.NVMLError as error:
            self.close()
            raise ProfilerUnavailable(_explain(nvml, error)) from None

    def _connect(self) -> None:
        self._nvml.nvmlInit()
        self._open = True
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid}")
        except self._nvml.NVMLError:
            # A slice of a card has a UUID of its own; the first error is the one to report.
            with suppress(self._nvml.NVMLError):
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{self._uuid}")
                return
            raise

    def _answers_version_2(self) -> bool:
        """Whether the newer record is there, which tells the driver's own reserve from usage.

        Decided once: the two differ by that reserve, so they must not mix within a run.
        """
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2)
        except (AttributeError, TypeError, self._nvml.NVMLError):
            return False
        return True

    def _answers_version_1(self) -> bool:
        """False only where the driver says that this device has no memory of its own."""
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            return bool(_code(error) != self._nvml.NVML_ERROR_NOT_SUPPORTED)
        return True

    def describe(self) -> dict[str, Any]:
        """What answered, as plain data."""
        driver = None
        with suppress(self._nvml.NVMLError):
            driver = _text(self._nvml.nvmlSystemGetDriverVersion())
        binding = None
        with suppress(importlib.metadata.PackageNotFoundError):
            binding = f"nvidia-ml-py {importlib.metadata.version('nvidia-ml-py')}"
        return {
            "uuid": self._uuid,
            "driver_version": driver,
            "memory_info": "host" if self._unified else "v2" if self._version_2 else "v1",
            "memory_model": "unified" if self._unified else "dedicated",
            "binding": binding,
        }

    def read(self) -> Usage:
        """What is used now; never raises on an answer that is missing or cannot be true."""
        try:
            try:
                return self._read()
            except self._nvml.NVMLError as error:
                if _code(error) != self._nvml.NVML_ERROR_UNINITIALIZED:
                    raise
                self._connect()  # another user of NVML in this process has shut it down
                return self._read()
        except self._nvml.NVMLError as error:
            return Usage(used_bytes=None, reason=_explain(self._nvml, error))

    def _read(self) -> Usage:
        if self._unified:
            return self._read_host()
        if self._version_2:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(
                self._handle, version=self._nvml.nvmlMemory_v2
            )
        else:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        used, free, total = memory.used, memory.free, memory.total
        reserved = getattr(memory, "reserved", None)
        if problem := _implausible(used, free, total, reserved or 0):
            return Usage(used_bytes=None, reason=problem)
        own, reason = self._process_bytes()
        return Usage(
            used_bytes=int(used),
            free_bytes=int(free),
            total_bytes=int(total),
            reserved_bytes=None if reserved is None else int(reserved),
            process_bytes=own,
            reason=reason,
        )

    def _read_host(self) -> Usage:
        host = host_memory()
        if host is None:
            return Usage(used_bytes=None, reason=f"{_UNIFIED}, and the host does not tell its own")
        total, available = host
        own, reason = self._process_bytes()
        return Usage(
            used_bytes=total - available,
            free_bytes=available,
            total_bytes=total,
            process_bytes=own,
            reason="; ".join(filter(None, (f"{_UNIFIED}: the host's memory was read", reason))),
        )

    @property
    def uuid(self) -> str:
        """The device's UUID, without prefix."""
        return self._uuid

    @property
    def is_unified(self) -> bool:
        """Whether CPU and GPU share their memory."""
        return self._unified

    def name(self) -> str:
        """The card's name, empty where the driver does not tell."""
        with suppress(self._nvml.NVMLError):
            return _text(self._nvml.nvmlDeviceGetName(self._handle))
        return ""

    def process_ids(self) -> tuple[int, ...]:
        """The processes with a CUDA context on this device, by the driver's process ids.

        Raises:
            ProfilerUnavailable: the driver does not tell.
        """
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError as error:
            raise ProfilerUnavailable(_explain(self._nvml, error)) from None
        return tuple(int(process.pid) for process in running)

    def by_process(self) -> dict[int, int]:
        """Bytes of each process that the driver tells of, by its process id."""
        with suppress(self._nvml.NVMLError):
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            return {
                int(process.pid): int(process.usedGpuMemory)
                for process in running
                if process.usedGpuMemory is not None and 0 <= process.usedGpuMemory < _NOT_AVAILABLE
            }
        return {}

    def _process_bytes(self) -> tuple[int | None, str | None]:
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError as error:
            if _code(error) == self._nvml.NVML_ERROR_UNINITIALIZED:
                raise
            return None, f"bytes of the process: {error}"
        for process in processes:
            if process.pid == self._pid:
                size = process.usedGpuMemory
                if size is None or not 0 <= size < _NOT_AVAILABLE:
                    return None, "bytes of the process: the driver does not tell"
                return int(size), None
        return None, (
            f"bytes of the process: {self._pid} is not among NVML's {len(processes)} process"
            " ids (no CUDA context yet, or another pid namespace)"
        )

    def close(self) -> None:
        """Shut the library down, once for the one time that it was opened here."""
        if self._open:
            self._open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


_UNIFIED = "CPU and GPU share memory, NVML has no used bytes"
_NOT_AVAILABLE = (1 << 64) - 1  # what the driver writes where it has no value


def _implausible(used: Any, free: Any, total: Any, reserved: int) -> str | None:
    """Why a memory record cannot be true, None where it can."""
    if not all(isinstance(size, int) for size in (used, free, total)):
        return "NVML has no used bytes for this device"
    text = f"used {used}, free {free}, total {total} bytes"
    if not (0 < total < _NOT_AVAILABLE and 0 <= used <= total and 0 <= free <= total):
        return f"NVML's record cannot be true: {text}"
    if abs(total - used - free - reserved) > total // 20:
        return f"NVML's record does not add up: {text}"
    return None


def _code(error: Exception) -> object:
    return getattr(error, "value", None)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _explain(nvml: Any, error: Exception) -> str:
    hints = {
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "reboot or reload the driver module",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver module",
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the driver's libnvidia-ml.so.1",
    }
    hint = hints.get(_code(error))
    return f"NVML answers `{error}`" + (f": {hint}" if hint else "")
