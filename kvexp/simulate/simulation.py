"""From a model's facts to the figures of its forward: traced once, kept, replayed."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from kvexp.simulate import store
from kvexp.simulate.case import Case
from kvexp.simulate.device import Device
from kvexp.simulate.errors import Untraceable
from kvexp.simulate.forecast import Forecast, Limits, forecast
from kvexp.simulate.settings import AllocatorSettings
from kvexp.simulate.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model: `facts` identify it, `make_config` gives its transformers configuration."""

    facts: Mapping[str, Any]
    make_config: Callable[[], Any]


def traces_of(
    subject: Subject, case: Case, device: Device, *, repeat_layers: bool = False
) -> list[Trace]:
    """The trace of a forward; two where the card's choice of attention is in doubt.

    `repeat_layers`: of equal layers only a few are run; see `kvexp.simulate.repeating`.

    Raises:
        InvalidValue: layers cannot be repeated; the message says why.
        Untraceable: it cannot be traced; the message says why.
    """
    first = _kept(subject, case, device, 0, repeat_layers)
    if not first.doubts or not first.backends:
        return [first]
    return [first, _kept(subject, case, device, 1, repeat_layers)]


def simulate(
    traces: list[Trace],
    case: Case,
    device: Device,
    settings: AllocatorSettings,
    limits: Limits,
    *,
    state_dict: bool = False,
) -> Forecast:
    """Replay traces of `traces_of` under these settings and limits.

    `state_dict`: while loading, a checkpoint's tensors lie on the card beside the model.

    Raises:
        OutOfMemory: it does not fit; the message names the operator and its source line.
    """
    return forecast(traces, case.input_bytes, device, settings, limits, state_dict=state_dict)


def _kept(subject: Subject, case: Case, device: Device, prefer: int, repeat_layers: bool) -> Trace:
    facts = {
        "model": dict(subject.facts),
        "case": asdict(case),
        "device": device.as_dict(),
        "prefer": prefer,
        "repeat_layers": repeat_layers,
    }
    make = partial(_trace, subject, case, device, prefer, repeat_layers)
    return store.cached(store.key(facts), make)


def _trace(subject: Subject, case: Case, device: Device, prefer: int, repeat_layers: bool) -> Trace:
    try:
        from kvexp.simulate.tracing import trace  # noqa: PLC0415
    except ImportError as error:
        raise Untraceable(f"{error}: pip install 'kvexp[torch]'") from None

    return trace(subject.make_config(), case, device, prefer=prefer, repeat_layers=repeat_layers)
