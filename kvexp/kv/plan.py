"""What the planner answers: a plan, or why the engine would refuse to start."""

from __future__ import annotations

from dataclasses import dataclass

_WORDS = {
    "uniform_type": "with pages of different sizes",
    "sliding_mla": "sliding MLA",
    "mla": "MLA",
    "cross": "cross attention",
    "hidden": "hidden states",
    "rswa": "R-SWA",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """One group of layers, as the first worker holds it.

    Attributes:
        kind: Kind of its layers, or ``uniform_type`` where their pages differ.
        num_layers: Layers in the group.
        block_size: Tokens of a block.
        page_size_bytes: Bytes of a page; the sum of the layers' for ``uniform_type``.
        max_memory_usage_bytes: Most bytes of one request in one such page slot.
    """

    kind: str
    num_layers: int
    block_size: int
    page_size_bytes: int
    max_memory_usage_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The KV cache that the engine would allocate.

    Attributes:
        num_blocks: Blocks of every worker, the smallest worker's.
        num_blocks_per_worker: Blocks that each worker's memory alone would give.
        bytes_per_block: Bytes of one block on the first worker.
        bytes_per_block_per_worker: The same on each worker.
        block_size: Tokens of a block as the engine reports it: the smallest group's.
        max_model_len: Longest request, after fitting.
        max_in_flight_tokens: Tokens scheduled and not yet settled.
        kv_cache_size_tokens: Tokens as the engine logs them; None if nothing is kept.
        max_concurrency: Requests of the longest length that fit at once; None likewise.
        blocks_per_request: Blocks of one such request; None likewise.
        needed_bytes_per_worker: Bytes of one such request on each worker; None likewise.
        groups: The groups of the first worker.
        why: Where the tokens come from, in words.
    """

    num_blocks: int
    num_blocks_per_worker: tuple[int, ...]
    bytes_per_block: int
    bytes_per_block_per_worker: tuple[int, ...]
    block_size: int
    max_model_len: int
    max_in_flight_tokens: int
    kv_cache_size_tokens: int | None
    max_concurrency: float | None
    blocks_per_request: int | None
    needed_bytes_per_worker: tuple[int, ...] | None
    groups: tuple[GroupPlan, ...]
    why: str

    def describe(self) -> str:
        """Return the grouping in words, e.g. ``6 groups of 8 layers: 5 sliding + 1 full``."""
        if not self.groups:
            return "no layer keeps a KV cache"
        kinds: dict[str, int] = {}
        for group in self.groups:
            kinds[group.kind] = kinds.get(group.kind, 0) + 1
        if len(self.groups) == 1:
            only = self.groups[0]
            if only.kind == "uniform_type":
                return f"1 group of {_layers(only.num_layers)} with pages of different sizes"
            return f"1 group of {_layers(only.num_layers)}: {_WORDS.get(only.kind, only.kind)}"
        sizes = [group.num_layers for group in self.groups]
        smallest, largest = min(sizes), max(sizes)
        of = _layers(largest) if smallest == largest else f"{smallest} to {_layers(largest)}"
        parts = " + ".join(f"{number} {_WORDS.get(kind, kind)}" for kind, number in kinds.items())
        return f"{len(self.groups)} groups of {of}: {parts}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRefusal:
    """Why the engine would refuse to start.

    Attributes:
        code: ``no_memory``, ``max_len_too_large``, ``autofit_failed``,
            ``window_sizes_differ``, ``hybrid_off_not_unifiable``, ``page_not_divisible``,
            ``auto_fit_unsupported``, or the class of the engine's own bare exception.
        message: What is wrong, for a person.
        worker: Index of the worker that failed the check.
        needed_bytes: Bytes of one request on that worker.
        available_bytes: Bytes it has.
        estimated_max_model_len: Longest request that would fit there; 0 if none.
    """

    code: str
    message: str
    worker: int | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    estimated_max_model_len: int | None = None

    @classmethod
    def no_memory(cls, worker: int, available_bytes: int) -> PlanRefusal:
        """Return the refusal of a worker with nothing left for the cache."""
        return cls(
            code="no_memory",
            message=f"worker {worker} has no memory for cache blocks ({available_bytes} bytes)",
            worker=worker,
            available_bytes=available_bytes,
        )

    @classmethod
    def too_long(
        cls,
        worker: int,
        needed_bytes: int,
        available_bytes: int,
        max_model_len: int,
        estimated_max_model_len: int,
    ) -> PlanRefusal:
        """Return the refusal of a worker on which one longest request does not fit."""
        if estimated_max_model_len > 0:
            hint = f"at most {estimated_max_model_len} tokens fit"
        else:
            hint = "not even one token fits"
        return cls(
            code="max_len_too_large",
            message=(
                f"one request of {max_model_len} tokens needs {needed_bytes} bytes on worker "
                f"{worker}, which has {available_bytes}; {hint}"
            ),
            worker=worker,
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            estimated_max_model_len=estimated_max_model_len,
        )


def _layers(number: int) -> str:
    return f"{number} layer" if number == 1 else f"{number} layers"
