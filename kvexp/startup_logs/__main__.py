"""`python -m kvexp.startup_logs FILE...`: the record of each start-up log, one JSON line."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvexp.arguments import ArgumentParser, cannot_go_on
from kvexp.interrupt import in_one_line
from kvexp.startup_logs import UnreadableLog, read_log, read_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one record a file; the status is 2 where a file is no start-up log."""
    parser = ArgumentParser(prog="python -m kvexp.startup_logs", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--gpu", metavar="CARD", help="the card of logs that name none")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.files:
        try:
            record = json.dumps(read_log(read_text(path), path.stem, options.gpu))
        except (OSError, UnreadableLog) as error:
            reason = getattr(error, "strerror", None) or error
            print(f"kvexp: {path}: {reason}", file=sys.stderr)
            status = 2
            continue
        try:
            print(record, flush=True)
        except OSError as error:
            return cannot_go_on(error)
    return status


if __name__ == "__main__":
    with in_one_line():
        sys.exit(main())
