"""What a card really holds: the request, and what no budget counts."""

import math
from dataclasses import replace

from kvexp.deployment import Deployment
from kvexp.engine import CachePlan, Engine
from kvexp.results import UNDER_LOAD, Holding, Result, Stage, Status
from kvexp.units import gib


def with_holding(result: Result, engine: Engine, deployment: Deployment) -> Result:
    """The result with what the card of its tightest rank will hold, where the engine has rules."""
    if result.budget is None or result.profile is None or not result.num_blocks:
        return result
    shapes = zip(engine.ranks(deployment), result.ranks, strict=True)
    tightest = next(shape for shape, rank in shapes if rank.budget == result.budget)
    parts = engine.beyond_budget(deployment, tightest, result.groups)
    if not parts:
        return _with_given_cache(result, deployment)
    budget, profile = result.budget, result.profile
    rest = sum(part.size_bytes for part in budget.parts if part.name in ("unused", "shortfall"))
    sized_by_util = budget.base == "total" and rest >= 0
    beyond = sum(part.size_bytes for part in parts) - profile.cudagraph_bytes
    mistaken = profile.missing_activation_bytes or 0
    kept = engine.cached_bytes(deployment, profile) - profile.activation_bytes - mistaken
    beyond += max(0, kept) + mistaken
    load = budget.requested_bytes - rest + beyond
    doubt = math.isqrt(sum(part.above_bytes**2 for part in parts))
    charged = all(part.name != "context" for part in parts)  # the budget has the whole device's use
    others = 0 if charged else deployment.used_by_others_bytes
    room = deployment.total_bytes - others - beyond - doubt
    shift = profile.cudagraph_bytes / deployment.total_bytes if sized_by_util else 0.0
    later = sum(part.size_bytes for part in parts if part.name == UNDER_LOAD)
    holding = Holding(
        parts=parts,
        held_at_start_bytes=load + min(0, kept) - later,
        held_under_load_bytes=load,
        requested_bytes=budget.requested_bytes,
        total_bytes=deployment.total_bytes,
        used_by_others_bytes=others,
        largest_safe_util=_safe_util(result, engine, deployment, room) if sized_by_util else None,
        util_without_graphs=round(deployment.util - shift, 4) if shift else None,
        util_keeping_cache=min(round(deployment.util + shift, 4), 1.0) if shift else None,
    )
    result = replace(result, holding=holding)
    if holding.fits or not result.ok or result.verified is not None:
        return result
    return replace(result, status=Status.oom, stage=Stage.graphs, reason=_too_much(holding))


def _with_given_cache(result: Result, deployment: Deployment) -> Result:
    """The result of an engine without such rules: bytes that were given for a cache may not fit."""
    budget, profile = result.budget, result.profile
    assert budget is not None and profile is not None
    taken = budget.kv_cache_bytes + profile.weights_bytes - profile.weights.below_bytes
    is_given = budget.base == "kv_cache_memory_bytes" and result.verified is None
    if not (result.ok and is_given and taken > deployment.free_bytes):
        return result
    reason = (
        f"out of memory: weights and the cache take {gib(taken)} of"
        f" {gib(deployment.free_bytes)} that are free"
    )
    return replace(result, status=Status.oom, stage=Stage.allocate, reason=reason)


def _safe_util(result: Result, engine: Engine, deployment: Deployment, room: int) -> float:
    """The largest share within so many bytes that the engine serves at; 0 where it refuses it."""
    total = deployment.total_bytes
    for size in (min(room, total), min(room, deployment.free_bytes)):
        util = max(0.0, math.floor(size / total * 10000) / 10000)
        smaller = replace(deployment, util=util)
        if engine.refuse_start(smaller) is None:
            quotas = [engine.quota(smaller, rank.profile) for rank in result.ranks]
            plan = engine.plan(smaller, [quota.available_bytes for quota in quotas])
            serves = isinstance(plan, CachePlan) and not engine.refuse_capture(smaller, plan)
            return util if serves else 0.0
    return 0.0


def _too_much(holding: Holding) -> str:
    safe, others = holding.largest_safe_util, ""
    if holding.used_by_others_bytes:
        others = f", of which others use {gib(holding.used_by_others_bytes)}"
    return (
        f"full load would take {gib(holding.held_under_load_bytes)} of the card's"
        f" {gib(holding.total_bytes)}{others}: out of memory after the cache is allocated; "
        + (f"util may be at most {safe:.4f}" if safe else _without_util(holding))
    )


def _without_util(holding: Holding) -> str:
    """What may help where no util does."""
    if holding.largest_safe_util is None:
        return "a smaller cache may fit"
    largest = max(holding.parts, key=lambda part: part.size_bytes)
    return (
        f"no util leaves room for its {largest.name} of {gib(largest.size_bytes)}"
        f" ({largest.reason.partition(';')[0]})"
    )
