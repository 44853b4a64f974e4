"""A log as a record: which engine printed it, what it said last, and which rank governs."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from kvexp.startup_logs.keys import INPUTS, OUTPUTS
from kvexp.startup_logs.lines import TEXTS, Dialect, Line, Value, argument, values
from kvexp.startup_logs.lmdeploy import LMDEPLOY
from kvexp.startup_logs.sglang import SGLANG
from kvexp.startup_logs.tensorrt_llm import TENSORRT_LLM
from kvexp.startup_logs.vllm import VLLM

DIALECTS = (VLLM, SGLANG, TENSORRT_LLM, LMDEPLOY)

_SERVED = re.compile(r"(?:vllm serve|lmdeploy serve api_server|trtllm-serve) +([^\s-]\S*)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MEMORY = ("available_kv_gib", "weights_gib", "non_torch_gib", "activation_peak_gib")


class UnreadableLog(ValueError):
    """Nothing in a text is a line of an engine that is known."""


def read_log(text: str, name: str) -> dict[str, Any]:
    """The record of a start-up log; of several starts in one text, of the last one.

    `name` becomes the record's id. Where ranks print their own figures, those of the rank with the
    least memory for its cache are taken, and `extra.per_rank` keeps all.

    Raises:
        UnreadableLog: no figure that a known engine prints was found.
    """
    plain = _COLOURS.sub("", text).replace("\\\n", " ").replace("\r", "\n")
    found = [_Reading(dialect) for dialect in DIALECTS]
    for reading in found:
        reading.read(plain)
    best = max(found, key=lambda reading: reading.weight)
    if not best.weight:
        engines = ", ".join(dialect.engine for dialect in DIALECTS)
        count = len(plain.splitlines())
        raise UnreadableLog(
            f"no line about memory or capacity of {engines} was found in {count} lines"
        )
    return best.record(name)


class _Reading:
    """What one dialect finds in a log; every key by rank, the last value counts."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.outcome: str | None = None
        self._inputs: dict[str, Value] = {}
        self._figures: dict[str, dict[str, Value]] = {}
        self._flags: list[str] = []

    @property
    def weight(self) -> int:
        """How much of what the engine prints was found; 0 where it printed nothing."""
        return len(self._figures) + (self.outcome is not None)

    def read(self, text: str) -> None:
        """Read a log: what stands further down counts more."""
        found: list[tuple[int, Callable[[], None]]] = []
        for line in self.dialect.lines:
            for match in line.find_all(text):
                found.append((match.start(), partial(self._read_line, line, match, text)))
        for words in self.dialect.introductions:
            for match in re.finditer(f"{re.escape(words)}.*", text):
                found.append((match.end(), partial(self._read_arguments, match[0])))
        for _, take in sorted(found, key=lambda each: each[0]):
            take()

    def _read_line(self, line: Line, match: re.Match[str], text: str) -> None:
        if line.resets:
            self._figures, self.outcome = {}, None
        start = text.rfind("\n", 0, match.start()) + 1
        rank = re.search(self.dialect.ranks, text[start : match.start() + 1])
        for key, value in values(match):
            if key in INPUTS:
                self._inputs[key] = value
            else:
                self._figures.setdefault(key, {})[rank[1] if rank else ""] = value
        self.outcome = line.outcome or self.outcome

    def _read_arguments(self, text: str) -> None:
        served = _SERVED.match(text)
        if served is not None:
            self._inputs["model"] = served[1]
        for key, names in self.dialect.arguments.items():
            known = (argument(text, name) for name in names)
            value = next((each for each in known if each is not None), None)
            if value is not None:
                self._inputs[key] = value
        for name, flag in self.dialect.flags.items():
            value = argument(text, name)
            if value is not None:
                self._flags.append(f"{flag}={value}")

    def record(self, name: str) -> dict[str, Any]:
        """The record."""
        governing = self._governing()
        figures = {key: self._of(key, governing) for key in self._figures}
        self._settle(figures)
        inputs = {key: _typed(key, self._inputs.get(key)) for key in INPUTS}
        stated = [key for key, value in inputs.items() if value is not None]
        if inputs["gpu_total_gib"] is None and "requested_gib" in figures and self._util:
            inputs["gpu_total_gib"] = round(float(figures["requested_gib"]) / self._util, 2)
        outputs: dict[str, Any] = {key: figures.pop(key, None) for key in OUTPUTS}
        started = outputs["kv_tokens"] is not None or outputs["num_gpu_blocks"] is not None
        outputs["error"] = self.outcome or ("none" if started else None)
        figures.pop("generation", None)
        per_rank = self._per_rank()
        return {
            "id": name,
            "engine": self.dialect.engine,
            **inputs,
            "explicit": ["engine", *stated, *(k for k in OUTPUTS if outputs[k] is not None)],
            "outputs": outputs,
            "extra": {**figures, **({"per_rank": per_rank} if per_rank else {})},
        }

    @property
    def _util(self) -> float:
        value = self._inputs.get("gpu_memory_utilization")
        return value if isinstance(value, int | float) else 0.0

    def _governing(self) -> str | None:
        """The rank with the least memory for its cache."""
        left = {rank: float(v) for rank, v in self._figures.get("available_kv_gib", {}).items()}
        return min(left, key=left.__getitem__, default=None)

    def _of(self, key: str, governing: str | None) -> Value:
        by_rank = self._figures[key]
        if key in self.dialect.least:
            return min(by_rank.values(), key=float)
        return by_rank[governing] if governing in by_rank else list(by_rank.values())[-1]

    def _per_rank(self) -> dict[str, dict[str, Value]]:
        ranks = dict.fromkeys(rank for key in _MEMORY for rank in self._figures.get(key, {}))
        if len(ranks) < 2:
            return {}
        return {
            rank or "driver": {
                key: self._figures[key][rank]
                for key in _MEMORY
                if rank in self._figures.get(key, {})
            }
            for rank in ranks
        }

    def _settle(self, figures: dict[str, Value]) -> None:
        """Figures that are sums of others, and inputs that only figures tell."""
        halves = [figures.pop(key, None) for key in ("k_gib", "v_gib")]
        if None not in halves:
            figures["available_kv_gib"] = round(sum(float(each or 0) for each in halves), 4)
        peak, weights = figures.get("peak_torch_gib"), figures.get("weights_gib")
        if peak is not None and weights is not None:
            figures["activation_peak_gib"] = round(float(peak) - float(weights), 4)
        block = figures.get("block_gib")
        if block is not None and "num_gpu_blocks" in figures:
            figures["available_kv_gib"] = float(block) * float(figures["num_gpu_blocks"])
        fraction = figures.pop("fraction", None)
        if fraction is not None and "gpu_memory_utilization" not in self._inputs:
            self._inputs["gpu_memory_utilization"] = round(float(fraction), 4)
        if self._flags:
            self._inputs["other_flags"] = "; ".join(dict.fromkeys(self._flags))
        generation = figures.get("generation")
        version = self._inputs.get("engine_version")
        if generation is not None and version is not None:
            self._inputs["engine_version"] = f"{version} ({generation})"
        tp, pp = self._inputs.get("tp"), self._inputs.get("pp", 1)
        if isinstance(tp, int) and isinstance(pp, int):
            self._inputs["num_gpus"] = tp * pp


def _typed(key: str, value: Value | None) -> Value | bool | None:
    """A value as a record holds it."""
    if value is None or (key == "weight_dtype" and value == "auto"):
        return None
    if key == "enforce_eager":
        return str(value).lower() in ("true", "1")
    if key in TEXTS:
        return str(value)
    return value if not isinstance(value, str) else None
