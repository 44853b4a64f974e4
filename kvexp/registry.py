"""Plugins: an entry point `kvexp.<group>` is an option of the config group `<group>`."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from kvexp import at_hand
from kvexp.engine import Engine
from kvexp.errors import RequestError
from kvexp.facts import OPTION
from kvexp.profiler import Profiler
from kvexp.schema import schema_for

GROUPS: dict[str, type] = {"profiler": Profiler, "engine": Engine}
"""Config groups whose options are plugin classes, with the base each must have."""


class PluginSkipped(UserWarning):
    """A plugin could not be used; the message names it and says why."""


class PluginConf(SearchPathPlugin):
    """Lets a plugin distribution ship YAML: entry point `kvexp.conf` names the package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append every plugin's folder after our own."""
        for point in _entry_points("conf"):
            search_path.append(provider=point.name, path=f"pkg://{point.value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """One option of a plugin group and the class behind it."""

    group: str
    name: str
    provider: str
    cls: type

    @property
    def summary(self) -> str:
        """First line of the class's docstring."""
        return (self.cls.__doc__ or "").strip().splitlines()[0]


def plugins(group: str) -> tuple[Plugin, ...]:
    """The usable plugins of a group, by name; a broken one is skipped with a warning.

    They are looked up once for every path of modules.

    Raises:
        RequestError: two distributions offer the same name.
    """
    return _plugins(group, tuple(sys.path))


@cache
def _plugins(group: str, path: tuple[str, ...]) -> tuple[Plugin, ...]:
    found = list(_found(group))
    others = {plugin.name: plugin.cls for plugin in found}
    return tuple(
        replace(plugin, cls=plugin.cls.among(others))
        if issubclass(plugin.cls, Profiler)
        else plugin
        for plugin in found
    )


def _found(group: str) -> Iterator[Plugin]:
    seen: dict[str, str] = {}
    for point in sorted(_entry_points(group), key=lambda p: (p.name, p.value)):
        provider = point.dist.name if point.dist else "unknown"
        if point.name in seen:
            if seen[point.name] == f"{provider} {point.value}":
                continue  # one distribution found twice on the path
            raise RequestError(
                f"{group}={point.name} comes from both {seen[point.name].split()[0]} and"
                f" {provider}; uninstall one of them"
            )
        seen[point.name] = f"{provider} {point.value}"
        cls = _load(group, point, provider)
        if cls is not None:
            yield Plugin(group=group, name=point.name, provider=provider, cls=cls)


def register(overrides: Iterable[str] = ()) -> None:
    """Tell Hydra the schema that the overrides need, the plugins and their YAML folders.

    Raises:
        RequestError: two plugins have one name.
    """
    store = ConfigStore.instance()
    store.store(name="run_schema", node=schema_for(overrides))
    store.store(group="model", name=OPTION, node={"path": None})
    store.store(group="gpu", name=at_hand.OPTION, node={})
    for group in GROUPS:
        known = store.repo.get(group, {})
        for plugin in plugins(group):
            stored = known.get(f"{plugin.name}.yaml")
            if stored is None or OmegaConf.get_type(stored.node) is not plugin.cls:
                store.store(
                    group=group, name=plugin.name, node=plugin.cls, provider=plugin.provider
                )
    Plugins.instance().register(PluginConf)


def config_dirs() -> list[Path]:
    """Our folder of YAML and those that plugins ship."""
    return [config_dir(), *plugin_config_dirs()]


def plugin_config_dirs() -> list[Path]:
    """The folders of YAML that plugins ship."""
    folders: list[Path] = []
    for point in _entry_points("conf"):
        with suppress(ImportError, ValueError):
            spec = find_spec(point.value)
            locations = (spec.submodule_search_locations or ()) if spec is not None else ()
            folders += [Path(path) for path in locations]
    return folders


def config_dir() -> Path:
    """The folder of YAML: inside the package in a wheel, beside it in a checkout."""
    here = Path(__file__).parent
    packaged = here / "conf"
    return packaged if packaged.is_dir() else here.parent / "conf"


def _entry_points(group: str) -> EntryPoints:
    """The entry points of one of our groups, looked up once for every path of modules."""
    return _installed(group, tuple(sys.path))


@cache
def _installed(group: str, path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=f"kvexp.{group}")


def _load(group: str, point: EntryPoint, provider: str) -> type | None:
    try:
        cls = point.load()
        if not (isinstance(cls, type) and issubclass(cls, GROUPS[group])):
            raise TypeError(f"{point.value} is no subclass of {GROUPS[group].__name__}")
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            PluginSkipped(f"skipped {group}={point.name} from {provider}: {reason}"), stacklevel=3
        )
        return None
    return cls
