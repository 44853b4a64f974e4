"""The largest image that a vision encoder takes, for engines that profile themselves with images.

What decides it stands in config.json for encoders of fixed images, and in the model's processor
for those that take any size; of the latter the processors' published limits are used, and noted.
"""

from kvexp.hf.section import Section
from kvexp.hf.towers import (
    DEFAULTS,
    GATED,
    VISION_KEYS,
    encoder_section,
    patch_size,
    patches_a_side,
)
from kvexp.request import Encoder

CHANNELS = 3
MOST_TOKENS, MOST_TILES = 1 << 20, 1 << 10  # of one image: more is damage
QWEN_PIXELS = 12_845_056  # max_pixels of Qwen2-VL and Qwen2.5-VL, two frames a patch
QWEN3_PIXELS = 16_777_216  # longest_edge of Qwen3-VL's image processor; a video's is less
QWEN_MERGE, QWEN_FRAMES = 2, 2
QWEN_VIDEO = 8  # sixteen frames, two of them as much as an image
_SIZES = (1024, 24, 4096, 14)
_WHY = "of its encoder's class, for images"
MLLAMA_PADDING = 8  # positions of a tile are filled up to a multiple
MLLAMA_LAYERS = (3, 7, 15, 23, 30)  # kept where a config does not say it
LLAMA4_TILES = 17  # sixteen tiles and the whole image


def encoder(config: Section) -> Encoder | None:
    """The encoder's largest image; None where there is none, or its size is not known."""
    around = config.around()
    kind = around.text("model_type") or ""
    tower = encoder_section(around, VISION_KEYS)
    if tower is None:
        return None
    if kind not in _RULES:
        around.assume(f"model_type {kind or 'is not given'}: no rule for the size of images")
        return None
    own = tower.text("model_type") or kind
    width, _, mlp, patch = DEFAULTS.get(own, _SIZES)
    width = tower.assumed("embed_dim", "hidden_size", default=width or 1024, why=_WHY)
    mlp = tower.assumed("intermediate_size", default=mlp or 4 * width, why=_WHY)
    patch = patch_size(tower) or tower.assumed("patch_size", default=patch or 14, why=_WHY)
    tokens, patches, frames = _RULES[kind](around, tower, patch)
    newer, turns = _RULES[kind] is _qwen3, _RULES[kind] in (_qwen, _qwen3)
    return Encoder(
        tokens_per_item=tokens,
        patches_per_item=patches,
        patch_size=CHANNELS * frames * patch * patch,
        hidden_size=width,
        intermediate_size=mlp,
        gated=own in GATED,
        video_items=QWEN_VIDEO if _RULES[kind] is _qwen else 0,
        kept_layers=_kept_layers(tower) if _RULES[kind] is _mllama else 0,
        num_attention_heads=_heads(tower) if turns else None,
        rotary=turns,
        learned_positions=newer,
        deepstack_layers=len(tower.integers("deepstack_visual_indexes") or ()),
    )


def _gemma3(around: Section, tower: Section, patch: int) -> tuple[int, int, int]:
    side = patches_a_side(tower, patch, default=896, why=_WHY)
    tokens = around.assumed("mm_tokens_per_image", default=256, why=_WHY, most=MOST_TOKENS)
    return tokens, side * side, 1


def _mistral3(around: Section, tower: Section, patch: int) -> tuple[int, int, int]:
    side = patches_a_side(tower, patch, default=1540, why=_WHY)
    merge = around.assumed("spatial_merge_size", default=2, why=_WHY)
    if merge > side:
        raise around.wrong(("spatial_merge_size",), f"at most {side}, an image's patches", merge)
    merged = side // merge
    return merged * merged, side * side, 1


def _llama4(around: Section, tower: Section, patch: int) -> tuple[int, int, int]:
    side = patches_a_side(tower, patch, default=336, why=_WHY)
    ratio = tower.number("pixel_shuffle_ratio")
    if ratio is None:
        ratio = 0.5
        tower.assume("pixel_shuffle_ratio is not given: 0.5 for images")
    if not 1 / side <= ratio <= 1:
        raise tower.wrong(("pixel_shuffle_ratio",), "above 0 and at most 1", ratio)
    around.assume(f"vision_config: images of {LLAMA4_TILES} tiles, as the processor allows")
    return LLAMA4_TILES * int(side * side * ratio * ratio), LLAMA4_TILES * side * side, 1


def _qwen(around: Section, tower: Section, patch: int) -> tuple[int, int, int]:
    return _of_pixels(around, QWEN_PIXELS, patch)


def _qwen3(around: Section, tower: Section, patch: int) -> tuple[int, int, int]:
    return _of_pixels(around, QWEN3_PIXELS, patch)


def _of_pixels(around: Section, pixels: int, patch: int) -> tuple[int, int, int]:
    patches = pixels // (patch * patch)
    around.assume(f"vision_config: images of {pixels:,} pixels, as the processor allows")
    return patches // (QWEN_MERGE * QWEN_MERGE), patches, QWEN_FRAMES


def _mllama(around: Section, tower: Section, patch: int) -> tuple[int, int, int]:
    side = patches_a_side(tower, patch, default=448, why=_WHY)
    tiles = tower.assumed("max_num_tiles", default=4, why=_WHY, most=MOST_TILES)
    positions = side * side + 1
    return tiles * positions, tiles * -(-positions // MLLAMA_PADDING) * MLLAMA_PADDING, 1


def _heads(tower: Section) -> int:
    return tower.assumed("num_attention_heads", "num_heads", default=16, why=_WHY)


def _kept_layers(tower: Section) -> int:
    return len(tower.integers("intermediate_layers_indices") or MLLAMA_LAYERS)


_RULES = {
    "gemma3": _gemma3,
    "mllama": _mllama,
    "mistral3": _mistral3,
    "llama4": _llama4,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
}
