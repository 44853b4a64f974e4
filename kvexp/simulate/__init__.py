"""A forward pass on a machine without a GPU.

`tracing` runs a transformers model on tensors without data and notes every allocation, `kernels`
and `device` say what a card's kernels take beside them, `allocator` replays all of it as PyTorch's
caching allocator would, `forecast` reads the figures off. Only what `tracing` calls needs torch.
"""

from kvexp.simulate.allocator import CachingAllocator, OutOfMemory
from kvexp.simulate.blocks import Difference, LiveBlock, blocks_in_snapshot, differences
from kvexp.simulate.case import Case
from kvexp.simulate.configs import make_config, read_facts
from kvexp.simulate.device import Device, find, read_device
from kvexp.simulate.errors import Untraceable
from kvexp.simulate.forecast import Confidence, Forecast, Limits, check_fits
from kvexp.simulate.pictures import draw_timeline
from kvexp.simulate.settings import AllocatorSettings, parse_settings
from kvexp.simulate.simulation import Subject, simulate, traces_of
from kvexp.simulate.snapshot import write_snapshot
from kvexp.simulate.trace import Trace

__all__ = [
    "AllocatorSettings",
    "CachingAllocator",
    "Case",
    "Confidence",
    "Device",
    "Difference",
    "Forecast",
    "Limits",
    "LiveBlock",
    "OutOfMemory",
    "Subject",
    "Trace",
    "Untraceable",
    "blocks_in_snapshot",
    "check_fits",
    "differences",
    "draw_timeline",
    "find",
    "make_config",
    "parse_settings",
    "read_device",
    "read_facts",
    "simulate",
    "traces_of",
    "write_snapshot",
]
