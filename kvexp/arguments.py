"""Command lines beside `python -m kvexp`: a mistake is one line there too."""

import argparse
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """A parser that ends with one line and status 2 where a command line is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the usage."""
        self.exit(2, f"kvexp: {message}; see {self.prog} --help\n")
