"""quantization_config of a checkpoint, in the spelling of each tool, and its KV-cache scheme."""

from collections.abc import Callable
from typing import Any

from kvexp.dtypes import KvDtype, Quantization
from kvexp.errors import InvalidValue
from kvexp.formats import MX_GROUP, PER_MATRIX, PER_ROW
from kvexp.hf.section import Section
from kvexp.request import QuantizationConfig

IGNORE_KEYS = (
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "llm_int8_skip_modules",
    "exclude_modules",
    "exclude",
)


def quantization(
    section: Section,
) -> tuple[QuantizationConfig | None, KvDtype | None, bool]:
    """The format of the matrices, the KV-cache scheme, and whether only experts are MXFP4.

    Raises:
        InvalidValue: a method or a scheme is not known.
    """
    outer = section.around()
    found = outer.inner("quantization_config", "compression_config") or section.inner(
        "quantization_config", "compression_config"
    )
    if found is None or not found.values:
        return None, None, False
    method = found.text("quant_method")
    if method is None and found.has("quant_algo", "quantization"):
        method = "modelopt"
    if method is None:
        raise found.missing("quant_method")
    name = method.lower().replace("_", "-")
    if name not in _METHODS:
        raise InvalidValue(
            f"config.json: {found.name_of('quant_method')} must be one of"
            f" {', '.join(sorted(_METHODS))}, got {method!r}"
        )
    config = _METHODS[name](found)
    if config is not None:
        config.ignore = _ignored(found)
        found.assume(_described(config, method))
    return config, _kv_scheme(found), name == "mxfp4"


def _described(config: QuantizationConfig, method: str) -> str:
    return f"weights are stored as {config.method.name} (quantization_config: {method})"


def _fp8(section: Section) -> QuantizationConfig:
    block = section.integers("weight_block_size")
    if block:
        return QuantizationConfig(method=Quantization.fp8, block_size=max(1, block[0]))
    return QuantizationConfig(method=Quantization.fp8, group_size=PER_MATRIX)


def _fbgemm(section: Section) -> QuantizationConfig:
    return QuantizationConfig(method=Quantization.fp8, group_size=PER_ROW)


def _awq(section: Section) -> QuantizationConfig:
    zero = section.flag("zero_point")
    return QuantizationConfig(
        method=Quantization.awq,
        bits=_bits(section, "bits", "w_bit"),
        group_size=_group(section, "group_size", "q_group_size"),
        zero_point=zero is not False,
    )


def _gptq(section: Section) -> QuantizationConfig:
    symmetric = section.flag("sym")
    return QuantizationConfig(
        method=Quantization.gptq,
        bits=_bits(section, "bits"),
        group_size=_group(section, "group_size"),
        zero_point=symmetric is False,
        act_order=section.flag("desc_act") is True,
    )


def _bitsandbytes(section: Section) -> QuantizationConfig:
    if section.flag("load_in_8bit", "_load_in_8bit"):
        return QuantizationConfig(method=Quantization.w8a8, group_size=PER_ROW)
    return QuantizationConfig(method=Quantization.bitsandbytes, group_size=64)


def _mxfp4(section: Section) -> None:
    """Of gpt-oss the experts alone are MXFP4; the reader marks them."""


def _compressed(section: Section) -> QuantizationConfig | None:
    groups = section.inner("config_groups")
    if groups is None or not groups.values:
        section.assume("quantization_config has no config_groups: no matrix is quantised")
        return None
    name = min(groups.values, key=str)
    group = groups.inner(name)
    weights = group.inner("weights") if group is not None else None
    if weights is None:
        raise groups.missing(f"{name}.weights")
    bits = weights.required("num_bits")
    kind = weights.text("type") or "int"
    strategy = weights.text("strategy")
    size = weights.integer("group_size", least=-1)
    form = (section.text("format") or "").lower()
    if "nvfp4" in form or (kind == "float" and bits == 4 and size == 16):
        return QuantizationConfig(method=Quantization.nvfp4, group_size=16)
    if "mxfp4" in form or (kind == "float" and bits == 4):
        return QuantizationConfig(method=Quantization.mxfp4, group_size=32)
    if "mxfp8" in form or (kind == "float" and bits == 8 and size == MX_GROUP):
        return QuantizationConfig(method=Quantization.fp8, group_size=MX_GROUP)
    if kind == "float" and bits == 8:
        block = weights.integers("block_structure")
        if block:
            return QuantizationConfig(method=Quantization.fp8, block_size=max(1, block[0]))
        return QuantizationConfig(method=Quantization.fp8, group_size=_strategy(weights, strategy))
    if kind == "int" and bits in (4, 8):
        packed = bits == 4 or "pack" in form
        grouped = size if strategy == "group" and size else _strategy(weights, strategy)
        symmetric = weights.flag("symmetric")
        return QuantizationConfig(
            method=Quantization.w4a16 if packed else Quantization.w8a8,
            bits=bits,
            group_size=grouped,
            zero_point=symmetric is False,
        )
    raise InvalidValue(
        f"config.json: {weights.path} of {bits}-bit {kind} is a format that is not known"
    )


