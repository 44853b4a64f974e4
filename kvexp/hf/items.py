"""The largest image or audio of each type of model, and a frame of its videos, in patches.

What decides it stands in config.json for encoders of fixed images or tiles, and in the model's
processor for those that take any size; of the latter the processors' published limits are used,
and noted.
"""

import math

from kvexp.hf import class_items
from kvexp.hf.item import FRAMES, LONGEST, MERGE, MOST_TILES, MOST_TOKENS, WHY, Item, Rule
from kvexp.hf.section import Section
from kvexp.hf.towers import MOST_PATCH, MOST_SIDE, patches_a_side

QWEN_PIXELS = 12_845_056  # max_pixels of Qwen2-VL and Qwen2.5-VL, two frames a patch
QWEN3_PIXELS = 16_777_216  # longest_edge of Qwen3-VL's image processor; a video's is less
GLM_PIXELS, GLM_VIDEO_PIXELS = 9_633_792, 47_040_000  # longest_edge of GLM-4.1V's processors
GLM_FRAMES = 600  # that vLLM tries
QWEN_VIDEO = 8  # sixteen frames, two of them as much as an image
LLAMA4_TILES = 17  # sixteen tiles and the whole image
IDEFICS_TILES = 17  # four by four and the whole image
MLLAMA_PADDING = 8  # positions of a tile are filled up to a multiple
GEMMA3N_SIDE, GEMMA3N_STRIDE, GEMMA3N_WIDTHS = 768, 4, (128, 768)
GEMMA4_FRAMES, GEMMA4_FRAME_TOKENS = 32, 70  # of a video, beside eight tokens of its time
GEMMA4_TIME_TOKENS = 8
MINICPM_SLICES, MINICPM_FRAMES = 9, 16
KIMI_SIDE, KIMI_PATCHES = 1024, 4096  # of vLLM's dummy image, and the limit of Kimi-VL's processor
KIMI25_SIDE, KIMI25_PATCHES = 3000, 16384
ONEVISION_SIDES = (1153, 944)  # width and height of vLLM's dummy image
ONEVISION_TILES, ONEVISION_SHRINKS, ONEVISION_FRAMES = 9, 1.1, 32
VOXTRAL_MERGE, VOXTRAL_SAMPLES = 4, 320  # positions of a token, samples of a position
ASR_FRAMES, ASR_TOKENS, ASR_WINDOW = 3000, 390, 100  # of 30 seconds; frames of half a window
READS_VIDEOS = ("qwen2", "qwen3", "qwen3_moe", "gpt_oss")
"""Language models of InternVL whose vocabulary has a token for videos."""


def gemma3(around: Section, tower: Section, patch: int) -> Item:
    """One image of a fixed size."""
    side = patches_a_side(tower, patch, default=896, why=WHY)
    tokens = around.assumed("mm_tokens_per_image", default=256, why=WHY, most=MOST_TOKENS)
    return Item(tokens=tokens, patches=side * side)


def gemma3n(around: Section, tower: Section, patch: int) -> Item:
    """One image of a fixed size through MobileNetV5, whose widest layer is at a quarter of it."""
    side = GEMMA3N_SIDE // GEMMA3N_STRIDE
    return Item(
        tokens=around.assumed(
            "vision_soft_tokens_per_image", default=256, why=WHY, most=MOST_TOKENS
        ),
        patches=side * side,
        numbers=3 * GEMMA3N_STRIDE**2,
        widths=GEMMA3N_WIDTHS,
    )


def gemma4(around: Section, tower: Section, patch: int) -> Item:
    """Patches are pooled; a video's frames are smaller images."""
    pooled = tower.assumed("pooling_kernel_size", default=3, why=WHY, most=MOST_PATCH) ** 2
    tokens = tower.assumed("default_output_length", default=280, why=WHY, most=MOST_TOKENS)
    return Item(
        tokens=tokens,
        patches=tokens * pooled,
        frame_tokens=GEMMA4_FRAME_TOKENS + GEMMA4_TIME_TOKENS,
        frame_patches=GEMMA4_FRAME_TOKENS * pooled,
        video_items=GEMMA4_FRAMES,
    )


