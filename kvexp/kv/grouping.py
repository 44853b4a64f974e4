"""Which layers share a block table (vLLM `get_kv_cache_groups`).

The first layout that fits wins: one group of equal or mergeable layers; one uniform-type group;
the packed groups of DeepSeek-V4-like models; otherwise equal pages and equally long groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .dtypes import element_bytes
from .errors import EngineError
from .groups import Group, UniformTypeGroup
from .merging import distinct, is_uniform_type, merge
from .packing import packed_groups
from .pages import unify_pages
from .promotion import fallback_groups, promote
from .rules import PlannerRules
from .specs import EncoderOnlyAttentionSpec, HiddenStateCacheSpec, LayerSpec, cdiv

Layers = Mapping[str, LayerSpec]


def group_layers(layers: Layers, hybrid: bool, rules: PlannerRules) -> list[Group]:
    """Return the groups of a whole model.

    Args:
        layers: The model's layers in its order.
        hybrid: Whether the hybrid KV-cache manager is on.
        rules: The version's rules.

    Raises:
        EngineError: If the engine refuses the layers.
    """
    if not layers:
        return []
    specs = distinct(layers.values())
    if any(isinstance(spec, EncoderOnlyAttentionSpec) for spec in specs):
        raise EngineError("ValueError", "an encoder-only layer keeps no KV cache and has no spec")
    if not (hybrid and rules.hybrid_groups):
        layers = promote(layers, rules)
        specs = distinct(layers.values())
    merged = merge(specs)
    if merged is not None:
        return [Group(list(layers), merged)]
    if rules.uniform_type and is_uniform_type(specs, rules):
        return [UniformTypeGroup(list(layers), layers)]
    hidden = {
        name: spec
        for name, spec in layers.items()
        if rules.hidden_apart and isinstance(spec, HiddenStateCacheSpec)
    }
    if not rules.unifies_pages and len({spec.page_size_bytes for spec in specs}) > 1:
        raise EngineError(
            "NotImplementedError", f"vLLM {rules.version} wants pages of one size in all layers"
        )
    packed = packed_groups(layers, hidden, rules)
    if packed is not None:
        return packed
    others = {name: spec for name, spec in layers.items() if name not in hidden}
    try:
        groups = _equal_groups(unify_pages(others, rules), rules)
    except EngineError as error:
        groups_as_full = fallback_groups(layers, rules, error)
        if groups_as_full is None:
            raise
        return groups_as_full
    return groups + _hidden_groups(hidden, groups)


def common_page_bytes(groups: Sequence[Group]) -> int:
    """Return the page size that all groups have.

    Raises:
        EngineError: ``AssertionError`` if they have several.
    """
    pages = {group.page_size_bytes for group in groups}
    if len(pages) != 1:
        raise EngineError("AssertionError", f"groups have pages of {sorted(pages)} bytes")
    return pages.pop()


def _equal_groups(layers: Layers, rules: PlannerRules) -> list[Group]:
    """Cut each bucket of like layers into groups of one size, interleaved.

    Interleaving (group i takes layers i, i + k, ...) gives every pipeline stage a share of
    every group.
    """
    buckets = _buckets(layers, rules)
    if not buckets:
        raise EngineError("ValueError", "no layer is left beside the hidden-state caches")
    size = _group_size([len(names) for names in buckets], rules.bucket_factor)
    groups = []
    for names in buckets:
        number = cdiv(len(names), size)
        for first in range(number):
            members = names[first::number]
            spec = merge(distinct(layers[name] for name in members))
            if spec is None:
                raise EngineError("AssertionError", "layers of one group cannot be merged")
            groups.append(Group(members, spec))
    return groups


def _group_size(sizes: Sequence[int], factor: float | None) -> int:
    smallest, largest = min(sizes), max(sizes)
    if factor is not None and largest < smallest * factor:
        return largest
    return smallest


def _buckets(layers: Layers, rules: PlannerRules) -> list[list[str]]:
    by_spec: dict[LayerSpec, list[str]] = {}
    for name, spec in layers.items():
        by_spec.setdefault(spec, []).append(name)
    if not rules.buckets_by_merge:
        return list(by_spec.values())
    buckets: list[tuple[list[LayerSpec], list[str]]] = []
    for spec, names in by_spec.items():
        for specs, members in buckets:
            if _can_merge([*specs, spec]):
                specs.append(spec)
                members.extend(names)
                break
        else:
            buckets.append(([spec], list(names)))
    return [members for _, members in buckets]


def _can_merge(specs: Sequence[LayerSpec]) -> bool:
    try:
        return merge(specs) is not None
    except EngineError:
        return False


def _hidden_groups(hidden: Layers, groups: Sequence[Group]) -> list[Group]:
    """Give each hidden-state layer a group whose block fits the common page."""
    if not hidden:
        return []
    page_bytes = common_page_bytes(groups)
    result = []
    for name, spec in hidden.items():
        assert isinstance(spec, HiddenStateCacheSpec)
        token_bytes = spec.num_kv_heads * spec.head_size * element_bytes(spec.dtype)
        block_size = max(page_bytes // token_bytes, 1)
        result.append(
            Group([name], replace(spec, block_size=block_size, page_size_padded=page_bytes))
        )
    return result
