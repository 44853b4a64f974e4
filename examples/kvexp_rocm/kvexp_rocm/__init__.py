"""An example plugin: the engine's rules, with what an idle AMD card holds added outside torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvexp.contract import (
    CachePlan,
    Deployment,
    DeviceFacts,
    Engine,
    Measurement,
    Part,
    Profile,
    Profiler,
    Provenance,
    parse_bytes_of,
)


@dataclass
class RocmSmi(Profiler):
    """Terms of the engine's rules and an idle figure read off rocm-smi by hand."""

    idle_bytes: Any = "512MiB"

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """See `Profiler.open`."""
        idle_bytes = parse_bytes_of("profiler.idle_bytes", self.idle_bytes)
        return _Reading(deployment, engine, idle_bytes)


@dataclass
class _Reading(Measurement):
    deployment: Deployment
    engine: Engine
    idle_bytes: int

    def start(self) -> DeviceFacts | None:
        """There is nothing to take hold of."""
        return None

    def load(self) -> None:
        """Nothing is loaded."""

    def warmup(self) -> tuple[Profile, ...]:
        """The engine's terms, with the idle figure outside torch."""
        return tuple(self._profile(rank) for rank in range(self.deployment.num_ranks))

    def allocate(self, plan: CachePlan) -> int | None:
        """Nothing is allocated."""
        return None

    def readings(self) -> Mapping[str, Any]:
        """What was read."""
        return {"idle_bytes": self.idle_bytes}

    def _profile(self, rank: int) -> Profile:
        shape = self.engine.ranks(self.deployment)[rank]
        predicted = self.engine.predict_non_torch(self.deployment, shape)
        non_torch: Part = replace(
            predicted,
            size_bytes=predicted.size_bytes + self.idle_bytes,
            provenance=Provenance.given,
            reason=f"{predicted.reason}; idle figure of rocm-smi",
        )
        return Profile(
            weights=self.engine.predict_weights(self.deployment, shape),
            activation=self.engine.predict_activation(self.deployment, shape),
            non_torch=non_torch,
            cudagraph=self.engine.predict_cudagraph(self.deployment, shape),
        )
