"""Text files as engines, editors and shells write them."""

import codecs
import json
import re
from itertools import pairwise
from pathlib import Path

_BEGINS = re.compile(
    r"\s*$|\s*(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|Traceback|File |\$ )"
    r"|\s*\(?\[?\d{4}-\d\d-\d\d|\s*[(\[](?:\w+[ =])*(?:pid|rank|TP|PP|DP)"
)
"""How a line of its own begins: a level, a date, a process."""

_FULL, _FEWEST = 0.85, 3
"""Lines are cut at one width, but for colours, which are counted and then gone."""

_MESSAGES = ("log", "message", "msg", "MESSAGE", "line")
"""Keys of the line itself where Docker, journald or a collector keeps a log as JSON."""


def read_text(path: Path, errors: str = "replace") -> str:
    """A file in UTF-8, or in UTF-16 where it begins so, as PowerShell writes one.

    `errors` is what becomes of bytes that are no text, as `bytes.decode` has it.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_wide else "utf-8-sig", errors)


def lines_within(text: str) -> str:
    """A log that is kept as JSON, an object a line, as the lines that were printed."""
    return "\n".join(map(_printed, text.split("\n")))


def _printed(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = (found[key] for key in _MESSAGES if isinstance(found.get(key), str))
    return next(texts, line).removesuffix("\n")


def unwrapped(text: str) -> str:
    """A log that a terminal cut at its width, as it was copied from there, in whole lines.

    It was where lines of the largest length go on in the next one again and again.
    """
    lines = text.split("\n")
    width = max(map(len, lines))
    if sum(_goes_on(line, after, width) for line, after in pairwise(lines)) < _FEWEST:
        return text
    joined = lines[:1]
    for line, after in pairwise(lines):
        if _goes_on(line, after, _FULL * width):
            joined[-1] += after
        else:
            joined.append(after)
    return "\n".join(joined)


def _goes_on(line: str, after: str, width: float) -> bool:
    return len(line) >= width and not _BEGINS.match(after)
