"""From the inputs of a case to a prediction: text, request, result."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from omegaconf.errors import OmegaConfBaseException

from kvexp import pipeline
from kvexp.errors import InvalidValue
from kvexp.results import Part, Refusal, Result, Status
from kvexp.validate import versions
from kvexp.validate.cards import Card
from kvexp.validate.case import Inputs, half_digit, short
from kvexp.validate.doubts import COUNTS, TOTAL_ERROR, widened
from kvexp.validate.models import Named
from kvexp.validate.prediction import VALUES, Interval, Outcome, Prediction
from kvexp.validate.request import Known, NoRequest, Request, engine_option, request_of

_REFUSALS: dict[str, Outcome] = {
    "max_len_too_large": "max_len_too_large",
    "free_memory_too_low": "free_memory_too_low",
    "max_num_seqs_too_large": "max_num_seqs_too_large",
}
"""Outcomes by the kind of a refusal; any other kind leaves no block."""

_CARDS = ("rtx_3060", "t4", "rtx_4090", "a100_40gb", "l40s", "h100", "h200", "b200")
"""What a case may have run on that does not name its card, from the least memory to the most."""

_LIKELY = "rtx_4090"
"""The least of them that is taken for it; a larger one where it is too small."""

_NO_CACHE = dict.fromkeys(COUNTS, Interval.exactly(0))
"""What a card leaves on which the engine does not start."""

_ANY_MODEL = Named("opt_125m")
"""A model for the check that comes before any model is loaded."""


def predict(inputs: Inputs) -> Prediction:
    """What the engine would print when it is started with these inputs.

    A model that is not known, or an engine without rules, is not answered; but what is free at
    the start and too little stops every model. Where no card is named, low and high are those of
    common cards.
    """
    known = _known()
    named = known.models.find(inputs.model) if inputs.model else None
    card = known.cards.find(inputs.gpu, inputs.gpu_total_gib)
    try:
        engine_option(inputs)
        if named is None:
            return _without_model(inputs, card)
        return widened(
            inputs,
            _predicted(inputs, card, named),
            lambda each: _varied(each, named),
            drafts_blocks=known.model(named.option).dspark is not None,
        )
    except (NoRequest, InvalidValue, OmegaConfBaseException) as error:
        return Prediction.unanswered(str(error).splitlines()[0])
    except Exception as error:  # one case's fault, as a point's, must not lose the others
        return Prediction.unanswered(f"{type(error).__name__}: {error}".splitlines()[0])


def means_card(text: str) -> bool:
    """Whether a text names a card of the catalogue, or one whose size it tells."""
    return _known().cards.knows(text)


def _predicted(inputs: Inputs, card: Card | None, named: Named) -> Prediction:
    known = _known()
    if card is not None:
        return _with_rounding(inputs, lambda each: request_of(each, known, card, named))
    options = _possible(inputs, known.cards.sizes(inputs.gpu) or _CARDS)
    return _of_any_card(list(_answers(inputs, known, named, options)), options)


def _possible(inputs: Inputs, options: Sequence[str]) -> Sequence[str]:
    """The cards that hold what was free on the one that is meant.

    Raises:
        NoRequest: none of them does.
    """
    free = max(size for size in (inputs.free_gib, inputs.init_free_gib, 0.0) if size is not None)
    cards = _known().cards
    found = [o for o in options if cards.total_gib(o) * (1 + TOTAL_ERROR) >= free]
    if not found:
        raise NoRequest(
            f"the card is not known, and none of {', '.join(options)} has the {free:g} GiB that"
            " were free"
        )
    return found


def _varied(inputs: Inputs, named: Named) -> Prediction:
    """The answer to a case with one input changed; none where that is not allowed."""
    try:
        return _predicted(inputs, _known().cards.find(inputs.gpu, inputs.gpu_total_gib), named)
    except (InvalidValue, OmegaConfBaseException) as error:
        return Prediction.unanswered(str(error))


def _with_rounding(inputs: Inputs, request: Callable[[Inputs], Request]) -> Prediction:
    """The answer, with what the last digits of stated free memory make of it as bounds.

    vLLM only compares what is free with its request; the others size their cache by it.
    """
    asked = request(inputs)
    best = _answer(asked)
    free = {name: getattr(inputs, name) for name in ("free_gib", "init_free_gib")}
    stated = {name: size for name, size in free.items() if size is not None}
    if asked.engine == "vllm" or not stated or not best.answered:
        return best
    ends = [
        replace(
            inputs, **{n: max(0.0, size + sign * half_digit(size)) for n, size in stated.items()}
        )
        for sign in (-1, 1)
    ]
    return _spanned(best, [best, *(_answer(request(each)) for each in ends)])


@cache
def _known() -> Known:
    return Known.here()


def _answer(request: Request) -> Prediction:
    result = pipeline.execute(request.run, request.engine)
    if result.status not in (Status.ok, Status.infeasible, Status.oom):
        return Prediction.unanswered(result.reason)
    values = {name: _VALUES[name](result) for name in VALUES}
    outcome = _outcome(request, result)
    if outcome == "max_len_too_large":
        values |= _shortened(request, result)
    return Prediction(
        answered=True,
        reason=result.reason,
        outcome=outcome,
        values=values,
        assumptions=(*request.assumptions, *result.notes),
        used=result.effective,
    )


def _outcome(request: Request, result: Result) -> Outcome:
    if result.status is Status.oom:
        return "oom"
    if result.refusal is not None:
        return _REFUSALS.get(result.refusal.kind, "no_cache_blocks")
    asked, used = request.run.max_model_len, result.effective.get("max_model_len")
    shortened = asked is not None and used is not None and used < asked
    return "max_len_too_large" if shortened and request.engine == "lmdeploy" else "ok"


def _shortened(request: Request, result: Result) -> dict[str, Interval | None]:
    """What the cache would hold for requests of the longest length that it has room for.

    V0 prints its blocks before it refuses the length; its step is as long as the length, and the
    counts are those of the refusal.
    """
    longest, block_size = _longest(result.refusal), result.effective.get("block_size")
    if not longest or not block_size:
        return {}
    if versions.is_v0(request.run.engine.version):
        share = _error_share(result)
        return {
            "kv_tokens": _around(longest, share),
            "num_blocks": _around(longest // block_size, share),
        }
    steps = ("max_num_batched_tokens", "max_num_seqs")
    same = {name: result.effective[name] for name in steps if name in result.effective}
    run = replace(request.run, max_model_len=longest, **same)
    shorter = pipeline.execute(run, request.engine)
    return {name: _VALUES[name](shorter) for name in ("kv_tokens", "num_blocks")}


def _error_share(result: Result) -> float:
    """How far what is left for the cache may be off, by the terms' intervals."""
    if result.profile is None or result.budget is None or result.budget.available_bytes <= 0:
        return 0.0
    errors = [max(part.above_bytes, part.below_bytes) for part in result.profile.parts]
    return math.hypot(*errors) / result.budget.available_bytes


