"""Published configs that name another model's type or state a size that the model does not have."""

import json

import pytest

from kvexp import weights
from kvexp.errors import InvalidValue
from kvexp.hf import read_model
from kvexp.request import Dspark

FALCON_MAMBA = {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "conv_kernel": 4,
    "expand": 16,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 64,
    "state_size": 16,
    "tie_word_embeddings": False,
    "time_step_rank": 256,
    "torch_dtype": "bfloat16",
    "use_conv_bias": True,
    "vocab_size": 65024,
}
MPT = {
    "architectures": ["MPTForCausalLM"],
    "model_type": "mpt",
    "attn_config": {"alibi": True},
    "d_model": 7168,
    "expansion_ratio": 4,
    "max_seq_len": 8192,
    "n_heads": 64,
    "n_layers": 48,
    "no_bias": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 50432,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_size": 4096,
    "max_position_embeddings": 262144,
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "state_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}
GROK2 = {
    "architectures": ["Grok1ForCausalLM"],
    "model_type": "git",
    "residual_moe": True,
    "hidden_size": 8192,
    "intermediate_size": 32768,
    "moe_intermediate_size": 16384,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "head_dim": 128,
    "vocab_size": 131072,
    "rope_theta": 208533496,
    "torch_dtype": "bfloat16",
}
GROK1 = {
    **{name: value for name, value in GROK2.items() if name != "residual_moe"},
    "architectures": ["Grok1ModelForCausalLM"],
    "model_type": "grok-1",
    "hidden_size": 6144,
    "num_attention_heads": 48,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
del GROK1["moe_intermediate_size"]
MISTRAL4 = {
    "architectures": ["Mistral4ForCausalLM"],
    "model_type": "mistral4",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 64,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "expert_dtype": "fp4",
    "hc_mult": 4,
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
# vLLM holds norms and projections of K and V in layers that read an earlier cache, transformers not
SHARED_LAYERS = 15 * (256 + 2 * 2 * 256 * 2048)


@pytest.fixture
def read(tmp_path):
    def reading(config):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return read_model(tmp_path / "config.json")

    return reading


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (FALCON_MAMBA, 7_272_665_088),
        (MPT, 29_957_200_896),
        (MISTRAL4, 118_972_826_624),
        (GEMMA3N, 6_835_235_568 + SHARED_LAYERS),
    ],
)
def test_tensors_are_those_of_transformers_classes(read, config, total):
    assert weights.parameters(read(config)) == total


def test_grok2_has_experts_beside_its_mlp(read):
    model = read(GROK2)

    assert (model.intermediate_size, model.moe.moe_intermediate_size) == (32768, 16384)
    assert round(weights.parameters(model) / 1e9, 1) == 269.5


def test_small_deepseek_models_have_plain_heads(read):
    """DeepSeek-OCR and VL2-tiny state the sizes of latent attention as 0."""
    none = {"kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0}
    heads = {"num_attention_heads": 10, "num_key_value_heads": 10, "hidden_size": 1280}
    model = read({"model_type": "deepseek_v2", **LLAMA, **none, **heads})

    assert (model.mla, model.head_dim, model.num_key_value_heads) == (None, 128, 10)


@pytest.mark.parametrize(
    ("kind", "version", "own"),
    [("minicpmv", 2.6, "qwen2"), ("minicpmv", 4.5, "qwen3"), ("minicpmo", None, "qwen2")],
)
def test_the_language_model_of_minicpm_goes_by_its_version(read, kind, version, own):
    model = read({**LLAMA, "model_type": kind, "version": version})

    assert model.model_type == own


def test_a_side_of_images_is_one_number_or_two(read):
    """InternVL's configs in transformers' spelling have two."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}

    def towers(image, patch):
        vision = {**sizes, "image_size": image, "patch_size": patch}
        return read({"model_type": "internvl", "text_config": LLAMA, "vision_config": vision})

    one, two = towers(448, 14), towers([448, 448], [14, 14])

    assert two.tower_parameters == one.tower_parameters > 300_000_000
    assert two.encoder == one.encoder


def test_a_fact_that_follows_from_others_is_named_with_the_file(tmp_path):
    config = {**MISTRAL4, "qk_nope_head_dim": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidValue, match=r"^config\.json: head_dim must be at most 65536, got"):
        read_model(tmp_path)
    with pytest.raises(InvalidValue, match=r"^model\.head_dim must be at least 1 "):
        read_model(tmp_path, given={"head_dim": 0})


def test_grok1_has_experts_alone(read):
    model = read(GROK1)
    one_expert = 3 * 6144 * 32768
    of_experts = weights.bytes_by_module(model, None)["experts"]

    assert model.moe.moe_intermediate_size == 32768
    assert of_experts == 2 * 64 * (8 * one_expert + 8 * 6144)  # with the router


def test_falcon_mambas_state_has_the_channels_of_its_intermediate_size(read):
    assert read(FALCON_MAMBA).mamba.intermediate_size == 8192


def test_mamba2_has_a_mixer_a_layer_and_no_decoder_to_assume(read, cached):
    # Mamba-Codestral-7B: 7,285,403,648 parameters, as transformers 5.17 counts them
    model = read(MAMBA2)

    assert weights.parameters(model) == 7_285_403_648
    assert model.notes == []
    layers, token_bytes, state_bytes = cached(model)
    assert (layers, token_bytes) == ({"mamba": 64}, 0)
    assert state_bytes == 64 * 2 * (3 * (8192 + 2 * 8 * 128) + 128 * 64 * 128)


def test_an_unknown_type_is_noted_once_as_a_gated_decoder(tmp_path):
    import kvexp

    config = {"model_type": "novel", "num_attention_heads": 8, "hidden_size": 512}
    config |= {"num_hidden_layers": 2, "intermediate_size": 1024, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = kvexp.run(["model=hf", f"model.path={tmp_path}", "gpu=h100"])

    assert [note for note in result.notes if "gated decoder" in note] == [
        "the structure of model_type 'novel' is not known: a gated decoder is assumed"
    ]


def test_mistral4_caches_its_latent_vector(read):
    model = read(MISTRAL4)

    assert model.mla.latent_cache
    assert 36 * model.mla.latent_size * 2 == 23_040


def test_ratios_of_deepseek_v4_give_its_layers(read):
    model = read(DEEPSEEK_V4)

    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    assert model.layer_types == ["sliding_attention"] * 2 + [sparse, heavy] * 20 + [sparse]
    assert (model.moe.format, model.quantization_config.method.value) == ("mxfp4", "fp8")
    assert (model.moe.num_hash_layers, model.compressed.index_topk) == (3, 512)
    assert model.dspark is None


def test_layers_of_deepseek_v4_that_draft_a_block_are_read(read):
    drafting = {"dspark_markov_rank": 128, "dspark_target_layer_ids": [40, 42]}

    assert read({**DEEPSEEK_V4, **drafting}).dspark == Dspark(num_target_layers=2, markov_rank=128)


def test_kinds_of_experts_of_deepseek_v4_are_read_as_transformers_writes_them(read):
    kinds = ["hash_moe"] * 2 + ["moe"] * 41
    model = read({**DEEPSEEK_V4, "num_hash_layers": None, "mlp_layer_types": kinds})

    assert (model.moe.num_hash_layers, model.moe.layers) == (2, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compress_ratios": [4] * 42}, "compress_ratios must be 43 of 0, 4 and 128"),
        ({"compress_ratios": [16] * 43}, "compress_ratios must be 43 of 0, 4 and 128"),
        ({"o_groups": None}, "o_groups is missing"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_wrong_sizes_of_deepseek_v4_are_refused(read, change, said):
    with pytest.raises(InvalidValue, match=said):
        read({**DEEPSEEK_V4, **change})
