"""Lets torch make tensors of a CUDA device that is not there, and code take the way it takes there.

Everything is put back when the context ends, but for the device guard of a CPU build: it does
nothing, and nothing else could use it.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvexp.simulate.attention import StandIn
from kvexp.simulate.device import Device
from kvexp.simulate.errors import Untraceable
from kvexp.simulate.tracker import Tracker

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _LAZY, _SLOTS = 1, 17, 22


def ensure_device_guard() -> None:
    """Have a guard for CUDA devices where torch is built without CUDA.

    The registry's place for CUDA is empty there. A guard that knows of no device is put there (the
    lazy backend's), which torch then replaces by one that does nothing.

    Raises:
        Untraceable: this build of torch offers no way.
    """
    if torch.version.cuda is not None:
        return
    try:
        core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        registry = (ctypes.c_void_p * _SLOTS).in_dll(core, _REGISTRY)
        if not registry[_CUDA]:
            registry[_CUDA] = registry[_LAZY]
        torch._C._ensureCUDADeviceGuardSet()
    except (AttributeError, OSError, ValueError) as error:
        raise Untraceable(
            f"torch {torch.__version__} cannot make CUDA tensors without a device: {error}"
        ) from None


@contextmanager
def as_on(device: Device, attention: StandIn) -> Iterator[None]:
    """Torch and transformers decide as they would on this card."""
    from transformers.utils import import_utils  # noqa: PLC0415

    with ExitStack() as stack:
        enter = stack.enter_context
        for place in (torch.nn.functional, torch._C._nn):
            enter(mock.patch.object(place, "scaled_dot_product_attention", attention.__call__))
        enter(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: device.capability))
        if hasattr(import_utils, "is_fake_tensor"):
            # masks would be built in full for fear of a graph that is reused
            enter(mock.patch.object(import_utils, "is_fake_tensor", lambda _: False))
        yield


@contextmanager
def module_paths(names: Mapping[Any, str], tracker: Tracker) -> Iterator[None]:
    """The tracker knows which module runs, by these names."""
    tracker.names = {id(module): name for module, name in names.items()}
    original: Callable[..., Any] = torch.nn.Module.__call__
    enter, modules = tracker.enter, tracker.modules

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        enter(module)
        try:
            return original(module, *args, **kwargs)
        finally:
            modules.pop()

    with mock.patch.object(torch.nn.Module, "__call__", call):
        yield
