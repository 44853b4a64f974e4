"""weights_memory: what vLLM's loader leaves allocated on one rank.

Loading runs with the allocator's split limit at 20 MiB, so that a large tensor occupies whole
2 MiB units and a freed temporary may be taken over unsplit by a smaller tensor. Replaying the
allocations in the order of construction gives the engine's figure to the byte for bf16 models.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from kvexp.contract import (
    MIB,
    CachingAllocator,
    Deployment,
    Model,
    Quantization,
    RankShape,
    Slice,
    Tensor,
    drafts,
    simulate,
    terms,
    weights,
)
from kvexp_vllm import lora, multimodal, stages, step_buffers
from kvexp_vllm import speculation as speculative
from kvexp_vllm.offload import Offloader
from kvexp_vllm.peaks import chip
from kvexp_vllm.rules import VersionRules, patch_release_of

SPLIT_LIMIT_BYTES = 20 * MIB
ATTENTION_SCALES = 4  # one-element fp32 buffers of an attention layer: q, k, v, prob
COMPRESSING = ("compressed_sparse_attention", "heavily_compressed_attention")
"""Kinds that turn by a base of their own (`compress_rope_theta`)."""
CACHELESS = ("mamba", "linear_attention", "conv", "mlp")  # kinds of layers without attention
FP8_EXTRA_BYTES = 32 * MIB  # seen with fp8 KV (llama3-8b) and with fp8 weights (llama3.1-8b)
MXFP4_BYTES = 17 / 32  # of an element: half a byte, and one of scale for each 32
MXFP4_PADDING, MXFP4_PADDING_SINCE = (0.0585, 0.077), (0, 15, 0)
"""Of Triton's kernels: 13.47 and 64.38 GiB of gpt-oss under 0.14, 13.64 of 20B under 0.19."""

MARLIN_WIDTH, MARLIN_HIDDEN = 128, 256  # multiples that its kernel for mxfp4 takes
NVFP4_ROWS, NVFP4_BYTES = 128, 9 / 16  # half a byte of an element, one of scale for each 16
TRITON_SINCE = (0, 12, 0)  # the wheel has Triton's kernels, which Hopper and B200 then take
BLACKWELL = ("10", "11", "12")
EXPERTS = ("mlp.experts.0.gate_proj",)  # as checkpoints name them
TOWERS = ("model.visual", "vision_tower", "vision_model")  # as checkpoints name them
FP8_WEIGHTS_EXTRA_SCALARS = 5  # further one-element tensors a layer, one case


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Allocated bytes after loading on one rank; `lora_bytes` and `draft_bytes` are part of it.

    `offloaded_bytes` are not: the largest share of one layer in them is `returned_bytes`.
    """

    total_bytes: int
    lora_bytes: int = 0
    draft_bytes: int = 0
    offloaded_bytes: int = 0
    returned_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The engine's options that weights depend on."""

    rules: VersionRules
    expert_parallel: bool = False
    fully_sharded_loras: bool = False
    whole_encoders: bool = False
    expandable_segments: bool = False
    offload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RotaryCaches:
    """The cos/sin caches of a rank: one for all layers whose positions are the same."""

    rules: VersionRules
    made: set[tuple[Any, ...]] = field(default_factory=set)

    def load(self, allocator: CachingAllocator, deployment: Deployment, index: int) -> None:
        """The cache of a layer, where it has one that no layer before it made."""
        kind, model = _rotary_cache(deployment, index), deployment.model
        scaling = repr(sorted((model.rope_scaling or {}).items(), key=str))
        key = (kind, model.head_size, model.max_position_embeddings, model.rope_theta, scaling)
        if not kind or key in self.made:
            return
        self.made.add(key)
        times = self.rules.mrope_rows if multimodal.has_mrope(model) else 1
        _allocate_rotary_cache(allocator, deployment, kind, times)


