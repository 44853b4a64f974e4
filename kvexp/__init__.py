"""How many KV-cache blocks, and so how many concurrent requests, a model gets on a GPU, and why."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvexp.api import run as run
    from kvexp.api import sweep as sweep
    from kvexp.errors import InvalidValue as InvalidValue
    from kvexp.errors import ProfilerUnavailable as ProfilerUnavailable
    from kvexp.errors import RequestError as RequestError
    from kvexp.results import Result as Result
    from kvexp.results import Status as Status

_HOMES = {
    "run": "kvexp.api",
    "sweep": "kvexp.api",
    "Result": "kvexp.results",
    "Status": "kvexp.results",
    "RequestError": "kvexp.errors",
    "InvalidValue": "kvexp.errors",
    "ProfilerUnavailable": "kvexp.errors",
}
__all__ = [
    "InvalidValue",
    "ProfilerUnavailable",
    "RequestError",
    "Result",
    "Status",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import kvexp` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvexp' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - a light import for those who need less

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
