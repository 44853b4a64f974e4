"""Predicted against measured as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvexp.units import GIB
from kvexp.validate.score import Comparison, Scored

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TERMS = {
    "available_kv_bytes": "KV cache",
    "weights_bytes": "weights",
    "activation_bytes": "activation",
    "non_torch_bytes": "non-torch",
    "graphs_bytes": "graphs",
}
_SHOWN_ERROR = 0.1


def draw_scatter(scored: Sequence[Scored], path: Path) -> None:
    """Write the picture; its format follows the file's suffix.

    On the left the capacity in tokens (blocks where no tokens are logged) with its bounds, on the
    right the terms. The band is 10 % to both sides.

    Raises:
        OSError: the file cannot be written.
        ValueError: there is no such format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    capacity, terms = figure.subplots(1, 2)
    for label, wanted in (("inputs stated", True), ("some inputs assumed", False)):
        known = [each for each in scored if each.is_stated is wanted]
        _draw(capacity, label, [each.capacity_compared for each in known], 1)
    for name, label in _TERMS.items():
        _draw(terms, label, [each.compared(name) for each in scored], GIB)
    _finish(capacity, "tokens (blocks where no tokens are logged)")
    _finish(terms, "GiB")
    figure.savefig(path, dpi=130)


def _draw(axes: "Axes", label: str, found: Sequence[Comparison | None], unit: int) -> None:
    """Points with bars from low to high; what is not above zero has no place on the scale."""
    known = [each for each in found if each is not None]
    known = [each for each in known if each.logged.value > 0 and each.predicted.low > 0]
    if not known:
        return
    best = [each.predicted.best / unit for each in known]
    axes.errorbar(
        [each.logged.value / unit for each in known],
        best,
        yerr=[
            [(each.predicted.best - each.predicted.low) / unit for each in known],
            [(each.predicted.high - each.predicted.best) / unit for each in known],
        ],
        fmt="o",
        markersize=3.5,
        elinewidth=0.7,
        alpha=0.7,
        label=f"{label} ({len(known)})",
    )


def _finish(axes: "Axes", unit: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    line = [low, high]
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(
        line,
        [each * (1 - _SHOWN_ERROR) for each in line],
        [each * (1 + _SHOWN_ERROR) for each in line],
        color="black",
        alpha=0.08,
    )
    axes.set_xlim(low, high)
    axes.set_xlabel(f"logged, {unit}")
    axes.set_ylabel(f"predicted, {unit}")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
