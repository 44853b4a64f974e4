"""Which rules a version plans by, and what they change."""

import pytest
from kv_cases import GIB, full, mamba, named, pattern, plan, sliding

from kvexp.kv import PlanRefusal, rules_for
from kvexp.kv.rules import COLUMNS

GEMMA_3_12B = pattern(sliding(1024, head_size=256), full(head_size=256), 48, every=6)
LLAMA_8B = named((full(), 32))
VERSIONS = ["0.6.3", "0.8.5", "0.9", "0.10", "0.19", "0.26", "0.30.0", "0.33"]


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_attention_gives_the_same_blocks_everywhere(version):
    """Full attention alone: only the reserved block of the newest versions differs."""
    made = plan(LLAMA_8B, 20 * GIB, 8192, rules=rules_for(version))
    assert made.num_blocks == 10_240
    assert made.kv_cache_size_tokens == 163_840
    assert made.max_concurrency == 20.0
    assert made.bytes_per_block == 2 * 2**20


@pytest.mark.parametrize(
    ("version", "blocks", "tokens", "concurrency"),
    [
        ("0.6.3", 2730, 43_680, "5.33"),
        ("0.8.5", 2730, 43_680, "5.33"),
        ("0.9", 16_384, 43_680, "5.32"),
        ("0.10", 16_384, 43_680, "5.32"),
        ("0.19", 16_384, 43_680, "5.32"),
        ("0.20", 16_384, 43_680, "5.32"),
        ("0.21", 16_384, 43_619, "5.32"),
        ("0.26", 16_384, 43_619, "5.32"),
        ("0.30.0", 16_384, 43_619, "5.32"),
        ("0.33", 16_384, 43_619, "5.32"),
    ],
)
def test_gemma_3_at_a_short_length(version, blocks, tokens, concurrency):
    """At 8192 tokens no window saves anything, so only the way of counting differs."""
    made = plan(GEMMA_3_12B, 16 * GIB, 8192, rules=rules_for(version))
    figures = made.num_blocks, made.kv_cache_size_tokens, f"{made.max_concurrency:.2f}"
    assert figures == (blocks, tokens, concurrency)


def test_gemma_3_jump_in_printed_tokens_and_why():
    """The same pool prints 43k tokens up to 0.20 and several times as many from 0.21 on."""
    printed = {
        version: plan(GEMMA_3_12B, 16 * GIB, 131_072, rules=rules_for(version))
        for version in ("0.19", "0.20", "0.21", "0.26")
    }
    assert {made.num_blocks for made in printed.values()} == {16_384}
    tokens = {version: made.kv_cache_size_tokens for version, made in printed.items()}
    # 16384 blocks // 6 groups x 16 tokens; from 0.21 the windows hold 5 x 577 blocks only;
    # from 0.26 a window holds the tokens of both batches in flight: 5 x 1089.
    assert tokens["0.19"] == tokens["0.20"] == 16_384 // 6 * 16 == 43_680
    assert printed["0.21"].blocks_per_request == 8192 + 5 * 577
    assert printed["0.26"].blocks_per_request == 8192 + 5 * 1089
    assert tokens["0.21"] == int(16_384 / 11_077 * 131_072) == 193_868
    assert tokens["0.26"] == int(16_384 / 13_637 * 131_072) == 157_474
    assert "equal share" in printed["0.20"].why
    assert "in flight" in printed["0.21"].why
    assert printed["0.21"].why == printed["0.26"].why == rules_for("0.26").token_text


@pytest.mark.parametrize("version", ["0.9.0.1", "0.10.1.1"])
def test_a_release_mended_by_itself_is_a_version(version):
    """Both stand on PyPI, and vLLM prints them."""
    mended, release = rules_for(version), rules_for(version[:-2])
    assert (mended.column, mended.engine) == (release.column, release.engine)
    assert rules_for(f"{version}-v0").engine == "v0"


