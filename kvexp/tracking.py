"""MLflow: a second copy of every record, to sort, compare and plot.

Runs are written through an explicit client and run ids; MLflow's active run is never touched.
What is wrong with the store is said before anything is measured (`open_store`); what goes wrong
later costs one warning line and never a point, for the record on disk is complete by then.
"""

import hashlib
import json
import logging
import math
import os
import random
import re
import shlex
import sqlite3
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard, TypeVar
from urllib.parse import urlsplit

from kvexp import record, report
from kvexp.errors import RequestError
from kvexp.results import COUNTS, Result, Status

AXES = (
    "util",
    "block_size",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "tp",
    "pp",
    "dp",
)
"""Numeric knobs that are also metrics, as `axis.<name>`: params are text and sort as text."""

MAX_VALUE_CHARS = 500
"""Longest param or tag value sent whole; below the limit of every MLflow store."""

PICTURE_FILE = "memory.png"

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_NAME_CHARS = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 500
_ATTEMPTS_WHEN_LOCKED = 4
_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
_SHORT_WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
_METRICS = (
    *COUNTS,
    "num_replicas",
    "kv_tokens_total",
    "max_concurrency_total",
    "allocated_bytes",
    "duration_s",
)
_PROFILE_METRICS = ("weights_bytes", "activation_bytes", "non_torch_bytes", "cudagraph_bytes")
_BUDGET_METRICS = ("total_bytes", "free_bytes", "requested_bytes", "available_bytes")
_HOLDING_METRICS = (
    "held_at_start_bytes",
    "held_under_load_bytes",
    "above_request_bytes",
    "largest_safe_util",
)
_OUTSIDE = "use tracking=off to keep results in the output folder only"


@dataclass
class Tracking:
    """Where results go besides the output folder.

    `kind` is `mlflow` or `off`. `uri` is an MLflow tracking URI; a relative SQLite path is below
    the folder that kvexp was started in.
    """

    kind: str = "mlflow"
    uri: str = "sqlite:///outputs/mlflow.db"
    experiment: str = "kvexp"


class Store:
    """Where runs go; this one keeps nothing (tracking=off).

    No method raises: what cannot be sent is counted in `failures`. A run id is None where there
    is no run, and may be handed back as it is.
    """

    uri: str = ""
    failures: int = 0

    def start_sweep(
        self, name: str, tags: Mapping[str, object], params: Mapping[str, Any] | None = None
    ) -> str | None:
        """Start the run that the points of a sweep hang below; the result is its id."""

    def start_point(
        self,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, object],
        parent: str | None = None,
    ) -> str | None:
        """Start a point's run; `params` is its resolved config, nested or flat."""

    def finish_point(
        self, run_id: str | None, data: Mapping[str, Any], folder: Path, single: bool
    ) -> None:
        """Send a point's record (`record.to_dict`), whose files lie in `folder`, and end its run.

        With `single` a picture of the memory goes along; it is drawn where the folder has none.
        """

    def finish_sweep(
        self,
        parent_id: str | None,
        rows: Sequence[tuple[str, Result]],
        files: Sequence[Path],
        folder: Path,
    ) -> None:
        """End a sweep's run with its files (table, picture) and the summary of its points."""

    def finish_report(
        self,
        run_id: str | None,
        metrics: Mapping[str, float],
        files: Sequence[Path],
        folder: Path | None,
    ) -> None:
        """End a run that is no point and no sweep; its files stay in `folder` as well, if given."""

    def kill(self, run_id: str | None) -> None:
        """End a run as killed, unless it has ended."""


