"""What is kept on disk about a point: the record that is complete before anyone else hears of it.

A point's folder holds `config.yaml` (resolved, readable without kvexp), `overrides.yaml` and, last
of all, `result.json`: where that file exists the point is complete.
"""

import hashlib
import json
import math
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kvexp.errors import RequestError
from kvexp.results import (
    COUNTS,
    Budget,
    Compared,
    Holding,
    KvGroup,
    Part,
    Profile,
    Provenance,
    RankResult,
    Refusal,
    Result,
    Stage,
    Status,
)

SCHEMA_VERSION = 1
"""Version of the shape of result.json; raised when a reader of the old shape would be misled."""

RESULT_FILE = "result.json"
CONFIG_FILE = "config.yaml"
OVERRIDES_FILE = "overrides.yaml"

_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""For a version, the function that turns its data into the next version's."""

_CLAIM_FILE = ".claim"
NOT_PART_OF_A_POINT = ("tracking", "hydra")
"""Parts of a config that say where results go, not what the point is."""

_DISTRIBUTIONS = ("kvexp", "hydra-core", "omegaconf", "mlflow", "torch", "transformers", "vllm")
_SIZES = ("weights_bytes", "activation_bytes", "non_torch_bytes", "cudagraph_bytes")
_SIMULATED_SIZES = (
    "warm_activation_bytes",
    "allocated_peak_bytes",
    "reserved_peak_low_bytes",
    "reserved_peak_high_bytes",
    "missing_activation_bytes",
)
_claims: dict[Path, int] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a result comes from: what is kept beside it so that it can be run again.

    `started_at` is an aware time; it is kept in UTC.
    """

    identity: str = ""
    overrides: Sequence[str] = ()
    started_at: datetime | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    git: Mapping[str, Any] = field(default_factory=dict)


def to_dict(result: Result, origin: Origin | None = None) -> dict[str, Any]:
    """The result as plain JSON data: the content of result.json.

    Names are those of `Result`; sizes are bytes. Floats that are not finite become null, enums
    their names, tuples lists.
    """
    origin = origin or Origin()
    started_at = origin.started_at
    data = {
        "schema_version": SCHEMA_VERSION,
        "identity": origin.identity,
        "overrides": list(origin.overrides),
        "started_at": started_at.astimezone(UTC).isoformat() if started_at else None,
        **{name: getattr(result, name) for name in (*_SCALARS, *_REPLICAS)},
        "budget": _budget_dict(result.budget) if result.budget else None,
        "profile": _profile_dict(result.profile) if result.profile else None,
        "holding": _holding_dict(result.holding) if result.holding else None,
        "refusal": _refusal_dict(result.refusal) if result.refusal else None,
        "layout": result.layout,
        "verified": result.verified,
        "largest_util": result.largest_util,
        "groups": [_fields_dict(group) for group in result.groups],
        "ranks": [_rank_dict(rank) for rank in result.ranks],
        "log_lines": result.log_lines,
        "notes": result.notes,
        "requested": result.requested,
        "effective": result.effective,
        "readings": result.readings,
        "versions": origin.versions,
        "host": origin.host,
        "git": origin.git,
        "duration_s": result.duration_s,
    }
    if result.compared:
        data["compared"] = [_compared_dict(each) for each in result.compared]
    plain_data: dict[str, Any] = plain(data)
    return plain_data


def from_dict(data: Mapping[str, Any]) -> Result:
    """The result that `to_dict` described; older schema versions are upgraded first.

    Raises:
        RequestError: the data was written by a newer kvexp.
        KeyError, TypeError, ValueError, AssertionError: the data is no result.
    """
    data = _upgraded(dict(data))
    return Result(
        **{name: data.get(name) for name in _SCALARS[3:]},
        num_replicas=data.get("num_replicas"),
        kv_tokens_total=data.get("kv_tokens_total"),
        max_concurrency_total=data.get("max_concurrency_total"),
        status=Status(data["status"]),
        stage=Stage(data["stage"]),
        reason=data["reason"],
        budget=_budget(data["budget"]) if data["budget"] else None,
        profile=_profile(data["profile"]) if data["profile"] else None,
        holding=_holding(data["holding"]) if data.get("holding") else None,
        refusal=_refusal(data["refusal"]) if data["refusal"] else None,
        layout=data["layout"],
        verified=data.get("verified"),
        largest_util=data.get("largest_util"),
        groups=tuple(KvGroup(**group) for group in data["groups"]),
        ranks=tuple(_rank(rank) for rank in data["ranks"]),
        compared=tuple(_compared(each) for each in data.get("compared", ())),
        log_lines=tuple(data["log_lines"]),
        notes=tuple(data["notes"]),
        requested=data["requested"],
        effective=data["effective"],
        readings=data["readings"],
        duration_s=data["duration_s"],
    )


def plain(value: Any) -> Any:
    """The value as JSON data: what no JSON type fits becomes text, NaN and infinities null."""
    if value is None or (isinstance(value, bool | int) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return str(value) if isinstance(value, StrEnum) else value.name
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return int(value) if hasattr(value, "__index__") else str(value)


def identity(config: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """A point's identity: 16 hex digits of the hash of its resolved config and versions.

    Equal for equal points whatever the order of the keys; the parts `tracking` and `hydra` are
    left out, for where results go is not part of what the point is. 1 and 1.0 differ: hand in
    the config as its schema typed it. `versions` are those that can change the result: kvexp,
    the engine, the packages that the profiler uses.
    """
    kept = {key: value for key, value in config.items() if key not in NOT_PART_OF_A_POINT}
    text = json.dumps(
        plain({"config": kept, "versions": versions}),
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter; nothing is imported."""
    return dict(_versions())


