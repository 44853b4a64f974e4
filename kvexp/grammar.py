"""What kvexp adds to Hydra's grammar: versions stay text, and -m may stand anywhere."""

import re
from collections.abc import Iterable

_VERSION = re.compile(r"(engine\.version)=([\w.,+-]+)")
_MULTIRUN = ("-m", "--multirun")


def keep_version_text(overrides: Iterable[str]) -> list[str]:
    """Quote every value of engine.version: Hydra would read 0.20 as the number 0.2."""
    kept = []
    for override in overrides:
        match = _VERSION.fullmatch(override)
        if match:
            values = ",".join(f"'{value}'" for value in match[2].split(","))
            override = f"{match[1]}={values}"
        kept.append(override)
    return kept


def shown(override: str) -> str:
    """An override as a person would type it: versions without the quotes added here."""
    match = re.fullmatch(r"(engine\.version)='([^']*)'", override)
    return f"{match[1]}={match[2]}" if match else override


def flags_first(arguments: Iterable[str]) -> list[str]:
    """Move -m to the front: Hydra 1.3 refuses overrides on both sides of it."""
    arguments = list(arguments)
    flags = [a for a in arguments if a in _MULTIRUN]
    return flags[:1] + [a for a in arguments if a not in _MULTIRUN]
