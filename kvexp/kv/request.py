"""What the planner is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .specs import LayerSpec, MambaCacheMode

_DEFAULT_BATCHES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A model on its workers, with the memory and the limits it is planned for.

    Attributes:
        workers: For each worker the layers that it holds, in the model's order.
        available_bytes: For each worker the bytes available for the KV cache.
        max_model_len: Longest request, in tokens; where `auto_fit` starts.
        max_num_batched_tokens: Most tokens of one step.
        max_in_flight_tokens: Most tokens scheduled and not yet settled; from
            `kvexp.kv.parallel.max_in_flight_tokens`. Not given: two steps, the engine's
            default on one pipeline stage.
        block_size: Tokens of a block that layers had before any unification.
        auto_fit: Whether `max_model_len` is lowered until one request fits.
        num_gpu_blocks_override: The engine's option of that name.
        hybrid: Whether the hybrid KV-cache manager is on.
        dcp: Decode context parallel size.
        pcp: Prefill context parallel size; it counts only where a version divides by it.
        mamba_cache_mode: The engine's Mamba cache mode.
        max_num_encoder_input_tokens: Longest encoder input; `max_num_batched_tokens` if not
            given.
        enable_cross_layers_blocks: A KV connector's option of that name.
        use_eagle: Whether EAGLE drafts; informational, it marks groups and moves no byte.
    """

    workers: Sequence[Mapping[str, LayerSpec]]
    available_bytes: Sequence[int]
    max_model_len: int
    max_num_batched_tokens: int
    max_in_flight_tokens: int | None = None
    block_size: int = 16
    auto_fit: bool = False
    num_gpu_blocks_override: int | None = None
    hybrid: bool = True
    dcp: int = 1
    pcp: int = 1
    mamba_cache_mode: MambaCacheMode = "none"
    max_num_encoder_input_tokens: int | None = None
    enable_cross_layers_blocks: bool = False
    use_eagle: bool = False

    def __post_init__(self) -> None:
        """Check that the workers and their bytes belong together.

        Raises:
            ValueError: If there is no worker, or not one number of bytes for each.
        """
        if not self.workers or len(self.workers) != len(self.available_bytes):
            raise ValueError("each worker needs its layers and its available bytes")

    @property
    def in_flight_tokens(self) -> int:
        """Tokens in flight, the default filled in."""
        if self.max_in_flight_tokens is not None:
            return self.max_in_flight_tokens
        return _DEFAULT_BATCHES * self.max_num_batched_tokens
