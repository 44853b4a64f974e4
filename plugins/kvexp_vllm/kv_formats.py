"""Dtypes of the cache: what `auto` is, and which models a format's kernels take.

vLLM's `CacheDType`, the lists of its attention backends on CUDA, and `turboquant/config.py`, from
the wheels of 0.20 to 0.26. `fp8_inc` is of another platform.
"""

from kvexp.contract import Deployment, DType, InvalidValue, Knobs, KvDtype, Model, Part
from kvexp_vllm import parts
from kvexp_vllm.rules import patch_release_of

HYBRID_TURBOQUANT_SINCE, ALIGNED_SINCE = (0, 22, 0), (0, 25, 0)
WORKSPACE_SINCE = (0, 24, 0)
CACHE_SCHEMES_SINCE = (0, 14, 0)  # utils/torch_utils.py, resolve_kv_cache_dtype_string
KV_SPLITS = 32  # `tq_max_kv_splits_for_cuda_graph`
SMALLEST_BLOCK = 16  # tokens
BOUNDARY_LAYERS = 2
"""Layers at each end that TurboQuant leaves in the compute dtype (`get_boundary_skip_layers`)."""

OF_LATENTS = ("bf16", "fp16", "fp32", "fp8", "fp8_e4m3")
"""Formats that kernels of latent attention take, and `fp8_ds_mla` those of sparse attention."""


def resolve(knobs: Knobs, dtype: DType, version: str) -> KvDtype:
    """Read auto as the checkpoint's KV scheme where the release does, else the compute dtype.

    Raises:
        InvalidValue: no kernel takes the format with this model.
    """
    model, asked = knobs.model, knobs.kv_dtype
    if asked is KvDtype.auto:
        if model.model_type == "deepseek_v32" or model.compressed is not None:
            return KvDtype.fp8  # the sparse kernels' own format; GLM-5 keeps the compute dtype
        reads = patch_release_of(version) >= CACHE_SCHEMES_SINCE
        return (model.kv_cache_scheme if reads else None) or KvDtype[dtype.name]
    if model.compressed is not None and not asked.is_fp8:
        raise InvalidValue(f"kv_dtype must be auto or fp8 for {model.name}, got {asked.name}")
    if asked is KvDtype.fp32 and dtype is not DType.fp32:
        raise InvalidValue(f"kv_dtype=fp32 needs dtype=fp32 with vLLM, got dtype={dtype.name}")
    sparse = model.compressed is not None or (model.mla and model.mla.index_head_dim is not None)
    if asked is KvDtype.fp8_ds_mla and not sparse:
        raise InvalidValue(
            f"kv_dtype=fp8_ds_mla needs sparse latent attention, {model.name} has none"
        )
    if model.mla is not None and asked.name not in (*OF_LATENTS, "fp8_ds_mla"):
        allowed = ", ".join(("auto", *OF_LATENTS))
        raise InvalidValue(
            f"kv_dtype must be one of {allowed} for the latent attention of {model.name},"
            f" got {asked.name}"
        )
    if asked.is_turboquant:
        _check_turboquant(model, asked, dtype, version)
    return asked


def _check_turboquant(model: Model, asked: KvDtype, dtype: DType, version: str) -> None:
    kinds = {model.layer_type(index) for index in range(model.num_hidden_layers)}
    windows = sorted(kinds & {"sliding_attention", "chunked_attention", "cross_attention"})
    if windows or model.cross_attention or model.is_attention_free:
        what = windows[0] if windows else "no full attention alone"
        raise InvalidValue(f"kv_dtype={asked.name} needs full attention, {model.name} has {what}")
    if model.is_hybrid and patch_release_of(version) < HYBRID_TURBOQUANT_SINCE:
        raise InvalidValue(
            f"kv_dtype={asked.name} needs vLLM 0.22 or newer for the recurrent states of"
            f" {model.name}, got engine.version={version}"
        )
    if dtype is DType.fp32:
        raise InvalidValue(f"kv_dtype={asked.name} needs dtype bf16 or fp16, got fp32")


def skip_layers(model: Model, kv_dtype: KvDtype) -> frozenset[int]:
    """Layers whose cache keeps the compute dtype (`kv_cache_dtype_skip_layers`)."""
    if not kv_dtype.is_turboquant or model.is_hybrid:
        return frozenset()
    layers = range(model.num_hidden_layers)
    few = min(BOUNDARY_LAYERS, len(layers) // 2)
    return frozenset((*layers[:few], *layers[len(layers) - few :]))


def aligned_block_size(block_size: int, version: str, skipped: frozenset[int]) -> int:
    """Tokens of a block of packed layers, whose page is no smaller than the least of those skipped.

    `_align_heterogeneous_kv_block_size`, which takes a packed element for a byte.
    """
    if not skipped or patch_release_of(version) < ALIGNED_SINCE:
        return block_size
    return block_size * -(-2 * SMALLEST_BLOCK // block_size)


def workspace(deployment: Deployment) -> list[Part]:
    """What TurboQuant's kernels reserve after the profile (`_reserve_workspace`).

    The splits of a decode's attention, or keys and values of the longest request unpacked in 16
    bits, whichever is more.
    """
    if not _reserves(deployment):
        return []
    model, tp = deployment.model, deployment.tp
    heads, size = model.num_attention_heads // tp, model.head_size
    rows = deployment.max_num_seqs * heads
    split = rows * (4 * KV_SPLITS * (size + 1) + deployment.dtype.itemsize_bytes * size + 4)
    blocks = -(-(deployment.max_model_len - 1) // deployment.block_size)
    unpacked = 4 * deployment.kv_heads_per_rank * blocks * deployment.block_size * size
    why = "attention by splits, or the longest request unpacked"
    return [parts.derived("turboquant_workspace", max(split, unpacked), why)]


def notes(deployment: Deployment) -> list[str]:
    """What is not known of a format."""
    if not deployment.kv_dtype.is_turboquant:
        return []
    if _reserves(deployment):
        return ["no measurement of a TurboQuant cache"]
    return ["no measurement of a TurboQuant cache, whose buffers before vLLM 0.24 are not counted"]


def _reserves(deployment: Deployment) -> bool:
    is_packed = deployment.kv_dtype.is_turboquant
    return is_packed and patch_release_of(deployment.engine_version) >= WORKSPACE_SINCE
