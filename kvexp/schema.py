"""The shape of one point. Hydra checks every YAML file and override against it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, lru_cache
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from kvexp.engine import Engine
from kvexp.parts import (
    Compressed,
    Dspark,
    Encoder,
    Heads,
    LinearAttention,
    Mamba,
    Mla,
    Moe,
    PerLayerInput,
    QuantizationConfig,
)
from kvexp.profiler import Profiler
from kvexp.request import Knobs, Model
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


GROUPS = ("model", "gpu", "engine", "profiler", "tracking")
"""Config groups of which every point has one option."""

MODEL_PARTS = {
    "sliding_heads": Heads,
    "compressed": Compressed,
    "dspark": Dspark,
    "encoder": Encoder,
    "mla": Mla,
    "moe": Moe,
    "mamba": Mamba,
    "linear": LinearAttention,
    "per_layer_input": PerLayerInput,
    "quantization_config": QuantizationConfig,
}
"""Parts that are null in most models, with their types."""

_PART = re.compile(rf"[+]{{0,2}}model\.({'|'.join(MODEL_PARTS)})(?:\..+)?=.*", re.DOTALL)


def schema_for(overrides: Iterable[str]) -> DictConfig:
    """The shape of a point in which the parts of the model that the overrides set are not null.

    OmegaConf sets no key of a null: a part that is mentioned is there, with its values missing.
    """
    schema: DictConfig = OmegaConf.structured(Run)
    parts = mentioned_parts(overrides)
    if parts:
        schema.model = OmegaConf.structured(Model)
        for name in parts:
            schema.model[name] = OmegaConf.structured(MODEL_PARTS[name])
    return schema


def mentioned_parts(overrides: Iterable[str]) -> frozenset[str]:
    """The parts of the model that the overrides set."""
    return frozenset(match[1] for each in overrides if (match := _PART.fullmatch(each)))


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
        **{
            f"{part}_{name}": config[part][name]
            for part, names in PART_NAMES.items()
            for name in names
        },
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
    "dp",
    "pp_partition",
    "enforce_eager",
)

PART_NAMES = {
    "lora": ("max_loras", "max_rank"),
    "speculative": ("method", "model", "num_tokens"),
    "mm": ("limits",),
}


@cache
def structured(cls: type) -> Any:
    """The configuration of a class of options with its defaults, to be merged and never changed."""
    return OmegaConf.structured(cls)


def typed(cls: type, values: Mapping[str, Any]) -> Any:
    """An object of a class of options, with values that Hydra would take for them.

    Plain values give the same object again, which nobody changes.

    Raises:
        OmegaConfBaseException: a value does not fit its option.
        InvalidValue: the class does not allow it.
    """
    if not all(isinstance(value, str | int | float | Enum | None) for value in values.values()):
        return _typed(cls, values)
    return _of_plain(cls, tuple((key, type(value), value) for key, value in values.items()))


@lru_cache(maxsize=256)
def _of_plain(cls: type, items: tuple[tuple[str, type, Any], ...]) -> Any:
    return _typed(cls, {key: value for key, _, value in items})


def _typed(cls: type, values: Mapping[str, Any]) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(structured(cls), dict(values)))
