"""Bytes of a matrix in every weight format: elements, scales and zero points.

Layouts are those that vLLM keeps on the device (`model_executor/layers/quantization`): scales of
grouped formats have the compute dtype, those of 8-bit formats are fp32.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvexp.dtypes import DType, Quantization
from kvexp.request import Model, QuantizationConfig

BITS = {
    Quantization.fp8: 8,
    Quantization.w8a8: 8,
    Quantization.w4a16: 4,
    Quantization.awq: 4,
    Quantization.gptq: 4,
    Quantization.bitsandbytes: 4,
    Quantization.mxfp4: 4,
    Quantization.nvfp4: 4,
}
"""Bits of an element where the checkpoint does not say."""

PER_MATRIX, PER_ROW = -1, 0
MX_GROUP = 32
"""Elements that share one byte of scale in OCP's microscaling formats, MXFP8 and MXFP4."""

_GROUPS = {
    Quantization.fp8: PER_MATRIX,
    Quantization.w8a8: PER_ROW,
    Quantization.w4a16: 128,
    Quantization.awq: 128,
    Quantization.gptq: 128,
    Quantization.bitsandbytes: 64,
    Quantization.mxfp4: MX_GROUP,
    Quantization.nvfp4: 16,
}

_FP8 = QuantizationConfig(method=Quantization.fp8, group_size=PER_MATRIX)

_SCALE_BYTES = {
    Quantization.fp8: 4,
    Quantization.w8a8: 4,
    Quantization.bitsandbytes: 4,
    Quantization.mxfp4: 1,
    Quantization.nvfp4: 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter or buffer on the device.

    `role` is linear (a matrix that weight quantisation covers), embedding, router, conv, norm, bias
    or scale. A module that maps `inputs` numbers to others states them and its `outputs`, one
    figure for each module that is fused in it; `count` such modules stand in one tensor.
    """

    name: str
    numel: int
    itemsize_bytes: int
    role: str
    inputs: int = 0
    outputs: tuple[int, ...] = ()
    count: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, without the allocator's rounding."""
        return self.numel * self.itemsize_bytes


def format_of(model: Model, quantization: Quantization | None) -> QuantizationConfig | None:
    """How matrices are stored: as the checkpoint says, else by the method's defaults."""
    if quantization is None:
        return None
    own = model.quantization_config
    if own is not None and own.method is quantization:
        return own
    return QuantizationConfig(
        method=quantization,
        group_size=_GROUPS[quantization],
        zero_point=quantization is Quantization.awq,
    )


def bits_of(stored: QuantizationConfig) -> int:
    """Bits of an element of a quantised matrix."""
    return stored.bits or BITS[stored.method]


def linear(
    name: str,
    outputs: int | tuple[int, ...],
    inputs: int,
    dtype: DType,
    stored: QuantizationConfig | None,
    *,
    count: int = 1,
) -> Iterator[Tensor]:
    """`count` matrices fused from as many as there are `outputs`, with what belongs to them."""
    fused = (outputs,) if isinstance(outputs, int) else outputs
    rows, columns = sum(fused), inputs
    matrix = Tensor(
        name=name,
        numel=count * rows * columns,
        itemsize_bytes=dtype.itemsize_bytes,
        role="linear",
        inputs=inputs,
        outputs=fused,
        count=count,
    )
    if stored is None:
        yield matrix
        return
    bits = bits_of(stored)
    yield replace(matrix, numel=matrix.numel * bits // 8, itemsize_bytes=1)
    scales = count * _num_scales(stored, rows, columns)
    is_mxfp8 = stored.method is Quantization.fp8 and stored.group_size == MX_GROUP
    item = 1 if is_mxfp8 else _SCALE_BYTES.get(stored.method, dtype.itemsize_bytes)
    yield Tensor(name=f"{name}.weight_scale", numel=scales, itemsize_bytes=item, role="scale")
    if stored.method is Quantization.nvfp4:
        yield Tensor(name=f"{name}.global_scale", numel=2 * count, itemsize_bytes=4, role="scale")
    if stored.zero_point:
        zeros = scales * bits // 8
        yield Tensor(name=f"{name}.zeros", numel=zeros, itemsize_bytes=1, role="scale")
    if stored.act_order:
        yield Tensor(name=f"{name}.g_idx", numel=count * columns, itemsize_bytes=4, role="scale")


def stored_as(
    stored: QuantizationConfig | None, modules: Sequence[str]
) -> QuantizationConfig | None:
    """The format of a matrix that is fused from `modules`; none where they are ignored."""
    if stored is None or _is_among(stored.ignore, modules):
        return None
    return _FP8 if _is_among(stored.fp8, modules) else stored


def _is_among(patterns: Sequence[str], modules: Sequence[str]) -> bool:
    return any(_matches(pattern, module) for pattern in patterns for module in modules)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    glob = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.search(rf"(^|\.){glob}(\.|$)", module) is not None


def _num_scales(stored: QuantizationConfig, rows: int, columns: int) -> int:
    if stored.block_size:
        return -(-rows // stored.block_size) * -(-columns // stored.block_size)
    group = _GROUPS[stored.method] if stored.group_size is None else stored.group_size
    if group == PER_MATRIX:
        return 1
    if group == PER_ROW:
        return rows
    return rows * -(-columns // group)
