"""How layers are cut over pipeline stages, and how many tokens are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def pp_layer_ranges(
    num_layers: int, pp: int, partition: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return the [first, last) layers of each pipeline stage, those of `partition` if given.

    Layers that are left over go one each to the stages before the last, the nearest first; the
    last stage never takes one, and the first only when every other does
    (vLLM `distributed/utils.py: get_pp_indices`).

    Raises:
        ValueError: If there are fewer layers than stages, or no stage, or a partition of another
            number of stages or layers.
    """
    if partition is not None:
        if len(partition) != pp or sum(partition) != num_layers or min(partition, default=0) < 0:
            raise ValueError(f"{list(partition)} does not cut {num_layers} layers into {pp} stages")
        return list(pairwise(accumulate(partition, initial=0)))
    if pp < 1 or num_layers < pp:
        raise ValueError(f"{num_layers} layers cannot be cut over {pp} pipeline stages")
    share, left = divmod(num_layers, pp)
    sizes = [share] * pp
    for back in range(left):
        sizes[pp - 2 - back] += 1
    ranges = []
    first = 0
    for size in sizes:
        ranges.append((first, first + size))
        first += size
    return ranges


def max_in_flight_tokens(
    max_num_batched_tokens: int,
    pp: int = 1,
    async_scheduling: bool = True,
    v2_model_runner: bool = False,
) -> int:
    """Return the most tokens that are scheduled and not yet settled.

    With asynchronous scheduling the V2 runner keeps one batch more than there are stages, the
    V1 runner two batches on one stage; otherwise one batch for each stage is in flight
    (vLLM `config/vllm.py: max_concurrent_batches`).
    """
    if async_scheduling and v2_model_runner:
        batches = pp + 1
    elif async_scheduling and pp <= 1:
        batches = 2
    else:
        batches = pp
    return batches * max_num_batched_tokens
