"""Decoders whose layers differ from the common block, from small configs of their kind."""

import pytest

from kvexp import weights
from kvexp.errors import InvalidValue

from .shapes import MAMBA2, dense, latent

GLM52 = latent(
    "glm_moe_dsa",
    10,
    64,
    q_lora_rank=2048,
    index_head_dim=128,
    index_n_heads=32,
    index_topk_freq=4,
    index_skip_topk_offset=3,
)
LATENT_BYTES, KEY_BYTES = 576 * 2, 132
"""Of a token: the latent vector, and an indexer's key in 8 bits."""


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"index_topk_pattern": "FFFSSSFSSS"},
        {"index_topk_freq": 1, "indexer_types": [*["full"] * 3, *["shared"] * 3] * 2},
    ],
)
def test_layers_without_an_indexer_cache_no_key_of_it(read, cached, said):
    kinds, token_bytes, _ = cached(read({**GLM52, **said}))
    indexers = 6 if "indexer_types" in said else 4

    assert kinds == {"mla": 10 + indexers}
    assert token_bytes == 10 * LATENT_BYTES + indexers * KEY_BYTES


def test_an_indexer_is_in_its_layers_alone(read):
    alone, shared = read({**GLM52, "index_topk_freq": 1}), read(GLM52)
    indexer = 2048 * 32 * 128 + 1024 * 128 + 32 * 1024 + 2 * 128

    assert weights.parameters(alone) - weights.parameters(shared) == 6 * indexer


WINDOWS = ["full_attention", *["sliding_attention"] * 3]
HUNYUAN = dense(
    "hunyuan",
    4,
    *(8, 2, 128),
    architectures=["HunYuanMoEV1ForCausalLM"],
    intermediate_size=512,
    moe_intermediate_size=[512] * 4,
    moe_topk=[2] * 4,
    num_shared_expert=[1] * 4,
    num_experts=8,
    use_mixed_mlp_moe=True,
)
LAGUNA = dense(
    "laguna",
    4,
    *(6, 2, 128),
    num_attention_heads_per_layer=[6, 8, 8, 8],
    layer_types=WINDOWS,
    mlp_layer_types=["dense", *["sparse"] * 3],
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    sliding_window=512,
)
STEP = dense(
    "step3p5",
    4,
    *(6, None, 128),
    num_attention_groups=2,
    attention_other_setting={
        "num_attention_heads": 8,
        "num_attention_groups": 2,
        "head_dim": 128,
    },
    layer_types=WINDOWS,
    sliding_window=512,
    moe_layers_enum="1, 2,3",
    moe_num_experts=8,
    moe_top_k=2,
    moe_intermediate_size=256,
    share_expert_dim=256,
    rope_theta=[5e6, 1e4, 1e4, 1e4],
    partial_rotary_factors=[0.5, 1.0, 1.0, 1.0],
)
FALCON_H1 = dense("falcon_h1", 4, 8, 2, 128, mamba_d_ssm=3072, **MAMBA2)
BAMBA = dense("bamba", 4, 8, 2, 128, attn_layer_indices=[1], **{**MAMBA2, "mamba_expand": 3})


def block(heads=8, multiple=3.0, **attention):
    own = {"n_heads_in_group": heads, "no_op": False, "replace_with_linear": False}
    mlp = {"ffn_mult": multiple, "no_op": multiple is None, "replace_with_linear": False}
    return {"attention": {**own, **attention}, "ffn": mlp}


NO_ATTENTION = block(None, 1.5, no_op=True)
NAS = dense(
    "nemotron-nas",
    3,
    *(16, None, None),
    intermediate_size=None,
    block_configs=[block(), NO_ATTENTION, block(multiple=None)],
)


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (HUNYUAN, 132_687_872),
        (LAGUNA, 103_088_152),
        (STEP, 103_088_152),  # the same sizes in Step's words
        (FALCON_H1, 140_257_856),
        ({**FALCON_H1, "mamba_rms_norm": True}, 140_270_144),
        (BAMBA, 122_637_488),
    ],
    ids=["hunyuan", "laguna", "step", "falcon_h1", "falcon_h1_normed", "bamba"],
)
def test_tensors_are_those_of_transformers_classes(read, config, total):
    assert weights.parameters(read(config)) == total


def test_a_falcon_multiplies_its_projection_by_numbers_that_no_checkpoint_has(read):
    model = read(FALCON_H1)
    share = weights.Slice(tp=2, num_layers=4, first_stage=True, last_stage=True)
    tensors = weights.attention(model, share, model.torch_dtype, None, 0)
    (own,) = (tensor for tensor in tensors if tensor.role == "buffer")

    assert own.numel == (2 * 3072 + 2 * 2 * 128 + 48) // 2  # the group is on both ranks


def test_pruned_layers_have_what_their_blocks_state(read, cached):
    model = read(NAS)
    hidden, heads = 1024, 16 * 64
    attention = hidden * (heads + 2 * 128) + heads * hidden + hidden
    mlps = 3 * hidden * (2048 + 1024) + 2 * hidden

    assert model.intermediate_sizes == [2048, 1024, 0]
    assert weights.parameters(model) == 2 * attention + mlps + 2 * 32000 * hidden + hidden
    assert cached(model) == ({"full": 2}, 2 * 2 * 2 * 64 * 2, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"block_configs": [block()] * 2}, "block_configs must be 3 blocks, got 2"),
        ({"block_configs": [block(), block(), {"ffn": {}}]}, "blocks with attention each"),
        ({"block_configs": [block(8), block(4), block(8)]}, "blocks with one n_heads_in_group"),
        ({"block_configs": [block(replace_with_linear=True)] * 3}, "replace_with_linear must be"),
        ({"block_configs": [block(window_length=512)] * 3}, "window_length must be null"),
        ({"model_type": "llama"}, "block_configs belongs to a cache that is not known"),
    ],
)
def test_blocks_that_are_not_known_are_refused(read, changed, said):
    with pytest.raises(InvalidValue, match=said):
        read({**NAS, **changed})


