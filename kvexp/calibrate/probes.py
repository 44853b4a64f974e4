"""What is run on a card, and the numbers of a device profile that follow from it.

Scratch of kernels is read by the rules of `kvexp.simulate.kernels`: a probe finds the numbers with
which the rule gives what was seen, and says so where there are none. The numbers of the profile
that is at hand are kept where they fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import gcd
from typing import Any

from kvexp.calibrate.card import CannotMeasure, Card, Recording
from kvexp.simulate import kernels
from kvexp.simulate.addresses import POLICIES
from kvexp.simulate.device import Device
from kvexp.units import KIB, MIB

Numbers = dict[str, Any]

_HEADS = range(8, 513, 8)  # sizes of attention heads
_TILES = range(64, 32769, 32)  # a tile is a number of elements for each thread of some warps
_EXPERTS = (8, 32, 64, 128)
_SCANNED = (1000, 8192, 20000, 65536, 131072, 400000, 1 << 20)
_SORTED = (5000, 8192, 10000, 16384, 20000, 32768, 50000, 65536, 100000, 131072)


@dataclass(slots=True)
class Measured:
    """Numbers by name, and for what could not be had the reason."""

    numbers: Numbers = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def measure(card: Card, base: Device, say: Callable[[str], None] = lambda _: None) -> Measured:
    """All that can be had from the card; `base` is the profile at hand. `say` hears each step.

    A probe that fails costs its own numbers only.
    """
    found = Measured()
    for names, probe in PROBES.items():
        say(", ".join(names))
        try:
            found.numbers |= probe(card, base)
        except Exception as error:  # whatever torch raises where an operator is missing
            text = " ".join(str(error).split())[:200]
            kind = "" if isinstance(error, CannotMeasure) else f"{type(error).__name__}: "
            found.reasons |= dict.fromkeys(names, f"{kind}{text}")
    return found


# --- outside the allocator, and what libraries keep --------------------------------------------


def _context(card: Card, base: Device) -> Numbers:
    _require(not card.is_shared, "other processes use the card")
    return {"context": card.context_bytes}


def _construction(card: Card, base: Device) -> Numbers:
    return {"construction_residue": sum(card.load_model().kept)}


def _workspace(card: Card, base: Device) -> Numbers:
    """What the first product of matrices leaves behind: the model's, where there is one."""
    if card.has_model:
        return {"blas_workspace": sum(card.forward().kept)}
    matrix = card.zeros(256, 256, dtype="bfloat16")
    return {"blas_workspace": sum(card.record(lambda: [card.torch.mm(matrix, matrix)]).kept)}


def _libraries(card: Card, base: Device) -> Numbers:
    _require(card.has_model, "no model could be loaded")
    outside = card.outside_bytes()
    card.drop_model()
    _require(not card.is_shared, "other processes use the card")
    return {"libraries": outside}


def _lt_workspace(card: Card, base: Device) -> Numbers:
    bias = card.zeros(256, dtype="bfloat16")
    matrix = card.zeros(256, 256, dtype="bfloat16")
    kept = card.record(lambda: [card.torch.addmm(bias, matrix, matrix)]).kept
    return {"blas_lt_workspace": sum(kept)}


# --- the allocator -----------------------------------------------------------------------------


def _segments(card: Card, base: Device) -> Numbers:
    held: list[Any] = []

    def sizes(*requests: int) -> list[int]:
        def run() -> list[Any]:
            held.extend(card.empty(size, dtype="uint8") for size in requests)
            return held

        return [size for _, size in card.record(run).segments]

    card.give_back()
    before = card.allocated_bytes()
    held.append(card.empty(1, dtype="uint8"))
    block = card.allocated_bytes() - before
    # more than what an earlier segment can have left
    small, large = sizes(*[MIB] * 4), sizes(*[2 * MIB + KIB] * 16)
    huge = sizes(*(size * MIB + 1 for size in (21, 23, 25)))
    held.clear()
    card.give_back()
    for name, found in (("small", small), ("large", large)):
        _require(len(set(found)) == 1, f"{name} segments are {sorted(set(found))}")
    _require(len(huge) == 3, f"segments of large requests are {huge}")
    return {
        "block": block,
        "small_segment": small[0],
        "large_segment": large[0],
        "segment_step": gcd(*huge),
    }


_TAKEN = (112, 34, 18, 50, 64, 30, 96, 12, 22, 48, 80, 14)  # MiB, each a segment of its own
_GIVEN = (1, 3, 8)
_TAKEN_AFTERWARDS = (20, 40, 16, 10, 128)


def _addresses(card: Card, base: Device) -> Numbers:
    """The policy that explains the order of most pairs of segments."""
    held: list[Any] = []

    def take(sizes: Sequence[int]) -> list[int]:
        def run() -> list[Any]:
            held.extend(card.empty(size * MIB, dtype="uint8") for size in sizes)
            return held

        return [address for address, _ in card.record(run).segments]

    card.give_back()
    seen = take(_TAKEN)
    for index in _GIVEN:
        held[index] = None
    card.give_back()
    held[:] = [tensor for tensor in held if tensor is not None]
    seen += take(_TAKEN_AFTERWARDS)
    held.clear()
    card.give_back()
    _require(len(seen) == len(_TAKEN) + len(_TAKEN_AFTERWARDS), f"{len(seen)} segments were taken")
    scores = {name: _agreement(seen, _placed(name)) for name in POLICIES}
    best = max(scores, key=lambda name: (scores[name], name == base.addresses))
    return {"addresses": best}


