"""The tensors of a model as engines hold them: fused projections, one slice a rank.

Facts that belong to a model type, never to a model's name, stand in `ARCHITECTURES`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvexp.dtypes import DType, Quantization
from kvexp.errors import InvalidValue
from kvexp.request import Model, Moe


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What a model type adds to the common decoder block.

    `qk_norm`: RMS norms of one head's size on q and k. `norms`: norms of the hidden size a layer.
    `output_bias`: a bias on the output projection too. `sinks`: one number a head. `rotary`: the
    share of a head that is rotated, 0 without positions. `local_rotary`: sliding layers have a
    rotary cache of their own. `normalizer`: one number scales the embeddings.
    """

    qk_norm: bool = False
    norms: int = 2
    output_bias: bool = False
    sinks: bool = False
    rotary: float = 1.0
    local_rotary: bool = False
    normalizer: bool = False


MXFP4_WIDTH = 64
"""Multiple to which a rank's expert width is padded in MXFP4 kernels."""

ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "qwen3_moe": Architecture(qk_norm=True),
    "gemma3_text": Architecture(qk_norm=True, norms=4, local_rotary=True, normalizer=True),
    "gpt_oss": Architecture(output_bias=True, sinks=True),
    "deepseek_v2": Architecture(),
    "llama4_text": Architecture(),
    "granitemoehybrid": Architecture(rotary=0.0),
}


