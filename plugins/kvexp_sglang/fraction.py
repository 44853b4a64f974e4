"""SGLang's automatic mem_fraction_static (0.5.23 `arg_groups/memory_hook.py`), in MiB."""

import math
import re
from dataclasses import dataclass

from kvexp.contract import MIB, InvalidValue, Knobs

UNIT = 1024
CONSTANT = 512  # attention backends and the like
PER_CHUNK_TOKEN = 1.5
PER_RANK = UNIT / 8
PER_DECODE_GRAPH = 2
PER_PREFILL_GRAPH = 8
LATENT_PREFILL_GRAPHS = 1536
LARGE_CARD, LARGE_CARD_RESERVE = 60 * UNIT, 10 * UNIT

FORMULA_SINCE = (0, 5)
PREFILL_GRAPHS_SINCE = (0, 5, 10)
BY_RANKS = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))
"""Fractions of releases before 0.5 by tp; those of 1 and 4 agree with public logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRow:
    """Defaults of cards below `below` MiB: the chunk of a prefill, the largest decode graph."""

    below: float
    chunk: int
    graph_batch: int
    graph_batch_parallel: int


CARDS = (
    CardRow(below=20 * UNIT, chunk=2048, graph_batch=8, graph_batch_parallel=8),
    CardRow(below=35 * UNIT, chunk=4096, graph_batch=48, graph_batch_parallel=160),
    CardRow(below=60 * UNIT, chunk=4096, graph_batch=32, graph_batch_parallel=160),
    CardRow(below=90 * UNIT, chunk=8192, graph_batch=256, graph_batch_parallel=512),
    CardRow(below=160 * UNIT, chunk=8192, graph_batch=256, graph_batch_parallel=512),
    CardRow(below=float("inf"), chunk=16384, graph_batch=512, graph_batch_parallel=512),
)


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a version.

    Raises:
        InvalidValue: it is no version.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise InvalidValue(f"engine.version must be an SGLang version like 0.5.23, got {version!r}")
    return tuple(int(number or 0) for number in match.groups())


def card_row(total_bytes: int) -> CardRow:
    """The row of a card."""
    return next(row for row in CARDS if total_bytes / MIB < row.below)


def automatic(knobs: Knobs, version: str, chunk: int, draft_mib: int) -> float:
    """The fraction where none is given: what is not reserved, rounded to three digits.

    `draft_mib` are held back for a draft beside all else.
    """
    release = release_of(version)
    if release < FORMULA_SINCE:
        return next(fraction for ranks, fraction in BY_RANKS if knobs.tp >= ranks)
    capacity = int(knobs.gpu.total_bytes) / MIB
    reserved = CONSTANT + PER_CHUNK_TOKEN * max(chunk, 2048) + PER_RANK * knobs.tp * knobs.pp
    if not knobs.enforce_eager:
        reserved += PER_DECODE_GRAPH * _graph_batch(knobs)
        if release >= PREFILL_GRAPHS_SINCE:
            latent = knobs.model.mla is not None
            reserved += (
                LATENT_PREFILL_GRAPHS if latent else PER_PREFILL_GRAPH * num_prefill_graphs(chunk)
            )
    if capacity > LARGE_CARD:
        reserved = max(reserved, LARGE_CARD_RESERVE)
    reserved += draft_mib
    fraction = round((capacity - reserved) / capacity, 3)
    if fraction <= 0:
        raise InvalidValue(
            f"util must be given: by max_num_batched_tokens ({chunk}) SGLang reserves"
            f" {reserved:.0f} MiB, more than {capacity:.0f} MiB"
        )
    return fraction


def interval(free_bytes: int, loaded_bytes: int, forward_bytes: int) -> str:
    """The fractions between which what is loaded, a token and a forward fit."""
    free = max(free_bytes, 1)
    low = math.ceil(loaded_bytes / free * 1000) / 1000
    high = math.floor((1 - forward_bytes / free) * 1000) / 1000
    if low < high:
        return f"mem_fraction_static fits between {low:g} and {high:g}"
    return "no mem_fraction_static fits: weights and a forward exceed what is free"


def num_prefill_graphs(longest: int) -> int:
    """Sizes at which prefill graphs are captured, up to `longest` tokens."""
    last = 0
    count = 0
    for end, step in ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (longest, 512)):
        top = min(end, longest)
        count += max(0, top - last) // step
        last = max(last, end)
    return count


def _graph_batch(knobs: Knobs) -> int:
    row = card_row(int(knobs.gpu.total_bytes))
    batch = row.graph_batch if knobs.tp < 4 else row.graph_batch_parallel
    return batch if knobs.max_num_seqs is None else min(batch, knobs.max_num_seqs)
