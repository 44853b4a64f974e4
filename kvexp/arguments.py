"""Command lines beside `python -m kvexp`: a mistake is one line there too."""

import argparse
import os
import sys
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """A parser that ends with one line and status 2 where a command line is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the usage."""
        self.exit(2, f"kvexp: {message}; see {self.prog} --help\n")


def cannot_go_on(error: OSError) -> int:
    """The exit status where a stream fails: 0 if its reader left, else 2, and one line says why.

    What is still to be written is dropped, so that the interpreter does not complain at its end.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    print(f"kvexp: cannot go on: {error.strerror or error}", file=sys.stderr)
    return 2
