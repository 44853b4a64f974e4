"""Parts of a model that not every model has: latent attention, experts, states, formats."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from kvexp.dtypes import DType, Quantization
from kvexp.errors import InvalidValue


@dataclass
class Mla:
    """Multi-head latent attention: one compressed vector a token instead of K and V heads.

    `index_head_dim` and `index_n_heads` are of the indexer that picks tokens (DeepSeek V3.2); it
    caches a key of its own. Where `index_layers` are given only those have one, and the others take
    the tokens that it picked (GLM-5.2). Without `latent_cache` K and V of all heads are cached
    instead.
    """

    kv_lora_rank: int = MISSING
    qk_rope_head_dim: int = MISSING
    qk_nope_head_dim: int = MISSING
    v_head_dim: int = MISSING
    q_lora_rank: int | None = None
    index_head_dim: int | None = None
    index_n_heads: int | None = None
    index_layers: list[int] | None = None
    latent_cache: bool = True

    @property
    def latent_size(self) -> int:
        """Elements cached a token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def has_indexer(self, index: int) -> bool:
        """Whether a layer picks tokens itself."""
        if self.index_head_dim is None:
            return False
        return self.index_layers is None or index in self.index_layers


@dataclass
class BlockIndexer:
    """An indexer that picks blocks of tokens for layers whose heads are cached whole (MiniMax-M3).

    It caches one key of `index_head_dim` for a token, in the layers from `first_layer` on, and its
    `index_n_heads` query heads are as many as the KV heads.
    """

    index_head_dim: int = MISSING
    index_n_heads: int = MISSING
    block_size: int = 128
    first_layer: int = 0


@dataclass
class Compressed:
    """DeepSeek V4's attention: one vector a token within a window, older tokens compressed.

    Layers of `sliding_attention` have the window alone. `heavily_compressed_attention` also keeps
    one vector for `heavy_ratio` tokens, `compressed_sparse_attention` one for `sparse_ratio` with
    the key by which an indexer picks `index_topk` of them. `hc_mult` residual streams are mixed in
    every layer.
    """

    q_lora_rank: int = MISSING
    o_lora_rank: int = MISSING
    o_groups: int = MISSING
    index_head_dim: int = MISSING
    index_n_heads: int = MISSING
    index_topk: int = 512
    sparse_ratio: int = 4
    heavy_ratio: int = 128
    hc_mult: int = 4

    def ratio(self, kind: str) -> int:
        """Tokens that share a vector in layers of a kind, 0 where only the window is kept."""
        return {SPARSE: self.sparse_ratio, HEAVY: self.heavy_ratio}.get(kind, 0)


@dataclass
class Dspark:
    """DeepSeek V4's layers that draft a block of tokens at once.

    They read the hidden states of `num_target_layers` of the model's; `markov_rank` is that of the
    two tables by which each drafted token depends on the one before it.
    """

    num_layers: int = 3
    num_target_layers: int = 3
    markov_rank: int = 256


SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
"""Kinds of layers that compress older tokens."""


EXPERT_FORMATS = ("mxfp4", "nvfp4")


@dataclass
class Moe:
    """Mixture of experts in the layers from `first_k_dense_replace` on, or in `layers`.

    `shared_intermediate_size` is the width of the experts that every token passes, 0 for none;
    the experts work on vectors of `latent_size` where it is given, else of the hidden size;
    `format` is how the checkpoint stores the experts where that is not the model's own: mxfp4, or
    nvfp4. In the first `num_hash_layers` layers a table picks the experts by the token alone.
    """

    num_experts: int = MISSING
    num_experts_per_tok: int = MISSING
    moe_intermediate_size: int = MISSING
    shared_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    layers: list[int] | None = None
    latent_size: int | None = None
    format: str | None = None
    bias: bool = False
    num_hash_layers: int = 0

    def __post_init__(self) -> None:
        if self.format not in (None, *EXPERT_FORMATS):
            raise InvalidValue(
                f"model.moe.format must be one of {', '.join(EXPERT_FORMATS)}, or null,"
                f" got {self.format!r}"
            )


@dataclass
class Mamba:
    """Mamba layers: a convolution and a recurrent state of fixed size for every request.

    Mamba2, or Mamba1 where `mamba_dt_rank` is given: then a head is one channel wide. `state_dtype`
    is of the recurrent state where it is not the model's. `mamba_chunk_size`: tokens that the
    kernel scans at once, null where a config states none. `mamba_rms_norm`: its
    output is normed (Mamba2).
    """

    mamba_n_heads: int = MISSING
    mamba_d_head: int = MISSING
    mamba_d_state: int = MISSING
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_dt_rank: int | None = None
    state_dtype: DType | None = None
    mamba_chunk_size: int | None = None
    mamba_rms_norm: bool = True

    @property
    def intermediate_size(self) -> int:
        """Channels of the state."""
        return self.mamba_n_heads * self.mamba_d_head


