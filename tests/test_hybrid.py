"""Hybrid models through the pipeline: layouts, versions, parallelism, the engine's own options."""

import json

import pytest

import kvexp
from kvexp.results import Status
from kvexp.units import GIB

GEMMA = ["model=gemma3_12b", "gpu=h200", "enforce_eager=true"]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gemma3_12b", "6 groups of 8 layers: 5 sliding + 1 full"),
        ("gpt_oss_20b", "2 groups of 12 layers: 1 sliding + 1 full"),
        ("phi3_mini", "1 group of 32 layers: sliding"),
        ("mistral_7b_v01", "1 group of 32 layers: sliding"),
        ("deepseek_v2_lite", "1 group of 27 layers: MLA"),
        ("qwen3_30b_a3b", "1 group of 48 layers: full"),
        ("granite4_h_1b", "10 groups of 4 layers: 9 mamba + 1 full"),
        ("llama3_8b", "1 group of 32 layers: full"),
    ],
)
def test_groups_are_said_in_words(model, layout):
    assert kvexp.run([f"model={model}", "gpu=h200"]).layout == layout


def test_groups_and_their_blocks_are_in_the_result(command_line, tmp_path):
    command_line(*GEMMA, "tracking=off", f"hydra.run.dir={tmp_path}/p")
    data = json.loads((tmp_path / "p" / "result.json").read_text())

    assert [group["kind"] for group in data["groups"]] == ["sliding"] * 5 + ["full"]
    assert {group["num_blocks"] for group in data["groups"]} == {data["num_blocks"]}
    # window 1024, two steps of 8192 tokens in flight: cdiv(1023 + 16384, 16) + 1
    assert [g["blocks_per_request"] for g in data["groups"]] == [1089] * 5 + [8192]
    per_request = sum(g["blocks_per_request"] for g in data["groups"])
    assert data["max_concurrency"] == data["num_blocks"] / per_request


def test_printed_tokens_of_gemma3_jump_between_versions_and_it_says_why(command_line, tmp_path):
    status, out, err = command_line(
        *("model=gemma3_12b", "gpu=h200", "-m", "engine.version=0.19,0.20,0.21,0.26"),
        *("util=0.9", "enforce_eager=true", "tracking=off"),  # their defaults differ too
    )
    assert status == 0, err
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("*/result.json"))]
    tokens = {r["effective"]["engine_version"]: r["kv_tokens"] for r in results}

    assert tokens["0.19"] == tokens["0.20"]
    assert tokens["0.21"] > 4 * tokens["0.20"]
    assert tokens["0.26"] < tokens["0.21"]
    assert "engine.version=0.19; engine.version=0.20: tokens = blocks // groups" in out
    assert "engine.version=0.21; engine.version=0.26: tokens = concurrency x longest" in out


