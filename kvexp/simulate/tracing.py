"""Runs a transformers model on tensors without data and notes every allocation."""

import gc
import inspect
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from kvexp.simulate import building, fake_cuda, repeating
from kvexp.simulate.attention import StandIn
from kvexp.simulate.case import Case
from kvexp.simulate.device import Device
from kvexp.simulate.errors import Untraceable
from kvexp.simulate.shadows import Known
from kvexp.simulate.trace import Trace
from kvexp.simulate.tracker import Tracker


def trace(
    config: Any, case: Case, device: Device, *, prefer: int = 0, repeat_layers: bool = False
) -> Trace:
    """The allocations of one forward of the model that a transformers config describes.

    `prefer`: which of the attention backends that could run is taken, by the card's order.
    `repeat_layers`: of equal layers only a few are run; see `kvexp.simulate.repeating`.

    Raises:
        InvalidValue: layers cannot be repeated; the message says why.
        Untraceable: the model cannot be built or traced; the message says why.
    """
    fake_cuda.ensure_device_guard()
    found = Trace()
    attention = StandIn(device=device, cudnn=case.cudnn, prefer=prefer)
    model = building.build(config, case)
    names = {module: name for name, module in model.named_modules()}
    found.load, found.weights_bytes = building.load_events(names, device.construction_residue)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = Tracker(found, device, attention, mode)
    plan = repeating.plan(names) if repeat_layers else None
    if plan is not None:
        tracker.watch(plan.skip(names))
    for tensor in building.move(names, mode):
        tracker.adopt(tensor)
    collecting = gc.isenabled()
    gc.disable()  # frees come from reference counts alone, as they would in a short run
    try:
        with (
            building.quiet(),
            fake_cuda.as_on(device, attention),
            fake_cuda.module_paths(names, tracker),
            mode,
            torch.no_grad(),
        ):
            _forward(model, case, tracker)
    except Untraceable:
        raise
    except Exception as error:  # each architecture has errors of its own
        raise Untraceable(f"the forward ends with {building.one_line(error)}") from None
    finally:
        tracker.stop()
        if collecting:
            gc.enable()
    found.backends = dict(attention.counts)
    if attention.has_choice and not device.measured:
        found.doubts.append(f"the attention backend on {device.name} was not measured")
    return found if plan is None else repeating.expand(found, tracker.marks, plan)


def _forward(model: Any, case: Case, tracker: Tracker) -> None:
    with torch.device("cuda", 0):
        tokens = torch.zeros((case.batch, case.seq), dtype=torch.int64)
    tracker.adopt(tokens)
    tracker.shadows.attach(tokens, Known(None, _zeros(case)))
    called = model.base_model if case.logits == "none" else model
    accepted = inspect.signature(called.forward).parameters
    keywords: dict[str, Any] = {"use_cache": case.use_cache}
    if case.logits == "last" and "logits_to_keep" in accepted:
        keywords["logits_to_keep"] = 1
    with tracker:
        if case.mask:
            keywords["attention_mask"] = torch.ones_like(tokens)
        out = called(input_ids=tokens, **keywords)
        if case.sampler != "none":
            _sample(out.logits[:, -1], case.sampler)
        tracker.stop()
    del out


def _zeros(case: Case) -> Any:
    with _disable_current_modes():
        return torch.zeros((case.batch, case.seq), dtype=torch.int64)


def _sample(logits: Any, sampler: str) -> Any:
    """One token a row, as the measured warm-up draws it."""
    if sampler == "argmax":
        return logits.argmax(dim=-1)
    probabilities = logits.float().softmax(dim=-1)
    noise = torch.empty_like(probabilities).exponential_(1)
    return probabilities.div_(noise).argmax(dim=-1)
