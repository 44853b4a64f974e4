"""Points without Hydra: many rules need many small points."""

from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvexp import pipeline
from kvexp.errors import InvalidValue
from kvexp.results import Stage
from kvexp.schema import Run

CONF = Path(__file__).parents[2] / "conf"


@cache
def facts(group, name):
    return OmegaConf.load(CONF / group / f"{name}.yaml")


@cache
def plugin(group, name):
    return entry_points(group=f"kvexp.{group}")[name].load()


def compose(overrides):
    """The engine's name and the typed point of `key=value` strings, later ones winning."""
    pairs = dict(o.split("=", 1) for o in ("model=llama3_8b", "gpu=h200", *overrides))
    model, gpu, engine = pairs.pop("model"), pairs.pop("gpu"), pairs.pop("engine")
    cfg = OmegaConf.structured(Run)
    cfg = OmegaConf.merge(
        cfg,
        {"model": facts("model", model), "gpu": facts("gpu", gpu)},
        {"engine": OmegaConf.structured(plugin("engine", engine))},
        {"profiler": OmegaConf.structured(plugin("profiler", "analytic"))},
    )
    for key, value in pairs.items():
        quoted = value.startswith("'")
        read = value.strip("'") if quoted else OmegaConf.from_dotlist([f"v={value}"]).v
        OmegaConf.update(cfg, key, read)
    return engine, Run.of(cfg)


@pytest.fixture
def deploy():
    """`deploy(engine, *overrides)` gives (engine object, deployment); `draft` drafts its tokens."""

    def make(engine, *overrides, draft=None):
        name, run = compose([f"engine={engine}", *overrides])
        if draft is not None:
            speculative = replace(run.speculative, model=draft.name, draft=draft)
            run = replace(run, speculative=speculative)
        return run.engine, run.engine.resolve(run, name)

    return make


@pytest.fixture
def run():
    """`run(*overrides)` gives the result of the whole pipeline."""

    def execute(*overrides):
        try:
            name, point = compose(overrides)
        except InvalidValue as error:
            return pipeline.ended_by(error, Stage.compose)
        return pipeline.execute(point, name)

    return execute
