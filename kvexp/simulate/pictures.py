"""Memory over a forward as a picture: what is allocated, by the part of the model that did it."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from kvexp.simulate.forecast import Forecast
from kvexp.simulate.trace import Trace
from kvexp.units import MIB

_SHOWN = 8  # parts with a colour of their own
_POINTS = 2000


def draw_timeline(trace: Trace, forecast: Forecast, path: Path) -> None:
    """Write the picture; its format follows the file's suffix.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    labels = _labels(trace, forecast)
    curves = _curves(trace, labels)
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = sorted(curves, key=lambda name: -sorted(curves[name])[len(curves[name]) // 4])
    places = range(len(next(iter(curves.values()), [])))
    heights = [curves[name] for name in names]
    axes.stackplot(places, heights, labels=names, step="mid", linewidth=0, antialiased=False)
    peak = forecast.first.activation_bytes / MIB
    axes.axhline(peak, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(f"peak with workspaces {peak:,.0f} MiB", (0, peak), va="bottom", fontsize=8)
    axes.set_ylim(0, max(peak * 1.08, axes.get_ylim()[1]))
    axes.set_xlabel("allocations and frees")
    axes.set_ylabel("MiB over what was allocated before")
    axes.legend(loc="upper center", ncols=3, fontsize=7, bbox_to_anchor=(0.5, 1.16))
    figure.savefig(path, dpi=130)


def part_of(module: str) -> str:
    """A module's path without the numbers of its layers."""
    return ".".join("*" if step.isdigit() else step for step in module.split(".")) or "the model"


def _labels(trace: Trace, forecast: Forecast) -> list[str]:
    """For each cause the part of the model that it counts as: its own where it is at the peak."""
    totals: dict[str, int] = defaultdict(int)
    for block in forecast.blocks:
        totals[part_of(block.module)] += block.size_bytes
    shown = set(sorted(totals, key=lambda part: -totals[part])[:_SHOWN])
    parts = [part_of(cause.module) for cause in trace.cause_table]
    return [part if part in shown else "others" for part in parts]


def _curves(trace: Trace, labels: list[str]) -> dict[str, list[float]]:
    """MiB alive of each part; of every few events the one with the most alive."""
    alive: dict[str, int] = dict.fromkeys(labels, 0)
    sizes = [event for event in trace.events if event >= 0]
    points: list[dict[str, int]] = []
    totals: list[int] = []
    count = total = 0
    for event in trace.events:
        number = count if event >= 0 else -event - 1
        count += event >= 0
        size = sizes[number] if event >= 0 else -sizes[number]
        alive[labels[trace.causes[number]]] += size
        total += size
        points.append(dict(alive))
        totals.append(total)
    step = max(1, len(points) // _POINTS)
    edges = [*range(0, len(points), step), len(points)]
    kept = [max(range(low, high), key=totals.__getitem__) for low, high in pairwise(edges)]
    return {label: [points[place][label] / MIB for place in kept] for label in alive}
