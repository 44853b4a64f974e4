"""All that a plugin may import from kvexp."""

from kvexp import cache, weights
from kvexp.allocator import CachingAllocator
from kvexp.deployment import Deployment
from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.engine import CachePlan, Engine, Quota, RankShape
from kvexp.errors import InvalidValue, ProfilerUnavailable
from kvexp.profiler import DeviceFacts, Measurement, Profiler
from kvexp.request import AUTO_FIT, Gpu, Knobs, Model, parse_bytes_of
from kvexp.results import KvGroup, Part, Profile, Provenance, Refusal, Stage
from kvexp.units import GIB, KIB, MIB, gib
from kvexp.weights import Slice, Tensor
from kvexp.workload import (
    Counters,
    UnusableReading,
    Workload,
    WorkloadMeasurement,
    check_device,
    check_measurable,
    load_key,
)

__all__ = [
    "AUTO_FIT",
    "GIB",
    "KIB",
    "MIB",
    "CachePlan",
    "CachingAllocator",
    "Counters",
    "DType",
    "Deployment",
    "DeviceFacts",
    "Engine",
    "Gpu",
    "InvalidValue",
    "Knobs",
    "KvDtype",
    "KvGroup",
    "Measurement",
    "Model",
    "Part",
    "Profile",
    "Profiler",
    "ProfilerUnavailable",
    "Provenance",
    "Quantization",
    "Quota",
    "RankShape",
    "Refusal",
    "Slice",
    "Stage",
    "Tensor",
    "UnusableReading",
    "Workload",
    "WorkloadMeasurement",
    "cache",
    "check_device",
    "check_measurable",
    "gib",
    "load_key",
    "parse_bytes_of",
    "weights",
]
