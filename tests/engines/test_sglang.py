"""SGLang's rules (0.5.23: memory_hook.py, pool_configurator.py, kv_cache_configurator.py)."""

import pytest

import kvexp
from kvexp.results import Provenance, Refusal, Status

GIB = 2**30


def effective(run, *overrides):
    return run("model=llama3_8b", "engine=sglang", *overrides).effective


@pytest.mark.parametrize(
    ("gpu", "chunk", "reserved"),
    [
        # 512 + 1.5 x chunk + 128 + 2 x largest decode graph + 8 x prefill graphs, in MiB
        ("t4", 2048, 512 + 3072 + 128 + 16 + 8 * 42),
        ("rtx_4090", 4096, 512 + 6144 + 128 + 96 + 8 * 50),
        ("l40s", 4096, 512 + 6144 + 128 + 64 + 8 * 50),
        ("h100", 8192, 512 + 12288 + 128 + 512 + 8 * 58),
        ("h200", 8192, 512 + 12288 + 128 + 512 + 8 * 58),
        ("b200", 16384, 512 + 24576 + 128 + 1024 + 8 * 74),
    ],
)
def test_the_automatic_fraction_and_chunk_follow_the_card(run, gpu, chunk, reserved):
    found = effective(run, f"gpu={gpu}")
    capacity = found["total_bytes"] / 2**20

    assert found["max_num_batched_tokens"] == chunk
    assert found["util"] == round((capacity - reserved) / capacity, 3)


def test_a_large_card_keeps_ten_gib_back_at_least(run):
    # 512 + 1.5 x 2048 + 128 MiB are less than 10 GiB on a card above 60 GiB
    found = effective(run, "gpu=h200", "max_num_batched_tokens=2048", "enforce_eager=true")

    capacity = 150109880320 / 2**20
    assert found["util"] == round((capacity - 10240) / capacity, 3)


@pytest.mark.parametrize(("tp", "fraction"), [(1, 0.88), (2, 0.87), (4, 0.85), (8, 0.81)])
def test_releases_before_05_went_by_tp(run, tp, fraction):
    assert effective(run, "gpu=h100", "engine.version='0.4.3'", f"tp={tp}")["util"] == fraction


def test_graphs_and_requests_lower_the_automatic_fraction(run, deploy):
    plain = effective(run, "gpu=l40s")["util"]

    assert effective(run, "gpu=l40s", "enforce_eager=true")["util"] > plain
    assert effective(run, "gpu=l40s", "max_num_seqs=4")["util"] > plain


def test_a_pool_that_has_no_room_is_refused_before_a_forward_runs(run):
    taken = ("gpu.free_bytes=16GiB", "profiler.weights_bytes=15.5GiB", "profiler.non_torch_bytes=0")
    point = ("model=llama3_8b", "gpu=h100", "util=0.85", "profiler.activation_bytes=1GiB", *taken)

    assert run(*point, "engine=sglang").refusal.kind == "no_memory"
    assert run(*point, "engine=vllm", "util=0.2").status is Status.oom


def test_the_rest_is_free_after_load_less_what_is_held_back(run):
    # avail - pre x (1 - f), floats of GiB, then whole bytes
    result = run(
        *("model=llama3_8b", "engine=sglang", "gpu=h100", "gpu.free_bytes=78GiB", "util=0.85"),
        *("profiler.weights_bytes=15GiB", "profiler.non_torch_bytes=0"),
    )

    assert result.budget.base == "free before load"
    assert result.budget.available_bytes == int((63 - 78 * (1 - 0.85)) * GIB)
    assert result.kv_tokens == result.budget.available_bytes // 131072
    assert result.block_size == 1


