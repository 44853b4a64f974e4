"""Measures with the counters of torch's caching allocator and the CUDA driver."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvexp.contract import (
    Deployment,
    Engine,
    ForwardOptions,
    InvalidValue,
    Measurement,
    Part,
    Profile,
    Profiler,
    Provenance,
    Recorder,
    Stage,
    Workload,
    WorkloadMeasurement,
    check_captures,
    check_device,
    check_measurable,
    import_libraries,
    load_key,
    on_ranks,
)

__all__ = ["AllocatorMeasurement", "TorchAllocator"]


@dataclass
class TorchAllocator(ForwardOptions, Profiler):
    """Real weights, a real forward, a real cache on the GPU, read from torch's own counters.

    The options of the forward are those of `ForwardOptions`. `snapshot`: attribute the blocks at
    the peak to modules and keep a file that PyTorch's memory viewer opens; such a point loads for
    itself. `graphs`: capture the engine's CUDA graphs after the cache is allocated.

    Known limitations:

    - The forward is that of transformers, not the engine's: for dense models it needs up to about
      a tenth more memory. So are the graphs: a step of one token a prompt without its past.
    - Logits and sampling cover the prompts of the largest prefill, not `max_num_seqs` rows; give
      `batch_size` for more.
    - Unquantised weights; ranks of tensor parallelism alone, on one host.
    """

    sampler: str = "random"
    snapshot: bool = False
    graphs: bool = False

    isolated: ClassVar[bool] = True

    def check(self) -> None:
        """Do nothing where torch, transformers and a visible GPU are there.

        Raises:
            ProfilerUnavailable: one of them is missing.
        """
        check_device()

    def prepare(self) -> None:
        """See `Profiler.prepare`."""
        import_libraries()

    def load_key(self, deployment: Deployment, engine: Engine) -> str | None:
        """See `Profiler.load_key`."""
        if self.snapshot:
            return None
        name = f"torch_allocator graphs={self.graphs}"
        return load_key(name, deployment, engine, self.forward(deployment))

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """A measurement on the first visible GPU, or one on as many as there are ranks.

        Raises:
            InvalidValue: the deployment is not of the kind that can be measured.
        """
        check_measurable("torch_allocator", deployment)
        forward = self.forward(deployment)
        if self.snapshot and forward.warmup in ("none", "no_reset"):
            raise InvalidValue(
                "profiler.snapshot needs a warm-up of its own peak,"
                f" got profiler.warmup={forward.warmup}"
            )
        if self.snapshot and deployment.tp > 1:
            raise InvalidValue(f"profiler.snapshot shows one GPU, got tp={deployment.tp}")
        if self.graphs:
            check_captures(deployment, engine)
        return on_ranks(partial(self._measurement, engine), deployment, forward)

    def _measurement(self, engine: Engine, workload: Workload) -> Measurement:
        return AllocatorMeasurement(
            workload.deployment, engine, workload, graphs=self.graphs, snapshot=self.snapshot
        )


class AllocatorMeasurement(WorkloadMeasurement):
    """Reads what tensors take from torch's allocator, all else from the driver."""

    def __init__(
        self,
        deployment: Deployment,
        engine: Engine,
        workload: Workload,
        *,
        graphs: bool = False,
        snapshot: bool = False,
        nvml: Any = None,
    ) -> None:
        super().__init__(deployment, engine, workload, graphs=graphs, nvml=nvml)
        self._recorder = Recorder(workload.device) if snapshot else None
        self._snapshot: Path | None = None

    def _warm_up(self) -> None:
        if self._recorder is None:
            super()._warm_up()
            return
        self.workload.warmup(self._at_peak, self._recorder)
        self._snapshot = Path(tempfile.mkdtemp(prefix="kvexp-")) / "memory_snapshot.pickle"
        self._recorder.write(self._snapshot)

    def readings(self) -> Mapping[str, Any]:
        """Counters, and the blocks at the peak where they were asked for."""
        read = super().readings()
        if self._recorder is None or self._snapshot is None:
            return read
        return {
            **read,
            "at_peak": self._recorder.attribution().as_dict(),
            "files": [str(self._snapshot)],
        }

    def profile(self) -> Profile:
        """The terms as engines define them, each a difference of two counters."""
        weights = self._require_weights(
            "allocated_bytes", self._growth("allocated_bytes", Stage.start, Stage.load)
        )
        activation = (
            self.counters[Stage.warmup].peak_allocated_bytes
            - self.counters[Stage.load].allocated_bytes
        )
        shape = self.workload.shape
        reason = (
            "torch peak_allocated_bytes over what was allocated before, prefill of"
            f" {shape.num_seqs} x {shape.seq_len} tokens"
        )
        if mistake := self.workload.forward.mistake:
            reason = f"a mistake: {mistake}; {reason}"
        return Profile(
            weights=self._part(
                "weights",
                weights,
                f"growth of torch allocated_bytes while loading {self._loading()}",
            ),
            activation=self._part("activation", activation, reason),
            non_torch=self._non_torch(),
            cudagraph=self._part("cudagraph", 0, self._graph_reason()),
        )

    def _non_torch(self) -> Part:
        after = self.counters[Stage.warmup]
        if self.engine.charges_context:
            # Such an engine computes total - free - allocated: what the allocator holds without
            # using it is charged as well.
            others = self.deployment.used_by_others_bytes
            size = after.used_bytes - after.allocated_bytes - others
            reason = "driver total - free - torch allocated_bytes after the warm-up"
            if others:
                reason += f", less {others} bytes of other processes"
            if size < 0:
                reason += "; negative: less is in use than the other processes were said to take"
        else:
            size = self._growth("non_torch_bytes", Stage.start, Stage.warmup)
            reason = (
                "growth of driver total - free - torch reserved_bytes"
                " from the CUDA context to after the warm-up"
            )
            if size < 0:
                reason += "; negative: another process gave memory back meanwhile"
        return self._part("non_torch", size, reason)

    def _part(self, name: str, size_bytes: int, reason: str) -> Part:
        backend = self._described.get("allocator", {}).get("backend", "native")
        if backend != "native":
            reason += f" (allocator backend {backend}: its counters can miss memory of pools)"
        return Part(name=name, size_bytes=size_bytes, provenance=Provenance.measured, reason=reason)
