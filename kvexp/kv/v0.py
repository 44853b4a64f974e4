"""The V0 engine's planner (vLLM 0.5 to 0.8).

Every attention layer keeps every token in blocks of one size; windows and groups do not exist.
`worker/cache_engine.py: get_cache_block_size`, `worker/worker.py`.
"""

from __future__ import annotations

from .plan import GroupPlan, Plan, PlanRefusal
from .request import PlanRequest
from .rules import PlannerRules
from .specs import AttentionSpec, MLAAttentionSpec, cdiv


def plan_v0(request: PlanRequest, rules: PlannerRules) -> Plan | PlanRefusal:
    """Plan as the V0 engine does: the fewest blocks of any worker, then the length check."""
    if request.auto_fit:
        return PlanRefusal(
            code="auto_fit_unsupported",
            message=f"vLLM {rules.version} cannot fit the model length to the memory",
        )
    attention = [
        [spec for spec in layers.values() if isinstance(spec, AttentionSpec)]
        for layers in request.workers
    ]
    blocks = [sum(_page_bytes(spec, rules) for spec in specs) for specs in attention]
    override = request.num_gpu_blocks_override
    per_worker = [
        max(available // block, 0) if override is None else override
        for available, block in zip(request.available_bytes, blocks, strict=True)
    ]
    num_blocks = min(per_worker)
    worker = per_worker.index(num_blocks)
    length, block_size = request.max_model_len, request.block_size
    if num_blocks <= 0:
        return PlanRefusal.no_memory(worker, request.available_bytes[worker])
    request_blocks = cdiv(length, block_size)
    tokens = num_blocks * block_size
    if length > tokens:
        return PlanRefusal.too_long(
            worker,
            request_blocks * blocks[worker],
            num_blocks * blocks[worker],
            length,
            tokens,
        )
    return Plan(
        num_blocks=num_blocks,
        num_blocks_per_worker=tuple(per_worker),
        bytes_per_block=blocks[0],
        bytes_per_block_per_worker=tuple(blocks),
        block_size=block_size,
        max_model_len=length,
        max_in_flight_tokens=request.in_flight_tokens,
        kv_cache_size_tokens=tokens,
        max_concurrency=tokens / length,
        blocks_per_request=request_blocks,
        needed_bytes_per_worker=tuple(request_blocks * block for block in blocks),
        groups=(
            GroupPlan(
                kind="full",
                num_layers=len(attention[0]),
                block_size=block_size,
                page_size_bytes=blocks[0],
                max_memory_usage_bytes=request_blocks * blocks[0],
            ),
        ),
        why=rules.token_text,
    )


def _page_bytes(spec: AttentionSpec, rules: PlannerRules) -> int:
    """A layer's block; a latent vector may start at an aligned address alone."""
    page, step = spec.page_size_bytes, rules.latent_alignment
    if not isinstance(spec, MLAAttentionSpec):
        return page
    return cdiv(page, spec.block_size * step) * spec.block_size * step