def test_a_recurrent_state_raises_the_block_size():
    result = kvexp.run(["model=granite4_h_1b", "gpu=h200"])
    mamba = next(group for group in result.groups if group.kind == "mamba")

    # conv 3 x (3072 + 256) and state 48 x 64 x 128 in bf16; a token of K and V takes 2,048 bytes
    state_bytes = 2 * (3 * 3328 + 48 * 64 * 128)
    assert result.block_size == 16 * -(-state_bytes // (16 * 2048))
    assert mamba.page_size_bytes == result.block_size * 2048
    assert mamba.blocks_per_request == 1


def test_latent_pages_do_not_shrink_with_tp_but_halve_with_an_8_bit_cache():
    one = kvexp.run(["model=deepseek_v2_lite", "gpu=h200", "block_size=64"])
    two = kvexp.run(["model=deepseek_v2_lite", "gpu=h200", "block_size=64", "tp=2"])
    fp8 = kvexp.run(["model=deepseek_v2_lite", "gpu=h200", "kv_dtype=fp8"])

    assert one.block_bytes == two.block_bytes == 27 * 64 * 576 * 2
    assert fp8.block_size == 64  # FlashMLA
    assert fp8.block_bytes * 2 == one.block_bytes


def test_kv_heads_are_replicated_beyond_their_number():
    four, eight = (kvexp.run(["model=qwen3_30b_a3b", "gpu=h200", f"tp={tp}"]) for tp in (4, 8))
    assert four.block_bytes == eight.block_bytes == 48 * 16 * 1 * 256 * 2


def test_an_uneven_pipeline_runs_with_the_least_of_its_ranks():
    result = kvexp.run(["model=deepseek_v2_lite", "gpu=h200", "pp=2"])

    assert [rank.num_layers for rank in result.ranks] == [14, 13]
    assert result.num_blocks == min(rank.num_blocks for rank in result.ranks)
    assert result.ranks[0].num_blocks < result.ranks[1].num_blocks
    for rank in result.ranks:
        parts = sum(part.size_bytes for part in rank.budget.parts)
        assert parts == rank.budget.requested_bytes
        assert rank.budget.kv_cache_bytes == result.num_blocks * rank.block_bytes


def test_decode_context_parallelism_divides_the_request_not_the_page():
    base = ["model=deepseek_v2_lite", "gpu=h200", "tp=8"]
    plain = kvexp.run(base)
    shared = kvexp.run([*base, "engine.decode_context_parallel_size=8"])

    assert shared.num_blocks == plain.num_blocks
    assert shared.max_concurrency == pytest.approx(8 * plain.max_concurrency, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=deepseek_v2_lite", "tp=4"], "must divide tp (4), got 3"),
        (["model=llama3_8b", "tp=3"], "tp must be one of"),
        (["model=qwen3_30b_a3b", "tp=4"], "must divide tp"),
        (["model=gemma3_12b", "tp=3"], "tp must be one of 1, 2, 4, 8"),
    ],
)
def test_context_parallel_sizes_that_do_not_work(overrides, message):
    result = kvexp.run([*overrides, "gpu=h200", "engine.decode_context_parallel_size=3"])

    assert result.status is Status.invalid
    assert message in result.reason


def test_sliding_layers_and_grouped_heads_refuse_context_parallelism():
    option = "engine.decode_context_parallel_size=2"
    sliding = kvexp.run(["model=gemma3_12b", "gpu=h200", "tp=2", option])
    grouped = kvexp.run(["model=llama3_8b", "gpu=h200", "tp=8", option])

    assert "its sliding layers refuse it" in sliding.reason
    assert "at most tp // KV heads = 1" in grouped.reason


def test_length_is_fitted_to_the_memory():
    fitted = kvexp.run([*GEMMA, "util=0.25", "max_model_len=-1"])
    length = fitted.effective["max_model_len"]
    fits = kvexp.run([*GEMMA, "util=0.25", f"max_model_len={length}"])
    longer = kvexp.run([*GEMMA, "util=0.25", f"max_model_len={length + 16}"])

    assert fitted.ok
    assert length < 131072
    assert fits.num_blocks == fitted.num_blocks
    assert longer.refusal.kind == "max_len_too_large"
    assert longer.refusal.estimated_max_model_len == length


def test_an_override_replaces_the_measured_memory():
    enough = kvexp.run(["gpu=h200", "engine.num_gpu_blocks_override=512", "max_model_len=8192"])
    short = kvexp.run(["gpu=h200", "engine.num_gpu_blocks_override=511", "max_model_len=8192"])

    assert enough.num_blocks == 512
    assert short.refusal.estimated_max_model_len == 8176


def test_given_cache_bytes_replace_the_share_but_not_the_check_at_start():
    given = kvexp.run(["gpu=h200", "util=0.5", "engine.kv_cache_memory_bytes=20GiB"])
    unset = kvexp.run(["gpu=h200", "util=0.5", "engine.kv_cache_memory_bytes=0"])
    refused = kvexp.run(["gpu=h200", "util=1.0", "engine.kv_cache_memory_bytes=20GiB"])

    assert given.budget.available_bytes == 20 * GIB
    assert given.num_blocks == 20 * 512
    assert unset.num_blocks == kvexp.run(["gpu=h200", "util=0.5"]).num_blocks
    assert refused.refusal.kind == "free_memory_too_low"


