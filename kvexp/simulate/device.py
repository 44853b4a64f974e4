"""What a card's kernels and libraries take beside the tensors, by card and software version.

A profile is one YAML file, packaged in `devices` or written by `python -m kvexp.calibrate`; it may
name a packaged one as `base` and restate what differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kvexp.errors import InvalidValue
from kvexp.simulate.addresses import POLICIES
from kvexp.simulate.errors import Untraceable
from kvexp.simulate.settings import BLOCK, LARGE_SEGMENT, SMALL_SEGMENT

ATTENTION_BACKENDS = ("cudnn", "flash", "efficient", "math")

_BY_CAPABILITY = "sm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One card with one torch; sizes in bytes. The YAML says where each number is from.

    `addresses` names the policy of `kvexp.simulate.addresses` by which the driver places segments.
    """

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
    addresses: str
    block: int
    small_segment: int
    large_segment: int
    segment_step: int

    @property
    def doubts(self) -> list[str]:
        """Sizes of this card's allocator that are not those of the allocator simulated."""
        simulated = {
            "block": BLOCK,
            "small_segment": SMALL_SEGMENT,
            "large_segment": LARGE_SEGMENT,
            "segment_step": SMALL_SEGMENT,
        }
        return [
            f"{name} of {self.name} is {getattr(self, name)} bytes, {size} are simulated"
            for name, size in simulated.items()
            if getattr(self, name) != size
        ]

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
    return _device(_packaged(name), name)


def read_device(path: str | Path) -> Device:
    """The profile in a file, as `python -m kvexp.calibrate` writes it.

    Raises:
        InvalidValue: it cannot be read or is no profile; the message says why.
    """
    try:
        return _device(_parsed(Path(path).read_text(encoding="utf-8")), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"device profile {path} cannot be read: {error}") from None
    except (YAMLError, OmegaConfBaseException) as error:
        problem = " ".join(str(error).split())
        raise InvalidValue(f"device profile {path} is not YAML: {problem}") from None


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


def _packaged(name: str) -> dict[str, Any]:
    if name not in names():
        raise InvalidValue(f"no device profile {name!r}; there are: {', '.join(names())}")
    text = files("kvexp.simulate").joinpath("devices", f"{name}.yaml").read_text(encoding="utf-8")
    return _parsed(text)


def _parsed(text: str) -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.create(text))
    if not isinstance(loaded, Mapping):
        raise InvalidValue("a device profile is a mapping of names to values")
    data = {str(key): value for key, value in loaded.items()}
    base = data.pop("base", None)
    return data if base is None else {**_packaged(str(base)), **data}


def _device(data: Mapping[str, Any], where: str) -> Device:
    """The profile of these facts.

    Raises:
        InvalidValue: one is missing, unknown, or not of its kind.
    """
    hints = get_type_hints(Device)
    hints = {each.name: hints[each.name] for each in fields(Device)}
    for problem, found in (("is missing", hints.keys() - data), ("unknown", data.keys() - hints)):
        if found:
            raise InvalidValue(f"device profile {where}: {', '.join(sorted(found))} {problem}")
    values = {name: _value(where, name, data[name], hint) for name, hint in hints.items()}
    return Device(**values)


def _value(where: str, name: str, value: Any, hint: Any) -> Any:
    def refused(right: str) -> InvalidValue:
        return InvalidValue(f"device profile {where}: {name} must be {right}, got {value!r}")

    if name == "attention":
        if not isinstance(value, list) or not value or set(value) - set(ATTENTION_BACKENDS):
            raise refused(f"a list of {', '.join(ATTENTION_BACKENDS)}")
        if value[-1] != "math":
            raise refused("a list that ends with math, which always can")
        return tuple(value)
    if name == "capability":
        if not (isinstance(value, list) and [type(part) for part in value] == [int, int]):
            raise refused("two numbers, as [9, 0]")
        return tuple(value)
    if name == "addresses" and value not in POLICIES:
        raise refused(f"one of {', '.join(POLICIES)}")
    if type(value) is not hint:
        raise refused({int: "a whole number", bool: "true or false", str: "text"}[hint])
    if hint is int and value < (1 if name in _AT_LEAST_ONE else 0):
        raise refused("at least 1" if name in _AT_LEAST_ONE else "at least 0")
    return value


_AT_LEAST_ONE = ("scan_tile", "sort_tile")
"""What sizes are divided by."""
