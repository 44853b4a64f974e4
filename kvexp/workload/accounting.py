"""Does what was counted explain what the driver says is in use?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvexp.results import Stage
from kvexp.workload.counters import Counters

TOLERANCE_BYTES = 32 << 20
"""How far the sum may be off: kernels that load at a first call take steps of 2 MiB."""

DRIFT_BYTES = 64 << 20
"""How much the rest of a device may change before a measurement is called contaminated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is known beside the counters: by NVML, by the tensors themselves; null where it is not.

    `others_bytes` was in use before the context was made.
    """

    others_bytes: int | None
    parameter_bytes: int | None
    kv_cache_bytes: int
    graphs_bytes: int


def accounting(counters: Mapping[Stage, Counters], known: Known) -> dict[str, Any] | None:
    """The terms, their sum, and the driver's used bytes after the last stage; null before warm-up.

    Each term was read before the cache was allocated, or off the tensors themselves; so the sum
    meets the last reading only if nothing else came.
    """
    if Stage.warmup not in counters or known.parameter_bytes is None:
        return None
    start, load, warm = (counters[stage] for stage in (Stage.start, Stage.load, Stage.warmup))
    last = list(counters.values())[-1]
    others = known.others_bytes or 0
    terms = {
        "others": others,
        "context": start.non_torch_bytes - others,
        "libraries": warm.non_torch_bytes - start.non_torch_bytes,
        "weights": known.parameter_bytes,
        "rounding": load.allocated_bytes - start.allocated_bytes - known.parameter_bytes,
        "workspaces": warm.allocated_bytes - load.allocated_bytes,
        "allocator_cached": warm.reserved_bytes - warm.allocated_bytes,
        "kv_cache": known.kv_cache_bytes,
        "kv_cache_rounding": _rounding(counters, known.kv_cache_bytes),
        "graphs": known.graphs_bytes,
    }
    total = sum(terms.values())
    residual = last.used_bytes - total
    return {
        "terms": terms,
        "stage": list(counters)[-1].value,
        "sum_bytes": total,
        "driver_used_bytes": last.used_bytes,
        "residual_bytes": residual,
        "tolerance_bytes": TOLERANCE_BYTES,
        "closes": abs(residual) <= TOLERANCE_BYTES,
        "others_known": known.others_bytes is not None,
    }


def _rounding(counters: Mapping[Stage, Counters], kv_cache_bytes: int) -> int:
    """What the allocator took from the driver for the cache beyond its tensors."""
    if not kv_cache_bytes:
        return 0
    grown = counters[Stage.allocate].reserved_bytes - counters[Stage.warmup].reserved_bytes
    return grown - kv_cache_bytes


def neighbours(others: Mapping[str, int | None], reason: str | None) -> dict[str, Any]:
    """What everything but this process uses, moment by moment, and how far it moved.

    `others` must begin with the context made; where the driver does not list this process the
    figures are null and `reason` says why.
    """
    told = [size for size in others.values() if size is not None]
    drift = max((size - told[0] for size in told), key=abs, default=None)
    return {
        "others_bytes": dict(others),
        "drift_bytes": drift,
        "tolerance_bytes": DRIFT_BYTES,
        "contaminated": None if drift is None else abs(drift) > DRIFT_BYTES,
        "reason": reason,
    }
