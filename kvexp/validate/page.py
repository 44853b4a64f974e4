"""The accuracy page: predicted against measured, in Markdown."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvexp.units import GIB
from kvexp.validate.report import GROUPS, HEADS, TERM_HEADS, TERMS, figures, signed, term_figures
from kvexp.validate.score import STATED, Scored

_WORST = 12


def page_text(
    scored: Sequence[Scored], summary: Mapping[str, Any], arguments: Sequence[str]
) -> str:
    """The page; `arguments` are those of the command that makes it anew."""
    return "\n".join(_page(scored, summary, arguments)) + "\n"


def _page(
    scored: Sequence[Scored], summary: Mapping[str, Any], arguments: Sequence[str]
) -> Iterator[str]:
    yield "# Accuracy"
    yield ""
    yield "Predictions without a GPU against what engines printed at start. Made by"
    yield f"`python -m kvexp.validate {' '.join(arguments)} --page FILE`."
    yield ""
    yield "The inputs of a case count as stated where its log or command shows these:"
    yield f"{', '.join(f'`{name}`' for name in STATED)}."
    yield "Elsewhere what is missing was filled in with the version's own defaults."
    yield "Capacity is tokens, or blocks where no tokens are logged. Errors are relative and"
    yield "without sign, 0 within the printed digits. `inside`: the logged value lies between the"
    yield "predicted low and high; `width`: the median of (high - low) / best."
    yield ""
    yield from _capacity("Capacity", {t: summary[name] for name, t in GROUPS.items()}, summary)
    yield from _terms("By term", summary["all"]["terms"])
    yield from _terms("By term, inputs stated", summary["stated"]["terms"])
    yield from _capacity("By engine", summary["by_engine"], None)
    yield from _capacity("By version", summary["by_version"], None)
    yield from _capacity("By card", summary["by_gpu"], None)
    yield from _worst(scored)
    yield from _failures(scored)
    yield from _not_covered(scored)


def _capacity(
    title: str, groups: Mapping[str, Any], summary: Mapping[str, Any] | None
) -> Iterator[str]:
    rows = [[name, *figures(found)] for name, found in groups.items()]
    if summary is not None:
        rows += [[f"`{name}*`", *figures(found)] for name, found in summary["by_prefix"].items()]
    yield from _section(title, ["", *HEADS], rows)


def _terms(title: str, terms: Mapping[str, Any]) -> Iterator[str]:
    rows = [[f"`{name}`", *term_figures(found)] for name, found in terms.items() if found["cases"]]
    yield from _section(title, ["", *TERM_HEADS], rows)


def _worst(scored: Sequence[Scored]) -> Iterator[str]:
    rows = []
    for each in worst(scored)[:_WORST]:
        found = each.capacity_compared
        assert found is not None
        rows.append(
            [
                f"`{each.id}`",
                each.family,
                f"{found.predicted.best:,.0f}",
                f"{found.logged.value:,.0f}",
                signed(found.error),
                *(_both(each, name) for name in TERMS),
            ]
        )
    heads = ["", "version", "predicted", "logged", "error", *TERMS.values()]
    yield from _section("Worst cases", heads, rows, "Terms are predicted / logged, in GiB.")


def worst(scored: Sequence[Scored]) -> list[Scored]:
    """The cases whose capacity is compared, the largest error first."""
    errors = {
        each.id: abs(found.error)
        for each in scored
        if (found := each.capacity_compared) is not None and found.error is not None
    }
    known = [each for each in scored if each.id in errors]
    return sorted(known, key=lambda each: -errors[each.id])


def _both(each: Scored, name: str) -> str:
    found = each.compared(name)
    if found is None:
        return "-"
    return f"{found.predicted.best / GIB:,.2f} / {found.logged.value / GIB:,.2f}"


def _failures(scored: Sequence[Scored]) -> Iterator[str]:
    """How starts ended, by what was predicted."""
    ended = Counter(
        (each.case.logged.outcome, each.prediction.outcome or "not answered")
        for each in scored
        if each.case.logged.outcome is not None
    )
    rows = [
        [str(logged), str(predicted), str(n)] for (logged, predicted), n in sorted(ended.items())
    ]
    yield from _section("How starts end", ["logged", "predicted", "cases"], rows)


def _not_covered(scored: Sequence[Scored]) -> Iterator[str]:
    yield "## What is not covered"
    yield ""
    unanswered = [each for each in scored if not each.prediction.answered]
    for each in unanswered:
        yield f"- `{each.id}` ({each.family}): {each.prediction.reason}"
    if not unanswered:
        yield "Every case is answered."
    yield ""
    yield "Flags of answered cases that no rule reads:"
    yield ""
    flags = Counter(
        note.removeprefix("other_flags: no rule for ")
        for each in scored
        for note in each.prediction.assumptions
        if note.startswith("other_flags: no rule for ")
    )
    for words, count in sorted(flags.items()):
        yield f"- {words}: {count} {'case' if count == 1 else 'cases'}"
    if not flags:
        yield "none."


def _section(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    if note:
        yield note
        yield ""
    yield "| " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * (len(heads) - 1)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""
