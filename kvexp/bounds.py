"""How far the counts may be off, from what each term may be."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvexp.deployment import Deployment
from kvexp.engine import CachePlan, Engine, Quota
from kvexp.results import TERMS, Profile, Refusal, Result


def bounded(
    result: Result,
    engine: Engine,
    deployment: Deployment,
    profiles: Sequence[Profile],
    quotas: Sequence[Quota],
) -> Result:
    """The result with its counts at both ends of what is uncertain, where anything is.

    Errors of the terms and of the card's total are independent: their squares add.
    """
    low, high = (
        [
            quota.available_bytes + sign * _error_bytes(engine, deployment, profile, quota, sign)
            for profile, quota in zip(profiles, quotas, strict=True)
        ]
        for sign in (-1, 1)
    )
    if low == high:
        return result
    least, most = engine.plan(deployment, low), engine.plan(deployment, high)
    best = (result.num_blocks or 0, result.kv_tokens or 0, result.max_concurrency or 0.0)
    # a length that is fitted to the memory changes with it: less memory may hold more requests
    bounds: dict[str, Any] = {}
    names = ("num_blocks", "kv_tokens", "max_concurrency")
    for name, *counts in zip(names, best, _counts(least), _counts(most), strict=True):
        bounds |= {f"{name}_low": min(counts), f"{name}_high": max(counts)}
    return replace(result, **bounds)


def _error_bytes(
    engine: Engine, deployment: Deployment, profile: Profile, quota: Quota, sign: int
) -> int:
    """How far the bytes for one rank's cache may be off, towards less (-1) or more (1)."""
    if quota.base == "kv_cache_memory_bytes":
        return 0  # given, whatever the terms are
    errors = [_effect_bytes(engine, deployment, profile, quota, part, sign) for part in TERMS]
    own = {part.name for part in profile.parts}
    others = (*profile.differences, *(part for part in quota.parts if part.name not in own))
    errors += [part.above_bytes if sign < 0 else part.below_bytes for part in others]
    if uncertain := _total_error_bytes(deployment):
        shifted = _shifted(deployment, sign * uncertain)
        errors.append(engine.quota(shifted, profile).available_bytes - quota.available_bytes)
    return math.isqrt(sum(error * error for error in errors))


def _effect_bytes(
    engine: Engine, deployment: Deployment, profile: Profile, quota: Quota, name: str, sign: int
) -> int:
    """What a term at its end makes of the bytes for the cache, by the engine's own rule.

    It is not the term's error where the engine takes a share of what is left, charges nothing for
    it, or was given what is free after it.
    """
    part = getattr(profile, name)
    end = part.high_bytes if sign < 0 else part.low_bytes
    if end is None or end == part.size_bytes:
        return 0
    at_end = replace(part, size_bytes=end, low_bytes=None, high_bytes=None)
    shifted = engine.quota(deployment, replace(profile, **{name: at_end}))
    return abs(shifted.available_bytes - quota.available_bytes)


def _total_error_bytes(deployment: Deployment) -> int:
    """How far the card's total may be off; nothing where a device was read."""
    gpu = deployment.gpu
    return gpu.total_error_bytes if deployment.total_bytes == gpu.total_bytes else 0


def _shifted(deployment: Deployment, delta: int) -> Deployment:
    """The same card with another total; what is free follows unless it was given."""
    free = deployment.free_bytes + (delta if deployment.gpu.free_bytes is None else 0)
    return replace(deployment, total_bytes=deployment.total_bytes + delta, free_bytes=free)


def _counts(plan: CachePlan | Refusal) -> tuple[int, int, float]:
    if isinstance(plan, Refusal):
        return 0, 0, 0.0
    return plan.num_blocks, plan.kv_tokens, plan.max_concurrency
