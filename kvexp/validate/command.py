"""The command: read records, predict each, show and keep how far the predictions are off."""

import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp import record, tracking
from kvexp.arguments import ArgumentParser
from kvexp.errors import RequestError
from kvexp.interrupt import INTERRUPTED, Interrupt
from kvexp.startup_logs import UnreadableLog, read_log, read_text
from kvexp.validate import case, kept, output, page, pictures, report, score
from kvexp.validate.predict import means_card, predict

OK, BELOW_THRESHOLD, WRONG_REQUEST = 0, 1, 2
MOST_PROBLEMS = 10


def main() -> None:
    """Run `python -m kvexp.validate`; ends the process with its exit status."""
    sys.exit(run(sys.argv[1:]))


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


def _run(options: Namespace) -> int:
    limits = {} if options.check is None else output.thresholds(options.check)
    for path in filter(None, (options.json, options.page, options.picture)):
        _refuse_unwritable(path)
    store = None if options.mlflow is None else kept.open_store(options.mlflow)
    if options.gpu is not None and not means_card(options.gpu):
        raise RequestError(f"--gpu {options.gpu} names no card; see python -m kvexp.list gpus")
    stems = [path.stem for path in options.log]
    logs = [(path, path.stem if stems.count(path.stem) == 1 else str(path)) for path in options.log]
    read = (_read_log(path, name, options.gpu) for path, name in logs)
    files = [*map(_read, options.files), *read]
    problems = [problem for found in files for problem in _first(found.problems)]
    cases = [each for found in files for each in found.cases]
    names = [str(path) for path in (*options.files, *options.log)]
    with Interrupt() as interrupt:
        scored = _scored(cases, interrupt)
        summary = score.summary(scored, options.group)
        unwritten = list(_kept(options, scored, summary, names))
    problems += unwritten
    if scored:
        _print(_lines(scored, summary, quiet=options.quiet and not unwritten))
    elif not problems and not interrupt.asked:
        _print([f"no record in {', '.join(names)}"])
    if store is not None:
        kept.keep(store, scored, summary, names)
        _print([tracking.ui_command(store)])
    for problem in problems:
        _say(problem, WRONG_REQUEST)
    if interrupt.asked:
        return _say(f"interrupted after {len(scored)} of {len(cases)} records", INTERRUPTED)
    missed = output.missed(limits, summary)
    for line in missed:
        _say(line, BELOW_THRESHOLD)
    if problems:
        return WRONG_REQUEST
    return BELOW_THRESHOLD if missed else OK


def _scored(cases: Sequence[case.Case], interrupt: Interrupt) -> list[score.Scored]:
    """The cases until a signal comes, each with its prediction."""
    scored: list[score.Scored] = []
    for each in cases:
        try:
            with interrupt.allowed():
                scored += score.score([each], predict)
        except KeyboardInterrupt:
            break
    return scored


def _kept(
    options: Namespace,
    scored: Sequence[score.Scored],
    summary: Mapping[str, Any],
    names: Sequence[str],
) -> Iterator[str]:
    """Write what was asked for; one line for each file that cannot be written."""
    chosen = [*names, *(f"--group={prefix}" for prefix in options.group)]
    writers: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (options.json, lambda to: record.write_text(to, output.as_json(scored, summary))),
        (options.page, lambda to: record.write_text(to, page.page_text(scored, summary, chosen))),
        (options.picture, lambda to: pictures.draw_scatter(scored, to)),
    )
    for path, write in writers:
        try:
            if path is not None:
                write(path)
        except (OSError, ValueError) as error:
            yield f"cannot write to {path}: {getattr(error, 'strerror', None) or error}"


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
    except OSError as error:  # what is kept is complete
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise RequestError(f"cannot print: {error.strerror or error}") from None


def _read(path: Path) -> case.Records:
    try:
        text = read_text(path, errors="surrogateescape")
    except OSError as error:
        return _unreadable(path, error)
    return case.read(io.StringIO(text, newline=None), str(path))


def _read_log(path: Path, name: str, gpu: str | None) -> case.Records:
    """The one record of a raw log; `name` is its id, `gpu` its card if it names none."""
    try:
        found = read_log(read_text(path), name, gpu)
        return case.Records(cases=(case.case_of(found),), problems=())
    except OSError as error:
        return _unreadable(path, error)
    except (UnreadableLog, case.UnreadableRecord) as error:
        return case.Records(cases=(), problems=(f"{path}: {error}",))


def _unreadable(path: Path, error: OSError) -> case.Records:
    problem = f"{path} cannot be read: {error.strerror or error}"
    return case.Records(cases=(), problems=(problem,))


def _first(problems: Sequence[str]) -> Iterator[str]:
    """So many problems of a file that a person reads them, and how many more there are."""
    yield from problems[:MOST_PROBLEMS]
    if len(problems) > MOST_PROBLEMS:
        name = problems[-1].partition(": ")[0].rpartition(":")[0]
        yield f"{name}: {len(problems) - MOST_PROBLEMS} more lines are no records"


def _refuse_unwritable(path: Path) -> None:
    """What cannot be written is refused before anything is predicted.

    Raises:
        RequestError: it is a folder, or its folder is missing or not to be written to.
    """
    folder = path.resolve().parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        reason = f"the folder {folder} is not to be written to"
    else:
        return
    raise RequestError(f"cannot write to {path}: {reason}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
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
    parser.add_argument("--gpu", metavar="CARD", help="the card of logs that name none")
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
