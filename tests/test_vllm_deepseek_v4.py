"""DeepSeek V4 with vLLM: what its classes hold, and what public logs printed."""

import pytest

import kvexp

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
