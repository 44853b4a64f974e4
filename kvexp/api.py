"""kvexp from Python: the same overrides as on the command line, results as objects."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from kvexp import point, registry, session
from kvexp.errors import RequestError
from kvexp.explain import CONFIG_ERRORS, explain, is_users_mistake
from kvexp.grammar import keep_version_text
from kvexp.isolate import Worker
from kvexp.point import Point, compose_point
from kvexp.results import Result


def run(overrides: Sequence[str] = ()) -> Result:
    """Run one point, e.g. `kvexp.run(["model=llama3_8b", "gpu=h100", "util=0.9"])`.

    Nothing is written and nothing is tracked unless an override says `tracking=...`; then the
    point is kept as on the command line. A bad value gives a result with status `invalid`.

    Raises:
        RequestError: an option does not exist, or the overrides cannot be read.
        ProfilerUnavailable: this machine cannot run the profiler.
    """
    points = compose_points(overrides)
    if len(points) != 1:
        raise RequestError(f"{len(points)} points were asked for; use kvexp.sweep")
    if _wants_tracking(overrides):
        return session.run_single(points[0], quiet=True)
    session.check_profilers(points)
    with Worker() as worker:
        return point.execute(points[0], worker)


def sweep(overrides: Sequence[str]) -> list[Result]:
    """Run every combination, e.g. `kvexp.sweep(["model=llama3_8b", "util=0.85,0.9"])`.

    A preset works too: `kvexp.sweep(["sweep=util"])`. One result a point, in order; see `run`.

    Raises:
        RequestError: an option does not exist, or the overrides cannot be read.
        ProfilerUnavailable: this machine can run none of the profilers asked for.
    """
    points = compose_points(overrides)
    if _wants_tracking(overrides):
        return session.run_sweep(points, points[0].folder.parent, quiet=True)
    session.check_profilers(points)
    with Worker() as worker:
        return [point.execute(each, worker) for each in points]


def compose_points(overrides: Sequence[str]) -> list[Point]:
    """The points that these overrides describe, in the order in which a sweep runs them.

    Raises:
        RequestError: an option does not exist, or the overrides cannot be read.
    """
    overrides = keep_version_text(overrides)
    with _hydra():
        try:
            return list(_points(overrides))
        except CONFIG_ERRORS as error:
            if not is_users_mistake(error):
                raise
            problem = explain(error)
            if problem.is_request:
                raise RequestError(problem.message) from error
            only = tuple(overrides)
            return [Point(overrides=only, folder=Path("outputs"), problem=problem.message)]


def _points(overrides: Sequence[str]) -> Iterator[Point]:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    fixed = [o.input_line for o in parsed if not o.is_sweep_override() and o.input_line]
    base = compose("config", fixed, return_hydra_config=True)
    presets = [f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()]
    if not presets and len(fixed) == len(parsed):
        yield _of_config(base, fixed, index=0)
        return
    lists = OverridesParser.create().parse_overrides([*keep_version_text(presets), *overrides])
    (jobs,) = BasicSweeper.split_arguments(lists, None)
    for index, job in enumerate(jobs):
        yield _point(list(job), index=index)


def _point(overrides: list[str], *, index: int) -> Point:
    try:
        cfg = compose("config", overrides, return_hydra_config=True)
    except CONFIG_ERRORS as error:
        problem = explain(error)
        if not is_users_mistake(error) or problem.is_request:
            raise
        folder = Path("outputs") / "api" / str(index)
        return Point(overrides=tuple(overrides), folder=folder, problem=problem.message)
    return _of_config(cfg, overrides, index=index)


def _of_config(cfg: DictConfig, overrides: list[str], *, index: int) -> Point:
    HydraConfig.instance().set_config(cfg)
    folder = Path(str(cfg.hydra.run.dir)) / str(index)
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return compose_point(cfg, overrides=overrides, choices=choices, folder=folder)


def _wants_tracking(overrides: Sequence[str]) -> bool:
    return any(o.startswith(("tracking=", "tracking.")) and o != "tracking=off" for o in overrides)


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra with our folder, and the caller's own Hydra afterwards as it was before."""
    mine, theirs = GlobalHydra.instance(), GlobalHydra.instance().hydra
    config = HydraConfig.instance().cfg
    mine.clear()
    try:
        registry.register()
        with initialize_config_dir(str(registry.config_dir()), version_base="1.3"):
            yield
    finally:
        mine.hydra = theirs
        HydraConfig.instance().cfg = config
