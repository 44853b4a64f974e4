"""What flows out of the pipeline: frozen facts, every size in bytes.

The names here are the names in result.json and in MLflow.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Provenance(StrEnum):
    """How a number is known."""

    measured = "measured"  # read from a counter of this run
    simulated = "simulated"  # from a simulation of the allocator
    derived = "derived"  # from a rule that measurements confirmed for this case
    given = "given"  # stated by the user
    assumed = "assumed"  # taken from another card, version or engine; the reason says which


COUNTS = (
    "num_blocks",
    "num_blocks_low",
    "num_blocks_high",
    "block_size",
    "block_bytes",
    "kv_tokens",
    "kv_tokens_low",
    "kv_tokens_high",
    "max_concurrency",
    "max_concurrency_low",
    "max_concurrency_high",
)
"""What a result says of the cache, the low and high ends of an interval behind each count."""


class Status(StrEnum):
    """How a point ended."""

    ok = "ok"
    infeasible = "infeasible"
    oom = "oom"
    timeout = "timeout"
    killed = "killed"
    skipped = "skipped"
    invalid = "invalid"
    error = "error"


class Stage(StrEnum):
    """Where in a point's life it ended."""

    compose = "compose"
    resolve = "resolve"
    start = "start"
    load = "load"
    warmup = "warmup"
    budget = "budget"
    allocate = "allocate"
    verify = "verify"
    graphs = "graphs"
    done = "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One named share of a budget; `includes` are shares of it that are worth a name.

    `low_bytes` and `high_bytes` bound a prediction by the residuals of its fit; null where the
    size is exact or nothing is known of its error.
    """

    name: str
    size_bytes: int
    provenance: Provenance
    reason: str
    low_bytes: int | None = None
    high_bytes: int | None = None
    includes: tuple["Part", ...] = ()

    @property
    def below_bytes(self) -> int:
        """How much smaller the size may be."""
        return 0 if self.low_bytes is None else max(0, self.size_bytes - self.low_bytes)

    @property
    def above_bytes(self) -> int:
        """How much larger the size may be."""
        return 0 if self.high_bytes is None else max(0, self.high_bytes - self.size_bytes)


TERMS = ("weights", "activation", "non_torch", "cudagraph")
"""The parts of a profile that every engine has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Device memory of one rank that is taken before the KV cache exists.

    `non_torch` is what the engine charges outside the torch allocator: for vLLM the growth over
    the baseline, for nano-vLLM everything in use there, the CUDA context included.
    `differences` are what the engine's own model code takes more (or, negative, less) than the
    model whose weights and forward the other parts describe. The fields from
    `warm_activation_bytes` on are known where torch's allocator was simulated;
    `missing_activation_bytes` is what a wrong warm-up reserves too little for the largest forward
    (negative: too much), None for the right one.
    """

    weights: Part
    activation: Part
    non_torch: Part
    cudagraph: Part
    differences: tuple[Part, ...] = ()
    warm_activation_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_low_bytes: int | None = None
    reserved_peak_high_bytes: int | None = None
    missing_activation_bytes: int | None = None

    @property
    def weights_bytes(self) -> int:
        """Allocated bytes of the loaded weights and buffers."""
        return self.weights.size_bytes

    @property
    def activation_bytes(self) -> int:
        """Increase of the allocated peak over the weights during the worst-case forward."""
        return self.activation.size_bytes

    @property
    def non_torch_bytes(self) -> int:
        """Memory outside the torch allocator that the engine's budget charges."""
        return self.non_torch.size_bytes

    @property
    def cudagraph_bytes(self) -> int:
        """CUDA-graph memory that the engine's budget subtracts (not what capture takes)."""
        return self.cudagraph.size_bytes

    @property
    def engine_delta_bytes(self) -> int:
        """What the engine's forward takes more than the profiled one; 0 where they are the same."""
        return sum(part.size_bytes for part in self.differences if part.name == "engine_delta")

    @property
    def parts(self) -> tuple[Part, ...]:
        """The terms in the order in which a budget lists them."""
        return (
            self.non_torch,
            self.weights,
            self.activation,
            self.cudagraph,
            *self.differences,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How one rank's share of the card is used; `parts` sum to `requested_bytes` exactly.

    `available_bytes` is what the engine leaves for the KV cache (negative when the parts before
    it already exceed the request; the part `shortfall` then carries the difference).
    """

    base: str
    total_bytes: int
    free_bytes: int
    requested_bytes: int
    available_bytes: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        summed = sum(part.size_bytes for part in self.parts)
        if summed != self.requested_bytes:
            raise AssertionError(f"parts sum to {summed}, not to {self.requested_bytes}")

    def part(self, name: str) -> Part:
        """The part of that name.

        Raises:
            KeyError: there is none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the blocks: `num_blocks` times the bytes of one block on this rank."""
        return sum(part.size_bytes for part in self.parts if part.name == "kv_cache")


UNDER_LOAD = "items"
"""The part of `Holding` that images, videos or audio take while they pass through an encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What one card will really hold, of the rank that limits the cache.

    `parts` stand on the card but in no budget, `items` under load alone. `held_at_start_bytes` are
    in use when the engine is ready and idle, `held_under_load_bytes` under full load; both count
    everything but other processes, which hold `used_by_others_bytes` beside it.
    `largest_safe_util` is the largest share whose full load, at the high end of every interval,
    still fits, with a cache for one request of the longest length, 0 where there is none; null
    where the share does not set the cache's size. `util_without_graphs` is the share at which a
    version that subtracts no graphs has this cache, `util_keeping_cache` the one that keeps the
    cache of such a version here; null where no graphs are subtracted.
    """

    parts: tuple[Part, ...]
    held_at_start_bytes: int
    held_under_load_bytes: int
    requested_bytes: int
    total_bytes: int
    used_by_others_bytes: int = 0
    largest_safe_util: float | None = None
    util_without_graphs: float | None = None
    util_keeping_cache: float | None = None

    @property
    def above_request_bytes(self) -> int:
        """How far full load stands above (or, negative, below) what the engine requested."""
        return self.held_under_load_bytes - self.requested_bytes

    @property
    def least_under_load_bytes(self) -> int:
        """Full load with every part at the low end of its interval."""
        below = math.isqrt(sum(part.below_bytes**2 for part in self.parts))
        return self.held_under_load_bytes - below

    @property
    def fits(self) -> bool:
        """Whether full load may fit on the card: false where not even its low end does."""
        return self.least_under_load_bytes + self.used_by_others_bytes <= self.total_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """One rank of a tensor- and pipeline-parallel engine."""

    rank: int
    tp_rank: int
    pp_rank: int
    first_layer: int
    num_layers: int
    num_blocks: int
    block_bytes: int
    profile: Profile
    budget: Budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why the engine would not start, with the figures it would print."""

    kind: str
    message: str
    rank: int
    needed_bytes: int
    available_bytes: int
    estimated_max_model_len: int | None = None

    @property
    def gap_bytes(self) -> int:
        """How much is missing."""
        return self.needed_bytes - self.available_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGroup:
    """Layers that share a block table."""

    kind: str
    num_layers: int
    block_size: int
    page_size_bytes: int
    num_blocks: int
    blocks_per_request: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What one profiler found where several were asked; `profile` is null where it has no terms.

    `available_bytes` is what the engine would leave for the cache by these terms.
    """

    profiler: str
    status: Status
    stage: Stage
    reason: str
    num_blocks: int | None
    kv_tokens: int | None
    max_concurrency: float | None
    available_bytes: int | None
    profile: Profile | None
    readings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    duration_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One point: everything that is known about it, ready to keep.

    `num_blocks`, `kv_tokens` and `max_concurrency` are what the engine would print, 0 when it
    refuses and null when the point ended before they were known. The same names with `_low` and
    `_high` carry what is uncertain: the terms' intervals, and the card's total where only a
    printed figure is known; null where nothing is. `num_replicas` data-parallel engines hold
    `kv_tokens_total` and `max_concurrency_total` together, where there are several.
    `requested` holds the values as asked for (null: the engine's default), `effective` the
    values that were used. `readings` are the raw counters of a measuring profiler. `verified`:
    the cache was really allocated and the largest forward ran on top of it; where it did not,
    `largest_util` is the largest share that was tried and did. `holding` is what the card will
    hold by rule, budget or not. `compared` has every profiler of a comparison; all else is then
    the first one's that has terms.
    """

    status: Status
    stage: Stage
    reason: str
    num_blocks: int | None = None
    num_blocks_low: int | None = None
    num_blocks_high: int | None = None
    kv_tokens_low: int | None = None
    kv_tokens_high: int | None = None
    max_concurrency_low: float | None = None
    max_concurrency_high: float | None = None
    block_size: int | None = None
    block_bytes: int | None = None
    kv_tokens: int | None = None
    max_concurrency: float | None = None
    num_replicas: int | None = None
    kv_tokens_total: int | None = None
    max_concurrency_total: float | None = None
    allocated_bytes: int | None = None
    verified: bool | None = None
    largest_util: float | None = None
    budget: Budget | None = None
    profile: Profile | None = None
    holding: Holding | None = None
    refusal: Refusal | None = None
    layout: str | None = None
    groups: tuple[KvGroup, ...] = ()
    ranks: tuple[RankResult, ...] = ()
    compared: tuple[Compared, ...] = ()
    log_lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    requested: Mapping[str, Any] = field(default_factory=dict)
    effective: Mapping[str, Any] = field(default_factory=dict)
    readings: Mapping[str, Any] = field(default_factory=dict)
    duration_s: float | None = None

    @property
    def ok(self) -> bool:
        """True when the engine would start and every stage ran."""
        return self.status is Status.ok