def _around(best: float, share: float) -> Interval:
    return Interval(best * max(0.0, 1 - share), best, best * (1 + share))


def _count(name: str) -> Callable[[Result], Interval | None]:
    """A count of the result with its own bounds; none where the engine does not start."""

    def of(result: Result) -> Interval | None:
        best = getattr(result, name)
        if not best:
            return None
        low, high = getattr(result, f"{name}_low"), getattr(result, f"{name}_high")
        return Interval(best if low is None else low, best, best if high is None else high)

    return of


_blocks = _count("num_blocks")


def _scaled(value: Callable[[Result], float | None]) -> Callable[[Result], Interval | None]:
    """A value that grows with the blocks, and so has their bounds."""

    def of(result: Result) -> Interval | None:
        best, blocks = value(result), _blocks(result)
        if best is None:
            return None
        if blocks is None:
            return Interval.exactly(best) if best else None
        return Interval(*(best * bound / blocks.best for bound in blocks))

    return of


def _term(name: str) -> Callable[[Result], Interval | None]:
    """A term of the rank that has the fewest bytes left, with the interval of its fit."""

    def of(result: Result) -> Interval | None:
        return None if result.profile is None else _interval(getattr(result.profile, name))

    return of


def _interval(part: Part) -> Interval:
    size = part.size_bytes
    return Interval(size - part.below_bytes, size, size + part.above_bytes)


def _estimated(result: Result) -> Interval | None:
    """What the engine estimates and subtracts; unknown where it subtracts nothing."""
    found = _term("cudagraph")(result)
    return found if found and found.best else None


def _captured(result: Result) -> Interval | None:
    """What capture takes, where the engine has a rule for it."""
    parts = result.holding.parts if result.holding else ()
    return next((_interval(part) for part in parts if part.name == "graphs"), None)


