"""Shared by the tests of reading: a config.json in a folder of its own, and what a model caches."""

import json
from collections import Counter

import pytest

from kvexp import cache
from kvexp.hf import read_model
from kvexp.kv.specs import MambaSpec
from kvexp.request import Gpu, Knobs


@pytest.fixture
def read(tmp_path):
    """Read a config given as facts; `given` facts are those of the command line."""

    def run(config, **given):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model(tmp_path, given=given)

    return run


@pytest.fixture
def cached():
    """Layers by kind, cache bytes of one token in all layers, and state bytes of one request."""

    def run(model, **knobs):
        from kvexp_vllm import Vllm

        card = Gpu(name="card", source="test", total_bytes=10**13, context_bytes=0)
        engine = Vllm()
        deployment = engine.resolve(Knobs(model=model, gpu=card, **knobs), "vllm")
        specs = cache.layer_specs(deployment, engine.ranks(deployment)[0]).values()
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        tokens = [spec for spec in specs if not isinstance(spec, MambaSpec)]
        return (
            dict(Counter(spec.kind for spec in specs)),
            sum(spec.real_page_size_bytes // spec.block_size for spec in tokens),
            sum(spec.unpadded_page_size_bytes for spec in states),
        )

    return run
