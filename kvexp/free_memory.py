"""Engines whose fraction is one of free memory: before the load, after it, or after all else."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvexp import terms
from kvexp.deployment import Deployment
from kvexp.engine import Engine, Quota, RankShape
from kvexp.errors import InvalidValue
from kvexp.request import Knobs, check_share, parse_bytes_of
from kvexp.results import Part, Profile, Provenance, Refusal
from kvexp.units import gib

WEIGHTS_ERROR = 0.003
"""Of loads that SGLang's logs print, beside what loading takes."""


@dataclass
class FreeMemoryEngine(Engine):
    """An engine that lets the cache take a share of what is free.

    `share_of_total`: choose the engine's own fraction so that it fills this share of the card's
    total, as vLLM's fraction is meant; by the terms that the engine predicts.
    `free_after_load_bytes`: what a log states as free when the cache is sized, instead of the
    terms. `kv_cache_memory_bytes`: the cache gets these bytes, whatever the fraction.
    """

    share_of_total: float | None = None
    free_after_load_bytes: Any = None
    kv_cache_memory_bytes: Any = None

    title: ClassVar[str]
    """The engine's name as its authors write it."""

    base: ClassVar[str]
    """What the fraction is a fraction of."""

    fraction_name: ClassVar[str]
    """The engine's own name of the fraction."""

    connects_before: ClassVar[bool] = False
    """Whether its ranks are connected when it reads what is free before the load."""

    @abstractmethod
    def settle(self, knobs: Knobs, name: str) -> Deployment:
        """Decide every value, the fraction as if `share_of_total` were not given.

        Raises:
            InvalidValue: a value, or the combination of values, is not allowed.
        """

    @abstractmethod
    def charged(self, deployment: Deployment, profile: Profile) -> tuple[Part, ...]:
        """The terms between the baseline and what the engine reads as left, zero ones included."""

    @abstractmethod
    def base_bytes(self, deployment: Deployment, left_bytes: int) -> int:
        """What the fraction is a fraction of, in bytes; `left_bytes` remain after the terms."""

    @abstractmethod
    def divide(self, deployment: Deployment, left_bytes: int) -> tuple[tuple[Part, ...], int]:
        """Further reserves, and the bytes for the cache."""

    def most_taken_until_pool(self, deployment: Deployment) -> int:
        """The most that is taken between `free_after_load_bytes` and the cache, in bytes."""
        return 0

    @property
    def unverified(self) -> str:
        """Where a prediction that no measurement of the engine has confirmed comes from."""
        return f"derived from fused layers, not verified by a measurement of {self.title}"

    def ranks(self, deployment: Deployment) -> tuple[RankShape, ...]:
        """See `Engine.ranks`; layers are split over `pp` evenly."""
        return terms.stages(deployment)

    def predict_weights(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_weights`."""
        size = terms.weights_bytes(deployment, shape)
        error = int(size * WEIGHTS_ERROR)
        part = terms.assumed("weights", size, self.unverified)
        return replace(part, low_bytes=size - error, high_bytes=size + error)

    def refuse_start(self, deployment: Deployment) -> Refusal | None:
        """Never: what is free becomes the base."""
        return None

    def resolve(self, knobs: Knobs, name: str) -> Deployment:
        """See `Engine.resolve`."""
        if self.share_of_total is not None:
            check_share(knobs, self.share_of_total)
        for option in ("free_after_load_bytes", "kv_cache_memory_bytes"):
            size = self._size(option)
            if size is not None and size > knobs.gpu.total_bytes:
                raise InvalidValue(
                    f"engine.{option} must not exceed gpu.total_bytes ({knobs.gpu.total_bytes}),"
                    f" got {size}"
                )
        deployment = self.settle(knobs, name)
        if self.share_of_total is not None:
            fraction = self.fraction_for(deployment, self.share_of_total)
            deployment = replace(deployment, util=fraction)
        return replace(deployment, flags=self.flags(deployment))

    def fraction_for(self, deployment: Deployment, share: float) -> float:
        """The engine's fraction that fills `share` of the card's total, rounded down.

        What is held back is (1 - fraction) x base for the engine, (1 - share) x total for the card.

        Raises:
            InvalidValue: no fraction does.
        """
        left = self._left_bytes(deployment, self._predicted(deployment))
        base = self.base_bytes(deployment, left)
        fraction = 1 - (1 - share) * deployment.total_bytes / base if base > 0 else 0.0
        fraction = math.floor(fraction * 10000) / 10000
        if not 0 < fraction <= 1:
            raise InvalidValue(
                f"engine.share_of_total={share:g} leaves no {self.fraction_name}: {gib(base)} are"
                f" {self.base}, {gib(round((1 - share) * deployment.total_bytes))} would be held"
                " back"
            )
        return fraction

    def quota(self, deployment: Deployment, profile: Profile) -> Quota:
        """The engine's share of its base; what it holds back is outside the request."""
        parts = self._taken(deployment, profile)
        left = deployment.total_bytes - sum(part.size_bytes for part in parts)
        further, available = self.divide(deployment, left)
        base = self.base
        given = self._size("kv_cache_memory_bytes")
        if given is not None:
            available, base, further = given, "kv_cache_memory_bytes", ()
        parts = (*parts, *further)
        return Quota(
            base=base,
            requested_bytes=available + sum(part.size_bytes for part in parts),
            available_bytes=available,
            parts=parts,
        )

    def _left_bytes(self, deployment: Deployment, profile: Profile) -> int:
        taken = sum(part.size_bytes for part in self._taken(deployment, profile))
        return deployment.total_bytes - taken

    def _taken(self, deployment: Deployment, profile: Profile) -> tuple[Part, ...]:
        """Everything on the card that is no longer free when the base is read."""
        connected = self.connects_before
        before = terms.used_before_load(deployment, after_communicator=connected)
        charged = (before, *self.charged(deployment, profile))
        free = self._size("free_after_load_bytes")
        if free is None:
            return charged
        stated = deployment.total_bytes - free - sum(part.size_bytes for part in charged)
        exact = replace(before, low_bytes=None, high_bytes=None)
        return (
            exact,
            *charged[1:],
            Part(
                name="correction",
                size_bytes=stated,
                high_bytes=stated + self.most_taken_until_pool(deployment),
                provenance=Provenance.given,
                reason="engine.free_after_load_bytes against the terms above",
            ),
        )

    def _predicted(self, deployment: Deployment) -> Profile:
        shape: RankShape = self.ranks(deployment)[0]
        return Profile(
            weights=self.predict_weights(deployment, shape),
            activation=self.predict_activation(deployment, shape),
            non_torch=self.predict_non_torch(deployment, shape),
            cudagraph=self.predict_cudagraph(deployment, shape),
        )

    def _size(self, option: str) -> int | None:
        value = getattr(self, option)
        return None if value is None else parse_bytes_of(f"engine.{option}", value)