@pytest.mark.parametrize(
    ("gpu", "before", "after", "fraction", "tokens"),
    [
        ("l40s", 44.01, 40.99, 0.85, 1_287_482),  # lennonYe/6998_project, sglang_radix
        ("gb10", 112.26, 109.01, 0.4, 1_557_709),  # jethac/dgx-spark-hijinks, bf16auto_040mem
        ("gb10", 112.26, 108.97, 0.4, 1_556_049),  # the same, bf16_clean_good_output
    ],
)
def test_a_little_is_taken_between_the_printed_memory_and_the_pool(
    run, gpu, before, after, fraction, tokens
):
    result = run(
        *("model=qwen25_1_5b", "engine=sglang", f"gpu={gpu}", f"util={fraction}"),
        *(f"gpu.free_bytes={before}GiB", f"engine.free_after_load_bytes={after}GiB"),
    )

    assert result.kv_tokens_low < tokens < result.kv_tokens
    assert result.kv_tokens == pytest.approx(tokens, rel=2e-3)


def test_a_given_activation_is_named_and_not_subtracted(run):
    asked = ["model=llama3_8b", "engine=sglang", "gpu=h100", "util=0.85"]
    plain = run(*asked)
    given = run(*asked, "profiler.activation_bytes=9GiB")

    assert given.kv_tokens == plain.kv_tokens
    assert given.budget.part("activation").size_bytes == 0
    assert "9.00 GiB must fit" in given.budget.part("activation").reason


def test_the_fractions_that_fit_are_named(run):
    asked = ["engine=sglang", "gpu=h100", "gpu.free_bytes=40GiB", "profiler.weights_bytes=20GiB"]
    asked += ["profiler.non_torch_bytes=0", "util=0.8"]

    fits = run(*asked, "profiler.activation_bytes=4GiB").budget.part("activation")
    assert "fits between 0.5 and 0.9" in fits.reason
    empty = run(*asked, "profiler.activation_bytes=21GiB").budget.part("activation")
    assert "no mem_fraction_static fits" in empty.reason


def test_pages_round_tokens_down(deploy):
    engine, deployment = deploy("sglang", "block_size=64")
    plan = engine.plan(deployment, [131072 * (64 * 10 + 63)])

    assert (plan.num_blocks, plan.kv_tokens, plan.block_size) == (10, 640, 64)


def test_max_total_tokens_caps_and_never_raises(deploy):
    for cap, tokens in ((1000, 1000), (10**9, 8000)):
        engine, deployment = deploy("sglang", f"engine.max_total_tokens={cap}")
        plan = engine.plan(deployment, [131072 * 8000])
        limited = "limited by max_total_tokens, 8,000 would fit"
        assert plan.kv_tokens == tokens
        assert (limited in plan.notes) == (tokens < 8000)


def test_layers_of_a_draft_add_their_share_of_the_cell(deploy):
    # int(cell x draft layers / layers)
    engine, deployment = deploy("sglang", "engine.num_draft_layers=1")
    cell = 131072 + 131072 // 32

    assert engine.plan(deployment, [cell * 777]).kv_tokens == 777


