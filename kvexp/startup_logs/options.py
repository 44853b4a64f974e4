"""Options as logs and people write them: items of a Python call or dict, JSON, command lines."""

import ast
import json
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

_QUOTED = r"(?<!\w)'(?:\\.|[^'\\])*'|(?<!\w)\"(?:\\.|[^\"\\])*\"|<[^<>]*>"
_ITEM = re.compile(r"\s*['\"]?([A-Za-z_][\w.-]*)['\"]?\s*[=:]\s*(.*)", re.DOTALL)
_CALL = re.compile(r"[A-Za-z_][\w.]*\((.*)\)|\{(.*)\}", re.DOTALL)
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_UNITS = {
    **{unit: 1000**power for power, unit in enumerate("kmgt", start=1)},
    **{unit: 1024**power for power, unit in enumerate("KMGT", start=1)},
}
_SHELL = re.compile(r"[|&;]+|\d?>+\S*|<\S*|#.*", re.DOTALL)
_FLAG = re.compile(r"-{1,2}([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_SERVED = re.compile(r"[\w~./][\w./:@+~-]*")
_DEEPEST = 8  # levels of a value


def parts(text: str, separator: str) -> Iterator[str]:
    """A text cut at a separator (a regular expression) outside of quotes and brackets."""
    start = depth = 0
    for token in _tokens(separator).finditer(text):
        if token[1]:
            depth += 1
        elif token[2]:
            depth = max(0, depth - 1)
        elif token[3] and not depth:
            yield text[start : token.start()]
            start = token.end()
    yield text[start:]


def inside(text: str) -> str:
    """What stands before the bracket that closes one which was opened before the text."""
    depth = 0
    for token in _tokens(",").finditer(text):
        if token[1]:
            depth += 1
        elif token[2]:
            if not depth:
                return text[: token.start()]
            depth -= 1
    return text


@cache
def _tokens(separator: str) -> re.Pattern[str]:
    return re.compile(rf"{_QUOTED}|([\[({{])|([\])}}])|({separator})", re.DOTALL)


def items(text: str, depth: int = _DEEPEST) -> dict[str, Any]:
    """Options of the inside of a call or a dict: `a=1, b='x'` or `'a': 1, 'b': {...}`."""
    found = (_ITEM.fullmatch(part) for part in parts(text, ","))
    return {plain(match[1]): value_of(match[2], depth) for match in found if match is not None}


def value_of(text: str, depth: int = _DEEPEST) -> Any:
    """What a text stands for, as JSON holds it; a text that is no literal stands for itself.

    JSON and Python's literals are read, calls (`Config(a=1)`) as mappings of their arguments.
    """
    text = text.strip()
    for read in (_json, _literal):
        try:
            return _as_json(read(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    call = _CALL.fullmatch(text)
    if call is None or not depth:
        return text
    return items(call[1] if call[1] is not None else call[2], depth - 1)


def _literal(text: str) -> Any:
    with warnings.catch_warnings():  # of escapes and numbers that Python will not take for long
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _as_json(value: Any) -> Any:
    """A literal in JSON's types.

    Raises:
        ValueError: it has none.
    """
    return json.loads(json.dumps(value, allow_nan=False))


def written(value: Any) -> str:
    """A value as a text that `value_of` reads again, without separators outside of quotes."""
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./:+@-]+", value) else json.dumps(value)
    return str(value) if isinstance(value, bool | int | float) else json.dumps(value)


def served(text: str) -> str | None:
    """What stands alone before the flags of a command line: the model that it serves."""
    before: list[str] = []
    for word in _split(text):
        if _SHELL.fullmatch(word) or word.startswith("-"):
            break
        before.append(word)
    return before[0] if len(before) == 1 and _SERVED.fullmatch(before[0]) else None


def words(text: str) -> Iterator[tuple[str, Any, str]]:
    """Flags of a command line up to its end: name, value and the flag's own words.

    A flag alone is true, or with `no-` before its name false; several values are a list, and
    `--a.b 1 --a.c 2` are one flag.
    """
    nested: dict[str, tuple[dict[str, Any], str]] = {}
    for flag, values in _flags(text):
        said = " ".join((flag[0], *values))
        name, value = named(flag[1], values if flag[2] is None else [flag[2], *values])
        outer, _, inner = name.partition(".")
        if inner:
            held, before = nested.get(outer, ({}, ""))
            nested[outer] = held | {inner: value}, f"{before} {said}".strip()
        else:
            yield name, value, said
    yield from ((name, value, said) for name, (value, said) in nested.items())


def _flags(text: str) -> list[tuple[re.Match[str], list[str]]]:
    """Flags with the words that follow each."""
    found: list[tuple[re.Match[str], list[str]]] = []
    for word in _split(text):
        flag = _FLAG.fullmatch(word)
        if _SHELL.fullmatch(word):
            break
        if flag is not None:
            found.append((flag, []))
        elif found:
            found[-1][1].append(word)
    return found


def named(name: str, given: Sequence[str]) -> tuple[str, Any]:
    """A flag's name and the value that the words after it make."""
    name = plain(name)
    if not given:
        return (name[3:], False) if name.startswith("no_") else (name, True)
    if len(given) == 1 or given[0].startswith(("{", "[")):  # JSON without the shell's quotes
        return name, value_of(" ".join(given))
    return name, [value_of(each) for each in given]


def _split(text: str) -> list[str]:
    """Words as a shell makes them; a text with a quote that stays open at its spaces."""
    for whole in (text, text.rstrip("\"' ")):
        try:
            return shlex.split(whole)
        except ValueError:
            continue
    return text.split()


def plain(name: str) -> str:
    """A name in lower case with underscores, as engines use it inside."""
    return name.lower().replace("-", "_")


def human_int(value: Any) -> Any:
    """`32k` as 32000 and `24G` as 24 x 1024^3, as vLLM reads them; anything else unchanged."""
    match = _HUMAN.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else int(float(match[1]) * _UNITS[match[2]])
