"""Measures with NVML: what the driver counts as used on the whole device, sampled over time."""

import ctypes
import importlib.metadata
import math
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from kvexp.contract import (
    Deployment,
    DeviceFacts,
    Engine,
    InvalidValue,
    Measurement,
    Part,
    Profile,
    Profiler,
    ProfilerUnavailable,
    Provenance,
    Stage,
    UnusableReading,
    Workload,
    WorkloadMeasurement,
    check_device,
    check_measurable,
    load_key,
)

__all__ = ["Nvml", "NvmlDevice", "NvmlMeasurement", "Sampler", "Usage"]


@dataclass
class Nvml(Profiler):
    """Real weights, a real forward, a real cache on one GPU, as NVML sees the device fill.

    It shows what a monitor beside the process would see, and checks `torch_allocator` from
    outside. The terms are read from the device's used bytes alone and sum to the peak over the
    CUDA context; torch's own counters are in the readings, to compare with.

    Known limitations:

    - NVML counts whole devices: a neighbour that grows or shrinks during the run is in the terms.
    - It sees what torch holds, not what torch uses: `weights` include the rest of the allocator's
      segments and the kernels that were loaded to fill them, `activation` includes what the
      allocator cached, and the BLAS workspace that stays is in `non_torch`. For the engines'
      definitions use `torch_allocator`.
    - Between two samples a peak can pass unseen. One sample is always taken while torch still
      caches the peak's memory, so only memory that was given back within the forward is missed.
    - The bytes of the own process are null in containers that hide process ids, and where the
      driver does not tell (WSL, display drivers).
    - Cards that share memory with the CPU have no used bytes of their own: the run ends there.
    """

    interval_s: float = 0.01

    isolated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval_s) and self.interval_s > 0):
            raise InvalidValue(
                f"profiler.interval_s must be more than 0 seconds, got {self.interval_s}"
            )

    def check(self) -> None:
        """Do nothing where NVML, torch, transformers and a visible GPU are there.

        Raises:
            ProfilerUnavailable: one of them is missing.
        """
        check_device(("pynvml", "torch", "transformers"))
        try:
            ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            raise ProfilerUnavailable(
                "the driver's NVML library libnvidia-ml.so.1 cannot be loaded"
                " (a container needs the driver capability `utility`)"
            ) from None

    def load_key(self, deployment: Deployment, engine: Engine) -> str | None:
        """See `Profiler.load_key`."""
        return load_key(f"nvml every {self.interval_s} s", deployment, engine)

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """A measurement on the first visible GPU.

        Raises:
            InvalidValue: the deployment is not of the kind that can be measured.
        """
        check_measurable("nvml", deployment)
        return NvmlMeasurement(deployment, engine, Workload(deployment), self.interval_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """One answer of NVML; what it did not answer is null, and `reason` says why."""

    used_bytes: int | None
    free_bytes: int | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    reason: str | None = None


class NvmlDevice:
    """One device of NVML, found by the UUID that CUDA gives it: never by an index.

    CUDA and NVML count devices in different orders, and CUDA_VISIBLE_DEVICES changes one of them.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        """Open the library and the device.

        Raises:
            ProfilerUnavailable: NVML does not answer, or does not know the device.
        """
        self._nvml = nvml
        self._uuid = uuid
        self._open = False
        try:
            self._connect()
            self._version_2 = self._answers_version_2()
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
            "memory_info": "v2" if self._version_2 else "v1",
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
        own, reason = self._own_process_bytes()
        return Usage(
            used_bytes=int(used),
            free_bytes=int(free),
            total_bytes=int(total),
            reserved_bytes=None if reserved is None else int(reserved),
            process_bytes=own,
            reason=reason,
        )

    def _own_process_bytes(self) -> tuple[int | None, str | None]:
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError as error:
            if _code(error) == self._nvml.NVML_ERROR_UNINITIALIZED:
                raise
            return None, f"bytes of the own process: {error}"
        for process in processes:
            if process.pid == os.getpid():
                size = process.usedGpuMemory
                if size is None or not 0 <= size < _NOT_AVAILABLE:
                    return None, "bytes of the own process: the driver does not tell"
                return int(size), None
        return None, (
            f"bytes of the own process: {os.getpid()} is not among NVML's {len(processes)} process"
            " ids (no CUDA context yet, or another pid namespace)"
        )

    def close(self) -> None:
        """Shut the library down, once for the one time that it was opened here."""
        if self._open:
            self._open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


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


class Sampler:
    """Reads a device in the background until stopped; keeps the peak and what went wrong."""

    def __init__(self, read: Callable[[], Usage], interval_s: float) -> None:
        self.interval_s = interval_s
        self.num_samples = 0
        self.num_discarded = 0
        self.peak_used_bytes: int | None = None
        self.peak_process_bytes: int | None = None
        self.reason: str | None = None
        self._read = read
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvexp-nvml", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def take(self) -> None:
        """Take one sample now; whatever goes wrong is counted, never raised."""
        try:
            usage = self._read()
        except Exception as error:  # a monitor must not end what it watches
            usage = Usage(used_bytes=None, reason=f"{type(error).__name__}: {error}")
        with self._lock:
            if usage.used_bytes is None:
                self.num_discarded += 1
                self.reason = self.reason or usage.reason
                return
            self.num_samples += 1
            self.peak_used_bytes = max(self.peak_used_bytes or 0, usage.used_bytes)
            if usage.process_bytes is not None:
                self.peak_process_bytes = max(self.peak_process_bytes or 0, usage.process_bytes)

    def stop(self) -> None:
        """End the thread; safe to call at any time and more than once."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def as_dict(self) -> dict[str, Any]:
        """What was seen, as plain data."""
        return {
            "interval_s": self.interval_s,
            "num_samples": self.num_samples,
            "num_discarded": self.num_discarded,
            "peak_used_bytes": self.peak_used_bytes,
            "peak_process_bytes": self.peak_process_bytes,
            "reason": self.reason,
        }

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.take()


class NvmlMeasurement(WorkloadMeasurement):
    """The used bytes of the device, before the context, after each stage, and at the peak."""

    def __init__(
        self,
        deployment: Deployment,
        engine: Engine,
        workload: Workload,
        interval_s: float,
        nvml: Any = None,
    ) -> None:
        super().__init__(deployment, engine, workload)
        self.usage: dict[str, Usage] = {}
        self._interval_s = interval_s
        self._nvml = nvml
        self._device: NvmlDevice | None = None
        self._nvml_described: Mapping[str, Any] = {}
        self._sampler: Sampler | None = None

    def start(self) -> DeviceFacts | None:
        """Find the device in NVML, read it before and after the CUDA context exists."""
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        self._device = NvmlDevice(self._nvml, self.workload.uuid())
        self._nvml_described = self._device.describe()
        self.usage["idle"] = self._device.read()
        facts = super().start()
        self._used("idle")
        self._used(Stage.start.value)
        return facts

    def warmup(self) -> tuple[Profile, ...]:
        """Run the largest prefill while a thread samples the device."""
        assert self._device is not None
        self._sampler = Sampler(self._device.read, self._interval_s)
        self._sampler.start()
        try:
            return super().warmup()
        finally:
            self._sampler.stop()

    def _at_peak(self) -> None:
        assert self._sampler is not None
        self._sampler.take()
        self._sampler.stop()

    def _record(self, stage: Stage) -> None:
        super()._record(stage)
        if self._device is not None:
            self.usage[stage.value] = self._device.read()

    def profile(self) -> Profile:
        """Terms that sum to the peak over the context: each byte is in one of them."""
        assert self._sampler is not None
        start, load, after = (
            self._used(stage.value) for stage in (Stage.start, Stage.load, Stage.warmup)
        )
        sampled = self._sampler.as_dict()
        if sampled["peak_used_bytes"] is None:
            raise UnusableReading(
                f"NVML gave no usable sample in {sampled['num_discarded']} during the warm-up:"
                f" {sampled['reason']}"
            )
        peak = max(sampled["peak_used_bytes"], load, after)
        missed = self._torch_peak() - (peak - after)
        weights = self._require_weights("NVML used bytes", load - start)
        return Profile(
            weights=_part(
                "weights",
                weights,
                "growth of NVML used bytes while loading random weights, with the allocator's"
                " unused rest and the kernels that filled them",
            ),
            activation=_part(
                "activation",
                peak - after,
                "NVML peak used bytes over what stayed after the warm-up: a lower bound of cached"
                f" memory, {sampled['num_samples']} samples every {self._interval_s:g} s,"
                f" {sampled['num_discarded']} discarded"
                + (f"; {missed} bytes short of torch's reserved peak" if missed > 0 else ""),
            ),
            non_torch=self._non_torch(after - load, start - self._used("idle")),
            cudagraph=_part("cudagraph", 0, "no CUDA graph was captured in this run"),
        )

    def _torch_peak(self) -> int:
        """What torch reserved at most and gave back: the least that NVML should have seen."""
        counters = self.counters[Stage.warmup]
        return counters.peak_reserved_bytes - counters.reserved_bytes

    def _non_torch(self, grown: int, context: int) -> Part:
        reason = "what stayed in use after the warm-up beyond the weights, by NVML used bytes"
        if self.engine.charges_context:
            grown += context
            reason += f", and {context} bytes of CUDA context"
        if grown < 0:
            reason += "; negative: another process gave memory back meanwhile"
        return _part("non_torch", grown, reason)

    def _used(self, moment: str) -> int:
        usage = self.usage[moment]
        if usage.used_bytes is None:
            raise UnusableReading(f"NVML used bytes at {moment} are unavailable: {usage.reason}")
        return usage.used_bytes

    def readings(self) -> Mapping[str, Any]:
        """NVML's answers by stage under `nvml`, torch's counters as in `torch_allocator`."""
        nvml: dict[str, Any] = {
            **self._nvml_described,
            **{moment: asdict(usage) for moment, usage in self.usage.items()},
        }
        if self._sampler is not None:
            nvml["sampler"] = self._sampler.as_dict()
        return {**super().readings(), "nvml": nvml}

    def close(self) -> None:
        """End the sampler, give the device's memory back, leave NVML."""
        if self._sampler is not None:
            self._sampler.stop()
        try:
            super().close()
        finally:
            if self._device is not None:
                self._device.close()


def _part(name: str, size_bytes: int, reason: str) -> Part:
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.measured, reason=reason)
