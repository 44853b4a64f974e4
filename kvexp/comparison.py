"""`profiler=compare`: several profilers at one point."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from time import perf_counter
from typing import Any, cast

from kvexp import pipeline, side_by_side
from kvexp.deployment import Deployment
from kvexp.engine import Engine
from kvexp.errors import InvalidValue, ProfilerUnavailable
from kvexp.isolate import Worker
from kvexp.profiler import Measurement, Profiler
from kvexp.results import Compared, Result, Stage, Status
from kvexp.schema import Run

FEWEST = 2
"""Profilers that make a comparison."""


@dataclass
class Compare(Profiler):
    """Several profilers at one point, side by side; `of` names them, ratios are to the first.

    Each has its own options under its name: `profiler.options.nvml.interval_s=0.02`. Those that
    cannot run here, or end early, are said with the reason; two must have run. Where `simulated` is
    compared with a profiler that can record its blocks, it does, and the two are compared block by
    block at the peak.
    """

    of: list[str] = field(default_factory=lambda: ["analytic", "torch_allocator", "nvml", "vllm"])

    @classmethod
    def among(cls, others: Mapping[str, type[Profiler]]) -> type[Profiler]:
        """This profiler with the others' options beneath its own, so that Hydra checks them."""
        compared = {k: v for k, v in others.items() if not issubclass(v, Compare)}
        return _with_options(tuple(sorted(compared.items(), key=lambda item: item[0])))

    def __reduce__(self) -> Any:
        """By what it is made of: pickle does not find a class that was made for the others."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        options = values.pop("options", None)
        return _restored, (vars(options) if options is not None else None, values)

    def chosen(self) -> dict[str, Profiler]:
        """The profilers named in `of`, by name.

        Raises:
            InvalidValue: a name is not known or given twice, there are fewer than two, or
                options of another are given.
        """
        options: Any = getattr(self, "options", None)
        known = {item.name: getattr(options, item.name) for item in fields(options)}
        for name in self.of:
            if name not in known:
                raise InvalidValue(
                    f"profiler.of must name profilers of {', '.join(sorted(known))}, got {name!r}"
                )
        if len(set(self.of)) < max(FEWEST, len(self.of)):
            raise InvalidValue(
                f"profiler.of must name {FEWEST} or more different profilers,"
                f" got [{', '.join(self.of)}]"
            )
        for name, each in known.items():
            if name not in self.of and each != type(each)():
                raise InvalidValue(
                    f"profiler.options.{name} is given, but profiler.of does not name {name}:"
                    f" [{', '.join(self.of)}]"
                )
        recorded = side_by_side.SIMULATED in self.of
        return {name: _recording(known[name]) if recorded else known[name] for name in self.of}

    def check(self) -> None:
        """Do nothing where two of the profilers can run.

        Raises:
            ProfilerUnavailable: fewer can; the message has each one's reason.
        """
        try:
            chosen = self.chosen()
        except InvalidValue:
            return  # said of the point, where `open` asks again
        reasons = {name: reason for name, each in chosen.items() if (reason := _missing(each))}
        if len(chosen) - len(reasons) < FEWEST:
            said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ProfilerUnavailable(
                f"{FEWEST} of {', '.join(chosen)} must be able to run: {said};"
                " profiler.of=[analytic,simulated] needs no GPU"
            )

    def open(self, deployment: Deployment, engine: Engine) -> Measurement:
        """The first of the profilers that can measure the deployment.

        Raises:
            InvalidValue: fewer than two can, or `of` names others.
        """
        opened, problems = [], []
        for name, each in self.chosen().items():
            try:
                opened.append(each.open(deployment, engine))
            except InvalidValue as problem:
                problems.append(f"{name}: {problem}")
        if len(opened) < FEWEST:
            raise InvalidValue(f"fewer than {FEWEST} can measure this: {'; '.join(problems)}")
        return opened[0]


@cache
def _with_options(others: tuple[tuple[str, type[Profiler]], ...]) -> type[Compare]:
    """One class for the same others, however often it is asked for."""
    options = make_dataclass(
        "Options", [(name, other, field(default_factory=other)) for name, other in others]
    )
    made: type[Compare] = make_dataclass(
        Compare.__name__,
        [("options", options, field(default_factory=options))],
        bases=(Compare,),
        namespace={"__doc__": Compare.__doc__, "__module__": __name__},
    )
    return made


def _restored(options: Mapping[str, Profiler] | None, values: Mapping[str, Any]) -> Compare:
    if options is None:
        return Compare(**values)
    made: Any = Compare.among({name: type(each) for name, each in options.items()})
    restored = made(**values)
    for name, each in options.items():
        setattr(restored.options, name, each)
    return cast(Compare, restored)


def execute(run: Run, engine_name: str, profiler: Compare, worker: Worker) -> Result:
    """Run every profiler where it belongs, one after the other, and put them side by side.

    What is known of the cache is the first one's that has terms.
    """
    started = perf_counter()
    results = {
        name: _one(replace(run, profiler=each), engine_name, worker)
        for name, each in profiler.chosen().items()
    }
    took = round(perf_counter() - started, 6)
    return replace(_together(results), duration_s=took)


def _one(run: Run, engine_name: str, worker: Worker) -> Result:
    if reason := _missing(run.profiler):
        return Result(status=Status.skipped, stage=Stage.start, reason=reason)
    if run.profiler.isolated:
        return worker.execute(run, engine_name)
    return pipeline.execute(run, engine_name)


def _together(results: Mapping[str, Result]) -> Result:
    compared = tuple(_compared(name, result) for name, result in results.items())
    with_terms = [name for name, result in results.items() if result.profile is not None]
    absent = [f"{c.profiler}: {c.status} at {c.stage}: {c.reason}" for c in compared if c.reason]
    if len(with_terms) < FEWEST:
        first = next(result for result in results.values() if result.profile is None)
        few = ", ".join(with_terms) or "none"
        return replace(
            first,
            reason=f"{FEWEST} profilers must have terms, {few} has: {'; '.join(absent)}",
            compared=compared,
            readings={},
        )
    first = results[with_terms[0]]
    lines = [*side_by_side.largest_difference(compared), *absent]
    readings: dict[str, Any] = {}
    if (blocks := side_by_side.blocks_at_peak(compared)) is not None:
        lines += blocks.lines()
        readings = blocks.as_dict()
    if files := [file for each in compared for file in each.readings.get("files", ())]:
        readings["files"] = files
    return replace(first, notes=(*first.notes, *lines), compared=compared, readings=readings)


def _compared(name: str, result: Result) -> Compared:
    return Compared(
        profiler=name,
        status=result.status,
        stage=result.stage,
        reason=result.reason,
        num_blocks=result.num_blocks,
        kv_tokens=result.kv_tokens,
        max_concurrency=result.max_concurrency,
        available_bytes=result.budget.available_bytes if result.budget else None,
        profile=result.profile,
        readings=result.readings,
        notes=result.notes,
        duration_s=result.duration_s,
    )


def _missing(profiler: Profiler) -> str:
    """Why it cannot run here; empty where it can."""
    try:
        profiler.check()
    except ProfilerUnavailable as reason:
        return str(reason)
    return ""


def _recording(profiler: Profiler) -> Profiler:
    """The profiler with its blocks recorded, where it has a switch for that."""
    switches: Iterator[Any] = (item for item in fields(profiler) if item.name == "snapshot")
    if any(item.type in (bool, "bool") for item in switches):
        return replace(profiler, snapshot=True)  # type: ignore[call-arg]
    return profiler
