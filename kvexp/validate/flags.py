"""Flags of a command line, in the words of whoever kept the log."""

import re
from collections.abc import Iterator

_FLAG = re.compile(r"-*([a-z][a-z0-9_-]+)(?:[ =:]+(.+))?", re.IGNORECASE)


def read(text: str | None) -> Iterator[tuple[str, str | None, str]]:
    """Each flag: its name with underscores, its value where it has one, and its own words."""
    for words in re.split(r"[;,\n]|\s(?=--)", text or ""):
        match = _FLAG.fullmatch(words.strip())
        if match is not None:
            name = match[1].lower().replace("-", "_")
            yield name, match[2], words.strip()
        elif words.strip():
            yield "", None, words.strip()


def as_option(value: str | None) -> str | bool:
    """A flag's value as an override's: a flag alone is true."""
    return True if value is None else value.strip("'\" ")


def is_lora(name: str, words: str) -> bool:
    """Whether a flag, or what stands for it, turns LoRA on."""
    return name == "enable_lora" or words.lower().startswith("lora enabled")


def as_limits(value: str) -> dict[str, int]:
    """Limits of modalities: `image=1 video=0` or {"image": 1, "video": 0}."""
    return {name: int(limit) for name, limit in re.findall(r"(image|video|audio)\W+(\d+)", value)}
