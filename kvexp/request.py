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
class Model:
    """Architecture facts of a model."""

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
        for name in ("num_key_value_heads", "head_dim"):
            if getattr(self, name) is not None:
                _at_least_one(f"model.{name}", getattr(self, name))
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise InvalidValue(
                f"model.head_dim must be given: hidden_size {self.hidden_size} is not a multiple of"
                f" num_attention_heads {self.num_attention_heads}"
            )

    @property
    def kv_heads(self) -> int:
        """KV heads of the whole model; absent means one per attention head."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head of K (and of V)."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


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


@dataclass
class Knobs:
    """The values that a user turns; scripts rely on these names."""

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
        for name in ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
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


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise InvalidValue(f"{key} must be at least 1, got {value}")
