"""From a deployment to blocks: which layers cache what, then the planner's arithmetic."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvexp.deployment import Deployment
from kvexp.dtypes import DType, KvDtype
from kvexp.engine import CachePlan, RankShape
from kvexp.errors import InvalidValue
from kvexp.kv import Plan, PlannerRules, PlanRefusal, PlanRequest, plan_cache
from kvexp.kv import max_in_flight_tokens as max_in_flight_tokens
from kvexp.kv import pp_layer_ranges as pp_layer_ranges
from kvexp.kv import rules_for as _rules_for
from kvexp.kv.dtypes import kv_quant_mode, storage_dtype, turboquant_slot_bytes
from kvexp.kv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
    cdiv,
)
from kvexp.request import SPARSE, Compressed
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


V4_BLOCK_SIZE, V4_WINDOW_BLOCK_SIZE = 256, 64
"""Tokens of DeepSeek V4's blocks, whatever `--block-size` is."""

V4_ALIGNMENT_BYTES = 576
"""Pages of DeepSeek V4's caches are multiples of it."""

SLIDING_BLOCK_SIZE = 16
"""A sliding layer ignores `--block-size`: the smallest block of the common backends."""


def layer_specs(deployment: Deployment, shape: RankShape) -> dict[str, LayerSpec]:
    """The layers of one rank that keep a cache, by name, in the model's order."""
    specs: dict[str, LayerSpec] = {}
    by_kind: dict[tuple[str, bool, bool], dict[str, LayerSpec]] = {}
    for index in range(shape.first_layer, shape.first_layer + shape.num_layers):
        if not deployment.model.owns_cache(index):
            continue
        kind, skipped = deployment.model.layer_type(index), index in deployment.kv_skip_layers
        indexed = deployment.model.has_indexer(index)
        key = kind, skipped, indexed
        if key not in by_kind:
            stored = _in_compute_dtype(deployment) if skipped else deployment
            by_kind[key] = _specs_of(stored, kind, indexed=indexed)
        for part, spec in by_kind[key].items():
            specs[f"layers.{index}{part}"] = spec
    if shape.pp_rank == deployment.pp - 1:
        specs.update(_draft_specs(deployment))
    return specs


def _in_compute_dtype(deployment: Deployment) -> Deployment:
    return replace(deployment, kv_dtype=KvDtype[deployment.dtype.name])


def _draft_specs(deployment: Deployment) -> dict[str, LayerSpec]:
    """The layers of a drafting model, which follow the model's on the last stage."""
    draft = deployment.draft
    if draft is None:
        return {}
    layers = draft.num_hidden_layers
    alone = replace(
        deployment,
        model=draft,
        pp=1,
        speculation=None,
        kv_skip_layers=frozenset(),
        block_size=attention_block_size(deployment),
    )
    shape = RankShape(rank=0, tp_rank=0, pp_rank=0, first_layer=0, num_layers=layers)
    return {f"draft.{name}": spec for name, spec in layer_specs(alone, shape).items()}


def attention_block_size(deployment: Deployment) -> int:
    """Tokens of an attention block, raised where a recurrent state needs a larger page.

    vLLM `_align_hybrid_block_size`: the block is the smallest multiple of a unit whose attention
    page holds the largest state's page; where every block keeps a state, the kernel's chunk of
    tokens divides it too.
    """
    caching = deployment.states
    held = deployment if caching.aligns_drafts else replace(deployment, speculation=None)
    states = _states(held)
    if not states or deployment.model.is_attention_free:
        return deployment.block_size
    token_bytes = _full(deployment, block_size=1).page_size_bytes
    state_bytes = max(state.page_size_bytes for state in states.values())
    unit = caching.unit or deployment.block_size
    if caching.mode == "all":
        unit = math.lcm(unit, caching.chunk_size or unit)
    return max(deployment.block_size, unit * cdiv(state_bytes, unit * token_bytes))


def holds_states(deployment: Deployment) -> bool:
    """Whether the page of a block holds the largest state, with what is drafted."""
    states = _states(deployment)
    if not states or deployment.model.is_attention_free:
        return True
    page_bytes = _full(deployment).page_size_bytes
    return max(state.page_size_bytes for state in states.values()) <= page_bytes


