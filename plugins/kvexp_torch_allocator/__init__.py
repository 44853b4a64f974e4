"""Measures with the counters of torch's caching allocator and the CUDA driver."""

from dataclasses import dataclass
from typing import ClassVar

from kvexp.contract import (
    Deployment,
    Engine,
    Measurement,
    Part,
    Profile,
    Profiler,
    Provenance,
    Stage,
    Workload,
    WorkloadMeasurement,
    check_device,
    check_measurable,
    load_key,
)

__all__ = ["AllocatorMeasurement", "TorchAllocator"]


@dataclass
class TorchAllocator(Profiler):
    """Real weights, a real forward, a real cache on one GPU, read from torch's own counters.

    Known limitations:

    - The forward is that of transformers, not the engine's: for dense models it needs up to about
      a tenth more memory. No CUDA graph is captured.
    - Logits and sampling cover the prompts of the largest prefill, not `max_num_seqs` rows.
    - One GPU, dense models, unquantised weights.
    """

    isolated: ClassVar[bool] = True

    def check(self) -> None:
        """Do nothing where torch, transformers and a visible GPU are there.

        Raises:
            ProfilerUnavailable: one of them is missing.
        """
        check_device()

    def load_key(self, deployment: Deployment, engine: Engine) -> str | None:
        """See `Profiler.load_key`."""
        return load_key("torch_allocator", deployment, engine)

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """A measurement on the first visible GPU.

        Raises:
            InvalidValue: the deployment is not of the kind that can be measured.
        """
        check_measurable("torch_allocator", deployment)
        return AllocatorMeasurement(deployment, engine, Workload(deployment))


class AllocatorMeasurement(WorkloadMeasurement):
    """Reads what tensors take from torch's allocator, all else from the driver."""

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
        return Profile(
            weights=self._part(
                "weights", weights, "growth of torch allocated_bytes while loading random weights"
            ),
            activation=self._part(
                "activation",
                activation,
                "torch peak_allocated_bytes over what was allocated before, prefill of"
                f" {shape.num_seqs} x {shape.seq_len} tokens",
            ),
            non_torch=self._non_torch(),
            cudagraph=self._part("cudagraph", 0, "no CUDA graph was captured in this run"),
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
        backend = self.readings().get("allocator", {}).get("backend", "native")
        if backend != "native":
            reason += f" (allocator backend {backend}: its counters can miss memory of pools)"
        return Part(name=name, size_bytes=size_bytes, provenance=Provenance.measured, reason=reason)
