"""Records of start-up logs: what an engine was started with, and what it printed.

A record is one JSON object a line. Its top-level keys are inputs, `explicit` names those that the
log or the command showed, `outputs` holds the figures printed and `extra` further ones. Sizes are
GiB as printed, to two digits unless more are written.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from kvexp.startup_logs import INPUTS
from kvexp.units import GIB
from kvexp.validate import measured
from kvexp.validate.flags import Flags
from kvexp.validate.prediction import Outcome

LARGEST = 1 << 53
"""No figure of a record is larger: up to here whole numbers are exact as floats."""
LARGEST_GIB = 1 << 32
"""No size in GiB is larger: what `units.parse_bytes` takes."""

_FREE = ("free_gib", "init_free_gib")
"""Keys of `extra` that are inputs: what was free is no output of the engine."""

_MORE_THAN_0 = ("gpu_total_gib", "gpu_memory_utilization")

OUTCOMES = get_args(Outcome)
"""How a start ends; a log's `none` is `ok`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What an engine was started with, by the names of a record; null where it is not known.

    `stated` are the inputs that the log or the command showed: the others are defaults or
    derivations of whoever kept the record. `free_gib` was free at the check that a log prints it
    for, `init_free_gib` at the engine's first reading. A size of more than two digits is exact.
    """

    id: str
    engine: str
    engine_version: str | None = None
    model: str | None = None
    gpu: str | None = None
    gpu_total_gib: float | None = None
    num_gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    weight_dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    enforce_eager: bool | None = None
    other_flags: str | None = None
    stated: tuple[str, ...] = ()
    free_gib: float | None = None
    init_free_gib: float | None = None

    def is_stated(self, *names: str) -> bool:
        """Whether the log or the command showed all of these inputs."""
        return set(names) <= set(self.stated)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A logged number; `error` is half of its last printed digit, 0 for an exact one."""

    value: float
    error: float = 0.0

    def agrees(self, low: float, high: float) -> bool:
        """Whether the number may lie between `low` and `high`."""
        return low - self.error <= self.value <= high + self.error


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """What the engine printed, by the names of a prediction's values; sizes in bytes."""

    figures: Mapping[str, Figure]
    outcome: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One record."""

    inputs: Inputs
    logged: Logged


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """The records of a file, and one line for each that cannot be read."""

    cases: tuple[Case, ...]
    problems: tuple[str, ...]


class UnreadableRecord(ValueError):
    """A record cannot be read; the message says which key and what it holds."""


def read(lines: Iterable[str], name: str) -> Records:
    """Read records, one JSON object a line; empty lines are passed over.

    `name` is the file's, for the problems.
    """
    cases, problems = [], []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            case = case_of(_object(line))
            if case.inputs.id in seen:
                raise UnreadableRecord(f"id {case.inputs.id!r} stands in an earlier line too")
        except UnreadableRecord as error:
            problems.append(f"{name}:{number}: {error}")
            continue
        seen.add(case.inputs.id)
        cases.append(case)
    return Records(cases=tuple(cases), problems=tuple(problems))


def case_of(record: Mapping[str, Any]) -> Case:
    """A record, or a measurement from inside the engine, as a case.

    Raises:
        UnreadableRecord: a key is missing or holds something else than it should.
    """
    if measured.is_measured(record):
        try:
            record = measured.as_record(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreadableRecord(f"a measurement without {error}") from None
    return Case(inputs=_inputs(record), logged=_logged(record))


def _object(line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnreadableRecord("holds bytes that are no text in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableRecord(f"not a line of JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnreadableRecord(f"must be a JSON object, got {short(found)}")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _inputs(record: Mapping[str, Any]) -> Inputs:
    values: dict[str, Any] = {}
    for name in ("id", "engine"):
        value = record.get(name)
        if not isinstance(value, str) or not value.strip():
            raise UnreadableRecord(f"{name} must be a text, got {short(value)}")
        values[name] = value
    for name, kinds in INPUTS.items():
        values[name] = _value(record, name, kinds)
    for name in _MORE_THAN_0:
        if values[name] == 0:
            raise UnreadableRecord(f"{name} must be more than 0, got 0")
    extra = _mapping(record, "extra")
    for name in _FREE:
        values[name] = _value(extra, name, (int, float), inside="extra.")
    explicit = record.get("explicit") or []
    if not isinstance(explicit, list) or not all(isinstance(each, str) for each in explicit):
        raise UnreadableRecord(f"explicit must be a list of keys, got {short(explicit)}")
    known = {item.name for item in fields(Inputs)}
    among = _among_flags(values)
    stated = (*(each for each in explicit if each in known), *among)
    return Inputs(**{**values, **among}, stated=stated)


def _among_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that a record has as flags alone."""
    flags = Flags(values["other_flags"], values["engine"])
    return {
        key: value
        for key, _, value in flags.take_inputs()
        if value is not None and values[key] is None
    }


