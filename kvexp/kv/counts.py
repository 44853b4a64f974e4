"""Bytes of a block, bytes of a request, and the longest request that fits.

vLLM 0.26 `_pool_bytes_per_block`, `_max_memory_usage_bytes_from_groups` and
`get_max_concurrency_for_kv_cache_config`, with the differences of other versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .errors import EngineError
from .grouping import common_page_bytes
from .groups import Group, UniformTypeGroup
from .rules import PlannerRules
from .specs import Demand, cdiv


def bytes_per_block(
    groups: Sequence[Group], rules: PlannerRules, cross_layers: bool = False
) -> int:
    """Return the bytes that one block takes from a worker's memory.

    Args:
        groups: The groups as this worker holds them.
        rules: The version's rules.
        cross_layers: Whether a KV connector asked for blocks across layers.

    Raises:
        EngineError: ``AssertionError`` if the groups' pages differ where they must not.
    """
    if len(groups) == 1 and groups[0].uniform_type:
        return groups[0].page_size_bytes
    packed = _all_uniform(groups)
    if rules.packed_block == "largest_group" and (packed or rules.need == "blocks"):
        return max(_group_bytes(group) for group in groups)
    if packed and rules.packed_block == "tuples":
        return _layer_tuple_bytes(groups)
    if _is_packed(groups, cross_layers):
        slots: dict[int, int] = {}
        for group in groups:
            for page, number in group.layer_pages.items():
                slots[page] = max(slots.get(page, 0), number)
        return sum(page * number for page, number in slots.items())
    return common_page_bytes(groups) * _longest(groups)


def needed_bytes(
    groups: Sequence[Group], demand: Demand, rules: PlannerRules, cross_layers: bool = False
) -> int:
    """Return the bytes that one request of the longest length may need on a worker.

    Raises:
        EngineError: If the engine refuses the groups or the combination.
        ZeroDivisionError: If a page is empty, as in the engine.
    """
    if rules.need == "blocks":
        block = bytes_per_block(groups, rules, cross_layers)
        return block * sum(group.num_blocks(demand) for group in groups)
    if len(groups) == 1 and isinstance(groups[0], UniformTypeGroup):
        return groups[0].layer_bytes(demand)
    if _all_uniform(groups):
        return _layer_tuple_bytes(groups) * sum(group.num_blocks(demand) for group in groups)
    page = common_page_bytes(groups)
    counted = groups[:1] if rules.need == "first_group" else groups
    return _longest(groups) * page * sum(group.num_blocks(demand) for group in counted)


def blocks_per_request(groups: Sequence[Group], demand: Demand, rules: PlannerRules) -> int:
    """Return the blocks that one request of the longest length is counted with.

    Raises:
        ZeroDivisionError: If no layer holds anything, as in the engine.
    """
    if rules.concurrency == "group_blocks":
        return sum(group.num_blocks(demand) for group in groups)
    longest = _longest(groups)
    request = sum(group.num_blocks(demand) * group.page_size_bytes for group in groups)
    return cdiv(longest * request, longest * groups[0].page_size_bytes)


def longest_fit(fits: Callable[[Demand], bool], demand: Demand) -> int:
    """Return the largest length up to the demand's own that fits, or 0 if none does.

    Args:
        fits: Whether a demand fits; once it does not, no longer length does.
        demand: The demand whose length is varied.
    """
    if not fits(demand.with_length(1)):
        return 0
    low, high = 1, demand.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if fits(demand.with_length(middle)):
            low = middle
        else:
            high = middle - 1
    return low


def check_layers_held(groups: Sequence[Group], num_layers: int, cross_layers: bool = False) -> None:
    """Check that every layer of a worker is in a group, and that it holds one.

    Raises:
        EngineError: ``AssertionError`` as the engine does; packed layouts go on and divide by
            the empty block.
    """
    if sum(len(group.layers) for group in groups) != num_layers:
        raise EngineError("AssertionError", "some layers belong to no group")
    if num_layers == 0 and not _is_packed(groups, cross_layers):
        raise EngineError("AssertionError", "a worker holds no layer of the model")


def _all_uniform(groups: Sequence[Group]) -> bool:
    return all(group.uniform_type for group in groups)


def _is_packed(groups: Sequence[Group], cross_layers: bool) -> bool:
    return _all_uniform(groups) or (cross_layers and len(groups) > 1)


def _longest(groups: Sequence[Group]) -> int:
    return max(len(group.layers) for group in groups)


def _group_bytes(group: Group) -> int:
    return sum(page * number for page, number in group.layer_pages.items())


def _layer_tuple_bytes(groups: Sequence[Group]) -> int:
    """Bytes of all layer tuples: one of each page size of the first group, times the most."""
    pages = [group.all_pages for group in groups if isinstance(group, UniformTypeGroup)]
    return sum(pages[0]) * max(max(page_counts.values()) for page_counts in pages)