def state_block_size(deployment: Deployment) -> int:
    """Tokens after which a recurrent state is kept; without prefix caching only the last one is."""
    if deployment.states.mode == "none":
        return deployment.max_model_len
    if deployment.model.is_attention_free:
        return deployment.states.chunk_size or deployment.block_size
    return attention_block_size(deployment)


def _specs_of(deployment: Deployment, kind: str, *, indexed: bool) -> dict[str, LayerSpec]:
    """What one layer of a kind caches, by the suffix of its name; `indexed`: it picks tokens."""
    specs: dict[str, LayerSpec] = {}
    if deployment.model.compressed is not None:
        return _compressed(deployment, deployment.model.compressed, kind)
    if kind in ("full_attention", "hybrid"):
        if indexed:
            specs[".indexer"] = _indexer_of(deployment)
        specs[""] = _full(deployment)
    elif kind == "sliding_attention":
        specs[""] = _sliding(deployment)
    elif kind == "chunked_attention":
        specs[""] = _chunked(deployment)
    if deployment.model.cross_attention or kind == "cross_attention":
        specs[".encoder_attn"] = CrossAttentionSpec(
            block_size=deployment.block_size,
            indexes_kv_by_block_stride=True,
            **_heads(deployment, kind),
        )
    state = _states(deployment).get(kind)
    if state is not None:
        alone = deployment.model.is_attention_free
        page = None if alone else _full(deployment).page_size_bytes
        specs[".mixer"] = replace(
            state,
            block_size=state_block_size(deployment),
            page_size_padded=page,
            num_speculative_blocks=_num_drafted(deployment),
            num_checkpoint_blocks=deployment.states.num_checkpoints,
        )
    return specs


def _full(deployment: Deployment, block_size: int | None = None) -> FullAttentionSpec:
    """K and V of every token, or the latent vector."""
    size = block_size or attention_block_size(deployment)
    mla, kv_dtype = deployment.model.mla, deployment.kv_dtype
    if mla is None or not mla.latent_cache:
        heads = _heads(deployment, "full_attention")
        if kv_dtype.is_turboquant:
            slot = turboquant_slot_bytes(kv_dtype.value, heads["head_size"])
            return TQFullAttentionSpec(block_size=size, tq_slot_size=slot, **heads)
        return FullAttentionSpec(
            block_size=size,
            head_size_v=deployment.model.v_head_dim,
            indexes_kv_by_block_stride=True,
            **heads,
        )
    sparse_fp8 = mla.index_head_dim is not None and kv_dtype.is_fp8
    return MLAAttentionSpec(
        block_size=size,
        num_kv_heads=1,
        head_size=mla.latent_size,
        dtype=storage_dtype("fp8_ds_mla" if sparse_fp8 else kv_dtype.value),
        kv_quant_mode=kv_quant_mode(kv_dtype.value),
        cache_dtype_str="fp8_ds_mla" if sparse_fp8 else "auto",
        indexes_kv_by_block_stride=mla.index_head_dim is None,
    )


def _compressed(deployment: Deployment, known: Compressed, kind: str) -> dict[str, LayerSpec]:
    """DeepSeek V4: the window, compressed vectors, tokens being compressed, the indexer's keys.

    A compressor holds values and scores in fp32; that of sparse layers overlaps its neighbour.
    """
    model = deployment.model
    assert model.sliding_window is not None
    own: dict[str, Any] = {
        "dtype": "uint8",
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
    }
    window = _compressor(V4_WINDOW_BLOCK_SIZE, model.head_size, model.sliding_window, **own)
    specs: dict[str, LayerSpec] = {"": window}
    ratio = known.ratio(kind)
    if not ratio:
        return specs
    overlap, block_size = (2, 4) if kind == SPARSE else (1, 8)
    span, width = overlap * ratio, 2 * overlap
    vectors = MLAAttentionSpec(
        block_size=V4_BLOCK_SIZE,
        num_kv_heads=1,
        head_size=model.head_size,
        alignment=V4_ALIGNMENT_BYTES,
        compress_ratio=ratio,
        **own,
    )
    specs[".compressed"] = vectors
    specs[".compressor"] = _compressor(block_size, width * model.head_size, span)
    if kind == SPARSE:
        size = known.index_head_dim
        specs[".indexer"] = replace(
            _indexer(deployment, size),
            block_size=V4_BLOCK_SIZE,
            alignment=V4_ALIGNMENT_BYTES,
            compress_ratio=ratio,
        )
        specs[".indexer.compressor"] = _compressor(block_size, width * size, span)
    return specs


