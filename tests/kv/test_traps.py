"""The traps of a reimplementation, one test each.

T1 to T4 and T18 concern the memory budget, not the planner: they live with the vLLM engine's tests.
"""

import pytest
from kv_cases import GIB, full, mamba, mla, named, pattern, plan, sliding

from kvexp.kv import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVQuantMode,
    Plan,
    max_in_flight_tokens,
)
from kvexp.kv.promotion import promote
from kvexp.kv.rules import rules_for

GPT_OSS = pattern(sliding(128, head_size=64), full(head_size=64), 24, every=2)


def chunked(size=8192, **more):
    return ChunkedLocalAttentionSpec(
        attention_chunk_size=size,
        block_size=16,
        num_kv_heads=1,
        head_size=128,
        dtype=more.pop("dtype", "bfloat16"),
        indexes_kv_by_block_stride=True,
        **more,
    )


@pytest.mark.parametrize(
    ("pp", "asynchronous", "v2", "batches"),
    [
        (1, True, False, 2),
        (1, True, True, 2),
        (1, False, True, 1),
        (4, True, True, 5),
        (4, True, False, 4),
        (4, False, True, 4),
    ],
)
def test_t05_batches_in_flight(pp, asynchronous, v2, batches):
    assert max_in_flight_tokens(8192, pp, asynchronous, v2) == batches * 8192


def test_t06_tokens_are_not_blocks_times_block_size():
    small = plan(GPT_OSS, 20 * GIB, 131_072, batched=2048)
    large = plan(GPT_OSS, 20 * GIB, 131_072, batched=8192)
    assert small.num_blocks == large.num_blocks
    assert small.kv_cache_size_tokens > large.kv_cache_size_tokens
    assert large.kv_cache_size_tokens != large.num_blocks * large.block_size
    plain = plan(named((full(), 32)), 64 * GIB, 10_000, num_gpu_blocks_override=10_372)
    assert plain.max_concurrency * 10_000 == 165_951.99999999997
    assert plain.kv_cache_size_tokens == 165_951  # the exact quotient would be 165952


def test_t07_the_group_size_rule_is_strict():
    at_limit = plan(named((full(), 8), (sliding(1024), 12)), 20 * GIB, 8192)
    assert [group.num_layers for group in at_limit.groups] == [8, 6, 6]
    below = plan(named((full(), 8), (sliding(1024), 11)), 20 * GIB, 8192)
    assert [group.num_layers for group in below.groups] == [8, 11]


@pytest.mark.parametrize(
    "other",
    [
        sliding(2048),
        sliding(1024, page_size_padded=70_000),
        sliding(1024, strided=False),
    ],
    ids=["window", "padded page", "stride flag"],
)
def test_t08_buckets_are_by_full_equality(other):
    layers = named((full(block_size=16), 4), (sliding(1024), 4), (other, 4))
    kinds = [group.kind for group in plan(layers, 20 * GIB, 8192).groups]
    assert kinds == ["full", "sliding", "sliding"]


def test_t09_the_longest_group_of_a_worker_sets_its_block():
    layers = pattern(sliding(1024, heads=16), full(heads=16), 62, every=6)
    names = list(layers)
    halves = [{name: layers[name] for name in part} for part in (names[:31], names[31:])]
    whole = plan(layers, 20 * GIB, 131_072)
    cut = plan(layers, [20 * GIB] * 2, 131_072, workers=halves)
    assert whole.bytes_per_block == 10 * 131_072
    assert [group.num_layers for group in cut.groups] == [5, 5, 4, 4, 4, 4, 5]
    assert cut.bytes_per_block == 5 * 131_072


def test_t10_reported_block_size_is_the_smallest_group_s():
    layers = pattern(sliding(128, block_size=16), full(block_size=64), 24, every=2)
    made = plan(layers, 20 * GIB, 8192, block_size=64)
    assert [group.block_size for group in made.groups] == [64, 64]
    wide = pattern(sliding(128, heads=16, block_size=16), full(heads=1, block_size=64), 24, 2)
    assert plan(wide, 20 * GIB, 8192, block_size=64).block_size == 16


def test_t11_a_smaller_page_takes_more_tokens_not_padding():
    made = plan(named((full(heads=2), 8), (sliding(128, heads=8), 8)), 20 * GIB, 8192)
    small, large = made.groups
    assert small.page_size_bytes == large.page_size_bytes
    assert (small.block_size, large.block_size) == (64, 16)


