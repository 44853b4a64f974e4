"""One simulation as a pass through the pipeline's stages."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvexp.contract import (
    CachePlan,
    Deployment,
    DeviceFacts,
    Engine,
    InvalidValue,
    Measurement,
    Part,
    Profile,
    Provenance,
    RankShape,
    gib,
    simulate,
)
from kvexp_simulated.request import Request


class Simulation(Measurement):
    """Traces at `load`, replays at `warmup`; where it cannot, the engine's rules stand in."""

    def __init__(self, deployment: Deployment, engine: Engine, request: Request) -> None:
        self.deployment = deployment
        self.engine = engine
        self.request = request
        self.case = request.case(deployment)
        self._device: simulate.Device | None = None
        self._traces: list[simulate.Trace] = []
        self._worst_case = request.forward(deployment).worst
        self._worst_traces: list[simulate.Trace] = []
        self._cache_bytes = 0
        self._refusal: str | None = None
        self._readings: dict[str, Any] = {}

    def start(self) -> DeviceFacts | None:
        """There is no device."""
        return None

    def load(self) -> None:
        """Trace the forward or take it from the cache; keep the reason where that fails."""
        try:
            self._check()
            gpu = self.deployment.gpu
            self._device = self.request.device or simulate.find(gpu.name, gpu.compute_capability)
            self._traces = self._trace(self.case, self._device)
            self._worst_traces = self._trace(self._worst_case, self._device)
        except simulate.Untraceable as error:
            self._refusal = f"{self.deployment.model.model_type}: {error}"

    def warmup(self) -> tuple[Profile, ...]:
        """Replay the trace; one profile a rank.

        Raises:
            OutOfMemory: the model or its forward does not fit.
        """
        shapes = self.engine.ranks(self.deployment)
        if self._refusal is not None or self._device is None:
            self._readings = {"simulation": {"refused": self._refusal}}
            return tuple(self._by_rules(shape) for shape in shapes)
        forecast = self._replay(self._traces, self.case, self._device)
        self._readings = self._described(forecast, self._device)
        self._draw(forecast)
        return (self._profile(forecast, self._device, shapes[0]),)

    def allocate(self, plan: CachePlan) -> int | None:
        """Nothing is allocated; `verify` is told how much would be."""
        self._cache_bytes = plan.num_blocks_per_rank[0] * plan.block_bytes_per_rank[0]
        return None

    def verify(self) -> bool | None:
        """After a wrong warm-up: what the first full forward meets; nothing real is verified.

        Raises:
            OutOfMemory: the forward does not fit on top of the cache.
        """
        if self.request.options.warmup != "worst_case" and self._worst_traces and self._device:
            simulate.check_fits(
                self._worst_traces[0],
                self._worst_case.input_bytes,
                self._device,
                self.request.settings,
                self._limits(),
                self._cache_bytes,
            )
        return None

    def notes(self) -> tuple[str, ...]:
        """What the warm-up gets wrong, where it does."""
        mistake = self.request.forward(self.deployment).mistake
        return (f"profiler.warmup: {mistake}",) if mistake else ()

    def readings(self) -> Mapping[str, Any]:
        """Every figure of the simulation, or why there is none."""
        return self._readings

    def _trace(self, case: simulate.Case, device: simulate.Device) -> list[simulate.Trace]:
        subject = self.request.subject(self.deployment)
        repeat = self.request.repeat_layers
        return simulate.traces_of(subject, case, device, repeat_layers=repeat)

    def _replay(
        self, traces: list[simulate.Trace], case: simulate.Case, device: simulate.Device
    ) -> simulate.Forecast:
        return simulate.simulate(
            traces,
            case,
            device,
            self.request.settings,
            self._limits(),
            state_dict=self.request.loading == "state_dict",
        )

    def _draw(self, forecast: simulate.Forecast) -> None:
        """Write the files that were asked for."""
        if self.request.timeline is not None:
            simulate.draw_timeline(self._traces[0], forecast, Path(self.request.timeline))
        if self.request.snapshot is not None:
            simulate.write_snapshot(self._traces[0], Path(self.request.snapshot))

    def _check(self) -> None:
        deployment = self.deployment
        if deployment.num_ranks > 1:
            raise simulate.Untraceable(
                f"one GPU is simulated, got tp={deployment.tp} pp={deployment.pp}"
            )
        if deployment.has_extras:
            raise simulate.Untraceable("the model alone is simulated, without lora and speculative")
        if deployment.quantization is not None and self.request.config_path is None:
            raise simulate.Untraceable(
                f"unquantised weights are simulated, got {deployment.quantization.name}"
            )

    def _limits(self) -> simulate.Limits:
        device = self._device
        libraries = device.libraries - device.context if device is not None else 0
        return simulate.Limits(
            allowed_bytes=self.request.allowed_bytes,
            device_bytes=max(0, self.deployment.free_bytes - libraries),
        )

    def _described(self, forecast: simulate.Forecast, device: simulate.Device) -> dict[str, Any]:
        found = forecast.as_dict()
        return {
            "simulation": found,
            "case": asdict(self.case),
            "warmup": self.request.options.warmup,
            "device_profile": {
                "name": device.name,
                "measured": device.measured,
                "source": device.source,
                "versions": device.versions,
            },
            "attention": dict(self._traces[0].backends),
            "repeat_layers": self.request.repeat_layers,
            "operators": self._traces[0].num_operators,
            "driver": {
                "context_bytes": device.context,
                "outside_allocator_bytes": device.libraries,
                "used_low_bytes": device.libraries + forecast.reserved_low_bytes,
                "used_high_bytes": device.libraries + forecast.reserved_high_bytes,
            },
        }

    def _profile(
        self, forecast: simulate.Forecast, device: simulate.Device, shape: RankShape
    ) -> Profile:
        activation, reason = self._activation(forecast)
        missing = None
        if self.request.options.warmup != "worst_case":
            worst = self._replay(self._worst_traces, self._worst_case, device)
            missing = worst.first.activation_bytes - activation
            reason = f"{reason}; {_consequence(missing)}"
        part = Part(
            name="activation",
            size_bytes=activation,
            provenance=Provenance.simulated,
            reason="; ".join([reason, *self._doubts(forecast)]),
        )
        profile = Profile(
            weights=Part(
                name="weights",
                size_bytes=forecast.weights_bytes,
                provenance=Provenance.simulated,
                reason="transformers' tensors in the order of construction through the allocator",
            ),
            activation=part,
            non_torch=self.engine.predict_non_torch(self.deployment, shape),
            cudagraph=self.engine.predict_cudagraph(self.deployment, shape),
            warm_activation_bytes=forecast.warm.activation_bytes,
            allocated_peak_bytes=forecast.first.allocated_bytes,
            reserved_peak_low_bytes=forecast.reserved_low_bytes,
            reserved_peak_high_bytes=forecast.reserved_high_bytes,
            missing_activation_bytes=missing,
        )
        return replace(profile, differences=self._differences(profile, shape))

    def _activation(self, forecast: simulate.Forecast) -> tuple[int, str]:
        """The warm-up's answer, right or wrong, and what it is."""
        case, first = self.case, forecast.first
        forward = self.request.forward(self.deployment)
        if forward.warmup == "none":
            return 0, f"a mistake: {forward.mistake}"
        what = f"allocated peak of {case.batch} x {case.seq} tokens ({forecast.confidence})"
        if forward.mistake is not None:
            what = f"a mistake: {forward.mistake}; {what}"
        if forward.warmup == "no_reset":
            peak = max(forecast.load_peak_bytes, first.allocated_bytes)
            return peak - first.before_bytes, what
        return first.activation_bytes, what

    def _doubts(self, forecast: simulate.Forecast) -> list[str]:
        doubts = list(forecast.doubts)
        device, gpu = self._device, self.deployment.gpu
        if device is not None and not device.measured:
            doubts.append(f"{device.name} was not measured: {device.source}")
        elif device is not None and device.name != gpu.name:
            doubts.append(f"profiler.device is of {device.name}, the card is {gpu.name}")
        if forecast.confidence is simulate.Confidence.bounded:
            doubts.append(f"at least {forecast.activation_low_bytes} bytes")
        return doubts

    def _differences(self, profile: Profile, shape: RankShape) -> tuple[Part, ...]:
        """The engine's own weights and forward, by its rules, less transformers'."""
        weights = self._difference(
            "engine_weights_delta", self.engine.predict_weights, profile.weights_bytes, shape
        )
        is_own = self.request.is_engines_own(self.deployment)
        if not is_own or profile.missing_activation_bytes:
            forward = _part("engine_delta", 0, Provenance.assumed, _NOT_ENGINES_OWN)
        else:
            forward = self._difference(
                "engine_delta", self.engine.predict_activation, profile.activation_bytes, shape
            )
        return weights, forward

    def _difference(
        self,
        name: str,
        predict: Callable[[Deployment, RankShape], Part],
        simulated_bytes: int,
        shape: RankShape,
    ) -> Part:
        try:
            rule = predict(self.deployment, shape)
        except InvalidValue as problem:
            return _part(
                name, 0, Provenance.assumed, f"the engine's is taken to be alike: {problem}"
            )
        return _part(
            name,
            rule.size_bytes - simulated_bytes,
            rule.provenance,
            f"the engine's own, {rule.size_bytes:,} bytes ({rule.reason}), less the simulated",
        )

    def _by_rules(self, shape: RankShape) -> Profile:
        """The engine's rules alone, those that stand in labelled as such."""
        return Profile(
            weights=self._instead(self.engine.predict_weights, shape),
            activation=self._instead(self.engine.predict_activation, shape),
            non_torch=self.engine.predict_non_torch(self.deployment, shape),
            cudagraph=self.engine.predict_cudagraph(self.deployment, shape),
        )

    def _instead(self, predict: Callable[[Deployment, RankShape], Part], shape: RankShape) -> Part:
        part = predict(self.deployment, shape)
        reason = f"not simulated ({self._refusal}), by the engine's rule: {part.reason}"
        return replace(part, reason=reason)


def _consequence(missing_bytes: int) -> str:
    """What a wrong warm-up leads to."""
    if missing_bytes > 0:
        return (
            f"the largest forward takes {gib(missing_bytes)} more than is reserved:"
            " out of memory later, unless what util leaves holds it"
        )
    if missing_bytes < 0:
        return f"{gib(-missing_bytes)} more than the forward takes is reserved: too few blocks"
    return "without harm here: loading takes no more than the forward"


_NOT_ENGINES_OWN = "this warm-up is not the engine's own: nothing is set right"


def _part(name: str, size_bytes: int, provenance: Provenance, reason: str) -> Part:
    return Part(name=name, size_bytes=size_bytes, provenance=provenance, reason=reason)
