"""Headers of safetensors files: names, dtypes and shapes, without the tensors.

A file is eight bytes of header length (little-endian), the header as JSON, then the tensors; see
the format's description at huggingface.co/docs/safetensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvexp.errors import InvalidValue

LARGEST_HEADER_BYTES = 100_000_000  # the format's own limit

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element by the format's dtype names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor of a checkpoint as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def numel(self) -> int:
        """Stored elements; packed ones count once."""
        return prod(self.shape)


def read_header(path: Path) -> list[Stored]:
    """The tensors of one file, in the order of their names.

    A file of the header alone is read like a whole one.

    Raises:
        InvalidValue: the file is no safetensors file, or is damaged or cut off.
    """
    try:
        with path.open("rb") as file:
            total = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or not 2 <= length <= min(total - 8, LARGEST_HEADER_BYTES):
                raise InvalidValue(
                    f"{path} is no safetensors file, or is cut off: a header of {length} bytes in"
                    f" a file of {total}"
                )
            text = file.read(length)
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidValue(f"{path} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise InvalidValue(f"{path} is no safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    ends = sorted(_span(path, name, entry) for name, entry in header.items())
    _check_spans(path, ends, total - 8 - length)
    return [_stored(path, name, header[name]) for name in sorted(header)]


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise InvalidValue(f"{path} is damaged: tensor {name!r} has no data_offsets")
    return offsets[0], offsets[1], name


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    position = 0
    for start, end, name in spans:
        if start != position:
            raise InvalidValue(f"{path} is damaged: tensor {name!r} overlaps or leaves a hole")
        position = end
    if data_bytes not in (0, position):
        state = "cut off" if data_bytes < position else "damaged"
        raise InvalidValue(
            f"{path} is {state}: its tensors take {position} bytes, {data_bytes} follow the header"
        )


def _stored(path: Path, name: str, entry: Mapping[str, Any]) -> Stored:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise InvalidValue(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise InvalidValue(f"{path} is damaged: tensor {name!r} has no shape")
    start, end = entry["data_offsets"]
    bits = prod(shape) * BITS[dtype]
    if bits != 8 * (end - start):
        raise InvalidValue(
            f"{path} is damaged: tensor {name!r} of {dtype} {shape} cannot take {end - start} bytes"
        )
    return Stored(name=name, dtype=dtype, shape=tuple(shape), size_bytes=end - start)