@pytest.mark.parametrize("version", ["0.20.1", "0.20.2"])
def test_a_patch_of_0_20_prints_tokens_as_0_21_does(version):
    """Logs: 2.36x of 262144 and 619,479 tokens of Qwen3.6-27B (noonghunna/club-3090#91), and
    1.98x and 519,920 of Gemma 4 26B (jethac/dgx-spark-hijinks), both 0.20.1."""
    patched, release, next_one = (
        plan(GEMMA_3_12B, 16 * GIB, 131_072, rules=rules_for(each))
        for each in (version, "0.20.0", "0.21.0")
    )
    assert patched.num_blocks == release.num_blocks
    assert patched.kv_cache_size_tokens == next_one.kv_cache_size_tokens
    assert patched.kv_cache_size_tokens != release.kv_cache_size_tokens


def test_bucket_rule_of_each_version():
    layers = named((full(), 8), (sliding(1024), 11))  # 11 = 1.375 x 8
    sizes = {
        version: [
            g.num_layers for g in plan(layers, 20 * GIB, 8192, rules=rules_for(version)).groups
        ]
        for version in ("0.11.0", "0.13.0", "0.18.0", "0.26.0")
    }
    assert sizes["0.11.0"] == sizes["0.13.0"] == [8, 6, 5]
    assert sizes["0.18.0"] == sizes["0.26.0"] == [8, 11]
    nearer = named((full(), 8), (sliding(1024), 9))
    assert len(plan(nearer, 20 * GIB, 8192, rules=rules_for("0.11.0")).groups) == 3
    assert len(plan(nearer, 20 * GIB, 8192, rules=rules_for("0.13.0")).groups) == 2


def test_context_parallelism_of_each_version():
    def blocks(version, **sizes):
        return plan(LLAMA_8B, 20 * GIB, 8192, rules=rules_for(version), **sizes).blocks_per_request

    assert [blocks(v, dcp=2) for v in ("0.9", "0.10.2", "0.22", "0.33")] == [512, 256, 256, 256]
    assert [blocks(v, dcp=2, pcp=2) for v in ("0.11", "0.13", "0.22", "0.26")] == [
        256,
        128,
        128,
        256,
    ]
    logged = plan(LLAMA_8B, 20 * GIB, 8192, rules=rules_for("0.13"), dcp=2)
    assert logged.kv_cache_size_tokens == 2 * 163_840


def test_the_placeholder_block_counts_from_0_30():
    for version, fits in (("0.26", True), ("0.28", True), ("0.30", False), ("0.33", False)):
        made = plan(LLAMA_8B, GIB, 8192, rules=rules_for(version))
        assert isinstance(made, PlanRefusal) != fits
    refused = plan(LLAMA_8B, GIB, 8192, rules=rules_for("0.33"))
    assert refused.available_bytes == GIB - 2 * 2**20
    assert refused.estimated_max_model_len == 8176


def test_one_request_of_the_longest_length_is_measured_by_the_first_group_before_0_19():
    layers = named((full(), 12), (sliding(1024), 12))
    needs = {
        version: plan(
            layers, 20 * GIB, 8192, batched=1024, rules=rules_for(version)
        ).needed_bytes_per_worker[0]
        for version in ("0.13", "0.14", "0.18", "0.19")
    }
    page, of_length, of_window = 65_536, 512, 129
    assert needs["0.14"] == needs["0.18"] == 12 * page * of_length
    assert needs["0.13"] == needs["0.19"] == 12 * page * (of_length + of_window)


def test_the_whole_model_is_checked_against_one_stage_up_to_0_16():
    stages = [named((full(), 16)), {f"late.{n}": full() for n in range(16)}]
    for version, fits in (("0.13", True), ("0.14", False), ("0.16", False), ("0.17", True)):
        made = plan(None, [600 * 2**20] * 2, 8192, rules=rules_for(version), workers=stages)
        assert isinstance(made, PlanRefusal) is not fits, version


def test_mamba_states_of_each_version():
    state = mamba(16, ((4, 64),), num_speculative_blocks=2)
    layers = named((state, 4))

    def blocks(version, mode):
        made = plan(layers, GIB, 1600, rules=rules_for(version), mamba_cache_mode=mode)
        return made.blocks_per_request

    assert [blocks("0.11", mode) for mode in ("none", "align", "all")] == [1, 1, 1]
    assert [blocks("0.13", mode) for mode in ("none", "align", "all")] == [100, 100, 100]
    assert [blocks("0.15", mode) for mode in ("none", "align", "all")] == [3, 4, 100]
    assert [blocks("0.21", mode) for mode in ("none", "align", "all")] == [3, 4, 100]
    assert [blocks("0.22", mode) for mode in ("none", "align", "all")] == [3, 4, 102]
    assert [blocks("0.26", mode) for mode in ("none", "align", "all")] == [3, 4, 102]
    assert [blocks("0.32", mode) for mode in ("none", "align", "all")] == [3, 4, 3]
    assert [blocks("0.33", mode) for mode in ("none", "align", "all")] == [3, 4, 3]