def _available(result: Result) -> Interval | None:
    """What is left for the cache: with the blocks' bounds, or the terms' where there are none."""
    best = _cache_bytes(result)
    if best is None or result.profile is None or _blocks(result) is not None:
        return _scaled(_cache_bytes)(result)
    parts = result.profile.parts
    least = best - math.hypot(*(part.above_bytes for part in parts))
    return Interval(least, best, best + math.hypot(*(part.below_bytes for part in parts)))


def _longest_length(result: Result) -> Interval | None:
    """The longest request that has room, as far off as the bytes that it lies in."""
    longest = _longest(result.refusal)
    return None if longest is None else _around(longest, _error_share(result))


def _cache_bytes(result: Result) -> int | None:
    """What the engine prints: vLLM what is left for the cache, the others what the cache takes.

    A draft's own pool has a line of its own.
    """
    if result.budget is None:
        return None
    if result.effective.get("engine") == "vllm":
        return result.budget.available_bytes
    if "speculative_method" in result.effective:
        return sum(g.num_blocks * g.page_size_bytes * g.num_layers for g in result.groups)
    return result.budget.kv_cache_bytes


def _longest(refusal: Refusal | None) -> int | None:
    return None if refusal is None else refusal.estimated_max_model_len


_VALUES: Mapping[str, Callable[[Result], Interval | None]] = {
    "num_blocks": _blocks,
    "kv_tokens": _count("kv_tokens"),
    "available_kv_bytes": _available,
    "max_concurrency": _count("max_concurrency"),
    "weights_bytes": _term("weights"),
    "activation_bytes": _term("activation"),
    "non_torch_bytes": _term("non_torch"),
    "graphs_bytes": _captured,
    "graphs_estimate_bytes": _estimated,
    "estimated_max_len": _longest_length,
}


def _answers(
    inputs: Inputs, known: Known, named: Named, options: Sequence[str]
) -> Iterator[Prediction]:
    for option in options:
        card = Card(facts=known.cards.known[option])
        yield _answer(request_of(inputs, known, card, named))


def _of_any_card(predictions: Sequence[Prediction], options: Sequence[str]) -> Prediction:
    """The likely card or the least that starts, with the bounds of all that start."""
    found = [each for each in predictions if each.answered]
    if not found:
        return Prediction.unanswered("the card is not known, and no common one answers")
    starting = [each for each in found if each.outcome == "ok"]
    likely = predictions[options.index(_LIKELY) if _LIKELY in options else 0 :]
    chosen = next((each for each in likely if each.outcome == "ok"), found[-1])
    nothing = [] if starting == found else [Prediction(answered=True, values=_NO_CACHE)]
    note = f"gpu: not known, {', '.join(options)} give low and high"
    spanned = _spanned(chosen, [*starting, *nothing])
    return replace(spanned, assumptions=(note, *chosen.assumptions))


def _spanned(best: Prediction, others: Sequence[Prediction]) -> Prediction:
    """A prediction whose counts reach from the lowest to the highest of others."""
    values = {
        name: _spanning(value, [each.values.get(name) for each in others])
        if name in COUNTS
        else value
        for name, value in best.values.items()
    }
    return replace(best, values=values)


def _spanning(value: Interval | None, others: Sequence[Interval | None]) -> Interval | None:
    if value is None:
        return None
    known = [value, *(each for each in others if each is not None)]
    return Interval(min(e.low for e in known), value.best, max(e.high for e in known))


def _without_model(inputs: Inputs, card: Card | None) -> Prediction:
    """What is known without a model: whether enough is free at the start."""
    reason = (
        f"model {short(inputs.model)} is in no catalogue" if inputs.model else "no model is named"
    )
    if card is None or inputs.free_gib is None or inputs.gpu_memory_utilization is None:
        return Prediction.unanswered(reason)
    checked = Inputs(
        id=inputs.id,
        engine=inputs.engine,
        engine_version=inputs.engine_version,
        gpu_memory_utilization=inputs.gpu_memory_utilization,
        free_gib=inputs.free_gib,
        init_free_gib=inputs.init_free_gib,
    )
    request = request_of(checked, _known(), card, _ANY_MODEL)
    engine = request.run.engine
    refusal = engine.refuse_start(engine.resolve(request.run, request.engine))
    if refusal is None:
        return Prediction.unanswered(reason)
    return Prediction(
        answered=True,
        reason=refusal.message,
        outcome=_REFUSALS[refusal.kind],
        values=dict.fromkeys(VALUES),
        assumptions=(f"model: {reason}, which has no part in this", *request.assumptions),
    )
