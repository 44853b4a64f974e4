"""What is alive at the peak, and whose it is.

torch's allocator records every allocation; hooks note how many there had been whenever a module is
entered or left. So each allocation belongs to one module exactly, also one that a kernel makes for
itself.
"""

import pickle
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUTSIDE = "outside the model"
LARGEST = 40
"""How many places a result lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One allocation that is alive at the peak. `stays`: it outlives the forward."""

    size_bytes: int
    module: str
    line: str
    stays: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """The blocks of a forward that are alive at its peak.

    Sizes are as the allocator rounds them; `unsplit_bytes` is the rest of larger cached blocks that
    it handed out whole, so that blocks and rest sum to `growth_bytes`, the peak's growth over what
    was allocated before.
    """

    blocks: tuple[Block, ...]
    growth_bytes: int

    @property
    def unsplit_bytes(self) -> int:
        """What the counters hold beyond the blocks."""
        return self.growth_bytes - sum(block.size_bytes for block in self.blocks)

    def as_dict(self) -> dict[str, Any]:
        """Bytes by module and line of code, the largest first, as plain data."""
        places: dict[tuple[str, str, bool], list[int]] = {}
        for block in self.blocks:
            places.setdefault((block.module, block.line, block.stays), []).append(block.size_bytes)
        rows: list[dict[str, Any]] = [
            {"module": module, "line": line, "stays": stays, "blocks": len(sizes),
             "size_bytes": sum(sizes)}
            for (module, line, stays), sizes in places.items()
        ]  # fmt: skip
        rows.sort(key=lambda row: -row["size_bytes"])
        return {
            "growth_bytes": self.growth_bytes,
            "unsplit_bytes": self.unsplit_bytes,
            "stays_bytes": sum(block.size_bytes for block in self.blocks if block.stays),
            "places": rows[:LARGEST],
            "further_bytes": sum(row["size_bytes"] for row in rows[LARGEST:]),
        }


class Recorder:
    """Records the allocations of one forward on one CUDA device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.snapshot: Mapping[str, Any] = {}
        self.marks: list[tuple[int, str]] = []
        self._first = 0
        self._before = 0
        self._peak = 0
        self._entered: list[str] = []

    @contextmanager
    def recording(self, model: Any) -> Iterator[None]:
        """Record what happens within, and whose it is."""
        import torch  # noqa: PLC0415

        hooks = [
            hook
            for name, module in model.named_modules()
            if name
            for hook in (
                module.register_forward_pre_hook(self._enter(torch, name)),
                module.register_forward_hook(self._leave(torch), always_call=True),
            )
        ]
        self._before = int(torch.cuda.memory_allocated(self.device))
        self._first = self._count(torch)
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=sys.maxsize)
        try:
            yield
            self._peak = int(torch.cuda.max_memory_allocated(self.device))
            self.snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
            for hook in hooks:
                hook.remove()

    def attribution(self) -> Attribution:
        """The blocks at the peak; only after a recording."""
        index = int(self.device.partition(":")[2] or 0)
        return Attribution(
            blocks=at_peak(self.snapshot["device_traces"][index], self.marks, self._first),
            growth_bytes=self._peak - self._before,
        )

    def write(self, path: Path) -> None:
        """Write what PyTorch's memory viewer (pytorch.org/memory_viz) opens.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_bytes(pickle.dumps(self.snapshot, protocol=4))

    def _enter(self, torch: Any, name: str) -> Any:
        def hook(*_: Any) -> None:
            self._entered.append(name)
            self.marks.append((self._count(torch), name))

        return hook

    def _leave(self, torch: Any) -> Any:
        def hook(*_: Any) -> None:
            self._entered.pop()
            inside = self._entered[-1] if self._entered else OUTSIDE
            self.marks.append((self._count(torch), inside))

        return hook

    def _count(self, torch: Any) -> int:
        return int(torch.cuda.memory_stats(self.device)["allocation.all.allocated"])


def at_peak(
    trace: Sequence[Mapping[str, Any]], marks: Sequence[tuple[int, str]], first: int
) -> tuple[Block, ...]:
    """The blocks that are alive when most is, in the order of their allocation.

    `trace` is the allocator's own; `marks` say from which allocation on (counted from the start of
    the process, `first` when the trace began) a module was at work.
    """
    births = _births(trace, marks, first)
    alive: dict[int, int] = {}
    now = most = 0
    held: tuple[int, ...] = ()
    for index, event in enumerate(trace):
        address = event["addr"]
        if index in births:
            alive[address] = index
            now += births[index][0]
            if now > most:
                most, held = now, ()
        elif event["action"] == "free_completed" and address in alive:
            if now == most and not held:
                held = tuple(alive.values())  # nothing was larger until now
            now -= births[alive.pop(address)][0]
    stays = set(alive.values())
    return tuple(
        Block(size_bytes=size, module=module, line=line, stays=index in stays)
        for index in held or alive.values()
        for size, module, line in [births[index]]
    )


def _births(
    trace: Sequence[Mapping[str, Any]], marks: Sequence[tuple[int, str]], first: int
) -> dict[int, tuple[int, str, str]]:
    """(size, module, line) of each allocation of a trace, by its place there."""
    counts = [count for count, _ in marks]
    found: dict[int, tuple[int, str, str]] = {}
    for index, event in enumerate(trace):
        if event["action"] != "alloc":
            continue
        mark = bisect_right(counts, first + len(found)) - 1
        module = marks[mark][1] if mark >= 0 else OUTSIDE
        size = -(-int(event["size"]) // 512) * 512
        found[index] = (size, module, _line(event.get("frames", ())))
    return found


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line outside torch itself."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and "-packages/torch/" not in file:
            return f"{Path(file).name}:{frame.get('line')} {frame.get('name')}"
    return ""
