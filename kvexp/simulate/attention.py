"""Which backend a card's scaled_dot_product_attention takes, and a stand-in that takes it.

Left to itself, torch without a card would run its own fallback, which builds the whole matrix of
scores: twenty times the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvexp.simulate.device import Device

HALF = ("torch.float16", "torch.bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """What the choice depends on."""

    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    unit_stride: bool
    has_mask: bool
    enable_gqa: bool

    @property
    def is_half(self) -> bool:
        """Two bytes an element."""
        return self.dtype in HALF

    @property
    def grouped(self) -> bool:
        """Fewer heads of K and V than of Q."""
        return self.query[1] != self.key[1]


def eligible(shapes: Shapes, device: Device) -> list[str]:
    """The backends that can run it, in the card's order; math always can."""
    can = {
        "cudnn": _cudnn(shapes, device),
        "flash": _flash(shapes, device),
        "efficient": _efficient(shapes),
        "math": True,
    }
    return [name for name in device.attention if can[name]]


def _fusable(shapes: Shapes) -> bool:
    if not len(shapes.query) == len(shapes.key) == len(shapes.value) == 4:
        return False
    if not shapes.query[0] == shapes.key[0] == shapes.value[0]:
        return False
    if shapes.grouped and not shapes.enable_gqa:
        return False
    return shapes.unit_stride


def _cudnn(shapes: Shapes, device: Device) -> bool:
    sizes = (shapes.query[-1], shapes.value[-1])
    return (
        _fusable(shapes)
        and shapes.is_half
        and all(size % 8 == 0 and size <= device.fused_head_limit for size in sizes)
    )


def _flash(shapes: Shapes, device: Device) -> bool:
    return (
        _fusable(shapes)
        and shapes.is_half
        and not shapes.has_mask
        and shapes.query[-1] == shapes.value[-1] <= device.fused_head_limit
    )


def _efficient(shapes: Shapes) -> bool:
    step = 8 if shapes.is_half else 4
    return (
        _fusable(shapes)
        and not shapes.grouped
        and shapes.query[-1] % step == 0
        and shapes.value[-1] % step == 0
    )


@dataclass(slots=True)
class StandIn:
    """Replaces torch.nn.functional.scaled_dot_product_attention while a model is traced.

    `prefer` is the place among the eligible backends that is taken: 0 for the first.
    """

    device: Device
    cudnn: bool = True
    prefer: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    inside: bool = False
    has_choice: bool = False

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Run the backend that the card would choose."""
        backend = self._choose(query, key, value, attn_mask, enable_gqa)
        self.counts[backend] = self.counts.get(backend, 0) + 1
        if attn_mask is not None and str(attn_mask.dtype) == "torch.bool":
            attn_mask = _additive(attn_mask, query)
        self.inside = True
        try:
            return _RUN[backend](query, key, value, attn_mask, is_causal, scale, enable_gqa)
        finally:
            self.inside = False

    def _choose(self, query: Any, key: Any, value: Any, mask: Any, enable_gqa: bool) -> str:
        tensors = [query, key, value] + ([] if mask is None else [mask])
        shapes = Shapes(
            dtype=str(query.dtype),
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            unit_stride=all(tensor.stride(-1) == 1 for tensor in tensors),
            has_mask=mask is not None,
            enable_gqa=enable_gqa,
        )
        found = [name for name in eligible(shapes, self.device) if self.cudnn or name != "cudnn"]
        self.has_choice |= len(found) > 1
        return found[min(self.prefer, len(found) - 1)]


def _additive(mask: Any, query: Any) -> Any:
    """A mask of booleans as what is added to the scores."""
    import torch  # noqa: PLC0415

    zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
    lowest = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
    added = torch.where(mask, zero, lowest)
    del lowest  # the second scalar goes first
    return added


def _run_cudnn(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any, gqa: bool) -> Any:
    import torch  # noqa: PLC0415

    run = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    return run(q, k, v, mask, False, 0.0, causal, False, scale=scale)[0]


def _run_flash(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any, gqa: bool) -> Any:
    import torch  # noqa: PLC0415

    size = q.shape[-1]
    missing = -size % 8
    if missing:
        scale = size**-0.5 if scale is None else scale
        q, k, v = (torch.nn.functional.pad(each, (0, missing)) for each in (q, k, v))
    run = torch.ops.aten._scaled_dot_product_flash_attention.default
    out = run(q, k, v, 0.0, causal, False, scale=scale)[0]
    return out[..., :size] if missing else out


def _run_efficient(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any, gqa: bool) -> Any:
    import torch  # noqa: PLC0415

    if mask is not None:
        if any(stride % 8 for stride in mask.stride()[:-1]):
            length = mask.shape[-1]
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    run = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return run(q, k, v, mask, False, 0.0, causal, scale=scale)[0]


def _run_math(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any, gqa: bool) -> Any:
    import torch  # noqa: PLC0415

    run = torch.ops.aten._scaled_dot_product_attention_math.default
    return run(q, k, v, mask, 0.0, causal, None, scale=scale, enable_gqa=gqa)[0]


_RUN: dict[str, Callable[..., Any]] = {
    "cudnn": _run_cudnn,
    "flash": _run_flash,
    "efficient": _run_efficient,
    "math": _run_math,
}
