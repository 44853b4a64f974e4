"""The command: read records, predict each, show and keep how far the predictions are off."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvexp import record, tracking
from kvexp.errors import RequestError
from kvexp.startup_logs import UnreadableLog, read_log
from kvexp.validate import case, kept, output, page, pictures, report, score
from kvexp.validate.predict import predict

OK, BELOW_THRESHOLD, WRONG_REQUEST, INTERRUPTED = 0, 1, 2, 130


def main() -> None:
    """Run `python -m kvexp.validate`; ends the process with its exit status."""
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(_say("interrupted", INTERRUPTED))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status.

    0: every record was read. 1: a summary lies below its threshold. 2: a record or the request
    cannot be read. 130: interrupted.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.files and not options.log:
        parser.error("give a FILE.jsonl or --log FILE")
    try:
        return _run(options)
    except RequestError as error:
        return _say(str(error), WRONG_REQUEST)


def _run(options: argparse.Namespace) -> int:
    limits = {} if options.check is None else output.thresholds(options.check)
    store = None if options.mlflow is None else kept.open_store(options.mlflow)
    stems = [path.stem for path in options.log]
    logs = [(path, path.stem if stems.count(path.stem) == 1 else str(path)) for path in options.log]
    files = [*map(_read, options.files), *(_read_log(path, name) for path, name in logs)]
    problems = [problem for found in files for problem in found.problems]
    scored = score.score((each for found in files for each in found.cases), predict)
    summary = score.summary(scored, options.group)
    names = [str(path) for path in (*options.files, *options.log)]
    if options.json is not None:
        _write(options.json, output.as_json(scored, summary))
    if options.page is not None:
        chosen = [*names, *(f"--group={prefix}" for prefix in options.group)]
        _write(options.page, page.page_text(scored, summary, chosen))
    if options.picture is not None:
        _draw(scored, options.picture)
    if store is not None:
        kept.keep(store, scored, summary, names)
    if scored:
        _print(_lines(scored, summary, quiet=options.quiet))
    elif not problems:
        _print([f"no record in {', '.join(names)}"])
    if store is not None:
        _print([tracking.ui_command(store)])
    for problem in problems:
        _say(problem, WRONG_REQUEST)
    missed = output.missed(limits, summary)
    for line in missed:
        _say(line, BELOW_THRESHOLD)
    if problems:
        return WRONG_REQUEST
    return BELOW_THRESHOLD if missed else OK


def _lines(
    scored: Sequence[score.Scored], summary: dict[str, object], *, quiet: bool
) -> Iterator[str]:
    if not quiet:
        yield from report.case_lines(scored)
        yield ""
    yield from report.summary_lines(summary)


def _print(lines: Iterable[str]) -> None:
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left; what is kept is complete
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read(path: Path) -> case.Records:
    try:
        with path.open(encoding="utf-8") as lines:
            return case.read(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None


def _read_log(path: Path, name: str) -> case.Records:
    """The one record of a raw log; `name` is its id."""
    try:
        found = read_log(path.read_text(encoding="utf-8", errors="replace"), name)
        return case.Records(cases=(case.case_of(found),), problems=())
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    except (UnreadableLog, case.UnreadableRecord) as error:
        return case.Records(cases=(), problems=(f"{path}: {error}",))


def _write(path: Path, text: str) -> None:
    try:
        record.write_text(path, text)
    except OSError as error:
        raise RequestError(f"cannot write to {path}: {error.strerror or error}") from None


def _draw(scored: Sequence[score.Scored], path: Path) -> None:
    try:
        pictures.draw_scatter(scored, path)
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot write to {path}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvexp.validate",
        description="Predict what engines printed at start, and say how far off that is.",
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE.jsonl", help="records, one a line"
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a raw start-up log of vLLM, SGLang, TensorRT-LLM or LMDeploy; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write cases and summary here")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="THRESHOLDS.yaml",
        help="limits by the summary's keys; exit 1 where one is not kept",
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="PREFIX",
        help="sum up the cases whose ids begin so; may be repeated",
    )
    parser.add_argument("--page", type=Path, metavar="OUT.md", help="write the accuracy page here")
    parser.add_argument("--picture", type=Path, metavar="OUT.png", help="draw a scatter plot here")
    parser.add_argument(
        "--mlflow",
        nargs="?",
        const=tracking.Tracking.uri,
        metavar="URI",
        help=f"keep the results in MLflow, by default in {tracking.Tracking.uri}",
    )
    parser.add_argument("--quiet", action="store_true", help="print the summary alone")
    return parser


def _say(message: str, status: int) -> int:
    print(f"kvexp: {' '.join(message.split())}", file=sys.stderr)
    return status
