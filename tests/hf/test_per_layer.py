"""Gemma 3n: embeddings of every layer, low-rank residuals, copies, caches that layers share."""

import pytest

from kvexp import weights
from kvexp.errors import InvalidValue

GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "hidden_size": 64,
    "intermediate_size": [128] * 10,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "vocab_size_per_layer_input": 900,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 8,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 5,
    "sliding_window": 32,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000.0,
}


def test_parameters_are_those_of_the_model_class(read):
    # transformers 5.17's Gemma3nForCausalLM; the published files hold K and V of sharing layers too
    without_shared = 805232
    shared = 5 * (2 * 2 * 16 * 64 + 16)

    assert weights.parameters(read(GEMMA3N)) == without_shared + shared


def test_layers_that_share_own_no_cache(read, cached):
    assert cached(read(GEMMA3N)) == ({"full": 1, "sliding": 4}, 5 * 2 * 2 * 16 * 2, 0)


def test_tensors_are_those_of_vllms_own_class(read):
    # parameters of vLLM 0.26.0's Gemma3nForCausalLM in bf16, tables padded to multiples of 64
    model = read(GEMMA3N)
    tables = (1024 - 1000) * 64 + (960 - 900) * 10 * 32
    wide = 10 * 64 * 2  # one scale for each of the hidden states is fp32

    assert 2 * (weights.parameters(model) + tables) + wide == 1694336


@pytest.mark.parametrize(("key", "step"), [("vocab_size_per_layer_input", 10 * 32)])
def test_a_row_more_of_the_table_is_a_row_of_all_layers(read, key, step):
    more = {**GEMMA3N, key: GEMMA3N[key] + 7}

    assert weights.parameters(read(more)) - weights.parameters(read(GEMMA3N)) == 7 * step


def test_the_published_e4b_is_read_without_its_defaults(read):
    sizes = {"hidden_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 35}
    config = {"model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"], **sizes}
    model = read({**config, "dtype": "bfloat16"})

    assert model.per_layer_input.hidden_size_per_layer_input == 256
    assert model.num_kv_shared_layers == 15
    assert any("laurel_rank is not given: 64" in note for note in model.notes)
    assert weights.parameters(model) == pytest.approx(6.87e9, rel=0.01)  # E4B's text model


def test_widths_that_differ_by_layer_are_refused(read):
    with pytest.raises(InvalidValue, match="intermediate_size must be one width for all layers"):
        read({**GEMMA3N, "intermediate_size": [128] * 9 + [256]})


def test_gemma_4_has_the_table_alone(read):
    facts = ("altup_num_inputs", "laurel_rank", "sliding_window", "layer_types")
    config = {name: value for name, value in GEMMA3N.items() if name not in facts}
    config |= {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    config |= {"layer_types": ["full_attention"] * 10, "num_kv_shared_layers": 0}
    config |= {"intermediate_size": 128, "global_head_dim": 16, "num_global_key_value_heads": 2}
    plain = read({**config, "hidden_size_per_layer_input": 0})
    model = read(config)

    layer = 2 * 32 * 64 + 64  # gate, projection, norm
    table = 900 * 320 + 320 * 64 + 32
    assert weights.parameters(model) - weights.parameters(plain) == 10 * layer + table