def share_of(deployment: Deployment, shape: RankShape, *, expert_parallel: bool = False) -> Slice:
    """The rank's share of the tensors; experts are shared by the replicas.

    vLLM 0.26 `fused_moe/config.py: FusedMoEParallelConfig.make`: without expert parallelism each
    expert is split over all `dp` x `tp` ranks, with it they are dealt out whole. The experts that
    every token passes are then whole where tokens are dealt out too (`use_sequence_parallel_moe`).
    """
    ranks = deployment.tp * deployment.dp
    whole = expert_parallel and ranks > 1
    return Slice(
        tp=deployment.tp,
        num_layers=shape.num_layers,
        first_stage=shape.pp_rank == 0,
        last_stage=shape.pp_rank == deployment.pp - 1,
        expert_tp=ranks,
        shared_tp=1 if whole and deployment.tp > 1 and deployment.dp > 1 else 0,
        ep=ranks if whole else 1,
        ep_rank=shape.tp_rank,
        everywhere=stages.on_every_stage(deployment),
    )


_kept: dict[str, Loaded] = {}
"""Replays of this process: ranks of a stage and points of a sweep mostly load the same."""

MOST_KEPT = 256


def weights_memory(deployment: Deployment, shape: RankShape, options: Options) -> Loaded:
    """What is allocated after loading on one rank (vLLM's `weights_memory`)."""
    key = _key(deployment, shape, options)
    if key not in _kept:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = _replayed(deployment, shape, options)
    last_stage = shape.pp_rank == deployment.pp - 1
    buffers = step_buffers.allocated(deployment, options.rules, last_stage=last_stage)
    return replace(_kept[key], total_bytes=_kept[key].total_bytes + buffers)


def _key(deployment: Deployment, shape: RankShape, options: Options) -> str:
    """All that a load depends on, but for buffers of a step."""
    d = deployment
    return repr(
        (
            (d.model, d.dtype, d.quantization, d.kv_dtype.is_fp8, d.tp, d.pp, d.dp),
            d.gpu.compute_capability,
            (d.lora, d.speculation, sorted(d.mm_limits.items())),
            (d.max_num_batched_tokens, d.max_num_seqs) if d.lora is not None else (),
            (shape.pp_rank, shape.first_layer, shape.num_layers),
            shape.tp_rank if options.expert_parallel else 0,
            options,
        )
    )


def _replayed(deployment: Deployment, shape: RankShape, options: Options) -> Loaded:
    limit = SPLIT_LIMIT_BYTES if options.rules.load_split_limit else None
    settings = simulate.AllocatorSettings(
        max_split_size_bytes=limit, expandable_segments=options.expandable_segments
    )
    allocator = CachingAllocator(settings=settings)
    share = share_of(deployment, shape, expert_parallel=options.expert_parallel)
    rotary_caches = RotaryCaches(options.rules)
    before, after = _tables(deployment, share, options)
    _load(allocator, before)
    layers = range(shape.first_layer, shape.first_layer + shape.num_layers)
    offloader = Offloader(options.offload_bytes)
    for index in layers:
        _load_layer(allocator, deployment, share, index, rotary_caches, offloader)
    _load(allocator, after)
    model_bytes = allocator.allocated_bytes
    if deployment.lora is not None:
        _load_lora(allocator, deployment, share, layers, options)
    with_lora = allocator.allocated_bytes
    if deployment.draft is not None and share.last_stage:
        _load_draft(allocator, deployment, share, rotary_caches)
    beyond = terms.beyond_formula_bytes(deployment) // (deployment.tp * deployment.pp)
    limited = options.rules.load_split_limit
    extra = _extra_bytes(deployment, shape) if limited else _copies_bytes(deployment, shape)
    extra += beyond + _unread_projections_bytes(deployment, layers)
    extra += _marlin_bytes(deployment, share, shape.num_layers)
    extra += _nvfp4_rows_bytes(deployment, share, layers)
    return Loaded(
        total_bytes=max(0, allocator.allocated_bytes + extra),
        lora_bytes=with_lora - model_bytes,
        draft_bytes=allocator.allocated_bytes - with_lora,
        offloaded_bytes=sum(offloader.by_layer.values()),
        returned_bytes=max(offloader.by_layer.values(), default=0),
    )


