"""What is asked for: the facts and knobs of one point, as Hydra checks and types them.

Facts of a model carry the names of its Hugging Face config, so that a file in conf/model reads
like a config.json. Null in a knob means: what the engine and its version would choose.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.errors import InvalidValue
from kvexp.units import GIB, parse_bytes


@dataclass
class Mla:
    """Multi-head latent attention: one compressed vector a token instead of K and V heads."""

    kv_lora_rank: int = MISSING
    qk_rope_head_dim: int = MISSING
    qk_nope_head_dim: int = MISSING
    v_head_dim: int = MISSING
    q_lora_rank: int | None = None

    @property
    def latent_size(self) -> int:
        """Elements cached a token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass
class Moe:
    """Mixture of experts in the layers from `first_k_dense_replace` on.

    `shared_intermediate_size` is the width of the experts that every token passes, 0 for none;
    `format` is how the checkpoint stores the experts where that is not the model's dtype (mxfp4).
    """

    num_experts: int = MISSING
    num_experts_per_tok: int = MISSING
    moe_intermediate_size: int = MISSING
    shared_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    format: str | None = None
    bias: bool = False


@dataclass
class Mamba:
    """Mamba2 layers: a convolution and a recurrent state of fixed size for every request."""

    mamba_n_heads: int = MISSING
    mamba_d_head: int = MISSING
    mamba_d_state: int = MISSING
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True

    @property
    def intermediate_size(self) -> int:
        """Channels of the state."""
        return self.mamba_n_heads * self.mamba_d_head


LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "mamba")
"""Kinds of layers by the names of Hugging Face configs."""


@dataclass
class Model:
    """Architecture facts of a model.

    `layer_types` names each layer's kind; a shorter list repeats, none means that every layer is
    `full_attention`, or `sliding_attention` where there is a window.
    """

    name: str = MISSING
    hf_id: str = MISSING
    source: str = MISSING
    architecture: str = MISSING
    model_type: str = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_hidden_layers: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int = MISSING
    max_position_embeddings: int = MISSING
    tie_word_embeddings: bool = False
    torch_dtype: DType = DType.bf16
    kv_cache_scheme: KvDtype | None = None
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    mla: Mla | None = None
    moe: Moe | None = None
    mamba: Mamba | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
        ):
            _at_least_one(f"model.{name}", getattr(self, name))
        for name in (
            "num_key_value_heads",
            "head_dim",
            "sliding_window",
            "attention_chunk_size",
        ):
            if getattr(self, name) is not None:
                _at_least_one(f"model.{name}", getattr(self, name))
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise InvalidValue(
                f"model.head_dim must be given: hidden_size {self.hidden_size} is not a multiple of"
                f" num_attention_heads {self.num_attention_heads}"
            )
        self._check_layer_types()

    @property
    def kv_heads(self) -> int:
        """KV heads of the whole model; absent means one per attention head."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head of K (and of V)."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def layer_type(self, index: int) -> str:
        """The kind of one layer."""
        if self.layer_types:
            return self.layer_types[index % len(self.layer_types)]
        return "full_attention" if self.sliding_window is None else "sliding_attention"

    def has_experts(self, index: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.moe is not None and index >= self.moe.first_k_dense_replace

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state."""
        return "mamba" in (self.layer_types or ())

    def _check_layer_types(self) -> None:
        needs = {
            "sliding_attention": "sliding_window",
            "chunked_attention": "attention_chunk_size",
            "mamba": "mamba",
        }
        for kind in self.layer_types or ():
            if kind not in LAYER_TYPES:
                raise InvalidValue(
                    f"model.layer_types must be of {', '.join(LAYER_TYPES)}, got {kind!r}"
                )
            if kind in needs and getattr(self, needs[kind]) is None:
                raise InvalidValue(f"model.layer_types has {kind}: give model.{needs[kind]}")


@dataclass
class Gpu:
    """A card.

    `total_bytes` is what cudaMemGetInfo reports. Where only a printed figure is known,
    `total_printed_gib` repeats it and `total_bytes` equals it; the error is then half of its last
    digit. `context_bytes` is what one CUDA context takes before an engine's baseline.
    """

    name: str = MISSING
    source: str = MISSING
    total_bytes: Any = MISSING
    total_printed_gib: float | None = None
    context_bytes: Any = MISSING
    context_from: str | None = None
    num_sms: int | None = None
    compute_capability: str | None = None
    free_bytes: Any = None
    used_by_others_bytes: Any = 0

    def __post_init__(self) -> None:
        self.total_bytes = parse_bytes_of("gpu.total_bytes", self.total_bytes)
        self.context_bytes = parse_bytes_of("gpu.context_bytes", self.context_bytes)
        self.used_by_others_bytes = parse_bytes_of(
            "gpu.used_by_others_bytes", self.used_by_others_bytes
        )
        if self.free_bytes is not None:
            self.free_bytes = parse_bytes_of("gpu.free_bytes", self.free_bytes)
        if self.total_bytes == 0:
            raise InvalidValue("gpu.total_bytes must be more than 0, got 0")
        for name in ("free_bytes", "used_by_others_bytes"):
            if (getattr(self, name) or 0) > self.total_bytes:
                raise InvalidValue(
                    f"gpu.{name} must not exceed gpu.total_bytes ({self.total_bytes}),"
                    f" got {getattr(self, name)}"
                )

    @property
    def total_error_bytes(self) -> int:
        """Half of the last printed digit where the total is a printed figure, else 0."""
        if self.total_printed_gib is None:
            return 0
        listed = int(round(self.total_printed_gib * 100) * GIB // 100)
        return int(GIB * 0.005) if self.total_bytes == listed else 0


AUTO_FIT = -1
"""A `max_model_len` that asks the engine for the longest length that fits."""


@dataclass
class Knobs:
    """The values that a user turns; scripts rely on these names.

    `max_model_len` may be -1 where the engine can fit the length to the memory.
    """

    model: Model = MISSING
    gpu: Gpu = MISSING
    dtype: DType = DType.auto
    quantization: Quantization | None = None
    kv_dtype: KvDtype = KvDtype.auto
    block_size: int | None = None
    util: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    tp: int = 1
    pp: int = 1
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.max_model_len not in (None, AUTO_FIT):
            _at_least_one("max_model_len", self.max_model_len)
        for name in ("tp", "pp"):
            _at_least_one(name, getattr(self, name))
        if self.util is not None and not 0 < self.util <= 1:
            hint = f"; did you mean {self.util / 100:g}?" if 2 <= self.util <= 100 else ""
            raise InvalidValue(
                "util must be above 0 and at most 1 (a fraction of the card),"
                f" got {self.util:g}{hint}"
            )


def parse_bytes_of(key: str, value: object) -> int:
    """`parse_bytes` for a configuration value: a bad one is an invalid point.

    Raises:
        InvalidValue: the value is not a size.
    """
    try:
        return parse_bytes(value, key=key)
    except ValueError as error:
        raise InvalidValue(str(error)) from None


def _at_least_one(key: str, value: int | None) -> None:
    if value is None or value < 1:
        raise InvalidValue(f"{key} must be at least 1, got {value}")