def _strategy(section: Section, strategy: str | None) -> int:
    known = {None: PER_ROW, "tensor": PER_MATRIX, "channel": PER_ROW}
    if strategy not in known:
        names = ("strategy",)
        raise section.wrong(names, "tensor, channel, group or block", strategy)
    return known[strategy]


def _modelopt(section: Section) -> QuantizationConfig:
    inner = section.inner("quantization") or section
    algorithm = (inner.text("quant_algo") or "").upper()
    if algorithm == "FP8":
        return QuantizationConfig(method=Quantization.fp8, group_size=PER_MATRIX)
    if algorithm in ("FP8_PB_WO", "FP8_BLOCK"):
        return QuantizationConfig(method=Quantization.fp8, block_size=128)
    if algorithm == "MXFP8":
        return QuantizationConfig(method=Quantization.fp8, group_size=MX_GROUP)
    if algorithm in ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", ""):
        size = inner.integer("group_size") or 16
        if algorithm in ("MIXED_PRECISION", ""):
            inner.assume("quant_algo is mixed or not given: every matrix is counted as nvfp4")
        return QuantizationConfig(method=Quantization.nvfp4, group_size=size)
    raise inner.wrong(("quant_algo",), "FP8, FP8_PB_WO, MXFP8 or NVFP4", algorithm)


def _auto_round(section: Section) -> QuantizationConfig:
    return QuantizationConfig(
        method=Quantization.gptq,
        bits=_bits(section, "bits"),
        group_size=_group(section, "group_size"),
        zero_point=section.flag("sym") is False,
    )


_METHODS: dict[str, Callable[[Section], QuantizationConfig | None]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fbgemm,
    "awq": _awq,
    "awq-marlin": _awq,
    "gptq": _gptq,
    "gptq-marlin": _gptq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
}


def _bits(section: Section, *names: str) -> int:
    bits = section.required(*names)
    if bits not in (2, 3, 4, 8):
        raise section.wrong(names, "2, 3, 4 or 8", bits)
    return bits


def _group(section: Section, *names: str) -> int:
    size = section.integer(*names, least=-1)
    if size is None:
        section.assume(f"{section.name_of(*names)} is not given: 128 (every tool's default)")
        return 128
    return PER_ROW if size <= 0 else size


def _ignored(section: Section) -> list[str]:
    inner = section.inner("quantization")
    for where in (section, inner):
        found = None if where is None else where.texts(*IGNORE_KEYS)
        if found:
            return found
    return []


def _kv_scheme(section: Section) -> KvDtype | None:
    """The dtype that a checkpoint asks for its cache; an unknown one is an error."""
    inner = section.inner("quantization") or section
    algorithm = inner.text("kv_cache_quant_algo")
    if algorithm is not None:
        known = {"FP8": KvDtype.fp8, "NVFP4": KvDtype.nvfp4}
        if algorithm.upper() not in known:
            raise inner.wrong(("kv_cache_quant_algo",), "FP8 or NVFP4", algorithm)
        return known[algorithm.upper()]
    scheme: Any = section.get("kv_cache_scheme")
    if scheme is None:
        return None
    if isinstance(scheme, str) and scheme.upper() == "FP8":
        return KvDtype.fp8
    named = section.inner("kv_cache_scheme")
    assert named is not None
    bits, kind = named.integer("num_bits"), named.text("type")
    if bits == 8 and kind == "float":
        return KvDtype.fp8
    raise InvalidValue(f"config.json: {named.path} must be 8-bit float, got {bits}-bit {kind}")