@pytest.mark.parametrize(
    ("overrides", "token_bytes"),
    [
        ((), 32 * 2 * 8 * 128 * 2),
        (("tp=16",), 32 * 2 * 1 * 128 * 2),
        (("kv_dtype=fp8",), 32 * 2 * 8 * 128),
        (("kv_dtype=nvfp4",), 32 * 2 * (8 * 128 // 2 + 8 * 128 // 16)),
        (("pp=2",), 16 * 2 * 8 * 128 * 2),
        (("model=deepseek_v2_lite", "tp=4"), 27 * 576 * 2),
        (("model=deepseek_v2_lite", "model.mla.index_head_dim=128"), 27 * (576 * 2 + 132)),
        (
            ("model=deepseek_v2_lite", "model.mla.index_head_dim=128", "kv_dtype=fp8"),
            27 * (656 + 132),
        ),
    ],
)
def test_bytes_of_a_token(deploy, overrides, token_bytes):
    engine, deployment = deploy("sglang", *overrides)
    plan = engine.plan(deployment, [10 * GIB] * deployment.num_ranks)

    assert plan.block_bytes_per_rank[0] == token_bytes * deployment.block_size


def test_the_least_stage_decides(deploy):
    engine, deployment = deploy("sglang", "pp=2")

    assert engine.plan(deployment, [20 * GIB, 10 * GIB]).kv_tokens == 10 * GIB // 65536


def test_windows_have_a_pool_with_a_ratio_of_the_full_ones(deploy):
    # cell = full + ratio x window; window tokens = int(full tokens x ratio)
    engine, deployment = deploy("sglang", "model=gpt_oss_20b", "engine.swa_full_tokens_ratio=0.5")
    layer = 2 * 8 * 64 * 2
    plan = engine.plan(deployment, [int(12 * layer * 1.5 * 10000)])

    assert plan.kv_tokens == 10000
    assert [(g.kind, g.num_layers, g.num_blocks) for g in plan.groups] == [
        ("full", 12, 10000),
        ("window", 12, 5000),
    ]
    assert "full_layer_tokens=10000, swa_layer_tokens=5000" in engine.log_lines(deployment, plan)[0]


def test_without_window_pools_every_layer_keeps_all(deploy):
    engine, deployment = deploy(
        "sglang", "model=gpt_oss_20b", "engine.disable_hybrid_swa_memory=true"
    )
    plan = engine.plan(deployment, [24 * 2 * 8 * 64 * 2 * 100])

    assert (plan.kv_tokens, len(plan.groups)) == (100, 1)


def test_a_model_whose_layers_all_slide_has_one_pool(deploy):
    engine, deployment = deploy("sglang", "model=mistral_7b_v01")

    assert len(engine.plan(deployment, [10 * GIB]).groups) == 1


def test_a_window_pool_below_the_window_is_refused(deploy):
    engine, deployment = deploy("sglang", "model=gpt_oss_20b")
    refusal = engine.plan(deployment, [2 * 8 * 64 * 2 * 24 * 100])

    assert isinstance(refusal, Refusal)
    assert refusal.kind == "window_too_large"


def test_recurrent_states_take_their_share_first(run):
    # share = rest x r / (1 + r); K = (share - slot) // slot; rest -= (K + 1) slots
    result = run("model=granite4_h_1b", "engine=sglang", "gpu=h200", "util=0.9")
    part = result.budget.part("recurrent_states")
    rest = result.budget.available_bytes + part.size_bytes
    slots, slot = (
        int(w.replace(",", "")) for w in (part.reason.split()[0], part.reason.split()[3])
    )

    assert slots == int((rest * 0.9 / 1.9 - slot) // slot)
    assert part.size_bytes == (slots + 1) * slot
    requests = next(n for n in result.notes if n.endswith("requests run at once"))
    assert int(requests.split()[2]) in (slots // 5, (slots - 1) // 5)


def test_the_number_of_slots_can_be_given(run):
    result = run(
        "model=granite4_h_1b", "engine=sglang", "gpu=h200", "engine.max_mamba_cache_size=90"
    )

    assert result.budget.part("recurrent_states").reason.startswith("90 slots")
    assert "at most 18 requests run at once" in result.notes


SLOTS = {  # model, options: slots a request takes (`_calculate_mamba_ratio`, 90 slots)
    "an extra buffer by itself": ("qwen3_next_80b_a3b", "", 5),
    "of Kimi Linear from 0.5.18": ("kimi_linear_48b_a3b", "engine.version=0.5.18", 5),
    "not before": ("kimi_linear_48b_a3b", "engine.version=0.5.15", 3),
    "nor before 0.5.14": ("qwen3_next_80b_a3b", "engine.version=0.5.13", 3),
    "0.5.7 counts it always": ("qwen3_next_80b_a3b", "engine.version=0.5.7", 5),
    "0.5.6 has none": ("qwen3_next_80b_a3b", "engine.version=0.5.6", 3),
    "when asked": (
        "qwen3_next_80b_a3b",
        "engine.version=0.5.9 engine.mamba_radix_cache_strategy=extra_buffer",
        5,
    ),
    "no buffer": ("qwen3_next_80b_a3b", "engine.mamba_radix_cache_strategy=no_buffer", 3),
    "lazy": ("qwen3_next_80b_a3b", "engine.mamba_radix_cache_strategy=extra_buffer_lazy", 4),
    "without overlap none": ("qwen3_next_80b_a3b", "engine.disable_overlap_schedule=true", 3),
    "but with pages": (
        "qwen3_next_80b_a3b",
        "engine.disable_overlap_schedule=true block_size=64",
        4,
    ),
    "without overlap one": (
        "qwen3_next_80b_a3b",
        "engine.disable_overlap_schedule=true engine.mamba_radix_cache_strategy=extra_buffer",
        4,
    ),
    "without radix cache": ("qwen3_next_80b_a3b", "engine.disable_radix_cache=true", 1),
}


@pytest.mark.parametrize("name", SLOTS)
def test_slots_of_a_request_go_by_release_and_strategy(run, name):
    model, asked, slots = SLOTS[name]
    result = run(
        f"model={model}",
        "engine=sglang",
        "gpu=h200",
        "tp=4",
        "engine.max_mamba_cache_size=90",
        *asked.split(),
    )

    assert f"at most {90 // slots} requests run at once" in result.notes


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["engine.mamba_radix_cache_strategy=some"], "must be one of auto, no_buffer,"),
        (
            ["engine.version=0.5.6", "engine.mamba_radix_cache_strategy=no_buffer"],
            "needs SGLang 0.5.7 or newer",
        ),
        (
            [
                "engine.disable_overlap_schedule=true",
                "engine.mamba_radix_cache_strategy=extra_buffer_lazy",
            ],
            "needs engine.disable_overlap_schedule=false",
        ),
    ],
)
def test_a_strategy_that_a_release_does_not_take_is_refused(run, asked, words):
    assert words in run("model=qwen3_next_80b_a3b", "engine=sglang", "gpu=h200", *asked).reason


def test_the_strategy_has_the_releases_name_on_the_command_line(run):
    asked = ["model=qwen3_next_80b_a3b", "engine=sglang", "gpu=h200", "tp=4"]
    for version, name in (("0.5.9", "scheduler"), ("0.5.23", "radix-cache")):
        strategy = "engine.mamba_radix_cache_strategy=extra_buffer"
        flags = run(*asked, f"engine.version={version}", strategy).effective["flags"]
        assert f"--mamba-{name}-strategy extra_buffer" in flags


def test_a_model_without_attention_has_slots_of_states_and_tokens_without_memory(run):
    # 64 layers of 3 x 8192 channels in bf16 and 8192 x 16 states in fp32
    slot = 64 * (3 * 8192 * 2 + 8192 * 16 * 4)
    asked = ("model=falcon_mamba_7b", "engine=sglang", "gpu=h100")
    result = run(*asked)
    rest = result.budget.available_bytes + result.budget.part("kv_share").size_bytes
    slots = int((rest * 0.9 / 1.9 - slot) // slot)

    assert (result.num_blocks, result.block_bytes) == (slots, slot)
    assert f"at most {slots // 3} requests run at once" in result.notes
    assert f"max_mamba_cache_size: {slots}," in result.log_lines[0]
    # a token of 0 bytes: DefaultPoolConfigurator takes max_total_tokens, or one context
    assert (result.kv_tokens, result.max_concurrency) == (131072, 1.0)
    assert result.log_lines[-1].startswith("max_total_num_tokens=131072,")
    many = run(*asked, f"engine.max_total_tokens={10 * 131072}")
    assert (many.num_blocks, many.kv_tokens, many.max_concurrency) == (slots, 10 * 131072, 10.0)


def test_given_slots_of_a_model_without_attention(run):
    asked = ("model=falcon_mamba_7b", "engine=sglang", "gpu=h100")

    assert run(*asked, "engine.max_mamba_cache_size=60").num_blocks == 60
    # without a radix cache one slot a request is enough
    alone = run(*asked, "engine.disable_radix_cache=true", "max_num_seqs=40")
    assert (alone.num_blocks, "at most 40 requests run at once" in alone.notes) == (40, True)
    few = run(*asked, "engine.max_mamba_cache_size=2")
    assert few.refusal.kind == "no_memory"
    assert few.reason.startswith("2 slots of states are too few: one request takes 3")
    more = run(*asked, "engine.max_mamba_cache_size=20000")
    assert more.refusal.available_bytes < 0


@pytest.mark.parametrize(
    ("tokens", "length", "requests"),
    [
        (100_000, 8192, 4096),  # 12 x 512, capped
        (32_768, 8192, 2048),  # 4 x 512
        (20_000, 8192, 2048),  # at least 2048
        (3_000, 8192, 1500),  # half of the tokens
    ],
)
def test_running_requests_follow_tokens_and_context(deploy, tokens, length, requests):
    engine, deployment = deploy("sglang", f"max_model_len={length}")
    plan = engine.plan(deployment, [131072 * tokens])

    assert f"max_running_requests={requests}," in engine.log_lines(deployment, plan)[-1]


def test_a_negative_rest_is_refused_with_the_fraction_that_would_do(run):
    # ceil((1 - avail / pre) x 1000) / 1000
    result = run(
        *("model=llama3_8b", "engine=sglang", "gpu=h100", "gpu.free_bytes=78GiB", "util=0.15"),
        *("profiler.weights_bytes=15GiB", "profiler.non_torch_bytes=0"),
    )

    assert result.status is Status.infeasible
    assert result.num_blocks == 0
    assert "mem_fraction_static must be above 0.193" in result.reason
    assert result.budget.part("shortfall").size_bytes < 0


def test_what_is_not_settled_is_called_unverified(run):
    notes = run("model=gemma3_12b", "engine=sglang", "gpu=h100").notes

    assert any(n.startswith("unverified: a pool of its own") for n in notes)
    result = run("model=llama3_8b", "engine=sglang", "gpu=h100")
    assert result.profile.weights.provenance is Provenance.assumed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tp=3", "tp must be one of 1, 2, 4, 8, 16, 32"),
        ("max_model_len=9000", "at most 8192"),
        ("max_model_len=-1", "at least 1 for SGLang"),
        ("kv_dtype=int8_per_token_head", "kv_dtype must be one of"),
        ("engine.version=new", "SGLang version"),
    ],
)
def test_what_it_cannot_do_is_invalid(run, override, message):
    result = run("model=llama3_8b", "engine=sglang", "gpu=h100", override)

    assert result.status is Status.invalid
    assert message in result.reason


