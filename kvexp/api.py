"""kvexp from Python: the same overrides as on the command line, results as objects."""

import os
import sys
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from kvexp import point, registry, session
from kvexp.composing import Composer
from kvexp.errors import RequestError
from kvexp.explain import CONFIG_ERRORS, explain, is_users_mistake
from kvexp.facts import with_model_ids
from kvexp.grammar import keep_version_text
from kvexp.isolate import Worker
from kvexp.point import Point, as_typed, compose_point
from kvexp.results import Result
from kvexp.schema import mentioned_parts

_ONE_AT_A_TIME = threading.RLock()
"""Hydra composes with global state."""


def run(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> Result:
    """Run one point, e.g. `kvexp.run(["model=llama3_8b", "gpu=h100", "util=0.9"])`.

    `config_dir` is a folder of your own YAML, as --config-dir on the command line.

    Nothing is written and nothing is tracked unless an override says `tracking=...`; then the
    point is kept as on the command line. A bad value gives a result with status `invalid`.

    Raises:
        RequestError: an option does not exist, or the overrides cannot be read.
        ProfilerUnavailable: this machine cannot run the profiler.
    """
    points = compose_points(overrides, config_dir)
    if len(points) != 1:
        raise RequestError(f"{len(points)} points were asked for; use kvexp.sweep")
    if _wants_tracking(overrides):
        return session.run_single(points[0], quiet=True)
    session.check_profilers(points)
    with Worker() as worker:
        return point.execute(points[0], worker)


def sweep(overrides: Sequence[str], *, config_dir: str | Path | None = None) -> list[Result]:
    """Run every combination, e.g. `kvexp.sweep(["model=llama3_8b", "util=0.85,0.9"])`.

    A preset works too: `kvexp.sweep(["sweep=util"])`. One result a point, in order; see `run`.

    Raises:
        RequestError: an option does not exist, or the overrides cannot be read.
        ProfilerUnavailable: this machine can run none of the profilers asked for.
    """
    points = compose_points(overrides, config_dir)
    if _wants_tracking(overrides):
        folder = points[0].folder.parent if points else Path()
        return session.run_sweep(points, folder, quiet=True)
    session.check_profilers(points)
    with Worker() as worker:
        return [point.execute(each, worker) for each in points]


def compose_points(overrides: Sequence[str], config_dir: str | Path | None = None) -> list[Point]:
    """The points that these overrides describe, in the order in which a sweep runs them.

    Raises:
        RequestError: an option does not exist, or the overrides cannot be read.
    """
    folders = [registry.config_dir()]
    overrides = list(overrides)
    if config_dir is not None:
        own = Path(config_dir).resolve()
        if not own.is_dir():
            raise RequestError(f"config_dir must be a folder, got {str(config_dir)!r}")
        folders.append(own)
        overrides.append(f"hydra.searchpath=['file://{own}']")
    overrides = _prepared(overrides, folders)
    with _hydra(overrides):
        try:
            return list(_points(_composer(_state(overrides)), overrides))
        except CONFIG_ERRORS as error:
            if not is_users_mistake(error):
                raise
            problem = explain(error)
            if problem.is_request:
                raise RequestError(problem.message) from error
            folder = Path("outputs").resolve()
            only = as_typed(overrides)
            return [Point(overrides=only, folder=folder, problem=problem.message)]


def _state(overrides: Sequence[str]) -> Hashable:
    """What a composition depends on beside its own overrides: schema, plugins and files.

    It is never the same again with a folder of one's own, which may hold files anywhere.
    """
    if any(override.lstrip("+").startswith("hydra.searchpath") for override in overrides):
        return object()
    walks = (os.walk(folder, followlinks=True) for folder in registry.config_dirs())
    files = (Path(at, name) for walk in walks for at, _, names in walk for name in names)
    stamps = tuple((path, _stamp(path)) for path in files if path.suffix == ".yaml")
    return mentioned_parts(overrides), tuple(sys.path), Path.cwd(), stamps


def _stamp(path: Path) -> tuple[int, int] | None:
    """When a file was written, and its size; None for a link to nothing, as editors make."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=8)
def _composer(state: Hashable) -> Composer:
    """Composes for as long as nothing changes on which it depends."""
    return Composer(lambda overrides: compose("config", overrides, return_hydra_config=True))


def _points(composer: Composer, overrides: Sequence[str]) -> Iterator[Point]:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    fixed = [o.input_line for o in parsed if not o.is_sweep_override() and o.input_line]
    base = composer.compose(fixed)
    presets = [f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()]
    HydraConfig.instance().set_config(base)
    if not presets and len(fixed) == len(parsed):
        yield _of_config(base, fixed, folder=Path(str(base.hydra.run.dir)).resolve())
        return
    folder = Path(str(base.hydra.sweep.dir)).resolve()
    prepared = _prepared(presets, [registry.config_dir()])
    lists = OverridesParser.create().parse_overrides([*prepared, *overrides])
    (jobs,) = BasicSweeper.split_arguments(lists, None)
    for index, job in enumerate(jobs):
        yield _point(composer, list(job), folder=folder / str(index))


def _prepared(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    return keep_version_text(with_model_ids(overrides, folders))


def _point(composer: Composer, overrides: list[str], *, folder: Path) -> Point:
    try:
        cfg = composer.compose(overrides)
    except CONFIG_ERRORS as error:
        problem = explain(error)
        if not is_users_mistake(error) or problem.is_request:
            raise
        return Point(overrides=as_typed(overrides), folder=folder, problem=problem.message)
    HydraConfig.instance().set_config(cfg)
    return _of_config(cfg, overrides, folder=folder)


def _of_config(cfg: DictConfig, overrides: list[str], *, folder: Path) -> Point:
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return compose_point(cfg, overrides=overrides, choices=choices, folder=folder)


def _wants_tracking(overrides: Sequence[str]) -> bool:
    asked = [o.lstrip("+") for o in overrides]
    return any(o.startswith(("tracking=", "tracking.")) and o != "tracking=off" for o in asked)


@contextmanager
def _hydra(overrides: Iterable[str] = ()) -> Iterator[None]:
    """Hydra with our folder, one caller at a time, and the caller's own Hydra back afterwards."""
    with _ONE_AT_A_TIME:
        theirs, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
        GlobalHydra.instance().clear()
        try:
            registry.register(overrides)
            with initialize_config_dir(str(registry.config_dir()), version_base="1.3"):
                yield
        finally:
            # Hydra puts copies of its singletons in place: ask for them again
            GlobalHydra.instance().hydra = theirs
            HydraConfig.instance().cfg = config
