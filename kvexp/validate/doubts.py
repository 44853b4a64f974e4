"""How far a prediction may be off because a case does not state all of its inputs.

Each input that is not stated is varied on its own, towards more and towards less cache; what that
moves adds to the interval of the terms as squares do.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvexp.units import GIB
from kvexp.validate import sglang, versions
from kvexp.validate.case import Inputs
from kvexp.validate.prediction import Interval, Prediction

COUNTS = ("num_blocks", "kv_tokens", "available_kv_bytes", "max_concurrency")
"""What an unstated input moves."""

UTIL = (0.8, 0.95)
"""What users choose instead of the default, in nine of ten logs that state it on whole cards."""

NO_VIDEOS = "--limit-mm-per-prompt video=0"
NO_IMAGES = "--limit-mm-per-prompt image=0,video=0"
BLOCK_DRAFTS = '--speculative-config {"method":"dspark","num_speculative_tokens":5}'
"""What starts of DeepSeek V4 mostly have."""

_DRAFTS = re.compile("draft|spec|mtp|n-?gram", re.IGNORECASE)
"""Words about drafts, by which a case states what drafts, or that nothing does."""

RANKS = (2, 4, 8)
MORE_IMAGES = "--limit-mm-per-prompt image=4"

TOTAL_ERROR = 0.015
"""How far boards of one name differ: 44.39 to 44.52 GiB of an L40S, 119.70 to 121.69 of a GB10."""


def widened(
    inputs: Inputs,
    prediction: Prediction,
    answer: Callable[[Inputs], Prediction],
    *,
    drafts_blocks: bool,
) -> Prediction:
    """The prediction with intervals that hold what the unstated inputs may move.

    `drafts_blocks`: the model has layers that draft blocks of tokens (`BLOCK_DRAFTS`).
    """
    if not prediction.answered:
        return prediction
    moved = [
        [answer(each).values for each in variants]
        for variants in unstated(inputs, prediction, drafts_blocks=drafts_blocks)
    ]
    values = {
        name: _widened(interval, [[_best(values, name) for values in each] for each in moved])
        if name in COUNTS
        else interval
        for name, interval in prediction.values.items()
    }
    return replace(prediction, values=values)


def unstated(
    inputs: Inputs, prediction: Prediction, *, drafts_blocks: bool
) -> Iterator[list[Inputs]]:
    """For each input that a case does not state, the cases it may have been."""
    vllm = inputs.engine.lower() == "vllm"
    if not inputs.is_stated("gpu_memory_utilization") and vllm:
        yield [replace(inputs, gpu_memory_utilization=share) for share in UTIL]
    if not inputs.is_stated("gpu_total_gib") and "total_bytes" in prediction.used:
        total = prediction.used["total_bytes"] / GIB
        yield [
            replace(inputs, gpu_total_gib=round(total * (1 + sign * TOTAL_ERROR), 2))
            for sign in (-1, 1)
        ]
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if not inputs.is_stated(name) and vllm and name in prediction.used:
            fewer = max(1, prediction.used[name] // 2)
            yield [replace(inputs, **{name: fewer})]
    if not inputs.is_stated("enforce_eager") and vllm:
        yield [replace(inputs, enforce_eager=True)]
    if not inputs.is_stated("other_flags") and not inputs.other_flags and vllm:
        yield [replace(inputs, other_flags=flags) for flags in _limits(inputs.engine_version)]
    drafts = "speculative_method" in prediction.used or _DRAFTS.search(inputs.other_flags or "")
    if vllm and drafts_blocks and not drafts:
        flags = " ".join(filter(None, [inputs.other_flags, BLOCK_DRAFTS]))
        yield [replace(inputs, other_flags=flags)]
    if vllm and inputs.tp is None and inputs.num_gpus is None:
        yield [replace(inputs, tp=ranks) for ranks in RANKS]
    if inputs.engine.lower() == "sglang" and "speculative_method" in prediction.used:
        plain = sglang.without_draft(inputs.model or "")
        if plain != inputs.model:  # nothing more is known of the draft
            yield [replace(inputs, model=plain)]
    first = versions.first_patch(inputs.engine, inputs.engine_version)
    if first is not None:
        yield [replace(inputs, engine_version=first)]


def _limits(version: str | None) -> tuple[str, ...]:
    """Limits of modalities that users give: no videos, no images, or more where V0 takes one."""
    more = (MORE_IMAGES,) if versions.is_v0(version or "") else ()
    return (NO_VIDEOS, NO_IMAGES, *more)


def _best(values: Mapping[str, Interval | None], name: str) -> float:
    """The value of a variant; one that leaves no cache leaves 0."""
    interval = values.get(name)
    return 0.0 if interval is None else interval.best


def _widened(interval: Interval | None, moved: Sequence[Sequence[float]]) -> Interval | None:
    if interval is None:
        return None
    low, best, high = interval
    down = [max((best - value for value in each if value < best), default=0.0) for each in moved]
    up = [max((value - best for value in each if value > best), default=0.0) for each in moved]
    least = max(min(0.0, low), best - math.hypot(best - low, *down))
    return Interval(least, best, best + math.hypot(high - best, *up))
