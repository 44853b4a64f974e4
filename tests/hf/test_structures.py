"""Decoders whose layers differ from the common block, from small configs of their kind."""

import pytest

from kvexp import weights

from .shapes import latent

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
