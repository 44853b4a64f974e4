"""DeepSeek V4 with vLLM: what its classes hold, and what public logs printed."""

import pytest

import kvexp
from kvexp.units import GIB

MIB = 2**20
V4 = ("model=deepseek_v4_flash", "gpu=h200", "max_model_len=1048576")


def run(*more):
    result = kvexp.run([*V4, *more])
    assert result.profile is not None, result.reason
    return result


def weights_of(*more):
    return run(*more).profile.weights.size_bytes


# Parameters and buffers of vLLM 0.26.0's DeepseekV4ForCausalLM on torch's meta device, on one rank
# of so many, with steps of 8192 tokens.
@pytest.mark.parametrize(
    ("tp", "held"), [(1, 156_828_473_564), (2, 79_479_051_228), (4, 40_804_340_060)]
)
def test_weights_are_what_vllms_own_class_holds(tp, held):
    size = weights_of(f"tp={tp}", "max_num_batched_tokens=8192", "engine.version=0.26.0")

    # beside them what the loader leaves with fp8 weights and allocates in whole blocks
    assert held < size < held + 80 * MIB


def test_buffers_of_a_step_are_its_tokens_residual_streams_and_picks():
    small, large = (
        weights_of(f"max_num_batched_tokens={tokens}", "engine.version=0.26.0", "tp=2")
        for tokens in (4096, 8192)
    )

    assert large - small == 4096 * (4 * 4096 * 2 + 512 * 4)


@pytest.mark.parametrize(
    ("version", "a_token"),
    [
        ("0.20.0", 4 * 4096 * 2 + 512 * 4),
        # queries of 64 heads, and an indexer's 64 x 128 elements in fp4 with scales and weights
        ("0.28.0", 512 * 4 + 64 * 512 * 2 + 64 * 128 // 2 + 64 * 128 // 32 + 64 * 4),
        ("0.33.0", 512 * 4),
    ],
)
def test_releases_keep_other_buffers(version, a_token):
    request = ("tp=4", f"engine.version={version}")
    small, large = (
        weights_of(f"max_num_batched_tokens={tokens}", *request) for tokens in (4096, 8192)
    )

    assert large - small == 4096 * a_token


# Start-up logs on GB10, "Model loading took": two cards with one drafting layer (a comment on
# vllm-project/vllm#41834), four cards with DSpark (index id 58438889952).
@pytest.mark.parametrize(
    ("tp", "tokens", "method", "drafted", "printed_gib"),
    [(2, 8192, "mtp", 2, 75.79), (4, 4096, "dspark", 5, 40.55)],
)
def test_weights_with_drafts_are_those_of_public_logs(tp, tokens, method, drafted, printed_gib):
    size = weights_of(
        "gpu=gb10",
        "engine.version=0.26.0",
        f"tp={tp}",
        f"max_num_batched_tokens={tokens}",
        f"speculative.method={method}",
        f"speculative.num_tokens={drafted}",
    )

    assert size / GIB == pytest.approx(printed_gib, abs=0.02)


def test_a_block_is_drafted_by_the_models_own_layers_on_the_v2_runner():
    asked = ("engine.version=0.26.0", "speculative.method=dspark", "speculative.num_tokens=5")
    result = run("tp=4", *asked)

    assert "the V2 model runner subtracts no graph memory" in result.profile.cudagraph.reason
    assert '{"method": "dspark", "num_speculative_tokens": 5}' in result.effective["flags"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("engine.version=0.24.0", "speculative.method=dspark needs vLLM 0.25 or newer"),
        ("model=deepseek_v3", "needs model.dspark, the layers of deepseek_v3 that draft a block"),
        ("engine=sglang", "speculative.method must be one of"),
    ],
)
def test_a_block_is_drafted_where_that_is_known_alone(more, said):
    asked = ["speculative.method=dspark", "speculative.num_tokens=5", "tp=8", "gpu=h200"]
    result = kvexp.run(["model=deepseek_v4_flash", *asked, more])

    assert said in result.reason
