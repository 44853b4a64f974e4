"""Scored cases for people: one row a case, then the summary by groups."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvexp.units import GIB
from kvexp.validate.score import Comparison, Scored

TERMS = {
    "available_kv_bytes": "KV cache",
    "weights_bytes": "weights",
    "activation_bytes": "activation",
    "non_torch_bytes": "non-torch",
    "graphs_bytes": "graphs",
    "graphs_estimate_bytes": "graph estimate",
}
"""Sizes by the names under which they are shown."""

GROUPS = {
    "all": "all cases",
    "stated": "inputs stated",
    "assumed": "some inputs assumed",
    "with_id": "Hugging Face id",
    "with_id_stated": "id, inputs stated",
    "with_id_assumed": "id, some assumed",
}
"""Groups of a summary by the names under which they are shown."""

_FAMILIES = ("by_prefix", "by_engine", "by_version")


def case_lines(scored: Sequence[Scored]) -> Iterator[str]:
    """Every case: capacity and bounds, then each term as predicted / logged in GiB.

    Of a case that stands alone also what was assumed for it.
    """
    heads = ["case", "outcome", "predicted", "low", "high", "logged", "error", "inside"]
    heads += list(TERMS.values())
    yield "blocks where no tokens are logged; terms in GiB, predicted / logged"
    yield from aligned([heads, *(_row(each) for each in scored if each.prediction.answered)])
    for each in scored:
        if not each.prediction.answered:
            yield f"{each.id}: not answered: {each.prediction.reason}"
        elif len(scored) == 1:
            yield from (f"{each.id}: {note}" for note in each.prediction.assumptions)


def summary_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """One row a group, then the errors of each term."""
    rows = {title: summary[name] for name, title in GROUPS.items()}
    for family in _FAMILIES:
        rows |= summary[family]
    yield "tokens, or blocks where no tokens are logged"
    found_rows = (
        [title, *figures(found), _case(found["capacity"])] for title, found in rows.items()
    )
    yield from aligned([["", *HEADS, "worst case"], *found_rows])
    yield ""
    yield "values, of all cases"
    terms = summary["all"]["terms"].items()
    term_rows = ([name, *term_figures(found), _case(found)] for name, found in terms)
    yield from aligned([["", *TERM_HEADS, "worst case"], *term_rows])


HEADS = ["cases", "answered", "median", "within 1 %", "within 10 %", "worst"]
HEADS += ["inside", "width", "failures", "kind right"]
"""What `figures` gives, in its order."""

TERM_HEADS = ["cases", "median", "within 1 %", "within 10 %", "worst", "inside", "width"]
"""What `term_figures` gives, in its order."""


def figures(found: Mapping[str, Any]) -> list[str]:
    """The figures of a group of cases, as text under `HEADS`."""
    capacity = found["capacity"]
    return [
        str(found["cases"]),
        percent(found["answered_share"], 0),
        percent(capacity["median_error"]),
        percent(capacity["within_1_percent_share"], 0),
        percent(capacity["within_10_percent_share"], 0),
        percent(capacity["worst_error"], 1),
        percent(found["inside_share"], 0),
        percent(capacity["median_width"]),
        str(found["failures"]),
        percent(found["failure_share"], 0),
    ]


def term_figures(found: Mapping[str, Any]) -> list[str]:
    """The figures of one term, as text under `TERM_HEADS`."""
    return [
        str(found["cases"]),
        percent(found["median_error"]),
        percent(found["within_1_percent_share"], 0),
        percent(found["within_10_percent_share"], 0),
        percent(found["worst_error"], 1),
        percent(found["inside_share"], 0),
        percent(found["median_width"]),
    ]


def _case(found: Mapping[str, Any]) -> str:
    return found["worst"] or "-"


def _row(each: Scored) -> list[str]:
    predicted, logged = each.prediction.outcome, each.case.logged.outcome
    same = logged is None or logged == predicted
    outcome = (predicted or "-") if same else f"{predicted or '-'} / {logged}"
    return [each.id, outcome, *_capacity(each), *(_gib(each, name) for name in TERMS)]


def _capacity(each: Scored) -> list[str]:
    value = each.prediction.values.get(each.capacity or "kv_tokens")
    figure = None if each.capacity is None else each.case.logged.figures[each.capacity]
    found: Comparison | None = each.capacity_compared
    bounds = (value.best, value.low, value.high) if value is not None else (None, None, None)
    inside = each.inside_interval
    return [
        *("-" if bound is None else f"{bound:,.0f}" for bound in bounds),
        "-" if figure is None else f"{figure.value:,.0f}",
        signed(None if found is None else found.error),
        "-" if inside is None else "yes" if inside else "no",
    ]


def _gib(each: Scored, name: str) -> str:
    value, figure = each.prediction.values.get(name), each.case.logged.figures.get(name)
    best = "-" if value is None else f"{value.best / GIB:,.2f}"
    return best if figure is None else f"{best} / {figure.value / GIB:,.2f}"


def percent(share: float | None, digits: int = 2) -> str:
    """A share as a percentage, `-` where it is not known."""
    return "-" if share is None else f"{share:.{digits}%}"


def signed(error: float | None) -> str:
    """A relative error with its sign, `-` where it is not known."""
    return "-" if error is None else f"{error:+.2%}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of text in columns, the first and the last to the left; the first row is underlined."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if index in (0, last) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)
