"""Memory terms of engines that were not measured: stated rules, labelled as assumed."""

import math
from collections.abc import Iterable, Iterator

from kvexp import cache, layers, weights
from kvexp.deployment import Deployment
from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.engine import RankShape
from kvexp.errors import InvalidValue
from kvexp.request import AUTO_FIT, Knobs, Model
from kvexp.results import Part, Provenance
from kvexp.simulate.allocator import CachingAllocator
from kvexp.units import MIB
from kvexp.weights import Slice, Tensor

WORKSPACE_BYTES = 32 * MIB  # cuBLAS on compute capability 9.0
FORMULA_ERROR = 0.002  # the share that scales and buffers explain
COMMUNICATOR_BYTES = 979369984  # first NCCL communicator of two ranks, H200


def model_notes(model: Model, title: str) -> tuple[str, ...]:
    """The model's notes, and one where it is a GGUF file: for engines that open none."""
    gguf = f"{title} opens no GGUF file: what this one holds is counted all the same"
    return (*model.notes, gguf) if model.is_gguf else tuple(model.notes)


def stages(deployment: Deployment) -> tuple[RankShape, ...]:
    """Pipeline stages in order, the tensor-parallel ranks of a stage side by side."""
    ranges = cache.pp_layer_ranges(
        deployment.model.num_hidden_layers, deployment.pp, deployment.pp_partition
    )
    return tuple(
        RankShape(
            rank=pp_rank * deployment.tp + tp_rank,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            first_layer=first,
            num_layers=last - first,
        )
        for pp_rank, (first, last) in enumerate(ranges)
        for tp_rank in range(deployment.tp)
    )


def weights_bytes(deployment: Deployment, shape: RankShape) -> int:
    """Tensors of one rank through the allocator with its ordinary settings."""
    allocator = CachingAllocator()
    for size in _tensor_sizes(deployment, shape):
        allocator.allocate(size)
    beyond = beyond_formula_bytes(deployment) // (deployment.tp * deployment.pp)
    return max(0, allocator.allocated_bytes + beyond)


def beyond_formula_bytes(deployment: Deployment) -> int:
    """What the checkpoint's tensors take beyond the formula, where it is too much to be scales."""
    model = deployment.model
    same_width = deployment.dtype.itemsize_bytes == model.torch_dtype.itemsize_bytes
    if model.checkpoint_bytes is None or not same_width:
        return 0
    own = model.quantization_config.method if model.quantization_config else None
    if deployment.quantization is not own:
        return 0
    formula = sum(weights.bytes_by_module(model, own).values())
    beyond = model.checkpoint_bytes - formula
    return beyond if abs(beyond) > FORMULA_ERROR * model.checkpoint_bytes else 0


def _tensor_sizes(deployment: Deployment, shape: RankShape) -> Iterator[int]:
    model, dtype = deployment.model, deployment.dtype
    share = Slice(
        tp=deployment.tp,
        num_layers=shape.num_layers,
        first_stage=shape.pp_rank == 0,
        last_stage=shape.pp_rank == deployment.pp - 1,
    )
    yield from (t.size_bytes for t in weights.towers(model, share, dtype))
    yield from (t.size_bytes for t in weights.embedding(model, share, dtype))
    rotary = model.max_position_embeddings * weights.rotary_size(model) * 4
    if rotary:
        yield rotary  # one fp32 cos/sin cache
    for index in layers.of_rank(shape):
        yield from (t.size_bytes for t in matrices(deployment, share, index))
        yield from (t.size_bytes for t in weights.layer_norms(model, dtype, index))
    tail = weights.head(model, share, dtype, deployment.quantization)
    yield from (t.size_bytes for t in tail)


def matrices(deployment: Deployment, share: Slice, index: int) -> Iterator[Tensor]:
    """The tensors of one layer's attention and MLP on one rank."""
    model, dtype, stored = deployment.model, deployment.dtype, deployment.quantization
    yield from weights.attention(model, share, dtype, stored, index)
    yield from weights.attention_norms(model, dtype, index)
    yield from weights.mlp(model, share, dtype, stored, index)


def forward_bytes(deployment: Deployment, *, tokens: int, rows: int) -> int:
    """Allocated peak of one forward over `tokens` tokens with logits of `rows` rows.

    The larger of a fused decoder layer (gate, up and their product, three hidden states) and the
    logits with an fp32 copy; the widths of experts by the fused kernel's workspace.
    """
    model, item = deployment.model, deployment.dtype.itemsize_bytes
    layer = item * tokens * (_mlp_width(deployment) + 3 * model.hidden_size)
    logits = rows * model.vocab_size * (item + 4) + item * model.hidden_size * (tokens + rows)
    return max(layer, logits) + WORKSPACE_BYTES


def _mlp_width(deployment: Deployment) -> int:
    model, tp = deployment.model, deployment.tp
    moe = model.moe
    if moe is None:
        return 3 * model.intermediate_size // tp
    width = moe.moe_intermediate_size // tp
    routed = moe.num_experts_per_tok * (max(2 * width, model.hidden_size) + width)
    return routed + 3 * moe.shared_intermediate_size // tp


def assumed(name: str, size_bytes: int, reason: str) -> Part:
    """A term that no measurement of this engine confirms."""
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.assumed, reason=reason)


def derived(name: str, size_bytes: int, reason: str) -> Part:
    """A term that follows from the engine's rule."""
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.derived, reason=reason)


