"""Which card of the catalogue a log's text means, and what is assumed where it is none."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvexp.units import GIB

USABLE_SHARE = 0.985
"""Of a card's nominal size, what the driver reports: 23.6 of 24, 79.2 of 80, 47.4 of 48 GiB."""

_SAME_MEMORY = {
    "h800": "h100",
    "l20": "l40s",
    "l40": "l40s",
    "a10": "a10g",
    "gb200": "b200",
    "gb300": "b300",
    "mi350x": "mi355x",
}
"""Cards by the name of one with the same memory; engines know them by their own."""

_NAMES = {"spark": "gb10"}
_LEFT_OUT = {"rtx"}  # of names such as 3090
_WINDOWS = {"wsl", "wsl2"}
"""Words of a Linux on Windows, whose driver reports all of a card."""

_OTHERS = {"ti", "laptop", "mobile"}
"""Words of a name whose card has another memory than the one without them."""

_SIZE = re.compile(r"(\d+)\s*gb\b")
_NOMINAL_GB = {"a30": 24, "a4000": 16, "a4500": 20, "mi210": 64, "mi300a": 128, "mi325x": 256}
"""Cards that are sold in one size, of which no log was seen."""

_TOLERANCE = 0.03
_SAME_SIZE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Facts of a card by the keys of the group `gpu`, and what was assumed."""

    facts: Mapping[str, Any]
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards that are known, by option."""

    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, folders: Iterable[Path]) -> "Cards":
        """The cards in the folders `gpu` below these."""
        known: dict[str, Mapping[str, Any]] = {}
        for path in (path for each in folders for path in sorted((each / "gpu").glob("*.yaml"))):
            facts = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
            if isinstance(facts, dict):
                known.setdefault(path.stem, {str(key): value for key, value in facts.items()})
        return cls(known)

    def find(self, text: str | None, total_gib: float | None) -> Card | None:
        """The card that a text means, with the stated total; None where neither tells its size."""
        words = _words(text or "")
        option = self._option(words, total_gib)
        if option is None:
            return _unknown(text, words, total_gib, self._link(total_gib))
        facts = dict(self.known[option])
        facts["name"] = _own_name(str(facts.get("name")), text or "")
        if total_gib is None and words & _WINDOWS:
            total = math.ceil(self.total_gib(option))
            return Card(
                facts=facts | _total(float(total)),
                assumptions=(f"gpu: all {total} GiB of {option}, as Windows' driver reports them",),
            )
        if total_gib is None:
            return Card(facts=facts, assumptions=(f"gpu: {option}'s total of the catalogue",))
        return Card(facts=facts | _total(total_gib))

    def _link(self, total_gib: float | None) -> str | None:
        """How cards of about this size are linked: as the one of the nearest total is."""
        if total_gib is None:
            return None
        off = {option: abs(self.total_gib(option) / total_gib - 1) for option in self.known}
        nearest = min(off, key=lambda option: off[option], default=None)
        if nearest is None or off[nearest] > _SAME_SIZE:
            return None
        return str(self.known[nearest].get("interconnect", "pcie"))

    def total_gib(self, option: str) -> float:
        """What a card has in all."""
        return _gib_of(self.known[option])

    def knows(self, text: str) -> bool:
        """Whether a text means a card, or one that is sold in several sizes."""
        return self.find(text, None) is not None or bool(self.sizes(text))

    def sizes(self, text: str | None) -> tuple[str, ...]:
        """Options of a card that is sold in several sizes, of which a text names none; by size."""
        words = _words(text or "")
        found = [o for o in self.known if _model(o) <= words and _model(o) != _parts(o)]
        return tuple(sorted(found, key=self.total_gib))

    def _option(self, words: frozenset[str], total_gib: float | None) -> str | None:
        """The option whose words all stand in the text, the one with the most words.

        Sizes in its name need not, where the total decides; an exact total does without a text.
        """
        totals = {option: self.total_gib(option) for option in self.known}
        if not words and total_gib is not None:
            return next((option for option in totals if totals[option] == total_gib), None)
        named = words & _OTHERS
        whole = [o for o in self.known if _parts(o) <= words and named <= _parts(o)]
        whole += [o for o in self.known if _words(str(self.known[o].get("name"))) == words]
        sizes = _sizes(words)
        if whole and total_gib is None and sizes:
            of_size = [o for o in self.known if any(_is_size(totals[o], gb) for gb in sizes)]
            related = [o for o in of_size if _parts(o) & words]
            whole = [o for o in whole if o in of_size] or related
        if whole or total_gib is None:
            return max(whole, key=lambda option: len(_parts(option)), default=None)
        fitting = [o for o in self.known if abs(totals[o] / total_gib - 1) < _TOLERANCE]
        return next((option for option in fitting if _model(option) <= words), None)


