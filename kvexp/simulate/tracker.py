"""Notes every allocation and free of a forward on tensors without data."""

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvexp.simulate import kernels
from kvexp.simulate.attention import StandIn
from kvexp.simulate.blocks import short_path
from kvexp.simulate.device import Device
from kvexp.simulate.errors import Untraceable
from kvexp.simulate.repeating import Mark
from kvexp.simulate.shadows import Known, Shadows, tensors_in
from kvexp.simulate.shortcuts import FRESH, IN_PLACE, VIEWS, Shortcuts
from kvexp.simulate.trace import Cause, Trace

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_ATTENTION = ("aten._scaled_dot_product_", "aten._safe_softmax.")
_OTHER, _VIEW, _FRESH, _IN_PLACE = 0, 1, 2, 3


class Tracker(TorchDispatchMode):  # type: ignore[misc]  # torch is not read by mypy
    """Sees every operator first, lets the fake mode below run it, notes what it allocates."""

    def __init__(self, trace: Trace, device: Device, attention: StandIn, mode: Any) -> None:
        super().__init__()
        self.trace = trace
        self.shortcuts = Shortcuts(mode)
        self.device = device
        self.attention = attention
        self.shadows = Shadows()
        self.modules: list[Any] = []
        self.names: dict[int, str] = {}
        self.marks: list[Mark] = []
        self._layers: dict[int, int] = {}
        self._live: dict[int, Any] = {}
        self._count = 0
        self._causes: dict[tuple[str, int, str, str], int] = {}
        self._workspaces: set[str] = set()
        self._known: dict[Any, tuple[str, int, bool]] = {}
        self._on = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; to guard against it costs more than most operators do."""
        return False

    def watch(self, layers: Mapping[int, int]) -> None:
        """Mark where these modules begin; their numbers by identity."""
        self._layers = dict(layers)

    def enter(self, module: Any) -> None:
        """A module begins."""
        self.modules.append(module)
        layer = self._layers.get(id(module))
        if layer is not None:
            trace = self.trace
            counts = dict(self.attention.counts)
            self.marks.append(
                Mark(layer, len(trace.events), self._count, trace.num_operators, counts)
            )

    def adopt(self, tensor: Any) -> None:
        """A tensor that exists before the forward; it is never freed."""
        storage = tensor.untyped_storage()
        self._live[storage._cdata] = storage

    def stop(self) -> None:
        """Note nothing from here on."""
        self._on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator on fake tensors and note its outputs."""
        kwargs = kwargs or {}
        found = self._known.get(func)
        if found is None:
            found = self._known[func] = _classify(str(func))
        name, kind, of_attention = found
        if name == "prim.device.default":
            return args[0].fake_device
        self.trace.num_operators += 1
        if name == "aten._local_scalar_dense.default":
            return self._scalar(args[0])
        if of_attention and not self.attention.inside:
            raise Untraceable(f"{self._where()} reaches torch's own choice of attention: {name}")
        if kind != _OTHER and not self._has_values(args):
            out = self._run_shortly(func, name, args, kwargs, kind)
        else:
            out = self._run(func, name, args, kwargs)
        self._note(name, args, kwargs, [out] if type(out) is FakeTensor else tensors_in(out))
        return out

    def _has_values(self, args: Any) -> bool:
        """Whether values of a result may be known, or an argument is not on the card."""
        for arg in args:
            if type(arg) is FakeTensor:
                if self.shadows.has_values(arg) or arg.fake_device.type != "cuda":
                    return True
            elif isinstance(arg, torch.Tensor) or (isinstance(arg, list) and self._has_values(arg)):
                return True
        return False

    def _run_shortly(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kind: int
    ) -> Any:
        if kind == _VIEW:
            return self.shortcuts.view(func, args, kwargs)
        if kind == _IN_PLACE:
            return args[0]
        key = self.shortcuts.key(func, args, kwargs)
        if key is None:
            return self._run(func, name, args, kwargs)
        outputs = self.shortcuts.recall(key)
        if outputs is None:
            out = self._run(func, name, args, kwargs)
            self.shortcuts.remember(key, [out] if type(out) is FakeTensor else list(out))
            return out
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "aten._grouped_mm.default" and args[0].dtype != torch.bfloat16:
            return _grouped_mm(*args)
        try:
            out = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._run_on_values(func, args, kwargs)
        self.shadows.follow(func, args, kwargs, out)
        return out

    def _run_on_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator whose output's shape depends on values: run it on them where known."""
        inputs = tensors_in((args, kwargs))
        if any(self.shadows.known(tensor) is None for tensor in inputs):
            raise Untraceable(f"{self._where()} needs values of computed tensors: {func}")
        real = self.shadows.put_off(func, args, kwargs).get()
        if not isinstance(real, torch.Tensor):
            if isinstance(real, tuple):
                return tuple(self._fake(each, inputs) for each in real)
            return real
        return self._fake(real, inputs)

    def _fake(self, real: Any, inputs: list[Any]) -> Any:
        fake = torch.ops.aten.empty.memory_format(
            real.shape, dtype=real.dtype, device=inputs[0].device
        )
        self.shadows.attach(fake, Known(None, real))
        return fake

    def _scalar(self, tensor: Any) -> Any:
        known = self.shadows.known(tensor)
        if known is None:
            raise Untraceable(f"{self._where()} looks at the value of a computed tensor")
        with _disable_current_modes():
            return known.get().item()

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]
    ) -> None:
        if not outputs or not _on_card(outputs[0]):
            return
        special = name in kernels.SPECIAL
        call = kernels.Call(args, kwargs, outputs) if special else None
        before = self._scratch(name, kernels.BEFORE, call) if call else []
        shown = kernels.HIDDEN_OUTPUTS.get(name)
        cause = -1
        live = self._live
        for place, tensor in enumerate(outputs):
            if shown is not None and place not in shown:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in live or not storage.nbytes():
                continue
            cause = self._cause(name) if cause < 0 else cause
            number = self._allocate(storage.nbytes(), cause)
            live[key] = weakref.ref(storage, self._freeing(key, number))
        if call is None:
            return
        after = self._scratch(name, kernels.SCRATCH, call)
        bounds = self._scratch(name, kernels.BOUNDED, call)
        self.trace.modelled.extend((*before, *after))
        if bounds:
            self.trace.optional.extend(bounds)
            self._doubt(f"memory that {name} takes while it runs is not known")
        self.trace.events.extend(-n - 1 for n in (*reversed(bounds), *reversed(after), *before))
        if name in kernels.MATRIX_PRODUCTS:
            self._workspace("blas")
            if kernels.needs_lt_workspace(name, args):
                self._workspace("blas_lt")

    def _allocate(self, size: int, cause: int) -> int:
        trace = self.trace
        trace.events.append(size)
        trace.causes.append(cause)
        self._count += 1
        return self._count - 1

    def _freeing(self, key: int, number: int) -> Any:
        def freed(_: Any) -> None:
            del self._live[key]
            self.shadows.overwritten.discard(key)
            if self._on:
                self.trace.events.append(-number - 1)

        return freed

    def _scratch(self, name: str, rules: dict[str, kernels.Rule], call: kernels.Call) -> list[int]:
        """Allocate what an operator takes beside its outputs."""
        if name not in rules:
            return []
        sizes = [size for size in rules[name](call, self.device) if size]
        if not sizes:
            return []
        cause = self._cause(f"{name} (while it runs)")
        return [self._allocate(size, cause) for size in sizes]

    def _doubt(self, doubt: str) -> None:
        if doubt not in self.trace.doubts:
            self.trace.doubts.append(doubt)

    def _workspace(self, name: str) -> None:
        if name not in self._workspaces:
            self._workspaces.add(name)
            self.trace.workspaces.append((len(self.trace.events), name))

    def _cause(self, operator: str) -> int:
        """The number of an operator at this module and source line."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
            frame = frame.f_back
        line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
        module = self._module()
        key = (operator, line[1], line[0], module)
        number = self._causes.get(key)
        if number is None:
            number = self._causes[key] = len(self.trace.cause_table)
            where = f"{short_path(line[0])}:{line[1]}" if line[0] else ""
            self.trace.cause_table.append(Cause(operator, module, where))
        return number

    def _module(self) -> str:
        return self.names.get(id(self.modules[-1]), "") if self.modules else ""

    def _where(self) -> str:
        return self._module() or "the model"


def _classify(name: str) -> tuple[str, int, bool]:
    """An operator's name, how it can be run, and whether only attention calls it."""
    sets = ((_VIEW, VIEWS), (_FRESH, FRESH), (_IN_PLACE, IN_PLACE))
    kind = next((kind for kind, names in sets if name in names), _OTHER)
    return name, kind, name.startswith(_ATTENTION)


def _grouped_mm(matrix: Any, weight: Any, *_: Any) -> Any:
    """Its own shape rule knows bf16 only."""
    shape = (matrix.shape[0], weight.shape[-1])
    return torch.ops.aten.empty.memory_format(shape, dtype=matrix.dtype, device=matrix.device)


def _on_card(tensor: Any) -> bool:
    device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
    return bool(device.type == "cuda")