def free_at_start(knobs: Knobs, *, after_communicator: bool = False) -> int:
    """Free bytes at the engine's baseline: given, or the total less context and neighbours.

    `after_communicator`: the engine reads it when its ranks are connected already.
    """
    gpu = knobs.gpu
    if gpu.free_bytes is not None:
        return int(gpu.free_bytes)
    free = gpu.total_bytes - gpu.context_bytes - gpu.used_by_others_bytes
    if after_communicator and knobs.tp * knobs.pp > 1:
        free -= COMMUNICATOR_BYTES
    return max(0, int(free))


def used_before_load(deployment: Deployment, *, after_communicator: bool = False) -> Part:
    """What is not free at the baseline, as far off as `free_at_start` assumes it."""
    gpu = deployment.gpu
    size = deployment.total_bytes - deployment.free_bytes
    less = more = gpu.context_error_bytes if gpu.free_bytes is None else 0
    if gpu.free_bytes is None and after_communicator and deployment.num_ranks > 1:
        less, more = less + COMMUNICATOR_BYTES, more + COMMUNICATOR_BYTES // 2
    return Part(
        name="used_before_load",
        size_bytes=size,
        provenance=Provenance.assumed if more else Provenance.derived,
        reason="not free at the baseline: context, neighbours, what connects the ranks",
        low_bytes=max(0, size - less) if more else None,
        high_bytes=size + more if more else None,
    )


def compute_dtype(knobs: Knobs) -> DType:
    """The dtype asked for, or the checkpoint's."""
    return knobs.model.torch_dtype if knobs.dtype is DType.auto else knobs.dtype


def weight_format(knobs: Knobs) -> Quantization | None:
    """How weights are stored: the checkpoint's own format, or the one asked for.

    Raises:
        InvalidValue: they differ.
    """
    own = knobs.model.quantization_config
    if own is None or knobs.quantization in (None, own.method):
        return knobs.quantization if own is None else own.method
    assert knobs.quantization is not None
    raise InvalidValue(
        f"quantization must be null or {own.method.name} for {knobs.model.name}, whose checkpoint"
        f" is stored so, got {knobs.quantization.name}"
    )


def cache_dtype(knobs: Knobs, engine: str, formats: tuple[KvDtype, ...]) -> KvDtype:
    """The cache's dtype: the compute dtype or one of the engine's own formats.

    Raises:
        InvalidValue: the engine has no such cache.
    """
    own = KvDtype[compute_dtype(knobs).name]
    kv_dtype = knobs.kv_dtype
    if kv_dtype is KvDtype.auto:
        scheme = knobs.model.kv_cache_scheme
        kv_dtype = scheme if scheme in formats else own
    if kv_dtype is not own and kv_dtype not in formats:
        names = ", ".join(dict.fromkeys(each.name for each in (KvDtype.auto, own, *formats)))
        raise InvalidValue(f"kv_dtype must be one of {names} for {engine}, got {kv_dtype.name}")
    return kv_dtype


def context_len(model: Model) -> int:
    """The longest context that the model's config states, linear rope scaling included."""
    if model.rope_type in ("linear", "dynamic") and not model.model_type.startswith("gemma3"):
        return int(model.max_position_embeddings * float(model.rope_scaling.get("factor", 1.0)))
    return model.max_position_embeddings


def requested_len(knobs: Knobs, engine: str) -> int:
    """The length asked for, or the model's.

    Raises:
        InvalidValue: the engine cannot fit the length by itself.
    """
    if knobs.max_model_len == AUTO_FIT:
        raise InvalidValue(f"max_model_len must be at least 1 for {engine}, got -1")
    return knobs.max_model_len or context_len(knobs.model)


def split_heads(model: Model) -> tuple[int, int, str]:
    """Heads and KV heads that tensor-parallel ranks divide, and what they are.

    A model without attention divides the heads of its states.
    """
    if model.is_attention_free and model.mamba is not None:
        heads = model.mamba.mamba_n_heads
        return heads, heads, f"{heads} heads of states"
    heads, kv_heads = model.num_attention_heads, model.kv_heads
    others = model.sliding_heads.num_attention_heads if model.sliding_heads else heads
    named = f"{heads}" if others == heads else f"{heads} and {others}"
    return math.gcd(heads, others), kv_heads, f"{named} attention heads, {kv_heads} KV heads"


def check_attention(model: Model, engine: str) -> None:
    """The engine has models with attention alone.

    Raises:
        InvalidValue: no layer of this one keeps K and V.
    """
    if not model.is_attention_free:
        return
    kinds = " and ".join(sorted(set(model.layer_types or ())))
    raise InvalidValue(
        f"model={model.name} has {kinds} layers and none of attention: {engine} has no such model"
        " (engine=vllm has)"
    )


def check_parallel(knobs: Knobs, engine: str, also: Iterable[int] = ()) -> None:
    """Heads must divide over tp, and so must the sizes in `also`; KV heads divide tp or tp them.

    Raises:
        InvalidValue: they do not, or there are more stages than layers.
    """
    model = knobs.model
    heads, kv_heads, named = split_heads(model)
    whole = (heads, *also)
    allowed = [
        n
        for n in range(1, heads + 1)
        if not any(size % n for size in whole)
        and (model.mla is not None or kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if knobs.tp not in allowed:
        raise InvalidValue(
            f"tp must be one of {', '.join(map(str, allowed))} for {model.name} with {engine}"
            f" ({named}), got {knobs.tp}"
        )
    if knobs.pp > model.num_hidden_layers:
        raise InvalidValue(
            f"pp must be at most {model.num_hidden_layers}, the layers of {model.name},"
            f" got {knobs.pp}"
        )
