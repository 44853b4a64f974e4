"""The shape of one point. Hydra checks every YAML file and override against it."""

from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from kvexp.engine import Engine
from kvexp.profiler import Profiler
from kvexp.request import Knobs
from kvexp.tracking import Tracking


@dataclass
class Run(Knobs):
    """One point: what is asked for, by which engine and profiler, and where it is kept.

    `engine` and `profiler` are the plugin objects themselves: their fields are their options.
    """

    engine: Engine = MISSING
    profiler: Profiler = MISSING
    tracking: Tracking = field(default_factory=Tracking)

    @classmethod
    def of(cls, cfg: DictConfig) -> "Run":
        """Turn what Hydra composed into a `Run`, plugin objects included.

        Raises:
            InvalidValue: a value is not allowed.
        """
        return cast(Run, OmegaConf.to_object(cfg))


def requested_values(config: dict[str, Any], engine: str, profiler: str) -> dict[str, Any]:
    """The values as asked for (null: the engine's default), by the names of `effective`."""
    gpu = config["gpu"]
    return {
        "model": config["model"]["name"],
        "gpu": gpu["name"],
        "engine": engine,
        "engine_version": config["engine"]["version"],
        "profiler": profiler,
        "usage": config["engine"].get("usage"),
        **{name: config[name] for name in KNOB_NAMES},
        "total_bytes": gpu["total_bytes"],
        "free_bytes": gpu["free_bytes"],
        "used_by_others_bytes": gpu["used_by_others_bytes"],
    }


KNOB_NAMES = (
    "dtype",
    "quantization",
    "kv_dtype",
    "block_size",
    "util",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "tp",
    "pp",
    "enforce_eager",
)
