"""Bytes in, bytes out: the only place where a size is read from or written for people."""

import re
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z]*)\s*")
_LARGEST = 1 << 62


def parse_bytes(value: object, *, key: str) -> int:
    """Read a size: an integer, or text such as `80GiB`, `1.5 GiB`, `500MB`.

    `KiB`, `MiB`, `GiB`, `TiB` are binary, `KB`, `MB`, `GB`, `TB` are decimal; a number without a
    unit is bytes. `key` is named in the error.

    Raises:
        ValueError: the value is not a size, is negative, or larger than any memory.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{key} must be a size such as 80GiB or a number of bytes, got {value!r}")
    if isinstance(value, int):
        value = min(value, _LARGEST + 1)
    match = _SIZE.fullmatch(str(value))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{key} must be a size such as 80GiB or a number of bytes, got {value!r}")
    size = Fraction(match[1]) * _UNITS[match[2].upper()]
    if size < 0:
        raise ValueError(f"{key} must not be negative, got {value!r}")
    if size > _LARGEST:
        raise ValueError(f"{key} must be at most {_LARGEST} bytes, got {str(value)[:40]!r}")
    if size.denominator != 1 and match[2].upper() in ("", "B"):
        raise ValueError(f"{key} must be whole bytes, got {value!r}")
    return int(size)


def gib(size_bytes: int) -> str:
    """Write a size for a person, e.g. `56.60 GiB`; `3.00 MiB` or `120 B` where that reads 0.00."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size_bytes == 0 or abs(size_bytes) >= unit / 200:
            return f"{size_bytes / unit:,.2f} {name}"
    return f"{size_bytes:,} B"
