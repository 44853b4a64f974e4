"""KV-cache groups: layers that share one block table.

A plain group's layers all have the group's spec. A uniform-type group's layers need equally
many blocks but have pages of different sizes, so its page is the sum of theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import cached_property

from .specs import Demand, LayerSpec, cdiv


class Group:
    """A group whose layers share one spec.

    Attributes:
        layers: Names of the layers; may be empty on a pipeline stage that holds none of them.
        spec: The spec of each layer.
    """

    uniform_type = False

    def __init__(self, layers: Sequence[str], spec: LayerSpec) -> None:
        """Keep the layers and their spec."""
        self.layers = layers
        self.spec = spec

    @property
    def kind(self) -> str:
        """Kind of the group's spec."""
        return self.spec.kind

    @property
    def block_size(self) -> int:
        """Tokens in a block of this group."""
        return self.spec.block_size

    @cached_property
    def page_size_bytes(self) -> int:
        """Bytes of one page of the group."""
        return self.spec.page_size_bytes

    @cached_property
    def layer_pages(self) -> Mapping[int, int]:
        """How many layers the group has of each page size."""
        return {self.page_size_bytes: len(self.layers)} if self.layers else {}

    def num_blocks(self, demand: Demand) -> int:
        """Return the blocks that one request may hold in this group.

        Raises:
            EngineError: If the engine refuses the combination.
            ZeroDivisionError: If the page is empty, as in the engine.
        """
        return _whole_pages(self.spec, self.page_size_bytes, demand)

    def on_worker(self, names: Container[str], shrink: bool) -> Group:
        """Return the group with only the layers that a worker holds.

        Args:
            names: The worker's layers.
            shrink: Whether a uniform-type group's page shrinks with its layers.
        """
        return Group([name for name in self.layers if name in names], self.spec)


class UniformTypeGroup(Group):
    """A group whose layers differ in page size only.

    Attributes:
        specs: Spec of each layer; a worker that holds none keeps the whole model's.
    """

    uniform_type = True

    def __init__(self, layers: Sequence[str], specs: Mapping[str, LayerSpec]) -> None:
        """Keep the layers and their specs."""
        super().__init__(layers, next(iter(specs.values())))
        self.specs = specs

    @property
    def kind(self) -> str:
        """Always ``uniform_type``."""
        return "uniform_type"

    @cached_property
    def counts(self) -> Mapping[LayerSpec, int]:
        """How many layers have each distinct spec."""
        by_id = Counter(map(id, self.specs.values()))
        objects = {id(spec): spec for spec in self.specs.values()}
        counts: dict[LayerSpec, int] = {}
        for key, number in by_id.items():
            counts[objects[key]] = counts.get(objects[key], 0) + number
        return counts

    @cached_property
    def pages(self) -> Mapping[LayerSpec, int]:
        """Page bytes of each distinct spec."""
        return {spec: spec.page_size_bytes for spec in self.counts}

    @cached_property
    def page_size_bytes(self) -> int:
        """Sum of the layers' page bytes."""
        return sum(self.pages[spec] * number for spec, number in self.counts.items())

    @cached_property
    def all_pages(self) -> Mapping[int, int]:
        """How many layers of `specs` have each page size."""
        layers: dict[int, int] = {}
        for spec, page in self.pages.items():
            layers[page] = layers.get(page, 0) + self.counts[spec]
        return layers

    @cached_property
    def layer_pages(self) -> Mapping[int, int]:
        """How many layers the group has of each page size."""
        return self.all_pages if self.layers else {}

    def num_blocks(self, demand: Demand) -> int:
        """Return the blocks of the layer that needs most.

        Raises:
            EngineError: If the engine refuses the combination.
            ZeroDivisionError: If a layer's page is empty, as in the engine.
        """
        return max(_whole_pages(spec, page, demand) for spec, page in self.pages.items())

    def layer_bytes(self, demand: Demand) -> int:
        """Return the bytes of one request, each layer with its own number of blocks."""
        return sum(
            number * spec.num_blocks(demand) * self.pages[spec]
            for spec, number in self.counts.items()
        )

    def on_worker(self, names: Container[str], shrink: bool) -> UniformTypeGroup:
        """Return the group with only the layers that a worker holds.

        Args:
            names: The worker's layers; where there are none, the specs stay the model's.
            shrink: Whether the specs shrink to these layers.
        """
        layers = [name for name in self.layers if name in names]
        specs = {name: self.specs[name] for name in layers} if shrink and layers else self.specs
        return UniformTypeGroup(layers, specs)


def _whole_pages(spec: LayerSpec, page_bytes: int, demand: Demand) -> int:
    """Turn a request's bytes in a layer into pages, which an empty page makes impossible."""
    return cdiv(spec.num_blocks(demand) * page_bytes, page_bytes)