def _placed(policy: str) -> list[int]:
    space = POLICIES[policy]()
    found = [space.take(size * MIB) for size in _TAKEN]
    for index in _GIVEN:
        space.give(found[index], _TAKEN[index] * MIB)
    return found + [space.take(size * MIB) for size in _TAKEN_AFTERWARDS]


def _agreement(seen: Sequence[int], placed: Sequence[int]) -> int:
    pairs = combinations(range(len(seen)), 2)
    return sum((seen[i] < seen[j]) == (placed[i] < placed[j]) for i, j in pairs)


# --- attention ---------------------------------------------------------------------------------


def _attention(card: Card, base: Device) -> Numbers:
    """Each time the chosen backend is taken away, until the one that always can is left."""
    left = ["cudnn", "flash", "efficient", "math"]
    order: list[str] = []
    while left and "math" not in order:
        order.append(card.choose((1, 8, 512, 64), "bfloat16", left))
        left.remove(order[-1])
    return {"attention": tuple(order)}


def _head_limit(card: Card, base: Device) -> Numbers:
    """Of the preferred backend for half precision."""
    fused = [name for name in _attention(card, base)["attention"] if name in ("cudnn", "flash")]
    _require(bool(fused), "neither cuDNN's nor flash attention runs here")
    allowed = [fused[0], "math"]
    sizes = [
        size for size in _HEADS if card.choose((1, 4, 64, size), "bfloat16", allowed) == fused[0]
    ]
    first = [*_HEADS][: len(sizes)]
    _require(bool(sizes) and sizes == first, f"{fused[0]} takes heads of {sizes}")
    return {"fused_head_limit": sizes[-1]}


def _cudnn(card: Card, base: Device) -> Numbers:
    q, k, v = (card.zeros(1, 8, 1024, 128, dtype="bfloat16") for _ in range(3))
    card.record(lambda: [card.attend("cudnn", q, k, v)])
    scratch = card.record(lambda: [card.attend("cudnn", q, k, v)]).scratch
    scalars = scratch.count(8)
    return {"cudnn_scalars": scalars, "cudnn_scratch": sum(scratch) - 8 * scalars}


def _efficient(card: Card, base: Device) -> Numbers:
    """The largest head without an accumulator."""
    without = [size for size in range(8, 257, 8) if not _accumulates(card, size)]
    _require(bool(without), "every head has an accumulator")
    return {"efficient_accumulator_over": without[-1]}


def _accumulates(card: Card, size: int) -> bool:
    q, k, v = (card.zeros(1, 4, 64, size, dtype="bfloat16") for _ in range(3))
    scratch = card.record(lambda: [card.attend("efficient", q, k, v)]).scratch
    return sum(scratch) >= 4 * int(q.numel())


# --- scratch of kernels ------------------------------------------------------------------------


def _reduction(card: Card, base: Device) -> Numbers:
    """The largest input of the size at hand, and one row more."""
    columns = 4096
    rows = base.split_index_bytes // (2 * columns)

    def scratch(count: int) -> int:
        tensor = card.empty(count, columns, dtype="bfloat16")
        return sum(card.record(lambda: card.torch.max(tensor, dim=-1)).scratch)

    try:
        below, above = scratch(rows), scratch(rows + 1)
    finally:
        card.give_back()
    _require(
        below == 0 < above,
        f"scratch is {below} and {above} bytes on both sides of {base.split_index_bytes}",
    )
    each, rest = divmod(above, rows + 1)
    _require(rest == 0, f"{above} bytes of scratch for {rows + 1} outputs")
    return {"split_index_bytes": base.split_index_bytes, "split_index_scratch": each}


def _scan(card: Card, base: Device) -> Numbers:
    seen = [
        _seen(card, "aten.cumsum.default", n, lambda x: card.torch.cumsum(x, 0)) for n in _SCANNED
    ]
    fitting = [tile for tile in _TILES if _explains(seen, replace(base, scan_tile=tile))]
    return {"scan_tile": _closest(fitting, base.scan_tile, seen)}


