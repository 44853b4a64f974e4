"""What is asked for: the facts and knobs of one point, as Hydra checks and types them.

Facts of a model carry the names of its Hugging Face config, so that a file in conf/model reads
like a config.json. Null in a knob means: what the engine and its version would choose.
"""

import re
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.errors import InvalidValue
from kvexp.parts import HEAVY as HEAVY
from kvexp.parts import SPARSE as SPARSE
from kvexp.parts import BlockIndexer as BlockIndexer
from kvexp.parts import Compressed as Compressed
from kvexp.parts import Dspark as Dspark
from kvexp.parts import Encoder as Encoder
from kvexp.parts import Heads as Heads
from kvexp.parts import LinearAttention as LinearAttention
from kvexp.parts import Mamba as Mamba
from kvexp.parts import Mla as Mla
from kvexp.parts import Moe as Moe
from kvexp.parts import PerLayerInput as PerLayerInput
from kvexp.parts import QuantizationConfig as QuantizationConfig
from kvexp.units import GIB, parse_bytes

LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "cross_attention",
    SPARSE,
    HEAVY,
    "mamba",
    "linear_attention",
    "conv",
    "hybrid",
    "mlp",
)
"""Kinds of layers by the names of Hugging Face configs.

A `hybrid` layer has full attention and Mamba side by side; `mlp` layers cache nothing.
"""

STATE_LAYERS = ("mamba", "linear_attention", "conv", "hybrid")
"""Kinds of layers that keep a state of fixed size for every request."""

CACHELESS = ("mamba", "linear_attention", "conv", "mlp")
"""Kinds of layers that keep nothing for a token."""

OLD_ROPE_TYPES = {"deepseek_yarn": "yarn", "su": "longrope"}
"""Names of rope scaling that others have replaced."""

ROPE_TYPES = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "mrope",
    "proportional",
    "xdrope",
    "ntk",
    *OLD_ROPE_TYPES,
)
"""Ways to scale positions that are known."""

QK_NORMS = ("head", "heads", "full")
"""Norms of queries and keys: of one head's size, of each head's own, of all heads."""

SCALED_BY_FACTOR = ("linear", "dynamic", "yarn", "deepseek_yarn", "llama3")
"""Those of them that need a factor."""


