"""How far predictions are off: case by case, and in summary."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvexp.validate import models, versions
from kvexp.validate.case import Case, Figure
from kvexp.validate.prediction import VALUES, Interval, Prediction

STATED = (
    "engine_version",
    "model",
    "gpu",
    "tp",
    "pp",
    "gpu_memory_utilization",
    "max_model_len",
    "kv_cache_dtype",
)
"""Inputs that a case must show to count as stated."""

_NOTE = re.compile(r"\s*\(.*?\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A predicted value beside the logged one.

    `error` is (predicted - logged) / logged, null where the log says 0; `inside` whether the logged
    value, give or take half of its last digit, lies between low and high.
    """

    predicted: Interval
    logged: Figure

    @property
    def error(self) -> float | None:
        """Relative error of the best value; 0 within the logged digits."""
        if self.logged.agrees(self.predicted.best, self.predicted.best):
            return 0.0
        value = self.logged.value
        return (self.predicted.best - value) / value if value else None

    @property
    def inside(self) -> bool:
        """Whether the logged value lies in the interval."""
        return self.logged.agrees(self.predicted.low, self.predicted.high)

    @property
    def width(self) -> float | None:
        """The interval's width as a share of the best value."""
        low, best, high = self.predicted
        return (high - low) / best if best > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One case with its prediction."""

    case: Case
    prediction: Prediction

    @property
    def id(self) -> str:
        """The case's id."""
        return self.case.inputs.id

    @property
    def engine(self) -> str:
        """The engine."""
        return self.case.inputs.engine.lower()

    @property
    def family(self) -> str:
        """Engine and release, to two numbers; vLLM's V0 engine is one family."""
        return f"{self.engine} {versions.family(self.engine, self.case.inputs.engine_version)}"

    @property
    def card(self) -> str:
        """The card as the log names it, without notes."""
        return _NOTE.sub("", self.case.inputs.gpu or "").strip() or "not named"

    @property
    def is_stated(self) -> bool:
        """Whether the log shows what a start depends on most."""
        return self.case.inputs.is_stated(*STATED)

    @property
    def has_id(self) -> bool:
        """Whether the model is named as Hugging Face does."""
        return models.is_id(self.case.inputs.model or "")

    def compared(self, name: str) -> Comparison | None:
        """One value, where it is predicted and logged."""
        predicted, logged = self.prediction.values.get(name), self.case.logged.figures.get(name)
        if predicted is None or logged is None:
            return None
        return Comparison(predicted=predicted, logged=logged)

    @property
    def capacity(self) -> str | None:
        """What capacity is logged as: tokens, else blocks, else not at all."""
        figures = self.case.logged.figures
        return next((name for name in ("kv_tokens", "num_blocks") if name in figures), None)

    @property
    def capacity_compared(self) -> Comparison | None:
        """The capacity, where it is predicted and logged."""
        return None if self.capacity is None else self.compared(self.capacity)

    @property
    def inside_interval(self) -> bool | None:
        """Whether the logged capacity lies in the interval; null where none is logged.

        An answer that predicts a refusal instead of a capacity lies beside it.
        """
        if self.capacity is None or not self.prediction.answered:
            return None
        found = self.capacity_compared
        return found is not None and found.inside


def score(cases: Iterable[Case], predict: Callable[[Any], Prediction]) -> list[Scored]:
    """Every case with its prediction, which is made from the inputs alone."""
    return [Scored(case=each, prediction=predict(each.inputs)) for each in cases]


def summary(scored: Sequence[Scored], prefixes: Sequence[str] = ()) -> dict[str, Any]:
    """Figures of all cases and of their groups; see `group` for the keys of each.

    `prefixes` make groups of the cases whose ids begin with them.
    """
    with_id = [each for each in scored if each.has_id]
    return {
        "all": group(scored),
        "stated": group([each for each in scored if each.is_stated]),
        "assumed": group([each for each in scored if not each.is_stated]),
        "with_id": group(with_id),
        "with_id_stated": group([each for each in with_id if each.is_stated]),
        "with_id_assumed": group([each for each in with_id if not each.is_stated]),
        "by_prefix": {
            prefix: group([each for each in scored if each.id.startswith(prefix)])
            for prefix in prefixes
        },
        "by_engine": _by(scored, lambda each: each.engine),
        "by_version": _by(scored, lambda each: each.family),
        "by_gpu": _by(scored, lambda each: each.card),
    }


def group(scored: Sequence[Scored]) -> dict[str, Any]:
    """Figures of some cases.

    Shares are of the cases that have what they are a share of: `answered_share` of all,
    `inside_share` of answered ones that log a capacity, `failure_share` of answered ones that
    failed (the predicted kind is right), `start_share` of those that started (a start is
    predicted). Errors are relative and without sign, in `capacity` for tokens (blocks where no
    tokens are logged) and in `terms` for every value by its name; a width is of an interval,
    relative to its best value.
    """
    answered = [each for each in scored if each.prediction.answered]
    inside = [each.inside_interval for each in answered if each.inside_interval is not None]
    ended = [each for each in answered if each.case.logged.outcome is not None]
    failed = [_is_right(each) for each in ended if each.case.logged.outcome != "ok"]
    started = [_is_right(each) for each in ended if each.case.logged.outcome == "ok"]
    return {
        "cases": len(scored),
        "answered": len(answered),
        "answered_share": _share([each.prediction.answered for each in scored]),
        "inside_cases": len(inside),
        "inside_share": _share(inside),
        "failures": len(failed),
        "failure_share": _share(failed),
        "starts": len(started),
        "start_share": _share(started),
        "capacity": _errors(answered, lambda each: each.capacity_compared),
        "terms": {name: _errors(answered, _value_of(name)) for name in VALUES},
    }


def _by(scored: Sequence[Scored], key: Callable[[Scored], str]) -> dict[str, Any]:
    names = sorted({key(each) for each in scored})
    return {name: group([each for each in scored if key(each) == name]) for name in names}


def _is_right(each: Scored) -> bool:
    return each.prediction.outcome == each.case.logged.outcome


def _value_of(name: str) -> Callable[[Scored], Comparison | None]:
    return lambda each: each.compared(name)


def _errors(
    scored: Iterable[Scored], compared: Callable[[Scored], Comparison | None]
) -> dict[str, Any]:
    """How one value is off over the cases that have it."""
    found = [(each.id, found) for each in scored if (found := compared(each)) is not None]
    errors = {name: abs(each.error) for name, each in found if each.error is not None}
    widths = [each.width for _, each in found if each.width is not None]
    worst = max(errors, key=errors.__getitem__, default=None)
    return {
        "cases": len(found),
        "median_error": median(errors.values()) if errors else None,
        "worst_error": None if worst is None else errors[worst],
        "worst": worst,
        **{
            f"within_{percent:g}_percent_share": _share(
                [error <= percent / 100 for error in errors.values()]
            )
            for percent in (0.2, 1, 1.5, 3, 10)
        },
        "inside_share": _share([each.inside for _, each in found]),
        "median_width": median(widths) if widths else None,
    }


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None
