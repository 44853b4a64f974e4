"""Runs points and keeps them: on disk first, then in MLflow, then on the terminal."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvexp import point as point_
from kvexp import record, report, tracking
from kvexp.errors import ProfilerUnavailable, RequestError
from kvexp.interrupt import Interrupt
from kvexp.isolate import Worker
from kvexp.point import Point
from kvexp.residual import is_left
from kvexp.results import Result, Stage, Status
from kvexp.tracking import Store, Tracking
from kvexp.units import gib


class Interrupted(Exception):
    """The user (or SIGTERM) ended the session; what was running is kept as killed."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A point's result and the folder that holds it, or `problem`: why it does not."""

    point: Point
    result: Result
    folder: Path
    problem: str = ""


def run_single(point: Point, *, quiet: bool = False) -> Result:
    """Run one point and keep it.

    Raises:
        ProfilerUnavailable: this machine cannot run the profiler.
        RequestError: a value is not allowed, or the folder or the store cannot be used; a result
            that could not be written is printed first.
        Interrupted: Ctrl-C or SIGTERM; the point is kept as killed.
    """
    if point.run is None:
        raise RequestError(point.problem)
    check_profilers([point])
    with Interrupt() as interrupt:
        store = _open_store([point])
        with Worker() as worker:
            session = _Session(store, worker, interrupt)
            kept = _run_point(point, session, parent=None, tags={}, is_last=True)
        if not quiet:
            report.print_point(kept.result)
            if not kept.problem:
                _say_where(kept.folder, store)
    _raise_if_killed([kept])
    if kept.problem:
        raise RequestError(kept.problem)
    return kept.result


def run_sweep(points: Sequence[Point], folder: Path, *, quiet: bool = False) -> list[Result]:
    """Run points in order, each kept as soon as it has ended, and the table of all at the end.

    The sweep ends with a point that cannot be kept, whose result the table still has.

    Raises:
        ProfilerUnavailable: this machine can run none of the profilers asked for.
        RequestError: there is no point, or the folder or the store cannot be used.
        Interrupted: Ctrl-C or SIGTERM; the running point is kept as killed, the rest is not run.
    """
    if not points:
        raise RequestError("the sweep is empty: a range or glob in it gives no value")
    unavailable = check_profilers(points)
    common = _common(points)
    with Interrupt() as interrupt:
        store = _open_store(points)
        name = _sweep_name(points)
        parent = store.start_sweep(name, _sweep_tags(points, folder), _sweep_params(points))
        kept: list[Kept] = []
        problem = ""
        with Worker() as worker:
            session = _Session(store, worker, interrupt)
            for index, point in enumerate(points):
                tags = {"sweep_id": parent or "", "sweep_name": name, "sweep_index": index}
                reason = unavailable.get(index)
                is_last = index == len(points) - 1
                try:
                    each = _run_point(
                        point, session, parent=parent, tags=tags, skip=reason, is_last=is_last
                    )
                except RequestError as error:
                    problem = str(error)
                    break
                kept.append(each)
                ended, problem = each.result, each.problem
                if not quiet and not ended.ok:
                    shown = _short_name(point, common)
                    print(f"{shown}: {ended.status}: {ended.reason}", file=sys.stderr, flush=True)
                if problem or ended.reason == _INTERRUPTED:
                    break
        if not kept:
            store.kill(parent)
            raise RequestError(problem)
        rows = [(_short_name(each.point, common), each.result) for each in kept]
        if not quiet:
            if common:
                print(", ".join(common))
            report.print_table(rows)
        try:
            files = _sweep_files(rows, folder)
        except OSError as error:
            files, problem = [], problem or f"cannot write to {folder}: {error.strerror or error}"
        store.finish_sweep(parent, rows, files, folder)
        record.release(folder)
        if not quiet:
            _say_where(folder, store)
    _raise_if_killed(kept)
    if problem:
        raise RequestError(problem)
    return [each.result for each in kept]


def check_profilers(points: Sequence[Point]) -> dict[int, str]:
    """The points whose profiler cannot run here, by index, with the reason.

    Raises:
        ProfilerUnavailable: none of the points can run.
    """
    reasons: dict[int, str] = {}
    for index, point in enumerate(points):
        if point.run is None:
            continue
        try:
            point.run.profiler.check()
        except ProfilerUnavailable as reason:
            reasons[index] = f"profiler={point.profiler} cannot run here: {reason}"
    valid = [point for point in points if point.run is not None]
    if valid and len(reasons) == len(valid):
        raise ProfilerUnavailable(next(iter(reasons.values())))
    return reasons


_INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class _Session:
    """What all points of a session share."""

    store: Store
    worker: Worker
    interrupt: Interrupt


