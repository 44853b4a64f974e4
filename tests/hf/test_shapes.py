"""Published shapes of configs: what is read, and what the engine caches for it."""

import pytest

from .shapes import SHAPES

ROWS = [pytest.param(*row[1:], id=row[0]) for row in SHAPES if row[2] is not None]


def test_there_are_enough_shapes():
    assert len(ROWS) >= 40


@pytest.mark.parametrize(("config", "kinds", "token_bytes", "state_bytes"), ROWS)
def test_layout_is_the_engines(config, kinds, token_bytes, state_bytes, read, cached):
    assert cached(read(config)) == (kinds, token_bytes, state_bytes)


def shape(name):
    return next(row[1] for row in SHAPES if row[0] == name)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_latent_vectors_are_the_same_on_every_rank(tp, read, cached):
    assert cached(read(shape("deepseek_v3")), tp=tp)[1] == 70272


def test_a_type_without_latent_kernels_caches_expanded_heads(read, cached):
    kinds, token_bytes, _ = cached(read(shape("minicpm3_expanded")))

    assert kinds == {"full": 62}
    assert token_bytes == 62 * 40 * 2 * 96 * 2


@pytest.mark.parametrize(
    ("tp", "token_bytes"), [(1, 98304), (2, 49152), (4, 24576), (8, 24576), (16, 24576)]
)
def test_heads_are_replicated_beyond_their_number(tp, token_bytes, read, cached):
    assert cached(read(shape("qwen3_moe")), tp=tp)[1] == token_bytes


def test_a_layer_list_is_kept_as_short_as_it_repeats(read):
    assert read(shape("gemma3_listed")).layer_types == ["sliding_attention"] * 5 + [
        "full_attention"
    ]
    assert read(shape("llama3_gqa")).layer_types is None


def test_sections_of_a_multimodal_config_are_named(read):
    notes = read(shape("qwen25_omni")).notes

    assert any(note.startswith("config_path=thinker_config.text_config:") for note in notes)


def test_what_a_sparse_config_leaves_out_is_listed(read):
    model = read(shape("gemma3_12b_sparse"))

    assert (model.head_dim, model.vocab_size) == (256, 262208)
    for key in ("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        assert any(key in note for note in model.notes)
    assert 400_000_000 < model.tower_parameters < 450_000_000


def test_mllama_keeps_five_layers_of_four_tiles_of_its_images(read):
    config = shape("mllama")
    vision = {
        "model_type": "mllama_vision_model",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "image_size": 560,
        "max_num_tiles": 4,
        "patch_size": 14,
        "intermediate_layers_indices": [3, 7, 15, 23, 30],
    }
    encoder = read({"model_type": "mllama", "text_config": config, "vision_config": vision}).encoder

    assert (encoder.tokens_per_item, encoder.patches_per_item) == (4 * 1601, 4 * 1608)
    assert encoder.kept_layers == 5