@dataclass
class Model:
    """Architecture facts of a model.

    `layer_types` names each layer's kind; a shorter list repeats, none means that every layer is
    `full_attention`, or `sliding_attention` where there is a window. `num_kv_shared_layers` last
    layers read the cache of earlier ones, with `use_double_wide_mlp` their MLP has twice the width.
    `intermediate_sizes` are the widths of each layer's MLP where they differ, 0 for none.
    `qk_norm` (head, heads or full) is for types where a config decides, `final_logit_softcapping`
    bounds the logits.
    `num_nextn_predict_layers` further layers draft tokens (MTP). `draft_vocab_size` and
    `target_hidden_size` are of a checkpoint that drafts for another model (EAGLE).
    `tower_parameters` counts what stands beside the decoder: vision and audio encoders,
    projectors; `audio_tower_parameters` of them are for audio; `uncounted_tower_parameters` more
    may be there, where an encoder's sizes or class are not known; `encoder` says what a vision
    encoder works on. `path` is a checkpoint or config.json to read the facts from, `config_path`
    the section of it, `aliases` are further ids with the same facts, `notes` the assumptions of
    the reader, and `checkpoint_bytes` what the
    checkpoint's tensors take where they were read.
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
    v_head_dim: int | None = None
    vocab_size: int = MISSING
    max_position_embeddings: int = MISSING
    tie_word_embeddings: bool = False
    torch_dtype: DType = DType.bf16
    kv_cache_scheme: KvDtype | None = None
    quantization_config: QuantizationConfig | None = None
    attention_bias: bool = False
    qk_norm: str | None = None
    final_logit_softcapping: float | None = None
    rope_theta: float = 10000.0
    rope_scaling: Any = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_heads: Heads | None = None
    attention_chunk_size: int | None = None
    num_kv_shared_layers: int = 0
    cross_attention: bool = False
    conv_L_cache: int | None = None  # noqa: N815 (as configs spell it)
    mla: Mla | None = None
    compressed: Compressed | None = None
    dspark: Dspark | None = None
    block_indexer: BlockIndexer | None = None
    moe: Moe | None = None
    mamba: Mamba | None = None
    linear: LinearAttention | None = None
    encoder: Encoder | None = None
    per_layer_input: PerLayerInput | None = None
    use_double_wide_mlp: bool = False
    intermediate_sizes: list[int] | None = None
    num_nextn_predict_layers: int = 0
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    tower_parameters: int = 0
    audio_tower_parameters: int = 0
    uncounted_tower_parameters: int = 0
    path: str | None = None
    config_path: str | None = None
    aliases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checkpoint_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
        ):
            check_count(f"model.{name}", getattr(self, name))
        for name in (
            "num_key_value_heads",
            "head_dim",
            "v_head_dim",
            "sliding_window",
            "attention_chunk_size",
            "conv_L_cache",
            "draft_vocab_size",
            "target_hidden_size",
        ):
            if getattr(self, name) is not None:
                check_count(f"model.{name}", getattr(self, name))
        least = 0 if self.moe or self.mamba else 1
        check_count("model.intermediate_size", self.intermediate_size, least=least)
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise InvalidValue(
                f"model.head_dim must be given: hidden_size {self.hidden_size} is not a multiple of"
                f" num_attention_heads {self.num_attention_heads}"
            )
        if not 0 <= self.num_kv_shared_layers < self.num_hidden_layers:
            raise InvalidValue(
                f"model.num_kv_shared_layers must be below num_hidden_layers"
                f" ({self.num_hidden_layers}), got {self.num_kv_shared_layers}"
            )
        if not 0 <= self.audio_tower_parameters <= max(0, self.tower_parameters):
            raise InvalidValue(
                "model.audio_tower_parameters must be at least 0 and at most tower_parameters"
                f" ({self.tower_parameters}), got {self.audio_tower_parameters}"
            )
        if self.final_logit_softcapping is not None and not self.final_logit_softcapping > 0:
            raise InvalidValue(
                "model.final_logit_softcapping must be above 0 or null,"
                f" got {self.final_logit_softcapping}"
            )
        if self.qk_norm is not None and self.qk_norm not in QK_NORMS:
            raise InvalidValue(
                f"model.qk_norm must be one of {', '.join(QK_NORMS)} or null, got {self.qk_norm!r}"
            )
        if self.torch_dtype is DType.auto:
            raise InvalidValue("model.torch_dtype must be one of bf16, fp16, fp32, got auto")
        for name in ("tower_parameters", "uncounted_tower_parameters"):
            check_count(f"model.{name}", getattr(self, name), least=0)
        check_count("model.num_nextn_predict_layers", self.num_nextn_predict_layers, least=0)
        if self.checkpoint_bytes is not None:
            check_count("model.checkpoint_bytes", self.checkpoint_bytes)
        if not self.rope_theta >= 0:
            raise InvalidValue(f"model.rope_theta must be at least 0, got {self.rope_theta:g}")
        self._check_parts()
        sizes = self.intermediate_sizes
        if sizes is not None and len(sizes) != self.num_hidden_layers:
            raise InvalidValue(
                f"model.intermediate_sizes must have {self.num_hidden_layers} layers,"
                f" got {len(sizes)}"
            )
        for size in sizes or ():
            check_count("model.intermediate_sizes", size, least=0)
        self._check_layer_types()
        self._check_rope_scaling()

    @property
    def has_towers(self) -> bool:
        """Whether encoders stand beside the decoder, counted or not."""
        return self.tower_parameters + self.uncounted_tower_parameters > 0

    @property
    def checkpoint(self) -> str:
        """What an engine opens: the Hugging Face id, or the folder or GGUF file of `path`.

        An id may name a part of its repository behind `#`, which no engine knows.
        """
        if self.path is None:
            return self.hf_id.partition("#")[0]
        path = Path(self.path)
        return str(path.parent if path.suffix in (".json", ".safetensors") else path)

    @property
    def is_gguf(self) -> bool:
        """Whether it was read from a GGUF file."""
        return self.path is not None and self.path.endswith(".gguf")

    @property
    def kv_heads(self) -> int:
        """KV heads of the whole model; absent means one per attention head."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head of K (and of V)."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def heads(self, index: int) -> Heads:
        """The heads of one layer."""
        if self.sliding_heads is not None and self.layer_type(index) == "sliding_attention":
            return self.sliding_heads
        return Heads(
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            v_head_dim=self.v_head_dim,
        )

    def layer_type(self, index: int) -> str:
        """The kind of one layer."""
        if self.layer_types:
            return self.layer_types[index % len(self.layer_types)]
        return "full_attention" if self.sliding_window is None else "sliding_attention"

    def has_experts(self, index: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        if self.moe is None:
            return False
        if self.moe.layers is not None:
            return index in self.moe.layers
        return index >= self.moe.first_k_dense_replace

    def has_indexer(self, index: int) -> bool:
        """Whether a layer picks the tokens that it attends to."""
        if self.block_indexer is not None:
            return index >= self.block_indexer.first_layer
        return self.mla is not None and self.mla.has_indexer(index)

    def mlp_width(self, index: int) -> int:
        """The width of one layer's MLP, 0 where it has none."""
        if self.intermediate_sizes is not None:
            return self.intermediate_sizes[index]
        doubled = self.use_double_wide_mlp and not self.owns_cache(index)
        return self.intermediate_size * (2 if doubled else 1)

    def owns_cache(self, index: int) -> bool:
        """Whether a layer keeps a cache of its own, rather than reading an earlier layer's."""
        return index < self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def is_eagle3(self) -> bool:
        """Whether it drafts from several layers of another model, by the name of its class."""
        return "eagle3" in self.architecture.lower()

    @property
    def rope_type(self) -> str | None:
        """How positions are scaled, null where they are not, in the newer spelling of old names."""
        scaling = self.rope_scaling or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        return None if kind is None else OLD_ROPE_TYPES.get(str(kind), str(kind))

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state."""
        return bool(set(STATE_LAYERS) & set(self.layer_types or ()))

    @property
    def is_attention_free(self) -> bool:
        """Whether no layer keeps anything for a token."""
        return bool(self.layer_types) and set(self.layer_types or ()) <= set(CACHELESS)

    def _check_rope_scaling(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        if not isinstance(scaling, dict):
            raise InvalidValue(f"model.rope_scaling must be a mapping or null, got {scaling!r}")
        if "factor" in scaling and "rope_type" not in scaling and "type" not in scaling:
            raise InvalidValue(f"model.rope_scaling must name its rope_type, got {scaling!r}")
        if self.rope_type is not None and self.rope_type not in ROPE_TYPES:
            raise InvalidValue(
                f"model.rope_scaling.rope_type must be one of {', '.join(ROPE_TYPES)},"
                f" got {self.rope_type!r}"
            )
        if self.rope_type in SCALED_BY_FACTOR and "factor" not in scaling:
            raise InvalidValue(
                f"model.rope_scaling must have a factor for {self.rope_type}, got {scaling!r}"
            )
        for key in ("factor", "original_max_position_embeddings"):
            value = scaling.get(key)
            if key not in scaling:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None or not is_number or not 0 < value < 1e9:
                raise InvalidValue(
                    f"model.rope_scaling.{key} must be a positive number, got {value!r}"
                )

    def _check_layer_types(self) -> None:
        needs = {
            "sliding_attention": "sliding_window",
            "chunked_attention": "attention_chunk_size",
            SPARSE: "compressed",
            HEAVY: "compressed",
            "mamba": "mamba",
            "linear_attention": "linear",
            "conv": "conv_L_cache",
            "hybrid": "mamba",
        }
        for kind in self.layer_types or ():
            if kind not in LAYER_TYPES:
                raise InvalidValue(
                    f"model.layer_types must be of {', '.join(LAYER_TYPES)}, got {kind!r}"
                )
            if kind in needs and getattr(self, needs[kind]) is None:
                raise InvalidValue(f"model.layer_types has {kind}: give model.{needs[kind]}")
        if self.compressed is not None:
            self._check_compressed(self.compressed)

    def _check_parts(self) -> None:
        """Whole numbers of every part are counts: from 1 on, from 0 where that is the default."""
        for name, part in vars(self).items():
            if not is_dataclass(part) or isinstance(part, QuantizationConfig):
                continue
            for item in fields(part):
                value = getattr(part, item.name)
                if isinstance(value, int) and not isinstance(value, bool):
                    least = 0 if item.default == 0 else 1
                    check_count(f"model.{name}.{item.name}", value, least=least)

    def _check_compressed(self, known: Compressed) -> None:
        kinds = {self.layer_type(index) for index in range(self.num_hidden_layers)}
        if not kinds <= {"sliding_attention", SPARSE, HEAVY} or self.mla is not None:
            raise InvalidValue(
                f"model.compressed needs layers of sliding_attention, {SPARSE} or {HEAVY} alone"
            )
        if self.sliding_window is None:
            raise InvalidValue("model.compressed is given: give model.sliding_window")


INTERCONNECTS = ("pcie", "nvlink", "multicast")
"""How the cards of one host may be connected."""


@dataclass
class Gpu:
    """A card.

    `total_bytes` is what cudaMemGetInfo reports. Where only a printed figure is known,
    `total_printed_gib` repeats it and `total_bytes` equals it; the error is then half of its last
    digit. `context_bytes` is what one CUDA context takes before an engine's baseline, and
    `context_from` where that is from: a `log` of the card, or the card whose context was scaled by
    multiprocessors; null where it was measured. An H200's is assumed where none is given.
    `interconnect` is how cards of one host talk: pcie, nvlink, or multicast (NVLink through
    switches whose multicast is on, which costs an engine buffers).
    `unified_memory`: the card's memory is the system's.
    `emulate`: where another, larger card is at hand, torch is given no more memory than this one
    would have.
    """

    name: str = MISSING
    source: str = "given"
    total_bytes: Any = MISSING
    total_printed_gib: float | None = None
    context_bytes: Any = 552402944
    context_from: str | None = "h200"
    num_sms: int | None = None
    compute_capability: str | None = None
    interconnect: str = "pcie"
    unified_memory: bool = False
    free_bytes: Any = None
    used_by_others_bytes: Any = 0
    emulate: bool = False

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
        if self.num_sms is not None:
            check_count("gpu.num_sms", self.num_sms)
        capability = self.compute_capability
        if capability is not None and re.fullmatch(r"\d{1,3}(\.\d)?", capability) is None:
            raise InvalidValue(
                f"gpu.compute_capability must be a number such as 9.0, got {capability!r}"
            )
        if self.interconnect not in INTERCONNECTS:
            raise InvalidValue(
                f"gpu.interconnect must be one of {', '.join(INTERCONNECTS)},"
                f" got {self.interconnect!r}"
            )
        for name in ("context_bytes", "free_bytes", "used_by_others_bytes"):
            if (getattr(self, name) or 0) > self.total_bytes:
                raise InvalidValue(
                    f"gpu.{name} must not exceed gpu.total_bytes ({self.total_bytes}),"
                    f" got {getattr(self, name)}"
                )
        if (self.free_bytes or 0) + self.used_by_others_bytes > self.total_bytes:
            raise InvalidValue(
                f"gpu.free_bytes and gpu.used_by_others_bytes must not exceed gpu.total_bytes"
                f" together ({self.total_bytes}), got {self.free_bytes} and"
                f" {self.used_by_others_bytes}"
            )
        printed = self.total_printed_gib
        if printed is not None and not 0 < printed < 1e6:
            raise InvalidValue(f"gpu.total_printed_gib must be a size in GiB, got {printed:g}")

    @property
    def total_error_bytes(self) -> int:
        """Half of the last printed digit where the total is a printed figure, else 0."""
        if self.total_printed_gib is None:
            return 0
        listed = int(round(self.total_printed_gib * 100) * GIB // 100)
        return int(GIB * 0.005) if self.total_bytes == listed else 0

    @property
    def context_error_bytes(self) -> int:
        """Half of a context that was not measured on the card, else 0."""
        return 0 if self.context_from is None else int(self.context_bytes) // 2


LARGEST = 1 << 40
LIMITS = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 20,
    "num_key_value_heads": 1 << 20,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "head_dim": 1 << 16,
    "v_head_dim": 1 << 16,
    "vocab_size": 1 << 28,
    "max_position_embeddings": 1 << 30,
    "max_model_len": 1 << 30,
    "max_num_batched_tokens": 1 << 24,
    "max_cudagraph_capture_size": 1 << 24,
    "max_num_seqs": 1 << 20,
    "block_size": 1 << 20,
    "num_sms": 1 << 16,
    "max_loras": 1 << 14,
    "num_tokens": 1 << 10,
    "image": 1 << 16,
    "video": 1 << 16,
    "audio": 1 << 16,
    "num_gpu_blocks": 1 << 32,
    "num_gpu_blocks_override": 1 << 32,
    "tp": 1 << 16,
    "pp": 10_000,
    "dp": 1 << 16,
}
"""The largest counts that are taken for meant; everything else ends at `LARGEST`."""

AUTO_FIT = -1
"""A `max_model_len` that asks the engine for the longest length that fits."""


@dataclass
class Lora:
    """LoRA adapters that an engine keeps room for: `max_loras` at once, of `max_rank` at most.

    Either of them turns LoRA on, the other is then the engine's default.
    """

    max_loras: int | None = None
    max_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_rank"):
            if getattr(self, name) is not None:
                check_count(f"lora.{name}", getattr(self, name))

    @property
    def is_asked(self) -> bool:
        """Whether there is any."""
        return self.max_loras is not None or self.max_rank is not None


@dataclass
class Speculative:
    """Speculative decoding: `num_tokens` are drafted by `method` before each step.

    `model` drafts them: an entry of the catalogue, a Hugging Face id or a path. `draft` are its
    facts; they are read from `model`.
    """

    method: str | None = None
    model: str | None = None
    num_tokens: int | None = None
    draft: Model | None = None

    def __post_init__(self) -> None:
        if self.num_tokens is not None:
            check_count("speculative.num_tokens", self.num_tokens)

    @property
    def is_asked(self) -> bool:
        """Whether there is any."""
        return any(value is not None for value in (self.method, self.model, self.num_tokens))


@dataclass
class Limits:
    """The most items of each modality in one request; null: the engine's default."""

    image: int | None = None
    video: int | None = None
    audio: int | None = None

    def __post_init__(self) -> None:
        for name, limit in self.given.items():
            check_count(f"mm.limits.{name}", limit, least=0)

    @property
    def given(self) -> dict[str, int]:
        """Those that are not null."""
        each = {"image": self.image, "video": self.video, "audio": self.audio}
        return {name: limit for name, limit in each.items() if limit is not None}


@dataclass
class Multimodal:
    """What a request may hold beside text."""

    limits: Limits = field(default_factory=Limits)


@dataclass
class Knobs:
    """The values that a user turns; scripts rely on these names.

    `max_model_len` may be -1 where the engine can fit the length to the memory. `pp_partition` are
    the layers of each pipeline stage, `dp` the replicas of an engine.
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
    dp: int = 1
    pp_partition: list[int] | None = None
    enforce_eager: bool = False
    lora: Lora = field(default_factory=Lora)
    speculative: Speculative = field(default_factory=Speculative)
    mm: Multimodal = field(default_factory=Multimodal)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.max_model_len not in (None, AUTO_FIT):
            check_count("max_model_len", self.max_model_len)
        for name in ("tp", "pp", "dp"):
            check_count(name, getattr(self, name))
        self._check_partition()
        if self.util is not None and not 0 < self.util <= 1:
            hint = f"; did you mean {self.util / 100:g}?" if 10 <= self.util <= 100 else ""
            raise InvalidValue(
                "util must be above 0 and at most 1 (a fraction of the card),"
                f" got {self.util:g}{hint}"
            )

    def extras(self) -> list[str]:
        """What is asked for that not every engine counts, by its key."""
        asked = {
            "dp": self.dp != 1,
            "pp_partition": self.pp_partition is not None,
            "lora": self.lora.is_asked,
            "speculative": self.speculative.is_asked,
            "mm": bool(self.mm.limits.given),
        }
        return [key for key, is_asked in asked.items() if is_asked]

    def _check_partition(self) -> None:
        partition, layers = self.pp_partition, self.model.num_hidden_layers
        if partition is None:
            return
        if len(partition) != self.pp or sum(partition) != layers or min(partition) < 0:
            raise InvalidValue(
                f"pp_partition must be {self.pp} numbers of layers (pp) that sum to {layers} for"
                f" {self.model.name}, got {list(partition)}"
            )


def share_of_total(knobs: Knobs, share: float | None, *, default: float) -> float:
    """The share of the card where an engine's `util` is just that: either of the two, not both.

    Raises:
        InvalidValue: the share is none, or both are given.
    """
    if share is None:
        return default if knobs.util is None else knobs.util
    check_share(knobs, share)
    return share


def check_share(knobs: Knobs, share: float) -> None:
    """See `share_of_total`."""
    if not 0 < share <= 1:
        raise InvalidValue(f"engine.share_of_total must be above 0 and at most 1, got {share:g}")
    if knobs.util is not None:
        raise InvalidValue("give util or engine.share_of_total, not both")


def parse_bytes_of(key: str, value: object) -> int:
    """`parse_bytes` for a configuration value: a bad one is an invalid point.

    Raises:
        InvalidValue: the value is not a size.
    """
    try:
        return parse_bytes(value, key=key)
    except ValueError as error:
        raise InvalidValue(str(error)) from None


def check_count(key: str, value: int, *, least: int = 1) -> None:
    """Whether a count may be meant.

    Raises:
        InvalidValue: it is below `least`, or larger than any of its kind (`LIMITS`).
    """
    if value < least:
        raise InvalidValue(f"{key} must be at least {least}, got {str(value)[:40]}")
    limit = LIMITS.get(key.rpartition(".")[2], LARGEST)
    if value > limit:
        raise InvalidValue(f"{key} must be at most {limit}, got {str(value)[:40]}")
