"""The planner: from layer specs and available bytes to blocks, tokens and concurrency.

vLLM 0.26 `get_kv_cache_configs`, step by step, by the rules of the version asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .counts import (
    blocks_per_request,
    bytes_per_block,
    check_layers_held,
    longest_fit,
    needed_bytes,
)
from .errors import EngineError
from .grouping import group_layers
from .groups import Group
from .plan import GroupPlan, Plan, PlanRefusal
from .request import PlanRequest
from .rules import PlannerRules
from .specs import Demand, LayerSpec
from .v0 import plan_v0

Layers = Mapping[str, LayerSpec]


@dataclass(frozen=True, slots=True)
class _Worker:
    """One worker: its layers, its share of the groups and the bytes it plans with."""

    layers: Layers
    groups: Sequence[Group]
    available_bytes: int


def plan_cache(request: PlanRequest, rules: PlannerRules) -> Plan | PlanRefusal:
    """Plan the KV cache of a model as one vLLM version does.

    Args:
        request: The model's layers on each worker, the available bytes and the limits.
        rules: The version's rules, from `rules_for`.

    Returns:
        The plan, or why the engine would refuse to start.
    """
    try:
        if rules.engine == "v0":
            return plan_v0(request, rules)
        return _plan(request, rules)
    except EngineError as error:
        return PlanRefusal(code=error.code, message=error.message)
    except ZeroDivisionError:
        return PlanRefusal(
            code="ZeroDivisionError",
            message="the engine divides by zero: a page, a request or a worker's share is empty",
        )


def _plan(request: PlanRequest, rules: PlannerRules) -> Plan | PlanRefusal:
    demand = _demand(request, rules)
    if request.auto_fit and not rules.auto_fit:
        return PlanRefusal(
            code="auto_fit_unsupported",
            message=f"vLLM {rules.version} cannot fit the model length to the memory",
        )
    model = _merged(request.workers)
    if not model:
        return _empty_plan(request, demand, rules)
    if rules.need == "layers":
        pairs = zip(request.workers, request.available_bytes, strict=True)
        needed = _check((_layer_budget(layers, available) for layers, available in pairs), demand)
        if isinstance(needed, PlanRefusal):
            return needed
        return _count(_with_groups(request, model, rules), needed, request, demand, rules)
    workers = _with_groups(request, model, rules)
    if request.num_gpu_blocks_override is not None and rules.override_caps_memory:
        workers = [_overridden(worker, request, rules) for worker in workers]
    checked = [_whole(request, model, rules)] if rules.checks_whole_model else workers
    budgets = [_group_budget(worker, request, rules) for worker in checked]
    if request.auto_fit:
        fitted = min(longest_fit(budget.fits, demand) for budget in budgets)
        if fitted <= 0:
            return PlanRefusal(code="autofit_failed", message="not even one token fits")
        demand = demand.with_length(fitted)
    needed = _check(budgets, demand)
    if isinstance(needed, PlanRefusal):
        return needed
    return _count(workers, needed, request, demand, rules)


def _demand(request: PlanRequest, rules: PlannerRules) -> Demand:
    in_flight = request.in_flight_tokens
    ranks = {"none": 1, "dcp": request.dcp, "dcp_pcp": request.dcp * request.pcp}
    encoder_tokens = request.max_num_encoder_input_tokens
    return Demand(
        max_model_len=request.max_model_len,
        max_in_flight_tokens=(
            in_flight if rules.window_tokens == "in_flight" else request.max_num_batched_tokens
        ),
        max_num_encoder_input_tokens=(
            request.max_num_batched_tokens if encoder_tokens is None else encoder_tokens
        ),
        dcp=ranks[rules.length_divisor],
        mamba_cache_mode=request.mamba_cache_mode,
        mamba_demand=rules.mamba_demand,
    )


def _merged(workers: Sequence[Layers]) -> Layers:
    """Join the workers' layers; a name that two workers hold must mean one spec."""
    first = workers[0]
    if all(layers is first for layers in workers):
        model: dict[str, LayerSpec] = dict(first)
    else:
        model = {}
        for layers in workers:
            for name, spec in layers.items():
                other = model.setdefault(name, spec)
                if other is not spec and other != spec:
                    raise EngineError("AssertionError", f"workers disagree about layer {name}")
    return model


def _with_groups(request: PlanRequest, model: Layers, rules: PlannerRules) -> list[_Worker]:
    pairs = list(zip(request.workers, request.available_bytes, strict=True))
    if rules.groups_per_worker:
        workers = [
            _Worker(layers, group_layers(layers, request.hybrid, rules), available)
            for layers, available in pairs
        ]
        _check_alike(workers)
        return workers
    groups = group_layers(model, request.hybrid, rules)
    return [_Worker(layers, _project(groups, layers, model, rules), n) for layers, n in pairs]


def _whole(request: PlanRequest, model: Layers, rules: PlannerRules) -> _Worker:
    """All layers on one worker with the least memory of any."""
    return _Worker(model, group_layers(model, request.hybrid, rules), min(request.available_bytes))


def _check_alike(workers: Sequence[_Worker]) -> None:
    """Check that workers that grouped their own layers came to the same kinds of groups."""
    kinds = [
        sorted((group.spec for group in worker.groups), key=lambda spec: (spec.kind, repr(spec)))
        for worker in workers
    ]
    for other in kinds[1:]:
        if any(mine != theirs for mine, theirs in zip(kinds[0], other, strict=False)):
            raise EngineError("AssertionError", "workers came to different groups of layers")


def _project(
    groups: Sequence[Group], layers: Layers, model: Layers, rules: PlannerRules
) -> Sequence[Group]:
    if len(layers) == len(model):
        return groups
    return [group.on_worker(layers, rules.shrinks_uniform_type) for group in groups]


