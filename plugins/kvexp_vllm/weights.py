"""weights_memory: what vLLM's loader leaves allocated on one rank.

Loading runs with the allocator's split limit at 20 MiB, so that a large tensor occupies whole
2 MiB units and a freed temporary may be taken over unsplit by a smaller tensor. Replaying the
allocations in the order of construction gives the engine's figure to the byte for bf16 models.
"""

from collections.abc import Iterator
from itertools import chain

from kvexp.contract import (
    MIB,
    CachingAllocator,
    Deployment,
    Quantization,
    RankShape,
    Slice,
    Tensor,
    weights,
)

SPLIT_LIMIT_BYTES = 20 * MIB
ATTENTION_SCALES = 4  # one-element fp32 buffers of an attention layer: q, k, v, prob
FP8_EXTRA_BYTES = 32 * MIB  # seen with fp8 KV (llama3-8b) and with fp8 weights (llama3.1-8b)
FP8_WEIGHTS_EXTRA_SCALARS = 5  # further one-element tensors a layer, one case


def share_of(deployment: Deployment, shape: RankShape) -> Slice:
    """The rank's share of the tensors."""
    return Slice(
        tp=deployment.tp,
        num_layers=shape.num_layers,
        first_stage=shape.pp_rank == 0,
        last_stage=shape.pp_rank == deployment.pp - 1,
    )


def weights_memory_bytes(deployment: Deployment, shape: RankShape) -> int:
    """Allocated bytes after loading on one rank (vLLM 0.26's `weights_memory`)."""
    allocator = CachingAllocator(max_split_size_bytes=SPLIT_LIMIT_BYTES)
    share = share_of(deployment, shape)
    for tensor in weights.embedding(deployment.model, share, deployment.dtype):
        allocator.allocate(tensor.size_bytes)
    for index in range(shape.num_layers):
        for tensor in _attention(deployment, share):
            allocator.allocate(tensor.size_bytes)
        if index == 0:
            _allocate_rope(allocator, deployment)
        for tensor in _rest_of_layer(deployment, share):
            allocator.allocate(tensor.size_bytes)
    for tensor in weights.head(deployment.model, share, deployment.dtype):
        allocator.allocate(tensor.size_bytes)
    return allocator.allocated_bytes + _extra_bytes(deployment, shape)


def _attention(deployment: Deployment, share: Slice) -> Iterator[Tensor]:
    return weights.attention(deployment.model, share, deployment.dtype, deployment.quantization)


def _rest_of_layer(deployment: Deployment, share: Slice) -> Iterator[Tensor]:
    model, dtype = deployment.model, deployment.dtype
    scale = Tensor(name="attn.scale", numel=1, itemsize_bytes=4, role="scale")
    return chain(
        (scale for _ in range(ATTENTION_SCALES)),
        weights.attention_norms(model, dtype),
        weights.mlp(model, share, dtype, deployment.quantization),
        weights.layer_norms(model, dtype),
    )


def _allocate_rope(allocator: CachingAllocator, deployment: Deployment) -> None:
    """The cos/sin cache of all layers, built in fp32 and cast, as the rotary embedding does."""
    model = deployment.model
    half_bytes = model.max_position_embeddings * (model.head_size // 2) * 4
    angles = [allocator.allocate(half_bytes) for _ in ("freqs", "cos", "sin")]
    table = allocator.allocate(2 * half_bytes)
    for block in angles:
        allocator.free(block)
    allocator.allocate(
        model.max_position_embeddings * model.head_size * deployment.dtype.itemsize_bytes
    )
    allocator.free(table)


def _extra_bytes(deployment: Deployment, shape: RankShape) -> int:
    """What the replay does not explain; both constants come from one case each."""
    fp8_weights = deployment.quantization is Quantization.fp8
    extra = FP8_EXTRA_BYTES if fp8_weights or deployment.kv_dtype.is_fp8 else 0
    if fp8_weights:
        extra += FP8_WEIGHTS_EXTRA_SCALARS * 512 * shape.num_layers
    return extra
