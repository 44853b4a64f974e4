"""TensorRT-LLM's rules (1.4.0rc4: pyexecutor/_util.py KvCacheCreator, resource_manager.py)."""

import pytest

from kvexp.results import Refusal, Status

GIB = 2**30
ASKED = ["model=llama3_8b", "engine=tensorrt_llm", "gpu=h200"]


def test_defaults_are_its_own(run):
    effective = run(*ASKED).effective

    assert (effective["util"], effective["block_size"]) == (0.9, 32)
    assert (effective["max_num_batched_tokens"], effective["max_num_seqs"]) == (8192, 2048)


def test_the_fraction_is_of_what_everything_else_leaves(run):
    # int((total - peak) x fraction)
    result = run(
        *(*ASKED, "gpu.free_bytes=130GiB", "profiler.weights_bytes=15GiB"),
        *("profiler.activation_bytes=3GiB", "profiler.non_torch_bytes=1GiB"),
        "profiler.cudagraph_bytes=1GiB",
    )

    assert result.budget.base == "left after everything else"
    assert result.budget.available_bytes == int(110 * GIB * 0.9)
    assert result.num_blocks == int(110 * GIB * 0.9) // 131072 // 32


@pytest.mark.parametrize(("version", "blocks"), [("1.4.0rc4", 3), ("1.2", 4), ("0.18", 4)])
def test_older_releases_round_up_to_a_block(deploy, version, blocks):
    engine, deployment = deploy("tensorrt_llm", f"engine.version='{version}'")

    assert engine.plan(deployment, [131072 * 100]).num_blocks == blocks


@pytest.mark.parametrize(
    ("overrides", "token_bytes"),
    [
        ((), 32 * 2 * 8 * 128 * 2),
        (("kv_dtype=fp8",), 32 * 2 * 8 * 128),
        (("kv_dtype=nvfp4",), 32 * (2 * 8 * 128 // 2 + 2 * 8 * 128 // 16)),
        (("tp=4",), 32 * 2 * 2 * 128 * 2),
        (("tp=16",), 32 * 2 * 128 * 2),  # the pool holds a whole head
        (("model=deepseek_v2_lite", "tp=4"), 27 * 576 * 2),
        (("model=deepseek_v2_lite", "model.mla.index_head_dim=128"), 27 * (576 * 2 + 132)),
    ],
)
def test_bytes_of_a_token(deploy, overrides, token_bytes):
    engine, deployment = deploy("tensorrt_llm", *overrides)
    plan = engine.plan(deployment, [10 * GIB] * deployment.num_ranks)

    assert plan.block_bytes_per_rank[0] == token_bytes * 32


def test_caps_by_tokens_and_by_bytes(run):
    tokens = run(*ASKED, "engine.max_tokens=1000")
    size = run(*ASKED, f"engine.max_gpu_total_bytes={GIB}")

    assert tokens.kv_tokens == 31 * 32
    assert "limited by max_tokens=1,000" in tokens.notes
    assert size.budget.available_bytes == GIB
    assert size.budget.part("above_cap").size_bytes > 0


def test_the_longest_request_is_lowered_to_the_cache(deploy):
    engine, deployment = deploy("tensorrt_llm")
    plan = engine.plan(deployment, [131072 * 4096])

    assert plan.max_model_len == 4096
    assert "max_seq_len was lowered from 8,192 to 4,096" in plan.notes[0]


def test_windows_split_bytes_over_pools(deploy):
    engine, deployment = deploy(
        "tensorrt_llm", "model=gpt_oss_20b", "engine.max_attention_window=[128,32768]"
    )
    plan = engine.plan(deployment, [10 * GIB])
    used = sum(g.num_blocks * g.page_size_bytes * g.num_layers for g in plan.groups)

    assert [g.num_layers for g in plan.groups] == [12, 12]
    assert [g.kind for g in plan.groups] == ["window 32768", "window 128"]
    assert 0.999 * 10 * GIB < used <= 10 * GIB
    assert "unverified: the split of bytes over windows" in plan.notes


def test_sliding_layers_keep_all_without_windows(run):
    notes = run("model=gpt_oss_20b", "engine=tensorrt_llm", "gpu=h200").notes

    assert "without engine.max_attention_window every layer keeps every token" in notes


def test_states_of_a_full_batch_come_first(run):
    result = run("model=granite4_h_1b", "engine=tensorrt_llm", "gpu=h200", "max_num_seqs=8")

    assert result.budget.part("recurrent_states").size_bytes % 8 == 0
    assert "unverified" in result.budget.part("recurrent_states").reason


def test_nothing_left_is_refused_with_the_block(deploy):
    engine, deployment = deploy("tensorrt_llm")
    refusal = engine.plan(deployment, [131072 * 31])

    assert isinstance(refusal, Refusal)
    assert refusal.needed_bytes == 131072 * 32


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("util=1.0", "util must be below 1"),
        ("block_size=48", "power of two"),
        ("engine.max_tokens=0", "max_tokens must be at least 1"),
        ("engine.version=rc", "TensorRT-LLM version"),
        ("kv_dtype=fp8_e5m2", "kv_dtype must be one of"),
    ],
)
def test_what_it_cannot_do_is_invalid(run, override, message):
    result = run(*ASKED, override)

    assert result.status is Status.invalid
    assert message in result.reason
