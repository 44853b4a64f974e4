"""PyTorch's CUDA caching allocator as pure arithmetic: which block serves which request.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with one stream and no expandable
segments: sizes are rounded to 512 bytes; requests up to 1 MiB come from 2 MiB segments, larger
ones below 10 MiB from 20 MiB segments, the rest from segments of whole 2 MiB; the smallest free
block that fits is taken and its rest split off when that is worth it. `max_split_size_bytes` is
the setting `max_split_size_mb`: blocks of that size and more are never split.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from kvexp.units import MIB

_ROUND = 512
_SMALL = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_MEDIUM_SEGMENT = 20 * MIB
_LARGE = 10 * MIB


@dataclass(slots=True, eq=False)
class _Block:
    size: int
    pool: list[tuple[int, int, "_Block"]]
    order: int
    free: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass(slots=True)
class CachingAllocator:
    """Counts what live tensors occupy; `allocated_bytes` is torch's `memory_allocated`."""

    max_split_size_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    _small: list[tuple[int, int, _Block]] = field(default_factory=list)
    _large: list[tuple[int, int, _Block]] = field(default_factory=list)
    _count: int = 0

    def allocate(self, size_bytes: int) -> _Block:
        """Serve one request; the block returned is what `free` takes back."""
        size = max(_ROUND, -(-size_bytes // _ROUND) * _ROUND)
        pool = self._small if size <= _SMALL else self._large
        block = self._best_fit(pool, size) or self._segment(pool, size)
        block.free = False
        rest = block.size - size
        if self._splits(pool, size, rest):
            tail = _Block(rest, pool, self._next(), free=True, before=block, after=block.after)
            if tail.after is not None:
                tail.after.before = tail
            block.after, block.size = tail, size
            insort(pool, (tail.size, tail.order, tail))
        self.allocated_bytes += block.size
        return block

    def free(self, block: _Block) -> None:
        """Take a block back and merge it with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other)
                block.size += other.size
                if other is block.before:
                    block.before, block.order = other.before, other.order
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after is not None:
                        block.after.before = block
        insort(block.pool, (block.size, block.order, block))

    def _best_fit(self, pool: list[tuple[int, int, _Block]], size: int) -> _Block | None:
        index = bisect_left(pool, (size, -1))
        if index == len(pool):
            return None
        block = pool[index][2]
        limit = self.max_split_size_bytes
        if limit is not None:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + _MEDIUM_SEGMENT:
                return None
        del pool[index]
        return block

    def _segment(self, pool: list[tuple[int, int, _Block]], size: int) -> _Block:
        if pool is self._small:
            segment = _SMALL_SEGMENT
        elif size < _LARGE:
            segment = _MEDIUM_SEGMENT
        else:
            segment = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        self.reserved_bytes += segment
        return _Block(segment, pool, self._next())

    def _splits(self, pool: list[tuple[int, int, _Block]], size: int, rest: int) -> bool:
        if pool is self._small:
            return rest >= _ROUND
        limit = self.max_split_size_bytes
        return rest > _SMALL and (limit is None or size < limit)

    def _remove(self, block: _Block) -> None:
        del block.pool[bisect_left(block.pool, (block.size, block.order, block))]

    def _next(self) -> int:
        self._count += 1
        return self._count
