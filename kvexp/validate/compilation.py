"""vLLM's options for torch.compile and CUDA graphs, in the words of the engine's options here."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvexp.validate.flags import Flag, Flags

LEVELS_SINCE = (0, 12)
"""The first release in which `-O` is a level of optimisation; before it was one of compilation."""

_MODES = {0: "none", 1: "piecewise", 2: "full", (2, 0): "full_decode_only"} | {
    (2, 1): "full_and_piecewise"
}
_COMPILATION = ("none", "stock_torch_compile", "dynamo_trace_once", "vllm_compile")
CAPTURED = re.compile(
    r"([1-9]\d{0,2}) (?:cuda ?graph )?(?:capture )?(?:sizes|graphs|shapes)$", re.IGNORECASE
)
"""Words about how many batch sizes were captured: `27 capture sizes`."""

_ENUM = re.compile(r"<?(?:\w+\.)?(\w+?)(?::.*)?>?")


def translated(flags: Flags, release: tuple[int, ...]) -> Iterator[Flag]:
    """The flags that ask for graphs or compilation by other names; None is what is unreadable."""
    for flag in flags.take("cuda_graph_sizes"):
        many = isinstance(flag.value, list) and len(flag.value) != 1
        size = flag.value[0] if isinstance(flag.value, list) and not many else flag.value
        name = "cudagraph_capture_sizes" if many else "max_cudagraph_capture_size"
        yield replace(flag, name=name, value=flag.value if many else size)
    for flag in flags.take("max_cudagraph_capture_size"):
        none = flag.value == 0 and not isinstance(flag.value, bool)
        yield replace(flag, name="cudagraph_mode", value="none") if none else flag
    for flag in flags.take("mode", "level", "compilation_config"):
        yield replace(flag, name="compilation_mode", value=_compilation_mode(flag.value))
    for flag in flags.take("cudagraph_mode"):
        yield replace(flag, value=_graph_mode(flag.value))
    for flag in flags.take("use_cudagraph", "full_cuda_graph"):
        usual = flag.name == "use_cudagraph"
        if flag.value is not usual:
            yield replace(flag, name="cudagraph_mode", value="none" if usual else "full")
    yield from _optimised(flags, release)


def _optimised(flags: Flags, release: tuple[int, ...]) -> Iterator[Flag]:
    """`-O0` and its like, of several the last: a level of optimisation, or one of compilation."""
    numbered = [f"optimization_level_{level}" for level in range(4)]
    for flag in flags.take("optimization_level", *numbered)[-1:]:
        level = int(flag.name[-1]) if flag.name in numbered else _number(flag.value)
        level = level if level in range(4) else None
        if release < LEVELS_SINCE or not level:
            yield replace(flag, name="compilation_mode", value=level)
        if release >= LEVELS_SINCE and level == 0:
            yield replace(flag, name="cudagraph_mode", value="none")
        if release >= LEVELS_SINCE and level == 1:
            yield replace(flag, name="cudagraph_mode", value="piecewise")


def _graph_mode(value: Any) -> str | None:
    """A mode by its name here, of a name, a number or a pair."""
    key = tuple(value) if isinstance(value, list) else value
    if isinstance(key, int | tuple):
        return _MODES.get(key)
    name = _name(value)
    return name if name in _MODES.values() else None


def _compilation_mode(value: Any) -> int | None:
    name = _name(value)
    return _COMPILATION.index(name) if name in _COMPILATION else _number(value)


def _number(value: Any) -> int | None:
    """A level, of a number or of how an enum prints (`<OptimizationLevel.O2: 2>`)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.search(r"(\d+)>?$", value) if isinstance(value, str) else None
    return None if found is None else int(found[1])


def _name(value: Any) -> str:
    found = _ENUM.fullmatch(value) if isinstance(value, str) else None
    return "" if found is None else found[1].lower()
