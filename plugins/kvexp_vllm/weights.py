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
FORMULA_ERROR = 0.002  # the share that scales and buffers explain
CACHELESS = ("mamba", "linear_attention", "conv", "mlp")  # kinds of layers without attention
FP8_EXTRA_BYTES = 32 * MIB  # seen with fp8 KV (llama3-8b) and with fp8 weights (llama3.1-8b)
MXFP4_BYTES = 17 / 32  # of an element: half a byte, and one of scale for each 32
MXFP4_PADDING = 0.07  # two cases, 0.06 and 0.08
FP8_WEIGHTS_EXTRA_SCALARS = 5  # further one-element tensors a layer, one case


def share_of(deployment: Deployment, shape: RankShape, *, whole_experts: bool = False) -> Slice:
    """The rank's share of the tensors."""
    return Slice(
        tp=deployment.tp,
        num_layers=shape.num_layers,
        first_stage=shape.pp_rank == 0,
        last_stage=shape.pp_rank == deployment.pp - 1,
        whole_experts=whole_experts and deployment.tp > 1,
    )


def weights_memory_bytes(
    deployment: Deployment,
    shape: RankShape,
    *,
    whole_experts: bool = False,
    split_limit: bool = True,
) -> int:
    """Allocated bytes after loading on one rank (vLLM's `weights_memory`).

    `split_limit`: whether the version loads with the allocator's limit.
    """
    allocator = CachingAllocator(max_split_size_bytes=SPLIT_LIMIT_BYTES if split_limit else None)
    share = share_of(deployment, shape, whole_experts=whole_experts)
    rotary_caches: set[str] = set()
    for tensor in chain(
        weights.towers(deployment.model, share, deployment.dtype),
        weights.embedding(deployment.model, share, deployment.dtype),
    ):
        allocator.allocate(tensor.size_bytes)
    for index in range(shape.first_layer, shape.first_layer + shape.num_layers):
        for tensor in _attention(deployment, share, index):
            allocator.allocate(tensor.size_bytes)
        rotary = _rotary_cache(deployment, index)
        if rotary and rotary not in rotary_caches:
            rotary_caches.add(rotary)
            _allocate_rotary_cache(allocator, deployment, rotary)
        for tensor in _rest_of_layer(deployment, share, index):
            allocator.allocate(tensor.size_bytes)
    for tensor in weights.head(deployment.model, share, deployment.dtype):
        allocator.allocate(tensor.size_bytes)
    extra = _extra_bytes(deployment, shape) if split_limit else _copies_bytes(deployment, shape)
    beyond = adjusted_bytes(deployment) // (deployment.tp * deployment.pp)
    return max(0, allocator.allocated_bytes + extra + beyond)


def adjusted_bytes(deployment: Deployment) -> int:
    """What the checkpoint's tensors take beyond the formula, where it is too much to be scales."""
    model = deployment.model
    if model.checkpoint_bytes is None or deployment.dtype is not model.torch_dtype:
        return 0
    own = model.quantization_config.method if model.quantization_config else None
    if deployment.quantization is not own:
        return 0
    formula = sum(weights.bytes_by_module(model, own).values())
    beyond = model.checkpoint_bytes - formula
    return beyond if abs(beyond) > FORMULA_ERROR * model.checkpoint_bytes else 0


def _attention(deployment: Deployment, share: Slice, index: int) -> Iterator[Tensor]:
    return weights.attention(
        deployment.model, share, deployment.dtype, deployment.quantization, index
    )


def _rest_of_layer(deployment: Deployment, share: Slice, index: int) -> Iterator[Tensor]:
    model, dtype = deployment.model, deployment.dtype
    scale = Tensor(name="attn.scale", numel=1, itemsize_bytes=4, role="scale")
    scales = 0 if model.layer_type(index) in CACHELESS else ATTENTION_SCALES
    return chain(
        (scale for _ in range(scales)),
        weights.attention_norms(model, dtype, index),
        weights.mlp(model, share, dtype, deployment.quantization, index),
        weights.layer_norms(model, dtype),
    )


def _rotary_cache(deployment: Deployment, index: int) -> str:
    """Which of the model's rotary caches a layer uses, empty for none."""
    model = deployment.model
    kind = model.layer_type(index)
    if kind in CACHELESS or weights.rotary_size(model) == 0:
        return ""
    if kind == "full_attention" and model.attention_chunk_size is not None:
        return ""  # full layers between chunked ones carry no position
    if weights.architecture_of(model).local_rotary:
        return kind
    return "rotary"


def _allocate_rotary_cache(allocator: CachingAllocator, deployment: Deployment, kind: str) -> None:
    """The cos/sin cache, built in fp32 and cast, as the rotary embedding does.

    YaRN keeps the fp32 table: alone where heads are rotated, beside the cast one with MLA.
    """
    model, size = deployment.model, weights.rotary_size(deployment.model)
    scaling = model.rope_scaling or {}
    rope_type = scaling.get("rope_type")
    rows = model.max_position_embeddings
    if rope_type == "linear" and kind != "sliding_attention":
        rows = int(rows * float(scaling["factor"]))
    elif rope_type == "yarn":
        rows = int(_original(deployment) * float(scaling["factor"]))
    half_bytes = rows * (size // 2) * 4
    angles = [allocator.allocate(half_bytes) for _ in ("freqs", "cos", "sin")]
    table = allocator.allocate(2 * half_bytes)
    for block in angles:
        allocator.free(block)
    if rope_type != "yarn" or model.mla is not None:
        allocator.allocate(rows * size * deployment.dtype.itemsize_bytes)
    if rope_type != "yarn":
        allocator.free(table)


def _original(deployment: Deployment) -> int:
    """Positions before scaling; the longest ones where the config does not say."""
    scaling = deployment.model.rope_scaling or {}
    stated = scaling.get("original_max_position_embeddings")
    return int(stated or deployment.model.max_position_embeddings)


def _extra_bytes(deployment: Deployment, shape: RankShape) -> int:
    """What the replay does not explain; both constants come from one case each."""
    fp8_weights = deployment.quantization is Quantization.fp8
    extra = FP8_EXTRA_BYTES if fp8_weights or deployment.kv_dtype.is_fp8 else 0
    if fp8_weights:
        extra += FP8_WEIGHTS_EXTRA_SCALARS * 512 * shape.num_layers
    return extra


def _copies_bytes(deployment: Deployment, shape: RankShape) -> int:
    """What loading left beside the tensors before 0.21, from start-up logs of 0.11 to 0.19.

    MLA keeps its up-projection twice, in the order of both of its uses; the mxfp4 kernels pad the
    experts further.
    """
    model, extra = deployment.model, 0
    if model.mla is not None and model.mla.latent_cache:
        heads = model.num_attention_heads // deployment.tp
        up = heads * (model.mla.qk_nope_head_dim + model.mla.v_head_dim) * model.mla.kv_lora_rank
        extra += up * deployment.dtype.itemsize_bytes * shape.num_layers
    if model.moe is not None and model.moe.format == "mxfp4":
        width = model.moe.moe_intermediate_size // deployment.tp
        elements = 3 * model.moe.num_experts * width * model.hidden_size * shape.num_layers
        extra += int(elements * MXFP4_BYTES * MXFP4_PADDING)
    return extra
