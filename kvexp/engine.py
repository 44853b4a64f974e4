"""The contract of an engine plugin: what the engine allows, charges, refuses and prints."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvexp.deployment import Deployment
from kvexp.errors import InvalidValue
from kvexp.request import Knobs
from kvexp.results import KvGroup, Part, Profile, Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShape:
    """What one rank holds: its place and its slice of the layers."""

    rank: int
    tp_rank: int
    pp_rank: int
    first_layer: int
    num_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """One rank's budget before the cache exists.

    `parts` and `available_bytes` sum to `requested_bytes`; available may be negative.
    `base` names what the utilisation is a fraction of.
    """

    base: str
    requested_bytes: int
    available_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan:
    """How the available bytes divide into blocks.

    `num_blocks_per_rank` and `block_bytes_per_rank` are each rank's own; `num_blocks` is what the
    engine runs with. `kv_tokens` and `max_concurrency` are the engine's own figures.
    `available_bytes_per_rank` repeats what was divided where the engine prints it.
    """

    num_blocks: int
    block_size: int
    kv_tokens: int
    max_concurrency: float
    max_model_len: int
    num_blocks_per_rank: tuple[int, ...]
    block_bytes_per_rank: tuple[int, ...]
    groups: tuple[KvGroup, ...]
    layout: str
    notes: tuple[str, ...] = ()
    available_bytes_per_rank: tuple[int, ...] = ()


@dataclass
class Engine(ABC):
    """One serving engine at one version.

    Every `predict_...` may raise `InvalidValue` where no rule is known for the model.

    A subclass is a plain dataclass: its fields are its options (`engine.version`), its
    entry-point name is its option name (`engine=vllm`). It keeps no state.
    """

    version: str = ""

    charges_context: ClassVar[bool] = False
    """True when the budget charges all memory outside the torch allocator, the CUDA context and
    neighbours included; False when only its growth over the engine's baseline is charged."""

    counts: ClassVar[tuple[str, ...]] = ()
    """Which of `dp`, `pp_partition`, `lora`, `speculative` and `mm` the engine counts here."""

    def decide(self, knobs: Knobs, name: str) -> Deployment:
        """`resolve`, where the engine counts all that is asked for.

        Raises:
            InvalidValue: it does not, or a value is not allowed.
        """
        for key in knobs.extras():
            if key not in self.counts:
                raise InvalidValue(
                    f"{key} is not counted for engine={name}: leave it at its default"
                    f" (engine={name} counts {', '.join(self.counts) or 'none of its kind'})"
                )
        return self.resolve(knobs, name)

    @abstractmethod
    def resolve(self, knobs: Knobs, name: str) -> Deployment:
        """Decide every value that is null; `name` is the engine's option name.

        Raises:
            InvalidValue: a value, or the combination of values, is not allowed.
        """

    def flags(self, deployment: Deployment) -> str:
        """What to paste to start the engine with these values; empty where it is not known."""
        return ""

    @abstractmethod
    def ranks(self, deployment: Deployment) -> tuple[RankShape, ...]:
        """The ranks of one replica, in rank order."""

    @abstractmethod
    def predict_weights(self, deployment: Deployment, shape: RankShape) -> Part:
        """Allocated bytes after loading on one rank, from rules."""

    @abstractmethod
    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """Increase of the allocated peak during the worst-case forward on one rank, from rules."""

    @abstractmethod
    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """Memory outside the torch allocator that the budget charges one rank, from rules."""

    @abstractmethod
    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """CUDA-graph memory that the budget subtracts on one rank, from rules."""

    def beyond_budget(
        self, deployment: Deployment, shape: RankShape, groups: Sequence[KvGroup]
    ) -> tuple[Part, ...]:
        """What one rank's card holds at full load that no budget counts, from rules.

        The CUDA context, communicators, the runner's buffers, the tables of the cache's `groups`,
        what capture really takes. Empty where nothing is known of it.
        """
        return ()

    def cached_bytes(self, deployment: Deployment, profile: Profile) -> int:
        """What torch still holds of the forwards before when the engine is ready and idle."""
        return profile.activation_bytes

    @abstractmethod
    def refuse_start(self, deployment: Deployment) -> Refusal | None:
        """The engine's check at start, before anything is loaded; None when it passes."""

    @abstractmethod
    def quota(self, deployment: Deployment, profile: Profile) -> Quota:
        """What is left for the cache on one rank."""

    @abstractmethod
    def plan(self, deployment: Deployment, available_bytes: Sequence[int]) -> CachePlan | Refusal:
        """Divide what is left into blocks; `available_bytes` is one figure a rank."""

    def refuse_capture(self, deployment: Deployment, plan: CachePlan) -> Refusal | None:
        """The engine's check of a planned cache before graphs are captured; None when it passes."""
        return None

    def cache_tensor_bytes(self, plan: CachePlan, rank: int) -> tuple[int, ...]:
        """The tensors that hold a rank's cache: one a layer of a group, shared by all groups.

        A cache whose groups have pages of several sizes is one tensor.
        """
        block_bytes = plan.block_bytes_per_rank[rank]
        pages = {group.page_size_bytes for group in plan.groups}
        page = pages.pop() if len(pages) == 1 else block_bytes
        count, rest = divmod(block_bytes, page)
        return (plan.num_blocks * block_bytes,) if rest else (plan.num_blocks * page,) * count

    def graph_batch_sizes(self, deployment: Deployment) -> tuple[int, ...]:
        """Batch sizes whose decode step is captured as a CUDA graph; empty where none is known."""
        return ()

    def largest_graph(self, count: int) -> int | None:
        """The largest of `count` default batch sizes of graphs; None where it is not known."""
        return None

    @abstractmethod
    def log_lines(self, deployment: Deployment, plan: CachePlan) -> tuple[str, ...]:
        """The lines about capacity that the engine would print, to the letter."""
