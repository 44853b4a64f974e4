"""One section of a config.json, read with the types that its keys must have.

Null is the same as absent, whatever transformers' writer chose. What is assumed in the place of an
absent key is noted; what has the wrong type is an error that names the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvexp.errors import InvalidValue
from kvexp.request import LARGEST, LIMITS


@dataclass(frozen=True, slots=True)
class Section:
    """A dictionary of a config, its place in the file and the notes made while reading it.

    `outer` is the file's top level: the few keys that exporters keep there are looked up in it too.
    """

    values: Mapping[str, Any]
    path: str = ""
    outer: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Whether any of the keys has a value."""
        return any(self.values.get(name) is not None for name in names)

    def name_of(self, *names: str) -> str:
        """The first of the keys that has a value, else the first, with its place."""
        found = next((name for name in names if self.has(name)), names[0])
        return f"{self.path}.{found}" if self.path else found

    def get(self, *names: str) -> Any:
        """The value of the first key that has one."""
        return next((self.values[name] for name in names if self.has(name)), None)

    def integer(self, *names: str, least: int = 1, most: int | None = None) -> int | None:
        """A whole number, or None where no key has a value.

        Raises:
            InvalidValue: it is no whole number from `least` to `most`, by default the keys' limit.
        """
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(names, "a whole number", value)
        if most is None:
            most = min((LIMITS[name] for name in names if name in LIMITS), default=LARGEST)
        if not least <= value <= most:
            raise self.wrong(names, f"at least {least} and no more than {most}", value)
        return value

    def required(self, *names: str, least: int = 1) -> int:
        """A whole number that the config must state.

        Raises:
            InvalidValue: it is absent; the message names the key.
        """
        value = self.integer(*names, least=least)
        if value is None:
            raise self.missing(*names)
        return value

    def assumed(
        self, *names: str, default: int, why: str, least: int = 1, most: int | None = None
    ) -> int:
        """A whole number, or a default that is noted."""
        value = self.integer(*names, least=least, most=most)
        if value is None:
            self.assume(f"{self.name_of(*names)} is not given: {default} ({why})")
            return default
        return value

    def of_layers(self, *names: str, least: int = 1) -> int | None:
        """A whole number that may be stated once for each layer.

        Raises:
            InvalidValue: the layers differ.
        """
        values = self.get(*names)
        if not isinstance(values, list):
            return self.integer(*names, least=least)
        if not values or any(value != values[0] for value in values):
            raise self.wrong(names, "one number for all layers", values)
        place = self.name_of(*names).rpartition(".")[2]
        return Section({place: values[0]}, self.path).integer(place, least=least)

    def at(self, layer: int, *names: str) -> "Section":
        """The section with one layer's value for keys that are stated once for each layer."""
        listed = {name: self.values[name] for name in names if isinstance(self.get(name), list)}
        for name, values in listed.items():
            if layer >= len(values):
                raise self.wrong((name,), f"more than {layer} values", values)
        own = {name: values[layer] for name, values in listed.items()}
        return Section({**self.values, **own}, self.path, self.outer, self.notes)

    def number(self, *names: str) -> float | None:
        """A number, or None where no key has a value."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(names, "a number", value)
        if not abs(value) <= LARGEST:
            raise self.wrong(names, f"no more than {LARGEST}", value)
        return float(value)

    def flag(self, *names: str) -> bool | None:
        """True or false, or None where no key has a value."""
        value = self.get(*names)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(names, "true or false", value)
        return value

    def text(self, *names: str) -> str | None:
        """A text, or None where no key has a value."""
        value = self.get(*names)
        if value is not None and not isinstance(value, str):
            raise self.wrong(names, "a text", value)
        return value

    def items(self, *names: str) -> list[Any] | None:
        """A list, or None where no key has a value."""
        value = self.get(*names)
        if value is not None and not isinstance(value, list):
            raise self.wrong(names, "a list", value)
        return value

    def integers(self, *names: str) -> list[int] | None:
        """A list of whole numbers, or None where no key has a value."""
        value = self.items(*names)
        if value is not None and any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.wrong(names, "a list of whole numbers", value)
        return value

    def texts(self, *names: str) -> list[str] | None:
        """A list of texts, or None where no key has a value."""
        value = self.items(*names)
        if value is not None and not all(isinstance(v, str) for v in value):
            raise self.wrong(names, "a list of texts", value)
        return value

    def inner(self, *names: str) -> "Section | None":
        """A section inside this one, or None where no key has a value.

        Raises:
            InvalidValue: the value is no section.
        """
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(names, "a section", value)
        return Section(value, self.name_of(*names), self.outer, self.notes)

    def around(self) -> "Section":
        """The file's top level, with the same notes."""
        return Section(self.outer, "", self.outer, self.notes)

    def assume(self, note: str) -> None:
        """Note an assumption, once."""
        if note not in self.notes:
            self.notes.append(note)

    def missing(self, *names: str) -> InvalidValue:
        """The error for an absent key."""
        others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        return InvalidValue(f"config.json: {self.name_of(*names)}{others} is missing")

    def wrong(self, names: tuple[str, ...], expected: str, value: object) -> InvalidValue:
        """The error for a value that cannot be."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return InvalidValue(f"config.json: {self.name_of(*names)} must be {expected}, got {shown}")
