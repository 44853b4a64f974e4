"""load -> warmup -> budget -> allocate: how one point becomes a result."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from kvexp.bench import Bench
from kvexp.bounds import bounded
from kvexp.deployment import Deployment
from kvexp.engine import CachePlan, Engine, Quota, RankShape
from kvexp.errors import InvalidValue
from kvexp.holding import with_holding
from kvexp.profiler import DeviceFacts, EngineRefused
from kvexp.results import (
    Budget,
    Part,
    Profile,
    Provenance,
    RankResult,
    Refusal,
    Result,
    Stage,
    Status,
)
from kvexp.schema import Run
from kvexp.units import gib
from kvexp.workload import is_out_of_memory

SAME_CARD = 0.02
"""How far a measured total may be from the card that was asked for."""

SEARCH_STEPS = 7
"""Halvings in the search for a share that holds."""

OnStage = Callable[[Stage], None]


def execute(
    run: Run,
    engine_name: str,
    on_stage: OnStage = lambda stage: None,
    bench: Bench | None = None,
) -> Result:
    """Run one point to its end; whatever happens becomes a status, never an exception.

    `on_stage` is told every stage as it begins. `bench` holds what the process keeps loaded for
    the next point; without one nothing is kept. KeyboardInterrupt passes through.
    """
    started = perf_counter()
    progress = _Progress(on_stage, bench or Bench())
    try:
        result = _stages(run, engine_name, progress)
    except Exception as error:
        result = progress.keep(progress.failed(error))
    finally:
        if bench is None:
            progress.bench.close()
    if not result.effective and progress.deployment is not None:
        result = replace(
            result, effective=progress.deployment.effective(), notes=progress.deployment.notes
        )
    return replace(result, duration_s=round(perf_counter() - started, 6))


def _stages(run: Run, engine_name: str, progress: "_Progress") -> Result:
    """The pipeline itself, one line a step."""
    engine, bench = run.engine, progress.bench
    progress.enter(Stage.resolve)
    deployment = progress.decided(_noted(engine.decide(run, engine_name)))
    with bench.measuring(run, deployment):
        progress.enter(Stage.start)
        deployment = progress.decided(on_device(deployment, bench.start()))
        if refusal := engine.refuse_start(deployment):
            return progress.keep(refused(refusal, Stage.start))
        progress.enter(Stage.load)
        bench.load()
        progress.enter(Stage.warmup)
        profiles = bench.warmup()
        progress.enter(Stage.budget)
        quotas = [engine.quota(deployment, profile) for profile in profiles]
        ruled = engine.plan(deployment, [quota.available_bytes for quota in quotas])
        plan = bench.plan(deployment, ruled)
        result = progress.found = summary(engine, deployment, profiles, quotas, plan)
        forwards = isinstance(plan, CachePlan) or any(map(_holds_forward, quotas))
        if too_large := _too_large(deployment, profiles, forwards=forwards):
            stage, reason = too_large
            result = replace(result, status=Status.oom, stage=stage, reason=reason, refusal=None)
            return progress.keep(result)
        if run.profiler.isolated:
            rules = {"rules_by_rank": _by_rules(engine, deployment)}
            result = progress.found = replace(result, readings=rules)
        if isinstance(plan, CachePlan):
            refusal = engine.refuse_capture(deployment, plan)
            result = (
                _proved(engine, deployment, profiles, plan, result, progress)
                if refusal is None
                else _uncaptured(result, refusal)
            )
        result = progress.keep(with_holding(result, engine, deployment))
    return bounded(result, engine, deployment, profiles, quotas)


def _holds_forward(quota: Quota) -> bool:
    """Whether a forward has run before the budget; SGLang's comes after the pool."""
    return any(part.name == "activation" and part.size_bytes > 0 for part in quota.parts)


