"""vLLM 0.26's own configuration, alignment and planner, run without a device, 12 GiB a rank."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvexp.dtypes import KvDtype
from kvexp.errors import InvalidValue
from kvexp.request import Speculative
from kvexp.validate.case import Inputs
from kvexp.validate.request import Known, request_of
from kvexp_vllm import Vllm

DATA = Path(__file__).parent / "data"
KNOWN = Known.here()
LLAMA = Inputs(
    id="llama", engine="vllm", engine_version="0.26.0", model="meta-llama/Llama-3.1-8B", gpu="H100"
)
PLAIN = request_of(
    LLAMA, KNOWN, KNOWN.cards.find("H100 80GB", None), KNOWN.models.find(LLAMA.model)
).run
SIZES = ("tp", "max_model_len", "max_num_batched_tokens")
OPTIONS = ("enable_prefix_caching", "mamba_cache_mode", "mamba_block_size")
FIGURES = ("block_size", "num_blocks", "kv_tokens", "max_concurrency")


def cases(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def deployed(case):
    """The engine with the case's options, and what it makes of them."""
    engine = Vllm(**{name: case[name] for name in OPTIONS if name in case})
    drafts = Speculative(method="ngram", num_tokens=case["drafted"]) if "drafted" in case else None
    run = replace(
        PLAIN,
        max_num_seqs=64,
        model=KNOWN.model(case["model"]),
        engine=engine,
        kv_dtype=KvDtype[case.get("kv_cache_dtype", "auto")],
        block_size=case.get("asked_block_size"),
        speculative=drafts or Speculative(),
        **{name: case.get(name, 1) for name in SIZES},
    )
    return engine, engine.decide(run, "vllm")


def check(case):
    if "refused" in case:
        with pytest.raises(InvalidValue):
            deployed(case)
        return
    engine, deployment = deployed(case)
    plan = engine.plan(deployment, [12 << 30] * deployment.num_ranks)
    assert deployment.states.mode == case["mode"], case
    assert [getattr(plan, name) for name in FIGURES] == [case[name] for name in FIGURES], case
