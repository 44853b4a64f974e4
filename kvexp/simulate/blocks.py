"""Single blocks that are alive at a peak, simulated or measured, and where the two differ."""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvexp.simulate.replaying import live_at
from kvexp.simulate.settings import AllocatorSettings
from kvexp.simulate.trace import Trace

INPUT = "token ids"
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_MAKES_ROOM = ("empty", "empty_like", "empty_strided", "new_empty", "resize_", "to", "contiguous")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """Memory that one allocation asked for, before rounding, by what asked; "" is not known."""

    size_bytes: int
    operator: str = ""
    module: str = ""
    line: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What only one side holds, or both in other sizes, at one source line (or operator)."""

    simulated_bytes: int
    simulated_count: int
    measured_bytes: int
    measured_count: int
    operator: str
    module: str
    line: str


def blocks_at(
    trace: Trace, event: int, input_bytes: int, workspaces: Mapping[str, int]
) -> tuple[LiveBlock, ...]:
    """What is alive after so many events of a fresh process's forward, the largest first.

    The token ids and the libraries' workspaces are among it, the weights are not.
    """
    found = [LiveBlock(size_bytes=input_bytes, operator=INPUT)]
    found += [
        LiveBlock(size_bytes=workspaces[name], operator=f"{name} workspace")
        for place, name in trace.workspaces
        if place < event
    ]
    for number, size in live_at(trace, event):
        cause = trace.cause(number)
        found.append(
            LiveBlock(
                size_bytes=size, operator=cause.operator, module=cause.module, line=cause.line
            )
        )
    return tuple(sorted(found, key=lambda block: -block.size_bytes))


def blocks_in_snapshot(snapshot: Mapping[str, Any], device: int = 0) -> tuple[LiveBlock, ...]:
    """What was alive at the peak of a recorded history, the largest first.

    `snapshot` is what `torch.cuda.memory._snapshot()` gives after `_record_memory_history`: to be
    compared with a forward, recording has to start after loading and before the token ids are
    made. Lines come with stacks="python", operators with stacks="all".

    Raises:
        ValueError: it holds no history of that device.
    """
    histories = snapshot.get("device_traces") or []
    history = histories[device] if device < len(histories) else []
    peak = _alive_after(history, _peak_of(history))
    if not peak:
        raise ValueError(
            f"the snapshot holds no allocations of device {device}: start with"
            " torch.cuda.memory._record_memory_history()"
        )
    return tuple(sorted(map(_measured, peak), key=lambda block: -block.size_bytes))


def differences(
    simulated: Iterable[LiveBlock], measured: Iterable[LiveBlock]
) -> tuple[Difference, ...]:
    """Where two lists of blocks differ, the largest difference in bytes first; empty if nowhere.

    Blocks of one size at one source line are the same, then blocks of one size anywhere. What is
    left is put together by source line (by operator and module where no line is known), so that one
    tensor of two sizes is one difference.
    """
    left, right = list(simulated), list(measured)
    left, right = _unmatched(left, right, lambda block: (block.size_bytes, block.line))
    left, right = _unmatched(left, right, lambda block: block.size_bytes)
    places: dict[Hashable, tuple[list[LiveBlock], list[LiveBlock]]] = defaultdict(lambda: ([], []))
    for side, blocks in enumerate((left, right)):
        for block in blocks:
            place = block.line or (block.operator, block.module)
            places[place][side].append(block)
    found = [_difference(*sides) for sides in places.values()]
    return tuple(sorted(found, key=lambda each: -abs(each.simulated_bytes - each.measured_bytes)))


def _peak_of(history: Sequence[Mapping[str, Any]]) -> int:
    """The number of entries after which most is allocated."""
    sizes: dict[int, int] = {}
    total = highest = place = 0
    for number, entry in enumerate(history, start=1):
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = AllocatorSettings().round(int(entry["size"]))
            total += sizes[entry["addr"]]
            if total > highest:
                highest, place = total, number
        elif entry["action"] == "free_completed":
            total -= sizes.pop(entry["addr"], 0)
    return place


def _alive_after(history: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    alive: dict[int, Mapping[str, Any]] = {}
    for entry in history[:count]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry
        elif entry["action"] == "free_completed":
            alive.pop(entry["addr"], None)
    return list(alive.values())


@cache
def short_path(path: str) -> str:
    """A source file by its place below the installed packages, else its name."""
    below = _PACKAGES.sub("", path)
    return Path(below).name if below.startswith("/") else below


def _unmatched(
    left: list[LiveBlock], right: list[LiveBlock], key: Any
) -> tuple[list[LiveBlock], list[LiveBlock]]:
    common = Counter(map(key, left)) & Counter(map(key, right))
    return _without(left, common, key), _without(right, common, key)


def _without(blocks: list[LiveBlock], taken: Counter[Any], key: Any) -> list[LiveBlock]:
    to_take, kept = Counter(taken), []
    for block in blocks:
        if to_take[key(block)] > 0:
            to_take[key(block)] -= 1
        else:
            kept.append(block)
    return kept


def _difference(simulated: Sequence[LiveBlock], measured: Sequence[LiveBlock]) -> Difference:
    """The simulated side names the place where both could."""
    known = [*simulated, *measured]
    return Difference(
        simulated_bytes=sum(block.size_bytes for block in simulated),
        simulated_count=len(simulated),
        measured_bytes=sum(block.size_bytes for block in measured),
        measured_count=len(measured),
        operator=next((block.operator for block in known if block.operator), ""),
        module=next((block.module for block in known if block.module), ""),
        line=known[0].line,
    )


def _measured(entry: Mapping[str, Any]) -> LiveBlock:
    frames = entry.get("frames") or []
    operators = [found[1] for frame in frames if (found := _OPERATOR.search(frame["name"]))]
    named = [name for name in operators if name.split("_memory")[0] not in _MAKES_ROOM]
    paths = [(short_path(frame["filename"]), frame["line"]) for frame in frames]
    lines = [
        f"{path}:{line}"
        for path, line in paths
        if path.endswith(".py") and not path.startswith("torch/")
    ]
    return LiveBlock(
        size_bytes=int(entry["size"]),
        operator=f"aten.{named[0]}" if named else "",
        line=lines[0] if lines else "",
    )
