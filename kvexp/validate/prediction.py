"""What is predicted for one case."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Outcome = Literal[
    "ok",
    "max_len_too_large",
    "free_memory_too_low",
    "no_cache_blocks",
    "max_num_seqs_too_large",
    "oom",
]

VALUES = (
    "num_blocks",
    "kv_tokens",
    "available_kv_bytes",
    "max_concurrency",
    "weights_bytes",
    "activation_bytes",
    "non_torch_bytes",
    "graphs_bytes",
    "graphs_estimate_bytes",
    "estimated_max_len",
)
"""Names of predicted values. `graphs_bytes` is what capture takes, `graphs_estimate_bytes` what the
engine estimates beforehand; both are of the rank that governs."""


class Interval(NamedTuple):
    """A value with its bounds; all three are equal where nothing is uncertain."""

    low: float
    best: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> "Interval":
        """A value without uncertainty."""
        return cls(value, value, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What is predicted for one case; a value is None where it is not known.

    `used` are the values that were used, by their names in a result.
    `reason` says why there is no answer, or why the engine would not start. `assumptions` are the
    inputs that the record does not give, each with what was taken instead.
    """

    answered: bool
    reason: str = ""
    outcome: Outcome | None = None
    values: Mapping[str, Interval | None] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    used: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def unanswered(cls, reason: str) -> "Prediction":
        """No prediction, with the reason."""
        return cls(answered=False, reason=reason)