def gemma4_unified(around: Section, tower: Section, patch: int) -> Item:
    """Pooled patches are a token each, and the decoder's input by a projection alone."""
    pooled = tower.assumed("pooling_kernel_size", default=3, why=WHY, most=MOST_PATCH) ** 2
    tokens = tower.assumed("num_soft_tokens", default=280, why=WHY, most=MOST_TOKENS)
    return Item(
        tokens=tokens,
        patches=tokens,
        frame_tokens=GEMMA4_FRAME_TOKENS + GEMMA4_TIME_TOKENS,
        frame_patches=GEMMA4_FRAME_TOKENS,
        video_items=GEMMA4_FRAMES,
        numbers=3 * pooled * patch * patch,
        widths=(tower.assumed("mm_embed_dim", default=3840, why=WHY, most=MOST_TOKENS), 0),
    )


def mistral3(around: Section, tower: Section, patch: int) -> Item:
    """The largest square, patches merged."""
    side = patches_a_side(tower, patch, default=1540, why=WHY)
    merge = around.assumed("spatial_merge_size", default=MERGE, why=WHY)
    if merge > side:
        raise around.wrong(("spatial_merge_size",), f"at most {side}, an image's patches", merge)
    merged = side // merge
    return Item(tokens=merged * merged, patches=side * side)


def llava(around: Section, tower: Section, patch: int) -> Item:
    """One image of a fixed size, or Pixtral's largest square."""
    if tower.text("model_type") == "pixtral":
        side = patches_a_side(tower, patch, default=1024, why=WHY)
        return Item(tokens=side * side, patches=side * side)
    side = patches_a_side(tower, patch, default=336, why=WHY)
    return Item(tokens=_selected(around, side, tower), patches=side * side + _class_token(tower))


def llava_next(around: Section, tower: Section, patch: int) -> Item:
    """The grid of tiles that has the most tokens, and the whole image."""
    side = patches_a_side(tower, patch, default=336, why=WHY)
    grids = _grids(around, "image_grid_pinpoints", tower, default=336)
    rows, columns = max(grids, key=lambda grid: grid[0] * (grid[1] * side + 1))
    newlines = rows * side
    tokens = rows * columns * side * side + newlines + _selected(around, side, tower)
    tiles = max(grid[0] * grid[1] for grid in grids) + 1
    tile = side * side + _class_token(tower)
    return Item(tokens=tokens, patches=tiles * tile, tile=tile)


