"""Ctrl-C and SIGTERM end a running point, never the keeping of a result."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""The exit status of what a signal ended."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """A program that Ctrl-C ends says so in one line, also while its modules load for seconds."""
    try:
        yield
    except KeyboardInterrupt:
        print("kvexp: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


class Interrupt:
    """While it is held, a signal is remembered; it raises only inside `allowed`."""

    def __init__(self) -> None:
        self.asked = False
        self._open = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Where a signal raises KeyboardInterrupt, also one that came before."""
        try:
            self._open = True
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._open = False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._open:
            self._open = False  # once is enough: what follows keeps the result
            raise KeyboardInterrupt
