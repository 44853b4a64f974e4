"""FlashAttention 3 on Hopper: into how many parts it splits the keys of encoders' short sequences.

Each part has an fp32 output of its own until they are summed. By its `hopper/heuristics.h` and
`hopper/tile_size.h`, in elements of two bytes and without a mask; a batch of sequences counts as
one. On an H200 4 parts for 128 frames of 1025 positions in 16 heads of 64.
"""

from math import ceil

from kvexp.contract import Deployment, Encoder
from kvexp_vllm.peaks import is_hopper

TILES = ((64, 192, 192), (96, 192, 144), (128, 128, 176))
"""Up to a head's width: rows of queries and of keys in a block."""

FEW_BLOCKS = 4  # of keys are not split
NEARLY_FULL, NEARLY_BEST = 0.8, 0.85
HOPPER_SMS = 132


def parts(deployment: Deployment, encoder: Encoder, positions: int) -> int:
    """How many, for sequences of `positions`; 1 where nothing is split."""
    heads = encoder.num_attention_heads
    if heads is None or not is_hopper(deployment):
        return 1
    width = encoder.hidden_size // heads
    tile = next((tile for tile in TILES if width <= tile[0]), None)
    if tile is None:
        return 1
    heads = heads // deployment.tp if encoder.splits_heads(deployment.tp) else heads
    rows = heads * ceil(positions / tile[1])
    keys, sms = ceil(positions / tile[2]), deployment.gpu.num_sms or HOPPER_SMS
    if rows >= NEARLY_FULL * sms or keys <= FEW_BLOCKS:
        return 1
    waves = [rows * n / sms for n in range(1, min(sms, keys) + 1)]
    filled = [wave / ceil(wave) for wave in waves]
    return next(n for n, share in enumerate(filled, 1) if share >= NEARLY_BEST * max(filled))
