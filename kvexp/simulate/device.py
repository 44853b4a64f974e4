"""What a card's kernels and libraries take beside the tensors, by card and software version.

A profile is one YAML file in `devices`; it may name another as `base` and restate what differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from kvexp.errors import InvalidValue
from kvexp.simulate.errors import Untraceable

_BY_CAPABILITY = "sm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One card with one torch; sizes in bytes. The YAML says where each number is from."""

    name: str
    measured: bool
    source: str
    versions: str
    capability: tuple[int, int]
    blas_workspace: int
    blas_lt_workspace: int
    construction_residue: int
    attention: tuple[str, ...]
    fused_head_limit: int
    cudnn_scalars: int
    cudnn_scratch: int
    efficient_accumulator_over: int
    split_index_bytes: int
    split_index_scratch: int
    scan_tile: int
    sort_small: int
    sort_tile: int
    sort_tile_state: int
    sort_counts: int
    grouped_mm_per_expert: int
    grouped_mm_constant: int
    context: int
    libraries: int

    def as_dict(self) -> dict[str, Any]:
        """Every fact, as plain data."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def names() -> list[str]:
    """The profiles that are packaged."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files("kvexp.simulate").joinpath("devices").iterdir()
        if entry.name.endswith(".yaml")
    )


@cache
def load(name: str) -> Device:
    """The profile of that name.

    Raises:
        InvalidValue: there is none.
    """
    if name not in names():
        raise InvalidValue(f"no device profile {name!r}; there are: {', '.join(names())}")
    data = _data(name)
    data.pop("base", None)
    return Device(
        **{
            **data,
            "capability": tuple(data["capability"]),
            "attention": tuple(data["attention"]),
        }
    )


def find(gpu_name: str, capability: str | None) -> Device:
    """The profile of a card: its own where it was measured, else that of its architecture.

    Raises:
        Untraceable: there is neither.
    """
    for name in names():
        if not name.startswith(_BY_CAPABILITY) and load(name).name == gpu_name:
            return load(name)
    major, _, minor = (capability or "0.0").partition(".")
    own = int(major), int(minor or 0)
    alike = [
        (held, name)
        for name in names()
        if (held := _capability(name)) is not None and held[0] == own[0] and held <= own
    ]
    if not alike:
        raise Untraceable(
            f"there is no device profile for {gpu_name}, compute capability {capability};"
            f" profiles: {', '.join(names())}"
        )
    return replace(load(max(alike)[1]), capability=own)


def _capability(name: str) -> tuple[int, int] | None:
    """Of a profile for all cards of an architecture, by its name: sm80, sm120."""
    digits = name.removeprefix(_BY_CAPABILITY)
    return (int(digits[:-1]), int(digits[-1])) if digits != name else None


def _data(name: str) -> dict[str, Any]:
    text = files("kvexp.simulate").joinpath("devices", f"{name}.yaml").read_text(encoding="utf-8")
    loaded = OmegaConf.to_container(OmegaConf.create(text))
    if not isinstance(loaded, Mapping):
        raise TypeError(f"{name}.yaml is not a mapping")
    data = {str(key): value for key, value in loaded.items()}
    return {**_data(data["base"]), **data} if "base" in data else data