def _too_large(
    deployment: Deployment, profiles: Sequence[Profile], *, forwards: bool
) -> tuple[Stage, str] | None:
    """Where memory runs out: the weights, or, if the engine comes to one, the forward on top."""
    free = deployment.free_bytes
    for rank, profile in enumerate(profiles):
        weights = profile.weights_bytes - profile.weights.below_bytes
        forward = weights + profile.activation_bytes - profile.activation.below_bytes
        for stage, name, size in (
            (Stage.load, "weights", weights),
            (Stage.warmup, "weights and the largest forward", forward),
        ):
            if size > free and (forwards or stage is Stage.load):
                taken = f"{name} take {gib(size)} of {gib(free)} that are free"
                return stage, f"out of memory: {taken} on rank {rank}"
    return None


@dataclass(slots=True)
class _Progress:
    """How far a point has come, for the case that it ends early."""

    on_stage: OnStage
    bench: Bench
    stage: Stage = Stage.resolve
    deployment: Deployment | None = None
    found: Result | None = None

    def enter(self, stage: Stage) -> None:
        self.stage = stage
        self.on_stage(stage)

    def keep(self, result: Result) -> Result:
        """The result with the counters that were read until now, and what is to be said of them."""
        return replace(
            result,
            readings={**self.bench.readings(), **result.readings},
            notes=(*result.notes, *self.bench.notes()),
        )

    def failed(self, error: BaseException) -> Result:
        """The end of the point by an error; counts that are known by then are kept."""
        ended = ended_by(error, self.stage)
        if self.found is None:
            return ended
        return replace(
            self.found,
            status=ended.status,
            stage=ended.stage,
            reason=ended.reason,
            readings={**self.bench.readings(), **self.found.readings, **ended.readings},
            verified=False,
        )

    def decided(self, deployment: Deployment) -> Deployment:
        self.deployment = deployment
        return deployment


def _proved(
    engine: Engine,
    deployment: Deployment,
    profiles: Sequence[Profile],
    plan: CachePlan,
    result: Result,
    progress: _Progress,
) -> Result:
    """Allocate the blocks for real and run on top of them, where the profiler can.

    Out of memory is a finding here: the counts stay, and the largest share that holds is searched.
    """
    try:
        allocated_bytes, verified = _prove(plan, progress)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = progress.failed(error)
        if not progress.bench.reusable:
            return failed
        try:
            largest = _largest_util(engine, deployment, profiles, progress)
        except Exception as later:  # the first cause stays the result
            note = f"the search for the largest util ended: {' '.join(str(later).split())}"
            return replace(failed, notes=(*failed.notes, note))
        return replace(failed, largest_util=largest)
    return replace(result, allocated_bytes=allocated_bytes, verified=verified)


def _prove(plan: CachePlan, progress: _Progress) -> tuple[int | None, bool | None]:
    progress.enter(Stage.allocate)
    allocated_bytes = progress.bench.allocate(plan)
    progress.enter(Stage.verify)
    verified = progress.bench.verify()
    if progress.bench.captures:
        progress.enter(Stage.graphs)
        progress.bench.capture()
    return allocated_bytes, verified


def _largest_util(
    engine: Engine, deployment: Deployment, profiles: Sequence[Profile], progress: _Progress
) -> float | None:
    """The largest share, to one part in `2 ** SEARCH_STEPS` of util, whose cache holds."""
    low, high = 0.0, deployment.util
    found = None
    for _ in range(SEARCH_STEPS):
        util = (low + high) / 2
        smaller = replace(deployment, util=util)
        available = [engine.quota(smaller, profile).available_bytes for profile in profiles]
        plan = engine.plan(smaller, available)
        progress.bench.release()
        if isinstance(plan, Refusal):
            low = util
        elif _holds(plan, progress):
            low = found = util
        else:
            high = util
    return round(found, 4) if found is not None else None


