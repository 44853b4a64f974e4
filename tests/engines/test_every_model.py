"""Every model of the catalogue under every engine: an answer without contradiction, or one line."""

from pathlib import Path

import pytest

from kvexp.results import Status

CONF = Path(__file__).parents[2] / "conf" / "model"
ENGINES = ("vllm", "nano_vllm", "sglang", "tensorrt_llm", "lmdeploy")
LARGE = ("gpu=b300", "gpu.total_bytes=4000GiB")

# Refused whatever the card: nano-vLLM loads no packed weights, others know no compressed caches
# nor those of an encoder's output.
REASONS = (
    "which nano-vLLM does not load",
    "are known for engine=vllm only",
    "and none of attention",
)
HYBRID = ("jamba15_mini", "nemotron_h_8b", "granite4_h_1b", "qwen3_next_80b_a3b", "lfm2_1_2b")


def models():
    """Five hybrids at once, all others when there is time."""
    for path in sorted(CONF.glob("*.yaml")):
        marks = [] if path.stem in HYBRID else [pytest.mark.slow]
        yield pytest.param(path.stem, marks=marks)


def check(result):
    assert result.status in (Status.ok, Status.infeasible, Status.invalid, Status.oom)
    if not result.ok:
        assert result.reason
        assert "\n" not in result.reason
        assert "0.00 GiB;" not in result.reason
        assert result.status is Status.oom or not result.num_blocks
        return
    budget = result.budget
    assert result.reason == ""
    assert result.num_blocks > 0
    assert result.kv_tokens > 0
    assert 0 < result.max_concurrency <= result.num_blocks * result.block_size
    # the smallest cache of a token: the keys and values of one layer, in two bytes
    assert result.block_bytes / result.block_size >= 128
    assert budget.kv_cache_bytes == result.num_blocks * result.block_bytes
    assert 0 < budget.kv_cache_bytes <= budget.available_bytes < budget.total_bytes
    assert sum(group.num_layers for group in result.groups) > 0
    for group in result.groups:
        assert group.page_size_bytes >= 128
        assert group.blocks_per_request > 0
        assert group.num_blocks > 0
    for rank in result.ranks:
        assert rank.num_blocks >= result.num_blocks
        assert result.num_blocks * rank.block_bytes <= rank.budget.available_bytes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", list(models()))
def test_a_card_with_room_gives_blocks_or_one_clear_line(run, model, engine):
    result = run(f"model={model}", f"engine={engine}", *LARGE)

    check(result)
    if not result.ok:
        assert result.status is Status.invalid
        assert any(reason in result.reason for reason in REASONS)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
@pytest.mark.parametrize("model", HYBRID)
def test_a_stage_without_attention_limits_nothing(run, model, engine):
    result = run(f"model={model}", f"engine={engine}", "pp=8", *LARGE)

    assert result.ok
    check(result)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", ["falcon_mamba_7b", "whisper_tiny", *HYBRID])
@pytest.mark.parametrize("gpu", ["t4", "h100"])
def test_a_common_card_gives_blocks_or_one_clear_line(run, model, engine, gpu):
    check(run(f"model={model}", f"engine={engine}", f"gpu={gpu}"))


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (("engine=nano_vllm",), "nano-vLLM has no such model"),
        (("engine=tensorrt_llm",), "TensorRT-LLM's PyTorch backend has no such model"),
        (("engine=lmdeploy",), "LMDeploy has no such model"),
        (("engine=sglang", "engine.version='0.5.19'"), "SGLang 0.5.19 has no such model"),
    ],
)
def test_a_model_without_attention_is_refused_where_an_engine_has_none(run, engine, named):
    result = run("model=falcon_mamba_7b", *engine, *LARGE)

    assert result.status is Status.invalid
    assert result.reason == (
        f"model=falcon_mamba_7b has mamba layers and none of attention: {named} (engine=vllm has)"
    )


@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm", "lmdeploy"])
def test_caches_of_an_encoders_output_are_vllms_alone(run, engine):
    result = run("model=whisper_tiny", f"engine={engine}", "gpu=h100")

    assert result.status is Status.invalid
    assert result.reason == (
        "the cross-attention caches of whisper_tiny are known for engine=vllm only"
    )


def test_states_are_split_over_tensor_parallel_ranks_where_there_is_no_attention(run):
    for engine in ("vllm", "sglang"):
        one, two = (
            run("model=falcon_mamba_7b", f"engine={engine}", "gpu=h100", f"tp={n}") for n in (1, 2)
        )
        assert two.block_bytes * 2 == one.block_bytes
        refused = run("model=falcon_mamba_7b", f"engine={engine}", "gpu=h100", "tp=3")
        assert "8192 heads of states" in refused.reason
