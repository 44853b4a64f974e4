"""The largest images of models whose processors cut them into tiles, or take any size, by class.

Each as vLLM 0.26 makes it for its profile run; processors' published limits are noted.
"""

import math
from dataclasses import replace

from kvexp.hf.class_encoders import NEMOTRON, RADIO_PREFIX, kind_of
from kvexp.hf.item import LONGEST, MERGE, WHY, Item, Rule
from kvexp.hf.section import Section
from kvexp.hf.towers import MOST_SIDE, patches_a_side

OCR_WHOLE, OCR_TILE, OCR2_TILE = 1024, 640, 768  # sides of the whole image and of a tile
OCR_TILES, OCR_MERGE = 2, 4  # tiles along a side of vLLM's dummy image, patches of a token
PHI3_TILES, PHI4_TILES, COHERE_TILES, NEMOTRON_TILES = 16, 36, 12, 12
PADDLE_PIXELS, DOTS_PIXELS = 2_822_400, 11_289_600  # max_pixels of their processors
LFM_TOKENS = 256  # max_image_tokens of its processor
HUNYUAN_SIDES = (512, 8192)  # of vLLM's dummy image, which its processor leaves as it is
KEYE_PIXELS, KEYE_FRAMES = 1_003_520, {"keye": 16, "keye_vl1_5": 2048}  # of their classes
OVIS_SIDE, OVIS_VIDEO = 1792, 2  # of vLLM's dummy image; its frames at the model's longest context
OVIS_INDICATORS = 4  # rows of its visual vocabulary beside the head's
OVIS_LOGITS = 4  # tensors of a softmax in fp32 and its cast, in elements of two bytes
SQUARED = 3  # tensors of a ReLU and its square


def deepseek_ocr(around: Section, tower: Section, patch: int) -> Item:
    """The whole image and four tiles, each with a newline a row of tokens."""
    return _ocr(around, patch, OCR_TILE, newlines=1)


def deepseek_ocr2(around: Section, tower: Section, patch: int) -> Item:
    """The same with larger tiles, and no newlines."""
    return _ocr(around, patch, OCR2_TILE, newlines=0)


