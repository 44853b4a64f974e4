"""An encoder of images or audio in a config.json, for engines that profile themselves with it."""

from kvexp.hf import class_encoders
from kvexp.hf.item import CHANNELS, WHY
from kvexp.hf.items import AUDIO_RULES, RULES, UNPATCHED
from kvexp.hf.section import Section
from kvexp.hf.towers import (
    AUDIO_KEYS,
    DEFAULTS,
    GATED,
    MOST_POSITIONS,
    VISION_KEYS,
    encoder_section,
    mlp_width,
    own_type,
    patch_size,
    places,
)
from kvexp.request import Encoder

_SIZES = (1024, 24, 4096, 14)
_WIDTH = ("embed_dim", "vt_hidden_size", "d_model", "width", "hidden_size")
_HEADS = ("num_attention_heads", "vt_num_attention_heads", "num_heads", "encoder_attention_heads")
_LAYERS = ("num_hidden_layers", "vt_num_hidden_layers", "depth", "layers", "encoder_layers")
MLLAMA_LAYERS = (3, 7, 15, 23, 30)  # kept where a config does not say it
MOONVIT_POSITIONS = 512 * 512  # of its rotary table
GEMMA4_POSITIONS = 10240  # rows of its table

_TURNING = (
    *("dots_ocr", "exaone4_5", "glm4v", "glm_ocr", "keye", "kimi", "opencua", "ovis2_5"),
    *("paddleocr", "qwen"),
)
"""Types whose encoders turn queries and keys by their positions."""

_LEARNED = ("qwen3", "glm4v")
"""Those that keep their input beside its sum with rows of a table."""


def encoder(config: Section) -> Encoder | None:
    """The encoder's largest item; None where there is none, or its size is not known."""
    around = config.around()
    kind = class_encoders.kind_of(around)
    rules, keys = (AUDIO_RULES, AUDIO_KEYS) if kind in AUDIO_RULES else (RULES, VISION_KEYS)
    tower = _tower(config, keys)
    if kind in class_encoders.KINDS:
        tower = class_encoders.section(kind, around)
    if tower is None:
        return None
    if kind not in rules:
        around.assume(f"model_type {kind or 'is not given'}: no rule for the size of images")
        return None
    if kind in class_encoders.NEMOTRON:
        tower = class_encoders.radio(tower)
    own = own_type(tower, kind)
    width, depth, mlp, side = DEFAULTS.get(own, _SIZES)
    patch = 0
    if kind not in UNPATCHED:
        patch = patch_size(tower) or tower.assumed("patch_size", default=side or 14, why=WHY)
    item = rules[kind](around, tower, patch)
    width, mlp = item.widths or _widths(tower, kind, width or 1024, mlp)
    turns = kind.startswith(_TURNING) and keys is VISION_KEYS
    return Encoder(
        tokens_per_item=item.tokens,
        patches_per_item=item.patches,
        patch_size=item.numbers or CHANNELS * item.frames * patch * patch,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=tower.integer(*_LAYERS) or depth,
        gated=own in GATED,
        convolved=kind == "gemma3n",
        video_items=item.video_items,
        frame_tokens=item.frame_tokens,
        frame_patches=item.frame_patches,
        kept_layers=_kept_layers(tower) if kind == "mllama" else 0,
        returned_layers=_returned_layers(around, tower, kind),
        tile_patches=item.tile,
        masks_pairs=own == "pixtral",
        whole_patches=item.whole,
        num_attention_heads=_heads(tower, needed=turns or kind == "gemma4" or item.tile > 0),
        qk_norm=bool(tower.flag("qk_normalization") or tower.flag("use_qk_norm")),
        rotary=turns,
        learned_positions=kind.startswith(_LEARNED),
        table_positions=MOONVIT_POSITIONS if kind.startswith("kimi") else 0,
        windowed=tower.has("window_size") or kind.startswith("qwen2_5"),
        copies_projections=kind.startswith(("glm4v", "glm_ocr")),
        projected_size=item.projected,
        convolved_channels=item.channels,
        deepstack_layers=len(tower.integers("deepstack_visual_indexes") or ()),
        one_hot_positions=_one_hot_positions(tower) if kind == "gemma4" else 0,
        looks_ahead=config.text("use_bidirectional_attention") == "vision",
    )


def _tower(config: Section, keys: tuple[str, ...]) -> Section | None:
    """The section of the encoder, at the top or beside the language model."""
    found = (encoder_section(place, keys) for place in places(config))
    return next((tower for tower in found if tower is not None), None)


def _widths(tower: Section, kind: str, width: int, mlp: int | None) -> tuple[int, int]:
    width = tower.assumed(*_WIDTH, default=width, why=WHY)
    return width, mlp_width(tower, kind, width) or tower.assumed(
        "intermediate_size", default=mlp or 4 * width, why=WHY
    )


def _heads(tower: Section, *, needed: bool) -> int | None:
    return tower.assumed(*_HEADS, default=16, why=WHY) if needed else None


def _kept_layers(tower: Section) -> int:
    return len(tower.integers("intermediate_layers_indices") or MLLAMA_LAYERS)


def _returned_layers(around: Section, tower: Section, kind: str) -> int:
    """Layers whose outputs are all kept where several are selected from them."""
    if not kind.startswith("llava") or not isinstance(around.get("vision_feature_layer"), list):
        return 0
    layers = tower.assumed(*_LAYERS, default=24, why=WHY)
    deepest = max(
        layer + layers + 1 if layer < 0 else layer
        for layer in around.integers("vision_feature_layer") or [layers]
    )
    return min(layers, deepest)


def _one_hot_positions(tower: Section) -> int:
    return tower.assumed(
        "position_embedding_size", default=GEMMA4_POSITIONS, why=WHY, most=MOST_POSITIONS
    )
