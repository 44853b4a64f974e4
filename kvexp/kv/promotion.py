"""Keeping windowed layers as if they attended to everything.

Done when the hybrid KV-cache manager is off (vLLM 0.26 `unify_hybrid_kv_cache_specs`), and by
newer versions where page sizes cannot be made equal.
"""

from __future__ import annotations

from collections.abc import Mapping

from .dtypes import KVQuantMode
from .errors import EngineError
from .groups import Group, UniformTypeGroup
from .merging import distinct, is_uniform_type, merge
from .rules import PlannerRules
from .specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    LayerSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

Layers = Mapping[str, LayerSpec]


def promote(layers: Layers, rules: PlannerRules) -> Layers:
    """Return the layers with windowed ones kept as full, if full layers stand beside them.

    Layers that already form one group are returned as they are.

    Raises:
        EngineError: ``hybrid_off_not_unifiable`` if the result does not form one group
            (``NotImplementedError`` where the version has no hybrid manager at all).
    """
    specs = distinct(layers.values())
    if _forms_one_group(specs, rules):
        return layers
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    if not full and any(isinstance(spec, SlidingWindowMLASpec) for spec in specs):
        raise EngineError("AssertionError", "sliding MLA layers have no full layer beside them")
    if full:
        kept = {spec: _as_full(spec, full, rules) for spec in specs}
        layers = {name: kept[spec] for name, spec in layers.items()}
    if not _forms_one_group(distinct(layers.values()), rules):
        raise EngineError(
            "hybrid_off_not_unifiable" if rules.hybrid_groups else "NotImplementedError",
            "without the hybrid KV-cache manager these layers cannot be kept as one group",
        )
    return layers


def fallback_groups(layers: Layers, rules: PlannerRules, error: EngineError) -> list[Group] | None:
    """Return one group with sliding layers kept as full, where pages cannot be made equal.

    Only versions that know this way out take it, and only for plain sliding layers beside MLA.
    """
    if not rules.promotes_on_mismatch or error.code != "page_not_divisible":
        return None
    specs = distinct(layers.values())
    shut_out = (HiddenStateCacheSpec, SlidingWindowMLASpec, ChunkedLocalAttentionSpec)
    if any(isinstance(spec, shut_out) for spec in specs) or not (
        any(isinstance(spec, MLAAttentionSpec) for spec in specs)
        and any(isinstance(spec, SlidingWindowSpec) for spec in specs)
    ):
        return None
    try:
        promoted = promote(layers, rules)
    except EngineError:
        return None
    if not is_uniform_type(distinct(promoted.values()), rules):
        return None
    return [UniformTypeGroup(list(promoted), promoted)]


def _forms_one_group(specs: list[LayerSpec], rules: PlannerRules) -> bool:
    return merge(specs) is not None or (rules.uniform_type and is_uniform_type(specs, rules))


def _as_full(spec: LayerSpec, full: list[FullAttentionSpec], rules: PlannerRules) -> LayerSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    padded = spec.page_size_padded
    if rules.promotes_in_place:
        block_sizes = {other.block_size for other in full}
        block_size = block_sizes.pop() if len(block_sizes) == 1 else spec.block_size
        if padded is not None:
            padded = max(padded, spec.unpadded_page_size_bytes * block_size // spec.block_size)
        mode, strided = spec.kv_quant_mode, spec.indexes_kv_by_block_stride
    else:
        block_size = spec.block_size
        mode = _rebuilt_mode(spec)
        strided = spec.indexes_kv_by_block_stride and rules.attention_padding != "stride_flag"
    if isinstance(spec, SlidingWindowMLASpec):
        return MLAAttentionSpec(
            block_size=block_size if rules.promotes_in_place else full[0].block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            kv_quant_mode=mode,
            page_size_padded=padded,
            indexes_kv_by_block_stride=strided,
            cache_dtype_str=spec.cache_dtype_str,
            alignment=spec.alignment,
            compress_ratio=spec.compress_ratio,
            model_version=spec.model_version,
        )
    window = chunk = head_size_v = None
    if isinstance(spec, SlidingWindowSpec):
        head_size_v = spec.head_size_v
        window = spec.sliding_window if rules.hybrid_groups else None
    else:
        chunk = spec.attention_chunk_size if rules.hybrid_groups else None
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=head_size_v,
        dtype=spec.dtype,
        kv_quant_mode=mode,
        page_size_padded=padded,
        indexes_kv_by_block_stride=strided,
        sliding_window=window,
        attention_chunk_size=chunk,
    )


def _rebuilt_mode(spec: AttentionSpec) -> KVQuantMode:
    """Only a plain sliding layer keeps its scale mode when it is rebuilt as a full one."""
    if isinstance(spec, SlidingWindowSpec) and not isinstance(spec, SlidingWindowMLASpec):
        return spec.kv_quant_mode
    return KVQuantMode.NONE
