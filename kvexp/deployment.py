"""One engine on one kind of card with every value decided: no null is left."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.request import Gpu, Model


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraRoom:
    """Room for `max_loras` adapters of `max_rank`."""

    max_loras: int
    max_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """`num_tokens` drafted by `method` before each step, by the model `draft` where it has one."""

    method: str
    num_tokens: int
    draft: Model | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCaching:
    """How prefix caching keeps recurrent states, by vLLM's names.

    `mode`: none (one state a request), align (of the last two steps' blocks) or all (of every
    block). Blocks are multiples of `unit` tokens (null: of the block size), in mode all of
    `chunk_size` too; where no layer is attention, they are of `chunk_size` alone.
    `num_checkpoints`: states that mode align keeps beyond two and what is drafted.
    `aligns_drafts`: blocks are made for states with what is drafted, which the layers keep.
    `conv_dtype` and `state_dtype` of convolutions and states; null for the compute dtype and the
    model's own.
    """

    mode: Literal["none", "align", "all"] = "none"
    unit: int | None = None
    chunk_size: int | None = None
    num_checkpoints: int = 0
    aligns_drafts: bool = True
    conv_dtype: DType | None = None
    state_dtype: DType | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """What an engine resolves a request to.

    `total_bytes`, `free_bytes` (at the engine's baseline) and `used_by_others_bytes` are of one
    card; every rank has one. `dp` replicas hold the same, `pp_partition` are the layers of each
    stage where they were given. `mm_limits` are the most items of each modality in a request, for a
    model that takes any. `auto_fit`: `max_model_len` is lowered until one request fits.
    `kv_skip_layers` cache in the compute dtype whatever `kv_dtype` is. `compiled`: the engine
    compiles the model where it is not eager.
    `notes` are the assumptions made on the way, `flags` what starts the engine with these values.
    """

    model: Model
    gpu: Gpu
    engine: str
    engine_version: str
    usage: str
    dtype: DType
    quantization: Quantization | None
    kv_dtype: KvDtype
    block_size: int
    util: float
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    tp: int
    pp: int
    enforce_eager: bool
    total_bytes: int
    free_bytes: int
    used_by_others_bytes: int
    dp: int = 1
    kv_skip_layers: frozenset[int] = frozenset()
    pp_partition: tuple[int, ...] | None = None
    lora: LoraRoom | None = None
    speculation: Speculation | None = None
    states: StateCaching = StateCaching()
    mm_limits: Mapping[str, int] = field(default_factory=dict)
    auto_fit: bool = False
    compiled: bool = True
    notes: tuple[str, ...] = ()
    flags: str = ""

    @property
    def num_ranks(self) -> int:
        """Cards of one replica."""
        return self.tp * self.pp

    @property
    def kv_heads_per_rank(self) -> int:
        """KV heads that one rank stores; heads are replicated when tp exceeds them."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def draft(self) -> Model | None:
        """The model that drafts tokens, null where none does."""
        return None if self.speculation is None else self.speculation.draft

    @property
    def has_extras(self) -> bool:
        """Whether adapters or drafts take memory beside the model."""
        return self.lora is not None or self.speculation is not None

    def effective(self) -> dict[str, Any]:
        """The values that were used, as plain data for result.json."""
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "usage": self.usage,
            "dtype": self.dtype.name,
            "quantization": self.quantization.name if self.quantization else None,
            "kv_dtype": self.kv_dtype.name,
            "block_size": self.block_size,
            "util": self.util,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "tp": self.tp,
            "pp": self.pp,
            "dp": self.dp,
            **self._extras(),
            "enforce_eager": self.enforce_eager,
            "total_bytes": self.total_bytes,
            "free_bytes": self.free_bytes,
            "used_by_others_bytes": self.used_by_others_bytes,
            "flags": self.flags,
        }

    def _extras(self) -> dict[str, Any]:
        """What was asked for beyond a plain model, by the names of a request."""
        found: dict[str, Any] = {}
        if self.pp_partition is not None:
            found["pp_partition"] = list(self.pp_partition)
        if self.lora is not None:
            found["lora_max_loras"] = self.lora.max_loras
            found["lora_max_rank"] = self.lora.max_rank
        if self.speculation is not None:
            found["speculative_method"] = self.speculation.method
            found["speculative_num_tokens"] = self.speculation.num_tokens
        if self.draft is not None:
            found["speculative_model"] = self.draft.name
        if self.states.mode != "none":
            found["mamba_cache_mode"] = self.states.mode
        if self.mm_limits:
            found["mm_limits"] = dict(self.mm_limits)
        return found