class MlflowStore(Store):
    """One experiment of an MLflow store; made by `open_store`."""

    def __init__(self, client: Any, uri: str, experiment_id: str) -> None:
        self.uri = uri
        self.experiment_id = experiment_id
        self.failures = 0
        self._client = client
        self._params: dict[str, Mapping[str, Any]] = {}
        self._closed: set[str] = set()
        self._start_error: Exception | None = None

    def start_sweep(
        self, name: str, tags: Mapping[str, object], params: Mapping[str, Any] | None = None
    ) -> str | None:
        """See `Store`."""
        return self._start(name, params or {}, {"kind": "sweep", **tags})

    def start_point(
        self,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, object],
        parent: str | None = None,
    ) -> str | None:
        """See `Store`."""
        nested = {"mlflow.parentRunId": parent} if parent else {}
        return self._start(name, params, {"kind": "point", **tags, **nested})

    def finish_point(
        self, run_id: str | None, data: Mapping[str, Any], folder: Path, single: bool
    ) -> None:
        """See `Store`."""

        def upload() -> None:
            files = [folder / record.CONFIG_FILE, folder / record.RESULT_FILE]
            files += [folder / name for name in data["readings"].get("files", ())]
            self._upload(run_id, [*files, *(_picture(data, folder) if single else ())])

        def batch() -> None:
            self._batch(run_id, metrics_of(data), point_tags(data, folder))

        self._finish(run_id, (batch, upload), _run_status([data["status"]]), folder)

    def finish_sweep(
        self,
        parent_id: str | None,
        rows: Sequence[tuple[str, Result]],
        files: Sequence[Path],
        folder: Path,
    ) -> None:
        """See `Store`."""
        results = [result for _, result in rows]

        def batch() -> None:
            self._batch(parent_id, _sweep_metrics(results), _sweep_tags(rows, folder))

        def upload() -> None:
            self._upload(parent_id, files)

        status = _run_status([result.status for result in results])
        self._finish(parent_id, (batch, upload), status, folder)

    def finish_report(
        self,
        run_id: str | None,
        metrics: Mapping[str, float],
        files: Sequence[Path],
        folder: Path | None,
    ) -> None:
        """See `Store`."""

        def batch() -> None:
            self._batch(run_id, {param_name(key): value for key, value in metrics.items()}, {})

        def upload() -> None:
            self._upload(run_id, files)

        self._finish(run_id, (batch, upload), "FINISHED", folder)

    def kill(self, run_id: str | None) -> None:
        """See `Store`."""
        if run_id is None:
            return

        def batch() -> None:
            self._batch(run_id, {}, {"status": Status.killed})

        self._finish(run_id, (batch,), "KILLED", None)

    def _start(
        self, name: str, params: Mapping[str, Any], tags: Mapping[str, object]
    ) -> str | None:
        texts = {param_name(key): shorten(value) for key, value in tags.items()}

        def create() -> str:
            run = self._client.create_run(self.experiment_id, tags=texts, run_name=name)
            return str(run.info.run_id)

        try:
            run_id = _patiently(create)
        except Exception as error:
            self._start_error = error
            return None
        self._params[run_id] = params
        return run_id

    def _finish(
        self,
        run_id: str | None,
        steps: Sequence[Callable[[], None]],
        status: str,
        folder: Path | None,
    ) -> None:
        if run_id is None:
            self._warn(self._start_error, folder)
            return
        if run_id in self._closed:
            return
        self._closed.add(run_id)
        errors = []
        for step in (*steps, lambda: self._client.set_terminated(run_id, status)):
            try:
                _patiently(step)
            except Exception as error:
                errors.append(error)
        if errors:
            self._warn(errors[0], folder)

    def _batch(
        self, run_id: str | None, metrics: Mapping[str, float], tags: Mapping[str, object]
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag  # noqa: PLC0415

        params = params_of(self._params.pop(run_id or "", {}))
        now = int(time.time() * 1000)
        chunks = _chunks([Param(key, value) for key, value in params.items()], _PARAMS_PER_BATCH)
        measured = [Metric(key, value, now, 0) for key, value in metrics.items()]
        self._client.log_batch(
            run_id,
            metrics=measured[:_METRICS_PER_BATCH],
            params=next(chunks, []),
            tags=[RunTag(param_name(key), shorten(value)) for key, value in tags.items()],
        )
        for chunk in chunks:
            self._client.log_batch(run_id, params=chunk)
        for more in _chunks(measured[_METRICS_PER_BATCH:], _METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=more)

    def _upload(self, run_id: str | None, files: Sequence[Path]) -> None:
        for path in files:
            if path.exists():
                self._client.log_artifact(run_id, str(path))

    def _warn(self, error: Exception | None, folder: Path | None) -> None:
        self.failures += 1
        kept = f"; the result is complete in {folder}" if folder else ""
        _log.warning("MLflow did not take everything (%s)%s", _cause(error), kept)


def open_store(tracking: Tracking, launch_dir: Path) -> Store:
    """Open the store and check that it can be written to, within seconds.

    A new SQLite store is made by one process while others wait; its artifacts lie beside it in
    `mlartifacts`. The experiment is made when it is not there.

    Raises:
        RequestError: the store cannot be used; the message says why and what to do.
    """
    if tracking.kind == "off":
        return Store()
    if tracking.kind != "mlflow":
        raise RequestError(f"tracking.kind must be mlflow or off, got {tracking.kind!r}")
    scheme = _scheme(tracking.uri)
    client_class = _import_client()
    if scheme == "sqlite":
        return _open_sqlite(client_class, tracking, launch_dir)
    if scheme in ("http", "https"):
        for name, value in _SHORT_WAITS.items():
            os.environ.setdefault(name, value)
    try:
        client = client_class(tracking_uri=tracking.uri)
        experiment_id = _experiment(client, tracking.experiment, None, tracking.uri)
    except RequestError:
        raise
    except Exception as error:
        raise _unusable(tracking.uri, error) from None
    return MlflowStore(client, tracking.uri, experiment_id)


def ui_command(store: Store) -> str:
    """What to paste (or open, for a server) to see the runs; empty with tracking=off."""
    if not store.uri or store.uri.startswith(("http://", "https://")):
        return store.uri
    return f"mlflow ui --backend-store-uri {shlex.quote(_shown(store.uri))}"


def param_name(name: str) -> str:
    """The name under which MLflow keeps a param or tag; no two names share one.

    ASCII letters, digits, `_`, `.` and `-` stay. Any other character, a leading `.` and a `_`
    before an `x` become `_x<hex>_`, their code point; the empty name becomes `_x_`. What is
    longer than 250 characters ends in a hash of the whole.
    """
    escaped = re.sub(r"[^A-Za-z0-9_.-]|^\.|_(?=x)", lambda match: f"_x{ord(match[0]):X}_", name)
    if len(escaped) > _MAX_NAME_CHARS:
        return f"{escaped[: _MAX_NAME_CHARS - 20]}_x_{_digest(name)}"
    return escaped or "_x_"


def shorten(value: object) -> str:
    """The value as text; what is longer than `MAX_VALUE_CHARS` is cut, with its hash."""
    text = value if isinstance(value, str) else json.dumps(record.plain(value))
    text = str(text)
    if len(text) <= MAX_VALUE_CHARS:
        return text
    note = f"... [{len(text)} characters, sha256 {_digest(text)}, whole in the artifacts]"
    return text[: MAX_VALUE_CHARS - len(note)] + note


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """`flatten` as MLflow takes it: names by `param_name`, values as text by `shorten`."""
    return {param_name(name): shorten(value) for name, value in flatten(config).items()}


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config by dotted names, without the parts `tracking` and `hydra`; lists stay whole."""
    kept = {key: value for key, value in config.items() if key not in record.NOT_PART_OF_A_POINT}
    return dict(_leaves(kept, ""))


def metrics_of(data: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by the names of result.json; what is unknown is absent.

    `kv_cache_bytes` are those of the blocks, `peak_bytes` is weights, activation and non-torch
    together. The axes are the values used, or those asked for where the point got no further.
    """
    profile, budget = data.get("profile") or {}, data.get("budget") or {}
    values: dict[str, Any] = {name: data.get(name) for name in _METRICS}
    values |= {name: profile.get(name) for name in _PROFILE_METRICS}
    values |= {name: budget.get(name) for name in _BUDGET_METRICS}
    values |= {name: (data.get("holding") or {}).get(name) for name in _HOLDING_METRICS}
    included = (each for part in profile.get("parts", ()) for each in part.get("includes", ()))
    values |= {f"{each['name']}_bytes": each["size_bytes"] for each in included}
    if profile:
        values["peak_bytes"] = sum(profile[name] for name in _PROFILE_METRICS[:3])
    if budget:
        values["kv_cache_bytes"] = sum(
            part["size_bytes"] for part in budget["parts"] if part["name"] == "kv_cache"
        )
    values |= _compared_metrics(data.get("compared") or [])
    asked, used = data.get("requested") or {}, data.get("effective") or {}
    values |= {f"axis.{name}": used.get(name, asked.get(name)) for name in AXES}
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def _compared_metrics(compared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each profiler's figures, as `compared.<profiler>.<name>`, and ratios to the first's."""
    values: dict[str, Any] = {}
    with_terms = [each for each in compared if each["profile"]]
    for each in with_terms:
        found = {name: each["profile"][name] for name in _PROFILE_METRICS}
        found |= {name: each[name] for name in ("num_blocks", "kv_tokens", "available_bytes")}
        first = with_terms[0]
        base = {**first, **first["profile"]}
        for name, value in found.items():
            values[f"compared.{each['profiler']}.{name}"] = value
            if each is not first and base[name] and value is not None:
                values[f"compared.{each['profiler']}.{name}_ratio"] = value / base[name]
    return values


def point_tags(data: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """What says how a point ended and where it ran, to filter and group by."""
    effective, git = data.get("effective") or {}, data.get("git") or {}
    tags = {
        "status": data["status"],
        "stage": data["stage"],
        "reason": data["reason"],
        "engine": effective.get("engine"),
        "engine_version": effective.get("engine_version"),
        "identity": data.get("identity"),
        "folder": str(folder),
        "host": (data.get("host") or {}).get("name"),
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
        **{f"{key}_version": text for key, text in (data.get("versions") or {}).items()},
    }
    if lines := data.get("log_lines"):
        tags["mlflow.note.content"] = "\n".join(f"    {line}" for line in lines)
    return {key: shorten(value) for key, value in tags.items() if value not in (None, "")}


def _sweep_metrics(results: Sequence[Result]) -> dict[str, float]:
    """Counts of points, and `best.*` of those that are ok.

    Tokens and concurrency are the largest, for they compare across engines; blocks, whose sizes
    differ, are those of the point that holds most tokens.
    """
    counts = Counter(result.status for result in results)
    metrics = {f"points.{status}": float(count) for status, count in counts.items()}
    metrics |= {"points": float(len(results)), "points.ok": float(counts[Status.ok])}
    ok = [result for result in results if result.ok]
    for name in ("kv_tokens", "max_concurrency"):
        values = [getattr(result, name) for result in ok]
        if known := [value for value in values if _is_number(value)]:
            metrics[f"best.{name}"] = float(max(known))
    if ok and _is_number(blocks := max(ok, key=_capacity).num_blocks):
        metrics["best.num_blocks"] = float(blocks)
    return metrics


def _capacity(result: Result) -> tuple[float, ...]:
    """What a point is better by: tokens, then requests at once, then blocks."""
    figures = (result.kv_tokens, result.max_concurrency, result.num_blocks)
    return tuple(figure if _is_number(figure) else -1.0 for figure in figures)


def _sweep_tags(rows: Sequence[tuple[str, Result]], folder: Path) -> dict[str, str]:
    ok = [(name, result) for name, result in rows if result.ok]
    status = "ok" if len(ok) == len(rows) else "partial" if ok else "failed"
    tags = {"status": status, "points": f"{len(ok)}/{len(rows)} ok", "folder": str(folder)}
    if ok:
        tags["best"] = shorten(max(ok, key=lambda row: _capacity(row[1]))[0])
    return tags


def _run_status(statuses: Sequence[str]) -> str:
    if Status.killed in statuses:
        return "KILLED"
    return "FINISHED" if all(status == Status.ok for status in statuses) else "FAILED"


def _picture(data: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    path = folder / PICTURE_FILE
    if path.exists():
        return (path,)
    if not data.get("budget"):
        return ()
    name = " ".join(data.get("overrides") or ["defaults"])
    report.memory_picture([(name, record.from_dict(data))], path)
    return (path,)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _patiently(action: Callable[[], _T]) -> _T:
    """Do it; a database that another process holds is tried again a few times."""
    for attempt in range(1, _ATTEMPTS_WHEN_LOCKED):
        try:
            return action()
        except Exception as error:
            if "database is locked" not in str(error):
                raise
            time.sleep(random.uniform(0.05, 0.2) * attempt)
    return action()


def _scheme(uri: str) -> str:
    """The kind of store; a single letter before the colon is a Windows drive."""
    match = re.match(r"([A-Za-z][A-Za-z0-9.-]+)(?:\+\w+)?:", uri)
    scheme = match[1].lower() if match else "file"
    if scheme == "file":
        raise RequestError(
            f"tracking.uri={uri} is a folder, which MLflow no longer writes runs to; use"
            " tracking.uri=sqlite:///outputs/mlflow.db (old runs: mlflow migrate-filestore --help)"
        )
    if re.fullmatch(r"[\w.-]+:\d+/?", uri):
        raise RequestError(f"tracking.uri={uri} needs a scheme: tracking.uri=http://{uri}")
    plugins = {each.name for each in metadata.entry_points(group="mlflow.tracking_store")}
    if scheme not in plugins.union(_SCHEMES):
        raise RequestError(
            f"tracking.uri={uri} is none of the kinds that MLflow knows: {', '.join(_SCHEMES)}"
        )
    if scheme == "sqlite" and not uri.lower().startswith("sqlite:///"):
        raise RequestError(
            f"tracking.uri={uri} must start with sqlite:/// (three slashes and a path),"
            " such as sqlite:///outputs/mlflow.db"
        )
    return scheme


def _import_client() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow.tracking import MlflowClient  # noqa: PLC0415
    except ImportError as error:
        missing = (error.name or "mlflow").split(".")[0]
        raise RequestError(
            f"{missing} is not installed: pip install mlflow, or {_OUTSIDE}"
        ) from None
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient


def _open_sqlite(client_class: Any, tracking: Tracking, launch_dir: Path) -> Store:
    path = _sqlite_path(tracking.uri, launch_dir)
    uri = _sqlite_uri(path)
    artifacts = path.parent / "mlartifacts"
    try:
        artifacts.mkdir(parents=True, exist_ok=True)
        _check_writable(path)
        with record.locked(path.with_name(f"{path.name}.lock"), shared=bool(_tables(path))):
            client = _sqlite_client(client_class, path, uri)
            experiment_id = _experiment(client, tracking.experiment, artifacts.as_uri(), uri)
    except OSError as error:
        raise RequestError(
            f"cannot write to {error.filename or path}: {error.strerror or error};"
            f" set tracking.uri=sqlite:///... to a folder of yours, or {_OUTSIDE}"
        ) from None
    except RequestError:
        raise
    except Exception as error:
        raise _unusable(uri, error) from None
    return MlflowStore(client, uri, experiment_id)


def _sqlite_path(uri: str, launch_dir: Path) -> Path:
    from sqlalchemy.engine import make_url  # noqa: PLC0415

    database = make_url(uri).database
    if not database or database == ":memory:":
        raise RequestError(f"tracking.uri={uri} names no file: runs would be lost at the end")
    return Path(os.path.abspath(launch_dir / database))  # noqa: PTH100 - links stay as they are


def _sqlite_uri(path: Path) -> str:
    """The address of the file; `%` and `?` are quoted where SQLAlchemy would read them as more."""
    from sqlalchemy.engine import URL, make_url  # noqa: PLC0415

    plain = f"sqlite:///{path}"
    if make_url(plain).database == str(path):
        return plain
    quoted = URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)
    if make_url(quoted).database == str(path):
        return quoted
    raise RequestError(f"SQLAlchemy cannot address {path}; choose a path without % and ?")


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise RequestError(f"{path} is a folder; tracking.uri must name a file, {path}/mlflow.db")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise PermissionError(13, "Permission denied", str(target))


def _tables(path: Path) -> set[str]:
    """Tables of the SQLite file; empty where there is no file yet."""
    if not path.exists():
        return set()
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        try:
            rows = connection.execute("select name from sqlite_master where type = 'table'")
            return {name for (name,) in rows}
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        raise RequestError(f"{path} cannot be read as an SQLite database: {error}") from None


def _sqlite_client(client_class: Any, path: Path, uri: str) -> Any:
    """The client; an older database is refused here, for MLflow would upgrade some silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.store.tracking import sqlalchemy_store  # noqa: PLC0415

        tables = _tables(path)
        expected = set(sqlalchemy_store.SqlExperiment.metadata.tables)
        if tables and not expected <= tables:
            raise _other_schema(path, uri)
        try:
            return client_class(tracking_uri=uri)
        except Exception as error:
            if "database schema" in str(error) or "locate revision" in str(error):
                raise _other_schema(path, uri) from None
            raise
        finally:
            stray = Path(uri.removeprefix("sqlite:///")).parent
            if stray != path.parent:  # MLflow makes the folder of the quoted name as well
                with suppress(OSError):
                    os.removedirs(stray)


def _other_schema(path: Path, uri: str) -> RequestError:
    return RequestError(
        f"{path} was written by another version than the installed MLflow"
        f" {record.versions().get('mlflow', '')}; copy the file, then run: mlflow db upgrade"
        f" {shlex.quote(uri)} (or name another file in tracking.uri)"
    )


def _experiment(client: Any, name: str, artifacts: str | None, uri: str) -> str:
    """The id of the experiment, which is made when absent."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            found = client.get_experiment(client.create_experiment(name, artifacts))
        except Exception:  # another process may have made it just now
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise RequestError(
            f"the MLflow experiment {name!r} is deleted; restore it with: MLFLOW_TRACKING_URI="
            f"{shlex.quote(_shown(uri))} mlflow experiments restore --experiment-id"
            f" {found.experiment_id}, or use another name: tracking.experiment=..."
        )
    _check_artifacts(found, name)
    return str(found.experiment_id)


def _check_artifacts(experiment: Any, name: str) -> None:
    """Refuse an experiment whose files would land in a folder that cannot be made here."""
    from urllib.request import url2pathname  # noqa: PLC0415

    parts = urlsplit(experiment.artifact_location)
    if parts.scheme not in ("", "file") or len(parts.scheme) == 1:
        return
    folder = Path(url2pathname(parts.path) if parts.scheme else experiment.artifact_location)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise RequestError(
            f"the files of MLflow experiment {name!r} belong in {folder}, which cannot be written"
            " to from here; use another name: tracking.experiment=... (a server hands files on"
            " when it is started with --serve-artifacts)"
        )


def _unusable(uri: str, error: Exception) -> RequestError:
    text = str(error)
    if "403" in text and "host" in text.lower():
        return RequestError(
            f"the MLflow server at {_shown(uri)} refuses the host name {urlsplit(uri).netloc};"
            f" start it with --allowed-hosts {shlex.quote(urlsplit(uri).netloc)}, or {_OUTSIDE}"
        )
    return RequestError(
        f"cannot use MLflow at {_shown(uri)}: {_cause(error)}; check tracking.uri, or {_OUTSIDE}"
    )


def _cause(error: Exception | None) -> str:
    """The error in a few words, on one line."""
    text = " ".join(str(error).split())
    for sign, words in (
        ("Connection refused", "connection refused"),
        ("NameResolution", "unknown host name"),
        ("timed out", "no answer in time"),
    ):
        if sign in text:
            return words
    return text[:200] or type(error).__name__


def _shown(uri: str) -> str:
    """The address without its password."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", uri)
