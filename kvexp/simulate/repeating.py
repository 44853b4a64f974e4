"""A shortcut: of equal layers a few are run, and what they allocate is repeated for the others.

The model is built whole, so that loading stays as it is. Of its layers those run that come before
the kinds repeat, one more, two periods, and the last ones; the second period must do what the first
did, and is then repeated. The outcome is the trace that all layers would have given. Where that
cannot be known beforehand, or is found not to be so, the shortcut is refused.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvexp.errors import InvalidValue
from kvexp.simulate.trace import Cause, Trace

_PLAIN = (int, float, str, bool, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_NUMBERS = ("layer", "idx", "index")  # in names of attributes that may hold a layer's number
_FEWEST = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a trace had come when a layer began."""

    layer: int
    event: int
    allocation: int
    operators: int
    backends: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Layers are skipped from `first_skipped` on: `count` periods of `period` layers."""

    path: str
    layers: Sequence[Any]
    period: int
    first_skipped: int
    count: int

    @property
    def kept(self) -> list[int]:
        """The numbers of the layers that run."""
        end = self.first_skipped + self.count * self.period
        return [*range(self.first_skipped), *range(end, len(self.layers))]

    def skip(self, names: Mapping[Any, str]) -> dict[int, int]:
        """Take the others out of the model; the numbers of those that stay, by identity."""
        from torch import nn  # noqa: PLC0415

        owner, _, name = self.path.rpartition(".")
        by_path = {path: module for module, path in names.items()}
        setattr(by_path[owner], name, nn.ModuleList([self.layers[number] for number in self.kept]))
        return {id(self.layers[number]): number for number in self.kept}


def plan(names: Mapping[Any, str]) -> Plan | None:
    """Which layers of a model need not run; None where there are too few to gain anything.

    `names`: its modules and their paths.

    Raises:
        InvalidValue: its layers cannot be told to be equal; the message says which, and why.
    """
    owner, path, layers = _stack(names)
    _check_hooks(names)
    _check_loop(owner, path)
    _check_own_weights(layers, path)
    kinds = [_kind(layer, number) for number, layer in enumerate(layers)]
    start, period = _period(kinds, path)
    first_skipped = start + 1 + 2 * period
    count = (len(layers) - first_skipped - 1) // period
    return Plan(path, layers, period, first_skipped, count) if count > 0 else None


def expand(trace: Trace, marks: Sequence[Mark], found: Plan) -> Trace:
    """The trace of all layers, from that of those that were kept.

    Raises:
        InvalidValue: the kept layers did not allocate alike, or not in the order of their numbers.
    """
    if [mark.layer for mark in marks] != found.kept:
        raise _refused(f"the layers of {found.path} do not run once each in order")
    first, second, after = (marks[found.first_skipped - back * found.period] for back in (2, 1, 0))
    _check_alike(trace, (first, second, after), found)
    return _Expansion(trace, first, second, after, found).build()


# --- what is known before the forward ----------------------------------------------------------


def _stack(names: Mapping[Any, str]) -> tuple[Any, str, list[Any]]:
    """The module with the longest list of layers, the list's path and the layers."""
    from torch import nn  # noqa: PLC0415

    lists = [
        (len(module), path) for module, path in names.items() if isinstance(module, nn.ModuleList)
    ]
    top = [
        (count, path)
        for count, path in lists
        if not any(path.startswith(f"{other}.") for _, other in lists)
    ]
    longest = [path for count, path in top if count == max(top)[0] and count >= _FEWEST]
    if len(longest) != 1:
        raise _refused(
            f"the model has {len(longest)} longest lists of layers"
            if longest
            else "no list of layers"
        )
    by_path = {path: module for module, path in names.items()}
    return by_path[longest[0].rpartition(".")[0]], longest[0], list(by_path[longest[0]])


def _check_hooks(names: Mapping[Any, str]) -> None:
    for module, path in names.items():
        if any(getattr(module, kind) for kind in _HOOKS):
            raise _refused(
                f"{path or 'the model'} has hooks, which may do something else each time"
            )


def _check_loop(owner: Any, path: str) -> None:
    """The forward must go through the list, and not ask for a layer's number."""
    name = path.rpartition(".")[2]
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(owner).forward)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        raise _refused(f"the source of {type(owner).__name__}.forward is not to be had") from None
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and f"self.{name}" in ast.unparse(node.iter)
    ]
    if len(loops) != 1:
        raise _refused(f"{type(owner).__name__}.forward has {len(loops)} loops over {name}")
    loop = loops[0]
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    numbers = targets if "enumerate" in ast.unparse(loop.iter) else set()
    for node in (node for each in loop.body for node in ast.walk(each)):
        if isinstance(node, ast.Compare | ast.BinOp) and numbers & _names_in(node):
            raise _refused(
                f"{type(owner).__name__}.forward looks at a layer's number: {ast.unparse(node)}"
            )


def _names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _check_own_weights(layers: Sequence[Any], path: str) -> None:
    owners: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for tensor in (*layer.parameters(), *layer.buffers()):
            other = owners.setdefault(id(tensor), number)
            if other != number:
                raise _refused(f"{path}.{other} and {path}.{number} share weights")


def _kind(layer: Any, number: int) -> dict[str, Any]:
    """All of a layer that can be compared; what is only its number counts as equal."""
    found: dict[str, Any] = {}
    for path, module in layer.named_modules():
        found[f"{path}:"] = type(module)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                layout = (tensor.shape, tensor.dtype) if tensor is not None else None
                found[f"{path}.{name}"] = layout
        for name, value in vars(module).items():
            if not name.startswith("_"):
                found[f"{path}.{name}"] = _comparable(name, value, number)
    return found


