"""The figures of one forward on one card, from its trace."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvexp.simulate.addresses import POLICIES, AddressSpace
from kvexp.simulate.allocator import CachingAllocator, OutOfMemory
from kvexp.simulate.blocks import LiveBlock, blocks_at
from kvexp.simulate.device import Device
from kvexp.simulate.replaying import Peak, Process, live_at
from kvexp.simulate.settings import AllocatorSettings
from kvexp.simulate.trace import Trace

TOP_BLOCKS = 20


class Confidence(StrEnum):
    """What the allocated peak rests on."""

    exact = "exact"  # operators, shapes and lifetimes alone, on a card that was measured
    modelled = "modelled"  # a kernel's scratch, by rule, is alive at the peak; or another card
    bounded = "bounded"  # a rule is missing: the figure is the upper of two


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the process may take: a cap of its own, and what the card has left."""

    allowed_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockAtPeak:
    """Memory that is alive at the peak, by what allocated it."""

    size_bytes: int
    count: int
    operator: str
    module: str
    line: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Sizes in bytes. `first` is a fresh process's forward, `warm` a later one.

    `blocks` are the largest causes at the first forward's peak, `live_blocks` every block there.
    `activation_low_bytes` is the lower of two readings where `confidence` is bounded. Reserved
    memory is a range over what the driver may do with addresses.
    """

    weights_bytes: int
    weights_reserved_bytes: int
    load_peak_bytes: int
    first: Peak
    warm: Peak
    activation_low_bytes: int
    reserved_low_bytes: int
    reserved_high_bytes: int
    workspaces: dict[str, int]
    confidence: Confidence
    doubts: tuple[str, ...]
    blocks: tuple[BlockAtPeak, ...]
    live_blocks: tuple[LiveBlock, ...]

    def as_dict(self) -> dict[str, Any]:
        """For a result's readings."""
        return {
            "weights_bytes": self.weights_bytes,
            "weights_reserved_bytes": self.weights_reserved_bytes,
            "load_peak_bytes": self.load_peak_bytes,
            "before_bytes": self.first.before_bytes,
            "activation_bytes": self.first.activation_bytes,
            "activation_low_bytes": self.activation_low_bytes,
            "warm_activation_bytes": self.warm.activation_bytes,
            "allocated_peak_bytes": self.first.allocated_bytes,
            "reserved_peak_low_bytes": self.reserved_low_bytes,
            "reserved_peak_high_bytes": self.reserved_high_bytes,
            "workspaces": dict(self.workspaces),
            "confidence": self.confidence.value,
            "doubts": list(self.doubts),
            "blocks_at_peak": [asdict(block) for block in self.blocks],
            "live_blocks": [asdict(block) for block in self.live_blocks],
        }


def forecast(
    traces: list[Trace],
    input_bytes: int,
    device: Device,
    settings: AllocatorSettings,
    limits: Limits,
    *,
    state_dict: bool = False,
) -> Forecast:
    """The figures of a trace; further traces are other readings of what is in doubt.

    `state_dict`: see `Process.load`.

    Raises:
        OutOfMemory: loading or the forward does not fit; the message names the operator.
    """
    readings = [
        _run(trace, input_bytes, device, settings, limits, state_dict=state_dict)
        for trace in traces
    ]
    trace, run = max(
        zip(traces, readings, strict=True), key=lambda each: each[1].first.allocated_bytes
    )
    lowest = min(each.first.activation_bytes for each in readings)
    if trace.optional:
        without = _run(trace, input_bytes, device, settings, limits, with_optional=False)
        lowest = min(lowest, without.first.activation_bytes)
    reserved = [peak.reserved_bytes for each in readings for peak in (each.first, each.warm)]
    for policy in POLICIES.values():
        reserved.extend(_other_reserved(trace, input_bytes, device, settings, limits, policy))
    alive = live_at(trace, run.first.event)
    return Forecast(
        weights_bytes=run.weights_bytes,
        weights_reserved_bytes=run.weights_reserved_bytes,
        load_peak_bytes=run.load_peak_bytes,
        first=run.first,
        warm=run.warm,
        activation_low_bytes=lowest,
        reserved_low_bytes=min(reserved),
        reserved_high_bytes=max(reserved),
        workspaces=run.workspaces,
        confidence=_confidence(trace, device, alive, is_range=lowest < run.first.activation_bytes),
        doubts=_doubts(traces, device),
        blocks=_blocks(trace, alive),
        live_blocks=blocks_at(trace, run.first.event, input_bytes, run.workspaces),
    )