def _value(record: Mapping[str, Any], name: str, kinds: tuple[type, ...], inside: str = "") -> Any:
    """The value of a key, or None where it is missing or null."""
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UnreadableRecord(f"{inside}{name} must be {wanted} or null, got {short(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_size(value, f"{inside}{name}")
        if kinds == (int,) and value < 1:  # every whole number is a count
            raise UnreadableRecord(f"{inside}{name} must be at least 1, got {value}")
        if value < 0:
            raise UnreadableRecord(f"{inside}{name} must not be negative, got {value}")
    return value


def _check_size(value: float, name: str) -> None:
    largest = LARGEST_GIB if name.endswith("_gib") else LARGEST
    if not -largest < value < largest:
        limit = f"2^{largest.bit_length() - 1}"
        raise UnreadableRecord(f"{name} must be a number below {limit}, got {short(value)}")


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnreadableRecord(f"{name} must be an object or null, got {short(value)}")
    return value


def short(value: object) -> str:
    """A value as a message has it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_SIZES = {
    "available_kv_gib": "available_kv_bytes",
    "weights_gib": "weights_bytes",
    "non_torch_gib": "non_torch_bytes",
    "activation_peak_gib": "activation_bytes",
    "cudagraph_gib": "graphs_bytes",
}
_COUNTS = {"num_gpu_blocks": "num_blocks", "kv_tokens": "kv_tokens"}
_ESTIMATED_LENGTHS = ("estimated_max_len", "est_max_len")
_ESTIMATED_GRAPHS = ("cudagraph_estimated_gib", "cudagraph_estimate_gib")


def _logged(record: Mapping[str, Any]) -> Logged:
    outputs, extra = _mapping(record, "outputs"), _mapping(record, "extra")
    figures: dict[str, Figure] = {}
    for key, name in _COUNTS.items():
        value = _number(outputs, key)
        if value is not None:
            figures[name] = Figure(value=value)
    for key, name in _SIZES.items():
        value = _number(outputs, key)
        if value is not None:
            figures[name] = size_figure(value)
    concurrency = _number(outputs, "max_concurrency")
    if concurrency is not None:
        figures["max_concurrency"] = Figure(value=concurrency, error=half_digit(concurrency))
    for key in _ESTIMATED_LENGTHS:
        value = _number(extra, key, inside="extra.")
        if value is not None:
            figures["estimated_max_len"] = Figure(value=value)
    for key in _ESTIMATED_GRAPHS:
        value = _number(extra, key, inside="extra.")
        if value is not None:
            figures["graphs_estimate_bytes"] = size_figure(value)
    return Logged(figures=figures, outcome=_outcome(outputs))


def size_figure(gib: float) -> Figure:
    """A size in GiB: whole bytes with more than the two digits that a log prints are exact."""
    size = float(gib) * GIB
    exact = size.is_integer() and round(gib, 2) != gib
    return Figure(value=round(size), error=0.0 if exact else half_digit(gib) * GIB)


def half_digit(printed: float) -> float:
    """Half of the last digit of a printed figure; two digits are printed at least."""
    _, _, decimals = repr(float(printed)).partition(".")
    return 0.5 * 10.0 ** -max(2, len(decimals) if decimals.isdigit() else 2)


def _number(outputs: Mapping[str, Any], name: str, inside: str = "outputs.") -> float | None:
    value = outputs.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableRecord(f"{inside}{name} must be a number or null, got {short(value)}")
    _check_size(value, f"{inside}{name}")
    return value


def _outcome(outputs: Mapping[str, Any]) -> str | None:
    error = outputs.get("error")
    if error is None:
        return None
    outcome = "ok" if error == "none" else error
    if outcome not in OUTCOMES:
        wanted = ", ".join(("none", *OUTCOMES[1:]))
        raise UnreadableRecord(f"outputs.error must be one of {wanted}, got {short(error)}")
    return str(outcome)
