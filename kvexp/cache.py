"""From a deployment to blocks: which layers cache what, then the planner's arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvexp.deployment import Deployment
from kvexp.engine import CachePlan, RankShape
from kvexp.errors import InvalidValue
from kvexp.kv import Plan, PlannerRules, PlanRefusal, PlanRequest, plan_cache
from kvexp.kv import max_in_flight_tokens as max_in_flight_tokens
from kvexp.kv import pp_layer_ranges as pp_layer_ranges
from kvexp.kv import rules_for as _rules_for
from kvexp.kv.dtypes import kv_quant_mode, storage_dtype
from kvexp.kv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvexp.results import KvGroup, Refusal
from kvexp.units import gib


def rules_for(version: str) -> PlannerRules:
    """The planner's rules of a vLLM version.

    Raises:
        InvalidValue: it is no vLLM version.
    """
    try:
        return _rules_for(version)
    except ValueError as error:
        raise InvalidValue(str(error)) from None


SLIDING_BLOCK_SIZE = 16
"""A sliding layer ignores `--block-size`: the smallest block of the common backends."""


def layer_specs(deployment: Deployment, shape: RankShape) -> dict[str, LayerSpec]:
    """The layers of one rank that keep a cache, by name, in the model's order."""
    makers: dict[str, Callable[[Deployment], LayerSpec]] = {
        "full_attention": _latent if deployment.model.mla is not None else _full,
        "sliding_attention": _sliding,
        "chunked_attention": _chunked,
        "mamba": _mamba,
    }
    specs: dict[str, LayerSpec] = {}
    by_kind: dict[str, LayerSpec] = {}
    for index in range(shape.first_layer, shape.first_layer + shape.num_layers):
        kind = deployment.model.layer_type(index)
        if kind not in by_kind:
            by_kind[kind] = makers[kind](deployment)
        specs[f"layers.{index}"] = by_kind[kind]
    return specs


def attention_block_size(deployment: Deployment) -> int:
    """Tokens of an attention block, raised where a recurrent state needs a larger page.

    vLLM `_align_hybrid_block_size` without prefix caching: the block is the smallest multiple of
    the asked one whose attention page holds the state's page.
    """
    if not deployment.model.is_hybrid:
        return deployment.block_size
    token_bytes = _full(deployment, block_size=1).page_size_bytes
    state_bytes = _state(deployment).page_size_bytes
    blocks = -(-state_bytes // (deployment.block_size * token_bytes))
    return deployment.block_size * blocks


def _full(deployment: Deployment, block_size: int | None = None) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size or attention_block_size(deployment),
        indexes_kv_by_block_stride=True,
        **_heads(deployment),
    )


def _latent(deployment: Deployment) -> MLAAttentionSpec:
    mla = deployment.model.mla
    assert mla is not None
    return MLAAttentionSpec(
        block_size=deployment.block_size,
        num_kv_heads=1,
        head_size=mla.latent_size,
        dtype=storage_dtype(deployment.kv_dtype.value),
        kv_quant_mode=kv_quant_mode(deployment.kv_dtype.value),
        indexes_kv_by_block_stride=True,
    )


def _sliding(deployment: Deployment) -> SlidingWindowSpec:
    window = deployment.model.sliding_window
    assert window is not None
    return SlidingWindowSpec(
        block_size=SLIDING_BLOCK_SIZE,
        sliding_window=window,
        indexes_kv_by_block_stride=True,
        **_heads(deployment),
    )


def _chunked(deployment: Deployment) -> ChunkedLocalAttentionSpec:
    chunk = deployment.model.attention_chunk_size
    assert chunk is not None
    return ChunkedLocalAttentionSpec(
        block_size=deployment.block_size,
        attention_chunk_size=chunk,
        indexes_kv_by_block_stride=True,
        **_heads(deployment),
    )


def _mamba(deployment: Deployment) -> MambaSpec:
    """The state of one request, padded to the attention page."""
    return replace(_state(deployment), page_size_padded=_full(deployment).page_size_bytes)


