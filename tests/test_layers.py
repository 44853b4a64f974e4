"""Imports point one way, and plugins import only the contract."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    "units",
    "errors",
    "arguments",
    "dtypes",
    "kv",
    "plan",
    "bench_plan",
    "parts",
    "request",
    "results",
    "simulate",
    "architectures",
    "formats",
    "per_layer",
    "weights",
    "hf",
    "facts",
    "deployment",
    "engine",
    "profiler",
    "cache",
    "layers",
    "terms",
    "drafts",
    "free_memory",
    "gpu_lock",
    "nvml",
    "workload",
    "calibrate",
    "residual",
    "contract",
    "record",
    "compare",
    "side_by_side",
    "measured",
    "report",
    "tracking",
    "schema",
    "composing",
    "at_hand",
    "registry",
    "grammar",
    "explain",
    "bench",
    "holding",
    "bounds",
    "pipeline",
    "isolate",
    "comparison",
    "point",
    "interrupt",
    "session",
    "api",
    "startup_logs",
    "validate",
    "cli",
    "list",
    "testing",
    "__main__",
]
PLUGINS = sorted(p for p in (ROOT / "plugins").iterdir() if p.name.startswith("kvexp_"))


def imported(path):
    """Modules of kvexp that a file imports, by their name below the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "kvexp":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvexp."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("kvexp."))


def modules():
    for path in sorted((ROOT / "kvexp").rglob("*.py")):
        name = path.relative_to(ROOT / "kvexp").parts[0].removesuffix(".py")
        if name != "__init__":
            yield pytest.param(path, name, id=str(path.relative_to(ROOT / "kvexp")))


@pytest.mark.parametrize(("path", "layer"), list(modules()))
def test_modules_import_only_from_layers_below(path, layer):
    below = set(LAYERS[: LAYERS.index(layer) + 1])

    assert set(imported(path)) <= below


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda p: p.name)
def test_plugins_import_only_the_contract(folder):
    for path in folder.rglob("*.py"):
        assert set(imported(path)) <= {"contract"}, path


def test_kvexp_imports_no_plugin():
    names = {folder.name for folder in PLUGINS} | {"hydra_plugins"}
    for path in (ROOT / "kvexp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found = {(node.module or "").split(".")[0]}
            else:
                continue
            assert not found & names, path