def test_given_cache_bytes_are_exact_whatever_the_terms_are():
    options = ["gpu=a100_80gb", "engine.version=0.19.0"]
    uncertain = kvexp.run(options)
    given = kvexp.run([*options, "engine.kv_cache_memory_bytes=20GiB"])

    assert uncertain.num_blocks_low < uncertain.num_blocks
    assert (given.num_blocks_low, given.num_blocks_high) == (None, None)


def test_hybrid_manager_off_keeps_every_token_of_sliding_layers():
    options = [*GEMMA, "max_model_len=65536"]
    off = kvexp.run([*options, "engine.disable_hybrid_kv_cache_manager=true"])

    assert off.layout.startswith("1 group of 48 layers")
    assert off.max_concurrency < kvexp.run(options).max_concurrency


def test_async_scheduling_off_lets_windows_hold_less():
    mistral = ["model=mistral_7b_v01", "gpu=h200"]
    on = kvexp.run(mistral)
    off = kvexp.run([*mistral, "engine.async_scheduling=false"])

    assert on.groups[0].blocks_per_request == 1281
    assert off.groups[0].blocks_per_request == 769
    assert off.max_concurrency > on.max_concurrency


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        ("0.6.3", ("# GPU blocks: ", "Maximum concurrency for 8192 tokens per request: ")),
        ("0.8.5-v0", ("# GPU blocks: ", "Maximum concurrency for 8192 tokens per request: ")),
        ("0.8.5", ("GPU KV cache size: ", "Maximum concurrency for 8,192 tokens per request: ")),
        ("0.26.0", ("GPU KV cache size: ", "Maximum concurrency for 8,192 tokens per request: ")),
    ],
)
def test_log_lines_have_the_versions_shape(version, lines):
    result = kvexp.run(["gpu=h200", f"engine.version={version}"])

    assert len(result.log_lines) == 2
    for line, start in zip(result.log_lines, lines, strict=True):
        assert line.startswith(start)


def test_0_33_prints_one_line():
    (line,) = kvexp.run(["gpu=h200", "engine.version=0.33.0"]).log_lines

    assert ", Maximum concurrency for 8,192 tokens per request: " in line


@pytest.mark.parametrize(
    "version", ["0.6.3", "0.8.5", "0.9", "0.10", "0.19", "0.26", "0.30.0", "0.33"]
)
@pytest.mark.parametrize(
    "model",
    [
        "gemma3_12b",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3_8b", "deepseek_v2_lite")),
    ],
)
def test_every_version_answers(version, model):
    result = kvexp.run([f"model={model}", "gpu=h200", f"engine.version={version}"])

    assert result.status is Status.ok, result.reason
    assert result.num_blocks > 0


def test_a_version_between_columns_says_which_rules_it_takes():
    result = kvexp.run(["gpu=h200", "engine.version=0.24.1"])

    assert any("0.24.1" in note and "0.22.0" in note for note in result.notes)


@pytest.mark.parametrize("model", ["gemma3_12b", "deepseek_v2_lite", "granite4_h_1b"])
def test_nano_vllm_says_what_it_does_not_know(model):
    result = kvexp.run([f"model={model}", "gpu=h200", "engine=nano_vllm"])

    assert result.ok
    assert any("its formula counts K and V of every token and layer" in n for n in result.notes)


def test_trap_1_the_request_is_rounded_up_from_0_18_on():
    total, util = 85_017_493_504, 0.92
    overrides = ["gpu=h100", f"gpu.total_bytes={total}", f"util={util}"]
    new = kvexp.run([*overrides, "engine.version=0.26.0"])
    old = kvexp.run([*overrides, "engine.version=0.11.0"])

    assert new.budget.requested_bytes == 78_216_094_024
    assert old.budget.requested_bytes == 78_216_094_023


