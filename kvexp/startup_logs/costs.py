"""What an engine's options mean for memory: flags.yaml, the one place that says so."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The options of one engine, by whether they cost anything and a rule says how much.

    `rule` has their defaults, `no_rule` what an option changes; `defaults` are of both.
    """

    rule: Mapping[str, Any]
    no_rule: Mapping[str, str]
    defaults: Mapping[str, Any]
    nothing: re.Pattern[str]

    def is_free(self, name: str) -> bool:
        """Whether an option takes nothing on the card."""
        return name not in self.defaults and self.nothing.fullmatch(name) is not None

    def knows(self, name: str) -> bool:
        """Whether an option has a place in the lists."""
        return name in self.defaults or self.is_free(name)


@cache
def costs_of(engine: str) -> Costs:
    """The options of an engine by the name that records give it; of others the common ones."""
    data = _data()
    own = data.get(engine.lower(), {})
    rule, no_rule = own.get("rule", {}), own.get("no_rule", {})
    return Costs(
        rule=rule,
        no_rule={name: changes for name, (_, changes) in no_rule.items()},
        defaults={**rule, **{name: default for name, (default, _) in no_rule.items()}},
        nothing=re.compile("|".join((*data["common"]["nothing"], *own.get("nothing", ())))),
    )


@cache
def _data() -> Any:
    return yaml.safe_load(files("kvexp.startup_logs").joinpath("flags.yaml").read_text("utf-8"))
