"""One point of a request: composed, resolved and named, or known to be invalid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp import pipeline
from kvexp.errors import InvalidValue, RequestError
from kvexp.explain import explain
from kvexp.grammar import shown
from kvexp.isolate import Worker
from kvexp.results import Result, Stage, Status
from kvexp.schema import Run, requested_values


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What was composed for one run.

    `overrides` are as typed, `choices` the option chosen in every group, `config` the resolved
    values as plain data (without Hydra's own). `run` is None where `problem` says why.
    """

    overrides: tuple[str, ...]
    folder: Path
    choices: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    run: Run | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """The overrides that make the point, for a table row or an MLflow run."""
        return ", ".join(self.overrides) or "defaults"

    @property
    def engine(self) -> str:
        """Option name of the engine, empty where nothing was composed."""
        return self.choices.get("engine", "")

    @property
    def profiler(self) -> str:
        """Option name of the profiler, empty where nothing was composed."""
        return self.choices.get("profiler", "")

    def requested(self) -> dict[str, Any]:
        """The values as asked for; empty where nothing was composed."""
        if not self.config:
            return {}
        return requested_values(dict(self.config), self.engine, self.profiler)


def compose_point(
    cfg: DictConfig, *, overrides: Sequence[str], choices: Mapping[str, str], folder: Path
) -> Point:
    """A point from what Hydra composed; a value that is not allowed makes it invalid.

    Engine and profiler are asked as well, so that nothing wrong is started.

    Raises:
        RequestError: the configuration itself is wrong (an interpolation without a target).
    """
    typed = tuple(shown(o) for o in overrides if not o.startswith(("hydra.", "hydra/", "tracking")))
    groups = {group: option for group, option in choices.items() if "/" not in group}
    try:
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    except OmegaConfBaseException as error:
        raise RequestError(explain(error).message) from None
    run, problem = None, ""
    try:
        run = Run.of(cfg)
        run.profiler.open(run.engine.resolve(run, groups["engine"]), run.engine)
    except InvalidValue as error:
        problem = str(error)
    except OmegaConfBaseException as error:
        problem = explain(error).message
    return Point(
        overrides=typed,
        folder=folder,
        choices=groups,
        config=config,
        run=None if problem else run,
        problem=problem,
    )


def execute(point: Point, worker: Worker) -> Result:
    """Run a point where its profiler belongs: here, or in the worker's process."""
    if point.run is None:
        result = Result(status=Status.invalid, stage=Stage.compose, reason=point.problem)
    elif point.run.profiler.isolated:
        result = worker.execute(point.run, point.engine)
    else:
        result = pipeline.execute(point.run, point.engine)
    return replace(result, requested=point.requested())
