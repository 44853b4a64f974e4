"""A log as a record: which engine printed it, what it said last, and which rank governs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvexp.startup_logs.keys import INPUTS, OUTPUTS
from kvexp.startup_logs.lines import DRAFT, TEXTS, Dialect, Introduction, Line, Value, values
from kvexp.startup_logs.lmdeploy import LMDEPLOY
from kvexp.startup_logs.options import human_int, inside, items, served, words, written
from kvexp.startup_logs.sglang import SGLANG
from kvexp.startup_logs.tensorrt_llm import TENSORRT_LLM
from kvexp.startup_logs.text import lines_within, unwrapped
from kvexp.startup_logs.vllm import VLLM

DIALECTS = (VLLM, SGLANG, TENSORRT_LLM, LMDEPLOY)
_BY_ENGINE = {dialect.engine: dialect for dialect in DIALECTS}

_OF_THE_MACHINE = ("engine_version", "gpu", "gpu_total_gib")
"""Inputs that the next start in a log has too."""

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours, and how a terminal clears a line
_MEMORY = ("available_kv_gib", "weights_gib", "non_torch_gib", "activation_peak_gib")


def arguments(engine: str) -> Mapping[str, Sequence[str]]:
    """Names of an engine's options by the keys of a record that they are."""
    dialect = _BY_ENGINE.get(engine.lower())
    return {} if dialect is None else dialect.arguments


def full_name(engine: str, option: str) -> str:
    """The full name of an engine's option that may be a short one."""
    dialect = _BY_ENGINE.get(engine.lower())
    return option if dialect is None else dialect.aliases.get(option, option)


def as_input(key: str, value: Any) -> Value | bool | None:
    """An option's value as a record holds it under a key, None where it is none."""
    return _typed(key, _as_input(key, value))


class UnreadableLog(ValueError):
    """Nothing in a text is a line of an engine that is known."""


def read_log(text: str, name: str, gpu: str | None = None) -> dict[str, Any]:
    """The record of a start-up log; of several starts in one text, of the last one.

    `name` becomes the record's id, `gpu` is the card where the log names none. Where ranks print
    their own figures, those of the rank with the least memory for its cache are taken, and
    `extra.per_rank` keeps all.

    Raises:
        UnreadableLog: no figure that a known engine prints was found.
    """
    said = _CONTROLS.sub("", lines_within(text))
    plain = unwrapped(said.replace("\\\n", " ").replace("\r", "\n"))
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
    record = best.record(name)
    if gpu is not None and record["gpu"] is None:
        record |= {"gpu": gpu, "explicit": [*record["explicit"], "gpu"]}
    return record


@dataclass
class _Start:
    """What was read of one start; every figure by rank, the last value counts."""

    inputs: dict[str, Value] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, dict[str, Value]] = field(default_factory=dict)
    outcome: str | None = None
    engines: set[str] = field(default_factory=set)

    @property
    def has_output(self) -> bool:
        """Whether the engine said anything of its memory."""
        return bool(self.figures) or self.outcome is not None


