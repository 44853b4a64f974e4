"""A transformers model without weights, its tensors on a device that need not exist."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvexp.simulate.case import Case
from kvexp.simulate.errors import Untraceable


def build(config: Any, case: Case) -> Any:
    """The model with the shapes of its weights only.

    Raises:
        Untraceable: transformers cannot build it; the message holds its reason.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    chosen = {} if case.attn == "auto" else {"attn_implementation": case.attn}
    try:
        with torch.device("meta"), quiet():
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, case.dtype), **chosen
            )
    except Exception as error:  # each architecture has errors of its own
        raise Untraceable(f"transformers cannot build it: {one_line(error)}") from None
    return model.eval().requires_grad_(False)


def load_events(modules: Iterable[Any], residue: int) -> tuple[list[int], int]:
    """Allocations of loading, in the order of construction, and the bytes that stay.

    A weight that is tied to an earlier one is built all the same and dropped at the end.
    """
    events = [residue] if residue else []
    seen: set[int] = set()
    dropped: list[int] = []
    kept = 0
    for storage in _storages(modules):
        size, key = int(storage.nbytes()), storage._cdata
        if not size:
            continue
        if key in seen:
            dropped.append(len(events))
        else:
            seen.add(key)
            kept += size
        events.append(size)
    return events + [-number - 1 for number in dropped], kept


def _storages(modules: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor.untyped_storage()


def move(modules: Iterable[Any], mode: Any) -> list[Any]:
    """Put fake tensors of the card in the place of the modules'; ties stay ties."""
    device = torch.device("cuda", 0)
    moved: dict[int, Any] = {}
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = _on_device(tensor, mode, device)
                tensors[name] = moved[id(tensor)]
    return list(moved.values())


def _on_device(tensor: Any, mode: Any, device: Any) -> Any:
    if tensor.device.type == "meta":
        return mode.fake_tensor_converter.from_meta_and_device(mode, tensor, device)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' advice to itself, and what torch logs about errors that are raised."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    before = transformers_logging.get_verbosity(), torch_log.level
    transformers_logging.set_verbosity(logging.CRITICAL)
    torch_log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        torch_log.setLevel(before[1])


def one_line(error: BaseException) -> str:
    """An error as one line that names its kind."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
