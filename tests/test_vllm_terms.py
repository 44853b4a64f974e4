"""vLLM's memory terms by version, runner and card, against public start-up logs (GiB)."""

import pytest

import kvexp
from kvexp.results import Stage, Status

GIB = 1 << 30
PRINTED = 0.0151 * GIB
H100 = ("gpu=h100", "util=0.95", "max_model_len=8192", "max_num_batched_tokens=8192")
CAMPAIGN = (*H100, "max_num_seqs=1024", "engine.version=0.19.0")

LOGS = {  # overrides, weights, activation, non-torch: what the engine printed
    "0.17 samples with Triton": (
        [*H100, "model=qwen3_14b", "engine.version=0.17.0"],
        (27.52, 2.23, 0.13),
    ),
    "0.14 sorts": (
        [
            "gpu=h100",
            "util=0.9",
            "max_model_len=16000",
            "model=qwen3_0_6b",
            "engine.version=0.14.0",
        ],
        (1.12, 5.56, 0.13),
    ),
    "a dense model": ([*CAMPAIGN, "model=llama31_8b"], (14.99, 1.89, 0.25)),
    "fp32": ([*CAMPAIGN, "model=llama31_8b", "dtype=fp32"], (29.98, 2.21, 0.25)),
    "the forward is larger": ([*CAMPAIGN, "model=granite31_8b"], (15.25, 0.85, 0.46)),
    "experts keep a workspace": ([*CAMPAIGN, "model=qwen3_30b_a3b"], (56.88, 2.68, 0.27)),
    "experts wider than the model": (
        [*CAMPAIGN, "model=mixtral_8x7b", "tp=2"],
        (43.51, 1.21, 2.07),
    ),
    "MLA": ([*CAMPAIGN, "model=deepseek_v2_lite"], (29.43, 1.93, 0.26)),
    "two ranks over NVLink": ([*CAMPAIGN, "model=llama31_8b", "tp=2"], (7.51, 1.89, 2.07)),
    "four ranks": ([*CAMPAIGN, "model=qwen25_7b", "tp=4"], (3.55, 2.21, 2.13)),
    "V0 sorts too": (
        [
            "gpu=a10g",
            "model=qwen25_math_1_5b",
            "max_model_len=4096",
            "util=0.9",
            "engine.version=0.7.2",
        ],
        (2.88, 1.40, 0.05),
    ),
    "V0's forward": (
        ["gpu=t4", "model=qwen25_1_5b", "max_model_len=32768", "util=0.5", "engine.version=0.7.3"],
        (2.89, 2.02, 0.01),
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_terms_are_those_that_the_engine_printed(name):
    overrides, printed = LOGS[name]
    profile = kvexp.run(overrides).profile

    for part, gib in zip(
        (profile.weights, profile.activation, profile.non_torch), printed, strict=True
    ):
        low, high = part.size_bytes - part.below_bytes, part.size_bytes + part.above_bytes
        assert low - PRINTED <= gib * GIB <= high + PRINTED
        if part.name != "non_torch":
            assert part.size_bytes == pytest.approx(gib * GIB, abs=2 * PRINTED)


def test_the_last_stage_holds_what_the_stage_before_sent():
    ranks = kvexp.run([*CAMPAIGN, "model=llama31_8b", "pp=4"]).ranks

    assert ranks[-1].profile.activation_bytes == pytest.approx(2.01 * GIB, abs=PRINTED)
    assert ranks[-1].budget.available_bytes == pytest.approx(68.89 * GIB, abs=2 * PRINTED)


def test_version_0_8_charges_the_context_and_0_9_does_not():
    asked = ["gpu=rtx_3090", "model=opt_125m", "gpu.context_bytes=552402944"]
    before, after = (
        kvexp.run([*asked, f"engine.version={version}"]).profile.non_torch_bytes
        for version in ("0.8.5", "0.9.2")
    )

    assert before - after == 552402944


def test_errors_of_independent_terms_add_as_squares():
    result = kvexp.run([*CAMPAIGN, "model=qwen3_30b_a3b", "gpu.total_bytes=80GiB"])
    parts = result.profile.parts
    error = sum(part.above_bytes**2 for part in parts) ** 0.5
    lost = (result.num_blocks - result.num_blocks_low) * result.block_bytes

    assert lost == pytest.approx(error, abs=2 * result.block_bytes)
    assert result.kv_tokens_low < result.kv_tokens < result.kv_tokens_high
    assert result.max_concurrency_low < result.max_concurrency < result.max_concurrency_high


def test_a_term_outside_what_was_fitted_says_so_and_is_wider():
    inside = kvexp.run(["gpu=h200", "model=qwen3_8b", "enforce_eager=true"]).profile.activation
    outside = kvexp.run(
        ["gpu=h200", "model=qwen3_8b", "enforce_eager=true", "engine.version=0.30.0"]
    ).profile.activation

    assert inside.above_bytes == 0
    assert outside.above_bytes > 0
    assert "not to 0.30.0" in outside.reason


def test_graphs_are_subtracted_by_some_versions_only():
    asked = ["model=qwen3_30b_a3b", "gpu=h200", "engine.version="]
    sizes = {
        version: kvexp.run([*asked[:-1], f"engine.version={version}"]).profile.cudagraph_bytes
        for version in ("0.19.0", "0.22.0", "0.26.0")
    }

    assert sizes["0.19.0"] == 0
    assert sizes["0.22.0"] == sizes["0.26.0"] == pytest.approx(689963008, rel=0.05)  # measured


READY = {  # bytes in use above the request when the engine was ready, measured on one H200
    "model=llama3_8b enforce_eager=true max_model_len=8192": 1035311513,
    "model=llama3_8b max_model_len=8192": 1876269465,
    "model=llama3_8b enforce_eager=true max_model_len=8192 max_num_batched_tokens=2048": 1706000000,
    "model=llama3_8b enforce_eager=true max_model_len=8192 max_num_seqs=64": -202000000,
    "model=qwen3_8b enforce_eager=true max_model_len=8192": 1287000000,
    "model=qwen3_30b_a3b enforce_eager=true max_model_len=8192": 679000000,
}


@pytest.mark.parametrize("asked", READY)
def test_the_card_holds_what_was_measured_when_the_engine_was_ready(asked):
    holding = kvexp.run([*asked.split(), "gpu=h200"]).holding

    above = holding.held_at_start_bytes - holding.requested_bytes
    assert above == pytest.approx(READY[asked], abs=0.15 * GIB)
    assert holding.held_under_load_bytes >= holding.held_at_start_bytes
    assert holding.fits


def test_gpt_oss_at_95_percent_runs_out_of_memory_after_the_cache_and_at_90_it_starts():
    asked = [*CAMPAIGN, "model=gpt_oss_20b"]
    much, less = kvexp.run(asked), kvexp.run([*asked, "util=0.9"])

    assert (much.status, much.stage) == (Status.oom, Stage.graphs)
    assert "out of memory after the cache is allocated" in much.reason
    assert much.num_blocks > 0
    assert less.ok
    assert 0.9 <= much.holding.largest_safe_util < 0.95


def test_a_cache_of_given_size_has_no_safe_share():
    asked = ["model=llama3_8b", "gpu=h200", "engine.kv_cache_memory_bytes=200GiB"]
    given = kvexp.run([*asked, "util=0.5"])

    assert (given.status, given.stage) == (Status.oom, Stage.graphs)
    assert given.holding.held_under_load_bytes > 200 * GIB
    assert given.holding.largest_safe_util is None
    assert "util" not in given.reason


def test_what_leaves_no_room_at_any_share_is_named():
    asked = ["model=llama3_8b", "gpu=rtx_4090", "engine.version=0.19.0"]
    asked += ["max_num_batched_tokens=16384", "engine.max_cudagraph_capture_size=1000000"]
    refused = kvexp.run(asked)

    assert (refused.status, refused.stage) == (Status.oom, Stage.graphs)
    assert "no util leaves room for its graphs of" in refused.reason
    assert "1043 sizes up to 16384" in refused.reason  # 35 up to 256, then every sixteenth
    assert refused.holding.largest_safe_util == 0  # what is left of the card holds no cache
    assert "0.0000" not in refused.reason


def test_a_safe_share_has_a_cache_for_one_request():
    """0.2 GiB for 448 tokens, of which the card's last share that fits leaves 0.07."""
    asked = ["model=bloom_7b1", "gpu=v100_16gb", "engine.version=0.20.0", "max_model_len=448"]
    asked.insert(2, "gpu.context_bytes=420MiB")
    asked.append("max_num_batched_tokens=512")

    assert kvexp.run([*asked, "util=0.95"]).holding.largest_safe_util == 0
    shorter = [*asked[:-2], "max_model_len=128", *asked[-1:]]
    safe = kvexp.run([*shorter, "util=0.95"]).holding.largest_safe_util
    assert kvexp.run([*shorter, f"util={safe}"]).ok


@pytest.mark.parametrize(("version", "is_above"), [("0.8.2", True), ("0.19.0", False)])
def test_a_safe_share_is_below_what_is_free_where_a_start_checks_it(version, is_above):
    asked = ["model=gpt2", "gpu=b200", "gpu.used_by_others_bytes=1GiB", "max_num_seqs=8"]
    asked += [f"engine.version={version}", "util=0.9"]
    result = kvexp.run(asked)

    free = result.effective["free_bytes"] / result.effective["total_bytes"]
    assert (result.holding.largest_safe_util > free) is is_above


def test_blocks_beyond_the_request_stand_on_the_card():
    asked = ["model=llama3_8b", "gpu=h200", "util=0.5"]
    own = kvexp.run(asked)
    more = kvexp.run([*asked, f"engine.num_gpu_blocks_override={own.num_blocks + 1000}"])

    added = more.holding.held_under_load_bytes - own.holding.held_under_load_bytes
    assert added == 1000 * own.block_bytes


def test_what_others_use_is_no_room():
    asked = ["model=llama3_8b", "gpu=h200", "util=0.95"]
    alone, beside = kvexp.run(asked), kvexp.run([*asked, "gpu.used_by_others_bytes=6GiB"])

    assert alone.ok
    assert (beside.status, beside.stage) == (Status.oom, Stage.graphs)
    assert "of which others use 6.00 GiB" in beside.reason
    assert beside.holding.largest_safe_util < 0.95


def test_a_fitted_length_leaves_the_counts_in_their_intervals():
    found = kvexp.run(
        ["model=llama32_3b", "gpu=t4", "util=0.7", "max_model_len=-1", "engine.version=0.30.0"]
    )

    assert found.max_concurrency_low <= found.max_concurrency <= found.max_concurrency_high
    assert found.kv_tokens_low <= found.kv_tokens <= found.kv_tokens_high


STAGES = ("model=llama3_8b", "gpu=h100", "pp=2", "util=0.9")


@pytest.mark.parametrize(
    "version",
    [
        *("0.5.4", "0.10.2"),
        *(
            pytest.param(v, marks=pytest.mark.slow)
            for v in ("0.7.3", "0.8.5-v0", "0.13.0", "0.17.1")
        ),
    ],
)
@pytest.mark.parametrize("link", ["pcie", "nvlink", "multicast"])
def test_stages_have_a_term_before_any_log_of_them(version, link):
    asked = [*STAGES, f"engine.version={version}", f"gpu.interconnect={link}"]
    part = kvexp.run(asked).profile.non_torch

    assert (
        part.size_bytes - part.below_bytes
        <= kvexp.run([*STAGES, "engine.version=0.19.0"]).profile.non_torch_bytes
    )
    assert "no log of stages" in part.reason


def test_the_share_that_keeps_the_cache_of_a_version_without_graphs():
    result = kvexp.run(["model=qwen3_30b_a3b", "gpu=h200", "util=0.92"])
    share = result.profile.cudagraph_bytes / result.budget.total_bytes

    assert result.holding.util_keeping_cache == round(0.92 + share, 4)
    assert result.holding.util_without_graphs == round(0.92 - share, 4)


def test_kimi_k2_thinking_takes_the_594_gb_of_its_int4_checkpoint():
    ranks = kvexp.run(["model=kimi_k2_thinking", "gpu=b300", "tp=8"]).ranks

    assert sum(rank.profile.weights_bytes for rank in ranks) == pytest.approx(594e9, rel=0.03)


GRAPHS = ["model=qwen3_30b_a3b", "gpu=h200", "engine.version=0.26.0", "max_num_seqs=256"]


def test_graphs_are_of_the_sizes_that_are_given():
    own = kvexp.run(GRAPHS).profile.cudagraph_bytes
    same = kvexp.run([*GRAPHS, f"engine.cudagraph_capture_sizes={SIZES}"]).profile.cudagraph_bytes
    few = kvexp.run([*GRAPHS, "engine.cudagraph_capture_sizes=[1,2,4,8]"]).profile
    none = kvexp.run([*GRAPHS, "engine.cudagraph_capture_sizes=[]"]).profile

    assert own == same
    assert 0 < few.cudagraph_bytes < own // 5
    assert "for 4 sizes" in few.cudagraph.reason
    assert none.cudagraph_bytes == 0
    assert none.cudagraph.reason == "no size to capture"


SIZES = str([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]).replace(" ", "")
"""vLLM's own for 256 requests (`_set_cudagraph_sizes`)."""


def test_options_of_the_engine_are_in_what_there_is_to_paste():
    result = kvexp.run(
        [
            *GRAPHS,
            "engine.cudagraph_capture_sizes=[8,1]",
            "engine.v2_model_runner=false",
            "engine.async_scheduling=false",
            "engine.num_gpu_blocks_override=4000",
            "engine.disable_hybrid_kv_cache_manager=true",
        ]
    )

    flags = result.effective["flags"]
    assert flags.startswith("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve Qwen/Qwen3-30B-A3B ")
    assert flags.endswith(
        "--disable-hybrid-kv-cache-manager --num-gpu-blocks-override 4000 --no-async-scheduling"
        """ --compilation-config '{"cudagraph_capture_sizes": [8, 1]}'"""
    )


def test_awq_has_its_zero_points_in_16_bits_on_hopper():
    """A start of 0.26.0 on an H200; other cards keep them packed."""
    asked = ["model=qwen25_7b", "quantization=awq"]
    elements = 28 * 3584 * (3584 + 1024 + 3584 + 3 * 18944)
    packed = (2 - 0.5) * elements / 128

    hopper, other = (
        kvexp.run([*asked, f"gpu={gpu}", "engine.version=0.26.0"]).profile.weights_bytes
        for gpu in ("h200", "a100_80gb")
    )
    assert hopper == pytest.approx(5_773_327_360, rel=0.001)
    assert hopper - other == pytest.approx(packed, rel=0.2)


def test_what_a_load_depends_on_is_not_taken_from_another_one():
    asked = ["model=gemma3n_e4b", "gpu=h100"]
    few, many = (
        kvexp.run([*asked, f"max_num_batched_tokens={n}"]).profile.weights_bytes
        for n in (2048, 8192)
    )
    assert many > few  # embeddings of a step's tokens for every layer


@pytest.mark.parametrize(
    ("card", "tp", "model", "printed_gib", "weights_gib"),
    [
        ("rtx_5090", 2, "qwen35_27b", 15.03, 14.53),  # noonghunna/club-3090#1087
        ("rtx_pro_6000", 4, "qwen3_235b_a22b", 56.89, 55.19),  # index id 57976227484
    ],
)
def test_ranks_without_nvlink_take_what_logs_of_0_26_say(card, tp, model, printed_gib, weights_gib):
    """`consumed memory (weights + non-torch)` less the weights."""
    asked = [f"model={model}", "quantization=fp8", f"gpu={card}", f"tp={tp}", "max_model_len=4096"]
    part = kvexp.run([*asked, "engine.version=0.26.0"]).profile.non_torch

    assert part.low_bytes <= (printed_gib - weights_gib) * 2**30 <= part.high_bytes
    assert part.size_bytes == pytest.approx(0.5 * 2**30, rel=0.05)


@pytest.mark.parametrize(
    ("options", "printed_gib"),
    [
        (["model=nemotron3_super_120b_a12b", "quantization=nvfp4"], 75.03),
        (["model=gemma4_26b_a4b", "quantization=awq"], 16.63),
        (["model=phi4", "quantization=bitsandbytes", "engine.version=0.8.2"], 8.63),
    ],
)
def test_a_format_whose_reach_a_name_does_not_say_holds_what_re_uploads_took(options, printed_gib):
    weights = kvexp.run([*options, "gpu=gb10"]).profile.weights

    assert weights.low_bytes <= printed_gib * GIB <= weights.high_bytes


def test_a_format_that_reaches_every_layer_alike_is_sure():
    asked = ["model=qwen3_32b", "quantization=nvfp4", "gpu=gb10", "engine.version=0.13.0"]
    weights = kvexp.run(asked).profile.weights

    assert weights.size_bytes == pytest.approx(19.4193 * GIB, rel=0.001)  # a start of 0.13 printed
    assert weights.high_bytes - weights.low_bytes < 0.02 * weights.size_bytes


def test_a_small_card_of_0_28_takes_what_seven_starts_on_l4_say():
    """Qwen2.5-7B-AWQ at 0.45 and 0.6: 61,776 and 123,664 tokens; 20,512 at 0.35 were too few."""
    asked = ["model=qwen25_7b", "quantization=awq", "gpu=l4", "gpu.total_bytes=22.04GiB"]
    asked += ["engine.version=0.28.0", "max_model_len=32768", "engine.v2_model_runner=true"]
    part = kvexp.run([*asked, "util=0.6"]).profile.non_torch

    assert part.size_bytes == 290 << 20  # consumed 5.58 GiB, of which 5.29 are weights
    for util, tokens in ((0.45, 61_776), (0.6, 123_664)):
        assert kvexp.run([*asked, f"util={util}"]).kv_tokens == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(
    ("model", "card", "version", "printed"),
    [
        ("gpt_oss_20b", "a100_80gb", "0.19.0", 13.72),
        ("gpt_oss_20b", "gb10", "0.13.0", 13.7193),
        ("gpt_oss_20b", "l40s", "0.11.0", 13.7164),  # index id 57930693160
        ("gpt_oss_120b", "h100", "0.10.1", 65.9651),  # vllm-project/vllm#23278
        ("gpt_oss_120b", "h100", "0.14.1", 64.38),  # vllm-project/vllm#33155
        ("gpt_oss_20b", "h100", "0.14.0", 13.47),
        ("gpt_oss_20b", "h100", "0.19.0", 13.64),
    ],
)
def test_experts_of_gpt_oss_are_padded_for_the_kernel_that_runs_them(model, card, version, printed):
    """Marlin's off Hopper and B200, and there too before the wheel had Triton's (0.12)."""
    found = kvexp.run([f"model={model}", f"gpu={card}", f"engine.version={version}"])

    assert found.profile.weights_bytes == pytest.approx(printed * GIB, rel=0.001)


A100S = ["model=qwen2_7b", "gpu=a100_80gb", "engine.version=0.10.1", "max_model_len=16384"]


@pytest.mark.parametrize(
    ("more", "available_gib"),
    [  # dennislee22/vLLM-benchmarking, logs of 0.10.1.1 that say FlashInfer samples
        ("util=0.25", 5.01),
        ("util=0.5", 24.83),
        ("util=0.25 tp=2", 12.02),
        ("util=0.5 tp=2", 31.83),
    ],
)
def test_flashinfers_sampler_takes_less_than_sorting(more, available_gib):
    asked = [*A100S, *more.split()]
    found, native = (
        kvexp.run([*asked, *sampler]) for sampler in (["engine.flashinfer_sampler=true"], [])
    )

    assert found.budget.available_bytes / GIB == pytest.approx(available_gib, rel=0.01)
    entries = 256 * 152_064  # requests and vocabulary: sorting has 24 bytes more of each
    less = native.profile.activation_bytes - found.profile.activation_bytes
    assert less == 24 * entries
    low = native.profile.activation.low_bytes
    assert low == pytest.approx(found.profile.activation_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("version", "installed"), [("0.8.5-v0", False), ("0.11.0", True), ("0.11.1", False)]
)
def test_flashinfer_may_sample_where_it_is_installed_to_0_11_0(version, installed):
    asked = ["model=qwen2_7b", "gpu=a100_80gb", "max_model_len=16384", f"engine.version={version}"]
    peak = kvexp.run(asked).profile.activation

    assert (peak.low_bytes < 0.7 * peak.size_bytes) is installed