def _parts(option: str) -> set[str]:
    """Words of an option that a text has to name."""
    return set(option.split("_")) - _LEFT_OUT


def _model(option: str) -> set[str]:
    return {part for part in _parts(option) if not _SIZE.fullmatch(part)}


def _sizes(words: frozenset[str]) -> list[int]:
    """The sizes that a text names, in GB."""
    return [int(match[1]) for word in sorted(words) if (match := _SIZE.fullmatch(word))]


def _is_size(total_gib: float, nominal_gb: int) -> bool:
    """Whether a card with this total is sold as one of so many GB: a T4 has 14.56 of 16."""
    return 0.88 < total_gib / nominal_gb < 1.03


@lru_cache(maxsize=1024)
def _words(text: str) -> frozenset[str]:
    """Words of a text as an option writes them: `A100-80 GB` as `a100` and `80gb`."""
    lower = re.sub(r"(\d)(ti|super)\b", r"\1 \2", text.lower())
    lower = re.sub(r"\b(\d+)\s*gb?\b", r"\1gb", lower)
    same = _SAME_MEMORY | _NAMES
    return frozenset(same.get(word, word) for word in re.findall(r"[a-z0-9]+", lower))


def _own_name(name: str, text: str) -> str:
    """The name of a card that a text calls by another one with the same memory."""
    for word in re.findall(r"[a-z0-9]+", text.lower()):
        if word in _SAME_MEMORY:
            return name.replace(_SAME_MEMORY[word].upper(), word.upper())
    return name


def _total(total_gib: float) -> dict[str, Any]:
    """The total as an override: a figure of two digits is a printed one, others are exact."""
    if round(total_gib, 2) == total_gib:
        return {"total_bytes": f"{total_gib}GiB", "total_printed_gib": total_gib}
    return {"total_bytes": round(total_gib * GIB), "total_printed_gib": None}


def _gib_of(facts: Mapping[str, Any]) -> float:
    text = str(facts.get("total_bytes", ""))
    if text.endswith("GiB"):
        return float(text[:-3])
    return float(text) / GIB if text.isdigit() else 0.0


def _unknown(
    text: str | None, words: frozenset[str], total_gib: float | None, link: str | None
) -> Card | None:
    """A card of which only the size is known, and from it how several of them are linked."""
    name = text or "unknown card"
    if total_gib is not None:
        facts = {"name": name, **_total(total_gib)}
        if link is None or "pcie" in words:
            return Card(facts=facts, assumptions=(f"gpu: only the total of {name!r} is known",))
        assumed = f"gpu: only the total of {name!r} is known, its size has {link}"
        return Card(facts=facts | {"interconnect": link}, assumptions=(assumed,))
    sizes = _sizes(words) or [_NOMINAL_GB[word] for word in words if word in _NOMINAL_GB]
    if not sizes:
        return None
    share = 1.0 if words & _WINDOWS else USABLE_SHARE
    total = int(max(sizes) * share * GIB)
    assumed = f"gpu: {name!r} is no card of the catalogue, {share:.1%} of {max(sizes)} GiB"
    return Card(facts={"name": name, "total_bytes": total}, assumptions=(assumed,))
