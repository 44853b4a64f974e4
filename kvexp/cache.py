"""From a deployment to blocks: which layers cache what, then the planner's arithmetic."""

from collections.abc import Sequence

from kvexp.deployment import Deployment
from kvexp.engine import CachePlan, RankShape
from kvexp.errors import InvalidValue
from kvexp.kv import Plan, PlannerRules, PlanRefusal, PlanRequest, plan_cache
from kvexp.kv import max_in_flight_tokens as max_in_flight_tokens
from kvexp.kv import pp_layer_ranges as pp_layer_ranges
from kvexp.kv import rules_for as _rules_for
from kvexp.kv.dtypes import kv_quant_mode, storage_dtype
from kvexp.kv.specs import FullAttentionSpec, LayerSpec
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


def layer_specs(deployment: Deployment, shape: RankShape) -> dict[str, LayerSpec]:
    """The layers of one rank that keep a cache, by name, in the model's order."""
    spec = FullAttentionSpec(
        block_size=deployment.block_size,
        num_kv_heads=deployment.kv_heads_per_rank,
        head_size=deployment.model.head_size,
        dtype=storage_dtype(deployment.kv_dtype.value),
        kv_quant_mode=kv_quant_mode(deployment.kv_dtype.value),
        indexes_kv_by_block_stride=True,
    )
    layers = range(shape.first_layer, shape.first_layer + shape.num_layers)
    return {f"layers.{index}": spec for index in layers}


def plan(
    deployment: Deployment,
    shapes: Sequence[RankShape],
    available_bytes: Sequence[int],
    *,
    rules: PlannerRules,
    in_flight_tokens: int,
) -> CachePlan | Refusal:
    """vLLM's plan for `available_bytes` on each rank; a refusal carries the engine's figures."""
    answer = plan_cache(
        PlanRequest(
            workers=[layer_specs(deployment, shape) for shape in shapes],
            available_bytes=list(available_bytes),
            max_model_len=deployment.max_model_len,
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            max_in_flight_tokens=in_flight_tokens,
            block_size=deployment.block_size,
        ),
        rules,
    )
    if isinstance(answer, PlanRefusal):
        return _refusal(deployment, answer)
    return _cache_plan(answer, rules)


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


def _cache_plan(answer: Plan, rules: PlannerRules) -> CachePlan:
    notes = [rules.note] if rules.note else []
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
