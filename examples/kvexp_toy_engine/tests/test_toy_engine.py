import pytest

import kvexp
from kvexp.testing import EngineConformance


@pytest.mark.parametrize("name", ["toy"])
class TestToy(EngineConformance):
    pass


def test_the_cache_is_what_the_margin_leaves():
    result = kvexp.run(
        [
            *("model=llama3_8b", "gpu=h200", "engine=toy", "gpu.free_bytes=100GiB", "util=0.5"),
            *("engine.margin_bytes=1GiB", "profiler.weights_bytes=15GiB"),
        ]
    )

    assert result.budget.base == "free before load"
    assert result.budget.available_bytes == (50 - 15 - 1) * 2**30
    assert result.kv_tokens == 34 * 2**30 // (131072 * 16) * 16
    assert result.log_lines == (f"toy: {result.num_blocks} blocks of 16 tokens",)


def test_a_latent_model_is_not_known():
    result = kvexp.run(["model=deepseek_v2_lite", "gpu=h200", "engine=toy"])

    assert "full attention" in result.reason
