"""What a measured point's readings say, in lines for a person."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvexp.results import RankResult, Result
from kvexp.units import gib

SHOWN = 6
"""Places of the peak that are shown; all are in result.json."""


def lines(result: Result) -> Iterator[str]:
    """The accounts of each rank beside the engine's rules, its graphs, and where the peak is."""
    readings = result.readings
    ranks = readings.get("ranks")
    for number, each in enumerate(ranks if ranks is not None else [readings]):
        rank = f", rank {number}" if ranks is not None else ""
        if accounts := each.get("accounting"):
            yield f"accounts         {_accounts(accounts)}{rank}"
        if (graphs := each.get("graphs_bytes")) is not None:
            yield f"graphs           {gib(graphs)} beyond the cache{rank}"
        if at_peak := each.get("at_peak"):
            yield from _peak(at_peak)
    for rank_result, rules in zip(result.ranks, readings.get("rules_by_rank", ()), strict=False):
        rank = f", rank {rank_result.rank}" if len(result.ranks) > 1 else ""
        yield f"to the rules     {_ratios(rank_result, rules)}{rank}"


def _ratios(rank: RankResult, rules: Mapping[str, int | None]) -> str:
    """Each measured term over what the engine's rule says; the engine runs code of its own."""
    sizes = {part.name: part.size_bytes for part in rank.profile.parts}
    found = [
        f"{name} {sizes[name] / ruled:.3f}" if ruled else f"{name} without a rule"
        for name, ruled in rules.items()
    ]
    return "measured / rule: " + ", ".join(found)


def _accounts(accounts: Mapping[str, Any]) -> str:
    verdict = "closed" if accounts["closes"] else "NOT closed"
    return (
        f"{verdict} at {accounts['stage']}: {accounts['residual_bytes']:,} B of the driver's"
        f" {gib(accounts['driver_used_bytes'])} unexplained"
        f" (tolerance {accounts['tolerance_bytes']:,} B)"
    )


def _peak(at_peak: Mapping[str, Any]) -> Iterator[str]:
    yield f"at the peak      {gib(at_peak['growth_bytes'])} over the weights, of which"
    for place in at_peak["places"][:SHOWN]:
        stays = ", stays" if place["stays"] else ""
        yield (
            f"  {gib(place['size_bytes'])} in {place['module']} ({place['line']},"
            f" {place['blocks']} blocks{stays})"
        )
