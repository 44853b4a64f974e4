"""A simulated forward as a file that PyTorch's memory viewer (pytorch.org/memory_viz) opens."""

import pickle
from pathlib import Path
from typing import Any

from kvexp.simulate.settings import AllocatorSettings
from kvexp.simulate.trace import Cause, Trace

_START = 1 << 46


def write_snapshot(trace: Trace, path: Path) -> None:
    """Write the trace of allocations as `torch.cuda.memory._dump_snapshot` would.

    Every allocation has an address of its own, which is all that the viewer's timeline needs.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_bytes(pickle.dumps(snapshot(trace), protocol=4))


def snapshot(trace: Trace) -> dict[str, Any]:
    """The trace as `torch.cuda.memory._snapshot` would give it."""
    entries: list[dict[str, Any]] = []
    places: list[tuple[int, int]] = []
    address = _START
    for event in trace.events:
        if event >= 0:
            places.append((address, event))
            entries.append(_entry("alloc", address, event, trace.cause(len(places) - 1)))
            address += AllocatorSettings().round(event)
            continue
        at, size = places[-event - 1]
        cause = trace.cause(-event - 1)
        entries.append(_entry("free_requested", at, size, cause))
        entries.append(_entry("free_completed", at, size, cause))
    for time, entry in enumerate(entries):
        entry["time_us"] = time
    return {
        "segments": [],
        "device_traces": [entries],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _entry(action: str, address: int, size: int, cause: Cause) -> dict[str, Any]:
    file, _, line = cause.line.rpartition(":")
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "frames": [
            {"name": cause.operator, "filename": file, "line": int(line) if line else 0},
            {"name": cause.module or "the model", "filename": "", "line": 0},
        ],
    }