def test_trap_2_other_processes_count_at_the_check_alone():
    free = kvexp.run(["gpu=h200", "util=0.8"])
    shared = kvexp.run(["gpu=h200", "util=0.8", "gpu.used_by_others_bytes=20GiB"])
    full = kvexp.run(["gpu=h200", "util=0.9", "gpu.used_by_others_bytes=20GiB"])

    assert shared.num_blocks == free.num_blocks
    assert full.refusal.kind == "free_memory_too_low"


def test_trap_3_context_and_runner_buffers_are_outside_the_budget():
    names = [part.name for part in kvexp.run(["gpu=h200"]).budget.parts]

    assert names == ["non_torch", "weights", "activation", "cudagraph", "kv_cache", "unused"]


def test_trap_4_dense_models_subtract_no_graph_memory_in_0_26():
    dense = kvexp.run(["gpu=h200", "engine.version=0.26.0"])
    experts = kvexp.run(["model=qwen3_30b_a3b", "gpu=h200", "engine.version=0.26.0"])
    eager = kvexp.run(["model=qwen3_30b_a3b", "gpu=h200", "enforce_eager=true"])

    assert dense.profile.cudagraph_bytes == 0
    assert experts.profile.cudagraph_bytes > 0
    assert eager.profile.cudagraph_bytes == 0


def test_deepseek_v4_has_the_groups_of_vllms_own_planner():
    request = ["model=deepseek_v4_flash", "gpu=b300", "tp=4", "max_model_len=1048576"]
    result = kvexp.run(request)

    # tests/kv/data/vllm_0_26_cases.jsonl, "138-dsv4-like-43"
    assert [(g.num_layers, g.block_size, g.page_size_bytes) for g in result.groups] == [
        (62, 256, 1_002_240),
        (22, 64, 823_680),
        (21, 64, 786_240),
        (42, 4, 967_680),
        (20, 8, 748_800),
    ]
    assert result.block_bytes == 1_039_680
    assert kvexp.run([*request, "kv_dtype=fp8"]).num_blocks == result.num_blocks


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("kv_dtype=bf16", "kv_dtype must be auto or fp8 for deepseek_v4_flash, got bf16"),
        ("engine=sglang", "known for engine=vllm only"),
        ("engine=tensorrt_llm", "known for engine=vllm only"),
        ("engine=lmdeploy", "known for engine=vllm only"),
    ],
)
def test_deepseek_v4_is_refused_where_its_caches_are_not_known(more, said):
    result = kvexp.run(["model=deepseek_v4_flash", "gpu=b300", "tp=4", more])

    assert result.status is Status.invalid
    assert said in result.reason


ON_H100 = ["model=Qwen/Qwen3.6-27B-FP8", "gpu=h100", "util=0.95"]


def test_whole_graphs_need_a_block_of_states_for_each_request():
    """vllm-project/recipes#551: max_num_seqs (1024) exceeds available Mamba cache blocks (856)."""
    result = kvexp.run([*ON_H100, "engine.version=0.23.0"])

    assert (result.status, result.stage) == (Status.infeasible, "graphs")
    assert result.refusal.kind == "max_num_seqs_too_large"
    assert result.num_blocks_low <= 856 <= result.num_blocks_high
    assert result.num_blocks == pytest.approx(856, rel=0.01)
    assert f"may be at most {result.num_blocks}" in result.reason
    at_most = [*ON_H100, "engine.version=0.23.0", "max_num_seqs=512"]
    assert kvexp.run(at_most).ok


@pytest.mark.parametrize(
    "starts",
    [
        ["engine.version=0.19.0"],  # cuts the graphs' sizes instead
        ["engine.version=0.23.0", "enforce_eager=true"],
        ["engine.version=0.23.0", "engine.cudagraph_mode=piecewise"],
    ],
)
def test_without_whole_graphs_requests_may_exceed_the_blocks(starts):
    result = kvexp.run([*ON_H100, *starts])

    assert result.ok
    assert result.num_blocks < result.effective["max_num_seqs"]
