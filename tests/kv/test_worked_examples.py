"""The worked examples of the specification, from the available bytes on."""

from itertools import pairwise

import pytest
from kv_cases import GIB, full, mamba, mla, named, pattern, plan, sliding

from kvexp.kv import CrossAttentionSpec, KVQuantMode, SlidingWindowMLASpec, pp_layer_ranges
from kvexp.kv import max_in_flight_tokens as in_flight

GPT_OSS = pattern(sliding(128, heads=8, head_size=64), full(heads=8, head_size=64), 24, every=2)
GEMMA_27B = pattern(sliding(1024, heads=16), full(heads=16), 62, every=6)


def figures(made):
    return made.num_blocks, f"{made.max_concurrency:.2f}", made.kv_cache_size_tokens


def test_01_llama_8b():
    made = plan(named((full(), 32)), 60_255_571_528, 131_072)
    assert made.bytes_per_block == 2_097_152
    assert made.blocks_per_request == 8192
    assert made.needed_bytes_per_worker == (17_179_869_184,)
    assert made.max_concurrency == 3.50732421875
    assert figures(made) == (28_732, "3.51", 459_712)
    assert made.describe() == "1 group of 32 layers: full"


def test_02_llama_70b_tp4_fp8_cache():
    spec = full(heads=2, dtype="uint8", kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    made = plan(named((spec, 80)), 38_916_094_024, 131_072)
    assert made.bytes_per_block == 655_360
    assert made.max_concurrency == 7.2486572265625
    assert figures(made) == (59_381, "7.25", 950_096)


def test_03_mistral_all_sliding_depends_on_async_scheduling():
    layers = named((sliding(4096), 32))
    for flag, blocks, concurrency, tokens in (
        (True, 1281, "7.99", 261_939),
        (False, 769, "13.32", 436_338),
    ):
        made = plan(
            layers, 20 * GIB, 32_768, max_in_flight_tokens=in_flight(8192, async_scheduling=flag)
        )
        assert made.blocks_per_request == blocks
        assert figures(made) == (10_240, concurrency, tokens)


def test_04_gpt_oss_20b():
    made = plan(GPT_OSS, 59_516_094_024, 131_072)
    assert made.bytes_per_block == 393_216
    assert made.blocks_per_request == 1033 + 8192
    assert made.needed_bytes_per_worker == (3_627_417_600,)
    assert made.max_concurrency == 16.407262872628728
    assert figures(made) == (151_357, "16.41", 2_150_532)
    assert made.describe() == "2 groups of 12 layers: 1 sliding + 1 full"


def test_05_gemma_27b_hybrid_on_and_off():
    made = plan(GEMMA_27B, 20 * GIB, 131_072)
    assert [group.num_layers for group in made.groups] == [9, 9, 9, 9, 8, 8, 10]
    assert made.bytes_per_block == 1_310_720
    assert made.needed_bytes_per_worker == (19_301_662_720,)
    assert made.max_concurrency == 1.112589976911585
    assert figures(made) == (16_384, "1.11", 145_829)
    off = plan(GEMMA_27B, 20 * GIB, 16_384, hybrid=False)
    assert off.bytes_per_block == 8_126_464
    assert off.blocks_per_request == 1024
    assert figures(off) == (2642, "2.58", 42_272)
    assert off.describe() == "1 group of 62 layers with pages of different sizes"


def test_06_deepseek_v3_and_dcp():
    layers = named((mla(), 61))
    made = plan(layers, 35 * GIB, 163_840)
    assert (made.num_blocks, made.blocks_per_request) == (8356, 2560)
    assert (made.max_concurrency, made.kv_cache_size_tokens) == (3.2640625, 534_784)
    spread = plan(layers, 35 * GIB, 163_840, dcp=8)
    assert spread.blocks_per_request == 320
    assert (spread.max_concurrency, spread.kv_cache_size_tokens) == (26.1125, 4_278_272)


def test_07_deepseek_v32_with_indexer():
    layer = mla(dtype="uint8", cache_dtype_str="fp8_ds_mla", strided=False)
    indexer = mla(head_size=132, dtype="uint8", strided=False)
    made = plan(named(*[layer, indexer] * 61), 35 * GIB, 163_840)
    assert made.bytes_per_block == 3_076_352
    assert made.needed_bytes_per_worker == (7_875_461_120,)
    assert figures(made) == (12_216, "4.77", 781_824)
    assert made.max_concurrency == 4.771875


def test_08_qwen3_next_tp2():
    state = mamba(262_144, ((3, 4096), (16, 128, 128)), page_size_padded=557_056)
    assert state.unpadded_page_size_bytes == 548_864
    attention = full(block_size=544, heads=1, head_size=256)
    made = plan(pattern(state, attention, 48, every=4), 30 * GIB, 262_144)
    assert made.bytes_per_block == 6_684_672
    assert made.blocks_per_request == 485
    assert made.block_size == 544
    assert made.max_concurrency == 9.934020618556701
    assert figures(made) == (4818, "9.93", 2_604_143)


def test_09_too_long_and_auto_fit():
    layers = named((full(), 32))
    refused = plan(layers, 6 * GIB, 131_072)
    assert (refused.code, refused.estimated_max_model_len) == ("max_len_too_large", 49_152)
    assert refused.needed_bytes == 16 * GIB
    fitted = plan(layers, 6 * GIB, 131_072, auto_fit=True)
    assert (fitted.max_model_len, fitted.num_blocks, fitted.max_concurrency) == (49_152, 3072, 1.0)
    gemma = pattern(sliding(1024, head_size=256), full(head_size=256), 48, every=6)
    tight = plan(gemma, int(3.2 * GIB), 131_072, batched=2048)
    assert tight.estimated_max_model_len == 26_736


def test_10_llama_405b_tp8_pp4():
    layers = named((full(heads=1), 126))
    ranges = pp_layer_ranges(126, 4)
    assert [last - first for first, last in ranges] == [31, 32, 32, 31]
    names = list(layers)
    workers = [{name: layers[name] for name in names[first:last]} for first, last in ranges]
    available = [9 * GIB, 9 * GIB + 12_345, 9 * GIB, 8 * GIB]
    flight = in_flight(8192, pp=4, v2_model_runner=True)
    assert flight == 5 * 8192
    made = plan(layers, available, 131_072, workers=workers, max_in_flight_tokens=flight)
    assert made.num_blocks_per_worker == (38_053, 36_864, 36_864, 33_825)
    assert made.max_concurrency == 4.1290283203125
    assert figures(made) == (33_825, "4.13", 541_200)


def _v4_model():
    """21 layers compressed 4-fold with an indexer, 20 compressed 128-fold, 2 of windows only."""
    v4 = {"dtype": "uint8", "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}

    def window(block_size, head_size, size, **more):
        return SlidingWindowMLASpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=head_size,
            sliding_window=size,
            alignment=576,
            **{"dtype": "float32", **more},
        )

    local = window(64, 512, 128, **v4)
    c4 = (
        local,
        mla(256, 512, alignment=576, compress_ratio=4, strided=False, **v4),
        window(4, 2048, 8),
        mla(256, 132, dtype="uint8", alignment=576, compress_ratio=4, strided=False),
        window(4, 512, 8),
    )
    c128 = (
        local,
        mla(256, 512, alignment=576, compress_ratio=128, strided=False, **v4),
        window(8, 1024, 128),
    )
    return named(*c4 * 21, *c128 * 20, local, local)


def test_11_deepseek_v4_like():
    made = plan(_v4_model(), 60 * GIB, 1_048_576)
    assert [group.num_layers for group in made.groups] == [62, 22, 21, 42, 20]
    assert [group.page_size_bytes for group in made.groups] == [
        1_002_240,
        823_680,
        786_240,
        967_680,
        748_800,
    ]
    assert made.bytes_per_block == 22 * 37_440 + 21 * 8640 + 20 * 1728
    assert made.needed_bytes_per_worker == (11_336_041_728,)
    assert figures(made) == (61_965, "6.19", 6_489_065)


def test_12_mimo_v2_flash_tp4():
    local = sliding(128, heads=2, head_size=192, head_size_v=128)
    whole = full(heads=1, head_size=192, head_size_v=128)
    made = plan(named((whole, 9), (local, 39)), 30 * GIB, 131_072)
    assert [group.block_size for group in made.groups] == [32, 16, 16, 16, 16, 16]
    assert [group.num_layers for group in made.groups] == [9, 8, 8, 8, 8, 7]
    assert made.bytes_per_block == 184_320
    assert made.blocks_per_request == 9261
    assert figures(made) == (174_762, "18.87", 2_473_426)


def test_13_twenty_full_and_thirty_sliding():
    made = plan(
        named((full(heads=8, head_size=128), 20), (sliding(1024, heads=8), 30)),
        20 * GIB,
        32_768,
    )
    assert [group.num_layers for group in made.groups] == [20, 15, 15]
    assert made.blocks_per_request == 2048 + 2 * 1089
    assert (made.num_blocks, f"{made.max_concurrency:.2f}") == (16_384, "3.88")


def test_14_override_one_block_short():
    refused = plan(named((full(), 32)), 60 * GIB, 8192, num_gpu_blocks_override=511)
    assert refused.code == "max_len_too_large"
    assert refused.available_bytes == 511 * 2_097_152
    assert refused.estimated_max_model_len == 8176


def test_15_gpt_oss_with_int4_cache():
    mode = {"dtype": "uint8", "kv_quant_mode": KVQuantMode.INT4_PER_TOKEN_HEAD}
    whole, local = full(head_size=64, **mode), sliding(128, head_size=64, **mode)
    assert (whole.page_size_bytes, local.page_size_bytes) == (9216, 17_408)
    made = plan(pattern(local, whole, 24, every=2), 20 * GIB, 131_072)
    assert made.bytes_per_block == 208_896 > 393_216 // 2


def test_16_falcon_mamba():
    layers = named((mamba(4096, ((3, 8192), (8192, 16))), 64))
    made = plan(layers, 20 * GIB, 4096)
    assert made.groups[0].page_size_bytes == 311_296
    assert (made.num_blocks, made.max_concurrency) == (1077, 1077.0)
    assert made.kv_cache_size_tokens == 1077 * 4096


def test_17_whisper():
    own = full(heads=20, head_size=64)
    cross = CrossAttentionSpec(
        block_size=16,
        num_kv_heads=20,
        head_size=64,
        dtype="bfloat16",
        indexes_kv_by_block_stride=True,
    )
    made = plan(named((own, 32), (cross, 32)), 20 * GIB, 448)
    assert made.blocks_per_request == 540
    assert figures(made) == (8192, "15.17", 6796)


def test_groups_in_words():
    gemma_12b = pattern(sliding(1024, head_size=256), full(head_size=256), 48, every=6)
    words = plan(gemma_12b, 16 * GIB, 131_072).describe()
    assert words == "6 groups of 8 layers: 5 sliding + 1 full"
    words = plan(GEMMA_27B, 20 * GIB, 131_072).describe()
    assert words == "7 groups of 8 to 10 layers: 6 sliding + 1 full"
    words = plan(_v4_model(), 60 * GIB, 1_048_576).describe()
    assert words == "5 groups of 20 to 62 layers: 5 with pages of different sizes"
    assert plan(named((mla(), 1)), GIB, 1000).describe() == "1 group of 1 layer: MLA"
    assert plan({}, GIB, 1000).describe() == "no layer keeps a KV cache"


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(61, 4, [15, 15, 16, 15]), (126, 4, [31, 32, 32, 31]), (7, 4, [2, 2, 2, 1]), (8, 2, [4, 4])],
)
def test_pipeline_stages(layers, stages, sizes):
    ranges = pp_layer_ranges(layers, stages)
    assert [last - first for first, last in ranges] == sizes
    assert ranges[0][0] == 0
    assert all(left[1] == right[0] for left, right in pairwise(ranges))


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (4, 0), (0, 1)])
def test_pipeline_stages_that_cannot_be(layers, stages):
    with pytest.raises(ValueError, match="cannot be cut"):
        pp_layer_ranges(layers, stages)
