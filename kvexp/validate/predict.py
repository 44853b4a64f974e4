"""From the inputs of a case to a prediction: text, request, result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from omegaconf.errors import OmegaConfBaseException

from kvexp import pipeline
from kvexp.errors import InvalidValue
from kvexp.results import Refusal, Result, Status
from kvexp.validate import versions
from kvexp.validate.cards import Card
from kvexp.validate.case import Inputs
from kvexp.validate.models import Named
from kvexp.validate.prediction import VALUES, Interval, Outcome, Prediction
from kvexp.validate.request import Known, NoRequest, Request, engine_option, request_of

_REFUSALS: dict[str, Outcome] = {
    "max_len_too_large": "max_len_too_large",
    "free_memory_too_low": "free_memory_too_low",
}
"""Outcomes by the kind of a refusal; any other kind leaves no block."""

_CARDS = ("rtx_4090", "a100_40gb", "h100", "h200", "b200")
"""What a case may have run on that does not name its card, from the least memory to the most."""

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
        if card is not None:
            return _answer(request_of(inputs, known, card, named))
        return _of_any_card(_answers(inputs, known, named))
    except (NoRequest, InvalidValue, OmegaConfBaseException) as error:
        return Prediction.unanswered(str(error).splitlines()[0])


@cache
def _known() -> Known:
    return Known.here()


def _answer(request: Request) -> Prediction:
    result = pipeline.execute(request.run, request.engine)
    if result.status not in (Status.ok, Status.infeasible, Status.oom):
        return Prediction.unanswered(result.reason)
    values = {name: _VALUES[name](result) for name in VALUES}
    outcome = _outcome(request, result)
    if outcome == "max_len_too_large" and versions.is_v0(request.run.engine.version):
        values |= _v0_pool(result)
    return Prediction(
        answered=True,
        reason=result.reason,
        outcome=outcome,
        values=values,
        assumptions=(*request.assumptions, *result.notes),
    )


def _outcome(request: Request, result: Result) -> Outcome:
    if result.status is Status.oom:
        return "oom"
    if result.refusal is not None:
        return _REFUSALS.get(result.refusal.kind, "no_cache_blocks")
    asked, used = request.run.max_model_len, result.effective.get("max_model_len")
    shortened = asked is not None and used is not None and used < asked
    return "max_len_too_large" if shortened and request.engine == "lmdeploy" else "ok"


def _v0_pool(result: Result) -> dict[str, Interval | None]:
    """V0 prints its blocks, then refuses the length with the tokens that they hold."""
    tokens, block_size = _longest(result.refusal), result.effective.get("block_size")
    if not tokens or not block_size:
        return {}
    return {
        "kv_tokens": Interval.exactly(tokens),
        "num_blocks": Interval.exactly(tokens // block_size),
    }


def _blocks(result: Result) -> Interval | None:
    if not result.num_blocks:
        return None
    low, high = result.num_blocks_low, result.num_blocks_high
    best = result.num_blocks
    return Interval(best if low is None else low, best, best if high is None else high)


def _scaled(value: Callable[[Result], float | None]) -> Callable[[Result], Interval | None]:
    """A value that grows with the blocks, and so has their bounds."""

    def of(result: Result) -> Interval | None:
        best, blocks = value(result), _blocks(result)
        if best is None or blocks is None:
            return None
        return Interval(*(best * bound / blocks.best for bound in blocks))

    return of


def _exact(value: Callable[[Result], float | None]) -> Callable[[Result], Interval | None]:
    def of(result: Result) -> Interval | None:
        best = value(result)
        return None if best is None else Interval.exactly(best)

    return of


def _term(name: str) -> Callable[[Result], Interval | None]:
    """A term of the rank that has the fewest bytes left."""
    return _exact(lambda result: getattr(result.profile, name) if result.profile else None)


def _cache_bytes(result: Result) -> int | None:
    """What the engine prints: vLLM what is left for the cache, the others what the cache takes."""
    if result.budget is None:
        return None
    if result.effective.get("engine") == "vllm":
        return result.budget.available_bytes
    return result.budget.kv_cache_bytes


def _longest(refusal: Refusal | None) -> int | None:
    return None if refusal is None else refusal.estimated_max_model_len


_VALUES: Mapping[str, Callable[[Result], Interval | None]] = {
    "num_blocks": _blocks,
    "kv_tokens": _scaled(lambda result: result.kv_tokens),
    "available_kv_bytes": _exact(_cache_bytes),
    "max_concurrency": _scaled(lambda result: result.max_concurrency),
    "weights_bytes": _term("weights_bytes"),
    "activation_bytes": _term("activation_bytes"),
    "non_torch_bytes": _term("non_torch_bytes"),
    "graphs_bytes": _exact(lambda result: None),
    "graphs_estimate_bytes": _term("cudagraph_bytes"),
    "estimated_max_len": _exact(lambda result: _longest(result.refusal)),
}


def _answers(inputs: Inputs, known: Known, named: Named) -> Iterator[Prediction]:
    for option in _CARDS:
        card = Card(facts=known.cards.known[option])
        yield _answer(request_of(inputs, known, card, named))


def _of_any_card(predictions: Iterator[Prediction]) -> Prediction:
    """The middle of those that start, with the bounds of all of them."""
    found = [each for each in predictions if each.answered]
    starting = [each for each in found if each.outcome == "ok"] or found
    if not starting:
        return Prediction.unanswered("the card is not known, and no common one answers")
    middle = starting[(len(starting) - 1) // 2]
    values = {
        name: _spanning(value, [each.values[name] for each in starting])
        for name, value in middle.values.items()
    }
    note = f"gpu: not known, {', '.join(_CARDS)} give low and high"
    return replace(middle, values=values, assumptions=(note, *middle.assumptions))


def _spanning(value: Interval | None, others: Sequence[Interval | None]) -> Interval | None:
    known = [each for each in others if each is not None]
    if value is None:
        return None
    return Interval(min(e.low for e in known), value.best, max(e.high for e in known))


def _without_model(inputs: Inputs, card: Card | None) -> Prediction:
    """What is known without a model: whether enough is free at the start."""
    reason = f"model {inputs.model!r} is in no catalogue" if inputs.model else "no model is named"
    if card is None or inputs.free_gib is None or inputs.gpu_memory_utilization is None:
        return Prediction.unanswered(reason)
    request = request_of(inputs, _known(), card, _ANY_MODEL)
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
