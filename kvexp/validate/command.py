"""The command: read records, predict each, show and keep how far the predictions are off."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvexp.errors import RequestError
from kvexp.validate import case, predict

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
    options = _parser().parse_args(arguments)
    try:
        records = [_read(Path(name)) for name in options.files]
    except RequestError as error:
        return _say(str(error), WRONG_REQUEST)
    cases = [each for found in records for each in found.cases]
    for each in cases:
        print(each.inputs.id, predict.predict(each.inputs))
    problems = [problem for found in records for problem in found.problems]
    for problem in problems:
        _say(problem, WRONG_REQUEST)
    return WRONG_REQUEST if problems else OK


def _read(path: Path) -> case.Records:
    try:
        with path.open(encoding="utf-8") as lines:
            return case.read(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvexp.validate",
        description="Predict what engines printed at start, and say how far off that is.",
    )
    parser.add_argument("files", nargs="*", metavar="FILE.jsonl", help="records, one a line")
    return parser


def _say(message: str, status: int) -> int:
    print(f"kvexp: {' '.join(message.split())}", file=sys.stderr)
    return status
