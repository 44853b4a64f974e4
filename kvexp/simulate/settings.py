"""PYTORCH_ALLOC_CONF: what its settings mean for the caching allocator."""

import re
from dataclasses import dataclass

from kvexp.errors import InvalidValue
from kvexp.units import MIB

SMALL_REQUEST = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
BLOCK = 512

_INTERVALS = 16  # of powers of two from 1 MiB to 64 GiB
_WITHOUT_EFFECT = (
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
)
"""Settings of other memory, or of speed only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """How the allocator splits, rounds and gives back; the defaults are torch's.

    `power2_divisions` has one entry a power of two, from 1 MiB on; 0 and 1 mean none.
    """

    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT
    expandable_segments: bool = False
    garbage_collection: float = 0.0
    power2_divisions: tuple[int, ...] = ()

    def round(self, size_bytes: int) -> int:
        """The size of the block that a request needs."""
        if self.power2_divisions and size_bytes > BLOCK:
            divisions = self._divisions(size_bytes)
            if divisions > 1 and size_bytes > BLOCK * divisions:
                return _next_division(size_bytes, divisions)
        return (size_bytes + BLOCK - 1) // BLOCK * BLOCK or BLOCK

    def _divisions(self, size_bytes: int) -> int:
        index = size_bytes.bit_length() - MIB.bit_length()
        return self.power2_divisions[min(max(index, 0), _INTERVALS - 1)]


def _next_division(size: int, divisions: int) -> int:
    if size & (size - 1) == 0:
        return size
    step = (1 << (size.bit_length() - 1)) // (1 << (divisions.bit_length() - 1))
    return -(-size // step) * step


def parse_settings(text: str | None, *, key: str = "profiler.allocator_conf") -> AllocatorSettings:
    """Read settings as the environment variable PYTORCH_ALLOC_CONF holds them.

    Raises:
        InvalidValue: a setting is not one that the simulation knows, or its value is wrong.
    """
    found: dict[str, str] = {}
    for item in re.split(r",(?![^\[]*\])", text or ""):
        if not item.strip():
            continue
        name, colon, value = item.partition(":")
        if not colon:
            raise InvalidValue(f"{key}: {item.strip()!r} is not of the form name:value")
        found[name.strip()] = value.strip()
    settings: dict[str, object] = {}
    for name, value in found.items():
        try:
            settings |= _setting(name, value)
        except ValueError as problem:
            raise InvalidValue(f"{key}: {name}:{value} {problem}") from None
    return AllocatorSettings(**settings)  # type: ignore[arg-type]  # _setting gives its types


def _setting(name: str, value: str) -> dict[str, object]:
    if name == "max_split_size_mb":
        size = int(value) * MIB
        if size < LARGE_SEGMENT:
            raise ValueError("must be at least 20")
        return {"max_split_size_bytes": size}
    if name == "max_non_split_rounding_mb":
        size = int(value) * MIB
        if size < LARGE_SEGMENT:
            raise ValueError("must be at least 20")
        return {"max_non_split_rounding_bytes": size}
    if name == "expandable_segments":
        if value not in ("True", "False"):
            raise ValueError("must be True or False")
        return {"expandable_segments": value == "True"}
    if name == "garbage_collection_threshold":
        share = float(value)
        if not 0 < share < 1:
            raise ValueError("must lie between 0 and 1")
        return {"garbage_collection": share}
    if name == "roundup_power2_divisions":
        return {"power2_divisions": _power2_divisions(value)}
    if name == "backend":
        if value != "native":
            raise ValueError("is not simulated: its counters are the driver's")
        return {}
    if name in _WITHOUT_EFFECT:
        return {}
    raise ValueError("is not simulated")


def _power2_divisions(value: str) -> tuple[int, ...]:
    """`4` for all sizes, or `[256:1,512:2,>:8]` by the size in MiB from which each holds."""
    if not value.startswith("["):
        return (_division(value),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last = 0
    for pair in value.strip("[]").split(","):
        size, _, count = (part.strip() for part in pair.partition(":"))
        if size == ">":
            first = last + 1
        else:
            first = min(max(int(size).bit_length() - 1, 0), _INTERVALS - 1)
            if last == 0:
                divisions[:first] = [_division(count)] * first
        divisions[first:] = [_division(count)] * (_INTERVALS - first)
        last = first
    return tuple(divisions)


def _division(text: str) -> int:
    count = int(text)
    if count < 0 or count & (count - 1):
        raise ValueError("needs powers of two")
    return count