def llava_onevision(around: Section, tower: Section, patch: int) -> Item:
    """The image of which vLLM's dummy makes the most tokens, unpadded, and the whole image.

    0.26 `models/llava_onevision.py`; a frame of a video is pooled.
    """
    side = patches_a_side(tower, patch, default=384, why=WHY)
    size = tower.integer("image_size") or 384
    grids = _grids(around, "image_grid_pinpoints", tower, default=384)
    rows, columns = max(grids, key=lambda grid: _fit(grid[0] * size, grid[1] * size))
    height, width = _unpadded(rows * side, columns * side)
    around.assume("vision_config: images of 1153 by 944 pixels, as vLLM's dummy")
    ratio = math.sqrt(height * width / (ONEVISION_TILES * side * side))
    if ratio > ONEVISION_SHRINKS:
        height, width = int(height // ratio), int(width // ratio)
    pooled = -(-side // (around.integer("spatial_pool_stride", most=side) or MERGE))
    return Item(
        tokens=height * width + height + side * side,
        patches=(rows * columns + 1) * side * side,
        tile=side * side,
        frame_tokens=pooled * pooled,
        frame_patches=side * side,
        video_items=ONEVISION_FRAMES,
    )


def _fit(height: int, width: int) -> tuple[int, int]:
    """How many pixels of the dummy a size keeps, then how few are wasted (transformers)."""
    own_width, own_height = ONEVISION_SIDES
    scale = min(width / own_width, height / own_height)
    kept = min(int(own_width * scale) * int(own_height * scale), own_width * own_height)
    return kept, kept - height * width


def _unpadded(height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches of the dummy's aspect in a grid."""
    own_width, own_height = ONEVISION_SIDES
    if own_width / own_height > width / height:
        return height - (height - int(own_height * (width / own_width))) // 2 * 2, width
    return height, width - (width - int(own_width * (height / own_height))) // 2 * 2


def internvl_chat(around: Section, tower: Section, patch: int) -> Item:
    """Tiles and, with more than one, the whole image; a frame of a video is one tile."""
    size = around.integer("force_image_size", least=patch, most=MOST_SIDE)
    side = size // patch if size else patches_a_side(tower, patch, default=448, why=WHY)
    tiles = around.assumed("max_dynamic_patch", default=12, why=WHY, most=MOST_TILES)
    thumbnail = 1 if around.flag("use_thumbnail") is not False and tiles > 1 else 0
    text = around.inner("llm_config", "text_config")
    reads = text is not None and text.text("model_type") in READS_VIDEOS
    return _tiles(around, side, tiles + thumbnail, reads_videos=reads)


def internvl(around: Section, tower: Section, patch: int) -> Item:
    """The same in transformers' form, whose processors leave an image whole."""
    around.assume("vision_config: images of one tile, as the processor allows")
    return _tiles(around, patches_a_side(tower, patch, default=448, why=WHY), 1, reads_videos=True)


def _tiles(around: Section, side: int, tiles: int, *, reads_videos: bool) -> Item:
    ratio = _ratio(around, "downsample_ratio", side)
    tokens, positions = int(side * side * ratio * ratio), side * side + 1
    return Item(
        tokens=tiles * tokens,
        patches=tiles * positions,
        tile=positions,
        frame_tokens=tokens,
        frame_patches=positions,
        video_items=LONGEST if reads_videos else 0,
    )


def _ratio(place: Section, name: str, side: int) -> float:
    """How many patches of a side remain, a share; at least one of `side`."""
    ratio = place.number(name)
    if ratio is None:
        place.assume(f"{name} is not given: 0.5 for images")
        return 0.5
    if not 1 / side <= ratio <= 1:
        raise place.wrong((name,), "above 0 and at most 1", ratio)
    return ratio


def llama4(around: Section, tower: Section, patch: int) -> Item:
    """As many tiles as the processor allows, and the whole image."""
    side = patches_a_side(tower, patch, default=336, why=WHY)
    ratio = _ratio(tower, "pixel_shuffle_ratio", side)
    around.assume(f"vision_config: images of {LLAMA4_TILES} tiles, as the processor allows")
    tokens = LLAMA4_TILES * int(side * side * ratio * ratio)
    return Item(tokens=tokens, patches=LLAMA4_TILES * side * side, tile=side * side + 1)


def qwen(around: Section, tower: Section, patch: int) -> Item:
    """Qwen2-VL and Qwen2.5-VL, alone, in Omni, OpenCUA and EXAONE 4.5."""
    return _of_pixels(around, QWEN_PIXELS, patch, video_items=QWEN_VIDEO)


def qwen3(around: Section, tower: Section, patch: int) -> Item:
    """Qwen3-VL and Qwen3.5."""
    return _of_pixels(around, QWEN3_PIXELS, patch)


def qwen3_omni(around: Section, tower: Section, patch: int) -> Item:
    """Qwen3's encoder with the processor of Qwen2.5."""
    return _of_pixels(around, QWEN_PIXELS, patch, video_items=QWEN_VIDEO)


def _of_pixels(around: Section, pixels: int, patch: int, *, video_items: int = 0) -> Item:
    patches = pixels // (patch * patch)
    around.assume(f"vision_config: images of {pixels:,} pixels, as the processor allows")
    tokens = patches // (MERGE * MERGE)
    return Item(tokens=tokens, patches=patches, frames=FRAMES, video_items=video_items)


def glm4v(around: Section, tower: Section, patch: int) -> Item:
    """The largest square; of a video the positions that its processor or the length allows."""
    around.assume(
        f"vision_config: images of {GLM_PIXELS:,} and videos of {GLM_VIDEO_PIXELS:,} pixels,"
        " as the processor allows"
    )
    merged = MERGE * patch
    side = math.isqrt(GLM_PIXELS // FRAMES) // merged * MERGE
    return Item(
        tokens=side * side // (MERGE * MERGE),
        patches=side * side,
        frames=FRAMES,
        frame_tokens=1,
        frame_patches=MERGE * MERGE,
        video_items=_glm_video_tokens(side * patch, merged),
    )


def _glm_video_tokens(side: int, merged: int) -> int:
    """Tokens of the longest video: frames of the largest image's side, the more the smaller."""
    found = []
    for frames in range(FRAMES, GLM_FRAMES + 1):
        shrink = math.sqrt(frames * side * side / GLM_VIDEO_PIXELS)
        across = int(side / max(1.0, shrink)) // merged
        found.append((frames + frames % FRAMES) // FRAMES * across * across)
    return max(found)


def kimi_vl(around: Section, tower: Section, patch: int) -> Item:
    """vLLM's dummy image, shrunk to the processor's limit and filled up to whole tokens."""
    return _shrunk(around, KIMI_SIDE, KIMI_PATCHES, patch)


def kimi_k25(around: Section, tower: Section, patch: int) -> Item:
    """The same with larger limits; a chunk of a video has fewer tokens than an image."""
    return _shrunk(around, KIMI25_SIDE, KIMI25_PATCHES, patch)


def _shrunk(around: Section, side: int, limit: int, patch: int) -> Item:
    around.assume(f"vision_config: images of {limit:,} patches, as the processor allows")
    across = side // patch
    if across * across > limit:
        side = int(side * math.sqrt(limit / (across * across)))
    merged = -(-side // (MERGE * patch))
    return Item(tokens=merged * merged, patches=MERGE * MERGE * merged * merged)


def mllama(around: Section, tower: Section, patch: int) -> Item:
    """Tiles, each with a class token."""
    tiles = tower.assumed("max_num_tiles", default=4, why=WHY, most=MOST_TILES)
    side = patches_a_side(tower, patch, default=448, why=WHY)
    positions = side * side + 1
    filled = -(-positions // MLLAMA_PADDING) * MLLAMA_PADDING
    return Item(tokens=tiles * positions, patches=tiles * filled)


def idefics3(around: Section, tower: Section, patch: int) -> Item:
    """Sixteen tiles and the whole image, as the processors split the largest one."""
    side = patches_a_side(tower, patch, default=364, why=WHY)
    scale = around.assumed("scale_factor", default=2, why=WHY, most=side)
    around.assume(f"vision_config: images of {IDEFICS_TILES} tiles, as the processor allows")
    tokens = IDEFICS_TILES * (side * side // (scale * scale))
    return Item(tokens=tokens, patches=IDEFICS_TILES * side * side, tile=side * side)


def paligemma(around: Section, tower: Section, patch: int) -> Item:
    """One image of a fixed size, every patch a token."""
    side = patches_a_side(tower, patch, default=224, why=WHY)
    return Item(tokens=side * side, patches=side * side)


def minicpmv(around: Section, tower: Section, patch: int) -> Item:
    """Slices and the whole image, a fixed number of tokens each; a frame is one slice."""
    queries = around.assumed("query_num", default=64, why=WHY, most=MOST_TOKENS)
    side = patches_a_side(around, patch, default=448, why=WHY)
    slices = MINICPM_SLICES + 1
    return Item(
        tokens=slices * queries,
        patches=slices * side * side,
        tile=side * side,
        frame_tokens=queries,
        frame_patches=side * side,
        video_items=MINICPM_FRAMES,
    )


def deepseek_vl2(around: Section, tower: Section, patch: int) -> Item:
    """The grid of tiles that has the most tokens, and the whole image."""
    patches = patches_a_side(tower, patch, default=384, why=WHY)
    side = -(-patches // (around.integer("downsample_ratio", most=patches) or MERGE))
    grids = _grids(around, "candidate_resolutions", tower, default=384)
    tokens = max(rows * side * (columns * side + 1) for rows, columns in grids)
    tiles = max(rows * columns for rows, columns in grids) + 1
    tile = patches * patches
    return Item(tokens=side * (side + 1) + 1 + tokens, patches=tiles * tile, tile=tile)


def voxtral(around: Section, tower: Section, patch: int) -> Item:
    """Audio as long as the context, as its samples, in chunks of 30 seconds."""
    positions = tower.assumed("max_source_positions", default=1500, why=WHY, most=MOST_TOKENS)
    tokens = positions // VOXTRAL_MERGE
    return Item(
        tokens=tokens,
        patches=positions,
        numbers=VOXTRAL_SAMPLES,
        frame_tokens=tokens,
        frame_patches=positions,
        video_items=LONGEST,
    )


def qwen2_audio(around: Section, tower: Section, patch: int) -> Item:
    """Audio of 30 seconds."""
    positions = tower.assumed("max_source_positions", default=1500, why=WHY, most=MOST_TOKENS)
    bins = tower.assumed("num_mel_bins", default=128, why=WHY, most=MOST_SIDE)
    return Item(tokens=positions // MERGE, patches=positions, numbers=MERGE * bins)


def qwen3_asr(around: Section, tower: Section, patch: int) -> Item:
    """Audio of 30 seconds, in windows that a convolution takes together."""
    window = 2 * tower.assumed("n_window", default=ASR_WINDOW, why=WHY, most=ASR_FRAMES)
    around.assume(f"audio_config: audio of {ASR_FRAMES} frames")
    return Item(
        tokens=ASR_TOKENS,
        patches=ASR_FRAMES,
        tile=min(window, ASR_FRAMES),
        numbers=tower.assumed("num_mel_bins", default=128, why=WHY, most=MOST_SIDE),
        channels=tower.assumed("downsample_hidden_size", default=480, why=WHY),
    )


def _grids(around: Section, name: str, tower: Section, *, default: int) -> list[tuple[int, int]]:
    """Rows and columns of tiles of each size that an image may have.

    Raises:
        InvalidValue: there is none, or one is no size of whole tiles.
    """
    size = tower.integer("image_size") or default
    found = []
    for point in around.items(name) or [[size, size]]:
        sides = point if isinstance(point, list) and len(point) == 2 else []
        if not all(type(side) is int and size <= side <= MOST_SIDE for side in sides) or not sides:
            raise around.wrong((name,), f"pairs of sides from {size} to {MOST_SIDE}", point)
        found.append((sides[0] // size, sides[1] // size))
    return found


def _class_token(tower: Section) -> int:
    return 1 if "clip" in (tower.text("model_type") or "clip") else 0


def _selected(around: Section, side: int, tower: Section) -> int:
    """Tokens of one image: without the class token, where all are not asked for."""
    whole = around.text("vision_feature_select_strategy") == "full"
    return side * side + (_class_token(tower) if whole else 0)


RULES: dict[str, Rule] = {
    **class_items.RULES,
    "bee": llava_next,
    "exaone4_5": qwen,
    "deepseek_vl_v2": deepseek_vl2,
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "glm4v": glm4v,
    "glm4v_moe": glm4v,
    "glm_ocr": glm4v,
    "idefics3": idefics3,
    "internvl": internvl,
    "internvl_chat": internvl_chat,
    "interns1": internvl,
    "kimi_k25": kimi_k25,
    "kimi_vl": kimi_vl,
    "llama4": llama4,
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "minicpmo": minicpmv,
    "minicpmv": minicpmv,
    "lighton_ocr": mistral3,
    "mistral3": mistral3,
    "mllama": mllama,
    "opencua": qwen,
    "paligemma": paligemma,
    "qianfan_ocr": internvl_chat,
    "qwen2_vl": qwen,
    "qwen2_5_vl": qwen,
    "qwen2_5_omni": qwen,
    "qwen3_omni_moe": qwen3_omni,
    "qwen3_vl": qwen3,
    "qwen3_vl_moe": qwen3,
    "qwen3_5": qwen3,
    "qwen3_5_moe": qwen3,
    "r_vl": llava_next,
    "skywork_chat": internvl_chat,
    "smolvlm": idefics3,
}
"""Images of a type of model."""

AUDIO_RULES: dict[str, Rule] = {
    "qwen2_audio": qwen2_audio,
    "qwen3_asr": qwen3_asr,
    "voxtral": voxtral,
}
"""Audio of types that take nothing else."""

UNPATCHED = ("gemma3n", *AUDIO_RULES)
"""Types whose encoders take no patches of a stated side."""
