"""Results for people: a table, one point explained in full, a picture of the memory, a CSV file.

Sizes are shown in GiB with two digits; where a figure must be exact the bytes stand beside it.
"""

import csv
import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvexp import compare, measured, side_by_side
from kvexp.results import COUNTS, UNDER_LOAD, Budget, Holding, KvGroup, Part, Result
from kvexp.units import GIB, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

MAX_COLUMNS = 60
"""Most points that one picture shows."""

CSV_COLUMNS = (
    "point",
    "status",
    "stage",
    "reason",
    *COUNTS,
    "weights_bytes",
    "activation_bytes",
    "non_torch_bytes",
    "cudagraph_bytes",
    "kv_cache_bytes",
    "available_bytes",
    "requested_bytes",
    "total_bytes",
    "allocated_bytes",
    "duration_s",
)

_SHOWN_SIZES = (
    "weights_bytes",
    "activation_bytes",
    "non_torch_bytes",
    "cudagraph_bytes",
    "kv_cache_bytes",
)
_Rows = Sequence[tuple[str, Result]]
_PLAIN_WIDTH = 100
_MIN_NAME_CHARS = 16  # longer names are folded where the table would be wider than the terminal
_LEVEL_COUNTS = 8  # more columns than these have their counts written upright
_UNDERLINED_HEAD = "    \n    \n -  \n    \n    \n    \n    \n    \n"
_ABSENT = "-"
_COLORS = {
    "used_by_others": "#7f7f7f",
    "non_torch": "#c7a76c",
    "weights": "#4c72b0",
    "activation": "#dd8452",
    "cudagraph": "#8c6bb1",
    "used_before_load": "#9d9d9d",
    "recurrent_states": "#937860",
    "kv_share": "#cfcfcf",
    "engine_weights_delta": "#8fb1de",
    "engine_delta": "#f0bd95",
    "kv_cache": "#55a868",
    "unused": "#e5e5e5",
}
_LABELS = {
    "used_by_others": "used by others",
    "non_torch": "non-torch",
    "weights": "weights",
    "activation": "activation",
    "cudagraph": "CUDA graphs",
    "used_before_load": "used before load",
    "recurrent_states": "recurrent states",
    "kv_share": "share of K and V, empty",
    "engine_weights_delta": "weights, the engine's own",
    "engine_delta": "activation, the engine's own",
    "kv_cache": "KV cache",
    "unused": "unused",
    "shortfall": "missing",
}
_OTHER_COLORS = ("#64b5cd", "#da8bc3", "#937860", "#ccb974")


def table(rows: _Rows) -> "Table":
    """One row a point, the reason below those that are not ok."""
    from rich.box import Box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(
        box=Box(_UNDERLINED_HEAD, ascii=True),
        padding=(0, 0),
        pad_edge=False,
        show_edge=False,
    )
    longest = max((len(name) for name, _ in rows), default=0)
    made.add_column("point", overflow="fold", min_width=min(longest, _MIN_NAME_CHARS))
    made.add_column("status", no_wrap=True)
    for name in _FIGURES:
        made.add_column(Text(name, justify="right"), justify="right", no_wrap=True)
    for name, result in rows:
        made.add_row(Text(name), str(result.status), *_figures(result))
    return made


def print_table(rows: _Rows, file: TextIO | None = None) -> None:
    """Print the table and, below it, the reason of every point that is not ok.

    On a terminal the table has its width; elsewhere the text is plain and the same everywhere.
    Figures are never cut.
    """
    console = _console(file)
    made = table(rows)
    unbounded = console.options.update(max_width=10_000)
    console.width = max(console.width, console.measure(made, options=unbounded).minimum)
    num_ok = sum(result.ok for _, result in rows)
    _line(console, f"{num_ok} of {len(rows)} points ok; sizes in GiB, of the tightest rank")
    console.print(made)
    for name, result in rows:
        if not result.ok:
            _line(console, f"{name}: {result.status} at {result.stage}: {result.reason}")
    for line in _note_lines(rows):
        _line(console, line)
    for name, result in rows:
        if result.compared:
            _line(console, "")
            _line(console, name)
            for line in side_by_side.table_lines(result.compared):
                _line(console, line)
    if compare.compares_engines(rows):
        _line(console, "")
        for line in compare.comparison_lines(rows):
            _line(console, line)