def _compressor(block_size: int, size: int, window: int, **own: Any) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=size,
        sliding_window=window,
        alignment=V4_ALIGNMENT_BYTES,
        **{"dtype": "float32", **own},
    )


def _indexer_of(deployment: Deployment) -> MLAAttentionSpec:
    """The key of a layer's indexer: in the compute dtype where it picks blocks of tokens."""
    model = deployment.model
    if model.block_indexer is None:
        assert model.mla is not None and model.mla.index_head_dim is not None
        return _indexer(deployment, model.mla.index_head_dim)
    return MLAAttentionSpec(
        block_size=deployment.block_size,
        num_kv_heads=1,
        head_size=model.block_indexer.index_head_dim,
        dtype=deployment.dtype.value,
    )


def _indexer(deployment: Deployment, head_dim: int) -> MLAAttentionSpec:
    """The key by which tokens are picked: 8-bit elements and a scale for each 128 of them."""
    return MLAAttentionSpec(
        block_size=deployment.block_size,
        num_kv_heads=1,
        head_size=head_dim + head_dim // 128 * 4,
        dtype="uint8",
    )


def _sliding(deployment: Deployment) -> SlidingWindowSpec:
    window, own = deployment.model.sliding_window, deployment.model.sliding_heads
    assert window is not None
    return SlidingWindowSpec(
        block_size=SLIDING_BLOCK_SIZE,
        sliding_window=window,
        head_size_v=own.v_head_dim if own else deployment.model.v_head_dim,
        indexes_kv_by_block_stride=True,
        **_heads(deployment, "sliding_attention"),
    )


def _chunked(deployment: Deployment) -> ChunkedLocalAttentionSpec:
    chunk = deployment.model.attention_chunk_size
    assert chunk is not None
    return ChunkedLocalAttentionSpec(
        block_size=deployment.block_size,
        attention_chunk_size=chunk,
        indexes_kv_by_block_stride=True,
        **_heads(deployment, "chunked_attention"),
    )


def _states(deployment: Deployment) -> dict[str, MambaSpec]:
    """The recurrent states of one rank by kind of layer, not padded."""
    model = deployment.model
    kinds = {model.layer_type(index) for index in range(model.num_hidden_layers)}
    makers: dict[str, Callable[[Deployment], MambaSpec]] = {
        "mamba": _mamba_state,
        "hybrid": _mamba_state,
        "linear_attention": _linear_state,
        "conv": _conv_state,
    }
    return {kind: make(deployment) for kind, make in makers.items() if kind in kinds}


def _num_drafted(deployment: Deployment) -> int:
    """Tokens drafted before each step: each has a state of its own, and a row of a convolution."""
    return deployment.speculation.num_tokens if deployment.speculation is not None else 0


