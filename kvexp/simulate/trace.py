"""What tracing finds: allocations and frees of loading and of one forward, each with its cause."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Cause:
    """Where an allocation comes from."""

    operator: str
    module: str
    line: str


@dataclass(slots=True)
class Trace:
    """Allocations and frees in order; plain data, whatever torch made it.

    In `load` and `events` a number from 0 on is an allocation of so many bytes and -i-1 frees the
    i-th allocation of that list. `causes` has one entry an allocation of `events`, an index into
    `cause_table`. `workspaces` are (position in `events`, name): library workspaces that are
    allocated there unless they exist. `optional` are allocations (by number) that happen by one
    reading of a rule only; `doubts` says which rules those are, `backends` what ran the attention.
    `modelled` are allocations (by number) that come from the device's rules.
    """

    load: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    causes: list[int] = field(default_factory=list)
    cause_table: list[Cause] = field(default_factory=list)
    workspaces: list[tuple[int, str]] = field(default_factory=list)
    optional: list[int] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    modelled: list[int] = field(default_factory=list)
    backends: dict[str, int] = field(default_factory=dict)
    weights_bytes: int = 0
    num_operators: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The trace as JSON data."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**data, "cause_table": [list(asdict(cause).values()) for cause in self.cause_table]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Trace":
        """The trace that `as_dict` described.

        Raises:
            KeyError, TypeError, ValueError: the data is no trace.
        """
        trace = cls(
            load=_integers(data["load"]),
            events=_integers(data["events"]),
            causes=_integers(data["causes"]),
            cause_table=[Cause(*map(str, cause)) for cause in data["cause_table"]],
            workspaces=[(int(at), str(name)) for at, name in data["workspaces"]],
            optional=_integers(data["optional"]),
            doubts=[str(doubt) for doubt in data["doubts"]],
            modelled=_integers(data["modelled"]),
            backends={str(name): int(count) for name, count in data["backends"].items()},
            weights_bytes=int(data["weights_bytes"]),
            num_operators=int(data["num_operators"]),
        )
        trace.check()
        return trace

    def check(self) -> None:
        """Do nothing where every free has an allocation and every allocation a cause.

        Raises:
            ValueError: it is not so.
        """
        for events in (self.load, self.events):
            live: set[int] = set()
            count = 0
            for event in events:
                if event >= 0:
                    live.add(count)
                    count += 1
                elif -event - 1 in live:
                    live.remove(-event - 1)
                else:
                    raise ValueError(f"{event} frees what is not allocated")
        if len(self.causes) != count:
            raise ValueError(f"{count} allocations, {len(self.causes)} causes")
        if any(not 0 <= cause < len(self.cause_table) for cause in self.causes):
            raise ValueError("a cause is not in the table")

    def cause(self, number: int) -> Cause:
        """Why the allocation of that number happened."""
        return self.cause_table[self.causes[number]]


def _integers(values: Sequence[Any]) -> list[int]:
    if not all(type(value) is int for value in values):
        raise ValueError("not all are integers")
    return list(values)