def _note_lines(rows: _Rows) -> Iterator[str]:
    """What is said of some points and not of others: why they differ."""
    told: dict[str, list[str]] = {}
    lengths = {result.effective.get("max_model_len") for _, result in rows} - {None}
    for name, result in rows:
        length = result.effective.get("max_model_len")
        if length is not None and len(lengths) > 1:
            told.setdefault(f"concurrency of requests of {length:,} tokens", []).append(name)
        layout = f"layout: {result.layout}" if result.layout is not None else None
        for note in (*((layout,) if layout else ()), *result.notes):
            told.setdefault(note, []).append(name)
    for note, names in told.items():
        if len(names) < len(rows):
            shown = "; ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            yield f"{shown}: {note}"


def print_point(result: Result, file: TextIO | None = None) -> None:
    """Print all that is known about a point, the engine's own lines last."""
    console = _console(file)
    for line in point_lines(result):
        _line(console, line)


def point_lines(result: Result) -> Iterator[str]:
    """The lines of `print_point`."""
    if about := _about(result):
        yield f"{about}: {result.status}"
    if not result.ok:
        yield f"{result.status} at {result.stage}: {result.reason}"
    if result.num_blocks is not None:
        yield from _figure_lines(result)
    if result.budget is not None:
        yield ""
        yield from _budget_lines(result.budget)
    if result.holding is not None:
        yield ""
        yield from _holding_lines(result.holding)
    if result.refusal is not None:
        yield ""
        yield from _refusal_lines(result)
    if result.compared:
        yield ""
        yield from side_by_side.table_lines(result.compared)
    flags = result.effective.get("flags")
    for title, lines in (
        ("notes", result.notes),
        ("to paste", (flags,) if flags and result.ok else ()),
        ("the engine prints", result.log_lines),
    ):
        if lines:
            yield ""
            yield f"{title}:"
            yield from lines


def csv_rows(rows: _Rows) -> list[dict[str, Any]]:
    """One flat record a point, in the order of `CSV_COLUMNS`; bytes whole, unknown None."""
    return [_csv_row(name, result) for name, result in rows]


def csv_text(rows: _Rows) -> str:
    """The content of table.csv: a header and one line a point; unknown is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(csv_rows(rows))
    return stream.getvalue()


def memory_picture(rows: _Rows, path: Path) -> Path:
    """Draw one stacked column a point, how the requested share of the card is used, as PNG.

    Points without a budget keep their place with their status. At most `MAX_COLUMNS` are drawn;
    the title says so. Returns `path`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    shown = rows[:MAX_COLUMNS]
    column = 0.75 if len(shown) <= _LEVEL_COUNTS else 0.32
    size = (max(5.5, 4.5 + column * len(shown)), 4.8 if len(shown) <= 12 else 5.6)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, bars in _stack(shown).items():
        _draw_part(axes, name, bars)
    _draw_limits(axes, [result.budget for _, result in shown])
    _label(axes, shown, len(rows))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


_FIGURES = (
    "blocks",
    "block\nsize",
    "KV\ntokens",
    "concur-\nrency",
    "weights",
    "activ.",
    "non-\ntorch",
    "graphs",
    "KV\ncache",
)


def _figures(result: Result) -> list[str]:
    holders = (result.profile, result.budget)
    sizes = [_first(holders, name) for name in _SHOWN_SIZES]
    return [
        _blocks(result),
        _count(result.block_size),
        _count(result.kv_tokens),
        _concurrency(result),
        *(_ABSENT if size is None else f"{size / GIB:,.2f}" for size in sizes),
    ]


def _count(value: int | None) -> str:
    return _ABSENT if value is None else f"{value:,}"


def _concurrency(result: Result) -> str:
    return _ABSENT if result.max_concurrency is None else f"{result.max_concurrency:.2f}x"


def _blocks(result: Result) -> str:
    """The count, with what it may be off by: the card's printed total, the terms' intervals."""
    error = _block_error(result)
    return f"{_count(result.num_blocks)}{f' +-{error:,}' if error else ''}"


def _block_error(result: Result) -> int:
    blocks, low, high = result.num_blocks, result.num_blocks_low, result.num_blocks_high
    if blocks is None or low is None or high is None:
        return 0
    return max(high - blocks, blocks - low)


