"""What crosses from vLLM's objects to ours; imports no vLLM."""

from dataclasses import dataclass

from kvexp.contract import KvGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What vLLM's planner made of the available bytes, read from its objects."""

    num_blocks: int
    block_size: int
    kv_tokens: int
    max_concurrency: float
    max_model_len: int
    block_bytes_per_rank: tuple[int, ...]
    groups: tuple[KvGroup, ...]
