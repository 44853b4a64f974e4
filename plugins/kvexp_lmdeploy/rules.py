"""LMDeploy's block bytes, runtime reserve and defaults by card, backend and release."""

import re

from kvexp.contract import Deployment, InvalidValue, Knobs, KvDtype, RankShape, layers

BLOCK_SIZE, MAX_PREFILL_TOKENS, FRACTION = 64, 8192, 0.8
WIDE_HEAD, WIDE_HEAD_BLOCK = 512, 32
ALIGNMENT = 256
FEWEST_BLOCKS = 16
SPARE_SLOTS = 2
BATCH_BY_CARD = (("A100", 384), ("A800", 384), ("H100", 1024), ("H800", 1024), ("H200", 1024))
OTHER_BATCH = 128
QUANT_BITS = {KvDtype.int8_per_token_head: 8, KvDtype.int4_per_token_head: 4}
FP8_LATENT_BYTES = 656  # FlashMLA: 512 elements, their scales, the rotary part in 16 bit

REGION_SINCE = (0, 16)
FREE_SINCE = (0, 2, 2)
TOTAL_FRACTION = 0.5
"""Default where the ratio was one of the card's total."""

TURBOMIND_TYPES = (
    "deepseek_v2",
    "glm4",
    "glm4_moe_lite",
    "gpt_oss",
    "internlm2",
    "llama",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Model types that TurboMind takes; others fall to the PyTorch engine."""

STATE_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types with recurrent states (0.16: `pytorch/configurations`)."""


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a version.

    Raises:
        InvalidValue: it is no version.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise InvalidValue(
            f"engine.version must be an LMDeploy version such as 0.16.0, got {version!r}"
        )
    return tuple(int(number or 0) for number in match.groups())


def batch_of(card: str) -> int:
    """max_batch_size by the device's name."""
    return next((batch for name, batch in BATCH_BY_CARD if name in card), OTHER_BATCH)


def block_size(knobs: Knobs) -> int:
    """64 tokens; 32 for very wide heads.

    Raises:
        InvalidValue: another was asked for where a kernel has one.
    """
    if knobs.model.mla is None and knobs.model.head_size >= WIDE_HEAD:
        return WIDE_HEAD_BLOCK
    return knobs.block_size or BLOCK_SIZE


def pytorch_block_bytes(deployment: Deployment, shape: RankShape) -> int:
    """K, V and their quantisation's scales, each in whole 256 bytes, over the layers."""
    return sum(
        sum(_aligned(size) for size in _caches(deployment, index))
        for index in layers.of_rank(shape)
    )


def turbomind_block_bytes(deployment: Deployment, shape: RankShape) -> int:
    """K, V and quantisation parameters over the layers, without alignment."""
    return sum(sum(_caches(deployment, index)) for index in layers.of_rank(shape))


def _caches(deployment: Deployment, index: int) -> list[int]:
    """Bytes of one layer's caches in one block."""
    block, kv_dtype = deployment.block_size, deployment.kv_dtype
    k, v = layers.kv_elements(deployment, index)
    if not k:
        return []
    if deployment.model.mla is not None:
        if kv_dtype.is_fp8:
            return [block * FP8_LATENT_BYTES]
        return [block * k * layers.itemsize_bytes(kv_dtype)]
    bits = QUANT_BITS.get(kv_dtype)
    if bits is None:
        return [block * each * layers.itemsize_bytes(kv_dtype) for each in (k, v)]
    heads = max(1, deployment.model.heads(index).num_key_value_heads // deployment.tp)
    scales = 2 * heads * deployment.dtype.itemsize_bytes  # scale and zero of a head and token
    return [*(block * each * bits // 8 for each in (k, v)), block * scales, block * scales]


def runtime_bytes(deployment: Deployment, free_bytes: int, block_bytes: int) -> int:
    """What the PyTorch engine keeps for logits of a prefill and two decode batches.

    The prefill's tokens are halved until the fewest blocks fit; -1 where none does.
    """
    tokens = deployment.max_num_batched_tokens
    while tokens > 0:
        rows = tokens + 2 * deployment.max_num_seqs
        reserve = rows * deployment.model.vocab_size * 2
        left = int((free_bytes - reserve) * deployment.util)
        if left // block_bytes >= FEWEST_BLOCKS:
            return reserve
        tokens //= 2
    return -1


def slot_bytes(deployment: Deployment, shape: RankShape) -> tuple[int, int]:
    """Bytes of a request's convolution and recurrent state on one rank, in the model's dtypes."""
    convolution, recurrent = layers.state_elements(deployment, shape)
    model = deployment.model
    kept = model.mamba or model.linear
    dtype = (kept.state_dtype if kept is not None else None) or deployment.dtype
    return convolution * deployment.dtype.itemsize_bytes, recurrent * dtype.itemsize_bytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