def test_v0_has_no_windows_and_checks_the_length_in_tokens():
    v0 = rules_for("0.6.3")
    refused = plan(GEMMA_3_12B, 16 * GIB, 131_072, rules=v0)
    assert (refused.code, refused.estimated_max_model_len) == ("max_len_too_large", 43_680)
    assert plan(LLAMA_8B, 2**20, 8192, rules=v0).code == "no_memory"
    workers = plan(LLAMA_8B, [20 * GIB, 19 * GIB], 8192, rules=v0)
    assert workers.num_blocks == min(workers.num_blocks_per_worker) == 9728
    assert plan(LLAMA_8B, GIB, 8192, rules=v0, num_gpu_blocks_override=700).num_blocks == 700


@pytest.mark.parametrize("version", ["0.6.3", "0.8.5", "0.13.0"])
def test_versions_that_cannot_fit_the_length(version):
    outcome = plan(LLAMA_8B, GIB, 131_072, rules=rules_for(version), auto_fit=True)
    assert outcome.code == "auto_fit_unsupported"
    assert version in outcome.message


def test_one_group_before_the_hybrid_manager():
    made = plan(GEMMA_3_12B, 16 * GIB, 8192, rules=rules_for("0.8.5"))
    assert made.describe() == "1 group of 48 layers: full"
    two_windows = named(full(), sliding(128), sliding(256))
    assert plan(two_windows, GIB, 512, rules=rules_for("0.8.5")).num_blocks > 0


@pytest.mark.parametrize(
    ("version", "column", "engine"),
    [
        ("0.5.4", "0.6.3", "v0"),
        ("0.7.3", "0.6.3", "v0"),
        ("0.8.5", "0.8.5", "v1"),
        ("0.8.5-v1", "0.8.5", "v1"),
        ("0.8.5-v0", "0.6.3", "v0"),
        ("0.10.0-v0", "0.6.3", "v0"),
        ("0.10.2-v1", "0.10.2", "v1"),
        ("0.8.4", "0.8.5", "v1"),
        ("0.9", "0.9.2", "v1"),
        ("v0.11.2", "0.11.0", "v1"),
        ("0.12.0", "0.12.0", "v1"),
        ("0.17.1", "0.17.0", "v1"),
        ("0.16.0", "0.15.0", "v1"),
        ("0.19.0rc1", "0.19.0", "v1"),
        ("0.25", "0.22.0", "v1"),
        ("0.26.0", "0.26.0", "v1"),
        ("0.27", "0.26.0", "v1"),
        ("0.29.1", "0.28.0", "v1"),
        ("0.32.0+cu130", "0.32.0", "v1"),
        ("0.40", "0.33.0", "v1"),
        ("1.0.0", "0.33.0", "v1"),
    ],
)
def test_the_column_of_a_version(version, column, engine):
    rules = rules_for(version)
    assert (rules.column, rules.engine, rules.version) == (column, engine, version)
    assert (rules.note == "") == (rules.column == version.split("-")[0])
    if rules.note:
        assert len(rules.note.splitlines()) == 1


@pytest.mark.parametrize(
    "version",
    ["", "latest", "0.26.0.", "26", "0.4.3", "0.26-v0", "0.6.3-v1", "0.11-v0", "x0.26", "0.26\n1"],
)
def test_versions_without_rules(version):
    with pytest.raises(ValueError, match=r"vLLM") as raised:
        rules_for(version)
    assert len(str(raised.value).splitlines()) == 1


def test_columns_are_in_order_and_every_one_has_its_facts_alone():
    numbers = [tuple(map(int, column.column.split("."))) for column in COLUMNS]
    assert numbers == sorted(numbers)
    assert len({column.column for column in COLUMNS}) == len(COLUMNS)
