"""All that a plugin may import from kvexp."""

from kvexp import cache, layers, simulate, terms, weights
from kvexp.deployment import Deployment
from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.engine import CachePlan, Engine, Quota, RankShape
from kvexp.errors import InvalidValue, ProfilerUnavailable
from kvexp.free_memory import FreeMemoryEngine
from kvexp.gpu_lock import GpuLock
from kvexp.hf import config_json
from kvexp.profiler import DeviceFacts, EngineRefused, Measurement, Profiler
from kvexp.request import AUTO_FIT, Gpu, Knobs, Model, parse_bytes_of, share_of_total
from kvexp.results import KvGroup, Part, Profile, Provenance, Refusal, Stage
from kvexp.simulate.allocator import CachingAllocator
from kvexp.units import GIB, KIB, MIB, gib
from kvexp.weights import Slice, Tensor
from kvexp.workload import (
    MEASURABLE_MODEL_TYPES,
    Counters,
    UnusableReading,
    WarmupShape,
    Workload,
    WorkloadMeasurement,
    check_device,
    check_measurable,
    load_key,
    transformers_config,
)

__all__ = [
    "AUTO_FIT",
    "GIB",
    "KIB",
    "MEASURABLE_MODEL_TYPES",
    "MIB",
    "CachePlan",
    "CachingAllocator",
    "Counters",
    "DType",
    "Deployment",
    "DeviceFacts",
    "Engine",
    "EngineRefused",
    "FreeMemoryEngine",
    "Gpu",
    "GpuLock",
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
    "WarmupShape",
    "Workload",
    "WorkloadMeasurement",
    "cache",
    "check_device",
    "check_measurable",
    "config_json",
    "gib",
    "layers",
    "load_key",
    "parse_bytes_of",
    "share_of_total",
    "simulate",
    "terms",
    "transformers_config",
    "weights",
]