def _comparable(name: str, value: Any, number: int) -> Any:
    if type(value) is int and value == number and any(word in name for word in _OF_NUMBERS):
        return "its number"
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_comparable("", each, number) for each in value]
    return type(value)


def _period(kinds: Sequence[Mapping[str, Any]], path: str) -> tuple[int, int]:
    """From which layer on kinds repeat, and after how many; the cheapest such pair."""
    count = len(kinds)
    best: tuple[int, int, int] | None = None
    for period in range(1, count // 2):
        start = count - period
        while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
            start -= 1
        if start + 2 * period + 2 <= count:
            best = min(best or (count, 0, 0), (start + 2 * period, start, period))
    if best is None:
        raise _refused(_first_difference(kinds, path))
    return best[1], best[2]


def _first_difference(kinds: Sequence[Mapping[str, Any]], path: str) -> str:
    last = len(kinds) - 1
    one, two = kinds[last - 1], kinds[last]
    name = next(
        (key for key in {**one, **two} if one.get(key) != two.get(key)), "the order of their kinds"
    )
    return f"{path}.{last - 1} and {path}.{last} differ in {name.strip('.:') or 'their class'}"


# --- what the forward did ----------------------------------------------------------------------


def _check_alike(trace: Trace, marks: tuple[Mark, Mark, Mark], found: Plan) -> None:
    first, second, after = marks
    step = second.allocation - first.allocation
    one = _relative(trace, first, second, found, 0)
    two = _relative(trace, second, after, found, found.period)
    problem = None
    if one != two:
        problem = "do not allocate alike"
    elif any(first.event < place <= after.event for place, _ in trace.workspaces):
        problem = "are the first that need a library's workspace"
    elif any(
        first.allocation <= -event - 1 < first.allocation + step
        for event in trace.events[after.event :]
    ):
        problem = "leave something behind that is freed only later"
    if problem is not None:
        names = [found.path + f".{found.first_skipped - back * found.period}" for back in (2, 1)]
        raise _refused(f"{' and '.join(names)} {problem}")


def _relative(
    trace: Trace, start: Mark, end: Mark, found: Plan, shift: int
) -> list[tuple[int, Cause | None]]:
    """Events of a period by what they are, wherever in the trace."""
    events: list[tuple[int, Cause | None]] = []
    number = start.allocation
    for event in trace.events[start.event : end.event]:
        if event >= 0:
            events.append((event, _moved(trace.cause(number), found.path, -shift)))
            number += 1
        else:
            events.append((event + start.allocation, None))
    return events


def _moved(cause: Cause, path: str, shift: int) -> Cause:
    """The cause in the layer so many further on."""
    if not shift or not cause.module.startswith(f"{path}."):
        return cause
    number, _, rest = cause.module.removeprefix(f"{path}.").partition(".")
    module = f"{path}.{int(number) + shift}"
    return replace(cause, module=f"{module}.{rest}" if rest else module)


@dataclass(slots=True)
class _Expansion:
    """Puts copies of the period from `second` to `after` behind it."""

    trace: Trace
    first: Mark
    second: Mark
    after: Mark
    plan: Plan

    def build(self) -> Trace:
        trace, count = self.trace, self.plan.count
        events = trace.events[: self.after.event]
        for copy in range(1, count + 1):
            events += self._copied(copy)
        events += [self._later(event) for event in trace.events[self.after.event :]]
        causes, table = self._causes()
        return replace(
            trace,
            events=events,
            causes=causes,
            cause_table=table,
            workspaces=[(self._place(place), name) for place, name in trace.workspaces],
            optional=self._numbers(trace.optional),
            modelled=self._numbers(trace.modelled),
            backends={
                name: total
                + count * (self.after.backends.get(name, 0) - self.second.backends.get(name, 0))
                for name, total in trace.backends.items()
            },
            num_operators=trace.num_operators
            + count * (self.after.operators - self.second.operators),
        )

    @property
    def _step(self) -> int:
        return self.after.allocation - self.second.allocation

    def _copied(self, copy: int) -> Iterator[int]:
        shift = copy * self._step
        for event in self.trace.events[self.second.event : self.after.event]:
            yield event if event >= 0 else event - shift

    def _later(self, event: int) -> int:
        """Of what comes after the copies: what was freed of the last period is the last copy's."""
        moved = event < 0 and -event - 1 >= self.second.allocation
        return event - self.plan.count * self._step if moved else event

    def _place(self, place: int) -> int:
        length = self.after.event - self.second.event
        return place + self.plan.count * length if place > self.after.event else place

    def _numbers(self, numbers: Sequence[int]) -> list[int]:
        """Allocations by number: those of the period once more in each copy."""
        all_copies = range(1, self.plan.count + 1)
        period = [n for n in numbers if self.second.allocation <= n < self.after.allocation]
        return [
            *(n for n in numbers if n < self.after.allocation),
            *(n + copy * self._step for copy in all_copies for n in period),
            *(n + len(all_copies) * self._step for n in numbers if n >= self.after.allocation),
        ]

    def _causes(self) -> tuple[list[int], list[Cause]]:
        trace, plan = self.trace, self.plan
        numbers = range(self.second.allocation, self.after.allocation)
        found = [trace.cause(number) for number in range(self.after.allocation)]
        for copy in range(1, plan.count + 1):
            shift = copy * plan.period
            found += [_moved(trace.cause(number), plan.path, shift) for number in numbers]
        found += [trace.cause(n) for n in range(self.after.allocation, len(trace.causes))]
        table = {cause: index for index, cause in enumerate(dict.fromkeys(found))}
        return [table[cause] for cause in found], list(table)


def _refused(reason: str) -> InvalidValue:
    return InvalidValue(f"profiler.repeat_layers is refused: {reason}")
