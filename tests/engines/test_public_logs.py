"""Tokens of public start-up logs, given the bytes that each states.

`digits` is half of the last digit printed; where K and V are printed apart it counts twice. In the
MI300X log the free memory before the load is not printed: it is the rest after the weights of the
same model, and the digits cover what the request table takes.
"""

import json
from pathlib import Path

import pytest

import kvexp

TEXT = (Path(__file__).parent / "data" / "logs.jsonl").read_text()
LOGS = [json.loads(line) for line in TEXT.splitlines()]


def overrides_of(log):
    yield f"engine.version='{log['version']}'"
    if "shape" in log:
        layers, kv_heads, head_dim = log["shape"]
        heads = max(32, kv_heads)
        yield from (
            f"model.num_hidden_layers={layers}",
            f"model.num_key_value_heads={kv_heads}",
            f"model.num_attention_heads={heads}",
            f"model.head_dim={head_dim}",
        )
    else:
        layers, rank, rotary = log["latent"]
        yield from (
            "model=deepseek_v2_lite",
            f"model.num_hidden_layers={layers}",
            f"model.mla.kv_lora_rank={rank}",
            f"model.mla.qk_rope_head_dim={rotary}",
        )
    yield f"tp={log['tp']}"
    yield f"kv_dtype={log.get('kv_dtype', 'auto')}"
    if "block" in log:
        yield f"block_size={log['block']}"
    yield from log.get("options", [])


def tokens_at(deploy, log, error_gib):
    engine, deployment = deploy(
        log["engine"],
        "gpu.total_bytes=200GiB",
        *overrides_of(log),
        f"gpu.free_bytes={log.get('free_before_gib', 190)}GiB",
        *(
            [f"engine.kv_cache_memory_bytes={log['cache_gib'] + error_gib:.4f}GiB"]
            if "cache_gib" in log
            else [f"engine.free_after_load_bytes={log['free_gib'] + error_gib:.4f}GiB"]
        ),
    )
    profile = engine._predicted(deployment)
    available = engine.quota(deployment, profile).available_bytes
    return engine.plan(deployment, [available] * deployment.num_ranks)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log["id"])
def test_tokens_equal_the_log_within_its_rounding(deploy, log):
    low, high = (tokens_at(deploy, log, sign * log["digits"]) for sign in (-1, 1))

    assert low.kv_tokens <= log["tokens"] <= high.kv_tokens
    assert high.kv_tokens - low.kv_tokens < 0.01 * log["tokens"]
    assert log["tokens"] % low.block_size == 0


def test_turbomind_017_prints_its_region(deploy):
    """Qwen3-8B: the budget is a share of what is free, to the printed digit."""
    engine, deployment = deploy(
        "lmdeploy",
        "model=qwen3_8b",
        "engine.version='0.17'",
        "util=0.8763",
        f"engine.free_after_load_bytes={round(63488.19 * 2**20)}",
    )
    available = engine.quota(deployment, engine._predicted(deployment)).available_bytes
    plan = engine.plan(deployment, [available])

    assert engine.log_lines(deployment, plan) == (
        "Object cache budget: 55634.70 MB from free 63488.19 MB and ratio 0.8763",
    )


def test_turbomind_09_prints_blocks_of_nine_megabytes(deploy):
    engine, deployment = deploy("lmdeploy", "model=qwen3_8b", "engine.version='0.9'")
    plan = engine.plan(deployment, [863 * 9 * 2**20])

    assert engine.log_lines(deployment, plan) == (
        "[BlockManager] block_size = 9.000 MB",
        "[BlockManager] max_block_count = 863",
    )


def test_tensorrt_prints_the_pool(deploy):
    engine, deployment = deploy(
        "tensorrt_llm", "model=llama31_8b", "kv_dtype=fp8", "engine.version='1.0'"
    )
    plan = engine.plan(deployment, [860320 * 65536])

    assert engine.log_lines(deployment, plan) == (
        "[MemUsageChange] Allocated 52.51 GiB for max tokens in paged KV cache (860320).",
    )


def test_sglang_prints_k_and_v(deploy):
    engine, deployment = deploy("sglang", "model=qwen25_32b", "tp=4", "max_model_len=32768")
    plan = engine.plan(deployment, [46611 * 65536] * 4)

    assert engine.log_lines(deployment, plan)[0] == (
        "KV Cache is allocated. #tokens: 46611, K size: 1.42 GB, V size: 1.42 GB"
    )


@pytest.mark.parametrize(
    ("overrides", "kv_tokens"),
    [
        (  # faradawn/bench3 logs/trtllm-serve-egine.log
            (
                "model=llama3_8b",
                "gpu=h200",
                "engine.version='1.2.0rc4'",
                "max_model_len=1025",
                "max_num_batched_tokens=1024",
                "max_num_seqs=32",
            ),
            900_800,
        ),
        (  # NVIDIA/TensorRT-LLM#6294
            (
                "model=llama31_8b",
                "gpu=h100",
                "quantization=fp8",
                "kv_dtype=fp8",
                "util=0.8",
                "engine.version='1.0'",
                "max_model_len=157",
                "max_num_batched_tokens=23552",
                "max_num_seqs=4096",
            ),
            860_320,
        ),
    ],
)
def test_tensorrt_leaves_what_its_libraries_do_not_take(overrides, kv_tokens):
    result = kvexp.run(["engine=tensorrt_llm", *overrides])

    assert result.kv_tokens == pytest.approx(kv_tokens, rel=0.002)
