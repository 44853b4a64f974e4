"""Published configs that name another model's type or state a size that the model does not have."""

import json

import pytest

from kvexp import weights
from kvexp.hf import read_model

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
K_NORMS_OF_SHARED_LAYERS = 15 * 256  # vLLM holds them, transformers' class does not


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
        (MISTRAL4, 118_972_826_624),
        (GEMMA3N, 6_835_235_568 + K_NORMS_OF_SHARED_LAYERS),
    ],
)
def test_tensors_are_those_of_transformers_classes(read, config, total):
    assert weights.parameters(read(config)) == total


def test_grok2_has_experts_beside_its_mlp(read):
    model = read(GROK2)

    assert (model.intermediate_size, model.moe.moe_intermediate_size) == (32768, 16384)
    assert round(weights.parameters(model) / 1e9, 1) == 269.5


def test_grok1_has_experts_alone(read):
    model = read(GROK1)
    one_expert = 3 * 6144 * 32768
    of_experts = weights.bytes_by_module(model, None)["experts"]

    assert model.moe.moe_intermediate_size == 32768
    assert of_experts == 2 * 64 * (8 * one_expert + 8 * 6144)  # with the router


def test_falcon_mambas_state_has_the_channels_of_its_intermediate_size(read):
    assert read(FALCON_MAMBA).mamba.intermediate_size == 8192


def test_mistral4_caches_its_latent_vector(read):
    model = read(MISTRAL4)

    assert model.mla.latent_cache
    assert 36 * model.mla.latent_size * 2 == 23_040
