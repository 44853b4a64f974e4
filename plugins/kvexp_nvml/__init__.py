"""Measures with NVML: what the driver counts as used on the whole device, sampled over time."""

import ctypes
import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvexp.contract import (
    Deployment,
    Engine,
    ForwardOptions,
    InvalidValue,
    Measurement,
    NvmlDevice,
    Profiler,
    ProfilerUnavailable,
    Usage,
    Workload,
    check_captures,
    check_device,
    check_measurable,
    import_libraries,
    load_key,
    on_ranks,
)
from kvexp_nvml.measuring import NvmlMeasurement
from kvexp_nvml.sampling import Sampler
from kvexp_nvml.watching import Watch

__all__ = ["Nvml", "NvmlDevice", "NvmlMeasurement", "Sampler", "Usage", "Watch"]


@dataclass
class Nvml(ForwardOptions, Profiler):
    """Real weights, a real forward, a real cache on one GPU, as NVML sees the device fill.

    It shows what a monitor beside the process would see, and checks `torch_allocator` from
    outside. The options of the forward are those of `ForwardOptions`. `interval_s`: how often the
    device is read. `graphs`: capture the engine's CUDA graphs after the cache is allocated. `pid`:
    run nothing and watch this process instead, whatever engine it is, for `seconds` or until it
    ends; the terms are then the engine's rules, and the readings hold what it really takes.

    The terms are read from the device's used bytes alone and sum to the peak over the
    CUDA context; torch's own counters are in the readings, to compare with.

    Known limitations:

    - NVML counts whole devices: a neighbour that grows or shrinks during the run is in the terms,
      and the point is called contaminated.
    - It sees what torch holds, not what torch uses: `weights` include the rest of the allocator's
      segments and the kernels that were loaded to fill them, `activation` includes what the
      allocator cached, and the BLAS workspace that stays is in `non_torch`. For the engines'
      definitions use `torch_allocator`.
    - Between two samples a peak can pass unseen. One sample is always taken while torch still
      caches the peak's memory, so only memory that was given back within the forward is missed.
    - The bytes of the own process are null in containers that hide process ids, and where the
      driver does not tell (WSL, display drivers).
    - Cards that share memory with the CPU have no used bytes of their own: the host's are read.
    """

    sampler: str = "random"
    interval_s: float = 0.01
    graphs: bool = False
    pid: int | None = None
    seconds: float | None = None

    isolated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval_s) and self.interval_s > 0):
            raise InvalidValue(
                f"profiler.interval_s must be more than 0 seconds, got {self.interval_s}"
            )

        if self.seconds is not None and self.pid is None:
            raise InvalidValue("profiler.seconds needs profiler.pid, the process to watch")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InvalidValue(f"profiler.seconds must be more than 0, got {self.seconds}")
        if self.pid is not None and self.pid < 1:
            raise InvalidValue(f"profiler.pid must be a process id, got {self.pid}")

    def check(self) -> None:
        """Do nothing where NVML, a visible GPU and what the options need are there.

        Raises:
            ProfilerUnavailable: one of them is missing.
        """
        check_device(("pynvml",) if self.pid is not None else ("pynvml", "torch", "transformers"))
        try:
            ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            raise ProfilerUnavailable(
                "the driver's NVML library libnvidia-ml.so.1 cannot be loaded"
                " (a container needs the driver capability `utility`)"
            ) from None

    def prepare(self) -> None:
        """See `Profiler.prepare`."""
        if self.pid is None:
            import_libraries()

    def load_key(self, deployment: Deployment, engine: Engine) -> str | None:
        """See `Profiler.load_key`."""
        if self.pid is not None:
            return None
        name = f"nvml every {self.interval_s} s graphs={self.graphs}"
        return load_key(name, deployment, engine, self.forward(deployment))

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """A measurement on the first visible GPU, or one on as many as there are ranks.

        Raises:
            InvalidValue: the deployment is not of the kind that can be measured.
        """
        if self.pid is not None:
            return Watch(deployment, engine, self.pid, self.seconds, self.interval_s)
        check_measurable("nvml", deployment)
        forward = self.forward(deployment)
        if self.graphs:
            check_captures(deployment, engine)
        return on_ranks(partial(self._measurement, engine), deployment, forward)

    def _measurement(self, engine: Engine, workload: Workload) -> Measurement:
        return NvmlMeasurement(
            workload.deployment, engine, workload, self.interval_s, graphs=self.graphs
        )