def architecture_of(model: Model) -> Architecture:
    """The facts of the model's type.

    Raises:
        InvalidValue: the type is not known.
    """
    try:
        return ARCHITECTURES[model.model_type]
    except KeyError:
        raise InvalidValue(
            f"model.model_type must be one of {', '.join(sorted(ARCHITECTURES))},"
            f" got {model.model_type!r}"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The share of one rank: `num_layers` layers, 1/`tp` of the split dimensions."""

    tp: int
    num_layers: int
    first_stage: bool
    last_stage: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter or buffer on the device.

    `role` is linear (a matrix that weight quantisation covers), embedding, router, conv, norm, bias
    or scale.
    """

    name: str
    numel: int
    itemsize_bytes: int
    role: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, without the allocator's rounding."""
        return self.numel * self.itemsize_bytes


def padded_vocab_size(model: Model, multiple: int = 64) -> int:
    """Vocabulary rows after padding (vLLM pads to a multiple of 64)."""
    return _up(model.vocab_size, multiple)


def embedding(model: Model, share: Slice, dtype: DType) -> Iterator[Tensor]:
    """The input embedding; the last stage holds it too when it doubles as the output head."""
    if share.first_stage or (share.last_stage and model.tie_word_embeddings):
        rows = padded_vocab_size(model) // share.tp
        yield _tensor("embed_tokens", rows * model.hidden_size, dtype, "embedding")
    if architecture_of(model).normalizer:
        yield _tensor("normalizer", 1, dtype, "scale")


def head(model: Model, share: Slice, dtype: DType) -> Iterator[Tensor]:
    """The final norm and the output head."""
    if share.last_stage:
        yield _tensor("norm", model.hidden_size, dtype, "norm")
        if not model.tie_word_embeddings:
            rows = padded_vocab_size(model) // share.tp
            yield _tensor("lm_head", rows * model.hidden_size, dtype, "embedding")


def attention(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None, index: int
) -> Iterator[Tensor]:
    """The projections of one layer's attention, or what stands in its place."""
    if model.layer_type(index) == "mamba":
        yield from _mamba(model, share, dtype, quantization)
    elif model.mla is not None:
        yield from _latent_attention(model, share, dtype, quantization)
    else:
        yield from _head_attention(model, share, dtype, quantization)


def attention_norms(model: Model, dtype: DType, index: int) -> Iterator[Tensor]:
    """Norms inside the attention of one layer."""
    if model.layer_type(index) == "mamba":
        return
    if model.mla is not None:
        yield _tensor("kv_a_layernorm", model.mla.kv_lora_rank, dtype, "norm")
        if model.mla.q_lora_rank is not None:
            yield _tensor("q_a_layernorm", model.mla.q_lora_rank, dtype, "norm")
    elif architecture_of(model).qk_norm:
        yield _tensor("q_norm", model.head_size, dtype, "norm")
        yield _tensor("k_norm", model.head_size, dtype, "norm")


def mlp(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None, index: int
) -> Iterator[Tensor]:
    """Fused gate and up, then down; or router, experts and the experts that all tokens pass."""
    if not model.has_experts(index):
        yield from _gated(
            "", model.hidden_size, model.intermediate_size, share, dtype, quantization
        )
        return
    moe = model.moe
    assert moe is not None
    yield _tensor("gate", moe.num_experts * model.hidden_size, dtype, "router")
    if moe.bias:
        yield _tensor("gate.bias", moe.num_experts, dtype, "bias")
    yield from _experts(model, moe, share, dtype, quantization)
    if moe.shared_intermediate_size:
        yield from _gated(
            "shared_experts.",
            model.hidden_size,
            moe.shared_intermediate_size,
            share,
            dtype,
            quantization,
        )


def layer_norms(model: Model, dtype: DType) -> Iterator[Tensor]:
    """The norms of a decoder layer."""
    for number in range(architecture_of(model).norms):
        yield _tensor(f"layernorm.{number}", model.hidden_size, dtype, "norm")


def rotary_size(model: Model) -> int:
    """Elements of a head that carry a position, 0 without positions."""
    if model.mla is not None:
        return model.mla.qk_rope_head_dim
    return int(model.head_size * architecture_of(model).rotary)


def _head_attention(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None
) -> Iterator[Tensor]:
    """Fused q, k and v, then the output; KV heads are replicated beyond their number."""
    known = architecture_of(model)
    q = model.num_attention_heads // share.tp * model.head_size
    kv = max(1, model.kv_heads // share.tp) * model.head_size
    yield from _linear("qkv_proj", (q + 2 * kv) * model.hidden_size, dtype, quantization)
    if model.attention_bias:
        yield _tensor("qkv_proj.bias", q + 2 * kv, dtype, "bias")
    yield from _linear("o_proj", q * model.hidden_size, dtype, quantization)
    if known.output_bias:
        yield _tensor("o_proj.bias", model.hidden_size, dtype, "bias")
    if known.sinks:
        yield _tensor("sinks", model.num_attention_heads // share.tp, dtype, "bias")


def _latent_attention(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None
) -> Iterator[Tensor]:
    """MLA: the projections to the latent are replicated, those to the heads are split."""
    mla, heads = model.mla, model.num_attention_heads // share.tp
    assert mla is not None
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    down = mla.latent_size
    if mla.q_lora_rank is None:
        yield from _linear("q_proj", query * model.hidden_size, dtype, quantization)
    else:
        down += mla.q_lora_rank
        yield from _linear("q_b_proj", query * mla.q_lora_rank, dtype, quantization)
    yield from _linear("kv_a_proj", down * model.hidden_size, dtype, quantization)
    up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from _linear("kv_b_proj", up * mla.kv_lora_rank, dtype, quantization)
    yield from _linear("o_proj", heads * mla.v_head_dim * model.hidden_size, dtype, quantization)


def _mamba(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None
) -> Iterator[Tensor]:
    """Mamba2: input and output projections, the convolution, and per-head numbers."""
    mamba = model.mamba
    assert mamba is not None
    heads = mamba.mamba_n_heads // share.tp
    inner = heads * mamba.mamba_d_head
    groups = max(1, mamba.mamba_n_groups // share.tp)
    conv = inner + 2 * groups * mamba.mamba_d_state
    yield _tensor("conv1d", conv * mamba.mamba_d_conv, dtype, "conv")
    if mamba.mamba_conv_bias:
        yield _tensor("conv1d.bias", conv, dtype, "bias")
    yield from _linear("in_proj", (inner + conv + heads) * model.hidden_size, dtype, quantization)
    yield Tensor(name="A", numel=heads, itemsize_bytes=4, role="scale")
    yield _tensor("D", heads, dtype, "scale")
    yield _tensor("dt_bias", heads, dtype, "scale")
    yield from _linear("out_proj", inner * model.hidden_size, dtype, quantization)
    yield _tensor("norm", inner, dtype, "norm")


def _gated(
    prefix: str,
    hidden: int,
    width: int,
    share: Slice,
    dtype: DType,
    quantization: Quantization | None,
) -> Iterator[Tensor]:
    own = width // share.tp
    yield from _linear(f"{prefix}gate_up_proj", 2 * own * hidden, dtype, quantization)
    yield from _linear(f"{prefix}down_proj", own * hidden, dtype, quantization)


def _experts(
    model: Model, moe: Moe, share: Slice, dtype: DType, quantization: Quantization | None
) -> Iterator[Tensor]:
    width = moe.moe_intermediate_size // share.tp
    if moe.format == "mxfp4":
        width = _up(width, MXFP4_WIDTH)
    for name, rows, columns in (
        ("experts.w13", 2 * width, model.hidden_size),
        ("experts.w2", model.hidden_size, width),
    ):
        numel = moe.num_experts * rows * columns
        if moe.format == "mxfp4":  # two elements a byte, one byte of scale for each 32 of a row
            scales = moe.num_experts * _up(rows, 256) * _up(columns // 32, 4)
            yield Tensor(name=name, numel=numel // 2, itemsize_bytes=1, role="linear")
            yield Tensor(name=f"{name}_scale", numel=scales, itemsize_bytes=1, role="scale")
        else:
            yield from _linear(name, numel, dtype, quantization)
    if moe.bias:
        kept = DType.fp32 if moe.format == "mxfp4" else dtype
        yield _tensor("experts.w13_bias", moe.num_experts * 2 * width, kept, "bias")
        yield _tensor("experts.w2_bias", moe.num_experts * model.hidden_size, kept, "bias")


def _linear(
    name: str, numel: int, dtype: DType, quantization: Quantization | None
) -> Iterator[Tensor]:
    if quantization is Quantization.fp8:
        yield Tensor(name=name, numel=numel, itemsize_bytes=1, role="linear")
        yield Tensor(name=f"{name}.weight_scale", numel=1, itemsize_bytes=4, role="scale")
    else:
        yield _tensor(name, numel, dtype, "linear")


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tensor(name: str, numel: int, dtype: DType, role: str) -> Tensor:
    return Tensor(name=name, numel=numel, itemsize_bytes=dtype.itemsize_bytes, role=role)
