"""Hydra's and OmegaConf's errors as one line with the nearest right spelling."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import omegaconf
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from kvexp.errors import nearest
from kvexp.schema import MODEL_PARTS, Run

CONFIG_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    OSError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
)
"""What composition raises; the last four are mistakes only where Hydra or OmegaConf did."""

_HYDRAS_OWN = (
    "Config group override must be",
    "Only one of --run",
    "The --resolve flag",
    "Exceeds the limit",  # of digits in an integer
    "Invalid defaults list",
)
_GROUPS = ("model", "gpu", "engine", "profiler", "tracking", "experiment", "sweep")

_KINDS = {
    "Float": "a number",
    "Integer": "a whole number",
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "str": "a text",
}
"""Types in words, by the names that OmegaConf and Python have for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A user's mistake in one line; `is_request` when no point of a sweep can be right."""

    message: str
    is_request: bool


def is_users_mistake(error: BaseException) -> bool:
    """Whether composition refused what was typed, rather than failed in itself."""
    kinds = HydraException | OmegaConfBaseException | YAMLError | OSError | UnicodeDecodeError
    if isinstance(error, kinds):
        return True
    return str(error).startswith(_HYDRAS_OWN) or _inside_null(error) or _in_hydra(error)


def _inside_null(error: BaseException) -> bool:
    """OmegaConf asserts, or misses an attribute, where a key of a null part is overridden."""
    return isinstance(error, AssertionError | AttributeError) and "omegaconf" in _raised_in(error)


def _in_hydra(error: BaseException) -> bool:
    """Hydra itself fails over a value that it did not expect, such as range(0,1,0)."""
    return isinstance(error, ValueError | TypeError) and "hydra" in Path(_raised_in(error)).parts


def _raised_in(error: BaseException) -> str:
    """The file whose code raised an error."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else frame.tb_frame.f_code.co_filename


def explain(error: BaseException) -> Problem:
    """Say in one line what is wrong with what was typed or written in YAML."""
    text = str(error)
    if _inside_null(error):
        return Problem(
            message="a key inside a null value cannot be set: give the whole value, key=[...] or"
            " key={...}",
            is_request=True,
        )
    if isinstance(error, YAMLError):
        return Problem(message=f"YAML that cannot be read: {_one_line(text)}", is_request=True)
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        what = f"use {error.filename}" if error.filename else "go on"
        return Problem(message=f"cannot {what}: {error.strerror or text}", is_request=True)
    if isinstance(error, UnicodeDecodeError):
        return Problem(message=f"a YAML file is not UTF-8: {text}", is_request=True)
    if isinstance(error, MissingConfigException):
        return _missing(text)
    if isinstance(error, OverrideParseException):
        return Problem(message=_unreadable(error), is_request=True)
    cause = _cause(error)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return Problem(message=_unknown_key(cause), is_request=True)
    if isinstance(cause, MissingMandatoryValue):
        return Problem(message=f"a value is missing: {_missing_key(cause)}", is_request=False)
    if isinstance(cause, InterpolationResolutionError):
        return Problem(message=_one_line(str(cause)), is_request=True)
    if isinstance(cause, ConfigTypeError) and "DictConfig with ListConfig" in _first_line(cause):
        key = str(cause.full_key)
        right = f"{key} takes {{name:value,...}}, in quotes for the shell, got a list"
        is_list = cause.object_type is list
        return Problem(message=_no_list(key) if is_list else right, is_request=False)
    if isinstance(cause, ValidationError):
        return Problem(message=_wrong_value(cause), is_request=False)
    if "Config group override must be a string" in text or (
        _in_hydra(error) and "defaults_list" in _raised_in(error)
    ):
        return Problem(message=f"a group takes one option name: {_one_line(text)}", is_request=True)
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        listed = "" if match[1] in _GROUPS else f", or write {match[1]}=[{match[2]}] for one list"
        several = f"{match[1]}={match[2]} holds several values"
        return Problem(message=f"{several}: add -m to sweep over them{listed}", is_request=True)
    if match := re.search(r"Could not override '([^']+)'", text):
        return Problem(message=_unknown_path(match[1]), is_request=True)
    readable = _one_line(text) or f"a value cannot be read ({type(cause).__name__})"
    return Problem(message=readable, is_request=True)


def _cause(error: BaseException) -> BaseException:
    """The first error that OmegaConf raised, below Hydra's own wrappings."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OmegaConfBaseException) and not isinstance(link, HydraException):
            return link
        link = link.__cause__
    return error


