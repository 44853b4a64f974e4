"""A transformers configuration from a config.json."""

import json
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from kvexp.errors import InvalidValue
from kvexp.simulate.errors import Untraceable


def read_facts(path: str) -> dict[str, Any]:
    """What a config.json holds, or the one in a folder.

    Raises:
        InvalidValue: there is no such file, or it names no architecture.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        facts["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidValue(
            f"{path} is not a config.json of transformers: {type(error).__name__}: {error}"
        ) from None
    return facts


def make_config(facts: Mapping[str, Any]) -> Any:
    """The configuration with these facts.

    Some configurations refuse to be made from facts that contradict each other (a list of layers
    longer than the number of layers) although the model can be built; they are made from the
    defaults and changed afterwards.

    Raises:
        Untraceable: transformers does not know the architecture, or refuses the facts.
    """
    from transformers import AutoConfig  # noqa: PLC0415

    from kvexp.simulate.building import one_line, quiet  # noqa: PLC0415

    kind = facts["model_type"]
    others = {name: value for name, value in facts.items() if name != "model_type"}
    for make in (_made_from, _changed_to):
        try:
            with quiet():
                return make(AutoConfig, kind, deepcopy(others))  # some change what they are given
        except Exception as error:  # each release has its own validation errors
            problem = one_line(error)
    raise Untraceable(f"transformers refuses its configuration: {problem}")


def _made_from(auto: Any, kind: str, facts: dict[str, Any]) -> Any:
    return auto.for_model(kind, **facts)


def _changed_to(auto: Any, kind: str, facts: dict[str, Any]) -> Any:
    config = auto.for_model(kind)
    _change(config, facts)
    return config


def _change(config: Any, facts: dict[str, Any]) -> None:
    parts = vars(config)
    for name, value in facts.items():
        if isinstance(value, dict) and hasattr(parts.get(name), "to_dict"):
            _change(parts[name], value)
        elif name != "model_type":
            with suppress(Exception):  # what is derived from other facts cannot be set
                setattr(config, name, value)
