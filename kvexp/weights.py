"""The tensors of a model as engines hold them: fused projections, one slice a rank.

What belongs to a model type stands in `architectures`, how a matrix is stored in `formats`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvexp import per_layer
from kvexp.architectures import Architecture, architecture_of, is_known
from kvexp.dtypes import DType, Quantization
from kvexp.formats import Tensor, bits_of, format_of, linear, stored_as
from kvexp.parts import Encoder
from kvexp.request import (
    SPARSE,
    Compressed,
    LinearAttention,
    Mamba,
    Mla,
    Model,
    Moe,
    QuantizationConfig,
)

__all__ = [
    "Module",
    "Slice",
    "Tensor",
    "architecture_of",
    "attention",
    "attention_norms",
    "bits_of",
    "bytes_at",
    "bytes_by_module",
    "embedding",
    "format_of",
    "head",
    "is_known",
    "layer_norms",
    "mlp",
    "padded_vocab_size",
    "parameters",
    "rotary_size",
    "round_up",
    "stored_as",
    "streams",
    "towers",
]

MXFP4_WIDTH = 64
"""Multiple to which a rank's expert width is padded in MXFP4 kernels."""

Module = Literal["embedding", "head", "towers"]
"""What one pipeline stage alone reads."""

_Linear = Callable[..., Iterator[Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The share of one rank: `num_layers` layers, 1/`tp` of the split dimensions.

    Each expert is split over `expert_tp` ranks (0: over `tp`), or experts are dealt out whole to
    `ep` ranks, the first ones taking what is left over; `ep_rank` is the place among them. Experts
    that every token passes are split over `shared_tp` (0: over `tp`). `everywhere` are modules that
    an engine builds on every pipeline stage, though one alone reads them.
    """

    tp: int
    num_layers: int
    first_stage: bool
    last_stage: bool
    expert_tp: int = 0
    shared_tp: int = 0
    ep: int = 1
    ep_rank: int = 0
    everywhere: frozenset[Module] = frozenset()

    @property
    def embeds(self) -> bool:
        """Whether the rank holds the input embedding, be it tied to the head or not."""
        return self.first_stage or "embedding" in self.everywhere


def padded_vocab_size(model: Model, multiple: int = 64) -> int:
    """Vocabulary rows after padding (vLLM pads to a multiple of 64)."""
    return round_up(model.vocab_size, multiple)


def embedding(model: Model, share: Slice, dtype: DType) -> Iterator[Tensor]:
    """The input embedding; the last stage holds it too when it doubles as the output head."""
    known = architecture_of(model)
    if share.embeds or (share.last_stage and model.tie_word_embeddings):
        rows = padded_vocab_size(model) // share.tp
        yield _tensor("embed_tokens", rows * model.hidden_size, dtype, "embedding")
    if share.embeds and known.positions is not None:
        rows = model.max_position_embeddings + known.positions
        yield _tensor("embed_positions", rows * model.hidden_size, dtype, "embedding")
    if share.embeds and known.embedding_norm:
        yield from _norm("embed_norm", model.hidden_size, dtype, known)
    if known.normalizer:
        yield _tensor("normalizer", 1, dtype, "buffer")
    if share.embeds and model.per_layer_input is not None:
        yield from per_layer.tables(model, model.per_layer_input, share.tp, dtype)


def head(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None = None
) -> Iterator[Tensor]:
    """The final norm and the output head, which most quantised checkpoints leave alone."""
    known = architecture_of(model)
    if share.last_stage or "head" in share.everywhere:
        if known.norms or known.qk_norm:
            yield from _norm("norm", model.hidden_size, dtype, known)
        if model.compressed is not None:
            yield streams(model)
        rows = padded_vocab_size(model) // share.tp
        stored = format_of(model, quantization)
        if not model.tie_word_embeddings and stored is not None and stored.head:
            yield from linear("lm_head", rows, model.hidden_size, dtype, stored)
        elif not model.tie_word_embeddings:
            yield _tensor("lm_head", rows * model.hidden_size, dtype, "embedding")
        if known.head_bias:
            yield _tensor("lm_head.bias", rows, dtype, "bias")


def towers(
    model: Model,
    share: Slice,
    dtype: DType,
    *,
    vision: bool = True,
    audio: bool = True,
    stored: QuantizationConfig | None = None,
) -> Iterator[Tensor]:
    """Encoders and projectors beside the decoder, split as its layers are.

    Where an encoder's heads do not divide, only its MLPs are split. `stored` is how the matrices of
    a vision tower's layers are held, where these are known; mostly they are not quantised.
    """
    if not share.first_stage and "towers" not in share.everywhere:
        return
    if vision:
        seeing = model.tower_parameters - model.audio_tower_parameters
        yield from _vision(model.encoder, seeing, share, dtype, stored)
    if audio and model.audio_tower_parameters:
        yield _tensor("towers", model.audio_tower_parameters // share.tp, dtype, "tower")


def _vision(
    encoder: Encoder | None,
    parameters: int,
    share: Slice,
    dtype: DType,
    stored: QuantizationConfig | None,
) -> Iterator[Tensor]:
    """A vision tower: the matrices of its layers where they are known, and all else as one."""
    tp, rest = share.tp, parameters
    shared = encoder is None or encoder.splits_heads(tp)
    if encoder is not None and encoder.num_hidden_layers is not None:
        hidden, width = encoder.hidden_size, encoder.intermediate_size
        ups = (2 if encoder.gated else 1) * width
        layer = hidden * (4 * hidden + ups + width)
        if encoder.num_hidden_layers * layer <= parameters:
            rest -= encoder.num_hidden_layers * layer
            n = tp if shared else 1
            widths = (3 * hidden // n, hidden // n, ups // tp, width // tp)
            for outputs in widths * encoder.num_hidden_layers:
                if stored is None:
                    yield _tensor("towers", hidden * outputs, dtype, "tower")
                else:
                    yield from linear("towers", outputs, hidden, dtype, stored)
        else:
            shared = True
    if rest:
        yield _tensor("towers", rest // (tp if shared else 1), dtype, "tower")


def attention(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None, index: int
) -> Iterator[Tensor]:
    """The projections of one layer's attention, or what stands in its place."""
    kind = model.layer_type(index)
    stored = format_of(model, quantization)
    make = partial(_linear, stored, dtype, f"model.layers.{index}.")
    if kind in ("mamba", "hybrid"):
        assert model.mamba is not None
        yield from _mamba(model, model.mamba, share, dtype, make)
    elif kind == "linear_attention":
        assert model.linear is not None
        yield from _linear_attention(model, model.linear, share, dtype, make)
    elif kind == "conv":
        assert model.conv_L_cache is not None
        inner, hidden = model.hidden_size // share.tp, model.hidden_size
        yield _module("conv", inner, model.conv_L_cache, dtype, "conv")
        yield from make("in_proj", (inner, inner, inner), hidden)
        yield from make("out_proj", hidden, inner)
    if kind in ("mlp", "mamba", "linear_attention", "conv"):
        return
    if model.compressed is not None:
        yield from _compressed_attention(model, model.compressed, share, dtype, make, kind)
    elif model.mla is not None:
        yield from _latent_attention(model, model.mla, share, dtype, make, index)
    else:
        yield from _head_attention(model, share, dtype, make, index)
    if model.cross_attention:
        yield from _head_attention(model, share, dtype, make, index, prefix="encoder_attn.")


def attention_norms(model: Model, dtype: DType, index: int) -> Iterator[Tensor]:
    """Norms inside the attention of one layer."""
    kind, known = model.layer_type(index), architecture_of(model)
    if kind in ("mamba", "mlp", "linear_attention", "conv"):
        return
    if model.compressed is not None:
        compressors = model.head_size if model.compressed.ratio(kind) else 0
        compressors += model.compressed.index_head_dim if kind == SPARSE else 0
        size = model.compressed.q_lora_rank + model.head_size + compressors
        yield _tensor("q_and_kv_norms", size, dtype, "norm")
    elif model.mla is not None:
        yield _tensor("kv_a_layernorm", model.mla.kv_lora_rank, dtype, "norm")
        if model.mla.q_lora_rank is not None:
            yield _tensor("q_a_layernorm", model.mla.q_lora_rank, dtype, "norm")
        if model.mla.has_indexer(index):
            yield _tensor("indexer.k_norm", 2 * (model.mla.index_head_dim or 0), dtype, "norm")
    elif model.qk_norm or known.qk_norm:
        heads = model.heads(index)
        size = heads.head_dim
        q, k = {
            "head": (size, size),
            "heads": (heads.num_attention_heads * size, heads.num_key_value_heads * size),
            "full": (heads.num_attention_heads * size, heads.num_key_value_heads * size),
        }[model.qk_norm or known.qk_norm]
        yield _tensor("q_norm", q, dtype, "norm")
        if model.owns_cache(index) or known.own_projections:
            yield _tensor("k_norm", k, dtype, "norm")
    if model.block_indexer is not None and model.has_indexer(index):
        yield _tensor("index_norms", 2 * model.block_indexer.index_head_dim, dtype, "norm")
    if known.attention_sub_norm:
        yield _tensor("attn_sub_norm", model.hidden_size, dtype, "norm")


def mlp(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None, index: int
) -> Iterator[Tensor]:
    """Fused gate and up, then down; or router, experts and the experts that all tokens pass."""
    known = architecture_of(model)
    stored = format_of(model, quantization)
    if known.single and model.layer_type(index) != "mlp":
        return
    make = partial(_linear, stored, dtype, f"model.layers.{index}.")
    if model.per_layer_input is not None:
        yield from per_layer.layer(model, model.per_layer_input, share.tp, dtype, make)
    width = model.mlp_width(index)
    if width and (not model.has_experts(index) or known.beside_dense):
        yield from _mlp("", model.hidden_size, width, share.tp, dtype, known, make)
        if known.mlp_sub_norm:
            yield _tensor("ffn_sub_norm", model.intermediate_size, dtype, "norm")
    if not model.has_experts(index):
        return
    moe = model.moe
    assert moe is not None
    router = DType.fp32 if known.fp32_router else dtype
    yield _module("gate", moe.num_experts, model.hidden_size, router, "router")
    if moe.bias:
        yield _tensor("gate.bias", moe.num_experts, dtype, "bias")
    if known.routed_norms:
        yield _tensor("gate.scale", model.hidden_size + moe.num_experts, dtype, "scale")
        yield _tensor("routed_norms", known.routed_norms * model.hidden_size, dtype, "norm")
    if index < moe.num_hash_layers:
        entries = model.vocab_size * moe.num_experts_per_tok
        yield Tensor(name="gate.tid2eid", numel=entries, itemsize_bytes=4, role="scale")
    elif known.router_bias:
        yield Tensor(name="gate.correction", numel=moe.num_experts, itemsize_bytes=4, role="bias")
    yield from _experts(model, moe, share, dtype, known, make)
    if moe.shared_intermediate_size:
        width, tp = moe.shared_intermediate_size, share.shared_tp or share.tp
        yield from _mlp("shared_experts.", model.hidden_size, width, tp, dtype, known, make)
        if known.shared_gate:
            yield _module("shared_expert_gate", 1, model.hidden_size, dtype, "router")


def layer_norms(model: Model, dtype: DType, index: int) -> Iterator[Tensor]:
    """The norms of a decoder layer; where layers differ, one before each part that it has."""
    known = architecture_of(model)
    count = known.norms + model.cross_attention
    if model.intermediate_sizes is not None:
        count = (model.layer_type(index) != "mlp") + (model.mlp_width(index) > 0)
    for number in range(count):
        yield from _norm(f"layernorm.{number}", model.hidden_size, dtype, known)
    if known.layer_extra:
        yield _tensor("extra", known.layer_extra, dtype, "scale")


def rotary_size(model: Model) -> int:
    """Elements of a head that carry a position, 0 without positions."""
    if model.mla is not None:
        return model.mla.qk_rope_head_dim
    scaling = model.rope_scaling or {}
    share = float(scaling.get("partial_rotary_factor", architecture_of(model).rotary))
    return int(model.head_size * share)


def parameters(model: Model) -> int:
    """Parameters of the whole model as a checkpoint holds them, shared ones once."""
    total = sum(tensor.numel for _, tensor in _whole(model, None))
    return total - _padding(model, 1)


def bytes_by_module(model: Model, quantization: Quantization | None) -> dict[str, int]:
    """Bytes of the whole model by module, as a checkpoint holds them."""
    sizes: dict[str, int] = {}
    for module, tensor in _whole(model, quantization):
        sizes[module] = sizes.get(module, 0) + tensor.size_bytes
    rows = _padding(model, model.torch_dtype.itemsize_bytes)
    if not model.tie_word_embeddings:
        own = padded_vocab_size(model) - model.vocab_size
        head = own * (model.hidden_size + architecture_of(model).head_bias)
        sizes["head"] -= head * model.torch_dtype.itemsize_bytes
        rows -= head * model.torch_dtype.itemsize_bytes
    sizes["embedding"] -= rows
    return sizes


def bytes_at(model: Model, bits: float, *, tables: bool = True) -> int:
    """Bytes of the whole model with so many bits an element of matrices and the head.

    In GGUF files of other tables too. Norms, biases, routers and encoders keep the dtype, experts
    in a format of their own that.
    """
    tensors = [tensor for _, tensor in _whole(model, None)]
    item = model.torch_dtype.itemsize_bytes
    packed = [
        t
        for t in tensors
        if t.itemsize_bytes == item
        and (t.role == "linear" or (t.role == "embedding" and (tables or t.name == "lm_head")))
    ]
    elements = sum(tensor.numel for tensor in packed)
    kept_bytes = sum(tensor.size_bytes for tensor in tensors) - elements * item
    return kept_bytes + int((elements - _padding(model, 1)) * bits / 8)


def _padding(model: Model, item: int) -> int:
    """What padding the vocabulary adds."""
    rows = padded_vocab_size(model) - model.vocab_size
    known = architecture_of(model)
    tables = 1 if model.tie_word_embeddings else 2
    extra = rows * (tables * model.hidden_size + known.head_bias)
    return item * (extra + per_layer.padding(model))


def _whole(model: Model, quantization: Quantization | None) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint with the module that each belongs to."""
    for module, tensor in _with_buffers(model, quantization):
        if tensor.role != "buffer":
            yield module, tensor


def _with_buffers(model: Model, quantization: Quantization | None) -> Iterator[tuple[str, Tensor]]:
    """The same with what engines compute while they load."""
    dtype = model.torch_dtype
    share = Slice(tp=1, num_layers=model.num_hidden_layers, first_stage=True, last_stage=True)
    for tensor in embedding(model, share, dtype):
        yield "embedding", tensor
    for tensor in towers(model, share, dtype):
        yield "towers", tensor
    for index in range(model.num_hidden_layers):
        for tensor in attention(model, share, dtype, quantization, index):
            yield ("norms" if tensor.role == "norm" else "attention"), tensor
        for tensor in attention_norms(model, dtype, index):
            yield "norms", tensor
        for tensor in mlp(model, share, dtype, quantization, index):
            shared = tensor.name.startswith("shared_experts.")
            routed = model.has_experts(index) and not shared
            yield ("experts" if routed else "mlp"), tensor
        for tensor in layer_norms(model, dtype, index):
            yield "norms", tensor
    for tensor in head(model, share, dtype, quantization):
        yield ("norms" if tensor.name.startswith("norm") else "head"), tensor


def _head_attention(
    model: Model, share: Slice, dtype: DType, make: _Linear, index: int, prefix: str = ""
) -> Iterator[Tensor]:
    """Fused q, k and v, then the output; KV heads are replicated beyond their number."""
    known, heads = architecture_of(model), model.heads(index)
    value_dim = heads.v_head_dim or heads.head_dim
    num_q = heads.num_attention_heads // share.tp
    num_kv = max(1, heads.num_key_value_heads // share.tp)
    outputs: tuple[int, ...] = (num_q * heads.head_dim * (2 if known.query_gate else 1),)
    if model.owns_cache(index) or known.own_projections:
        outputs += (num_kv * heads.head_dim, num_kv * value_dim)
    if model.block_indexer is not None and model.has_indexer(index):
        size = model.block_indexer.index_head_dim
        outputs += (num_kv * size, size)
    inputs = model.hidden_size * (2 if model.is_eagle3 and index == 0 else 1)
    yield from make(f"{prefix}qkv_proj", outputs, inputs)
    if model.attention_bias:
        yield _tensor(f"{prefix}qkv_proj.bias", sum(outputs), dtype, "bias")
    yield from make(f"{prefix}o_proj", model.hidden_size, num_q * value_dim)
    if known.output_bias:
        yield _tensor(f"{prefix}o_proj.bias", model.hidden_size, dtype, "bias")
    if known.output_gate:
        gates = num_q if known.output_gate == "head" else num_q * value_dim
        yield from make(f"{prefix}gate_proj", gates, model.hidden_size)
    if known.sinks:
        yield _tensor("sinks", num_q, dtype, "bias")


def _latent_attention(
    model: Model, mla: Mla, share: Slice, dtype: DType, make: _Linear, index: int
) -> Iterator[Tensor]:
    """MLA: the projections to the latent are replicated, those to the heads are split."""
    heads = model.num_attention_heads // share.tp
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    down: tuple[int, ...] = (mla.latent_size,)
    if mla.q_lora_rank is None:
        yield from make("q_proj", query, model.hidden_size)
    else:
        down = (mla.q_lora_rank, *down)
        yield from make("q_b_proj", query, mla.q_lora_rank)
    yield from make("kv_a_proj", down, model.hidden_size)
    up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from make("kv_b_proj", up, mla.kv_lora_rank)
    yield from make("o_proj", model.hidden_size, heads * mla.v_head_dim)
    if mla.has_indexer(index):
        size, count = mla.index_head_dim or 0, mla.index_n_heads or 1
        yield from make("indexer.wq_b", count * size, mla.q_lora_rank or model.hidden_size)
        yield from make("indexer.wk", size, model.hidden_size)
        yield _tensor("indexer.weights_proj", count * model.hidden_size, dtype, "router")


def _compressed_attention(
    model: Model, known: Compressed, share: Slice, dtype: DType, make: _Linear, kind: str
) -> Iterator[Tensor]:
    """DeepSeek V4: low-rank queries and outputs are split, one key for all heads is not."""
    hidden, size = model.hidden_size, model.head_size
    query = model.num_attention_heads * size // share.tp
    outputs = known.o_groups * known.o_lora_rank // share.tp
    yield from make("q_a_kv_proj", known.q_lora_rank + size, hidden)
    yield from make("q_b_proj", query, known.q_lora_rank)
    yield from make("o_a_proj", outputs, model.num_attention_heads * size // known.o_groups)
    yield from make("o_b_proj", hidden, outputs)
    heads = model.num_attention_heads // share.tp
    yield Tensor(name="sinks", numel=heads, itemsize_bytes=4, role="bias")
    ratio, width = known.ratio(kind), 2 if kind == SPARSE else 1
    if ratio:
        yield from _compressor("compressor", width * size, hidden, ratio, dtype)
    if kind == SPARSE:
        index = known.index_head_dim
        yield from _compressor("indexer.compressor", width * index, hidden, ratio, dtype)
        yield from make("indexer.wq_b", known.index_n_heads * index, known.q_lora_rank)
        yield _tensor("indexer.weights_proj", known.index_n_heads * hidden, dtype, "router")
    mixes = known.hc_mult * (known.hc_mult + 2)
    for _ in ("attention", "mlp"):
        yield _streams(model, mixes, 3)


def _compressor(name: str, size: int, hidden: int, ratio: int, dtype: DType) -> Iterator[Tensor]:
    """Values and scores of a token, and what is added by its place among those that share one."""
    yield _tensor(name, 2 * size * hidden, dtype, "router")
    yield Tensor(name=f"{name}.ape", numel=size * ratio, itemsize_bytes=4, role="bias")


def streams(model: Model) -> Tensor:
    """What sums DeepSeek V4's residual streams before a head, in fp32."""
    assert model.compressed is not None
    return _streams(model, model.compressed.hc_mult, 1)


def _streams(model: Model, mixes: int, scales: int) -> Tensor:
    """What mixes the residual streams, in fp32."""
    assert model.compressed is not None
    numel = mixes * (model.compressed.hc_mult * model.hidden_size + 1) + scales
    return Tensor(name="hyper_connection", numel=numel, itemsize_bytes=4, role="router")


def _mamba(
    model: Model, mamba: Mamba, share: Slice, dtype: DType, make: _Linear
) -> Iterator[Tensor]:
    """Input and output projections, the convolution, and numbers of each head or channel."""
    heads = mamba.mamba_n_heads // share.tp
    inner, hidden = heads * mamba.mamba_d_head, model.hidden_size
    state, rank = mamba.mamba_d_state, mamba.mamba_dt_rank
    groups = max(1, mamba.mamba_n_groups // share.tp)
    parts = (inner,) if rank is not None else (inner, groups * state, groups * state)
    conv = sum(parts)
    yield _module("conv1d", parts, mamba.mamba_d_conv, dtype, "conv")
    if mamba.mamba_conv_bias:
        yield _tensor("conv1d.bias", conv, dtype, "bias")
    if rank is not None:
        yield from make("in_proj", (inner, inner), hidden)
        yield from make("x_proj", rank + 2 * state, inner)
        yield from make("dt_proj", inner, rank)
        yield _tensor("dt_proj.bias", inner, dtype, "bias")
        yield Tensor(name="A", numel=inner * state, itemsize_bytes=4, role="scale")
        yield Tensor(name="D", numel=inner, itemsize_bytes=4, role="scale")
        yield from make("out_proj", hidden, inner)
        if model.model_type == "jamba":
            yield _tensor("dt_b_c_norms", rank + 2 * state, dtype, "norm")
        return
    yield from make("in_proj", (inner, *parts, heads), hidden)
    yield Tensor(name="A", numel=heads, itemsize_bytes=4, role="scale")
    yield _tensor("D", heads, dtype, "scale")
    yield _tensor("dt_bias", heads, dtype, "scale")
    yield from make("out_proj", hidden, inner)
    if mamba.mamba_rms_norm:
        yield _tensor("norm", inner, dtype, "norm")
    if model.model_type == "falcon_h1":  # what it multiplies the projection with
        yield _tensor("mup_vector", inner + conv + heads, dtype, "buffer")


def _linear_attention(
    model: Model, known: LinearAttention, share: Slice, dtype: DType, make: _Linear
) -> Iterator[Tensor]:
    """Gated DeltaNet, KDA or lightning attention by its kind."""
    key, value = known.key_size // share.tp, known.value_size // share.tp
    heads, hidden = known.linear_num_value_heads // share.tp, model.hidden_size
    if known.kind == "lightning":
        yield from make("qkv_proj", (value, value, value), hidden)
        yield from make("output_gate", value, hidden)
        yield from make("out_proj", hidden, value)
        yield _tensor("norm", value, dtype, "norm")
        return
    yield _module("conv1d", 2 * key + value, known.linear_conv_kernel_dim, dtype, "conv")
    if known.kind == "gated_delta_net":
        yield from make("in_proj_qkvz", (key, key, value, value), hidden)
        yield from make("in_proj_ba", (heads, heads), hidden)
        yield _tensor("dt_bias", heads, dtype, "scale")
        yield Tensor(name="A_log", numel=heads, itemsize_bytes=4, role="scale")
        yield _tensor("norm", known.linear_value_head_dim, dtype, "norm")
    else:
        size = known.linear_value_head_dim
        yield from make("qkv_proj", (key, key, value), hidden)
        for gate in ("f", "g"):
            yield _tensor(f"{gate}_a_proj", size * hidden, dtype, "router")
            yield from make(f"{gate}_b_proj", value, size)
        yield from make("b_proj", heads, hidden)
        yield _tensor("dt_bias", value, dtype, "scale")
        yield Tensor(name="A_log", numel=heads, itemsize_bytes=4, role="scale")
        yield _tensor("o_norm", size, dtype, "norm")
    yield from make("out_proj", hidden, value)


def _mlp(
    prefix: str,
    hidden: int,
    width: int,
    tp: int,
    dtype: DType,
    known: Architecture,
    make: _Linear,
) -> Iterator[Tensor]:
    own = width // tp
    if known.gated:
        yield from make(f"{prefix}gate_up_proj", (own, own), hidden)
    else:
        yield from make(f"{prefix}up_proj", own, hidden)
    if known.mlp_bias:
        yield _tensor(f"{prefix}up_proj.bias", own, dtype, "bias")
    yield from make(f"{prefix}down_proj", hidden, own)
    if known.mlp_bias:
        yield _tensor(f"{prefix}down_proj.bias", hidden, dtype, "bias")


def _experts(
    model: Model, moe: Moe, share: Slice, dtype: DType, known: Architecture, make: _Linear
) -> Iterator[Tensor]:
    count, width = moe.num_experts, moe.moe_intermediate_size
    if share.ep > 1:
        count, left = divmod(count, share.ep)
        count += share.ep_rank < left
        yield Tensor(name="expert_map", numel=moe.num_experts, itemsize_bytes=4, role="scale")
    else:
        width //= share.expert_tp or share.tp
    size = moe.latent_size or model.hidden_size
    if moe.latent_size is not None:
        yield from make("latent_down_proj", size, model.hidden_size)
        yield from make("latent_up_proj", model.hidden_size, size)
    if moe.format == "mxfp4":
        width = round_up(width, MXFP4_WIDTH)
    for name, outputs, inputs in (
        ("experts.w13", (width, width) if known.gated else (width,), size),
        ("experts.w2", (size,), width),
    ):
        if moe.format == "mxfp4":
            yield from _mxfp4_experts(name, outputs, inputs, count)
        elif moe.format is not None:
            own = QuantizationConfig(method=Quantization[moe.format])
            yield from linear(name, outputs, inputs, dtype, own, count=count)
        else:
            yield from make(name, outputs, inputs, count=count)
    if moe.bias:
        kept = DType.fp32 if moe.format == "mxfp4" else dtype
        yield _tensor("experts.w13_bias", count * 2 * width, kept, "bias")
        yield _tensor("experts.w2_bias", count * model.hidden_size, kept, "bias")


def _mxfp4_experts(
    name: str, outputs: tuple[int, ...], inputs: int, count: int
) -> Iterator[Tensor]:
    """Two elements a byte, one byte of scale for each 32 of a row."""
    rows = sum(outputs)
    scales = count * round_up(rows, 256) * round_up(inputs // 32, 4)
    yield Tensor(
        name=name,
        numel=count * rows * inputs // 2,
        itemsize_bytes=1,
        role="linear",
        inputs=inputs,
        outputs=outputs,
        count=count,
    )
    yield Tensor(name=f"{name}_scale", numel=scales, itemsize_bytes=1, role="scale")


_MODULES = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.qkv_proj"),
    "o_proj": ("self_attn.o_proj",),
    "q_proj": ("self_attn.q_proj",),
    "q_b_proj": ("self_attn.q_b_proj",),
    "kv_a_proj": ("self_attn.kv_a_proj_with_mqa",),
    "kv_b_proj": ("self_attn.kv_b_proj",),
    "gate_proj": ("self_attn.gate_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.gate_up_proj"),
    "up_proj": ("mlp.up_proj",),
    "down_proj": ("mlp.down_proj",),
    "experts.w13": ("mlp.experts.0.gate_proj",),
    "experts.w2": ("mlp.experts.0.down_proj",),
    "shared_experts.gate_up_proj": ("mlp.shared_experts.gate_proj",),
    "shared_experts.down_proj": ("mlp.shared_experts.down_proj",),
    "in_proj": ("mamba.in_proj",),
    "out_proj": ("mamba.out_proj",),
    "in_proj_qkvz": ("linear_attn.in_proj_qkvz",),
}
"""Modules of a checkpoint behind a fused matrix, for lists of excluded modules."""


def _linear(
    stored: QuantizationConfig | None,
    dtype: DType,
    layer: str,
    name: str,
    outputs: int | tuple[int, ...],
    inputs: int,
    *,
    count: int = 1,
) -> Iterator[Tensor]:
    modules = [layer + module for module in _MODULES.get(name, (name,))]
    return linear(name, outputs, inputs, dtype, stored_as(stored, modules), count=count)


def _module(
    name: str, outputs: int | tuple[int, ...], inputs: int, dtype: DType, role: str
) -> Tensor:
    """A module that weight quantisation leaves alone."""
    fused = (outputs,) if isinstance(outputs, int) else outputs
    numel = sum(fused) * inputs
    return replace(_tensor(name, numel, dtype, role), inputs=inputs, outputs=fused)


def _norm(name: str, size: int, dtype: DType, known: Architecture) -> Iterator[Tensor]:
    yield _tensor(name, size, dtype, "norm")
    if known.norm_bias:
        yield _tensor(f"{name}.bias", size, dtype, "bias")


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not less."""
    return -(-value // multiple) * multiple


def _tensor(name: str, numel: int, dtype: DType, role: str) -> Tensor:
    return Tensor(name=name, numel=numel, itemsize_bytes=dtype.itemsize_bytes, role=role)
