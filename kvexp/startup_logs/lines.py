"""How a line of a log is read: patterns whose named groups are keys of a record."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from kvexp.startup_logs.costs import Costs, costs_of

_NUMBER = r"-?[\d,]*\.?\d+"

Value = str | float

TEXTS = ("engine_version", "model", "gpu", "weight_dtype", "quantization", "kv_cache_dtype")
"""Keys whose values are texts, whatever they look like: 0.20 is no number."""

_UNITS = {"_mb": 1 / 1024, "_bytes": 1 / 2**30}
"""Endings of group names whose numbers become GiB; MB in these logs are binary."""


DRAFT = "draft_"
"""What the keys of figures of a model that drafts begin with."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that an engine prints.

    The pattern is a regular expression with `{key}` for a number; other named groups are keys too.
    `outcome` is what the line says of the start. `resets` marks the line with which an engine
    begins; `precedes` one that is printed before it, of inputs of the start to come. Where a rank
    has printed the figure `after` already, the line's figures are those of the model that drafts.
    `states` are keys with values that the line means and does not print.
    """

    pattern: str
    outcome: str | None = None
    resets: bool = False
    precedes: bool = False
    after: str = ""
    states: tuple[tuple[str, Value], ...] = ()

    def find_all(self, text: str) -> Iterator[re.Match[str]]:
        """Wherever a log has the line."""
        return _compiled(self.pattern).finditer(text)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    full = re.sub(r"\{(\w+)\}", lambda key: f"(?P<{key[1]}>{_NUMBER})", pattern)
    return re.compile(full, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Introduction:
    """The text after which options are printed, to the end of the line.

    `is_command`: as a shell's words. `is_complete`: all options, defaults too, rather than those
    that were given. `precedes`: before the engine begins.
    """

    text: str
    is_command: bool = False
    is_complete: bool = False
    precedes: bool = True


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an engine prints.

    `arguments` are names of its options by record keys, `groups` options that hold such options.
    `ranks` finds the rank that a line is of, `engines` one of several engines of a start; not
    `begins_once` where every rank prints the line with which an engine begins.
    `least` are keys of which the smallest of all ranks counts.

    Of its other options those that were given are flags, but for the ones that take nothing on the
    card. Where all options are printed, those that may take something are, unless they have their
    default, which says nothing (`costs`). `aliases` are short names.
    """

    engine: str
    lines: Sequence[Line]
    arguments: Mapping[str, Sequence[str]]
    introductions: Sequence[Introduction]
    ranks: str
    engines: str = r"(?!)"
    begins_once: bool = True
    least: Sequence[str] = ("kv_tokens", "num_gpu_blocks", "free_gib", "init_free_gib")
    groups: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def costs(self) -> Costs:
        """What its options mean for memory."""
        return costs_of(self.engine)


def values(match: re.Match[str]) -> Iterator[tuple[str, Value]]:
    """Keys and values of a match's groups, sizes in GiB."""
    for key, text in match.groupdict().items():
        if text is None:
            continue
        for ending, factor in _UNITS.items():
            if key.endswith(ending):
                yield f"{key.removesuffix(ending)}_gib", float(text.replace(",", "")) * factor
                break
        else:
            yield key, text if key in TEXTS else number(text)


def number(text: str) -> Value:
    """The number that a text is, else the text; a count has at most 18 digits."""
    plain = text.replace(",", "")
    if re.fullmatch(r"-?\d{1,18}", plain):
        return int(plain)
    return float(plain) if re.fullmatch(r"-?(\d+|\d*\.\d+(e-?\d+)?)", plain) else text
