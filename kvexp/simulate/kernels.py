"""Memory that CUDA kernels take while they run, which tensors without data do not show.

Each rule belongs to an operator and gives the sizes it allocates, before or after its outputs, and
frees again when it is done.
Operators that need such memory but have no rule here are listed with an upper bound: the result
is then a range.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvexp.simulate.device import Device

_PAGE = 256  # to which the parts of one scratch area are aligned


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with its arguments and outputs; tensors only have shapes and dtypes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]


Rule = Callable[[Call, Device], list[int]]


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _sort(call: Call, device: Device) -> list[int]:
    """One row: a range of indices, and of a long one the keys, counts and states of a radix sort.

    torch's `native/cuda/Sort.cpp` and `SortStable.cu`.
    """
    tensor = call.args[0]
    count = tensor.numel()
    if tensor.dim() == 0 or count == 0 or count != tensor.shape[-1]:
        return []
    indices = 8 * count
    if count <= device.sort_small:
        return [indices]
    tiles = -(-count // device.sort_tile)
    own = (
        2 * _pages(_bytes(tensor))
        + device.sort_counts
        + device.sort_tile_state * tiles
        + 2 * _PAGE
        - 1
    )
    return [indices, own]


def _cumsum(call: Call, device: Device) -> list[int]:
    """The input in the output's dtype, and for one row the state of each tile."""
    tensor, out = call.args[0], call.outputs[0]
    sizes = [_bytes(out)] if tensor.dtype != out.dtype else []
    if tensor.numel() != tensor.shape[call.args[1]]:
        return sizes
    tiles = -(-tensor.numel() // device.scan_tile) + 32
    state = _pages(16 * tiles) + (_PAGE if out.element_size() == 8 else 0)
    return [*sizes, state + _PAGE - 1]


def _sum(call: Call, device: Device) -> list[int]:
    """Booleans are added as integers: a copy of them."""
    tensor, out = call.args[0], call.outputs[0]
    if str(tensor.dtype) != "torch.bool":
        return []
    return [tensor.numel() * out.element_size()]


def _grouped_mm(call: Call, device: Device) -> list[int]:
    """Problem sizes and pointers, one set an expert."""
    weight = call.args[1]
    if str(weight.dtype) != "torch.bfloat16":
        return []
    experts = weight.shape[0] if weight.dim() == 3 else 0
    return [device.grouped_mm_per_expert * experts, device.grouped_mm_constant]


def _reduction(call: Call, device: Device) -> list[int]:
    """An input that 32-bit offsets cannot address is reduced in parts."""
    if _bytes(call.args[0]) <= device.split_index_bytes:
        return []
    return [device.split_index_scratch * call.outputs[0].numel()]


def _safe_softmax(call: Call, device: Device) -> list[int]:
    """Which scores are masked, which rows are wholly, and the zero that goes there."""
    tensor = call.args[0]
    return [tensor.numel(), tensor.numel() // tensor.shape[call.args[1]], 4]


def _cudnn_scalars(call: Call, device: Device) -> list[int]:
    """Seed and offset of the dropout that is not used."""
    return [8] * device.cudnn_scalars


def _cudnn_attention(call: Call, device: Device) -> list[int]:
    return [device.cudnn_scratch]


def _efficient_attention(call: Call, device: Device) -> list[int]:
    """An fp32 accumulator of the output's size for large heads in half precision."""
    query, value, out = call.args[0], call.args[2], call.outputs[0]
    size = max(query.shape[-1], value.shape[-1])
    if query.element_size() != 2 or size <= device.efficient_accumulator_over:
        return []
    return [4 * out.numel()]


BEFORE: dict[str, Rule] = {
    "aten._scaled_dot_product_cudnn_attention.default": _cudnn_scalars,
}
"""What is allocated before the outputs."""

SCRATCH: dict[str, Rule] = {
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
    "aten.cumsum.default": _cumsum,
    "aten.sum.default": _sum,
    "aten._grouped_mm.default": _grouped_mm,
    "aten.max.dim": _reduction,
    "aten.min.dim": _reduction,
    "aten._safe_softmax.default": _safe_softmax,
    "aten._scaled_dot_product_cudnn_attention.default": _cudnn_attention,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_attention,
}
"""What is allocated after the outputs."""


def _of_input(call: Call, device: Device) -> list[int]:
    """At most the input once more, and its indices."""
    tensor = call.args[0]
    return [_bytes(tensor), 8 * tensor.numel()]


def _of_output(call: Call, device: Device) -> list[int]:
    """At most the output once more."""
    return [max((_bytes(out) for out in call.outputs), default=0)]


def _sort_rows(call: Call, device: Device) -> list[int]:
    """Several rows, or long ones of another dtype: at most keys and indices twice more."""
    tensor = call.args[0]
    one_row = tensor.dim() > 0 and tensor.numel() == tensor.shape[-1]
    if one_row or tensor.numel() <= 1:
        return []
    return [2 * _bytes(tensor), 16 * tensor.numel()]


def _accumulate(call: Call, device: Device) -> list[int]:
    """Values are added in the order of their sorted indices: at most six words an index."""
    if not (len(call.args) > 3 and call.args[3]):
        return []
    indices = [index for index in call.args[1] if index is not None]
    return [48 * max((index.numel() for index in indices), default=0)]


BOUNDED: dict[str, Rule] = {
    "aten.sort.default": _sort_rows,
    "aten.sort.stable": _sort_rows,
    "aten.index_put.default": _accumulate,
    "aten.index_put_.default": _accumulate,
    "aten.nonzero.default": _of_input,
    "aten._fft_r2c.default": _of_output,
    "aten._fft_c2r.default": _of_output,
    "aten._fft_c2c.default": _of_output,
    "aten.multinomial.default": _of_input,
    "aten.unique_dim.default": _of_input,
    "aten._unique2.default": _of_input,
    "aten.linalg_solve_triangular.default": _of_output,
    "aten.triangular_solve.default": _of_output,
    "aten.linalg_inv_ex.default": _of_output,
}
"""Operators whose kernels take memory that was not measured: an upper bound, not a rule."""

MATRIX_PRODUCTS = frozenset(
    {
        "aten.mm.default",
        "aten.bmm.default",
        "aten.addmm.default",
        "aten.baddbmm.default",
        "aten.addbmm.default",
        "aten.mv.default",
        "aten.addmv.default",
        "aten.dot.default",
    }
)
"""Operators that take cuBLAS's workspace."""


def needs_lt_workspace(operator: str, args: tuple[Any, ...]) -> bool:
    """A product with a bias row goes to cuBLASLt, which has a workspace of its own."""
    if operator != "aten.addmm.default":
        return False
    bias, matrix = args[0], args[2]
    return bool(bias.dim() == 1 and min(matrix.shape) > 1)


HIDDEN_OUTPUTS = {
    "aten._scaled_dot_product_cudnn_attention.default": (0,),
    "aten._scaled_dot_product_efficient_attention.default": (0,),
}
"""Of these operators only some outputs are allocated when nothing needs gradients."""


SPECIAL = frozenset((*BEFORE, *SCRATCH, *BOUNDED, *MATRIX_PRODUCTS))
"""Operators with any rule."""