def check_fits(
    trace: Trace,
    input_bytes: int,
    device: Device,
    settings: AllocatorSettings,
    limits: Limits,
    cache_bytes: int,
) -> None:
    """Do nothing where a first forward runs with the KV cache in place.

    Raises:
        OutOfMemory: cache or forward do not fit; the message names the operator.
    """
    allocator = _allocator(settings, limits, POLICIES[device.addresses])
    process = Process(allocator, trace, device)
    with _naming_cause(trace):
        process.load()
        process.hold(cache_bytes)
        process.forward(input_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    weights_bytes: int
    weights_reserved_bytes: int
    load_peak_bytes: int
    first: Peak
    warm: Peak
    workspaces: dict[str, int]


def _run(
    trace: Trace,
    input_bytes: int,
    device: Device,
    settings: AllocatorSettings,
    limits: Limits,
    *,
    with_optional: bool = True,
    state_dict: bool = False,
) -> _Run:
    allocator = _allocator(settings, limits, POLICIES[device.addresses])
    process = Process(allocator, trace, device, with_optional=with_optional)
    with _naming_cause(trace):
        load_peak = process.load(state_dict=state_dict)
        weights, reserved = allocator.allocated_bytes, allocator.reserved_bytes
        first = process.forward(input_bytes)
        warm = process.forward(input_bytes)
    return _Run(
        weights_bytes=weights,
        weights_reserved_bytes=reserved,
        load_peak_bytes=load_peak,
        first=first,
        warm=warm,
        workspaces=process.workspaces,
    )


def _other_reserved(
    trace: Trace,
    input_bytes: int,
    device: Device,
    settings: AllocatorSettings,
    limits: Limits,
    policy: Callable[[], AddressSpace],
) -> list[int]:
    """Reserved peaks of a fresh process and of one whose libraries have started.

    None where the driver's placing of segments makes it not fit.
    """
    found = []
    for started in (False, True):
        allocator = _allocator(settings, limits, policy)
        process = Process(allocator, trace, device)
        with suppress(OutOfMemory):
            process.load()
            if started:
                process.start_libraries()
            found.append(process.forward(input_bytes).reserved_bytes)
    return found


def _allocator(
    settings: AllocatorSettings, limits: Limits, policy: Callable[[], AddressSpace]
) -> CachingAllocator:
    return CachingAllocator(
        settings=settings,
        addresses=policy(),
        allowed_bytes=limits.allowed_bytes,
        device_bytes=limits.device_bytes,
    )


@contextmanager
def _naming_cause(trace: Trace) -> Iterator[None]:
    """An out-of-memory error says which operator could not be served."""
    try:
        yield
    except OutOfMemory as error:
        number = sum(event >= 0 for event in trace.events[: error.event or 0])
        if error.event is None:
            place = "while the model is loaded"
        elif number < len(trace.causes):
            cause = trace.cause(number)
            place = f"for {cause.operator} in {cause.module or 'the model'} ({cause.line})"
        else:
            place = "for a library's workspace"
        error.args = (f"{error.args[0]}; {place}",)
        raise


def _confidence(
    trace: Trace, device: Device, alive: list[tuple[int, int]], *, is_range: bool
) -> Confidence:
    if is_range:
        return Confidence.bounded
    modelled = set(trace.modelled)
    if not device.measured or any(number in modelled for number, _ in alive):
        return Confidence.modelled
    return Confidence.exact


def _doubts(traces: list[Trace], device: Device) -> tuple[str, ...]:
    found = [doubt for each in traces for doubt in each.doubts]
    return tuple(dict.fromkeys([*found, *device.doubts]))


def _blocks(trace: Trace, alive: list[tuple[int, int]]) -> tuple[BlockAtPeak, ...]:
    sizes: dict[int, list[int]] = defaultdict(list)
    for number, size in alive:
        sizes[trace.causes[number]].append(size)
    largest = sorted(sizes.items(), key=lambda item: -sum(item[1]))[:TOP_BLOCKS]
    return tuple(
        BlockAtPeak(
            size_bytes=sum(found),
            count=len(found),
            operator=trace.cause_table[cause].operator,
            module=trace.cause_table[cause].module,
            line=trace.cause_table[cause].line,
        )
        for cause, found in largest
    )