def known_keys(node: type = Run, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema; plugin options are not among them."""
    hints = get_type_hints(node)
    for item in fields(node):
        kind = hints[item.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield f"{prefix}{item.name}"
            yield from known_keys(kind, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}"


def _missing_key(cause: BaseException) -> str:
    """The whole key of a missing value, where OmegaConf tells the type of its part alone."""
    text = _first_line(cause)
    match = re.search(r"type `(\w+)` has missing mandatory value: (\w+)", text)
    places = dict(_places(Run, ""))
    places |= {kind.__name__: f"model.{name}." for name, kind in MODEL_PARTS.items()}
    if match is None or match[1] not in places:
        return text
    return f"{places[match[1]]}{match[2]}"


def _places(node: type, prefix: str) -> Iterator[tuple[str, str]]:
    """Names of the schema's types, each with what stands before its keys."""
    yield node.__name__, prefix
    for name, kind in get_type_hints(node).items():
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _places(kind, f"{prefix}{name}.")


def _missing(text: str) -> Problem:
    match = re.search(r"Could not find '(.+)/([^'/]*)'", text)
    if match is None:
        return Problem(message=_one_line(text.split("Available options")[0]), is_request=True)
    group, option = match[1], match[2]
    options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
    shown = (
        f"; options: {', '.join(options)}" if len(options) <= 12 else "; see python -m kvexp.list"
    )
    return Problem(
        message=f"{group}={option} does not exist{nearest(option, options) or shown}",
        is_request=group not in ("model", "gpu", "engine", "profiler"),
    )


def _unknown_key(cause: ConfigKeyError | ConfigAttributeError) -> str:
    key = str(cause.full_key or cause.key or "")
    parent, _, leaf = key.rpartition(".")
    node: Any = cause.object_type
    siblings = [k.rpartition(".")[2] for k in known_keys() if k.rpartition(".")[0] == parent]
    if isinstance(node, type) and is_dataclass(node):
        siblings = [item.name for item in fields(node)]
    hint = nearest(leaf, siblings, prefix=f"{parent}." if parent else "")
    if not hint and leaf.casefold() in known_keys():
        hint = f"; did you mean {leaf.casefold()}?"
    if not hint and parent:
        hint = f"; {parent} has {', '.join(sorted(siblings))}"
    if not hint:
        hint = nearest(key, known_keys()) or "; see python -m kvexp --help"
    return f"unknown option {key}{hint}"


def _unknown_path(key: str) -> str:
    return f"unknown option {key}{nearest(key, known_keys()) or '; see python -m kvexp --help'}"


def _wrong_value(cause: ValidationError) -> str:
    key = str(cause.full_key or cause.key or "a value")
    text = _first_line(cause)
    if match := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", text):
        hint = nearest(match[1], match[2].split(", "))
        return f"{key} must be one of {match[2]}, got {match[1]!r}{hint}"
    if match := re.search(r"Value '(.*)' of type '.*' could not be converted to (\w+)", text):
        return f"{key} must be {_KINDS.get(match[2], match[2])}, got {match[1]!r}"
    if match := re.search(r"Value '(.*)'(?: of type '.*')? is not a valid (\w+)", text):
        return f"{key} must be {_KINDS.get(match[2], match[2])}, got {match[1]!r}"
    if match := re.search(r"Value (.*) \(\w+\) is not a valid input for <enum", text):
        return f"{key} must be {_described(_kind(cause))}, got {match[1]}"
    if match := re.search(r"Cannot convert '\w+' to string: '(.*)'", text):
        return f"{key} must be a text, got {match[1]}"
    if "is not Optional" in text:
        return f"{key} must be {_not_null(cause)}, got null"
    if match := re.search(r"NoneType is not a subclass of (\w+)", text):
        return f"{key} must be {_KINDS.get(match[1], match[1])}, got null"
    if match := re.search(r"Invalid type assigned: (?:str|int|float|bool) .*value: (.*)", text):
        return f"{key} takes {{name:value,...}}, in quotes for the shell, got {match[1]!r}"
    if "is not a ListConfig" in text:
        return f"{_no_list(key)}, got a single value"
    return f"{key}: {text}"


def _no_list(key: str) -> str:
    return f"{key} must be a list in brackets, like {key}=[1,2]"


def _not_null(cause: ValidationError) -> str:
    """What a key takes that does not take null, and its default."""
    parent: Any = cause.object_type
    kind = _kind(cause)
    if kind is None:
        return "given"
    default = next(item.default for item in fields(parent) if item.name == cause.key)
    if default in (dataclasses.MISSING, omegaconf.MISSING):
        return _described(kind)
    return f"{_described(kind)} (by default {_typed(default)})"


def _kind(cause: OmegaConfBaseException) -> Any:
    """The type of the key that an error is about, None where it is not known."""
    parent: Any = cause.object_type
    if not (isinstance(parent, type) and is_dataclass(parent)):
        return None
    kind = get_type_hints(parent)[str(cause.key)]
    given = [each for each in get_args(kind) if each is not type(None)]
    return given[0] if isinstance(kind, UnionType) and len(given) == 1 else kind


def _described(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is list:
        return "a list in brackets"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    return _KINDS.get(getattr(kind, "__name__", ""), "{name:value,...}")


def _typed(value: Any) -> str:
    """A default as it is written on the line."""
    if isinstance(value, Enum):
        return value.name
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unreadable(error: BaseException) -> str:
    override = getattr(error, "override", None)
    if not override:
        return "cannot read an empty override: write key=value, for example util=0.9"
    if "=" not in str(override) or str(override).startswith("~"):
        return f"cannot read {override!r}: write key=value, for example util=0.9"
    key, _, value = str(override).partition("=")
    quoted = f'{key}="{value}"'
    return f"cannot read {override!r}: put a value with special characters in quotes: '{quoted}'"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
