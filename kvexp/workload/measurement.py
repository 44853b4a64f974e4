"""A measurement on a workload, stage by stage."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from kvexp.deployment import Deployment
from kvexp.engine import CachePlan, Engine
from kvexp.errors import InvalidValue, ProfilerUnavailable
from kvexp.nvml import NvmlDevice, Usage, open_device
from kvexp.profiler import DeviceFacts, Measurement
from kvexp.results import Profile, Stage
from kvexp.units import gib
from kvexp.workload.accounting import Known, accounting, neighbours
from kvexp.workload.architectures import buildable, can_build
from kvexp.workload.counters import Counters, UnusableReading
from kvexp.workload.forward import Forward, forward_key
from kvexp.workload.machine import may_spill
from kvexp.workload.running import Workload


def load_key(profiler: str, deployment: Deployment, engine: Engine, forward: Forward) -> str:
    """What a load and a warm-up depend on: model, dtype, shape of the forward, kind of engine."""
    facts = (profiler, deployment.engine, deployment.engine_version, engine.charges_context)
    card = (deployment.gpu.name, deployment.gpu.emulate, deployment.tp)
    return repr((facts, deployment.model, deployment.dtype, forward_key(forward), card))


def check_measurable(profiler: str, deployment: Deployment) -> None:
    """Do nothing where `Workload`s can be this deployment.

    Raises:
        InvalidValue: they cannot; the message says why.
    """
    if deployment.pp > 1:
        raise InvalidValue(f"{profiler} measures tensor-parallel ranks, got pp={deployment.pp}")
    if deployment.has_extras:
        raise InvalidValue(f"{profiler} measures the model alone, without lora and speculative")
    if deployment.quantization is not None:
        raise InvalidValue(
            f"{profiler} measures unquantised weights,"
            f" got quantization={deployment.quantization.name}"
        )
    if not can_build(deployment.model):
        raise InvalidValue(
            f"{profiler} can build {', '.join(buildable())} models, and any that"
            f" model.path has a config.json of, got model.model_type={deployment.model.model_type}"
        )


def check_captures(deployment: Deployment, engine: Engine) -> None:
    """Do nothing where the engine captures CUDA graphs of known sizes.

    Raises:
        InvalidValue: it does not.
    """
    if not engine.graph_batch_sizes(deployment):
        raise InvalidValue(
            f"profiler.graphs: {deployment.engine} captures no graph that is known here"
            f" (enforce_eager={str(deployment.enforce_eager).lower()})"
        )


class WorkloadMeasurement(Measurement):
    """Takes a `Workload` through the stages and keeps the counters around each of them.

    A subclass says what the counters mean (`profile`), and may read more (`_record`, `_at_peak`).
    NVML, where it is there, tells this process from its neighbours.
    """

    def __init__(
        self,
        deployment: Deployment,
        engine: Engine,
        workload: Workload,
        *,
        graphs: bool = False,
        nvml: Any = None,
    ) -> None:
        self.deployment = deployment
        self.engine = engine
        self.workload = workload
        self.counters: dict[Stage, Counters] = {}
        self.free_before: dict[Stage, int] = {}
        self.usage: dict[str, Usage] = {}
        self.parameter_bytes: int | None = None
        self._captures = graphs
        self._kv_cache_bytes = 0
        self._described: Mapping[str, Any] = {}
        self._nvml = nvml
        self._nvml_reason: str | None = None
        self._device: NvmlDevice | None = None

    @abstractmethod
    def profile(self) -> Profile:
        """The memory terms, from what was read up to the warm-up."""

    def start(self) -> DeviceFacts | None:
        """Create the CUDA context and read the baseline."""
        self._device = self._watched()
        if self._device is not None:
            self.usage["idle"] = self._device.read()
        facts = self.workload.start()
        self._described = self.workload.describe()
        self._record(Stage.start)
        return facts

    def _watched(self) -> NvmlDevice | None:
        """The device as NVML knows it; None, with the reason kept, where NVML is of no help."""
        try:
            if self._nvml is not None:
                return NvmlDevice(self._nvml, self.workload.uuid())
            return open_device(self.workload.uuid())
        except ProfilerUnavailable as reason:
            self._nvml_reason = str(reason)
            return None

    def load(self) -> None:
        """Build the model on the device."""
        self._begin(Stage.load)
        self.parameter_bytes = self.workload.load()
        self._record(Stage.load)

    def warmup(self) -> tuple[Profile, ...]:
        """Run the warm-up's forward."""
        self._begin(Stage.warmup)
        self._warm_up()
        self._record(Stage.warmup)
        self._described = self.workload.describe()
        return (self.profile(),)

    def _warm_up(self) -> None:
        self.workload.warmup(self._at_peak)

    def allocate(self, plan: CachePlan) -> int | None:
        """Allocate the planned cache for real, in the engine's tensors.

        Raises:
            UnusableReading: what was allocated is not what was planned.
        """
        rank = self.workload.rank.index if self.workload.rank is not None else 0
        self._begin(Stage.allocate)
        allocated = self.workload.allocate(self.engine.cache_tensor_bytes(plan, rank))
        self._record(Stage.allocate)
        planned = plan.num_blocks * plan.block_bytes_per_rank[rank]
        if allocated != planned:
            raise UnusableReading(
                f"the KV cache takes {allocated} bytes, but {plan.num_blocks} blocks of"
                f" {plan.block_bytes_per_rank[rank]} bytes were planned ({planned})"
            )
        grown = self._growth("allocated_bytes", Stage.warmup, Stage.allocate)
        if grown < allocated:
            raise UnusableReading(
                f"counter allocated_bytes grew by {grown} for a KV cache of {allocated} bytes"
            )
        self._kv_cache_bytes = allocated
        return allocated

    def verify(self) -> bool | None:
        """Run the largest prefill again, with the cache in place."""
        self._begin(Stage.verify)
        self.workload.verify()
        self._record(Stage.verify)
        return True

    @property
    def captures(self) -> bool:
        """Whether graphs were asked for."""
        return self._captures

    def capture(self) -> None:
        """Capture the engine's decode steps, as it does after the cache is allocated."""
        self._begin(Stage.graphs)
        self.workload.capture(self.engine.graph_batch_sizes(self.deployment))
        self._record(Stage.graphs)

    def _graphs_bytes(self) -> int:
        if Stage.graphs not in self.counters:
            return 0
        before = self.counters[Stage.verify].used_bytes
        return self.counters[Stage.graphs].used_bytes - before

    def release(self) -> None:
        """Drop the cache; model and counters of the warm-up stay."""
        self.workload.drop_cache()
        self._kv_cache_bytes = 0
        for stage in (Stage.allocate, Stage.verify, Stage.graphs):
            self.counters.pop(stage, None)
            self.free_before.pop(stage, None)
            self.usage.pop(stage.value, None)

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result must know."""
        found = []
        if mistake := self.workload.forward.mistake:
            found.append(f"profiler.warmup: {mistake}")
        moe = self.deployment.model.moe
        if moe is not None and moe.format is not None:
            found.append(
                f"measured with experts in {self.deployment.dtype.name}, the checkpoint has"
                f" {moe.format}"
            )
        if may_spill():
            found.append(
                "the driver may spill into host memory here: a cache that was allocated need not"
                " fit on the card"
            )
        if (seen := self._neighbours())["contaminated"]:
            found.append(
                f"contaminated: memory of other processes moved by {gib(seen['drift_bytes'])}"
                " during the measurement"
            )
        return tuple(found)

    def readings(self) -> Mapping[str, Any]:
        """The counters around each stage, and what was measured on what."""
        read = {stage.value: counters.as_dict() for stage, counters in self.counters.items()}
        for stage, free in self.free_before.items():
            if stage.value in read:
                read[stage.value]["free_before_bytes"] = free
        known = Known(
            others_bytes=self.usage["idle"].used_bytes if "idle" in self.usage else None,
            parameter_bytes=self.parameter_bytes,
            kv_cache_bytes=self._kv_cache_bytes,
            graphs_bytes=self._graphs_bytes(),
        )
        return {
            **read,
            **self._described,
            "timings": dict(self.workload.timings),
            "parameter_bytes": self.parameter_bytes,
            "charges_context": self.engine.charges_context,
            "accounting": accounting(self.counters, known),
            "neighbours": self._neighbours(),
            **({"graphs_bytes": self._graphs_bytes()} if Stage.graphs in self.counters else {}),
        }

    def _neighbours(self) -> dict[str, Any]:
        moments = {name: use.others_bytes for name, use in self.usage.items() if name != "idle"}
        missing = [use.reason for name, use in self.usage.items() if name != "idle" and use.reason]
        reason = self._nvml_reason or (missing[0] if missing else None)
        return neighbours(moments, reason)

    def close(self) -> None:
        """Give the device's memory back, leave NVML."""
        try:
            self.workload.close()
        finally:
            if self._device is not None:
                self._device.close()

    def _begin(self, stage: Stage) -> None:
        self.free_before[stage] = self.workload.free_bytes()

    def _record(self, stage: Stage) -> None:
        self.counters[stage] = self.workload.read()
        if self._device is not None:
            self.usage[stage.value] = self._device.read()

    def _at_peak(self) -> None:
        return

    def _loading(self) -> str:
        """What was loaded, in words."""
        source = self._described.get("weights_from", "random")
        return "random weights" if source == "random" else f"the weights of {source}"

    def _graph_reason(self) -> str:
        if self._captures:
            return "CUDA graphs are captured after the cache, they are in none of the terms"
        return "no CUDA graph was captured in this run"

    def _growth(self, name: str, before: Stage, after: Stage) -> int:
        return int(getattr(self.counters[after], name) - getattr(self.counters[before], name))

    def _require_weights(self, counter: str, grown_bytes: int) -> int:
        """`grown_bytes`, which a counter of this device cannot find less than the weights."""
        if self.parameter_bytes is not None and grown_bytes < self.parameter_bytes:
            raise UnusableReading(
                f"counter {counter} grew by {grown_bytes} while {self.parameter_bytes} bytes of"
                " weights were loaded: it counts another device, or another process gave memory"
                " back meanwhile"
            )
        return grown_bytes