@pytest.mark.parametrize(
    ("free_gib", "fraction", "kv_tokens"),
    [  # Qwen2.5-1.5B on a GB10, jethac/dgx-spark-hijinks results/
        (112.26, 0.4, 1_557_709),
        (16.69, 0.4, 126_333),
    ],
)
def test_loading_takes_more_of_unified_memory(free_gib, fraction, kv_tokens):
    result = kvexp.run(
        [
            "engine=sglang",
            "model=qwen25_1_5b",
            "gpu=gb10",
            f"gpu.free_bytes={round(free_gib * 2**30)}",
            f"util={fraction}",
        ]
    )

    assert result.kv_tokens_low <= kv_tokens <= result.kv_tokens_high
    assert result.kv_tokens == pytest.approx(kv_tokens, rel=0.02)


def test_layers_that_read_an_earlier_cache_have_pools_too(deploy):
    """Gemma 4 E4B on a GB10: 79.94 GB were 997,846 and 798,276 tokens of 7 and 35 layers."""
    engine, deployment = deploy("sglang", "model=gemma4_e4b", "gpu=gb10")
    plan = engine.plan(deployment, [round(79.94 * GIB)])

    assert plan.kv_tokens == pytest.approx(997_846, rel=0.005 / 79.94)
    assert [group.num_layers for group in plan.groups] == [7, 35]


def test_what_was_free_before_the_load_follows_from_what_is_free_after_it(deploy):
    """Qwen3-14B on four RTX 4090: 16.00 GB free after 7.08 of load, 298,447 tokens at 0.8."""
    engine, deployment = deploy(
        *("sglang", "model=qwen3_14b", "gpu=rtx_4090", "tp=4", "util=0.8"),
        "engine.free_after_load_bytes=16.00GiB",
    )
    available = engine.quota(deployment, engine._predicted(deployment)).available_bytes
    plan = engine.plan(deployment, [available] * 4)

    assert deployment.free_bytes / GIB == pytest.approx(23.08, abs=0.1)
    assert plan.kv_tokens == pytest.approx(298_447, rel=0.003)
