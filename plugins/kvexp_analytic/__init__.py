"""The engine's own rules instead of a device: no torch, no GPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvexp.contract import (
    TERMS,
    CachePlan,
    Deployment,
    DeviceFacts,
    Engine,
    Measurement,
    Part,
    Profile,
    Profiler,
    Provenance,
    RankShape,
    parse_bytes_of,
)


@dataclass
class Analytic(Profiler):
    """Predicted terms; any of them may be given instead, in bytes of one rank.

    Known limitations: a term without a measurement for the card is assumed and says so.
    """

    weights_bytes: Any = None
    activation_bytes: Any = None
    non_torch_bytes: Any = None
    cudagraph_bytes: Any = None

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """See `Profiler.open`."""
        given = {
            term: parse_bytes_of(f"profiler.{term}_bytes", getattr(self, f"{term}_bytes"))
            for term in TERMS
            if getattr(self, f"{term}_bytes") is not None
        }
        return _Prediction(deployment, engine, given)


@dataclass
class _Prediction(Measurement):
    deployment: Deployment
    engine: Engine
    given: dict[str, int] = field(default_factory=dict)

    def start(self) -> DeviceFacts | None:
        """There is no device."""
        return None

    def load(self) -> None:
        """Nothing is loaded."""

    def warmup(self) -> tuple[Profile, ...]:
        """One prediction a rank, with the given terms in their place."""
        return tuple(self._profile(shape) for shape in self.engine.ranks(self.deployment))

    def allocate(self, plan: CachePlan) -> int | None:
        """Nothing is allocated."""
        return None

    def _profile(self, shape: RankShape) -> Profile:
        return Profile(
            weights=self._term("weights", self.engine.predict_weights, shape),
            activation=self._term("activation", self.engine.predict_activation, shape),
            non_torch=self._term("non_torch", self.engine.predict_non_torch, shape),
            cudagraph=self._term("cudagraph", self.engine.predict_cudagraph, shape),
        )

    def _term(
        self, name: str, predict: Callable[[Deployment, RankShape], Part], shape: RankShape
    ) -> Part:
        if name not in self.given:
            return predict(self.deployment, shape)
        return Part(
            name=name,
            size_bytes=self.given[name],
            provenance=Provenance.given,
            reason=f"profiler.{name}_bytes",
        )
