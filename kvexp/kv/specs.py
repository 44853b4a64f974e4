"""What one layer keeps in the KV cache: its page bytes and the blocks one request needs.

A *page* is the memory of one block of one layer. Every size is of one worker (GPU rank), so
head counts are a rank's. The formulas are those of vLLM 0.26 (`v1/kv_cache_interface.py`); where
releases differ the difference is a fact of `PlannerRules` that reaches a spec through `Demand`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from .dtypes import SCALE_BYTES, KVQuantMode, element_bytes, nvfp4_dim
from .errors import EngineError

MambaCacheMode = Literal["none", "align", "all"]
MambaDemand = Literal[
    "one_state", "by_length", "by_mode_plain_all", "by_mode", "by_mode_without_all"
]

_V32_TOKEN_BYTES = 656  # 512 fp8 + 4 float32 scales + 64 bfloat16 rope elements
_V4_TOKEN_BYTES = 584  # 448 fp8 + 64 bfloat16 rope elements + 8 scale bytes


def cdiv(numerator: int, denominator: int) -> int:
    """Return the ceiling of an integer division.

    Raises:
        ZeroDivisionError: If the denominator is zero.
    """
    return -(-numerator // denominator)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The limits of one request, as far as they decide how many blocks it may hold.

    Attributes:
        max_model_len: Longest request, in tokens.
        max_in_flight_tokens: Tokens that may be scheduled and not yet settled.
        max_num_encoder_input_tokens: Longest encoder input, in tokens.
        dcp: Ranks that a full-attention request's tokens are divided over.
        mamba_cache_mode: The engine's Mamba cache mode.
        mamba_demand: Which rule turns the mode into states: always one; one for each block;
            or by the mode, where "all" keeps one for each block, with or without the
            speculative ones, or is unknown.
    """

    max_model_len: int
    max_in_flight_tokens: int
    max_num_encoder_input_tokens: int
    dcp: int = 1
    mamba_cache_mode: MambaCacheMode = "none"
    mamba_demand: MambaDemand = "by_mode"

    def with_length(self, max_model_len: int) -> Demand:
        """Return the same limits for another longest request."""
        return Demand(
            max_model_len=max_model_len,
            max_in_flight_tokens=self.max_in_flight_tokens,
            max_num_encoder_input_tokens=self.max_num_encoder_input_tokens,
            dcp=self.dcp,
            mamba_cache_mode=self.mamba_cache_mode,
            mamba_demand=self.mamba_demand,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """Base of all layer specs.

    Attributes:
        block_size: Tokens in one block of this layer.
        page_size_padded: Page bytes that the layer is padded to, if any.
    """

    block_size: int
    page_size_padded: int | None = None

    @property
    def kind(self) -> str:
        """Short name of the spec's kind, e.g. ``full``."""
        return _KINDS[type(self)]

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a page before padding."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, padding included.

        Raises:
            EngineError: If the padded page is smaller than its contents.
        """
        unpadded = self.unpadded_page_size_bytes
        if self.page_size_padded is None:
            return unpadded
        if self.page_size_padded < unpadded:
            raise EngineError(
                "AssertionError",
                f"a page of {unpadded} bytes cannot be padded to {self.page_size_padded} bytes",
            )
        return self.page_size_padded

    def num_blocks(self, demand: Demand) -> int:
        """Return the most blocks that one request may hold in this layer.

        Raises:
            EngineError: If the engine refuses the combination.
        """
        raise NotImplementedError

    def max_memory_usage_bytes(self, demand: Demand) -> int:
        """Return the most bytes that one request may hold in this layer."""
        return self.num_blocks(demand) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec(LayerSpec):
    """A layer that stores keys and values token by token.

    Attributes:
        num_kv_heads: KV heads on this rank.
        head_size: Elements of one key head.
        dtype: Element type, a `storage_dtype` name.
        kv_quant_mode: How elements are scaled.
        indexes_kv_by_block_stride: Whether the attention backend can read a padded page.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    indexes_kv_by_block_stride: bool = False

    @property
    def token_elements(self) -> int:
        """Stored elements of one token and head, keys and values together."""
        return 2 * _packed_dim(self.head_size, self.kv_quant_mode)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a page without scales and padding."""
        return self.block_size * self.num_kv_heads * self.token_elements * element_bytes(self.dtype)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a page before padding, per-token-head scales included."""
        size = self.real_page_size_bytes
        if self.kv_quant_mode.has_token_head_scales:
            size += 2 * self.block_size * self.num_kv_heads * SCALE_BYTES
        return size


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention; base of the family that keeps every token.

    Attributes:
        head_size_v: Elements of one value head (`head_size` if not given).
        sliding_window: Window of a sliding layer that is kept as full.
        attention_chunk_size: Chunk of a chunked layer that is kept as full.
        non_causal: Whether the layer attends to later tokens.
    """

    head_size_v: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    def __post_init__(self) -> None:
        """Fill in the value head size."""
        _default_value_head(self)

    @property
    def token_elements(self) -> int:
        """Stored elements of one token and head, keys and values together."""
        assert self.head_size_v is not None
        mode = self.kv_quant_mode
        return _packed_dim(self.head_size, mode) + _packed_dim(self.head_size_v, mode)

    def num_blocks(self, demand: Demand) -> int:
        """Return the blocks of a request of the longest length."""
        length = demand.max_model_len
        if demand.dcp > 1:
            length = cdiv(length, demand.dcp)
        return cdiv(length, self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TQFullAttentionSpec(FullAttentionSpec):
    """Full attention whose keys and values are packed into one slot.

    Attributes:
        tq_slot_size: Bytes of one token and head, from `turboquant_slot_bytes`.
    """

    tq_slot_size: int

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a page without padding."""
        return self.block_size * self.num_kv_heads * self.tq_slot_size


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector a token, the same on every TP rank.

    Attributes:
        cache_dtype_str: The ``--kv-cache-dtype`` value; ``fp8_ds_mla`` has a layout of its own.
        alignment: Bytes that a page is rounded up to.
        compress_ratio: Tokens that share one stored vector.
        model_version: ``deepseek_v4`` selects that model's layout.
    """

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        """Fill in the value head size and align the page."""
        _default_value_head(self)
        _align_page(self)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a page without scales and padding."""
        stored = self.block_size // self.compress_ratio
        if self.cache_dtype_str == "fp8_ds_mla":
            if self.model_version == "deepseek_v4":
                return stored * _V4_TOKEN_BYTES
            return self.block_size * _V32_TOKEN_BYTES
        dim = self.head_size
        if self.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
            dim //= 2
        return stored * self.num_kv_heads * dim * element_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Cache of hidden states that a model hands out; never shapes the other layers' groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RSWASpec(FullAttentionSpec):
    """Reference sliding-window attention: the prompt stays, generated tokens slide.

    Attributes:
        rswa_window: Generated tokens that are kept.
    """

    rswa_window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with permanent sink tokens.

    Attributes:
        sink_len: Sink tokens.
    """

    sink_len: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Sliding-window attention.

    Attributes:
        sliding_window: Tokens that a query sees, itself included.
        head_size_v: Elements of one value head (`head_size` if not given).
    """

    sliding_window: int
    head_size_v: int | None = None

    def __post_init__(self) -> None:
        """Fill in the value head size."""
        _default_value_head(self)

    @property
    def token_elements(self) -> int:
        """Stored elements of one token and head; int4 is not packed here."""
        assert self.head_size_v is not None
        if self.kv_quant_mode is KVQuantMode.NVFP4:
            return nvfp4_dim(self.head_size) + nvfp4_dim(self.head_size_v)
        return self.head_size + self.head_size_v

    def num_blocks(self, demand: Demand) -> int:
        """Return the blocks of the window and the tokens in flight, plus one.

        The window may start inside a block, hence the extra one.

        Raises:
            EngineError: With decode context parallelism, which sliding windows lack.
        """
        if demand.dcp > 1:
            raise EngineError(
                "AssertionError", "sliding-window layers do not support decode context parallelism"
            )
        tokens = min(self.sliding_window - 1 + demand.max_in_flight_tokens, demand.max_model_len)
        return cdiv(tokens, self.block_size) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """Sliding-window attention with an MLA-like cache.

    Attributes:
        cache_dtype_str: The ``--kv-cache-dtype`` value.
        alignment: Bytes that a page is rounded up to.
        compress_ratio: Tokens that share one stored vector.
        model_version: ``deepseek_v4`` selects that model's layout.
    """

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        """Align the page."""
        _align_page(self)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a page without scales and padding.

        Raises:
            EngineError: If the model version is not one that the engine knows.
        """
        stored = self.block_size // self.compress_ratio
        if self.model_version == "deepseek_v4" and self.cache_dtype_str == "fp8_ds_mla":
            return stored * _V4_TOKEN_BYTES
        if self.model_version not in (None, "deepseek_v4"):
            raise EngineError(
                "AssertionError", f"model version {self.model_version!r} has no sliding MLA cache"
            )
        return stored * self.num_kv_heads * self.head_size * element_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attention inside fixed chunks.

    Attributes:
        attention_chunk_size: Tokens of a chunk.
    """

    attention_chunk_size: int

    def num_blocks(self, demand: Demand) -> int:
        """Return the blocks of one chunk and the tokens in flight; never divided by DCP."""
        tokens = min(self.attention_chunk_size + demand.max_in_flight_tokens, demand.max_model_len)
        return cdiv(tokens, self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention to an encoder's output."""

    def num_blocks(self, demand: Demand) -> int:
        """Return the blocks of the longest encoder input."""
        return cdiv(demand.max_num_encoder_input_tokens, self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention that keeps nothing; an engine gives such a layer no spec and refuses one."""

    def num_blocks(self, demand: Demand) -> int:
        """Return zero."""
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaSpec(LayerSpec):
    """A layer with a state of fixed size: Mamba, linear attention, short convolution.

    Attributes:
        shapes: Shapes of the state tensors of one rank.
        dtypes: Their element types.
        num_speculative_blocks: States kept for speculative tokens.
        num_checkpoint_blocks: States kept in mode "align" for boundaries inside a prefill.
        mamba_cache_mode: The layer's own mode, part of its identity only.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    num_speculative_blocks: int = 0
    num_checkpoint_blocks: int = 0
    mamba_cache_mode: MambaCacheMode = "none"

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one state."""
        return sum(
            prod(shape) * element_bytes(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=False)
        )

    def num_blocks(self, demand: Demand) -> int:
        """Return the states of one request under the engine's rule and cache mode."""
        rule, speculative = demand.mamba_demand, self.num_speculative_blocks
        if rule == "one_state":
            return 1
        if rule == "by_length":
            return cdiv(demand.max_model_len, self.block_size)
        if demand.mamba_cache_mode == "all" and rule != "by_mode_without_all":
            blocks = cdiv(demand.max_model_len, self.block_size)
            return blocks if rule == "by_mode_plain_all" else blocks + speculative
        if demand.mamba_cache_mode == "align":
            return 2 + speculative + self.num_checkpoint_blocks
        return 1 + speculative


_KINDS: dict[type, str] = {
    FullAttentionSpec: "full",
    TQFullAttentionSpec: "turboquant",
    MLAAttentionSpec: "mla",
    HiddenStateCacheSpec: "hidden",
    RSWASpec: "rswa",
    SinkFullAttentionSpec: "sink",
    SlidingWindowSpec: "sliding",
    SlidingWindowMLASpec: "sliding_mla",
    ChunkedLocalAttentionSpec: "chunked",
    CrossAttentionSpec: "cross",
    EncoderOnlyAttentionSpec: "encoder_only",
    MambaSpec: "mamba",
}


def _packed_dim(head_size: int, mode: KVQuantMode) -> int:
    if mode is KVQuantMode.NVFP4:
        return nvfp4_dim(head_size)
    if mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
        return head_size // 2
    return head_size


def _default_value_head(spec: FullAttentionSpec | SlidingWindowSpec) -> None:
    if spec.head_size_v is None:
        object.__setattr__(spec, "head_size_v", spec.head_size)


def _align_page(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> None:
    if spec.alignment is None:
        return
    real = spec.real_page_size_bytes
    aligned = cdiv(real, spec.alignment) * spec.alignment
    if aligned != real:
        object.__setattr__(spec, "page_size_padded", aligned)