def _overridden(worker: _Worker, request: PlanRequest, rules: PlannerRules) -> _Worker:
    assert request.num_gpu_blocks_override is not None
    block = bytes_per_block(worker.groups, rules, request.enable_cross_layers_blocks)
    if block == 0:
        raise ZeroDivisionError
    return replace(worker, available_bytes=request.num_gpu_blocks_override * block)


@dataclass(frozen=True, slots=True)
class _Budget:
    """The bytes that one request may use on a worker, and those that it needs."""

    available_bytes: int
    needed_bytes: Callable[[Demand], int]

    def fits(self, demand: Demand) -> bool:
        return self.needed_bytes(demand) <= self.available_bytes


def _group_budget(worker: _Worker, request: PlanRequest, rules: PlannerRules) -> _Budget:
    """Plan with the groups; newer versions leave one block for the placeholder."""
    cross_layers = request.enable_cross_layers_blocks
    available = worker.available_bytes
    if rules.reserves_null_block:
        available -= bytes_per_block(worker.groups, rules, cross_layers)
    needed = partial(needed_bytes, worker.groups, rules=rules, cross_layers=cross_layers)
    return _Budget(available, needed)


def _layer_budget(layers: Layers, available_bytes: int) -> _Budget:
    """Plan layer by layer, as older versions checked before any grouping."""
    counts: dict[LayerSpec, int] = {}
    for spec in layers.values():
        counts[spec] = counts.get(spec, 0) + 1

    def needed(demand: Demand) -> int:
        return sum(number * spec.max_memory_usage_bytes(demand) for spec, number in counts.items())

    return _Budget(available_bytes, needed)


def _check(budgets: Iterable[_Budget], demand: Demand) -> tuple[int, ...] | PlanRefusal:
    """Return what one longest request needs on each worker, or the first worker's refusal."""
    needed: list[int] = []
    for worker, budget in enumerate(budgets):
        if budget.available_bytes <= 0:
            return PlanRefusal.no_memory(worker, budget.available_bytes)
        needed.append(budget.needed_bytes(demand))
        if needed[-1] > budget.available_bytes:
            longest = longest_fit(budget.fits, demand)
            return PlanRefusal.too_long(
                worker, needed[-1], budget.available_bytes, demand.max_model_len, longest
            )
    return tuple(needed)


def _count(
    workers: Sequence[_Worker],
    needed: tuple[int, ...],
    request: PlanRequest,
    demand: Demand,
    rules: PlannerRules,
) -> Plan:
    override, cross_layers = request.num_gpu_blocks_override, request.enable_cross_layers_blocks
    blocks, per_worker = [], []
    for worker in workers:
        check_layers_held(worker.groups, len(worker.layers), cross_layers)
        blocks.append(bytes_per_block(worker.groups, rules, cross_layers))
        number = max(worker.available_bytes // blocks[-1], 0)
        per_worker.append(number if override is None else override)
    num_blocks = min(per_worker)
    if num_blocks == 0:
        raise ZeroDivisionError
    first = workers[0]
    for worker in workers[1:]:
        if worker.groups is not first.groups and not blocks_per_request(
            worker.groups, demand, rules
        ):
            raise ZeroDivisionError
    request_blocks = blocks_per_request(first.groups, demand, rules)
    tokens, concurrency = _capacity(first.groups, num_blocks, request_blocks, demand, rules)
    groups = tuple(
        GroupPlan(
            kind=group.kind,
            num_layers=len(group.layers),
            block_size=group.block_size,
            page_size_bytes=group.page_size_bytes,
            max_memory_usage_bytes=group.num_blocks(demand) * group.page_size_bytes,
        )
        for group in first.groups
    )
    return Plan(
        num_blocks=num_blocks,
        num_blocks_per_worker=tuple(per_worker),
        bytes_per_block=blocks[0],
        bytes_per_block_per_worker=tuple(blocks),
        block_size=min(group.block_size for group in groups),
        max_model_len=demand.max_model_len,
        max_in_flight_tokens=request.in_flight_tokens,
        kv_cache_size_tokens=tokens,
        max_concurrency=concurrency,
        blocks_per_request=request_blocks,
        needed_bytes_per_worker=needed,
        groups=groups,
        why=rules.token_text,
    )


def _capacity(
    groups: Sequence[Group],
    num_blocks: int,
    request_blocks: int,
    demand: Demand,
    rules: PlannerRules,
) -> tuple[int, float]:
    """Return tokens and concurrency in the engine's order of float operations."""
    concurrency = num_blocks / request_blocks
    if rules.token_rule == "concurrency":
        return int(concurrency * demand.max_model_len), concurrency
    block_size = min(group.block_size for group in groups)
    tokens = num_blocks // len(groups) * block_size * demand.dcp
    if rules.concurrency == "tokens":
        concurrency = tokens / demand.max_model_len
    return tokens, concurrency


def _empty_plan(request: PlanRequest, demand: Demand, rules: PlannerRules) -> Plan:
    """A model that keeps nothing: one block, which is the placeholder."""
    return Plan(
        num_blocks=1,
        num_blocks_per_worker=(1,) * len(request.workers),
        bytes_per_block=0,
        bytes_per_block_per_worker=(0,) * len(request.workers),
        block_size=request.block_size,
        max_model_len=demand.max_model_len,
        max_in_flight_tokens=request.in_flight_tokens,
        kv_cache_size_tokens=None,
        max_concurrency=None,
        blocks_per_request=None,
        needed_bytes_per_worker=None,
        groups=(),
        why="no layer keeps anything, so the cache holds only the placeholder block",
    )