def _unread_projections_bytes(deployment: Deployment, layers: range) -> int:
    """K and V of layers that read an earlier cache, made all the same.

    0.19 to 0.33 `models/gemma4.py`; other classes have them in the checkpoint.
    """
    model, share = deployment.model, deployment.tp
    if weights.architecture_of(model).own_projections:
        return 0
    heads = [model.heads(index) for index in layers if not model.owns_cache(index)]
    widths = (2 * max(1, h.num_key_value_heads // share) * h.head_dim for h in heads)
    return sum(widths) * model.hidden_size * deployment.dtype.itemsize_bytes


def _load(allocator: CachingAllocator, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        allocator.allocate(tensor.size_bytes)


def _tables(
    deployment: Deployment, share: Slice, options: Options
) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
    """What stands before and after the layers, with the rows that adapters may add."""
    model, dtype = deployment.model, deployment.dtype
    encoders = replace(share, tp=1) if options.whole_encoders else share
    embedding, head = lora.added_vocabulary(deployment, options.rules)
    return (
        chain(
            _towers(deployment, encoders, options.rules),
            (
                _with_rows(tensor, embedding // share.tp * model.hidden_size)
                for tensor in weights.embedding(model, share, dtype)
            ),
        ),
        (
            _with_rows(tensor, head // share.tp * model.hidden_size)
            for tensor in weights.head(model, share, dtype, deployment.quantization)
            if not (options.rules.pools and tensor.name.startswith("lm_head"))  # `adapters.py`
        ),
    )


def _towers(deployment: Deployment, share: Slice, rules: VersionRules) -> list[Tensor]:
    """The towers that are built; bitsandbytes takes their matrices too.

    `bitsandbytes_loader.py: _get_bnb_target_modules` names each layer of linears; the other formats
    are those of a checkpoint, which leaves an encoder as it is.
    """
    model, quantization, stored = deployment.model, deployment.quantization, None
    if quantization is Quantization.bitsandbytes:
        stored = weights.stored_as(weights.format_of(model, quantization), TOWERS)
    built = multimodal.towers_built(deployment, rules)
    found = weights.towers(model, share, deployment.dtype, stored=stored, **built)
    return _held(found, deployment, rules)


def _with_rows(tensor: Tensor, numel: int) -> Tensor:
    if tensor.name not in ("embed_tokens", "lm_head"):
        return tensor
    return replace(tensor, numel=tensor.numel + numel)


def _load_layer(
    allocator: CachingAllocator,
    deployment: Deployment,
    share: Slice,
    index: int,
    rotary_caches: RotaryCaches,
    offloader: Offloader,
    norms: Iterable[Tensor] | None = None,
) -> None:
    rules = rotary_caches.rules
    first = _held(_attention(deployment, share, index), deployment, rules)
    rest = _held(_rest_of_layer(deployment, share, index, norms), deployment, rules)
    blocks = [allocator.allocate(tensor.size_bytes) for tensor in first]
    rotary_caches.load(allocator, deployment, index)
    blocks += [allocator.allocate(tensor.size_bytes) for tensor in rest]
    for tensor, block in zip((*first, *rest), blocks, strict=True):
        if offloader.takes(index, tensor):
            allocator.free(block)


def _held(tensors: Iterable[Tensor], deployment: Deployment, rules: VersionRules) -> list[Tensor]:
    """A checkpoint's tensors as the kernels of the release and the card keep them."""
    found = list(tensors)
    if _unpacks_zeros(deployment, rules):
        found = [_unpacked(tensor, deployment) for tensor in found]
    if rules.nests_scales and deployment.quantization is Quantization.bitsandbytes:
        found = [_nested(tensor) for tensor in found]
    if _keeps_zeros(deployment, rules):
        found = [each for tensor in found for each in _zeroed(tensor, deployment)]
    return found


def _unpacks_zeros(deployment: Deployment, rules: VersionRules) -> bool:
    return rules.unpacks_zeros and (deployment.gpu.compute_capability or "").startswith("9.")


def _unpacked(tensor: Tensor, deployment: Deployment) -> Tensor:
    """Zero points of a matrix as Machete has them (`transform_w_zp`); experts go by Marlin."""
    if not tensor.name.endswith(".zeros") or "experts" in tensor.name:
        return tensor
    stored = weights.format_of(deployment.model, deployment.quantization)
    assert stored is not None
    numel = tensor.size_bytes * 8 // weights.bits_of(stored)
    return replace(tensor, numel=numel, itemsize_bytes=deployment.dtype.itemsize_bytes)


def _keeps_zeros(deployment: Deployment, rules: VersionRules) -> bool:
    """Whether GPTQ goes through ExLlama's kernels: on an older card than Marlin's are for."""
    older = float(deployment.gpu.compute_capability or 8) < rules.marlin_capability
    return older and deployment.quantization is Quantization.gptq


def _zeroed(tensor: Tensor, deployment: Deployment) -> Iterator[Tensor]:
    """Scales with the zero points that those kernels read of symmetric weights too (`qzeros`)."""
    yield tensor
    stored = weights.format_of(deployment.model, deployment.quantization)
    if tensor.name.endswith(".weight_scale") and stored is not None and not stored.zero_point:
        numel = tensor.numel * weights.bits_of(stored) // 8
        yield replace(tensor, name=f"{tensor.name}.zeros", numel=numel, itemsize_bytes=1)


def _nested(tensor: Tensor) -> Tensor:
    """Scales quantised once more, a byte each and fp32 for every 256.

    bitsandbytes `functional.py: quantize_4bit` with `compress_statistics`, as vLLM asks for and
    most checkpoints have; 0.9.2 `bitsandbytes_loader.py: dequantize_dq` undoes it.
    """
    if tensor.role != "scale" or not tensor.name.endswith(".weight_scale"):
        return tensor
    return replace(tensor, numel=tensor.numel + 4 * -(-tensor.numel // 256), itemsize_bytes=1)


def _load_lora(
    allocator: CachingAllocator,
    deployment: Deployment,
    share: Slice,
    layers: range,
    options: Options,
) -> None:
    tensors = chain(
        weights.embedding(deployment.model, share, deployment.dtype),
        *(
            chain(_attention(deployment, share, index), _rest_of_layer(deployment, share, index))
            for index in layers
        ),
    )
    for size in lora.buffers(
        deployment,
        tensors,
        options.rules,
        first_stage=share.first_stage,
        last_stage=share.last_stage,
        fully_sharded=options.fully_sharded_loras,
    ):
        allocator.allocate(size)


def _load_draft(
    allocator: CachingAllocator,
    deployment: Deployment,
    share: Slice,
    rotary_caches: RotaryCaches,
) -> None:
    """The draft on the last stage: all of its layers, split over the same ranks."""
    draft, speculation = deployment.draft, deployment.speculation
    assert draft is not None and speculation is not None
    method = speculation.method
    alone = drafts.alone(deployment)
    share = replace(share, num_layers=draft.num_hidden_layers, first_stage=True, last_stage=True)
    before, after = speculative.tensors(deployment, draft, share, method)
    _load(allocator, before)
    for index in range(draft.num_hidden_layers):
        norms = drafts.norms(draft, deployment.dtype, method, index)
        _load_layer(allocator, alone, share, index, rotary_caches, Offloader(0), norms)
    _load(allocator, after)


def _attention(deployment: Deployment, share: Slice, index: int) -> Iterator[Tensor]:
    return weights.attention(
        deployment.model, share, deployment.dtype, deployment.quantization, index
    )


def _rest_of_layer(
    deployment: Deployment, share: Slice, index: int, norms: Iterable[Tensor] | None = None
) -> Iterator[Tensor]:
    model, dtype = deployment.model, deployment.dtype
    scale = Tensor(name="attn.scale", numel=1, itemsize_bytes=4, role="scale")
    scales = 0 if model.layer_type(index) in CACHELESS else ATTENTION_SCALES
    return chain(
        (scale for _ in range(scales)),
        weights.attention_norms(model, dtype, index),
        weights.mlp(model, share, dtype, deployment.quantization, index),
        weights.layer_norms(model, dtype, index) if norms is None else norms,
    )


def _rotary_cache(deployment: Deployment, index: int) -> str:
    """Which of the model's rotary caches a layer uses, empty for none."""
    model = deployment.model
    kind = model.layer_type(index)
    if kind in CACHELESS or weights.rotary_size(model) == 0:
        return ""
    if kind == "full_attention" and model.attention_chunk_size is not None:
        return ""  # full layers between chunked ones carry no position
    if weights.architecture_of(model).local_rotary or model.compressed is not None:
        return "compressed" if kind in COMPRESSING else kind
    return "rotary"


def _rotary_width(model: Model, kind: str) -> int:
    """Elements of a row of the cache; 0.26 `rotary_embedding/gemma4_rope.py` fills the head up."""
    known = weights.architecture_of(model)
    sliding = known.local_rotary > 0 and kind == "sliding_attention"
    own = model.sliding_heads if sliding else None
    head = model.head_size if own is None else own.head_dim
    if known.whole_rotary:
        return head
    return int(head * known.local_rotary) if sliding else weights.rotary_size(model)


def _allocate_rotary_cache(
    allocator: CachingAllocator, deployment: Deployment, kind: str, times: int
) -> None:
    """The cos/sin cache, built in fp32 and cast, as the rotary embedding does.

    YaRN keeps the fp32 table: alone where heads are rotated, beside the cast one with MLA. Where
    positions have a time, the table is several `times` as long (`MRotaryEmbedding`).
    """
    model, size = deployment.model, _rotary_width(deployment.model, kind)
    scaling = model.rope_scaling or {}
    rows = model.max_position_embeddings
    own = weights.architecture_of(model).local_rotary > 0 and kind == "sliding_attention"
    scaled = None if own else model.rope_type
    if scaled == "linear":
        rows = int(rows * float(scaling["factor"]))
    elif scaled == "yarn":
        rows = int(_original(deployment) * float(scaling["factor"]))
    rows *= times
    half_bytes = rows * (size // 2) * 4
    angles = [allocator.allocate(half_bytes) for _ in ("freqs", "cos", "sin")]
    table = allocator.allocate(2 * half_bytes)
    for block in angles:
        allocator.free(block)
    if scaled != "yarn" or model.mla is not None:
        allocator.allocate(rows * size * deployment.dtype.itemsize_bytes)
    if scaled != "yarn":
        allocator.free(table)


def _original(deployment: Deployment) -> int:
    """Positions before scaling; the longest ones where the config does not say."""
    scaling = deployment.model.rope_scaling or {}
    stated = scaling.get("original_max_position_embeddings")
    return int(stated or deployment.model.max_position_embeddings)


def _extra_bytes(deployment: Deployment, shape: RankShape) -> int:
    """What the replay does not explain; both constants come from one case each."""
    fp8_weights = deployment.quantization is Quantization.fp8
    extra = FP8_EXTRA_BYTES if fp8_weights or deployment.kv_dtype.is_fp8 else 0
    if fp8_weights:
        extra += FP8_WEIGHTS_EXTRA_SCALARS * 512 * shape.num_layers
    return extra


def _copies_bytes(deployment: Deployment, shape: RankShape) -> int:
    """What loading left beside the tensors before 0.21, from start-up logs of 0.11 to 0.19.

    MLA keeps its up-projection twice, in the order of both of its uses; Triton's kernels pad mxfp4
    experts further.
    """
    model, extra = deployment.model, 0
    if model.mla is not None and model.mla.latent_cache:
        heads = model.num_attention_heads // deployment.tp
        up = heads * (model.mla.qk_nope_head_dim + model.mla.v_head_dim) * model.mla.kv_lora_rank
        extra += up * deployment.dtype.itemsize_bytes * shape.num_layers
    if model.moe is not None and model.moe.format == "mxfp4" and not _is_marlin(deployment):
        width = model.moe.moe_intermediate_size // deployment.tp
        elements = 3 * model.moe.num_experts * width * model.hidden_size * shape.num_layers
        newer = patch_release_of(deployment.engine_version) >= MXFP4_PADDING_SINCE
        extra += int(elements * MXFP4_BYTES * MXFP4_PADDING[newer])
    return extra


def _is_marlin(deployment: Deployment) -> bool:
    """Whether Marlin's kernel runs mxfp4 experts (`get_mxfp4_backend`)."""
    bundled = patch_release_of(deployment.engine_version) >= TRITON_SINCE
    on = chip(deployment)
    return on not in ("9", "10") or (on == "9" and not bundled)


def _marlin_bytes(deployment: Deployment, share: Slice, num_layers: int) -> int:
    """What padding experts of gpt-oss for Marlin adds: 2,880 to 2,944 and 3,072.

    20B takes 13.72 GiB on A100, GB10 and H100 alike, 120B 65.97 on H100 (0.10.1).
    """
    moe = deployment.model.moe
    if moe is None or moe.format != "mxfp4" or not moe.bias or not _is_marlin(deployment):
        return 0
    count, width = _experts_of(deployment.model, share)
    hidden = deployment.model.hidden_size
    own = weights.round_up(width, weights.MXFP4_WIDTH)
    rows, columns = weights.round_up(width, MARLIN_WIDTH), weights.round_up(hidden, MARLIN_HIDDEN)
    scales = weights.round_up(2 * own, 256) * weights.round_up(hidden // 32, 4) + weights.round_up(
        hidden, 256
    ) * weights.round_up(own // 32, 4)
    counted = 3 * own * hidden // 2 + scales + 4 * (2 * own + hidden)
    padded = int(3 * rows * columns * MXFP4_BYTES) + 2 * (2 * rows + columns)
    return count * num_layers * (padded - counted)


def _experts_of(model: Model, share: Slice) -> tuple[int, int]:
    """How many experts a rank has, and the width of each."""
    moe = model.moe
    assert moe is not None
    if share.ep > 1:
        return moe.num_experts // share.ep, moe.moe_intermediate_size
    return moe.num_experts, moe.moe_intermediate_size // (share.expert_tp or share.tp)


def _nvfp4_rows_bytes(deployment: Deployment, share: Slice, layers: range) -> int:
    """What experts without a gate take more, their rows filled up to 128 for Blackwell's kernels.

    0.13 `modelopt.py: ModelOptNvFp4FusedMoE`, 0.17 `flashinfer_fp4_moe.py`; a gate forbids it.
    """
    model, moe = deployment.model, deployment.model.moe
    if moe is None or weights.architecture_of(model).gated or chip(deployment) not in BLACKWELL:
        return 0
    stored = weights.stored_as(weights.format_of(model, deployment.quantization), EXPERTS)
    packed = stored is not None and stored.method is Quantization.nvfp4
    if not packed and moe.format != Quantization.nvfp4.value:
        return 0
    count, width = _experts_of(model, share)
    rows = weights.round_up(width, NVFP4_ROWS) - width
    size = int(2 * rows * (moe.latent_size or model.hidden_size) * NVFP4_BYTES)
    return count * sum(model.has_experts(index) for index in layers) * size
