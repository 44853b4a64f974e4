"""TensorRT-LLM's bytes of a token and its pools by window (`resource_manager.py`, 1.4.0rc4)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvexp.contract import Deployment, KvDtype, RankShape, layers

FP4_GROUP = 16  # elements that share one byte of scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Layers with one window on one rank; `window` is the longest request where all is kept."""

    window: int
    num_layers: int
    token_bytes: int


def token_bytes(deployment: Deployment, shape: RankShape) -> int:
    """Bytes of a token on one rank where every layer keeps it; a latent vector is not divided."""
    return sum(_layer_bytes(deployment, index) for index in layers.of_rank(shape))


def pools_of(
    deployment: Deployment, shape: RankShape, windows: Sequence[int] | None
) -> tuple[Pool, ...]:
    """One pool a distinct window, the longest first; without windows every layer keeps all."""
    by_window: dict[int, tuple[int, int]] = {}
    for index in layers.of_rank(shape):
        own = _layer_bytes(deployment, index)
        if not own:
            continue
        asked = windows[index % len(windows)] if windows else deployment.max_model_len
        window = min(asked, deployment.max_model_len)
        count, size = by_window.get(window, (0, 0))
        by_window[window] = (count + 1, size + own)
    return tuple(
        Pool(window=window, num_layers=count, token_bytes=size)
        for window, (count, size) in sorted(by_window.items(), reverse=True)
    )


def state_bytes(deployment: Deployment, shape: RankShape) -> int:
    """Recurrent states of one request on one rank, in the dtypes of the model."""
    convolution, recurrent = layers.state_elements(deployment, shape)
    model = deployment.model
    kept = model.mamba or model.linear
    dtype = (kept.state_dtype if kept is not None else None) or deployment.dtype
    return convolution * deployment.dtype.itemsize_bytes + recurrent * dtype.itemsize_bytes


def _layer_bytes(deployment: Deployment, index: int) -> int:
    """K and V, or the latent vector, and the key that picks tokens."""
    elements = sum(layers.kv_elements(deployment, index))
    if not elements:
        return 0
    return stored_bytes(elements, deployment.kv_dtype) + layers.indexer_bytes(deployment)


def stored_bytes(elements: int, kv_dtype: KvDtype) -> int:
    """fp8 takes one byte, nvfp4 half of one and a scale for each 16, others two or four."""
    if kv_dtype is KvDtype.nvfp4:
        return -(-elements // 2) + -(-elements // FP4_GROUP)
    return elements * layers.itemsize_bytes(kv_dtype)
