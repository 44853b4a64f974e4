"""What SGLang refuses to start with, and the advice that helps."""

import math

from kvexp.contract import Deployment, Refusal, gib
from kvexp_sglang.pools import Cell


def nothing_left(deployment: Deployment, rank: int, rest: int) -> Refusal:
    """The check before the pool; the fraction it names leaves exactly nothing."""
    suggested = deployment.util - rest / deployment.free_bytes if deployment.free_bytes else 1.0
    suggested = math.ceil(suggested * 1000) / 1000
    hint = (
        f"mem_fraction_static must be above {suggested:g}"
        if suggested < 1
        else "no mem_fraction_static is enough: the weights do not fit"
    )
    return Refusal(
        kind="no_memory",
        message=f"{gib(rest)} are left for the pool at mem_fraction_static"
        f" {deployment.util:g}; {hint}",
        rank=rank,
        needed_bytes=0,
        available_bytes=rest,
    )


def too_few_slots(deployment: Deployment, rank: int, slots: int, needed: int, slot: int) -> Refusal:
    """States of not even one request; a slot takes `slot` bytes, a request `needed` slots."""
    return Refusal(
        kind="no_memory",
        message=f"{slots:,} slots of states are too few: one request takes {needed} of"
        f" {slot:,} bytes; increase mem_fraction_static ({deployment.util:g}),"
        " mamba_full_memory_ratio or max_mamba_cache_size",
        rank=rank,
        needed_bytes=needed * slot,
        available_bytes=slots * slot,
    )


def no_tokens(deployment: Deployment, rank: int, left: int, cell: Cell) -> Refusal:
    """Not one page of tokens."""
    page_bytes = (cell.full_bytes + cell.swa_bytes) * deployment.block_size
    return Refusal(
        kind="no_blocks",
        message=f"{gib(left)} hold no page of {gib(page_bytes)}; increase mem_fraction_static"
        f" ({deployment.util:g})",
        rank=rank,
        needed_bytes=page_bytes,
        available_bytes=left,
    )


def window_too_large(
    deployment: Deployment, rank: int, left: int, tokens: int, needed: int
) -> Refusal:
    """The window's pool must exceed window and page."""
    return Refusal(
        kind="window_too_large",
        message=f"the window's pool holds {tokens:,} tokens, window and page need {needed:,};"
        f" increase swa_full_tokens_ratio or mem_fraction_static ({deployment.util:g})",
        rank=rank,
        needed_bytes=left * needed // max(tokens, 1),
        available_bytes=left,
    )
