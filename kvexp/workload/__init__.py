"""The model under test on a real device, for the profilers that measure.

torch and transformers are imported where they are used: without them this package still imports.
"""

from kvexp.workload.architectures import (
    check_describes,
    config_facts,
    transformers_config,
)
from kvexp.workload.building import Rank
from kvexp.workload.counters import Counters, UnusableReading
from kvexp.workload.forward import Forward, ForwardOptions, WarmupShape
from kvexp.workload.machine import check_device, driver_version, import_libraries, visible_uuids
from kvexp.workload.measurement import (
    WorkloadMeasurement,
    check_captures,
    check_measurable,
    load_key,
)
from kvexp.workload.oom import is_out_of_memory
from kvexp.workload.parent import die_with
from kvexp.workload.ranks import Ranks, on_ranks
from kvexp.workload.running import Workload
from kvexp.workload.snapshot import Recorder

__all__ = [
    "Counters",
    "Forward",
    "ForwardOptions",
    "Rank",
    "Ranks",
    "Recorder",
    "UnusableReading",
    "WarmupShape",
    "Workload",
    "WorkloadMeasurement",
    "check_captures",
    "check_describes",
    "check_device",
    "check_measurable",
    "config_facts",
    "die_with",
    "driver_version",
    "import_libraries",
    "is_out_of_memory",
    "load_key",
    "on_ranks",
    "transformers_config",
    "visible_uuids",
]
