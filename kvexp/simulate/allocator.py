"""PyTorch's CUDA caching allocator as pure arithmetic: which block serves which request.

One device, one stream. Sizes are rounded to 512 bytes; requests up to 1 MiB come from 2 MiB
segments, larger ones below 10 MiB from 20 MiB segments, the rest from segments of whole 2 MiB. The
smallest free block that fits is taken, the lower address among equals, and its rest split off when
that is worth it. Free neighbours of a segment merge. `AllocatorSettings` are the settings of
PYTORCH_ALLOC_CONF; limits make it run out of memory as the real one does.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from kvexp.simulate.addresses import AddressSpace, Upward
from kvexp.simulate.settings import LARGE_SEGMENT, SMALL_REQUEST, SMALL_SEGMENT, AllocatorSettings
from kvexp.units import GIB, MIB, gib

_LARGE_REQUEST = 10 * MIB
_DEFAULT_RANGE = 256 * GIB
_ADDRESS_BITS = 64


class OutOfMemory(RuntimeError):
    """No segment can be had; the figures are those of torch's message.

    `event` is how many events of a forward were replayed before, None where none was running.
    """

    def __init__(self, requested_bytes: int, allocated_bytes: int, cached_bytes: int) -> None:
        super().__init__(
            f"CUDA out of memory (simulated): tried to allocate {gib(requested_bytes)};"
            f" {gib(allocated_bytes)} are allocated and {cached_bytes / MIB:,.2f} MiB reserved"
            " but unallocated"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.cached_bytes = cached_bytes
        self.event: int | None = None


@dataclass(slots=True, eq=False)
class Block:
    """A range of a segment: taken, free, or (expandable segments) an address without memory."""

    address: int
    size: int
    pool: "_Pool"
    allocated: bool = False
    mapped: bool = True
    expandable: bool = False
    requested: int = 0
    freed_at: int = 0
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def is_split(self) -> bool:
        """True when the segment holds other blocks as well."""
        return self.before is not None or self.after is not None

    @property
    def key(self) -> int:
        """Order among the free blocks: by size, then by address."""
        return self.size << _ADDRESS_BITS | self.address


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one class of sizes, and the ranges of expandable segments without memory."""

    small: bool
    keys: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    unmapped: list[Block] = field(default_factory=list)
    searches: int = 0

    def add(self, block: Block) -> None:
        key = block.size << _ADDRESS_BITS | block.address
        block.freed_at = self.searches
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = block.size << _ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def remember_unmapped(self, block: Block) -> None:
        self.unmapped.append(block)
        self.unmapped.sort(key=lambda each: each.key)


