"""Where the driver puts a segment: the one thing that decides among equally large free blocks.

Nobody documents it, so there are several policies; reserved memory is a range over them, while
allocated memory does not depend on them.
"""

import random
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from kvexp.units import MIB

_MIDDLE = 1 << 46
_RANGE = 32 * MIB


class AddressSpace(ABC):
    """Hands out addresses of segments."""

    @abstractmethod
    def take(self, size: int) -> int:
        """An address where `size` bytes are unused."""

    def give(self, address: int, size: int) -> None:
        """Take back what `take` gave."""
        return


@dataclass(slots=True)
class Upward(AddressSpace):
    """Every segment above all before it."""

    top: int = _MIDDLE

    def take(self, size: int) -> int:
        """See `AddressSpace.take`."""
        address, self.top = self.top, self.top + size
        return address


@dataclass(slots=True)
class Downward(AddressSpace):
    """Every segment below all before it."""

    bottom: int = _MIDDLE

    def take(self, size: int) -> int:
        """See `AddressSpace.take`."""
        self.bottom -= size
        return self.bottom


@dataclass(slots=True)
class Shuffled(AddressSpace):
    """Every segment anywhere."""

    seed: int
    _random: random.Random = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def take(self, size: int) -> int:
        """See `AddressSpace.take`."""
        self._next += 1
        return (self._random.getrandbits(16) << 44) + (self._next << 20)


@dataclass(slots=True)
class Ranges(AddressSpace):
    """Ranges of whole 32 MiB taken from the top down and filled from their low end.

    What is left of a range serves later segments, the lowest address first.
    """

    bottom: int = _MIDDLE
    _free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, size: int) -> int:
        """See `AddressSpace.take`."""
        hole = next((hole for hole in self._free if hole[1] >= size), None)
        if hole is not None:
            self._free.remove(hole)
        else:
            length = -(-size // _RANGE) * _RANGE
            self.bottom -= length
            hole = (self.bottom, length)
        address, length = hole
        if length > size:
            insort(self._free, (address + size, length - size))
        return address

    def give(self, address: int, size: int) -> None:
        """See `AddressSpace.give`."""
        index = bisect_left(self._free, (address, 0))
        if index < len(self._free) and self._free[index][0] == address + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == address:
            address, size = self._free[index - 1][0], size + self._free[index - 1][1]
            del self._free[index - 1]
        insort(self._free, (address, size))


POLICIES: dict[str, Callable[[], AddressSpace]] = {
    "ranges": Ranges,
    "upward": Upward,
    "downward": Downward,
    "shuffled_1": lambda: Shuffled(1),
    "shuffled_2": lambda: Shuffled(2),
    "shuffled_3": lambda: Shuffled(3),
}
"""By name; the first is the one that explains most of what was seen on an H200."""
