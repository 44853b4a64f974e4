"""What one layer caches on one rank, in elements, before any engine's layout and dtype."""

import math
from dataclasses import replace

from kvexp import cache
from kvexp.deployment import Deployment
from kvexp.dtypes import KvDtype
from kvexp.engine import RankShape
from kvexp.errors import InvalidValue
from kvexp.kv.specs import MambaSpec
from kvexp.request import CACHELESS

WINDOWED = ("sliding_attention", "chunked_attention")
"""Kinds of layers that need only the last tokens."""


def kv_elements(deployment: Deployment, index: int) -> tuple[int, int]:
    """Elements of K and of V for one token; a latent vector counts as K alone.

    KV heads are split over the tensor-parallel ranks and replicated beyond their number.

    Raises:
        InvalidValue: the caches are compressed, indexers are in some layers alone, or there are
            those of an encoder's output.
    """
    model = deployment.model
    if model.compressed is not None:
        raise InvalidValue(f"the compressed caches of {model.name} are known for engine=vllm only")
    if model.cross_attention:
        raise InvalidValue(
            f"the cross-attention caches of {model.name} are known for engine=vllm only"
        )
    if model.layer_type(index) in CACHELESS or not model.owns_cache(index):
        return 0, 0
    shared = model.mla is not None and model.mla.index_layers is not None
    if shared or model.block_indexer is not None:
        raise InvalidValue(f"the indexers of {model.name} are known for engine=vllm only")
    if model.mla is not None:
        return model.mla.latent_size, 0
    heads = model.heads(index)
    count = max(1, heads.num_key_value_heads // deployment.tp)
    return count * heads.head_dim, count * (heads.v_head_dim or heads.head_dim)


def is_windowed(deployment: Deployment, index: int) -> bool:
    """Whether a layer needs only the last tokens."""
    return deployment.model.layer_type(index) in WINDOWED


def window(deployment: Deployment) -> int:
    """Tokens that a windowed layer needs, 0 where the model has none."""
    return deployment.model.sliding_window or deployment.model.attention_chunk_size or 0


def of_rank(shape: RankShape) -> range:
    """The layers of one rank."""
    return range(shape.first_layer, shape.first_layer + shape.num_layers)


def indexer_bytes(deployment: Deployment) -> int:
    """Bytes a token and layer of the key that picks tokens: 8 bit, one scale for each 128."""
    mla = deployment.model.mla
    if mla is None or mla.index_head_dim is None:
        return 0
    return mla.index_head_dim + mla.index_head_dim // 128 * 4


def state_elements(deployment: Deployment, shape: RankShape) -> tuple[int, int]:
    """Elements of the convolution and of the recurrent state of one request on one rank.

    Those of drafted tokens, which vLLM keeps in the same state, are not among them.
    """
    convolution = recurrent = 0
    plain = replace(deployment, speculation=None)
    for spec in cache.layer_specs(plain, shape).values():
        if not isinstance(spec, MambaSpec):
            continue
        for sides in spec.shapes:
            if len(sides) == 2:
                convolution += math.prod(sides)
            else:
                recurrent += math.prod(sides)
    return convolution, recurrent


def itemsize_bytes(kv_dtype: KvDtype) -> int:
    """Bytes of an element of the plain formats."""
    return {KvDtype.bf16: 2, KvDtype.fp16: 2, KvDtype.fp32: 4}.get(kv_dtype, 1)