def _figure_lines(result: Result) -> Iterator[str]:
    yield f"blocks           {_blocks(result)}"
    if result.block_size is not None:
        each = f" of {result.block_bytes:,} bytes" if result.block_bytes is not None else ""
        yield f"block size       {result.block_size:,} tokens{each}"
    if result.kv_tokens is not None:
        yield f"KV cache size    {result.kv_tokens:,} tokens"
    if result.max_concurrency is not None:
        length = result.effective.get("max_model_len")
        each = f" at {length:,} tokens a request" if isinstance(length, int) else ""
        yield f"max concurrency  {_concurrency(result)}{each}"
    if result.num_replicas is not None:
        yield (
            f"replicas         {result.num_replicas}, together {result.kv_tokens_total:,} tokens,"
            f" {result.max_concurrency_total:.2f}x"
        )
    if result.verified is not None:
        yield f"verified         {_verified(result)}"
    yield from measured.lines(result)
    if result.layout is not None:
        yield f"layout           {result.layout}"
    if len(result.groups) > 1:
        for kind, groups in groupby(result.groups, key=lambda group: group.kind):
            yield from _group_lines(kind, list(groups))
    if len(result.ranks) > 1:
        counts = sorted({rank.num_blocks for rank in result.ranks})
        span = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        yield f"ranks            {len(result.ranks)}, {span} blocks by their own memory"


def _about(result: Result) -> str:
    """What the point is: model, card, engine and what was decided; empty where that is unknown."""
    decided = result.effective
    if not {"model", "gpu", "engine", "tp", "util"} <= decided.keys():
        return ""
    ranks = "".join(
        f", {key}={decided[key]}" for key in ("tp", "pp", "dp") if decided.get(key, 1) > 1
    )
    quantised = f", {decided['quantization']} weights" if decided["quantization"] else ""
    return (
        f"{decided['model']} on {decided['gpu']}, {decided['engine']} {decided['engine_version']}"
        f"{ranks}, {decided['dtype']}{quantised}, {decided['kv_dtype']} KV cache,{_extras(decided)}"
        f" util {decided['util']:g}"
    )


def _extras(decided: Mapping[str, Any]) -> str:
    """Adapters and drafts, where there are any."""
    found = ""
    if "lora_max_loras" in decided:
        found += f" {decided['lora_max_loras']} adapters of rank {decided['lora_max_rank']},"
    if "speculative_method" in decided:
        tokens = decided["speculative_num_tokens"]
        found += f" {tokens} tokens drafted by {decided['speculative_method']},"
    return found


def _verified(result: Result) -> str:
    if result.verified:
        return "yes: the cache was allocated and the largest forward ran on top of it"
    if result.largest_util is None:
        return "no: no share that was tried holds"
    return f"no: the largest share that was tried and holds is util={result.largest_util:g}"


def _base(budget: Budget) -> str:
    if budget.base == "total":
        return "a share of the card's total memory"
    if budget.base.startswith(("free", "left")):
        share = budget.requested_bytes / budget.total_bytes
        return f"a share of what is {budget.base}: {share:.4f} of the card"
    return f"by {budget.base}"


def _group_lines(kind: str, groups: Sequence[KvGroup]) -> Iterator[str]:
    """Groups of one kind that are alike stand in one line."""
    shapes = Counter(
        (g.num_layers, g.block_size, g.page_size_bytes, g.blocks_per_request) for g in groups
    )
    for (layers, block_size, page, blocks), number in shapes.items():
        yield (
            f"  {number} x {kind}: {layers} layers, blocks of {block_size:,} tokens,"
            f" {page:,} bytes a page, {blocks:,} blocks a request"
        )


def _budget_lines(budget: Budget) -> Iterator[str]:
    lines = [
        (f"{'  of it ' if inner else ''}{part.name}", part)
        for outer in budget.parts
        for inner, part in [(False, outer), *((True, each) for each in outer.includes)]
    ]
    sizes = [*((name, part.size_bytes) for name, part in lines)]
    sizes.append(("= requested", budget.requested_bytes))
    widest = max(len(name) for name, _ in sizes)
    whys = [*(f"  {part.provenance}: {part.reason}{_interval(part)}" for _, part in lines), ""]
    yield (
        f"budget: {gib(budget.requested_bytes)} requested"
        f" ({_base(budget)}; total {gib(budget.total_bytes)},"
        f" free at start {gib(budget.free_bytes)})"
    )
    for (name, size), why in zip(sizes, whys, strict=True):
        yield f"  {name:<{widest}} {_both(size)}{why}"


def _fitting(holding: Holding) -> str:
    """Whether full load does not fit, or not with what passes through an encoder."""
    if not holding.fits:
        return " and does not fit"
    held = holding.held_under_load_bytes + holding.used_by_others_bytes
    has_items = any(part.name == UNDER_LOAD for part in holding.parts)
    alone = has_items and held > holding.total_bytes
    return f" and fits only without {UNDER_LOAD}" if alone else ""


