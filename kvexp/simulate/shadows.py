"""Real values of small tensors beside the fake ones, so that code which looks at values goes on.

Masks and positions are built from token ids and counters: known, small, and looked at (is the
mask all ones?). What depends on weights stays without values. Values are computed when somebody
looks, which for most of them is never.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

LIMIT = 1 << 20
"""Elements of the largest tensor whose values are kept."""

_WITHOUT_VALUES = ("empty", "rand", "normal", "uniform", "exponential", "bernoulli", "multinomial")
_ATTRIBUTE = "_known_values"
_DEPTH = 100  # operators that are put off in a row


class Known:
    """Values that can be had, or have been."""

    __slots__ = ("_compute", "_value", "depth")

    def __init__(
        self, compute: Callable[[], Any] | None, value: Any = None, depth: int = 0
    ) -> None:
        self._compute = compute
        self._value = value
        self.depth = depth

    def get(self) -> Any:
        """The real tensor, or all that an operator gave."""
        if self._compute is not None:
            self._value = self._compute()
            self._compute = None
            self.depth = 0
        return self._value


class Shadows:
    """Follows operators with values where all inputs have some."""

    def __init__(self) -> None:
        self.overwritten: set[int] = set()
        self._waiting: list[Known] = []

    def known(self, tensor: Any) -> Known | None:
        """The values beside a fake tensor, a real tensor's own; None where they are unknown."""
        if type(tensor) is not FakeTensor:
            return Known(None, tensor) if tensor.numel() <= LIMIT else None
        found: Known | None = tensor.__dict__.get(_ATTRIBUTE)
        if found is None or tensor.untyped_storage()._cdata in self.overwritten:
            return None
        return found

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Give the outputs values where the inputs have them; forget what was overwritten."""
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        if not outputs:
            return
        writes = func._schema.is_mutable
        known = (
            all(self.known(tensor) is not None for tensor in inputs)
            and all(tensor.numel() <= LIMIT for tensor in outputs)
            and not any(word in func._schema.name for word in _WITHOUT_VALUES)
        )
        if not known:
            if writes:
                self._forget(inputs)
            return
        if writes:
            self._settle()
        whole = self.put_off(func, args, kwargs)
        if writes:
            whole.get()
        elif not isinstance(out, list | tuple):
            self.attach(out, whole)
        else:
            for place, fake in enumerate(outputs):
                self.attach(fake, Known(_pick(whole, place), depth=whole.depth))

    def put_off(self, func: Any, args: Any, kwargs: Any) -> Known:
        """An operator on the values, computed on the CPU when it is wanted."""
        depth = 0

        def value(item: Any) -> Any:
            nonlocal depth
            if not isinstance(item, torch.Tensor):
                return torch.device("cpu") if isinstance(item, torch.device) else item
            known = self.known(item)
            if known is None:
                raise AssertionError("only operators on known values are put off")
            depth = max(depth, known.depth + 1)
            return known

        known_args, known_kwargs = tree_map(value, (args, kwargs))

        def compute() -> Any:
            real_args, real_kwargs = tree_map(_real, (known_args, known_kwargs))
            with _disable_current_modes():
                return func(*real_args, **real_kwargs)

        whole = Known(compute, depth=depth)
        if depth > _DEPTH:
            whole.get()
        else:
            self._waiting.append(whole)
        return whole

    @staticmethod
    def attach(fake: Any, known: Known) -> None:
        """Keep values beside a fake tensor."""
        fake.__dict__[_ATTRIBUTE] = known

    @staticmethod
    def has_values(fake: Any) -> bool:
        """Whether a fake tensor was given values."""
        return _ATTRIBUTE in fake.__dict__

    def _settle(self) -> None:
        """Compute what was put off before values change under it."""
        for known in self._waiting:
            known.get()
        self._waiting.clear()

    def _forget(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            if type(tensor) is FakeTensor and self.has_values(tensor):
                self.overwritten.add(tensor.untyped_storage()._cdata)


def _real(item: Any) -> Any:
    return item.get() if isinstance(item, Known) else item


def _pick(whole: Known, place: int) -> Callable[[], Any]:
    return lambda: tensors_in(whole.get())[place]


def tensors_in(tree: Any) -> list[Any]:
    """The tensors in arguments or results, in order."""
    found: list[Any] = []
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(item.values()))
    return found
