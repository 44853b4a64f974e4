"""Traces kept on disk, so that another cap, utilisation or allocator setting costs milliseconds.

A file is compressed JSON: reading one executes nothing. The folder is KVEXP_CACHE_DIR, else
`kvexp` in the user's cache folder; what is damaged there is made again.
"""

import gzip
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvexp.simulate.trace import Trace

FORMAT = 1
"""Raised when tracing finds something else than before for the same input."""


def folder() -> Path:
    """Where traces are kept."""
    if given := os.environ.get("KVEXP_CACHE_DIR"):
        return Path(given) / "traces"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvexp" / "traces"


def key(facts: Mapping[str, Any]) -> str:
    """Names a trace by all that it depends on: the facts given, torch and transformers."""
    versions = {name: _version(name) for name in ("torch", "transformers")}
    text = json.dumps(
        {"format": FORMAT, "versions": versions, "facts": facts}, sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cached(name: str, make: Callable[[], Trace]) -> Trace:
    """The trace of that name from disk, or made and kept where the folder can be written to."""
    path = folder() / f"{name}.json.gz"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _read(path: Path) -> Trace | None:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            return Trace.from_dict(json.load(stream))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, trace: Trace) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(temporary, "xt", compresslevel=1, encoding="utf-8") as stream:
            json.dump(trace.as_dict(), stream, separators=(",", ":"))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
