"""`python -m kvexp.list`: models, cards, engines, and which profilers can run here."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from kvexp import registry
from kvexp.arguments import ArgumentParser, cannot_go_on
from kvexp.errors import InvalidValue, ProfilerUnavailable, RequestError
from kvexp.interrupt import in_one_line
from kvexp.profiler import Profiler
from kvexp.request import Gpu, Model
from kvexp.schema import typed
from kvexp.units import gib

SECTIONS = ("models", "gpus", "engines", "profilers", "sweeps", "experiments")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the sections asked for, all of them by default; returns the exit status."""
    parser = ArgumentParser(prog="python -m kvexp.list", description=__doc__)
    parser.add_argument("section", nargs="*", help=f"any of {', '.join(SECTIONS)}")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own YAML")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.section if name not in SECTIONS]
    if unknown:
        parser.error(f"{unknown[0]} is no section; choose from {', '.join(SECTIONS)}")
    if options.config_dir is not None and not options.config_dir.is_dir():
        parser.error(f"--config-dir {options.config_dir} is no folder")
    own = [options.config_dir] if options.config_dir else []
    folders = [*registry.config_dirs(), *own]
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    makers: dict[str, Callable[[Sequence[Path]], Table]] = {
        "models": _models,
        "gpus": _gpus,
        "engines": _engines,
        "profilers": _profilers,
        "sweeps": lambda folders: _presets("sweep", folders),
        "experiments": lambda folders: _presets("experiment", folders),
    }
    try:
        for name in options.section or SECTIONS:
            console.print(makers[name](folders))
        sys.stdout.flush()
    except RequestError as error:
        print(f"kvexp: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        return cannot_go_on(error)
    return 0


def _options(group: str, folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    files = {path.stem: path for folder in folders for path in (folder / group).glob("*.yaml")}
    yield from sorted(files.items())


def _models(folders: Sequence[Path]) -> Table:
    table = _table("model=", "Hugging Face id", "type", "layers", "KV heads", "longest context")
    for name, path in _options("model", folders):
        model = _read(Model, path)
        table.add_row(
            name,
            model.hf_id,
            model.model_type,
            str(model.num_hidden_layers),
            f"{model.kv_heads} x {model.head_size}",
            f"{model.max_position_embeddings:,}",
        )
    return table


def _gpus(folders: Sequence[Path]) -> Table:
    table = _table("gpu=", "name", "total", "exactness")
    for name, path in _options("gpu", folders):
        gpu = _read(Gpu, path)
        exact = "derived, +-0.005 GiB" if gpu.total_error_bytes else "exact"
        table.add_row(name, gpu.name, gib(gpu.total_bytes), exact)
    return table


def _engines(folders: Sequence[Path]) -> Table:
    table = _table("engine=", "default version", "what", "from")
    for plugin in registry.plugins("engine"):
        table.add_row(plugin.name, plugin.cls().version, plugin.summary, plugin.provider)
    return table


def _profilers(folders: Sequence[Path]) -> Table:
    table = _table("profiler=", "can run here", "what", "from")
    for plugin in registry.plugins("profiler"):
        table.add_row(plugin.name, _can_run(plugin.cls()), plugin.summary, plugin.provider)
    return table


def _can_run(profiler: Profiler) -> str:
    try:
        profiler.check()
    except ProfilerUnavailable as reason:
        return f"no: {reason}"
    return "yes"


def _presets(group: str, folders: Sequence[Path]) -> Table:
    table = _table(f"{group}=", "what")
    for name, path in _options(group, folders):
        comments = [line[1:].strip() for line in path.read_text().splitlines() if line[:1] == "#"]
        table.add_row(name, next((c for c in comments if not c.startswith("@")), ""))
    return table


def _read(schema: type, path: Path) -> Any:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        return typed(schema, values or {})
    except (OmegaConfBaseException, InvalidValue, yaml.YAMLError, OSError, ValueError) as error:
        raise RequestError(f"{path}: {' '.join(str(error).split())}") from None


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


if __name__ == "__main__":
    with in_one_line():
        sys.exit(main())
