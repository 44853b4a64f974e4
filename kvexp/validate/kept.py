"""A validation in MLflow: metrics of the summary, the JSON, the picture and the worst cases."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvexp import tracking
from kvexp.validate import output, pictures, report
from kvexp.validate.page import worst
from kvexp.validate.score import Scored

EXPERIMENT = "kvexp-validate"
_BY_VALUE = "by_gpu"  # as many as cards; they are in the JSON
_WORST = 30


def open_store(uri: str) -> tracking.Store:
    """The store that a validation goes to; see `tracking.open_store`.

    Raises:
        RequestError: it cannot be used.
    """
    return tracking.open_store(tracking.Tracking(uri=uri, experiment=EXPERIMENT), Path.cwd())


def keep(
    store: tracking.Store,
    scored: Sequence[Scored],
    summary: Mapping[str, Any],
    names: Sequence[str],
) -> None:
    """Send one run; what goes wrong is one line of warning."""
    title = ", ".join(Path(name).name for name in names)
    run = store.start_sweep(title, {"kind": "validation"}, {"files": list(names)})
    with TemporaryDirectory() as place:
        files = list(_files(Path(place), scored, summary))
        store.finish_report(run, dict(metrics(summary)), files, None)


def metrics(summary: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a summary by dotted names."""
    for key, value in summary.items():
        if key == _BY_VALUE:
            continue
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from metrics(value, f"{name}.")
        elif isinstance(value, int | float):
            yield name, float(value)


def _files(folder: Path, scored: Sequence[Scored], summary: Mapping[str, Any]) -> Iterator[Path]:
    for name, text in (
        ("validation.json", output.as_json(scored, summary)),
        ("summary.txt", "\n".join(report.summary_lines(summary))),
        ("worst.txt", "\n".join(report.case_lines(worst(scored)[:_WORST]))),
    ):
        path = folder / name
        path.write_text(f"{text}\n", encoding="utf-8")
        yield path
    picture = folder / "scatter.png"
    pictures.draw_scatter(scored, picture)
    yield picture