def test_experts_that_differ_from_layer_to_layer_are_refused(read):
    with pytest.raises(InvalidValue, match="moe_topk must be one number for all layers"):
        read({**HUNYUAN, "moe_topk": [2, 2, 4, 4]})
    with pytest.raises(InvalidValue, match="moe_topk must be a whole number, got 'two'"):
        read({**HUNYUAN, "moe_topk": ["two"] * 4})


@pytest.mark.parametrize("heads", [[6, 8, 8], [6, 8, 4, 8], [8, 8, 8, 8]])
def test_heads_that_differ_among_alike_layers_are_refused(read, heads):
    with pytest.raises(InvalidValue, match="one number for the layers of"):
        read({**LAGUNA, "num_attention_heads_per_layer": heads})


def test_full_layers_say_how_positions_turn_where_each_layer_does(read):
    model = read({**STEP, "layer_types": WINDOWS[::-1], "rope_theta": [1e4, 1e4, 1e4, 5e6]})

    assert model.rope_theta == 5e6
    assert model.rope_scaling == {"partial_rotary_factor": 1.0}
    with pytest.raises(InvalidValue, match="rope_theta must be more than 3 values"):
        read({**STEP, "layer_types": WINDOWS[::-1], "rope_theta": [1e4]})


def test_layers_with_experts_in_a_text_are_numbers(read):
    assert read(STEP).moe.first_k_dense_replace == 1
    with pytest.raises(InvalidValue, match="moe_layers_enum must be numbers of layers"):
        read({**STEP, "moe_layers_enum": "1,b"})


LING = dense(
    "bailing_moe",
    2,
    *(8, 2, 128),
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    num_shared_experts=2,
    first_k_dense_replace=1,
    rotary_dim=64,
)


def test_lings_second_generation_is_told_by_its_class(read):
    first, second = read(LING), read({**LING, "architectures": ["BailingMoeV2ForCausalLM"]})

    assert (first.model_type, second.model_type) == ("bailing_moe", "bailing_moe_v2")
    assert weights.parameters(second) - weights.parameters(first) == 2 * 2 * 128 + 8
    assert first.moe.shared_intermediate_size == 2 * 256
    assert weights.rotary_size(first) == 64
    one = read({**LING, "moe_shared_expert_intermediate_size": 384})
    assert one.moe.shared_intermediate_size == 2 * 384


def test_a_list_of_blocks_says_how_many_layers_there_are_and_which_have_experts(read):
    blocks = ["mamba", "moe", "attention", "mlp", "moe"]
    config = dense(
        "nemotron_h",
        None,
        *(8, 2, 128),
        layers_block_type=blocks,
        mamba_num_heads=32,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
    )
    model = read(config)

    assert model.layer_types == ["mamba", "mlp", "full_attention", "mlp", "mlp"]
    assert [model.has_experts(index) for index in range(5)] == [False, True, False, False, True]


SPARSE = [0, 1, 1, 1]
MINIMAX_M3 = dense(
    "minimax_m3",
    4,
    *(16, 4, 128),
    dense_intermediate_size=2048,
    intermediate_size=512,
    moe_layer_freq=SPARSE,
    num_local_experts=8,
    num_experts_per_tok=2,
    shared_intermediate_size=512,
    sparse_attention_config={
        "sparse_attention_freq": SPARSE,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
    },
)


def test_an_indexer_of_blocks_has_a_key_beside_whole_heads(read, cached):
    model = read(MINIMAX_M3)

    assert cached(model) == ({"full": 4, "mla": 3}, 4 * 2 * 4 * 128 * 2 + 3 * 128 * 2, 0)
    assert (model.intermediate_size, model.moe.moe_intermediate_size) == (2048, 512)
    without = read({**MINIMAX_M3, "sparse_attention_config": {"use_sparse_attention": False}})
    indexer = 1024 * 5 * 128 + 2 * 128
    assert weights.parameters(model) - weights.parameters(without) == 3 * indexer


def test_whole_attention_behind_sparse_layers_is_refused(read):
    sparse = {**MINIMAX_M3["sparse_attention_config"], "sparse_attention_freq": [0, 1, 0, 1]}
    with pytest.raises(InvalidValue, match="sparse_attention_freq must be zeros, then ones"):
        read({**MINIMAX_M3, "sparse_attention_config": sparse})


def test_the_first_qwen_states_the_width_of_gate_and_up_together(read):
    model = read(dense("qwen", 2, 8, None, None, intermediate_size=4096))
    layer = 4 * 1024 * 1024 + 3 * 1024 + 3 * 1024 * 2048 + 2 * 1024

    assert (model.intermediate_size, model.attention_bias) == (2048, True)
    assert weights.parameters(model) == 2 * layer + 2 * 32000 * 1024 + 1024
