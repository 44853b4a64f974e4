"""A workload on the device, as NVML sees the device fill."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvexp.contract import (
    Deployment,
    DeviceFacts,
    Engine,
    NvmlDevice,
    Part,
    Profile,
    ProfilerUnavailable,
    Provenance,
    Stage,
    UnusableReading,
    Workload,
    WorkloadMeasurement,
)
from kvexp_nvml.sampling import Sampler


class NvmlMeasurement(WorkloadMeasurement):
    """The used bytes of the device, before the context, after each stage, and at each peak."""

    def __init__(
        self,
        deployment: Deployment,
        engine: Engine,
        workload: Workload,
        interval_s: float,
        nvml: Any = None,
        *,
        graphs: bool = False,
    ) -> None:
        super().__init__(deployment, engine, workload, graphs=graphs, nvml=nvml)
        self.samplers: dict[Stage, Sampler] = {}
        self._interval_s = interval_s
        self._nvml_described: Mapping[str, Any] = {}

    def start(self) -> DeviceFacts | None:
        """Find the device in NVML, read it before and after the CUDA context exists.

        Raises:
            ProfilerUnavailable: NVML does not answer.
        """
        facts = super().start()
        assert self._device is not None
        self._nvml_described = self._device.describe()
        self._used("idle")
        self._used(Stage.start.value)
        return facts

    def _watched(self) -> NvmlDevice | None:
        device = super()._watched()
        if device is None:
            raise ProfilerUnavailable(self._nvml_reason)
        return device

    def _begin(self, stage: Stage) -> None:
        super()._begin(stage)
        assert self._device is not None
        self._end_samplers()
        self.samplers[stage] = Sampler(self._device.read, self._interval_s)
        self.samplers[stage].start()

    def _record(self, stage: Stage) -> None:
        if stage in self.samplers and stage is not Stage.warmup:  # that one had it at its peak
            self.samplers[stage].take()
        self._end_samplers()
        super()._record(stage)

    def _end_samplers(self) -> None:
        for sampler in self.samplers.values():
            sampler.stop()

    def _at_peak(self) -> None:
        self.samplers[Stage.warmup].take()

    def profile(self) -> Profile:
        """Terms that sum to the peak over the context: each byte is in one of them."""
        start, load, after = (
            self._used(stage.value) for stage in (Stage.start, Stage.load, Stage.warmup)
        )
        sampled = self.samplers[Stage.warmup].as_dict()
        if sampled["peak_used_bytes"] is None:
            raise UnusableReading(
                f"NVML gave no usable sample in {sampled['num_discarded']} during the warm-up:"
                f" {sampled['reason']}"
            )
        peak = max(sampled["peak_used_bytes"], load, after)
        missed = self._torch_peak() - (peak - after)
        weights = self._require_weights("NVML used bytes", load - start)
        mistake = self.workload.forward.mistake
        return Profile(
            weights=_part(
                "weights",
                weights,
                f"growth of NVML used bytes while loading {self._loading()}, with the allocator's"
                " unused rest and the kernels that filled them",
            ),
            activation=_part(
                "activation",
                peak - after,
                (f"a mistake: {mistake}; " if mistake else "")
                + "NVML peak used bytes over what stayed after the warm-up: a lower bound of cached"
                f" memory, {sampled['num_samples']} samples every {self._interval_s:g} s,"
                f" {sampled['num_discarded']} discarded"
                + (f"; {missed} bytes short of torch's reserved peak" if missed > 0 else ""),
            ),
            non_torch=self._non_torch(after - load, start - self._used("idle")),
            cudagraph=_part("cudagraph", 0, self._graph_reason()),
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
        if Stage.warmup in self.samplers:
            nvml["sampler"] = {
                **self.samplers[Stage.warmup].as_dict(),
                "stages": {stage.value: each.as_dict() for stage, each in self.samplers.items()},
            }
        return {**super().readings(), "nvml": nvml}

    def close(self) -> None:
        """End the sampler, give the device's memory back, leave NVML."""
        self._end_samplers()
        super().close()


def _part(name: str, size_bytes: int, reason: str) -> Part:
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.measured, reason=reason)
