"""The largest image or audio of a type of model, in patches, and what its rules have in common."""

from collections.abc import Callable
from dataclasses import dataclass

from kvexp.hf.section import Section

MOST_TOKENS, MOST_TILES = 1 << 20, 1 << 10  # of one image: more is damage
LONGEST = 1 << 20  # frames of a video that ends with the model's length alone
MERGE, FRAMES, CHANNELS = 2, 2, 3
WHY = "of its encoder's class, for images"


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """The largest image, and a frame of a video where that is not the same.

    `frames`: images that share a patch. `video_items`: a video is as much as so many frames.
    `tile`: positions of each tile, where an image has several, `whole`: those of the whole image
    where it passes before them. `numbers`: of a patch, where it is no square of pixels. `widths`:
    of a convolutional encoder's widest layer, before and in its bottleneck, or of a projection and
    no MLP. `projected`: numbers that its projector makes of a token at once, where that is much.
    `channels`: of the convolutions that audio passes first.
    """

    tokens: int
    patches: int
    frames: int = 1
    frame_tokens: int = 0
    frame_patches: int = 0
    video_items: int = 0
    tile: int = 0
    whole: int = 0
    numbers: int | None = None
    widths: tuple[int, int] | None = None
    projected: int = 0
    channels: int = 0


Rule = Callable[[Section, Section, int], Item]
"""Of the file's top level, the encoder's section and its patches' side."""