class CachingAllocator:
    """What live tensors occupy and what is held from the driver.

    `allocated_bytes` and `reserved_bytes` are torch's `memory_allocated` and `memory_reserved`,
    `requested_bytes` what was asked for before rounding; each has a peak. `allowed_bytes` is the
    cap of `set_per_process_memory_fraction`, `device_bytes` what the driver can give.
    """

    def __init__(
        self,
        max_split_size_bytes: int | None = None,
        *,
        settings: AllocatorSettings | None = None,
        addresses: AddressSpace | None = None,
        allowed_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings(max_split_size_bytes=max_split_size_bytes)
        self.addresses = addresses or Upward()
        self.allowed_bytes = allowed_bytes
        self.device_bytes = device_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.requested_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_requested_bytes = 0
        self.num_retries = 0
        self._small = _Pool(small=True)
        self._large = _Pool(small=False)
        self._collects = allowed_bytes is not None and self.settings.garbage_collection > 0

    def allocate(self, size_bytes: int) -> Block:
        """Serve one request; the block returned is what `free` takes back.

        Raises:
            OutOfMemory: neither the cache nor the driver can serve it.
        """
        settings = self.settings
        size = settings.round(size_bytes)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._best_fit(pool, size)
        if block is None:
            block = self._new_block(pool, size, size_bytes)
        rest = block.size - size
        if rest and self._splits(pool, size, rest):
            tail = Block(
                block.address + size,
                rest,
                pool,
                expandable=block.expandable,
                before=block,
                after=block.after,
            )
            if tail.after is not None:
                tail.after.before = tail
            block.after, block.size = tail, size
            pool.add(tail)
        block.allocated = True
        block.requested = size_bytes
        self.allocated_bytes += block.size
        self.requested_bytes += size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        return block

    def free(self, block: Block) -> None:
        """Take a block back and merge it with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.allocated = False
        self._merge_neighbours(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give segments back to the driver that no tensor uses."""
        for pool in (self._large, self._small):
            expandable = []
            for block in list(pool.blocks.values()):
                if block.expandable:
                    expandable.append(block)
                elif not block.is_split:
                    self._release(block)
            for block in expandable:
                self._unmap(block)

    def reset_peaks(self) -> None:
        """Forget the peaks, as `reset_peak_memory_stats` does."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_requested_bytes = self.requested_bytes

    # --- the cache ---------------------------------------------------------------------------

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        if self._collects:
            pool.searches += 1
        keys = pool.keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index == len(keys):
            return None
        block = pool.blocks[keys[index]]
        settings = self.settings
        if settings.expandable_segments:
            block = self._least_expandable(pool, index)
        limit = settings.max_split_size_bytes
        if limit is not None:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + settings.max_non_split_rounding_bytes:
                return None
        pool.remove(block)
        return block

    def _least_expandable(self, pool: _Pool, index: int) -> Block:
        """The block whose segment can grow least, among those that fit in order of size."""
        block = pool.blocks[pool.keys[index]]
        while block.is_split and index + 1 < len(pool.keys):
            following = pool.blocks[pool.keys[index + 1]]
            if _reach(following) >= _reach(block):
                break
            block, index = following, index + 1
        return block

    def _splits(self, pool: _Pool, size: int, rest: int) -> bool:
        if pool.small or self.settings.expandable_segments:
            return True  # sizes are multiples of the smallest block
        limit = self.settings.max_split_size_bytes
        return rest > SMALL_REQUEST and (limit is None or size < limit)

    def _merge_neighbours(self, block: Block) -> None:
        before, after = block.before, block.after
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self._forget(before)
            block.size += before.size
            block.address = before.address
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.allocated and after.mapped == block.mapped:
            self._forget(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    @staticmethod
    def _forget(block: Block) -> None:
        if block.mapped:
            block.pool.remove(block)
        else:
            block.pool.unmapped.remove(block)

    # --- the driver --------------------------------------------------------------------------

    def _new_block(self, pool: _Pool, size: int, requested: int) -> Block:
        """From the driver, giving cached segments back where it has nothing left."""
        if self._collects:
            self._collect_garbage()
        segment = _segment_size(size)
        block = self._grow(pool, size, segment)
        if block is None and self._release_oversize(pool, segment):
            block = self._grow(pool, size, segment)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._grow(pool, size, segment)
        if block is None:
            cached = self.reserved_bytes - self.allocated_bytes
            raise OutOfMemory(requested, self.allocated_bytes, cached)
        return block

    def _grow(self, pool: _Pool, size: int, segment: int) -> Block | None:
        if self.allowed_bytes is not None and self.reserved_bytes + segment > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        if not self._driver_has(segment):
            return None
        self._reserve(segment)
        return Block(self.addresses.take(segment), segment, pool)

    def _driver_has(self, size: int) -> bool:
        return self.device_bytes is None or self.reserved_bytes + size <= self.device_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.addresses.give(block.address, block.size)
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: _Pool, segment: int) -> bool:
        """Give back unsplittable blocks until they amount to the request; False if too few."""
        limit = self.settings.max_split_size_bytes
        if limit is None:
            return False
        wanted = max(segment, limit)
        index = bisect_left(pool.keys, wanted << _ADDRESS_BITS)
        if index < len(pool.keys) and not pool.blocks[pool.keys[index]].expandable:
            self._release(pool.blocks[pool.keys[index]])
            return True
        released = 0
        for key in reversed(pool.keys[:index]):
            block = pool.blocks[key]
            if released >= wanted or block.size < limit:
                break
            if not block.expandable:
                released += block.size
                self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back large segments that have been free for longer than the average."""
        allowed = self.allowed_bytes or 0
        excess = self.reserved_bytes - int(self.settings.garbage_collection * allowed)
        pool = self._large
        candidates = [b for b in pool.blocks.values() if not b.is_split and not b.expandable]
        while excess > 0 and candidates:
            ages = [pool.searches - block.freed_at for block in candidates]
            average = sum(ages) / len(ages)
            for block, age in zip(list(candidates), ages, strict=True):
                if age >= average:
                    excess -= block.size
                    candidates.remove(block)
                    self._release(block)

    # --- expandable segments -----------------------------------------------------------------

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Put memory behind the addresses after a free block, or in a new range."""
        block = self._room(pool, size) or self._new_range(pool)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            if following is None:
                raise AssertionError("a range is larger than any request")
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    @staticmethod
    def _room(pool: _Pool, size: int) -> Block | None:
        for unmapped in pool.unmapped:
            start = unmapped
            if start.before is not None and not start.before.allocated:
                start = start.before
            room, block = 0, start
            while room < size and not block.allocated:
                room += block.size
                if block.after is None:
                    break
                block = block.after
            if room >= size:
                return start
        return None

    def _new_range(self, pool: _Pool) -> Block:
        size = _DEFAULT_RANGE if self.device_bytes is None else self.device_bytes * 9 // 8
        size = -(-size // LARGE_SEGMENT) * LARGE_SEGMENT
        block = Block(self.addresses.take(size), size, pool, mapped=False, expandable=True)
        pool.remember_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages from a block's start; it merges with the free blocks around it."""
        page = SMALL_SEGMENT if block.pool.small else LARGE_SEGMENT
        size = -(-size // page) * page
        if not self._driver_has(size):
            return False
        block.pool.unmapped.remove(block)
        block.mapped = True
        if size < block.size:
            rest = Block(
                block.address + size,
                block.size - size,
                block.pool,
                mapped=False,
                expandable=True,
                before=block,
                after=block.after,
            )
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            block.pool.remember_unmapped(rest)
        self._merge_neighbours(block)
        block.pool.add(block)
        self._reserve(size)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the memory from the whole pages of a free block."""
        pool = block.pool
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        origin = _first(block).address
        begin = origin + -(-(block.address - origin) // page) * page
        end = origin + (block.address + block.size - origin) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            head = Block(
                block.address,
                begin - block.address,
                pool,
                expandable=True,
                before=block.before,
                after=block,
            )
            if head.before is not None:
                head.before.after = head
            block.before = head
            pool.add(head)
        if end < block.address + block.size:
            tail = Block(
                end,
                block.address + block.size - end,
                pool,
                expandable=True,
                before=block,
                after=block.after,
            )
            if tail.after is not None:
                tail.after.before = tail
            block.after = tail
            pool.add(tail)
        block.address, block.size, block.mapped = begin, end - begin, False
        self.reserved_bytes -= block.size
        self._merge_neighbours(block)
        if block.is_split:
            pool.remember_unmapped(block)
        else:
            self.addresses.give(block.address, block.size)


def _segment_size(size: int) -> int:
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < _LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // SMALL_SEGMENT) * SMALL_SEGMENT


def _reach(block: Block) -> int:
    """The size up to which a free block can grow in place."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _first(block: Block) -> Block:
    while block.before is not None:
        block = block.before
    return block
