"""One point of a request: composed, resolved and named, or known to be invalid."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp import comparison, pipeline
from kvexp.at_hand import with_card
from kvexp.comparison import Compare
from kvexp.errors import InvalidValue, RequestError, nearest
from kvexp.explain import explain
from kvexp.facts import with_draft, with_facts
from kvexp.grammar import shown
from kvexp.isolate import Worker
from kvexp.registry import config_dirs
from kvexp.results import Result, Stage, Status
from kvexp.schema import GROUPS, Run, requested_values


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


def as_typed(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides that make a point what it is, without those of Hydra and tracking."""
    kept = (o for o in overrides if not o.lstrip("+~").startswith(("hydra", "tracking")))
    return tuple(shown(o) for o in kept)


def compose_point(
    cfg: DictConfig, *, overrides: Sequence[str], choices: Mapping[str, str], folder: Path
) -> Point:
    """A point from what Hydra composed; a value that is not allowed makes it invalid.

    Engine and profiler are asked as well, so that nothing wrong is started.

    Raises:
        RequestError: the configuration itself is wrong (an interpolation without a target).
    """
    typed = as_typed(overrides)
    groups = {group: str(option) for group, option in choices.items() if "/" not in group}
    _check_groups(overrides)
    _check_keys(cfg)
    cfg = with_card(cfg, groups.get("gpu", ""), config_dirs())
    run, problem = None, ""
    try:
        _check_switches(cfg, overrides)
        cfg = with_facts(cfg, overrides, groups.get("model", ""))
        cfg = with_draft(cfg, _folders())
    except InvalidValue as error:
        problem = str(error)
    try:
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    except OmegaConfBaseException as error:
        raise RequestError(explain(error).message) from None
    try:
        if not problem:
            run = Run.of(cfg)
            _check_timeout(run.profiler.timeout_s)
            run.profiler.open(run.engine.decide(run, groups["engine"]), run.engine)
            if isinstance(run.profiler, Compare):  # the options of those that are not asked
                options = config["profiler"]["options"]
                config["profiler"]["options"] = {name: options[name] for name in run.profiler.of}
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


def _folders() -> list[Path]:
    """The folders of YAML that Hydra searches, the user's own first."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    own = [Path(source.path) for source in sources if source.schema == "file"]
    ours = config_dirs()
    return [*(path for path in own if path not in ours), *ours]


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidValue(f"profiler.timeout_s must be more than 0 seconds, got {timeout_s:g}")


def _check_groups(overrides: Sequence[str]) -> None:
    """Every group has one option; Hydra would merge a list of them into one."""
    for override in overrides:
        group, _, option = override.partition("=")
        if group in GROUPS and option.startswith("["):
            raise RequestError(f"{group} takes one option, got {option}; add -m to sweep over them")


def _check_switches(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """No number but 0 and 1 for true or false: OmegaConf takes any."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        number = re.fullmatch(r"[+-]?\d+", value) and int(value) not in (0, 1)
        if number and isinstance(OmegaConf.select(cfg, key), bool):
            raise InvalidValue(f"{key} must be true or false, got {value}")


def _check_keys(node: DictConfig, prefix: str = "") -> None:
    """No key outside the schema, such as one appended with a plus sign."""
    kind = OmegaConf.get_type(node)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return
    known = {item.name for item in fields(kind)}
    for key in map(str, node):
        name = f"{prefix}{key}"
        if key not in known:
            raise RequestError(f"unknown option {name}{nearest(key, known, prefix)}")
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            value = node[key]
            if isinstance(value, DictConfig):
                _check_keys(value, f"{name}.")


def execute(point: Point, worker: Worker) -> Result:
    """Run a point where its profiler belongs: here, or in the worker's process."""
    if point.run is None:
        result = Result(status=Status.invalid, stage=Stage.compose, reason=point.problem)
    elif isinstance(point.run.profiler, Compare):
        result = comparison.execute(point.run, point.engine, point.run.profiler, worker)
    elif point.run.profiler.isolated:
        result = worker.execute(point.run, point.engine)
    else:
        result = pipeline.execute(point.run, point.engine)
    return replace(result, requested=point.requested())