def _sort(card: Card, base: Device) -> Numbers:
    """A constant, and a state for each tile: the state by its steps, the tile by their places.

    A row that is sorted in place takes its indices alone.
    """

    def sort(tensor: Any) -> Any:
        return card.torch.sort(tensor)

    def in_tiles(length: int) -> bool:
        return len(_seen(card, "aten.sort.default", length, sort).sizes) > 1

    small = _last_before(in_tiles, 1 << 16)
    steps = (base.sort_tile * count + more for count in (2, 3, 5, 8, 13, 21, 28) for more in (0, 1))
    lengths = sorted({n for n in (*_SORTED, *steps) if n > small})
    bare = replace(base, sort_small=small, sort_tile_state=0, sort_counts=0)
    seen = [_seen(card, "aten.sort.default", n, sort) for n in lengths]
    rests = [sum(each.sizes) - sum(each.by_rule(bare)) for each in seen]
    state = gcd(*(rest - rests[0] for rest in rests))
    _require(state > 0, f"scratch of sorts is {_listed(seen)}")

    def counts(tile: int) -> int:
        return rests[0] - state * -(-lengths[0] // tile)

    def with_tile(tile: int) -> Device:
        return replace(bare, sort_tile=tile, sort_tile_state=state, sort_counts=counts(tile))

    fitting = [tile for tile in _TILES if counts(tile) >= 0 and _explains(seen, with_tile(tile))]
    same = [tile for tile in fitting if counts(tile) == base.sort_counts]
    tile = _closest(same or fitting, base.sort_tile, seen)
    return {
        "sort_small": small,
        "sort_tile": tile,
        "sort_tile_state": state,
        "sort_counts": counts(tile),
    }


def _grouped_mm(card: Card, base: Device) -> Numbers:
    found = {count: sum(_grouped(card, count).scratch) for count in _EXPERTS}
    first, last = _EXPERTS[0], _EXPERTS[-1]
    each, rest = divmod(found[last] - found[first], last - first)
    constant = found[first] - each * first
    straight = all(size == constant + each * count for count, size in found.items())
    _require(rest == 0 and straight, f"scratch by number of experts is {found}")
    return {"grouped_mm_per_expert": each, "grouped_mm_constant": constant}


def _grouped(card: Card, experts: int) -> Recording:
    rows = 16
    matrix = card.zeros(experts * rows, 64, dtype="bfloat16")
    weight = card.zeros(experts, 64, 64, dtype="bfloat16").transpose(-2, -1)
    ends = card.zeros(experts, dtype="int32").add_(rows).cumsum(0).to(card.torch.int32)
    return card.record(lambda: [card.torch._grouped_mm(matrix, weight, offs=ends)])


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of int64 as the rules look at it."""

    length: int
    dtype: str = "torch.int64"

    @property
    def shape(self) -> tuple[int]:
        return (self.length,)

    def numel(self) -> int:
        return self.length

    def dim(self) -> int:
        return 1

    def element_size(self) -> int:
        return 8


@dataclass(frozen=True, slots=True)
class _Seen:
    """Scratch of one operator on a row of int64."""

    operator: str
    length: int
    sizes: list[int]

    def by_rule(self, device: Device) -> list[int]:
        row = _Row(self.length)
        return kernels.SCRATCH[self.operator](kernels.Call((row, 0), {}, [row, row]), device)


def _seen(card: Card, operator: str, length: int, run: Callable[[Any], Any]) -> _Seen:
    tensor = card.zeros(length, dtype="int64")

    def outputs() -> list[Any]:
        out = run(tensor)
        return list(out) if isinstance(out, tuple) else [out]

    return _Seen(operator, length, card.record(outputs).scratch)


def _explains(seen: Sequence[_Seen], device: Device) -> bool:
    return all(sum(each.by_rule(device)) == sum(each.sizes) for each in seen)


def _closest(fitting: Sequence[int], held: int, seen: Sequence[_Seen]) -> int:
    """The number at hand where it fits, else the middle of those that do."""
    _require(bool(fitting), f"no size of a tile explains the scratch {_listed(seen)}")
    return held if held in fitting else fitting[len(fitting) // 2]


def _listed(seen: Sequence[_Seen]) -> str:
    return ", ".join(f"{each.length}: {'+'.join(map(str, each.sizes)) or 0}" for each in seen)


def _last_before(in_tiles: Callable[[int], bool], high: int) -> int:
    """The longest row that is not sorted in tiles, where longer ones are."""
    low = 1
    _require(in_tiles(high) and not in_tiles(low), f"rows of {low} and {high} are sorted alike")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if in_tiles(middle) else (middle, high)
    return low


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CannotMeasure(otherwise)


PROBES: dict[tuple[str, ...], Callable[[Card, Device], Numbers]] = {
    ("context",): _context,
    ("addresses",): _addresses,
    ("block", "small_segment", "large_segment", "segment_step"): _segments,
    ("construction_residue",): _construction,
    ("blas_workspace",): _workspace,
    ("libraries",): _libraries,
    ("blas_lt_workspace",): _lt_workspace,
    ("attention",): _attention,
    ("fused_head_limit",): _head_limit,
    ("cudnn_scalars", "cudnn_scratch"): _cudnn,
    ("efficient_accumulator_over",): _efficient,
    ("split_index_bytes", "split_index_scratch"): _reduction,
    ("scan_tile",): _scan,
    ("sort_small", "sort_tile", "sort_tile_state", "sort_counts"): _sort,
    ("grouped_mm_per_expert", "grouped_mm_constant"): _grouped_mm,
}
"""In the order in which they run: what the first of a process sees comes first."""