def _holding_lines(holding: Holding) -> Iterator[str]:
    """What stands on the card beside the budget, and what that makes of the card."""
    stands = "above" if holding.above_request_bytes >= 0 else "below"
    yield (
        f"the card: {gib(holding.held_at_start_bytes)} in use when ready,"
        f" {gib(holding.held_under_load_bytes)} under full load of {gib(holding.total_bytes)};"
        f" full load stands {gib(abs(holding.above_request_bytes))} {stands} the request"
        f"{_fitting(holding)}"
    )
    shown = [part for part in holding.parts if part.size_bytes or part.above_bytes]
    widest = max((len(part.name) for part in shown), default=0)
    for part in shown:
        why = f"{part.provenance}: {part.reason}{_interval(part)}"
        yield f"  {part.name:<{widest}} {_both(part.size_bytes)}  {why}"
    if holding.largest_safe_util:
        yield f"  largest util whose full load fits: {holding.largest_safe_util:.4f}"
    if holding.util_keeping_cache is not None:
        yield (
            f"  a version that subtracts no graphs gives this cache at util"
            f" {holding.util_without_graphs:.4f}; the cache it gives at this util takes"
            f" {holding.util_keeping_cache:.4f} here"
        )


def _interval(part: Part) -> str:
    """Where a prediction may lie; nothing where both ends read the same."""
    low, high = gib(part.size_bytes - part.below_bytes), gib(part.size_bytes + part.above_bytes)
    return "" if low == high else f" [{low.removesuffix(' GiB')} to {high}]"


def _both(size_bytes: int) -> str:
    """A size for a column of sizes: rounded to read, exact to add up."""
    return f"{gib(size_bytes):>14} {size_bytes:>17,} B"


def _refusal_lines(result: Result) -> Iterator[str]:
    refusal = result.refusal
    if refusal is None:
        return
    again = refusal.message == result.reason
    said = "" if again else f": {refusal.message}"
    yield f"refused ({refusal.kind}, rank {refusal.rank}){said}"
    for name, size in (
        ("needed", refusal.needed_bytes),
        ("available", refusal.available_bytes),
        ("gap", refusal.gap_bytes),
    ):
        yield f"  {name:<11} {_both(size)}"
    if refusal.estimated_max_model_len is not None:
        yield f"  longest request that fits, estimated: {refusal.estimated_max_model_len:,} tokens"


def _csv_row(name: str, result: Result) -> dict[str, Any]:
    holders = (result, result.profile, result.budget)
    return {
        column: name if column == "point" else _first(holders, column) for column in CSV_COLUMNS
    }


def _first(holders: Sequence[object], name: str) -> Any:
    """The attribute of the first holder that has it."""
    return next((getattr(each, name) for each in holders if hasattr(each, name)), None)


def _console(file: TextIO | None) -> "Console":
    from rich.console import Console  # noqa: PLC0415

    stream = file or sys.stdout
    terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if terminal else _PLAIN_WIDTH,
        no_color=None if terminal else True,
        force_terminal=terminal,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _line(console: "Console", line: str) -> None:
    console.print(line, soft_wrap=True)


_Bars = list[tuple[int, float, float]]


def _stack(rows: _Rows) -> dict[str, _Bars]:
    """For every part, in drawing order, its bars: place, bottom and height in GiB."""
    budgets = [result.budget for _, result in rows]
    names = [*_COLORS, *(part.name for budget in budgets if budget for part in budget.parts)]
    drawn = [name for name in dict.fromkeys(names) if name != "shortfall"]
    bars: dict[str, _Bars] = {name: [] for name in drawn}
    for place, budget in enumerate(budgets):
        sizes = [_size(budget, name) for name in drawn]
        for name, size, top in zip(drawn, sizes, accumulate(sizes), strict=True):
            if size > 0:
                bars[name].append((place, (top - size) / GIB, size / GIB))
    missing = [
        (place, result.budget.requested_bytes / GIB, size / GIB)
        for place, (_, result) in enumerate(rows)
        if result.budget and (size := _missing(result))
    ]
    return {name: found for name, found in {**bars, "shortfall": missing}.items() if found}


def _size(budget: Budget | None, name: str) -> int:
    parts: tuple[Part, ...] = budget.parts if budget else ()
    return sum(part.size_bytes for part in parts if part.name == name and part.size_bytes > 0)


