"""Frequent operators on fake tensors without what the fake mode does around each of them.

A view is made by the operator's own shape rule, an operator in place gives its input. Of one with
a fresh output the fake mode's answer is remembered by shapes, strides, dtypes and options, and
given again. This is what makes a whole model traceable in less than a second.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

CARD = torch.device("cuda", 0)
_MAKE = torch.Tensor._make_subclass
_LIMIT = 100_000  # answers

_VIEWS = (
    *("view.default", "_unsafe_view.default", "t.default", "transpose.int", "slice.Tensor"),
    *("unsqueeze.default", "squeeze.dim", "select.int", "expand.default", "permute.default"),
    *("split.Tensor", "split_with_sizes.default", "alias.default", "detach.default"),
    *("view_as_complex.default", "view_as_real.default"),
)
_FRESH = (
    *("mm.default", "bmm.default", "addmm.default", "cat.default", "clone.default"),
    *("mul.Tensor", "mul.Scalar", "add.Tensor", "sub.Tensor", "div.Tensor", "rsub.Scalar"),
    *("pow.Tensor_Scalar", "mean.dim", "sum.dim_IntList", "rsqrt.default", "neg.default"),
    *("silu.default", "gelu.default", "exp.default", "cos.default", "sin.default"),
    *("sigmoid.default", "softplus.default", "tanh.default", "relu.default", "_to_copy.default"),
    *("_softmax.default", "masked_fill.Scalar", "constant_pad_nd.default", "where.self"),
    *("embedding.default", "clamp.default", "ge.Scalar", "floor_divide.default", "histc.default"),
    *(
        "topk.default",
        "sort.default",
        "bitwise_not.default",
        "tril.default",
        "native_layer_norm.default",
    ),
    *("_grouped_mm.default", "empty_like.default", "zeros_like.default", "cumsum.default"),
    *("index.Tensor", "_scaled_dot_product_cudnn_attention.default"),
)
_IN_PLACE = (
    *("div_.Tensor", "mul_.Tensor", "add_.Tensor", "clamp_.default", "masked_fill_.Scalar"),
    *("index_put_.default", "copy_.default", "zero_.default"),
)
VIEWS = frozenset(f"aten.{name}" for name in _VIEWS)
FRESH = frozenset(f"aten.{name}" for name in _FRESH)
IN_PLACE = frozenset(f"aten.{name}" for name in _IN_PLACE)

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_answers: dict[Any, list[_Layout | int | None]] = {}


class Shortcuts:
    """Makes the fake tensors of one fake mode."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._attributes: dict[str, Any] = {}

    def view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of an operator that only looks at its input differently."""
        with in_kernel_invocation_manager(self._mode):
            out = func(*args, **kwargs)
        if isinstance(out, list | tuple):
            return [self._fake(each) for each in out]
        return self._fake(out)

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the layout of an operator's outputs depends on; None where that is not plain."""
        parts: list[Any] = [func]
        if not _describe(args, parts):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not _describe((value,), parts):
                return None
        return tuple(parts)

    def recall(self, key: Any) -> list[Any] | None:
        """The outputs of an operator as the fake mode answered before."""
        layouts = _answers.get(key)
        if layouts is None:
            return None
        return [self._make(*layout) if isinstance(layout, tuple) else layout for layout in layouts]

    def remember(self, key: Any, outputs: list[Any]) -> None:
        """Keep the fake mode's answer where every output fills a storage of its own."""
        if len(_answers) >= _LIMIT:
            _answers.clear()
        layouts: list[_Layout | int | None] = []
        for tensor in outputs:
            if tensor is None or type(tensor) is int:
                layouts.append(tensor)
                continue
            if type(tensor) is not FakeTensor or tensor.fake_device != CARD:
                return
            layout = (tensor.shape, tensor.stride(), tensor.dtype)
            if _span(*layout) != tensor.untyped_storage().nbytes():
                return
            layouts.append(layout)
        _answers[key] = layouts

    def _make(self, shape: Any, stride: Any, dtype: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._fake(elem)

    def _fake(self, elem: Any) -> Any:
        if not self._attributes:
            first = FakeTensor(self._mode, elem, CARD)
            self._attributes = dict(first.__dict__)
            return first
        fake = _MAKE(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=CARD)
        fake.__dict__.update(self._attributes)
        return fake


def _describe(args: tuple[Any, ...] | list[Any], parts: list[Any]) -> bool:
    """Append what matters of arguments; False where one is not described by its layout."""
    for arg in args:
        if type(arg) is FakeTensor:
            if arg.fake_device != CARD:
                return False
            parts += (arg.shape, arg.stride(), arg.dtype)
        elif isinstance(arg, torch.Tensor):
            return False
        elif isinstance(arg, list | tuple):
            parts.append(len(arg))
            if not _describe(arg, parts):
                return False
        else:
            parts += (type(arg), arg)
    return True


def _span(shape: Any, stride: Any, dtype: Any) -> int:
    """Bytes from the first to the last element."""
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return int((last + 1) * dtype.itemsize)