@dataclass
class LinearAttention:
    """Linear attention: a state of fixed size for every request.

    `kind` is gated_delta_net (Qwen3-Next), kda (Kimi Linear) or lightning (MiniMax-Text, which has
    no convolution).
    """

    kind: str = MISSING
    linear_num_key_heads: int = MISSING
    linear_num_value_heads: int = MISSING
    linear_key_head_dim: int = MISSING
    linear_value_head_dim: int = MISSING
    linear_conv_kernel_dim: int = 4
    state_dtype: DType | None = None

    def __post_init__(self) -> None:
        if self.kind not in LINEAR_KINDS:
            raise InvalidValue(
                f"model.linear.kind must be one of {', '.join(LINEAR_KINDS)}, got {self.kind!r}"
            )

    @property
    def key_size(self) -> int:
        """Elements of all key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Elements of all value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim


LINEAR_KINDS = ("gated_delta_net", "kda", "lightning")
"""Kinds of linear attention whose state is known."""


@dataclass
class Heads:
    """Heads of the sliding layers where they differ from those of the others."""

    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int = MISSING
    v_head_dim: int | None = None


@dataclass
class Encoder:
    """An encoder of images or audio as an engine's profile runs it, on the largest items.

    One image has `patches_per_item` patches of `patch_size` numbers (channels included), and
    becomes `tokens_per_item` positions of the decoder; of audio they are its encoder's positions,
    and the mel bins of each. Without an `intermediate_size` it is a projection alone, of an item
    after the other. `gated`: the encoder's MLP has a gate.
    `video_items`: a video is as much as so many images at most, 0 where it takes none; or as so
    many frames of `frame_tokens` and `frame_patches`, where those are not an image's; the same of
    chunks of a long audio.
    `kept_layers`: outputs of so many layers are joined to the last one's (Mllama), whose decoder
    looks at them from layers of cross-attention instead of taking them as positions.
    `returned_layers`: outputs of so many layers are kept for some of them to be selected.
    `tile_patches`: positions that look at one another alone, where an image has several such tiles;
    `masks_pairs`: all look at all under a mask instead (Pixtral). `whole_patches`: the whole image
    is of so many and passes before the tiles, each with a bias of all its pairs (SAM).
    `num_hidden_layers` and `num_attention_heads` say what a rank holds of it where heads do not
    divide; `qk_norm`: queries and keys are normed over all heads (InternViT-6B). `rotary`: its
    positions are turned; `learned_positions`: and rows of a table are added to its input;
    `table_positions`: and the fp32 table of so many is kept (MoonViT); `windowed`: and ordered anew
    by windows; `copies_projections`: those are copied first (GLM).
    `deepstack_layers`: outputs of so many layers go into the decoder's first layers beside the last
    one's. `projected_size`: numbers that the projector makes of a token at its widest, where that
    may be more than the encoder's layers make. `convolved_channels`: audio of `patch_size` bins
    passes convolutions of so many channels first, in windows of `tile_patches`.
    `one_hot_positions`: rows of the table that each side of a position is looked up in, by older
    transformers with one-hot rows of it (Gemma 4). `looks_ahead`: positions of an item look at
    later ones in the decoder, so that it is in one step (`use_bidirectional_attention`).
    """

    tokens_per_item: int = MISSING
    patches_per_item: int = MISSING
    patch_size: int = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = 0
    gated: bool = False
    convolved: bool = False
    video_items: int = 0
    frame_tokens: int = 0
    frame_patches: int = 0
    kept_layers: int = 0
    returned_layers: int = 0
    tile_patches: int = 0
    masks_pairs: bool = False
    whole_patches: int = 0
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    qk_norm: bool = False
    rotary: bool = False
    learned_positions: bool = False
    table_positions: int = 0
    windowed: bool = False
    copies_projections: bool = False
    deepstack_layers: int = 0
    projected_size: int = 0
    convolved_channels: int = 0
    one_hot_positions: int = 0
    looks_ahead: bool = False

    def splits_heads(self, n: int) -> bool:
        """Whether `n` ranks share its attention; otherwise each of them has all of it."""
        return self.num_attention_heads is None or self.num_attention_heads % n == 0

    def __post_init__(self) -> None:
        for name in ("tokens_per_item", "patches_per_item", "patch_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise InvalidValue(
                    f"model.encoder.{name} must be at least 1, got {getattr(self, name)}"
                )


@dataclass
class QuantizationConfig:
    """How a checkpoint stores its matrices; `bits` of an element where the method allows several.

    `group_size` elements of a row share one scale: 0 for one scale a row, -1 for one a matrix.
    `block_size` instead is a side of a square of elements. `ignore` are modules at the base dtype:
    a module's name or last part, or a regular expression after `re:`. `fp8` are modules that are
    stored in FP8 instead, a scale each; `head`: the output head is stored like the matrices.
    """

    method: Quantization = MISSING
    bits: int | None = None
    group_size: int | None = None
    block_size: int | None = None
    zero_point: bool = False
    act_order: bool = False
    head: bool = False
    ignore: list[str] = field(default_factory=list)
    fp8: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("bits", self.bits, 1, 16),
            ("group_size", self.group_size, -1, 1 << 24),
            ("block_size", self.block_size, 1, 1 << 24),
        ):
            if value is not None and not least <= value <= most:
                raise InvalidValue(
                    f"model.quantization_config.{name} must be from {least} to {most}, got {value}"
                )


@dataclass
class PerLayerInput:
    """Embeddings of a token for every layer, beside the common one (Gemma 3n and 4).

    With `laurel_rank` a layer has a low-rank residual too, with `altup_num_inputs` it works on as
    many copies of the hidden states (Gemma 3n).
    """

    vocab_size_per_layer_input: int = MISSING
    hidden_size_per_layer_input: int = MISSING
    laurel_rank: int | None = None
    altup_num_inputs: int | None = None