def test_t12_int4_halves_full_layers_only_and_chunked_layers_lose_their_scales():
    mode = KVQuantMode.INT4_PER_TOKEN_HEAD
    heads = {"heads": 1, "dtype": "uint8", "kv_quant_mode": mode}
    assert full(**heads).page_size_bytes == 16 * 128 + 16 * 8
    assert sliding(128, **heads).page_size_bytes == 16 * 256 + 16 * 8
    local = chunked(dtype="int8", kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    whole = full(heads=1, dtype="int8", kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    kept = promote(named(whole, local), rules_for("0.26.0"))["layers.1"]
    assert local.page_size_bytes - kept.page_size_bytes == 16 * 8


def test_t13_two_windows_with_the_hybrid_manager_off_are_no_fallback():
    layers = named(full(), sliding(128), sliding(256))
    assert plan(layers, GIB, 4096, hybrid=False).code == "window_sizes_differ"
    assert isinstance(plan(layers, GIB, 4096), Plan)


def test_t14_mla_pages_do_not_shrink_with_tensor_parallelism():
    # A rank's heads: 8 KV heads over 4 and 16 ranks are 2 and 1; MLA has one latent vector.
    assert full(heads=2).page_size_bytes == 2 * full(heads=1).page_size_bytes
    assert mla().page_size_bytes == 64 * 576 * 2
    assert plan(named((mla(), 61)), [35 * GIB] * 8, 8192).bytes_per_block == 61 * 64 * 576 * 2


def test_t15_a_mamba_block_of_the_whole_length_costs_one_state():
    attention = full(block_size=544, heads=1, head_size=256)
    for block_size in (544, 262_144):
        state = mamba(block_size, ((3, 4096), (16, 128, 128)), page_size_padded=557_056)
        made = plan(pattern(state, attention, 48, every=4), 30 * GIB, 262_144)
        assert made.blocks_per_request == 3 + 482


def test_t16_the_check_ignores_the_null_block_and_counts_padding():
    layers = named((full(), 32))
    assert plan(layers, GIB, 8192).num_blocks == 512  # exactly one request
    assert plan(layers, GIB, 8192, rules=rules_for("0.33.0")).code == "max_len_too_large"
    padded = named((full(), 8), (sliding(1024), 9))
    made = plan(padded, 20 * GIB, 8192)
    layer_sum = 8 * 512 * 65_536 + 9 * 513 * 65_536
    assert made.needed_bytes_per_worker == (9 * (512 + 513) * 65_536,)
    assert made.needed_bytes_per_worker[0] > layer_sum


def test_t17_an_override_replaces_the_measured_memory():
    layers = named((full(), 32))
    assert plan(layers, GIB, 8192, num_gpu_blocks_override=511).code == "max_len_too_large"
    assert plan(layers, -5, 8192, num_gpu_blocks_override=600).num_blocks == 600
    assert plan(layers, GIB, 8192, num_gpu_blocks_override=0).code == "no_memory"
    fitted = plan(layers, GIB, 8192, num_gpu_blocks_override=100, auto_fit=True)
    assert (fitted.num_blocks, fitted.max_model_len) == (100, 1600)


def test_t19_a_uniform_type_group_sums_pages_and_floors_once():
    layers = named((full(heads=1), 3), (full(heads=2), 5))
    page = 16 * 256 * 2
    made = plan(layers, 10**9 + 7, 1000)
    assert made.groups[0].kind == "uniform_type"
    assert made.bytes_per_block == 13 * page
    assert made.num_blocks == (10**9 + 7) // (13 * page)


def test_t20_the_encoder_length_is_the_batched_tokens():
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=20, head_size=64, dtype="bfloat16")
    layers = named((full(heads=20, head_size=64, strided=False), 32), (cross, 32))
    assert plan(layers, 20 * GIB, 448).blocks_per_request == 28 + 8192 // 16
    given = plan(layers, 20 * GIB, 448, max_num_encoder_input_tokens=1500)
    assert given.blocks_per_request == 28 + 94


@pytest.mark.parametrize("available", [0, -1, -(10**12)])
def test_t21_nothing_left_is_refused_never_zero_blocks(available):
    refused = plan(named((full(), 32)), available, 8192)
    assert (refused.code, refused.worker, refused.available_bytes) == ("no_memory", 0, available)


def test_t22_dcp_divides_full_lengths_only():
    assert plan(named((full(), 32)), 20 * GIB, 1000, dcp=3).blocks_per_request == 21  # 334 tokens
    assert plan(named((mla(), 61)), 20 * GIB, 1000, dcp=3).blocks_per_request == 6
    assert plan(named((chunked(), 32)), 20 * GIB, 1000, dcp=3).blocks_per_request == 63
    assert plan(named((sliding(128), 32)), 20 * GIB, 1000, dcp=3).code == "AssertionError"
