"""Nine cases on which other estimators were compared: bytes a token, groups, tokens, concurrency.

The reference is vLLM's own arithmetic after a budget of the cache; it is given here as bytes.
"""

import json

import pytest

import kvexp

from .shapes import GEMMA3_SPARSE

GIB = 2**30


def path_of(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ["model=hf", f"model.path={tmp_path}"]


CASES = {
    "a": (["model=llama3_8b", "gpu=h100"], 8192, 55.65, 28493, 455888, 55.65, 131072, 1),
    "b": (["model=llama31_8b", "gpu=h200"], 131072, 111.49, 57080, 913280, 6.97, 131072, 1),
    "d": (
        ["model=llama31_70b", "gpu=a100_80gb", "tp=4"],
        *(32768, 37.40, 30637, 490192, 14.96, 327680, 1),
    ),
    "e": (["model=qwen3_30b_a3b", "gpu=h100"], 32768, 12.97, 8855, 141680, 4.32, 98304, 1),
    "f": (["model=deepseek_v2_lite", "gpu=a100_40gb"], 32768, 6.19, 13350, 213600, 6.52, 31104, 1),
    "g": (["model=gemma3_12b", "gpu=l40s"], 131072, 16.33, 16720, 223693, 1.71, 393216, 6),
    "h": (["model=gpt_oss_20b", "gpu=rtx_4090"], 131072, 7.02, 19168, 297077, 2.27, 49152, 2),
    "i": (
        ["model=mistral_7b", "gpu=l4", "quantization=fp8", "kv_dtype=fp8"],
        *(32768, 12.90, 13207, 211312, 6.45, 65536, 1),
    ),
}


def run(overrides, length, budget_gib):
    return kvexp.run(
        [
            *overrides,
            f"max_model_len={length}",
            f"engine.kv_cache_memory_bytes={int(budget_gib * GIB)}",
            "util=0.5",
        ]
    )


def token_bytes(result):
    """Cache bytes of one token if every layer kept it, over all ranks."""
    layers = sum(g.num_layers * g.page_size_bytes // g.block_size for g in result.groups)
    return layers * len(result.ranks)


@pytest.mark.parametrize("name", CASES)
def test_cases_have_the_engines_figures(name):
    overrides, length, gib, blocks, tokens, concurrency, per_token, groups = CASES[name]
    result = run(overrides, length, gib)

    assert token_bytes(result) == per_token
    assert len(result.groups) == groups
    assert result.num_blocks == pytest.approx(blocks, rel=0.002)  # the budget has two decimals
    assert result.kv_tokens == pytest.approx(tokens, rel=0.004)
    assert result.max_concurrency == pytest.approx(concurrency, abs=0.02)


def test_case_c_is_refused_with_the_length_that_fits():
    result = run(["model=qwen3_8b", "gpu=l4"], 32768, 4.20)

    assert result.refusal.kind == "max_len_too_large"
    assert result.refusal.estimated_max_model_len == pytest.approx(30560, rel=0.003)


def test_case_g_with_the_config_as_it_is_published(tmp_path):
    overrides, length, gib, blocks, tokens, concurrency, per_token, groups = CASES["g"]
    result = run([*path_of(GEMMA3_SPARSE, tmp_path), *overrides[1:]], length, gib)

    assert token_bytes(result) == per_token
    assert len(result.groups) == groups
    assert result.num_blocks == pytest.approx(blocks, rel=0.002)
    assert result.kv_tokens == pytest.approx(tokens, rel=0.004)
    assert result.max_concurrency == pytest.approx(concurrency, abs=0.02)


@pytest.mark.parametrize(
    ("name", "gib", "error"),
    [("a", 14.99, 0.003), ("d", 32.85, 0.002), ("e", 56.88, 0.002), ("f", 29.43, 0.012)],
)
def test_weights_are_those_of_the_checkpoints(name, gib, error):
    overrides, length, *_ = CASES[name]
    result = run(overrides, length, 5)

    assert result.profile.weights_bytes / GIB == pytest.approx(gib, rel=error)
