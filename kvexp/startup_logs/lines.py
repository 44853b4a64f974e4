"""How a line of a log is read: patterns whose named groups are keys of a record."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

_NUMBER = r"-?[\d,]*\.?\d+"

Value = str | float

TEXTS = ("engine_version", "model", "gpu", "weight_dtype", "quantization", "kv_cache_dtype")
"""Keys whose values are texts, whatever they look like: 0.20 is no number."""

_UNITS = {"_mb": 1 / 1024, "_bytes": 1 / 2**30}
"""Endings of group names whose numbers become GiB; MB in these logs are binary."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that an engine prints.

    The pattern is a regular expression with `{key}` for a number; other named groups are keys too.
    `outcome` is what the line says of the start, and `resets` marks the first line of a start:
    figures before it are of an older one.
    """

    pattern: str
    outcome: str | None = None
    resets: bool = False

    def find_all(self, text: str) -> Iterator[re.Match[str]]:
        """Wherever a log has the line."""
        return _compiled(self.pattern).finditer(text)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    full = re.sub(r"\{(\w+)\}", lambda key: f"(?P<{key[1]}>{_NUMBER})", pattern)
    return re.compile(full, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an engine prints.

    `arguments` are names of its options by record keys, `introductions` the texts after which
    options are printed (`name=value`, `'name': value`, `--name value`). `ranks` finds the rank that
    a line is of. `least` are keys of which the smallest of all ranks counts.
    """

    engine: str
    lines: Sequence[Line]
    arguments: Mapping[str, Sequence[str]]
    introductions: Sequence[str]
    ranks: str
    least: Sequence[str] = ("kv_tokens", "num_gpu_blocks", "free_gib", "init_free_gib")
    flags: Mapping[str, str] = field(default_factory=dict)


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
    """The number that a text is, else the text; no log prints more than 18 digits."""
    plain = text.replace(",", "")
    if re.fullmatch(r"-?\d{1,18}", plain):
        return int(plain)
    return float(plain) if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", plain) else text


def argument(text: str, name: str) -> Value | None:
    """An option's value in a text, None where it is not there or None."""
    words = name.replace("_", "[-_]")
    found = re.search(
        rf"(?:--|(?<![\w.-]))['\"]?{words}['\"]?\s*(?:[=:]\s*|\s)"
        r"(?:'([^']*)'|\"([^\"]*)\"|([^\s,)}]+))",
        text,
    )
    if found is None:
        return None
    quoted = found[1] if found[1] is not None else found[2]
    if quoted is not None:
        return quoted or None
    plain = found[3].removeprefix("torch.")
    return None if plain in ("None", "null") else number(plain)