def _missing(result: Result) -> int:
    """Bytes above the request: the budget's shortfall, or what a request or a warm-up lacks."""
    parts = result.budget.parts if result.budget else ()
    shortfall = -sum(part.size_bytes for part in parts if part.name == "shortfall")
    gap = result.refusal.gap_bytes if result.refusal else 0
    return shortfall or max(0, gap, _mistaken(result))


def _mistaken(result: Result) -> int:
    """Bytes that a wrong warm-up reserves too little (negative: too much)."""
    return (result.profile.missing_activation_bytes or 0) if result.profile else 0


def _draw_part(axes: "Axes", name: str, bars: _Bars) -> None:
    places, bottoms, heights = zip(*bars, strict=True)
    other = _OTHER_COLORS[sum(map(ord, name)) % len(_OTHER_COLORS)]
    drawn = axes.bar(
        places,
        heights,
        width=0.8,
        bottom=bottoms,
        label=_LABELS.get(name, name),
        color=_COLORS.get(name, other),
    )
    if name == "shortfall":
        for bar in drawn:
            bar.set(facecolor="none", edgecolor="#c00000", hatch="////", linewidth=0.8)


def _draw_limits(axes: "Axes", budgets: Sequence[Budget | None]) -> None:
    known = [(place, budget) for place, budget in enumerate(budgets) if budget]
    for label, name, color, dashes in (
        ("requested", "requested_bytes", "black", "solid"),
        ("card's total", "total_bytes", "#c00000", "dashed"),
    ):
        if known:
            heights = [getattr(budget, name) / GIB for _, budget in known]
            starts = [place - 0.48 for place, _ in known]
            ends = [place + 0.48 for place, _ in known]
            axes.hlines(heights, starts, ends, colors=color, linestyles=dashes, label=label)


def _label(axes: "Axes", shown: _Rows, num_rows: int) -> None:
    count = len(shown)
    size = 9 if count <= 12 else 8 if count <= 30 else 7
    names = [_short(name) for name, _ in shown]
    level = count <= 3 and max(map(len, names), default=0) <= 40 // max(count, 1)
    slanted = not level and count <= 12
    axes.set_xticks(
        range(count),
        names,
        fontsize=size,
        rotation=0 if level else 30 if slanted else 90,
        ha="right" if slanted else "center",
        rotation_mode="anchor" if slanted else None,
    )
    side = 1.2 if count == 1 else 0.7
    axes.set_xlim(-side, count - 1 + side)
    top = max((_top(result) for _, result in shown), default=0) or GIB
    axes.set_ylim(0, top / GIB * (1.08 if count <= _LEVEL_COUNTS else 1.25))
    axes.set_ylabel("GiB")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    in_tokens = len({result.block_size for _, result in shown if result.ok}) > 1
    for place, (_, result) in enumerate(shown):
        shown_count = _count(result.kv_tokens if in_tokens else result.num_blocks)
        _label_column(axes, place, result, shown_count, size, level=count <= _LEVEL_COUNTS)
    cut = f" (the first {count} of {num_rows} points)" if num_rows > count else ""
    counted = "tokens of the KV cache" if in_tokens else "KV-cache blocks"
    axes.set_title(f"GPU memory and {counted}{cut}", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles[::-1],
            labels[::-1],
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            frameon=False,
            fontsize=9,
        )


def _label_column(
    axes: "Axes", place: int, result: Result, count: str, size: int, *, level: bool
) -> None:
    """Write the count, or how the point ended, above its column; inside, what is wrong."""
    axes.annotate(
        count if result.ok else str(result.status),
        (place, _top(result) / GIB),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=size,
        rotation=0 if level else 90,
        color="black" if result.ok else "#c00000",
    )
    if result.budget is not None and (flag := _flag(result)):
        axes.annotate(
            flag,
            (place, result.budget.requested_bytes / 2 / GIB),
            ha="center",
            va="center",
            fontsize=size,
            rotation=90,
            color="white",
            weight="bold",
        )


def _flag(result: Result) -> str:
    """What a wrong warm-up leads to."""
    mistaken = _mistaken(result)
    if not mistaken:
        return ""
    return f"{gib(abs(mistaken))} {'missing' if mistaken > 0 else 'reserved too much'}"


def _top(result: Result) -> int:
    """Bytes at which a column and its lines end."""
    budget = result.budget
    if budget is None:
        return 0
    return max(budget.total_bytes, budget.requested_bytes + _missing(result))


def _short(name: str) -> str:
    """A label of at most 40 characters: the beginning and the end say the most."""
    return name if len(name) <= 40 else f"{name[:24]}...{name[-13:]}"
