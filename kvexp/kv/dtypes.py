"""Element types of a KV cache: names, sizes and scale modes.

Names and sizes follow vLLM's ``--kv-cache-dtype`` choices (`config/cache.py`) and torch's
element types; nothing here needs torch.
"""

from __future__ import annotations

from enum import Enum

_ELEMENT_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}

_STORAGE_OF_NAME = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "fp8": "uint8",
    "fp8_e4m3": "uint8",
    "fp8_e5m2": "uint8",
    "fp8_ds_mla": "uint8",
    "fp8_inc": "float8_e4m3fn",
    "fp8_per_token_head": "uint8",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "uint8",
    "nvfp4": "uint8",
    "turboquant_k8v4": "uint8",
    "turboquant_4bit_nc": "uint8",
    "turboquant_k3v4_nc": "uint8",
    "turboquant_3bit_nc": "uint8",
}

SCALE_BYTES = 4
"""Bytes of one float32 scale."""


class KVQuantMode(Enum):
    """How a cache's elements are scaled, as far as it changes their bytes."""

    NONE = "none"
    FP8_PER_TENSOR = "fp8_per_tensor"
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
    INT4_PER_TOKEN_HEAD = "int4_per_token_head"
    NVFP4 = "nvfp4"

    @property
    def has_token_head_scales(self) -> bool:
        """Whether each token and KV head carries a K and a V scale of its own."""
        return self in _TOKEN_HEAD_MODES


_TOKEN_HEAD_MODES = frozenset(
    (
        KVQuantMode.INT8_PER_TOKEN_HEAD,
        KVQuantMode.FP8_PER_TOKEN_HEAD,
        KVQuantMode.INT4_PER_TOKEN_HEAD,
    )
)
_MODE_OF_NAME = {mode.value: mode for mode in (*_TOKEN_HEAD_MODES, KVQuantMode.NVFP4)}


def storage_dtype(name: str) -> str:
    """Return the element type that a dtype or KV-cache dtype name is stored in.

    Args:
        name: A torch dtype name (``bfloat16``, ``half``) or a KV-cache dtype (``fp8``).

    Returns:
        The canonical torch name, e.g. ``uint8`` for ``fp8``.

    Raises:
        ValueError: If the name is not known.
    """
    canonical = _STORAGE_OF_NAME.get(name, name)
    if canonical not in _ELEMENT_BYTES:
        raise ValueError(f"unknown dtype {name!r}")
    return canonical


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype (`storage_dtype` names are accepted).

    Raises:
        ValueError: If the dtype is not known.
    """
    size = _ELEMENT_BYTES.get(dtype)
    return size if size is not None else _ELEMENT_BYTES[storage_dtype(dtype)]


def kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """Return the scale mode that a ``--kv-cache-dtype`` value implies.

    Every name that starts with ``fp8`` is per tensor, except ``fp8_per_token_head``.
    """
    mode = _MODE_OF_NAME.get(kv_cache_dtype)
    if mode is not None:
        return mode
    return KVQuantMode.FP8_PER_TENSOR if kv_cache_dtype.startswith("fp8") else KVQuantMode.NONE


def nvfp4_dim(head_size: int) -> int:
    """Return the bytes of one NVFP4 head: two elements a byte and a scale for each 16."""
    return head_size // 2 + head_size // 16


_TURBOQUANT_BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""Bits of an element of keys and of values (vLLM `turboquant/config.py`)."""


def turboquant_slot_bytes(kv_cache_dtype: str, head_size: int) -> int:
    """Return the bytes of one token and head: packed keys and values, an even number.

    Keys of 8 bits are fp8 alone, others have a float16 norm; values have a float16 scale and zero.

    Raises:
        KeyError: If it is no TurboQuant dtype.
    """
    key_bits, value_bits = _TURBOQUANT_BITS[kv_cache_dtype]
    key = -(-head_size * key_bits // 8) + (0 if key_bits == 8 else 2)
    value = -(-head_size * value_bits // 8) + 4
    return (key + value + 1) // 2 * 2
