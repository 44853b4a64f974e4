"""Flags in the words of whoever kept a log: a command line, assignments, or prose."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvexp.startup_logs import arguments, as_input, costs_of, full_name, options

_COMMAND = re.compile(r"(?:^|\s)(?=--?[A-Za-z][\w.-]*)")
_NAME = r"-*([A-Za-z][\w.-]*)"
_FLAG = re.compile(rf"{_NAME}(?:\s*[=:]\s*|\s+)(.+)", re.DOTALL)
_ALONE = re.compile(_NAME)
_ON, _OFF = ("_on", "_enabled"), ("_off", "_disabled")
_SAID = re.compile(rf"^no_|(?:{'|'.join((*_ON, *_OFF))})$")
_GROUPS = ("compilation_config", "optimization_level", "mm_processor_kwargs")
"""Options whose entries are options; `-O` was one before 0.12."""

_VARIABLES = {
    "vllm_use_v2_model_runner": "v2_model_runner",
    "vllm_memory_profiler_estimate_cudagraphs": "estimate_cudagraphs",
    "vllm_use_flashinfer_sampler": "flashinfer_sampler",
}
"""Variables of the environment that are options here."""

_ALLOCATOR = ("pytorch_cuda_alloc_conf", "pytorch_alloc_conf")
"""The variable of torch's allocator, whose settings are flags of their own."""

_SETTING = re.compile(r"(\w+):(\[[^]]*\]|[^,\s]+)")
_ASSIGNED = re.compile(rf"{_NAME}[=:](\S.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag: its name with underscores, its value, and the words that it was read from.

    Prose has a value of several words, or no name.
    """

    name: str
    value: Any
    words: str

    @property
    def is_prose(self) -> bool:
        """Whether it is no flag but words about one."""
        return not self.name or (isinstance(self.value, str) and " " in self.value)


class Flags:
    """The flags of an engine in a record, to be taken out by whoever has a rule for them."""

    def __init__(self, text: str | None, engine: str) -> None:
        self._engine = engine
        self._costs = costs_of(engine)
        self._found = [each for flag in read(text or "") for each in self._named(flag)]

    def _named(self, flag: Flag) -> Iterator[Flag]:
        """The flag by its full name; entries of a group of options are flags of their own."""
        name = _VARIABLES.get(flag.name, flag.name)
        named = replace(flag, name=full_name(self._engine, name))
        if _pools(named):
            yield replace(named, name="runner", value="pooling")
        elif named.name in _ALLOCATOR:
            for name, value in _SETTING.findall(str(named.value)):
                yield Flag(name, options.value_of(value), f"{name}:{value}")
        elif named.name in _GROUPS and isinstance(named.value, dict):
            for name, value in named.value.items():
                yield Flag(name, value, f"{named.name}.{name}={options.written(value)}")
        else:
            yield replace(named, **self._of_prose(named))

    def _of_prose(self, flag: Flag) -> dict[str, Any]:
        """`prefix caching off` and `no custom all-reduce` as the switches that are named so."""
        words = re.sub(r"[\s-]+", "_", flag.words.strip().lower())
        named = _SAID.sub("", words)
        is_on = named == words or words.endswith(_ON)
        switches = {f"enable_{named}": is_on, f"disable_{named}": not is_on}
        known = {name: value for name, value in switches.items() if self._costs.knows(name)}
        if not known:
            return {}
        name, value = next(iter(known.items()))
        return {"name": name, "value": value}

    def take(self, *names: str) -> list[Flag]:
        """The flags of these names, of several of one name the last; nobody else gets them."""
        taken = {each.name: each for each in self._found if each.name in names}
        self._found = [each for each in self._found if each.name not in names]
        return list(taken.values())

    def take_inputs(self) -> Iterator[tuple[str, Flag, Any]]:
        """Flags that are inputs of a record: key, flag and value, None where that is unreadable."""
        for key, names in arguments(self._engine).items():
            for flag in self.take(*names):
                yield key, flag, None if flag.is_prose else as_input(key, flag.value)

    def drop_free(self) -> None:
        """Leave out what takes nothing on the card."""
        self._found = [
            each for each in self._found if each.is_prose or not self._costs.is_free(each.name)
        ]

    def take_words(self, pattern: re.Pattern[str]) -> list[tuple[Flag, re.Match[str]]]:
        """The flags whose words a pattern matches from their start on."""
        found = [(each, pattern.match(each.words)) for each in self._found]
        taken = [(each, match) for each, match in found if match is not None]
        self._found = [each for each, match in found if match is None]
        return taken

    def add(self, flags: Iterable[Flag]) -> None:
        """Flags that stand for others which were taken."""
        self._found += flags

    @property
    def left(self) -> tuple[Flag, ...]:
        """What nobody has taken."""
        return tuple(self._found)


def _pools(flag: Flag) -> bool:
    """Whether a flag of vLLM makes embeddings of a model that generates."""
    if flag.name in ("convert", "task"):
        return bool(flag.value == "embed")
    return flag.name == "pooler_config" and flag.value not in (None, "None")


def read(text: str) -> Iterator[Flag]:
    """Each flag of a text, in its order."""
    for sentence in options.parts(text, r"[;\n]"):
        for clause in options.parts(sentence, r",\s"):
            command = _COMMAND.search(clause)
            end = len(clause) if command is None else command.start()
            for piece in options.parts(clause[:end], ","):
                yield from _piece(piece.strip())
            for name, value, words in options.words(clause[end:].rstrip(", ")):
                yield Flag(name, value, words)


def _piece(piece: str) -> Iterator[Flag]:
    """Assignments with spaces between them, or one flag, or prose."""
    words = [word for word in options.parts(piece, r"\s") if word]
    pairs = [_ASSIGNED.fullmatch(word) for word in words]
    whole = [pair for pair in pairs if pair is not None]
    if whole and len(whole) == len(words):
        for pair in whole:
            yield Flag(*options.named(pair[1], [pair[2]]), pair[0])
    elif len(whole) == len(words) - 1 and pairs[0] is None and _ALONE.fullmatch(words[0]) and whole:
        value = {pair[1]: options.value_of(pair[2]) for pair in whole}
        yield Flag(options.plain(words[0].lstrip("-")), value, piece)
    elif (flag := _FLAG.fullmatch(piece)) is not None:
        yield Flag(*options.named(flag[1], [flag[2]]), piece)
    elif _ALONE.fullmatch(piece) is not None:
        yield Flag(*options.named(piece.lstrip("-"), []), piece)
    elif piece:
        yield Flag("", None, piece)
