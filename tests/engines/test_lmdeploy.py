"""LMDeploy's rules (0.16.0: pytorch/engine/executor/base.py, cache_engine.py, turbomind.cc)."""

import pytest

from kvexp.results import Refusal, Status

GIB = 2**30
PYTORCH = ["model=llama3_8b", "engine=lmdeploy", "gpu=h200", "engine.backend=pytorch"]


@pytest.mark.parametrize(
    ("gpu", "batch"), [("a100_80gb", 384), ("h100", 1024), ("h200", 1024), ("l40s", 128)]
)
def test_the_batch_follows_the_cards_name(run, gpu, batch):
    effective = run("model=llama3_8b", "engine=lmdeploy", f"gpu={gpu}").effective

    assert effective["max_num_seqs"] == batch
    assert (effective["util"], effective["block_size"]) == (0.8, 64)
    assert effective["max_num_batched_tokens"] == 8192


def test_the_pytorch_engine_keeps_logits_of_a_prefill_and_two_batches(run):
    # R = (P + 2 batches) x vocabulary x 2; blocks = int((free - R) x ratio) // block bytes
    result = run(*PYTORCH, "engine.free_after_load_bytes=100GiB")
    runtime = (8192 + 2 * 1024) * 128256 * 2

    assert result.budget.base == "free after load"
    assert result.budget.part("runtime").size_bytes == runtime
    assert result.budget.available_bytes == int((100 * GIB - runtime) * 0.8)
    assert result.num_blocks == result.budget.available_bytes // (131072 * 64)


def test_the_prefill_is_halved_until_sixteen_blocks_fit(run):
    free = 1200 * 2**20
    result = run(*PYTORCH, f"engine.free_after_load_bytes={free}", "max_num_seqs=8")
    size = result.budget.part("runtime").size_bytes
    prefill = size // (128256 * 2) - 16

    assert prefill in (4096, 2048, 1024)
    assert int((free - size) * 0.8) // (131072 * 64) >= 16
    assert int((free - (2 * prefill + 16) * 128256 * 2) * 0.8) // (131072 * 64) < 16


def test_without_sixteen_blocks_it_refuses(run):
    result = run(*PYTORCH, "engine.free_after_load_bytes=100MiB")

    assert result.status is Status.infeasible
    assert result.refusal.kind == "no_memory"


@pytest.mark.parametrize(
    ("overrides", "block_bytes"),
    [
        (("engine.backend=pytorch",), 32 * 2 * 64 * 8 * 128 * 2),
        (("engine.backend=pytorch", "tp=16"), 32 * 2 * 64 * 128 * 2),
        (
            ("engine.backend=pytorch", "kv_dtype=int8_per_token_head"),
            32 * 2 * (64 * 8 * 128 + 64 * 8 * 2 * 2),
        ),
        (
            ("engine.backend=turbomind", "kv_dtype=int4_per_token_head"),
            32 * 2 * (64 * 8 * 128 // 2 + 64 * 8 * 2 * 2),
        ),
        # 1 x 1 x 80 x 2 bytes are padded to 256 by the PyTorch engine alone
        (
            ("engine.backend=pytorch", "block_size=1", "model.num_key_value_heads=1"),
            32 * 2 * 256,
        ),
        (
            (
                "engine.backend=pytorch",
                "block_size=1",
                "model.num_key_value_heads=1",
                "model.head_dim=80",
            ),
            32 * 2 * 256,
        ),
        (
            (
                "engine.backend=turbomind",
                "block_size=1",
                "model.num_key_value_heads=1",
                "model.head_dim=80",
            ),
            32 * 2 * 160,
        ),
        (("engine.backend=pytorch", "model=deepseek_v2_lite"), 27 * 64 * 576 * 2),
        (("engine.backend=pytorch", "model=deepseek_v2_lite", "kv_dtype=fp8"), 27 * 64 * 656),
    ],
)
def test_bytes_of_a_block(deploy, overrides, block_bytes):
    engine, deployment = deploy("lmdeploy", *overrides)
    plan = engine.plan(deployment, [10 * GIB] * deployment.num_ranks)

    assert plan.block_bytes_per_rank[0] == block_bytes


def test_wide_heads_have_blocks_of_32(deploy):
    _, deployment = deploy("lmdeploy", "model.head_dim=512")

    assert deployment.block_size == 32


def test_the_oldest_turbomind_took_half_of_the_total(run):
    result = run("model=llama3_8b", "engine=lmdeploy", "gpu=h200", "engine.version='0.2.1'")

    assert result.effective["util"] == 0.5
    assert result.budget.base == "total"
    assert result.budget.available_bytes == int(150109880320 * 0.5)


def test_turbomind_016_has_one_region_and_older_ones_blocks(run):
    asked = ["model=llama3_8b", "engine=lmdeploy", "gpu=h200"]
    region = run(*asked)
    blocks = run(*asked, "engine.version='0.10.0'")

    assert region.num_blocks == blocks.num_blocks
    assert any("one region for all cache objects" in n for n in region.notes)
    assert any(n.startswith("unverified: TurboMind 0.10.0") for n in blocks.notes)


@pytest.mark.parametrize(("backend", "length"), [("pytorch", 62 * 64), ("turbomind", 64 * 64)])
def test_the_session_is_lowered_to_the_cache(deploy, backend, length):
    engine, deployment = deploy("lmdeploy", f"engine.backend={backend}", "engine.version='0.12'")
    plan = engine.plan(deployment, [64 * 64 * 131072])

    assert plan.max_model_len == length
    assert "session_len was lowered" in plan.notes[0]


def test_three_blocks_are_the_least_of_the_pytorch_engine(deploy):
    engine, deployment = deploy("lmdeploy", "engine.backend=pytorch")
    block = 131072 * 64

    assert isinstance(engine.plan(deployment, [2 * block]), Refusal)
    assert engine.plan(deployment, [3 * block]).num_blocks == 3


def test_a_count_of_blocks_skips_the_arithmetic(run):
    assert run(*PYTORCH, "engine.num_gpu_blocks=1000").num_blocks == 1000


def test_the_backend_is_the_one_that_takes_the_model(run):
    for model, backend in (("llama3_8b", "turbomind"), ("gemma3_12b", "pytorch")):
        found = run(f"model={model}", "engine=lmdeploy", "gpu=h200")
        assert found.effective["usage"] == backend


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pp=2", "pp must be 1"),
        ("engine.backend=cpp", "one of pytorch, turbomind"),
        ("engine.num_gpu_blocks=10", "for the pytorch backend"),
        ("util=1.0", "util must be below 1 for TurboMind"),
        ("kv_dtype=fp8", "kv_dtype must be one of"),
        ("engine.version=x", "LMDeploy version"),
    ],
)
def test_what_it_cannot_do_is_invalid(run, override, message):
    result = run("model=llama3_8b", "engine=lmdeploy", "gpu=h200", override)

    assert result.status is Status.invalid
    assert message in result.reason