def _state(deployment: Deployment) -> MambaSpec:
    """Convolution and recurrent state of Mamba2 on one rank, in the model's dtype."""
    mamba, tp = deployment.model.mamba, deployment.tp
    assert mamba is not None
    groups = mamba.mamba_n_groups if mamba.mamba_n_groups % tp == 0 else tp
    conv = (mamba.intermediate_size + 2 * groups * mamba.mamba_d_state) // tp
    dtype = deployment.dtype.value
    return MambaSpec(
        block_size=deployment.max_model_len,
        shapes=(
            (mamba.mamba_d_conv - 1, conv),
            (mamba.mamba_n_heads // tp, mamba.mamba_d_head, mamba.mamba_d_state),
        ),
        dtypes=(dtype, dtype),
    )


def _heads(deployment: Deployment) -> dict[str, Any]:
    return {
        "num_kv_heads": deployment.kv_heads_per_rank,
        "head_size": deployment.model.head_size,
        "dtype": storage_dtype(deployment.kv_dtype.value),
        "kv_quant_mode": kv_quant_mode(deployment.kv_dtype.value),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What an engine may ask of its planner, by vLLM's names; see `kv.PlanRequest`."""

    in_flight_tokens: int
    auto_fit: bool = False
    hybrid: bool = True
    dcp: int = 1
    num_gpu_blocks_override: int | None = None


def plan(
    deployment: Deployment,
    shapes: Sequence[RankShape],
    available_bytes: Sequence[int],
    *,
    rules: PlannerRules,
    options: PlanOptions,
) -> CachePlan | Refusal:
    """vLLM's plan for `available_bytes` on each rank; a refusal carries the engine's figures."""
    answer = plan_cache(
        PlanRequest(
            workers=[layer_specs(deployment, shape) for shape in shapes],
            available_bytes=list(available_bytes),
            max_model_len=deployment.max_model_len,
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            max_in_flight_tokens=options.in_flight_tokens,
            block_size=attention_block_size(deployment),
            auto_fit=options.auto_fit,
            hybrid=options.hybrid,
            dcp=options.dcp,
            num_gpu_blocks_override=options.num_gpu_blocks_override,
        ),
        rules,
    )
    if isinstance(answer, PlanRefusal):
        return _refusal(deployment, answer)
    return _cache_plan(deployment, answer, rules)


def _refusal(deployment: Deployment, answer: PlanRefusal) -> Refusal:
    needed, available = answer.needed_bytes or 0, answer.available_bytes or 0
    if answer.code == "max_len_too_large":
        message = (
            f"one request of {deployment.max_model_len} tokens needs {gib(needed)} of cache,"
            f" {gib(available)} are available"
        )
        if answer.estimated_max_model_len:
            message += f"; a max_model_len of {answer.estimated_max_model_len} would fit"
    elif answer.code == "no_memory":
        message = f"nothing is left for the cache: {gib(available)} after weights and activation"
    else:
        message = answer.message
    return Refusal(
        kind=answer.code,
        message=message,
        rank=answer.worker or 0,
        needed_bytes=needed,
        available_bytes=available,
        estimated_max_model_len=answer.estimated_max_model_len,
    )


def _cache_plan(deployment: Deployment, answer: Plan, rules: PlannerRules) -> CachePlan:
    notes = [rules.note] if rules.note else []
    if answer.max_model_len < deployment.max_model_len:
        notes.append(
            f"max_model_len was fitted: reduced from {deployment.max_model_len}"
            f" to {answer.max_model_len}"
        )
    if len(answer.groups) > 1:
        notes.append(answer.why)
    return CachePlan(
        num_blocks=answer.num_blocks,
        block_size=answer.block_size,
        kv_tokens=answer.kv_cache_size_tokens or 0,
        max_concurrency=answer.max_concurrency or 0.0,
        max_model_len=answer.max_model_len,
        num_blocks_per_rank=answer.num_blocks_per_worker,
        block_bytes_per_rank=answer.bytes_per_block_per_worker,
        groups=tuple(
            KvGroup(
                kind=group.kind,
                num_layers=group.num_layers,
                block_size=group.block_size,
                page_size_bytes=group.page_size_bytes,
                num_blocks=answer.num_blocks,
                blocks_per_request=group.max_memory_usage_bytes // group.page_size_bytes,
            )
            for group in answer.groups
        ),
        layout=answer.describe(),
        notes=tuple(notes),
    )