def _mamba_state(deployment: Deployment) -> MambaSpec:
    """Convolution and recurrent state of Mamba on one rank.

    Mamba1's convolution covers the channels, Mamba2's the groups' B and C too.
    """
    mamba, tp = deployment.model.mamba, deployment.tp
    assert mamba is not None
    conv, rows = mamba.intermediate_size // tp, mamba.mamba_d_conv - 1
    if mamba.mamba_dt_rank is None:
        groups = mamba.mamba_n_groups if mamba.mamba_n_groups % tp == 0 else tp
        conv = (mamba.intermediate_size + 2 * groups * mamba.mamba_d_state) // tp
        rows += _num_drafted(deployment)
    return MambaSpec(
        block_size=deployment.max_model_len,
        shapes=(
            (rows, conv),
            (mamba.mamba_n_heads // tp, mamba.mamba_d_head, mamba.mamba_d_state),
        ),
        dtypes=_state_dtypes(deployment, mamba.state_dtype),
    )


def _linear_state(deployment: Deployment) -> MambaSpec:
    """Gated DeltaNet and KDA keep a convolution beside the state, lightning attention none."""
    linear, tp = deployment.model.linear, deployment.tp
    assert linear is not None
    heads = linear.linear_num_value_heads // tp
    own = linear.state_dtype
    alone = (own or deployment.dtype).value  # of lightning attention and KDA, not asked for
    state = (heads, linear.linear_value_head_dim, linear.linear_key_head_dim)
    if linear.kind == "lightning":
        return MambaSpec(block_size=deployment.max_model_len, shapes=(state,), dtypes=(alone,))
    conv = (2 * linear.key_size + linear.value_size) // tp
    rows = linear.linear_conv_kernel_dim - 1
    dtypes = _state_dtypes(deployment, own)
    if linear.kind == "gated_delta_net":
        rows += _num_drafted(deployment)
    else:
        dtypes = (dtypes[0], alone)
    return MambaSpec(
        block_size=deployment.max_model_len, shapes=((rows, conv), state), dtypes=dtypes
    )


def _state_dtypes(deployment: Deployment, own: DType | None) -> tuple[str, str]:
    """Of convolutions and of states (vLLM `MambaStateDtypeCalculator`)."""
    asked = deployment.states
    conv = asked.conv_dtype or deployment.dtype
    return conv.value, (asked.state_dtype or own or conv).value


def _conv_state(deployment: Deployment) -> MambaSpec:
    model = deployment.model
    assert model.conv_L_cache is not None
    return MambaSpec(
        block_size=deployment.max_model_len,
        shapes=((model.conv_L_cache - 1, model.hidden_size // deployment.tp),),
        dtypes=((deployment.states.conv_dtype or deployment.dtype).value,),
    )


def _heads(deployment: Deployment, kind: str) -> dict[str, Any]:
    """KV heads of one rank; they are replicated where tp exceeds their number."""
    model = deployment.model
    own = model.sliding_heads if kind == "sliding_attention" else None
    kv_heads = own.num_key_value_heads if own else model.kv_heads
    return {
        "num_kv_heads": max(1, kv_heads // deployment.tp),
        "head_size": own.head_dim if own else model.head_size,
        "dtype": storage_dtype(deployment.kv_dtype.value),
        "kv_quant_mode": kv_quant_mode(deployment.kv_dtype.value),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What an engine may ask of its planner, by vLLM's names; see `kv.PlanRequest`."""

    in_flight_tokens: int
    auto_fit: bool = False
    hybrid: bool = True
    dcp: int = 1
    num_gpu_blocks_override: int | None = None


def plan(
    deployment: Deployment,
    shapes: Sequence[RankShape],
    available_bytes: Sequence[int],
    *,
    rules: PlannerRules,
    options: PlanOptions,
) -> CachePlan | Refusal:
    """vLLM's plan for `available_bytes` on each rank; a refusal carries the engine's figures."""
    request = PlanRequest(
        workers=[layer_specs(deployment, shape) for shape in shapes],
        available_bytes=list(available_bytes),
        max_model_len=deployment.max_model_len,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        max_in_flight_tokens=options.in_flight_tokens,
        block_size=attention_block_size(deployment),
        mamba_cache_mode=deployment.states.mode,
        auto_fit=options.auto_fit,
        hybrid=options.hybrid,
        dcp=options.dcp,
        num_gpu_blocks_override=options.num_gpu_blocks_override,
    )
    answer = plan_cache(request, rules)
    if isinstance(answer, PlanRefusal):
        return _refusal(deployment, _with_need(answer, request, rules))
    return _cache_plan(deployment, answer, rules)


def _with_need(answer: PlanRefusal, request: PlanRequest, rules: PlannerRules) -> PlanRefusal:
    """A refusal for want of any memory, with what one request would have needed."""
    if answer.code != "no_memory" or answer.worker is None:
        return answer
    plenty = replace(request, available_bytes=[1 << 62] * len(request.workers))
    rich = plan_cache(plenty, rules)
    if isinstance(rich, PlanRefusal) or rich.needed_bytes_per_worker is None:
        return answer
    return replace(answer, needed_bytes=rich.needed_bytes_per_worker[answer.worker])


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
        message = (
            f"nothing is left for the cache: the parts before it exceed the request by"
            f" {gib(-available)}, and one request of {deployment.max_model_len} tokens needs"
            f" {gib(needed)}"
        )
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


def _cache_plan(deployment: Deployment, answer: Plan, rules: PlannerRules) -> CachePlan:
    notes = [rules.note] if rules.note else []
    if answer.max_model_len < deployment.max_model_len:
        notes.append(
            f"max_model_len was fitted: reduced from {deployment.max_model_len}"
            f" to {answer.max_model_len}"
        )
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
