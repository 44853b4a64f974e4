"""When may layers share one group: equal, mergeable, or of one uniform type.

vLLM 0.26 `v1/kv_cache_interface.py`: the ``merge`` class methods and ``is_uniform_type``.
All functions take distinct specs in the order of their first layer; the first one decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .dtypes import KVQuantMode
from .errors import EngineError
from .rules import PlannerRules
from .specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)


def distinct(specs: Iterable[LayerSpec]) -> list[LayerSpec]:
    """Return the distinct specs in the order of their first appearance."""
    listed = list(specs)
    objects = dict(zip(map(id, listed), listed, strict=True))
    return list(objects.values()) if len(objects) == 1 else list(dict.fromkeys(objects.values()))


def merge(specs: Sequence[LayerSpec]) -> LayerSpec | None:
    """Return one spec that stands for all of them, or None if they cannot share one.

    Raises:
        EngineError: ``window_sizes_differ`` if full layers carry two windows or two chunk
            sizes; the engine does not fall back to another grouping then.
    """
    first = specs[0]
    if isinstance(first, SlidingWindowMLASpec):
        return _merge_sliding_mla(first, specs)
    if isinstance(first, MLAAttentionSpec):
        return _merge_mla(first, specs)
    if isinstance(first, FullAttentionSpec):
        return _merge_full(first, specs)
    return first if all(spec == first for spec in specs) else None


def is_uniform_type(specs: Sequence[LayerSpec], rules: PlannerRules) -> bool:
    """Return whether all layers need the same number of tokens in blocks of one size."""
    first = specs[0]
    if any(spec.block_size != first.block_size for spec in specs):
        return False
    if isinstance(first, MambaSpec):
        return all(
            isinstance(spec, MambaSpec)
            and spec.num_speculative_blocks == first.num_speculative_blocks
            and (not rules.equal_mamba_pages or spec.page_size_bytes == first.page_size_bytes)
            for spec in specs
        )
    if isinstance(first, ChunkedLocalAttentionSpec):
        return all(
            isinstance(spec, ChunkedLocalAttentionSpec)
            and spec.attention_chunk_size == first.attention_chunk_size
            for spec in specs
        )
    if isinstance(first, SlidingWindowSpec):
        sliding: type[SlidingWindowSpec] = SlidingWindowSpec
        if isinstance(first, SlidingWindowMLASpec):
            sliding = SlidingWindowMLASpec
        return all(
            isinstance(spec, sliding) and spec.sliding_window == first.sliding_window
            for spec in specs
        )
    family = FullAttentionSpec if isinstance(first, FullAttentionSpec) else type(first)
    return all(isinstance(spec, family) for spec in specs)


def _merge_sliding_mla(first: SlidingWindowMLASpec, specs: Sequence[LayerSpec]) -> LayerSpec | None:
    for spec in specs:
        if not isinstance(spec, SlidingWindowMLASpec) or not _same_layout(spec, first):
            return None
        if spec.sliding_window != first.sliding_window:
            return None
    return replace(first, alignment=None, kv_quant_mode=KVQuantMode.NONE)


def _merge_mla(first: MLAAttentionSpec, specs: Sequence[LayerSpec]) -> LayerSpec | None:
    for spec in specs:
        if not isinstance(spec, MLAAttentionSpec) or not _same_layout(spec, first):
            return None
    return replace(first, alignment=None)


def _same_layout(
    spec: MLAAttentionSpec | SlidingWindowMLASpec,
    first: MLAAttentionSpec | SlidingWindowMLASpec,
) -> bool:
    return (
        spec.cache_dtype_str == first.cache_dtype_str
        and spec.compress_ratio == first.compress_ratio
        and spec.model_version == first.model_version
        and spec.indexes_kv_by_block_stride == first.indexes_kv_by_block_stride
    )


def _merge_full(first: FullAttentionSpec, specs: Sequence[LayerSpec]) -> LayerSpec | None:
    family = RSWASpec if isinstance(first, RSWASpec) else FullAttentionSpec
    full: list[FullAttentionSpec] = []
    for spec in specs:
        if not isinstance(spec, family) or isinstance(spec, MLAAttentionSpec):
            return None
        full.append(spec)
    if isinstance(first, RSWASpec) and any(
        isinstance(spec, RSWASpec) and spec.rswa_window != first.rswa_window for spec in full
    ):
        return None
    window = _only("window", (spec.sliding_window for spec in full))
    chunk = _only("chunk", (spec.attention_chunk_size for spec in full))
    if any(not _same_attention(spec, first) for spec in full):
        return None
    if window is not None and chunk is not None:
        return None
    if len(full) == 1:
        return first
    return replace(
        first,
        sliding_window=window,
        attention_chunk_size=chunk,
        non_causal=any(spec.non_causal for spec in full),
    )


def _only(name: str, sizes: Iterable[int | None]) -> int | None:
    found = {size for size in sizes if size is not None}
    if len(found) > 1:
        raise EngineError(
            "window_sizes_differ",
            f"full-attention layers of one group have {name} sizes "
            f"{', '.join(map(str, sorted(found)))}; the engine accepts only one",
        )
    return found.pop() if found else None


def _same_attention(spec: AttentionSpec, other: AttentionSpec) -> bool:
    return (
        spec.block_size == other.block_size
        and spec.num_kv_heads == other.num_kv_heads
        and spec.head_size == other.head_size
        and spec.dtype == other.dtype
        and spec.kv_quant_mode == other.kv_quant_mode
        and spec.page_size_padded == other.page_size_padded
        and spec.indexes_kv_by_block_stride == other.indexes_kv_by_block_stride
    )
