"""All that a plugin may import from kvexp."""

from kvexp import cache, drafts, layers, simulate, terms, weights
from kvexp.deployment import Deployment, LoraRoom, Speculation, StateCaching
from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.engine import CachePlan, Engine, Quota, RankShape
from kvexp.errors import InvalidValue, ProfilerUnavailable
from kvexp.free_memory import FreeMemoryEngine
from kvexp.hf import config_json
from kvexp.nvml import NvmlDevice, Usage, open_device
from kvexp.parts import Encoder
from kvexp.profiler import DeviceFacts, EngineRefused, Measurement, Profiler
from kvexp.request import (
    AUTO_FIT,
    Gpu,
    Knobs,
    Model,
    check_count,
    parse_bytes_of,
    share_of_total,
)
from kvexp.results import TERMS, UNDER_LOAD, KvGroup, Part, Profile, Provenance, Refusal, Stage
from kvexp.simulate.allocator import CachingAllocator
from kvexp.units import GIB, KIB, MIB, gib
from kvexp.weights import Slice, Tensor
from kvexp.workload import (
    Counters,
    Forward,
    ForwardOptions,
    Ranks,
    Recorder,
    UnusableReading,
    Workload,
    WorkloadMeasurement,
    check_captures,
    check_describes,
    check_device,
    check_measurable,
    config_facts,
    import_libraries,
    load_key,
    on_ranks,
    transformers_config,
    visible_uuids,
)

__all__ = [
    "AUTO_FIT",
    "GIB",
    "KIB",
    "MIB",
    "TERMS",
    "UNDER_LOAD",
    "CachePlan",
    "CachingAllocator",
    "Counters",
    "DType",
    "Deployment",
    "DeviceFacts",
    "Encoder",
    "Engine",
    "EngineRefused",
    "Forward",
    "ForwardOptions",
    "FreeMemoryEngine",
    "Gpu",
    "InvalidValue",
    "Knobs",
    "KvDtype",
    "KvGroup",
    "LoraRoom",
    "Measurement",
    "Model",
    "NvmlDevice",
    "Part",
    "Profile",
    "Profiler",
    "ProfilerUnavailable",
    "Provenance",
    "Quantization",
    "Quota",
    "RankShape",
    "Ranks",
    "Recorder",
    "Refusal",
    "Slice",
    "Speculation",
    "Stage",
    "StateCaching",
    "Tensor",
    "UnusableReading",
    "Usage",
    "Workload",
    "WorkloadMeasurement",
    "cache",
    "check_captures",
    "check_count",
    "check_describes",
    "check_device",
    "check_measurable",
    "config_facts",
    "config_json",
    "drafts",
    "gib",
    "import_libraries",
    "layers",
    "load_key",
    "on_ranks",
    "open_device",
    "parse_bytes_of",
    "share_of_total",
    "simulate",
    "terms",
    "transformers_config",
    "visible_uuids",
    "weights",
]