def _holds(plan: CachePlan, progress: _Progress) -> bool:
    try:
        _prove(plan, progress)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _noted(deployment: Deployment) -> Deployment:
    """The deployment with what is to be said of its card."""
    if not deployment.gpu.total_error_bytes:
        return deployment
    note = (
        f"total memory of {deployment.gpu.name} is known to +-0.005 GiB only"
        f" ({deployment.gpu.source})"
    )
    return replace(deployment, notes=(*deployment.notes, note))


def on_device(deployment: Deployment, device: DeviceFacts | None) -> Deployment:
    """The deployment with the totals of the card at hand.

    Raises:
        InvalidValue: the card is not the one that was asked for.
    """
    if device is None:
        return deployment
    if deployment.gpu.emulate:
        return _emulated(deployment, device)
    difference = abs(device.total_bytes - deployment.total_bytes)
    if difference > SAME_CARD * deployment.total_bytes:
        raise InvalidValue(
            f"the device is {device.name} with {gib(device.total_bytes)},"
            f" gpu={deployment.gpu.name} has {gib(deployment.total_bytes)}; choose its gpu option,"
            " or gpu.emulate=true on a larger card"
        )
    return replace(deployment, total_bytes=device.total_bytes, free_bytes=device.free_bytes)


def _emulated(deployment: Deployment, device: DeviceFacts) -> Deployment:
    """The card that was asked for, with what is in use on the one at hand.

    Raises:
        InvalidValue: the one at hand is smaller.
    """
    asked = deployment.total_bytes
    if asked > device.total_bytes:
        raise InvalidValue(
            f"gpu.emulate needs a card of at least {gib(asked)} for gpu={deployment.gpu.name},"
            f" the device is {device.name} with {gib(device.total_bytes)}"
        )
    free = max(0, asked - (device.total_bytes - device.free_bytes))
    note = (
        f"emulated: {deployment.gpu.name} on {device.name} by capping torch's memory; kernels,"
        " context and speed are those of the card at hand"
    )
    return replace(deployment, free_bytes=free, notes=(*deployment.notes, note))


def summary(
    engine: Engine,
    deployment: Deployment,
    profiles: Sequence[Profile],
    quotas: Sequence[Quota],
    plan: CachePlan | Refusal,
) -> Result:
    """Put together what the stages found; the rank that limits the cache stands at the top."""
    shapes = engine.ranks(deployment)
    ranks = tuple(
        _rank(deployment, shape, profile, quota, plan)
        for shape, profile, quota in zip(shapes, profiles, quotas, strict=True)
    )
    if isinstance(plan, Refusal):
        least = ranks[plan.rank]
        return replace(
            refused(plan, Stage.budget),
            block_size=deployment.block_size,
            budget=least.budget,
            profile=least.profile,
            ranks=ranks,
            effective=deployment.effective(),
            notes=deployment.notes,
        )
    least = min(ranks, key=lambda rank: (rank.num_blocks, rank.block_bytes == 0, rank.rank))
    return Result(
        status=Status.ok,
        stage=Stage.done,
        reason="",
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        block_bytes=least.block_bytes,
        kv_tokens=plan.kv_tokens,
        max_concurrency=plan.max_concurrency,
        **_replicas(deployment.dp, plan),
        budget=least.budget,
        profile=least.profile,
        layout=plan.layout,
        groups=plan.groups,
        ranks=ranks,
        log_lines=engine.log_lines(deployment, plan),
        notes=(*deployment.notes, *plan.notes),
        effective={**deployment.effective(), "max_model_len": plan.max_model_len},
    )


def _uncaptured(result: Result, refusal: Refusal) -> Result:
    """A point whose cache has its blocks, for which the engine captures no graphs."""
    return replace(
        result,
        status=Status.infeasible,
        stage=Stage.graphs,
        reason=refusal.message,
        refusal=refusal,
    )


