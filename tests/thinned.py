"""Long lists of cases that are alike: some with the quick tests, the others with the slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], *, one_of: int = 3) -> list[Any]:
    """The cases, of which only one of so many is tested every time."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if number % one_of == 0 else pytest.mark.slow,
        )
        for number, case in enumerate(cases)
    ]
