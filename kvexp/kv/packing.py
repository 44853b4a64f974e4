"""Groups for models whose layers have several page sizes at once (DeepSeek-V4).

A *layer tuple* is one layer of each page size; every group is made of equally many of them, so
that all groups fill the same block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .errors import EngineError
from .groups import Group, UniformTypeGroup
from .merging import distinct, is_uniform_type
from .rules import PlannerRules
from .specs import (
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    cdiv,
)

Layers = Mapping[str, LayerSpec]


def packed_groups(layers: Layers, hidden: Layers, rules: PlannerRules) -> list[Group] | None:
    """Return groups that pack pages of several sizes, or None for models without them.

    Raises:
        EngineError: ``AssertionError`` if the layers do not form equal tuples.
    """
    if rules.packing == "none":
        return None
    specs = distinct(layers.values())
    if not any(isinstance(spec, SlidingWindowMLASpec) for spec in specs):
        return None
    if rules.packing == "layer_tuples":
        pages = {spec.page_size_bytes for spec in specs}
        if len(pages) <= 1 and not rules.packs_equal_pages:
            return None
        return _tuple_groups(layers, rules)
    others = {name: spec for name, spec in layers.items() if name not in hidden}
    if len({spec.page_size_bytes for spec in distinct(others.values())}) <= 1:
        return None
    return [
        *_greedy_groups(others, rules),
        *(Group([name], spec) for name, spec in hidden.items()),
    ]


def _tuple_groups(layers: Layers, rules: PlannerRules) -> list[Group]:
    """One group of all MLA layers; sliding ones padded to its pages and cut to its length."""
    mla: dict[str, LayerSpec] = {}
    sliding: dict[tuple[int, int], dict[str, LayerSpec]] = {}
    for name, spec in layers.items():
        if isinstance(spec, SlidingWindowMLASpec):
            sliding.setdefault((spec.block_size, spec.sliding_window), {})[name] = spec
        elif isinstance(spec, MLAAttentionSpec):
            mla[name] = spec
    if not mla or any(
        spec.block_size != next(iter(mla.values())).block_size for spec in mla.values()
    ):
        raise EngineError("AssertionError", "the MLA layers do not form one group")
    counts = [_tuples(members) for members in (mla, *sliding.values())]
    length = _least_padding(counts, counts[0])
    pages = {spec.page_size_bytes for spec in mla.values()}
    groups: list[Group] = [UniformTypeGroup(list(mla), mla)]
    for members in sliding.values():
        if rules.pads_packed_pages:
            members = _pad_to(members, pages)
        groups.extend(_cut(members, length))
    return groups


def _pad_to(members: Layers, pages: set[int]) -> dict[str, LayerSpec]:
    """Pad each page to the nearest size of the MLA group."""
    padded: dict[LayerSpec, LayerSpec] = {}
    for spec in distinct(members.values()):
        page = spec.page_size_bytes
        larger = [size for size in pages if size >= page]
        if not larger:
            raise EngineError("AssertionError", f"a sliding page of {page} bytes fits no MLA page")
        assert isinstance(spec, SlidingWindowMLASpec)
        target = min(larger)
        padded[spec] = (
            spec if page == target else replace(spec, page_size_padded=target, alignment=None)
        )
    return {name: padded[spec] for name, spec in members.items()}


def _cut(members: Layers, length: int) -> list[Group]:
    by_page = _by_page(members)
    if len({len(names) for names in by_page.values()}) != 1:
        raise EngineError("AssertionError", "a sliding group has unequally many layers per page")
    number = cdiv(len(next(iter(by_page.values()))), length)
    return _split(members, by_page, number)


def _split(members: Layers, by_page: Mapping[int, list[str]], number: int) -> list[Group]:
    """Split layer tuples into interleaved groups."""
    tuples = list(zip(*by_page.values(), strict=False))
    if number > len(tuples):
        raise EngineError("AssertionError", "a group of layer tuples would be empty")
    groups: list[Group] = []
    for first in range(number):
        names = [name for layer_tuple in tuples[first::number] for name in layer_tuple]
        groups.append(UniformTypeGroup(names, {name: members[name] for name in names}))
    return groups


def _by_page(members: Layers) -> dict[int, list[str]]:
    by_page: dict[int, list[str]] = {}
    for name, spec in members.items():
        by_page.setdefault(spec.page_size_bytes, []).append(name)
    return by_page


def _tuples(members: Layers) -> int:
    """Layers of the most frequent page size."""
    return max(Counter(spec.page_size_bytes for spec in members.values()).values())


def _least_padding(counts: Sequence[int], lowest: int) -> int:
    """Return the length in [lowest, largest count] that pads least; the larger on a tie."""
    return min(
        range(max(lowest, 1), max(counts) + 1),
        key=lambda length: (sum(-count % length for count in counts), -length),
    )


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers of one uniform type, with the names of each page size."""

    members: Layers
    by_page: Mapping[int, list[str]]

    @property
    def first(self) -> LayerSpec:
        return next(iter(self.members.values()))

    @property
    def even(self) -> bool:
        return len({len(names) for names in self.by_page.values()}) == 1

    @property
    def tuples(self) -> int:
        return max(map(len, self.by_page.values()))

    def widest_bytes(self, number: int) -> int:
        """Bytes of the largest of `number` groups that the bucket is cut into."""
        return sum(cdiv(len(names), number) * page for page, names in self.by_page.items())


def _greedy_groups(layers: Layers, rules: PlannerRules) -> list[Group]:
    """Uniform-type buckets, cut so that all groups fill about the same block.

    Buckets with equally many layers of each page size are cut into groups of equally many layer
    tuples. States (Mamba, and windows where there are no tuples) are cut further, to fit the
    block that the other groups need anyway.
    """
    buckets = [_Bucket(members, _by_page(members)) for members in _uniform_buckets(layers, rules)]
    counts = [bucket.tuples for bucket in buckets if bucket.even]
    lowest = max((b.tuples for b in buckets if b.even and len(b.by_page) > 1), default=0)
    length = _least_padding(counts, lowest) if lowest else None

    def number_of_groups(bucket: _Bucket) -> int:
        return cdiv(bucket.tuples, length) if bucket.even and length is not None else 1

    def is_state(bucket: _Bucket) -> bool:
        windows_are_states = length is None and isinstance(bucket.first, SlidingWindowSpec)
        return windows_are_states or isinstance(bucket.first, MambaSpec)

    block_bytes = max(
        bucket.widest_bytes(len(bucket.members) if is_state(bucket) else number_of_groups(bucket))
        for bucket in buckets
    )
    groups: list[Group] = []
    for bucket in buckets:
        members, number = bucket.members, number_of_groups(bucket)
        if is_state(bucket):
            states = max(block_bytes // bucket.first.page_size_bytes, 1)
            number = max(number, cdiv(len(members), states))
        if number == 1:
            groups.append(UniformTypeGroup(list(members), members))
        else:
            groups.extend(_split(members, bucket.by_page, number))
    return groups


def _uniform_buckets(layers: Layers, rules: PlannerRules) -> list[dict[str, LayerSpec]]:
    specs: list[list[LayerSpec]] = []
    place: dict[LayerSpec, int] = {}
    for spec in distinct(layers.values()):
        for index, bucket in enumerate(specs):
            if is_uniform_type([*bucket, spec], rules):
                bucket.append(spec)
                place[spec] = index
                break
        else:
            place[spec] = len(specs)
            specs.append([spec])
    buckets: list[dict[str, LayerSpec]] = [{} for _ in specs]
    for name, spec in layers.items():
        buckets[place[spec]][name] = spec
    return buckets
