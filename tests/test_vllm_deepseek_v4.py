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


# "peak activation" of starts on four GB10 with steps of 4096 tokens and 600,000 a request: eager on
# the V1 runner (index id 66812598096), and with DSpark on the V2 runner (index id 58438889952).
@pytest.mark.parametrize(
    ("more", "printed_gib"),
    [
        (("enforce_eager=true",), 1.84),
        (("speculative.method=dspark", "speculative.num_tokens=6"), 2.03),
    ],
)
def test_the_forwards_peak_is_that_of_public_logs(more, printed_gib):
    steps = ("max_num_batched_tokens=4096", "max_model_len=600000", "max_num_seqs=12")
    result = run("gpu=gb10", "tp=4", "engine.version=0.26.0", *steps, *more)

    assert result.profile.activation.size_bytes / GIB == pytest.approx(printed_gib, abs=0.006)


def test_the_indexers_buffer_goes_by_the_longest_length():
    request = ("tp=8", "engine.version=0.26.0", "max_num_batched_tokens=2048", "max_num_seqs=64")
    short, long = (
        run(*request, f"max_model_len={length}").profile.activation.size_bytes
        for length in (524_288, 1_048_576)
    )

    assert long - short == 40 * 524_288 // 4 * (128 + 4)


# GPU KV cache size of the same four cards; 45.68 GiB hold 45,540 blocks (index id 66812598096)
@pytest.mark.parametrize(("given_gib", "tokens"), [(45.68, 5_128_378), (46.62, 5_233_896)])
def test_tokens_beside_a_drafted_block_are_those_of_public_logs(given_gib, tokens):
    result = run(
        *("gpu=gb10", "tp=4", "engine.version=0.26.0", "max_model_len=600000"),
        *("max_num_batched_tokens=4096", "max_num_seqs=12"),
        *("speculative.method=dspark", "speculative.num_tokens=6"),
        f"engine.kv_cache_memory_bytes={given_gib}GiB",
    )

    assert result.kv_tokens == pytest.approx(tokens, rel=0.006 / given_gib)


# vllm-project/vllm#44376: two cards of 96 GB, vLLM 0.22, 30,000 tokens a request
def test_what_a_request_needs_is_what_a_refusal_printed():
    result = kvexp.run(
        [
            *("model=deepseek_v4_flash", "gpu=h200", "tp=2", "engine.version=0.22.0"),
            *("max_model_len=30000", "max_num_batched_tokens=16384"),
            "engine.kv_cache_memory_bytes=5.44GiB",
        ]
    )

    assert "needs 6.66 GiB of cache, 5.44 GiB are available" in result.reason
    assert result.refusal.estimated_max_model_len == pytest.approx(13_528, rel=0.005 / 5.44)


def test_a_card_whose_forks_keep_finer_scales_may_hold_more():
    request = ("tp=4", "engine.version=0.26.0", "max_num_batched_tokens=4096")
    drafted = ("speculative.method=dspark", "speculative.num_tokens=6")
    spark, hopper = (run(f"gpu={card}", *request, *drafted) for card in ("gb10", "h200"))

    # printed with such scales on the same four cards: 45.32 to 45.68 GiB (index id 58321427789)
    assert spark.profile.weights.high_bytes / GIB == pytest.approx(45.0, abs=0.3)
    assert hopper.profile.weights.high_bytes < 41 * GIB


# "CUDA graph pool memory: 2.51 GiB (actual), 2.44 GiB (estimated)" (vllm-project/vllm#50576)
def test_graphs_go_by_their_number():
    result = run("tp=4", "engine.version=0.26.0", "max_num_seqs=1024")
    few = run("tp=4", "engine.version=0.26.0", "max_num_seqs=4")
    parts = {part.name: part for part in result.holding.parts}

    assert parts["graphs"].size_bytes / GIB == pytest.approx(2.51, rel=0.05)
    assert result.profile.cudagraph.size_bytes / GIB == pytest.approx(2.44, rel=0.2)
    assert few.profile.cudagraph.size_bytes < result.profile.cudagraph.size_bytes / 3


# hf_quant_config.json of nvidia/DeepSeek-V4-Flash-NVFP4: experts alone are in NVFP4, half a byte
# and a sixteenth an element, where the base checkpoint's have a thirty-second
def test_a_repository_may_convert_the_experts_alone():
    request = ("gpu=b200", "tp=2", "max_model_len=8192")
    base, converted = (
        kvexp.run([f"model={name}", *request]).profile.weights.size_bytes
        for name in ("deepseek-ai/DeepSeek-V4-Flash", "nvidia/DeepSeek-V4-Flash-NVFP4")
    )
    experts = 43 * 256 * 3 * 4096 * 2048 // 2

    assert converted - base == pytest.approx(experts / 32, rel=0.01)


def test_a_format_of_experts_that_is_not_known_is_refused():
    result = kvexp.run(["model=deepseek_v4_flash", "gpu=b200", "model.moe.format=fp3"])

    assert result.reason == "model.moe.format must be one of mxfp4, nvfp4, or null, got 'fp3'"
