"""Engines side by side: where every byte of the card went, and what sets their tokens apart."""

from collections.abc import Iterator, Sequence

from kvexp.results import Part, Result
from kvexp.units import GIB, gib

_Rows = Sequence[tuple[str, Result]]

HELD_BACK = "held back"
"""Of the card's total, what the engine's fraction leaves to others."""

_CACHE = "kv_cache"
_REST = ("unused", "shortfall")
_NAMES = {
    "used_before_load": "used before load",
    "used_by_others": "used by others",
    "non_torch": "non-torch",
    "cudagraph": "CUDA graphs",
    "recurrent_states": "recurrent states",
    "kv_share": "share of K and V",
    _CACHE: "KV cache",
}
_ORDER = (
    "used_before_load",
    "used_by_others",
    "non_torch",
    "weights",
    "activation",
    "cudagraph",
    "runtime",
    "recurrent_states",
    "kv_share",
    "correction",
)


def compares_engines(rows: _Rows) -> bool:
    """Whether points of several engines have budgets to compare."""
    return len({result.effective.get("engine") for _, result in rows if result.budget}) > 1


def comparison_lines(rows: _Rows) -> Iterator[str]:
    """A table with one column a point, then what is not subtracted, the differences, the flags."""
    known = [(name, result) for name, result in rows if result.budget is not None]
    yield "term by term, in GiB of the card; a point's column sums to the card's total"
    yield from _table(known)
    yield from _zero_lines(known)
    yield from _difference_lines(known)
    for name, result in known:
        if flags := result.effective.get("flags"):
            yield f"{name}: to paste: {flags}"


def shares(result: Result) -> dict[str, int]:
    """Where the bytes of the card went, by name; they sum to the card's total."""
    budget = result.budget
    if budget is None:
        return {}
    found: dict[str, int] = {}
    for part in budget.parts:
        name = "unused" if part.name in _REST else part.name
        found[name] = found.get(name, 0) + part.size_bytes
    found[HELD_BACK] = budget.total_bytes - budget.requested_bytes
    return found


def _terms(rows: _Rows) -> list[str]:
    """The names of all shares, the cache and what stays empty last."""
    names = dict.fromkeys(_ORDER)
    for _, result in rows:
        names.update(dict.fromkeys(shares(result)))
    last = (HELD_BACK, "unused", _CACHE)
    used = {name for _, result in rows for name in shares(result)}
    return [*(n for n in names if n in used and n not in last), *last]


def _table(rows: _Rows) -> Iterator[str]:
    columns = [_column(result, _terms(rows)) for _, result in rows]
    heads = ["", "fraction", "of what is", "share of the card"]
    heads += [_NAMES.get(name, name) for name in _terms(rows)]
    heads += ["block size", "bytes a token", "KV tokens"]
    table = [heads, *([name, *cells] for (name, _), cells in zip(rows, columns, strict=True))]
    widths = [max(map(len, column)) for column in table]
    for line in zip(*table, strict=True):
        first, *rest = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join([first, *rest]).rstrip()


def _column(result: Result, names: Sequence[str]) -> list[str]:
    budget, sizes = result.budget, shares(result)
    assert budget is not None
    return [
        f"{result.effective.get('util', 0):g}",
        budget.base,
        f"{budget.requested_bytes / budget.total_bytes:.4f}",
        *(f"{sizes[name] / GIB:,.2f}" if name in sizes else "-" for name in names),
        f"{result.block_size:,}" if result.block_size else "-",
        _token_bytes(result),
        f"{result.kv_tokens:,}" if result.kv_tokens is not None else "-",
    ]


def _token_bytes(result: Result) -> str:
    if not result.block_bytes or not result.block_size:
        return "-"
    return f"{result.block_bytes / result.block_size:,.0f}"


def _zero_lines(rows: _Rows) -> Iterator[str]:
    """What an engine does not subtract, in its own words."""
    for name, result in rows:
        parts: tuple[Part, ...] = result.budget.parts if result.budget else ()
        for part in parts:
            if part.size_bytes == 0 and part.name not in (_CACHE, *_REST):
                yield f"{name}: {_NAMES.get(part.name, part.name)} 0: {part.reason}"
        if "used_before_load" not in shares(result) and "used_by_others" not in shares(result):
            yield f"{name}: used before load is not charged: it lies in what is held back"


def _difference_lines(rows: _Rows) -> Iterator[str]:
    """The cache of each point against the first, as the sum of all other differences."""
    (first_name, first), *others = rows
    before = shares(first)
    for name, result in others:
        after = shares(result)
        changed = {
            term: before.get(term, 0) - after.get(term, 0)
            for term in _terms(rows)
            if term != _CACHE and before.get(term, 0) != after.get(term, 0)
        }
        largest = sorted(changed.items(), key=lambda item: -abs(item[1]))
        total = after.get(_CACHE, 0) - before.get(_CACHE, 0)
        because = ", ".join(f"{_NAMES.get(t, t)} {_signed(size)}" for t, size in largest)
        yield f"{name} against {first_name}: cache {_signed(total)} = {because}"


def _signed(size_bytes: int) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{gib(abs(size_bytes))}"