def _by_rules(engine: Engine, deployment: Deployment) -> list[dict[str, int | None]]:
    """What the engine's rules say of each rank, beside what was measured; null where none is known.

    The names are those of `Profile`'s parts.
    """
    return [
        {
            name: _size_by_rule(predict, deployment, shape)
            for name, predict in (
                ("weights", engine.predict_weights),
                ("activation", engine.predict_activation),
                ("non_torch", engine.predict_non_torch),
            )
        }
        for shape in engine.ranks(deployment)
    ]


def _size_by_rule(
    predict: Callable[[Deployment, RankShape], Part], deployment: Deployment, shape: RankShape
) -> int | None:
    try:
        return predict(deployment, shape).size_bytes
    except InvalidValue:
        return None


def _replicas(dp: int, plan: CachePlan) -> dict[str, Any]:
    """What all replicas hold together, where there are several: each plans alone."""
    if dp == 1:
        return {}
    return {
        "num_replicas": dp,
        "kv_tokens_total": dp * plan.kv_tokens,
        "max_concurrency_total": dp * plan.max_concurrency,
    }


def refused(refusal: Refusal, stage: Stage) -> Result:
    """A point at which the engine would not start."""
    return Result(
        status=Status.infeasible,
        stage=stage,
        reason=refusal.message,
        num_blocks=0,
        kv_tokens=0,
        max_concurrency=0.0,
        refusal=refusal,
    )


def ended_by(error: BaseException, stage: Stage) -> Result:
    """A point that an exception ended."""
    if isinstance(error, InvalidValue):
        return Result(status=Status.invalid, stage=stage, reason=str(error))
    if isinstance(error, EngineRefused):
        return refused(error.refusal, stage)
    text = " ".join(str(error).split()) or type(error).__name__
    status = Status.oom if is_out_of_memory(error) else Status.error
    reason = text if status is Status.oom else f"{type(error).__name__}: {text}"
    trace = "".join(traceback.format_exception(error))
    return Result(status=status, stage=stage, reason=reason, readings={"traceback": trace})


def _rank(
    deployment: Deployment,
    shape: RankShape,
    profile: Profile,
    quota: Quota,
    plan: CachePlan | Refusal,
) -> RankResult:
    num_blocks, own_blocks, block_bytes = 0, 0, 0
    if isinstance(plan, CachePlan):
        num_blocks, block_bytes = plan.num_blocks, plan.block_bytes_per_rank[shape.rank]
        own_blocks = plan.num_blocks_per_rank[shape.rank]
    return RankResult(
        rank=shape.rank,
        tp_rank=shape.tp_rank,
        pp_rank=shape.pp_rank,
        first_layer=shape.first_layer,
        num_layers=shape.num_layers,
        num_blocks=own_blocks,
        block_bytes=block_bytes,
        profile=profile,
        budget=Budget(
            base=quota.base,
            total_bytes=deployment.total_bytes,
            free_bytes=deployment.free_bytes,
            requested_bytes=quota.requested_bytes,
            available_bytes=quota.available_bytes,
            parts=(*quota.parts, *_cache_parts(quota, num_blocks, block_bytes)),
        ),
    )


def _cache_parts(quota: Quota, num_blocks: int, block_bytes: int) -> tuple[Part, ...]:
    """The blocks and what is left over, or what is missing."""
    cache_bytes = num_blocks * block_bytes
    cache = Part(
        name="kv_cache",
        size_bytes=cache_bytes,
        provenance=Provenance.derived,
        reason=f"{num_blocks:,} blocks of {block_bytes:,} bytes" if num_blocks else "no blocks",
    )
    rest = quota.available_bytes - cache_bytes
    return (
        cache,
        Part(
            name="unused" if rest >= 0 else "shortfall",
            size_bytes=rest,
            provenance=Provenance.derived,
            reason=("less than one block" if rest < block_bytes else "held back by another rank")
            if num_blocks
            else ("no blocks are allocated" if rest >= 0 else "the parts above exceed the request"),
        ),
    )
