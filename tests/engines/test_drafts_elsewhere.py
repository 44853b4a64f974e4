"""Drafts under TensorRT-LLM and LMDeploy: layers beside the model's, on their ranks."""

import json

import pytest

from engines.eagle3 import EAGLE3
from kvexp.errors import InvalidValue
from kvexp.hf import read_model

GIB = 2**30
HEAD = {**EAGLE3, "architectures": ["LlamaForCausalLM"]}
LATENT = 576 * 2  # of DeepSeek, a token and layer
FC, LAYER = 3 * 4096 * 4096, 8192 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336


@pytest.fixture
def eagle3(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    return read_model(tmp_path)


def weights(engine, deployment):
    return [engine.predict_weights(deployment, shape) for shape in engine.ranks(deployment)]


def test_tensorrt_llm_adds_a_tokens_bytes_on_the_last_stage(deploy):
    asked = ("model=deepseek_v3", "tp=8", "pp=2", "speculative.method=mtp")
    engine, deployment = deploy("tensorrt_llm", *asked, "speculative.num_tokens=3")
    plan = engine.plan(deployment, [100 * GIB] * 16)
    stages = [31 * LATENT * 32, (30 + 1) * LATENT * 32]

    assert plan.block_bytes_per_rank == tuple(size for size in stages for _ in range(8))
    first, last = weights(engine, deployment)[0], weights(engine, deployment)[-1]
    assert not first.includes
    assert [part.name for part in last.includes] == ["draft"]


def test_tensorrt_llm_shares_the_models_embedding(deploy, eagle3):
    asked = ("model=llama31_8b", "speculative.method=eagle3", "speculative.num_tokens=3")
    engine, deployment = deploy("tensorrt_llm", *asked, draft=eagle3)
    (part,) = weights(engine, deployment)

    numel = FC + LAYER + 32000 * 4096 + 4 * 4096
    assert part.includes[0].size_bytes == pytest.approx(2 * numel + 8 * 32000, abs=2**20)
    layers = 32 + 1
    plan = engine.plan(deployment, [10 * GIB])
    assert plan.block_bytes_per_rank == (layers * 2 * 8 * 128 * 2 * 32,)


def test_lmdeploy_holds_a_draft_on_the_first_rank(deploy):
    asked = ("model=deepseek_v3", "tp=8", "speculative.method=mtp")
    engine, deployment = deploy("lmdeploy", *asked)
    plan = engine.plan(deployment, [100 * GIB] * 8)

    block = LATENT * 64
    assert plan.block_bytes_per_rank == (62 * block, *(61 * block,) * 7)
    assert plan.num_blocks == 100 * GIB // (62 * block)
    parts = weights(engine, deployment)
    assert [len(part.includes) for part in parts] == [1, 0, 0, 0, 0, 0, 0, 0]
    tables = 2 * 2 * 129280 * 7168  # whole on that rank, as its 256 experts are
    assert parts[0].includes[0].size_bytes > tables + 256 * 3 * 7168 * 2048


def test_lmdeploy_splits_drafting_layers_of_qwen_and_keeps_their_states(deploy):
    asked = ("model=qwen35_27b", "tp=2", "speculative.method=mtp", "max_num_seqs=8")
    engine, deployment = deploy("lmdeploy", *asked, "speculative.num_tokens=3")
    parts = weights(engine, deployment)

    assert parts[0] == parts[1]
    layer = 5120 * (2 * 6144 + 2 * 1024) + 6144 * 5120 + 3 * 5120 * 17408
    assert parts[0].includes[0].size_bytes == pytest.approx(2 * (layer + 2 * 5120**2) / 2, rel=0.02)
    quota, _ = engine.divide(deployment, 80 * GIB)
    states = {part.name: part.size_bytes for part in quota}["recurrent_states"]
    recurrent, convolution = 48 * 24 * 128 * 128, 48 * 5120
    item = 4 if deployment.model.linear.state_dtype else 2
    assert states == 10 * (4 * recurrent * item + 6 * convolution * 2)


@pytest.mark.parametrize(
    ("engine", "overrides", "said"),
    [
        ("tensorrt_llm", ("speculative.method=mtp",), "llama3_8b is llama"),
        ("tensorrt_llm", ("speculative.method=ngram",), "num_tokens must be given"),
        ("tensorrt_llm", ("speculative.method=eagle",), "must be one of eagle3, mtp"),
        ("lmdeploy", ("speculative.method=eagle",), "needs engine.backend=pytorch"),
        (
            "lmdeploy",
            ("model=glm45", "speculative.method=mtp", "engine.backend=pytorch"),
            "glm45 is glm4_moe",
        ),
        ("lmdeploy", ("speculative.method=ngram", "engine.backend=pytorch"), "must be one of"),
        (
            "tensorrt_llm",
            (
                *("model=deepseek_v3", "speculative.method=mtp", "speculative.num_tokens=1"),
                "engine.max_attention_window=[4096]",
            ),
            "must be null with a drafting model",
        ),
    ],
)
def test_what_the_sources_do_not_settle_is_refused(deploy, engine, overrides, said):
    with pytest.raises(InvalidValue, match=said):
        deploy(engine, *overrides)


@pytest.mark.parametrize(("engine", "key"), [("tensorrt_llm", "lora"), ("lmdeploy", "lora")])
def test_adapters_are_refused(run, engine, key):
    result = run(f"engine={engine}", "lora.max_rank=8")

    assert f"{key} is not counted for engine={engine}" in result.reason


def test_start_lines_draft(deploy):
    asked = ("model=deepseek_v3", "tp=8", "speculative.method=mtp", "speculative.num_tokens=2")
    trt, lmd = (deploy(engine, *asked)[1].flags for engine in ("tensorrt_llm", "lmdeploy"))

    assert "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 2}" in trt
    assert lmd.endswith("--speculative-algorithm deepseek_mtp --speculative-num-draft-tokens 2")