def git_state(folder: Path) -> dict[str, Any]:
    """`commit` and `dirty` of the repository around `folder`; empty where there is none."""
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    try:
        done = subprocess.run(
            [*command, "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    oid = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not oid or oid == "(initial)":
        return {}
    return {"commit": oid, "dirty": any(not line.startswith("#") for line in lines)}


def host() -> dict[str, str]:
    """The machine that runs this process."""
    return {"name": platform.node(), "platform": platform.platform(), "machine": platform.machine()}


def new_folder(path: Path, holds: str = RESULT_FILE) -> Path:
    """Make a folder that holds no result: `path`, or `path-1`, `path-2`, ... when it is taken.

    `holds` is the file that marks a folder as taken.

    The folder belongs to the caller until `write` has put the result there or the process ends,
    so that two processes (or two calls) never get the same one.

    Raises:
        RequestError: no folder can be made there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if _claim(path, holds):
            return path
        for number in range(1, sys.maxsize):
            other = path.with_name(f"{path.name}-{number}")
            try:
                other.mkdir()
            except FileExistsError:
                continue
            if _claim(other, holds):
                return other
    except OSError as error:
        raise _not_writable(path, error) from None
    raise AssertionError("unreachable")


def write(folder: Path, data: Mapping[str, Any], config_yaml: str) -> Path:
    """Put a point's record into `folder`: every file whole or not at all, result.json last.

    `data` comes from `to_dict`; `config_yaml` is the resolved config. Returns result.json's path.

    Raises:
        RequestError: the folder holds a result already, or cannot be written to.
    """
    path = folder / RESULT_FILE
    if path.exists():
        raise RequestError(f"{path} exists and is never overwritten; choose another output folder")
    text = json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    overrides = [json.dumps(each, ensure_ascii=False) for each in data.get("overrides", ())]
    try:
        write_text(folder / CONFIG_FILE, config_yaml)
        write_text(folder / OVERRIDES_FILE, "".join(f"- {each}\n" for each in overrides) or "[]\n")
        write_text(path, text)
    except OSError as error:
        raise _not_writable(folder, error) from None
    release(folder)
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or all of the new, even after a crash.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = path.resolve()  # `.` and `..` have a name then, and a link keeps pointing where it does
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(folder_or_file: Path) -> tuple[Result, dict[str, Any]]:
    """Read a result back: what it says, and all of result.json.

    Raises:
        RequestError: there is none, it is damaged, or a newer kvexp wrote it.
    """
    path = folder_or_file / RESULT_FILE if folder_or_file.is_dir() else folder_or_file
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise RequestError(f"{path} is damaged: not JSON ({error})") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise RequestError(f"{path} is not a result of kvexp: it has no schema_version")
    try:
        return from_dict(data), data
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise RequestError(f"{path} is damaged: {text}") from None


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock on the file, which is made when absent; other processes wait their turn.

    Raises:
        OSError: the file cannot be made.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(handle, shared=shared, wait=True)
        yield
    finally:
        os.close(handle)


_SCALARS = (
    "status",
    "stage",
    "reason",
    *COUNTS,
    "allocated_bytes",
)
_REPLICAS = ("num_replicas", "kv_tokens_total", "max_concurrency_total")


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _fields_dict(item: Any) -> dict[str, Any]:
    return {each.name: getattr(item, each.name) for each in fields(item)}


def _parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [_part_dict(part) for part in parts]


def _part_dict(part: Part) -> dict[str, Any]:
    found = _fields_dict(part)
    included = _parts(found.pop("includes"))
    return {**found, "includes": included} if included else found


def _budget_dict(budget: Budget) -> dict[str, Any]:
    return {**_fields_dict(budget), "parts": _parts(budget.parts)}


def _profile_dict(profile: Profile) -> dict[str, Any]:
    found = {name: getattr(profile, name) for name in _SIZES}
    if profile.differences:
        found["engine_delta_bytes"] = profile.engine_delta_bytes
    simulated = {name: getattr(profile, name) for name in _SIMULATED_SIZES}
    found |= {name: size for name, size in simulated.items() if size is not None}
    return {**found, "parts": _parts(profile.parts)}


def _refusal_dict(refusal: Refusal) -> dict[str, Any]:
    return {**_fields_dict(refusal), "gap_bytes": refusal.gap_bytes}


def _holding_dict(holding: Holding) -> dict[str, Any]:
    return {
        **_fields_dict(holding),
        "parts": _parts(holding.parts),
        "above_request_bytes": holding.above_request_bytes,
    }


def _rank_dict(rank: RankResult) -> dict[str, Any]:
    return {
        **_fields_dict(rank),
        "profile": _profile_dict(rank.profile),
        "budget": _budget_dict(rank.budget),
    }


def _compared_dict(compared: Compared) -> dict[str, Any]:
    profile = _profile_dict(compared.profile) if compared.profile else None
    return {**_fields_dict(compared), "profile": profile}


def _compared(data: Mapping[str, Any]) -> Compared:
    return Compared(
        **{
            **data,
            "status": Status(data["status"]),
            "stage": Stage(data["stage"]),
            "profile": _profile(data["profile"]) if data["profile"] else None,
            "notes": tuple(data["notes"]),
        }
    )


def _part(data: Mapping[str, Any]) -> Part:
    includes = tuple(_part(each) for each in data.get("includes", ()))
    return Part(**{**data, "provenance": Provenance(data["provenance"]), "includes": includes})


def _budget(data: Mapping[str, Any]) -> Budget:
    return Budget(**{**data, "parts": tuple(_part(part) for part in data["parts"])})


def _profile(data: Mapping[str, Any]) -> Profile:
    non_torch, weights, activation, cudagraph, *differences = map(_part, data["parts"])
    return Profile(
        non_torch=non_torch,
        weights=weights,
        activation=activation,
        cudagraph=cudagraph,
        differences=tuple(differences),
        **{name: data.get(name) for name in _SIMULATED_SIZES},
    )


def _refusal(data: Mapping[str, Any]) -> Refusal:
    return Refusal(**{name: value for name, value in data.items() if name != "gap_bytes"})


def _holding(data: Mapping[str, Any]) -> Holding:
    known = {name: value for name, value in data.items() if name != "above_request_bytes"}
    return Holding(**{**known, "parts": tuple(_part(part) for part in data["parts"])})


def _rank(data: Mapping[str, Any]) -> RankResult:
    return RankResult(
        **{**data, "profile": _profile(data["profile"]), "budget": _budget(data["budget"])}
    )


def _upgraded(data: dict[str, Any]) -> dict[str, Any]:
    version = data["schema_version"]
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RequestError(
            f"schema version {version} is newer than this kvexp reads ({SCHEMA_VERSION});"
            " read it with the kvexp that wrote it or a later one: pip install --upgrade kvexp"
        )
    while version < SCHEMA_VERSION:
        if version not in _UPGRADES:
            raise RequestError(f"schema version {version} is not one that kvexp ever wrote")
        data = _UPGRADES[version](data)
        version += 1
    return data


def _claim(folder: Path, holds: str) -> bool:
    """Take the folder for this process; False when it holds such a file or is another's."""
    handle = os.open(folder / _CLAIM_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(handle, shared=False, wait=False)
    except OSError:
        os.close(handle)
        return False
    if (folder / holds).exists():
        (folder / _CLAIM_FILE).unlink(missing_ok=True)
        os.close(handle)
        return False
    _claims[folder.resolve()] = handle
    return True


def release(folder: Path) -> None:
    """Give up the claim on a folder that `new_folder` made."""
    handle = _claims.pop(folder.resolve(), None)
    if handle is not None:
        (folder / _CLAIM_FILE).unlink(missing_ok=True)
        os.close(handle)


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int, *, shared: bool, wait: bool) -> None:
        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(handle: int, *, shared: bool, wait: bool) -> None:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(handle, mode if wait else mode | fcntl.LOCK_NB)


def _not_writable(path: Path, error: OSError) -> RequestError:
    return RequestError(
        f"cannot write to {path}: {error.strerror or error};"
        " choose a folder of yours with hydra.run.dir=... (a sweep: hydra.sweep.dir=...)"
    )
