"""Catalogue entries and configs planned by the engine's own functions: blocks and concurrency."""

import json

import pytest

import kvexp

from .shapes import SHAPES, dense

GIB = 2**30
MIMO = dense(
    "mimo_v2_flash",
    48,
    *(64, 4, 192),
    v_head_dim=128,
    swa_num_key_value_heads=8,
    swa_head_dim=192,
    swa_v_head_dim=128,
    sliding_window=128,
    hybrid_layer_pattern=[0, *[1] * 4, *[0, *[1] * 5] * 7, 0],
    max_position_embeddings=131072,
)
FALCON_MAMBA = next(row[1] for row in SHAPES if row[0] == "falcon_mamba")


def plan(overrides, gib):
    return kvexp.run(
        [*overrides, "gpu=h200", "util=0.5", f"engine.kv_cache_memory_bytes={int(gib * GIB)}"]
    )


@pytest.mark.parametrize(
    ("overrides", "gib", "blocks", "concurrency"),
    [
        (["model=gemma3_27b"], 20, 16384, 1.112589976911585),
        (["model=deepseek_v3", "block_size=64", "kv_dtype=bf16"], 35, 8356, 3.2640625),
        (["model=deepseek_v32"], 35, 12216, 4.771875),
        (["model=deepseek_v32", "kv_dtype=bf16"], 42949720745 / GIB, 8568, 3.346875),
        (["model=qwen3_next_80b_a3b", "tp=2"], 30, 4818, 9.934020618556701),
        (["model=whisper_large_v3"], 20, 8192, 8192 / 540),
    ],
)
def test_entries_get_the_engines_blocks(overrides, gib, blocks, concurrency):
    result = plan(overrides, gib)

    assert result.num_blocks == blocks, result.reason
    assert result.max_concurrency == pytest.approx(concurrency)


def test_glm5_caches_in_bf16_as_a_public_log_shows():
    """vLLM 0.19, eight H200s: 343,744 tokens in 32.06 GiB, so 78 layers of 576 x 2 + 132 bytes."""
    result = kvexp.run(["model=zai-org/GLM-5-FP8", "gpu=h200", "tp=8", "engine.version=0.19.0"])

    assert result.block_bytes == 64 * 78 * (576 * 2 + 132)
    assert result.block_bytes / 64 == pytest.approx(32.06 * GIB / 343_744, rel=2e-4)


def test_a_recurrent_state_of_544_tokens():
    result = plan(["model=qwen3_next_80b_a3b", "tp=2"], 30)

    assert result.block_size == 544
    assert result.kv_tokens == 2604143


@pytest.mark.parametrize(
    ("config", "overrides", "gib", "blocks"),
    [(MIMO, ["tp=4", "max_model_len=131072"], 30, 174762), (FALCON_MAMBA, [], 20, 1077)],
)
def test_configs_get_the_engines_blocks(config, overrides, gib, blocks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = plan(["model=hf", f"model.path={tmp_path}", *overrides], gib)

    assert result.num_blocks == blocks, result.reason
