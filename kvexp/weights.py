"""The tensors of a model as engines hold them: fused projections, one slice a rank.

Facts that belong to a model type, never to a model's name, stand in `ARCHITECTURES`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvexp.dtypes import DType, Quantization
from kvexp.errors import InvalidValue
from kvexp.request import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What a model type adds to the common decoder block.

    `qk_norm`: RMS norms of one head's size on q and k.
    """

    qk_norm: bool = False


ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
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

    `role` is linear (a matrix that weight quantisation covers), embedding, norm, bias or scale.
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
    return -(-model.vocab_size // multiple) * multiple


def embedding(model: Model, share: Slice, dtype: DType) -> Iterator[Tensor]:
    """The input embedding; the last stage holds it too when it doubles as the output head."""
    if share.first_stage or (share.last_stage and model.tie_word_embeddings):
        rows = padded_vocab_size(model) // share.tp
        yield _tensor("embed_tokens", rows * model.hidden_size, dtype, "embedding")


def head(model: Model, share: Slice, dtype: DType) -> Iterator[Tensor]:
    """The final norm and the output head."""
    if share.last_stage:
        yield _tensor("norm", model.hidden_size, dtype, "norm")
        if not model.tie_word_embeddings:
            rows = padded_vocab_size(model) // share.tp
            yield _tensor("lm_head", rows * model.hidden_size, dtype, "embedding")


def attention(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None
) -> Iterator[Tensor]:
    """Fused q, k and v, then the output projection; KV heads are replicated beyond their number."""
    q = model.num_attention_heads // share.tp * model.head_size
    kv = max(1, model.kv_heads // share.tp) * model.head_size
    yield from _linear("qkv_proj", (q + 2 * kv) * model.hidden_size, dtype, quantization)
    if model.attention_bias:
        yield _tensor("qkv_proj.bias", q + 2 * kv, dtype, "bias")
    yield from _linear("o_proj", q * model.hidden_size, dtype, quantization)


def attention_norms(model: Model, dtype: DType) -> Iterator[Tensor]:
    """Norms on q and k, where the model type has them."""
    if architecture_of(model).qk_norm:
        yield _tensor("q_norm", model.head_size, dtype, "norm")
        yield _tensor("k_norm", model.head_size, dtype, "norm")


def mlp(
    model: Model, share: Slice, dtype: DType, quantization: Quantization | None
) -> Iterator[Tensor]:
    """Fused gate and up, then down."""
    width = model.intermediate_size // share.tp
    yield from _linear("gate_up_proj", 2 * width * model.hidden_size, dtype, quantization)
    yield from _linear("down_proj", width * model.hidden_size, dtype, quantization)


def layer_norms(model: Model, dtype: DType) -> Iterator[Tensor]:
    """The two norms of a decoder layer."""
    yield _tensor("input_layernorm", model.hidden_size, dtype, "norm")
    yield _tensor("post_attention_layernorm", model.hidden_size, dtype, "norm")


def _linear(
    name: str, numel: int, dtype: DType, quantization: Quantization | None
) -> Iterator[Tensor]:
    if quantization is Quantization.fp8:
        yield Tensor(name=name, numel=numel, itemsize_bytes=1, role="linear")
        yield Tensor(name=f"{name}.weight_scale", numel=1, itemsize_bytes=4, role="scale")
    else:
        yield _tensor(name, numel, dtype, "linear")


def _tensor(name: str, numel: int, dtype: DType, role: str) -> Tensor:
    return Tensor(name=name, numel=numel, itemsize_bytes=dtype.itemsize_bytes, role=role)
