"""What the command keeps: the JSON of cases and summary, and its check against thresholds."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kvexp.errors import RequestError
from kvexp.validate.prediction import VALUES, Interval
from kvexp.validate.score import Scored

_AT_MOST = ("_error", "_width")


def as_json(scored: Sequence[Scored], summary: Mapping[str, Any]) -> str:
    """`{"summary": ..., "cases": [...]}`: sizes in bytes, what is unknown null."""
    cases = [case_dict(each) for each in scored]
    text = json.dumps({"summary": summary, "cases": cases}, indent=1, allow_nan=False)
    return f"{text}\n"


def case_dict(each: Scored) -> dict[str, Any]:
    """One case: best values in `predicted`, their bounds in `low` and `high`."""
    prediction, logged = each.prediction, each.case.logged
    values = {name: prediction.values.get(name) for name in VALUES}
    figures = {name: logged.figures.get(name) for name in VALUES}
    return {
        "id": each.id,
        "answered": prediction.answered,
        "reason": prediction.reason,
        "stated": each.is_stated,
        "predicted": {**_picked(values, "best"), "outcome": prediction.outcome},
        "low": _picked(values, "low"),
        "high": _picked(values, "high"),
        "logged": {
            **{name: None if f is None else _plain(f.value) for name, f in figures.items()},
            "outcome": logged.outcome,
        },
        "error": {n: found.error for n in VALUES if (found := each.compared(n)) is not None},
        "inside_interval": each.inside_interval,
        "assumptions": list(prediction.assumptions),
    }


def _picked(values: Mapping[str, Interval | None], bound: str) -> dict[str, float | None]:
    return {
        name: None if value is None else _plain(getattr(value, bound))
        for name, value in values.items()
    }


def _plain(value: float) -> float:
    """Counts and bytes are whole; a concurrency is not."""
    return int(value) if float(value).is_integer() else value


def thresholds(path: Path) -> Mapping[str, Any]:
    """Limits by the keys of a summary.

    Raises:
        RequestError: the file cannot be read, or is no mapping.
    """
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(f"--check {path} cannot be read: {reason}") from None
    if not isinstance(found, dict):
        raise RequestError(f"--check {path} must hold keys of the summary with their limits")
    return {str(key): value for key, value in found.items()}


def missed(limits: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """One line for each limit that the summary does not keep.

    Errors and widths are at most their limit, shares and counts at least.

    Raises:
        RequestError: a key is none of the summary's, or a limit is no number.
    """
    return [line for line in _missed(limits, summary, ()) if line]


def _missed(
    limits: Mapping[str, Any], found: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[str]:
    for key, limit in limits.items():
        path = (*above, str(key))
        name = ".".join(path)
        if key not in found:
            known = ", ".join(map(str, found)) or "none"
            raise RequestError(f"--check: {name} is no key of the summary; there: {known}")
        value = found[key]
        if isinstance(value, Mapping) != isinstance(limit, Mapping) or isinstance(value, str):
            raise RequestError(f"--check: {name} takes no limit, got {limit!r}")
        if isinstance(value, Mapping):
            yield from _missed(limit, value, path)
            continue
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if not is_number or not math.isfinite(limit):
            raise RequestError(f"--check: {name} must be a number, got {limit!r}")
        if value is None:
            yield f"{name} is not known: no case has it, the limit is {limit:g}"
        elif name.endswith(_AT_MOST) and value > limit:
            yield f"{name} is {value:.4g}, above {limit:g}"
        elif not name.endswith(_AT_MOST) and value < limit:
            yield f"{name} is {value:.4g}, below {limit:g}"