def _run_point(
    point: Point,
    session: _Session,
    *,
    parent: str | None,
    tags: Mapping[str, object],
    skip: str | None = None,
    is_last: bool = False,
) -> Kept:
    """Run one point; its record is complete on disk before MLflow hears of the result.

    What processes that ended until then left on their devices goes into it, so the last point's
    process is ended first.
    """
    folder = record.new_folder(point.folder)
    started_at = datetime.now(UTC)
    identity = _identity(point)
    run_id = session.store.start_point(
        point.name,
        {**point.choices, **tracking.flatten(point.config)},
        {"identity": identity, "profiler": point.profiler, **tags},
        parent,
    )
    try:
        with session.interrupt.allowed():
            if skip is None:
                result = point_.execute(point, session.worker)
            else:
                result = Result(status=Status.skipped, stage=Stage.start, reason=skip)
    except KeyboardInterrupt:
        result = Result(
            status=Status.killed,
            stage=Stage.start,
            reason=_INTERRUPTED,
            requested=point.requested(),
        )
    if is_last:
        session.worker.close()
    problem, result = "", _with_endings(result, session.worker)
    try:
        result = _with_files(result, folder)
    except OSError as error:
        problem = f"cannot write to {folder}: {error.strerror or error}"
    origin = record.Origin(
        identity=identity,
        overrides=point.overrides,
        started_at=started_at,
        versions=record.versions(),
        host=record.host(),
        git=_git_state(Path.cwd()),
    )
    data = record.to_dict(result, origin)
    try:
        record.write(folder, data, _yaml(point.config))
    except RequestError as error:
        problem = problem or str(error)
    session.store.finish_point(run_id, data, folder, parent is None)
    return Kept(point=point, result=result, folder=folder, problem=problem)


def _yaml(config: Mapping[str, Any]) -> str:
    """A configuration as text, by libyaml, which takes a tenth of Python's time."""
    return str(yaml.dump(dict(config), Dumper=yaml.CSafeDumper, sort_keys=False))


def _with_endings(result: Result, worker: Worker) -> Result:
    """The result with what ended processes left on their devices; said where it is not nothing."""
    endings, worker.endings = worker.endings, []
    if not endings:
        return result
    for each in endings:
        if is_left(each):
            left = gib(each["residual_bytes"])
            print(
                f"kvexp: {left} more are in use on GPU {each['uuid']} than before the measurement",
                file=sys.stderr,
            )
    return replace(result, readings={**result.readings, "device_after": endings})


def _with_files(result: Result, folder: Path) -> Result:
    """The result with the files that its measurement made moved into its folder."""
    made = [Path(path) for path in result.readings.get("files", ())]
    if not made:
        return result
    for path in made:
        shutil.move(path, folder / path.name)
        with suppress(OSError):
            path.parent.rmdir()
    return replace(result, readings={**result.readings, "files": [path.name for path in made]})


@cache
def _git_state(folder: Path) -> dict[str, Any]:
    return record.git_state(folder)


def _identity(point: Point) -> str:
    """The same for the same facts, wherever the files lie that they were read from."""
    config: dict[str, Any] = {**point.config, "plugins": [point.engine, point.profiler]}
    if model := config.get("model"):
        config["model"] = {**model, "path": None}
    if draft := (config.get("speculative") or {}).get("draft"):
        config["speculative"] = {**config["speculative"], "draft": {**draft, "path": None}}
    if point.run is None:
        config["overrides"] = list(point.overrides)
    return record.identity(config, record.versions())


def _open_store(points: Sequence[Point]) -> Store:
    """The store that all points ask for.

    Raises:
        RequestError: they ask for different ones, or it cannot be used.
    """
    asked = [Tracking(**point.config["tracking"]) for point in points if point.config]
    if any(settings != asked[0] for settings in asked):
        raise RequestError("a sweep has one store: tracking cannot be swept over")
    return tracking.open_store(asked[0] if asked else Tracking(kind="off"), Path.cwd())


def _common(points: Sequence[Point]) -> list[str]:
    """The overrides that all points of a sweep share."""
    if len(points) == 1:
        return []
    return [o for o in points[0].overrides if all(o in p.overrides for p in points)]


def _short_name(point: Point, common: Sequence[str]) -> str:
    """What sets a point apart from the others of its sweep."""
    return ", ".join(o for o in point.overrides if o not in common) or point.name


def _sweep_name(points: Sequence[Point]) -> str:
    """What all points have in common, then the keys that differ."""
    common = _common(points)
    varied = [o.partition("=")[0] for o in points[0].overrides if o not in common]
    return ", ".join([*common, f"sweep of {' x '.join(varied)}"] if varied else common) or "sweep"


def _sweep_params(points: Sequence[Point]) -> dict[str, str]:
    """The options that all points chose."""
    chosen = [dict(point.choices) for point in points if point.choices]
    first = chosen[0] if chosen else {}
    return {
        key: value
        for key, value in first.items()
        if value != "None" and all(c.get(key) == value for c in chosen)
    }


def _sweep_tags(points: Sequence[Point], folder: Path) -> dict[str, object]:
    tags: dict[str, object] = {"folder": str(folder), "points": len(points)}
    for group in ("engine", "profiler"):
        tags[group] = ",".join(sorted({point.choices.get(group, "") for point in points} - {""}))
    return tags


def _sweep_files(rows: Sequence[tuple[str, Result]], folder: Path) -> list[Path]:
    """The table and one picture of all columns, beside the points' folders."""
    files = [folder / "table.csv"]
    record.write_text(files[0], report.csv_text(rows))
    if any(result.budget is not None for _, result in rows):
        files.append(report.memory_picture(rows, folder / "memory.png"))
    return files


def _say_where(folder: Path, store: Store) -> None:
    print(f"results: {folder}")
    if command := tracking.ui_command(store):
        print(f"MLflow:  {command}")


def _raise_if_killed(kept: Sequence[Kept]) -> None:
    if any(each.result.reason == _INTERRUPTED for each in kept):
        raise Interrupted("interrupted")