def _ocr(around: Section, patch: int, size: int, *, newlines: int) -> Item:
    around.assume(f"vision_config: images of {OCR_TILES**2} tiles, as vLLM's dummy")
    whole, side = OCR_WHOLE // patch, size // patch
    merged, rows = -(-whole // OCR_MERGE), OCR_TILES * -(-side // OCR_MERGE)
    return Item(
        tokens=merged * (merged + newlines) + rows * (rows + newlines) + 1,
        patches=whole * whole + OCR_TILES**2 * side * side,
        tile=side * side,
        whole=whole * whole,
    )


def phi3_v(around: Section, tower: Section, patch: int) -> Item:
    """A column of tiles and the whole image, a newline a row of tokens; a class token a tile."""
    return _column(around, patches_a_side(tower, patch, default=336, why=WHY), PHI3_TILES, 1)


def phi4mm(around: Section, tower: Section, patch: int) -> Item:
    """The same without class tokens."""
    return _column(around, patches_a_side(tower, patch, default=448, why=WHY), PHI4_TILES, 0)


def _column(around: Section, side: int, tiles: int, classes: int) -> Item:
    around.assume(f"images of {tiles} tiles and the whole, as the processor allows")
    merged, tile = side // MERGE, side * side + classes
    tokens = (tiles + 1) * merged * (merged + 1) + 1
    return Item(tokens=tokens, patches=(tiles + 1) * tile, tile=tile)


def aya_vision(around: Section, tower: Section, patch: int) -> Item:
    """As Command A Vision's, its gate not joined with the product."""
    aligned = around.assumed("alignment_intermediate_size", default=28672, why=WHY)
    return replace(cohere2_vision(around, tower, patch), projected=2 * aligned)


def cohere2_vision(around: Section, tower: Section, patch: int) -> Item:
    """Tiles and the whole image; its projector merges patches, with a gate."""
    side = patches_a_side(tower, patch, default=364, why=WHY)
    factor = around.assumed("downsample_factor", default=MERGE, why=WHY, most=side)
    around.assume(f"vision_config: images of {COHERE_TILES} tiles and the whole, by the processor")
    aligned = around.assumed("alignment_intermediate_size", default=28672, why=WHY)
    tiles, merged = COHERE_TILES + 1, side // factor
    return Item(
        tokens=tiles * merged * merged,
        patches=tiles * side * side,
        tile=side * side,
        projected=aligned + aligned // 2,
    )


def nemotron_vl(around: Section, tower: Section, patch: int) -> Item:
    """Tiles and the whole image; a video has a tile a frame, as many as the length allows."""
    size = around.assumed("force_image_size", default=512, why=WHY, least=patch, most=MOST_SIDE)
    side = size // patch
    ratio = around.number("downsample_ratio") or 0.5
    tokens, positions = int(side * side * ratio * ratio), side * side + RADIO_PREFIX
    around.assume(f"vision_config: images of {NEMOTRON_TILES} tiles and the whole")
    return Item(
        tokens=(NEMOTRON_TILES + 1) * tokens,
        patches=(NEMOTRON_TILES + 1) * positions,
        tile=positions,
        frame_tokens=tokens,
        frame_patches=positions,
        video_items=LONGEST,
        projected=SQUARED * around.assumed("projector_hidden_size", default=20480, why=WHY),
    )


def paddleocr_vl(around: Section, tower: Section, patch: int) -> Item:
    """The most tokens that make a rectangle."""
    return _rectangle(around, PADDLE_PIXELS, patch)


def dots_ocr(around: Section, tower: Section, patch: int) -> Item:
    """The same with a larger limit."""
    return _rectangle(around, DOTS_PIXELS, patch)


def _rectangle(around: Section, pixels: int, patch: int) -> Item:
    around.assume(f"vision_config: images of {pixels:,} pixels, as the processor allows")
    tokens = pixels // (MERGE * patch) ** 2
    tokens -= tokens % math.isqrt(tokens)
    return Item(tokens=tokens, patches=MERGE * MERGE * tokens)


def keye(around: Section, tower: Section, patch: int) -> Item:
    """The largest square; a frame of a video is as much as an image."""
    around.assume(f"vision_config: images of {KEYE_PIXELS:,} pixels, as the processor's class has")
    side = math.isqrt(KEYE_PIXELS) // (MERGE * patch)
    tokens = max(1, side * side)
    return Item(
        tokens=tokens,
        patches=MERGE * MERGE * tokens,
        frame_tokens=tokens,
        frame_patches=MERGE * MERGE * tokens,
        video_items=KEYE_FRAMES[kind_of(around)],
    )


def lfm2_vl(around: Section, tower: Section, patch: int) -> Item:
    """vLLM's dummy is an image that is not split."""
    around.assume(f"vision_config: images of {LFM_TOKENS} tokens, as the processor allows")
    factor = around.assumed("downsample_factor", default=MERGE, why=WHY, most=1 << 6)
    return Item(tokens=LFM_TOKENS, patches=LFM_TOKENS * factor * factor)


def hunyuan_vl(around: Section, tower: Section, patch: int) -> Item:
    """A long image, a newline a row of tokens, one token before and one behind."""
    width, height = (side // patch for side in HUNYUAN_SIDES)
    around.assume("vision_config: images of 512 by 8192 pixels, as vLLM's dummy")
    tokens = height // MERGE * (width // MERGE + 1) + 2
    return Item(tokens=tokens, patches=width * height)


def ovis2_5(around: Section, tower: Section, patch: int) -> Item:
    """vLLM's dummy image; tokens are chosen from a visual vocabulary by a softmax."""
    around.assume("vit_config: images of 1792 by 1792 pixels, as vLLM's dummy, videos of two")
    stride = tower.assumed("hidden_stride", default=MERGE, why=WHY, most=OVIS_SIDE // patch)
    vocabulary = around.assumed("visual_vocab_size", default=65536, why=WHY)
    side = OVIS_SIDE // patch
    return Item(
        tokens=(side // stride) ** 2,
        patches=side * side,
        video_items=OVIS_VIDEO,
        projected=OVIS_LOGITS * max(1, vocabulary - OVIS_INDICATORS),
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(NEMOTRON, nemotron_vl),
    "aya_vision": aya_vision,
    "cohere2_vision": cohere2_vision,
    "deepseek_ocr": deepseek_ocr,
    "deepseek_ocr2": deepseek_ocr2,
    "dots_ocr": dots_ocr,
    "hunyuan_vl": hunyuan_vl,
    "keye": keye,
    "keye_vl1_5": keye,
    "lfm2_vl": lfm2_vl,
    "lfm2-vl": lfm2_vl,
    "ovis2_5": ovis2_5,
    "paddleocr_vl": paddleocr_vl,
    "phi3_v": phi3_v,
    "phi4mm": phi4mm,
}
"""Images of a type of model."""