class _Reading:
    """What one dialect finds in a log.

    A start ends where the next one's engine begins. What is printed before that, after the last
    start's engine began, belongs to the next start if there is one.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._start = _Start()
        self._next: _Start | None = None

    @property
    def weight(self) -> int:
        """How much of what the engine prints was found; 0 where it printed nothing."""
        return len(self._figures) + (self._start.outcome is not None)

    @property
    def _figures(self) -> dict[str, dict[str, Value]]:
        return self._start.figures

    def read(self, text: str) -> None:
        """Read a log: what stands further down counts more."""
        found: list[tuple[int, Callable[[], None]]] = []
        for line in self.dialect.lines:
            for match in line.find_all(text):
                found.append((match.start(), partial(self._read_line, line, match, text)))
        for known in self.dialect.introductions:
            for match in re.finditer(f"{re.escape(known.text)}(.*)", text):
                found.append((match.end(), partial(self._read_options, known, match[1])))
        for _, take in sorted(found, key=lambda each: each[0]):
            take()
        if self._next is not None:
            self._start.inputs |= self._next.inputs
            self._start.flags |= self._next.flags

    def _read_line(self, line: Line, match: re.Match[str], text: str) -> None:
        start = text.rfind("\n", 0, match.start()) + 1
        before = text[start : match.start() + 1]
        if line.resets:
            self._begin(re.search(self.dialect.engines, before))
        elif line.precedes:
            self._precede()
        found = re.search(self.dialect.ranks, before)
        rank = found[1] if found else ""
        of_draft = rank in self._figures.get(line.after, {})
        for key, value in (*values(match), *line.states):
            if of_draft:
                if key not in INPUTS:
                    self._figures.setdefault(f"{DRAFT}{key}", {})[rank] = value
            elif key in INPUTS:
                self._of_inputs.inputs[key] = value
            elif key in self.dialect.costs.defaults and key not in OUTPUTS:
                self._of_inputs.flags[key] = value
            else:
                self._figures.setdefault(key, {})[rank] = value
        self._start.outcome = line.outcome or self._start.outcome

    def _begin(self, named: re.Match[str] | None) -> None:
        """An engine begins: another one of the same start, or a new start."""
        engine, begun = "" if named is None else named[0], self._start.engines
        is_another = not begun or bool(engine and "" not in begun and engine not in begun)
        if not is_another and (self.dialect.begins_once or self._start.has_output):
            following = self._next or _Start()
            kept = {key: v for key, v in self._start.inputs.items() if key in _OF_THE_MACHINE}
            self._start = replace(following, inputs=kept | following.inputs)
            self._next = None
        self._start.engines.add(engine)

    def _precede(self) -> None:
        if self._start.engines and self._next is None:
            self._next = _Start()

    @property
    def _of_inputs(self) -> _Start:
        """The start that inputs are of which are read now."""
        return self._next or self._start

    def _read_options(self, known: Introduction, text: str) -> None:
        if known.precedes:
            self._precede()
        start, options = self._of_inputs, self._options(known, text)
        for key, names in self.dialect.arguments.items():
            given = [options.pop(name, None) for name in names]
            value = next((each for each in given if each is not None), None)
            if value is not None:
                start.inputs[key] = _as_input(key, value)
        start.flags |= {name: v for name, v in options.items() if self._is_flag(known, name, v)}

    def _options(self, known: Introduction, text: str) -> dict[str, Any]:
        """Options by their full names, those of groups too."""
        if known.is_command:
            text = text.partition("`")[0]
            found = {name: value for name, value, _ in words(text)}
            found["model"] = served(text) or found.get("model")
        else:
            found = items(inside(text.strip().removeprefix("{")))
        found = {self.dialect.aliases.get(name, name): value for name, value in found.items()}
        for group in self.dialect.groups:
            held = found.pop(group, None)
            for name, value in (held if isinstance(held, dict) else {}).items():
                found[f"{group}.{name}"] = value
                found.setdefault(name, value)
        return found

    def _is_flag(self, known: Introduction, name: str, value: Any) -> bool:
        """Whether an option says something of a start's memory."""
        costs = self.dialect.costs
        if value is None:
            return False
        if known.is_complete:
            usual = costs.defaults
            return name in usual and value not in (usual[name], "None", [], {})
        return "." not in name and not costs.is_free(name)

    def record(self, name: str) -> dict[str, Any]:
        """The record."""
        governing = self._governing()
        figures = {key: self._of(key, governing) for key in self._figures}
        self._settle(figures)
        inputs = {key: _typed(key, self._start.inputs.get(key)) for key in INPUTS}
        stated = [key for key, value in inputs.items() if value is not None]
        if inputs["gpu_total_gib"] is None and "requested_gib" in figures and self._util:
            inputs["gpu_total_gib"] = round(float(figures["requested_gib"]) / self._util, 2)
        outputs: dict[str, Any] = {key: figures.pop(key, None) for key in OUTPUTS}
        started = outputs["kv_tokens"] is not None or outputs["num_gpu_blocks"] is not None
        outputs["error"] = self._start.outcome or ("none" if started else None)
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
        value = self._start.inputs.get("gpu_memory_utilization")
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

    def _settle_draft(self, figures: dict[str, Value]) -> None:
        """A draft that was loaded before the pool was sized leaves less free for it."""
        free, pool = (figures.get(f"{DRAFT}free_gib"), figures.get("avail_after_pool_gib"))
        if free is not None and (pool is None or float(free) > float(pool)):
            figures["free_gib"] = free
        figures.pop(f"{DRAFT}free_gib", None)
        figures.pop(f"{DRAFT}kv_tokens", None)
        cache = figures.pop(f"{DRAFT}available_kv_gib", None)
        if cache is not None:
            figures[f"{DRAFT}kv_gib"] = cache

    def _settle(self, figures: dict[str, Value]) -> None:
        """Figures that are sums of others, and inputs that only figures tell."""
        for of in ("", DRAFT):
            halves = [figures.pop(f"{of}{key}", None) for key in ("k_gib", "v_gib")]
            if None not in halves:
                total = round(sum(float(each or 0) for each in halves), 4)
                figures[f"{of}available_kv_gib"] = total
            pools = figures.pop(f"{of}swa_pool_gib", None)
            if pools is not None:
                figures[f"{of}available_kv_gib"] = pools
        self._settle_draft(figures)
        peak, weights = figures.get("peak_torch_gib"), figures.get("weights_gib")
        if peak is not None and weights is not None:
            figures["activation_peak_gib"] = round(float(peak) - float(weights), 4)
        block = figures.get("block_gib")
        if block is not None and "num_gpu_blocks" in figures:
            figures["available_kv_gib"] = float(block) * float(figures["num_gpu_blocks"])
        fraction = figures.pop("fraction", None)
        if fraction is not None and "gpu_memory_utilization" not in self._start.inputs:
            self._start.inputs["gpu_memory_utilization"] = round(float(fraction), 4)
        if self._start.flags:
            flags = (f"{name}={written(value)}" for name, value in self._start.flags.items())
            self._start.inputs["other_flags"] = "; ".join(flags)
        generation = figures.get("generation")
        version = self._start.inputs.get("engine_version")
        if generation is not None and version is not None:
            self._start.inputs["engine_version"] = f"{version} ({generation})"
        tp, pp = self._start.inputs.get("tp"), self._start.inputs.get("pp", 1)
        if isinstance(tp, int) and isinstance(pp, int):
            self._start.inputs["num_gpus"] = tp * pp


def _as_input(key: str, value: Any) -> Value:
    """An option's value as a line would print it."""
    if key in TEXTS:
        return str(value).removeprefix("torch.")
    plain = human_int(value)
    return plain if isinstance(plain, int | float) and not isinstance(plain, bool) else str(value)


def _typed(key: str, value: Value | None) -> Value | bool | None:
    """A value as a record holds it; engines print -1 and 0 for what is not set."""
    if value is None or (key == "weight_dtype" and value == "auto"):
        return None
    if key == "enforce_eager":
        return str(value).lower() in ("true", "1")
    if str in INPUTS[key]:
        return str(value)
    if isinstance(value, str) or value <= 0:
        return None
    return value if isinstance(value, int) or float in INPUTS[key] else None
