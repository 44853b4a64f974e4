"""Profilers side by side: each term, its ratio to the first one's, and where they differ most."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvexp import simulate
from kvexp.results import Compared
from kvexp.units import GIB, gib

SIMULATED = "simulated"
SHOWN_DIFFERENCES = 8
"""Differences between blocks that are said in words; all are in the readings."""

_NAMES = {"non_torch": "non-torch", "cudagraph": "CUDA graphs"}


def terms(compared: Compared) -> dict[str, int]:
    """Bytes by the name of the term; empty where the profiler has none."""
    if compared.profile is None:
        return {}
    return {part.name: part.size_bytes for part in compared.profile.parts}


def largest_difference(compared: Sequence[Compared]) -> Iterator[str]:
    """One line: the component in which a profiler is furthest from the first, and by how much."""
    first, *others = [each for each in compared if each.profile is not None]
    base = terms(first)
    found = [
        (size - base[name], name, each)
        for each in others
        for name, size in terms(each).items()
        if name in base
    ]
    delta, name, other = max(found, key=lambda item: abs(item[0]))
    if delta == 0:
        yield f"no component differs from {first.profiler}'s"
        return
    size = terms(other)[name]
    ratio = f", x{size / base[name]:.4f}" if base[name] else ""
    yield (
        f"largest difference: {_NAMES.get(name, name)}, {gib(size)} by {other.profiler} against"
        f" {gib(base[name])} by {first.profiler}: {delta:+,} bytes{ratio}"
    )


def table_lines(compared: Sequence[Compared]) -> Iterator[str]:
    """One column a profiler that has terms: sizes in GiB and their ratio to the first one's."""
    known = [each for each in compared if each.profile is not None]
    if not known:
        return
    names = list(dict.fromkeys(name for each in known for name in terms(each)))
    rows = [["GiB", *(each.profiler for each in known)]]
    for name in names:
        sizes = [terms(each).get(name) for each in known]
        rows.append([_NAMES.get(name, name), *_cells(sizes, GIB, ".3f")])
    rows.append(["available", *_cells([each.available_bytes for each in known], GIB, ".3f")])
    rows.append(["blocks", *_cells([each.num_blocks for each in known], 1, ",.0f")])
    rows.append(["KV tokens", *_cells([each.kv_tokens for each in known], 1, ",.0f")])
    rows.append(["seconds", *(f"{each.duration_s or 0:,.1f}" for each in known)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *padded]).rstrip()


def _cells(values: Sequence[int | None], unit: int, form: str) -> list[str]:
    texts = ["-" if value is None else format(value / unit, form) for value in values]
    widest = max(map(len, texts))
    base = values[0]
    return [
        text.rjust(widest) + (f" x{value / base:.4f}" if index and base and value else "")
        for index, (text, value) in enumerate(zip(texts, values, strict=True))
    ]


# --- blocks alive at the peak ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksAtPeak:
    """The blocks of a simulated and of a measured forward, where the two differ."""

    simulated: str
    measured: str
    simulated_bytes: int
    measured_bytes: int
    simulated_count: int
    measured_count: int
    differences: tuple[simulate.Difference, ...]

    def lines(self) -> Iterator[str]:
        """What differs, the largest first."""
        yield (
            f"blocks at the peak: {self.simulated} {self.simulated_count:,} of"
            f" {self.simulated_bytes:,} bytes, {self.measured} {self.measured_count:,} of"
            f" {self.measured_bytes:,} bytes" + ("" if self.differences else "; they are the same")
        )
        for each in self.differences[:SHOWN_DIFFERENCES]:
            delta = each.measured_bytes - each.simulated_bytes
            place = " ".join(filter(None, (each.operator, each.module, each.line)))
            yield (
                f"  {place or 'unknown'}: {self.simulated} {each.simulated_count} of"
                f" {each.simulated_bytes:,} bytes, {self.measured} {each.measured_count} of"
                f" {each.measured_bytes:,} bytes ({delta:+,})"
            )
        if len(self.differences) > SHOWN_DIFFERENCES:
            yield f"  and {len(self.differences) - SHOWN_DIFFERENCES} more in readings"

    def as_dict(self) -> dict[str, Any]:
        """For a result's readings."""
        differences = [asdict(each) for each in self.differences]
        return {"blocks_at_peak": {**asdict(self), "differences": differences}}


def blocks_at_peak(compared: Sequence[Compared]) -> BlocksAtPeak | None:
    """Compare block by block, where a simulation and a recorded history are both there."""
    simulated = _first(compared, _simulated_blocks)
    measured = _first(compared, _measured_blocks)
    if simulated is None or measured is None:
        return None
    left, right = simulated[1], measured[1]
    return BlocksAtPeak(
        simulated=simulated[0],
        measured=measured[0],
        simulated_bytes=sum(block.size_bytes for block in left),
        measured_bytes=sum(block.size_bytes for block in right),
        simulated_count=len(left),
        measured_count=len(right),
        differences=simulate.differences(left, right),
    )


_Blocks = tuple[simulate.LiveBlock, ...]


def _first(compared: Sequence[Compared], blocks_of: Any) -> tuple[str, _Blocks] | None:
    for each in compared:
        if (blocks := blocks_of(each.readings)) is not None:
            return each.profiler, blocks
    return None


def _simulated_blocks(readings: Mapping[str, Any]) -> _Blocks | None:
    listed = readings.get("simulation", {}).get("live_blocks")
    return None if listed is None else tuple(simulate.LiveBlock(**block) for block in listed)


def _measured_blocks(readings: Mapping[str, Any]) -> _Blocks | None:
    """From the snapshot file that a profiler of this run has just written."""
    for file in readings.get("files", ()):
        path = Path(file)
        if path.suffix == ".pickle" and path.is_file():
            return simulate.blocks_in_snapshot(pickle.loads(path.read_bytes()))
    return None
