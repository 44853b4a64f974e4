"""Headers of GGUF files: metadata and tensor sizes, without the tensors.

The layout and the block sizes are those of ggml's `docs/gguf.md` and `ggml-common.h`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from kvexp.errors import InvalidValue
from kvexp.hf.safetensors import Stored

LARGEST_COUNT = 1 << 20
LARGEST_TEXT_BYTES = 1 << 26

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _ARRAY = 8, 9

BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Name, elements and bytes of a block by ggml's type number."""

MIXED_BITS = {
    "IQ1_S": 2.0042,
    "IQ1_M": 2.146,
    "IQ2_XXS": 2.3824,
    "IQ2_XS": 2.5882,
    "IQ2_S": 2.7403,
    "IQ2_M": 2.9294,
    "IQ3_XXS": 3.2548,
    "IQ3_XS": 3.4977,
    "IQ3_S": 3.6606,
    "IQ3_M": 3.7628,
    "IQ4_XS": 4.4597,
    "IQ4_NL": 4.6818,
    "Q2_K_S": 2.9697,
    "Q2_K": 3.1593,
    "Q3_K_S": 3.6429,
    "Q3_K_M": 4.0,
    "Q3_K_L": 4.2979,
    "Q4_K_S": 4.6672,
    "Q4_K_M": 4.8944,
    "Q5_K_S": 5.5704,
    "Q5_K_M": 5.7036,
}
"""Bits of an element of files in which more than one type stands, by the name of their type.

Those of Llama-3.1-8B in llama.cpp's `tools/quantize/README.md`, of Q3_K_M by the size of a public
file; a smaller model takes up to 3 % more, for its embedding.
"""


def bits_of(name: str) -> float | None:
    """Bits of an element of a file of this type (`Q8_0`, `Q4_K_M`); None where it is not known.

    Of a mixture that is not listed (`Q4_K_XL`) the type counts that it is made of most.
    """
    of_blocks = {known: 8 * size / elements for known, elements, size in BLOCKS.values()}
    known = of_blocks | MIXED_BITS
    parts = name.upper().split("_")
    prefixes = ("_".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((known[each] for each in prefixes if each in known), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """Metadata by key (of arrays the length alone) and the tensors."""

    metadata: Mapping[str, Any]
    tensors: list[Stored]


def read_gguf(path: Path) -> GgufHeader:
    """The header of one file.

    Raises:
        InvalidValue: the file is no GGUF file, or is damaged or cut off.
    """
    try:
        with path.open("rb") as file:
            return _header(_Reader(file, path))
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class _Reader:
    file: BinaryIO
    path: Path

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.exactly(struct.calcsize(code)))[0]

    def count(self, largest: int) -> int:
        value = int(self.scalar("<Q"))
        if value > largest:
            raise InvalidValue(f"{self.path} is damaged: it counts {value} of something")
        return value

    def text(self) -> str:
        return self.exactly(self.count(LARGEST_TEXT_BYTES)).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth:
            raise InvalidValue(f"{self.path} is damaged: metadata of the unknown kind {kind}")
        inner, number = self.scalar("<I"), self.count(1 << 24)
        for _ in range(number):
            self.value(inner, depth + 1)
        return number

    def exactly(self, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) != size:
            raise InvalidValue(f"{self.path} is cut off inside its header")
        return data


def _header(reader: _Reader) -> GgufHeader:
    if reader.file.read(4) != b"GGUF":
        raise InvalidValue(f"{reader.path} is no GGUF file")
    version = reader.scalar("<I")
    if version not in (2, 3):
        raise InvalidValue(f"{reader.path}: GGUF version {version} is not known; 2 and 3 are")
    num_tensors, num_keys = reader.count(LARGEST_COUNT), reader.count(LARGEST_COUNT)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.text()
        metadata[key] = reader.value(reader.scalar("<I"))
    return GgufHeader(metadata=metadata, tensors=[_tensor(reader) for _ in range(num_tensors)])


def _tensor(reader: _Reader) -> Stored:
    name, dimensions = reader.text(), reader.scalar("<I")
    if dimensions > 8:
        raise InvalidValue(f"{reader.path} is damaged: tensor {name!r} has {dimensions} dimensions")
    shape = tuple(int(reader.scalar("<Q")) for _ in range(dimensions))
    kind, _offset = reader.scalar("<I"), reader.scalar("<Q")
    if kind not in BLOCKS:
        raise InvalidValue(f"{reader.path}: tensor {name!r} has the unknown ggml type {kind}")
    dtype, elements, size = BLOCKS[kind]
    return Stored(
        name=name, dtype=dtype, shape=shape, size_bytes=-(-prod(shape) // elements) * size
    )


MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
    "starcoder2": "starcoder2",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "olmo2": "olmo2",
    "granite": "granite",
}
"""Model types by GGUF's `general.architecture`."""

_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "vocab_size": "vocab_size",
}


def config_of(header: GgufHeader, path: Path) -> dict[str, Any]:
    """The metadata by the names of a config.json.

    Raises:
        InvalidValue: the architecture is not known.
    """
    name = header.metadata.get("general.architecture")
    if name not in MODEL_TYPES:
        raise InvalidValue(
            f"{path}: general.architecture must be one of {', '.join(sorted(MODEL_TYPES))},"
            f" got {name!r}"
        )
    config: dict[str, Any] = {
        key: header.metadata[f"{name}.{own}"]
        for key, own in _KEYS.items()
        if f"{name}.{own}" in header.metadata
    }
    config["model_type"] = MODEL_TYPES[str(name)]
    config["architectures"] = [f"GGUF {name}"]
    config["dtype"] = "float16"
    names = {tensor.name for tensor in header.tensors}
    config["tie_word_embeddings"] = "output.weight" not in names
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, int):
        config["vocab_size"] = tokens
    if "kv_lora_rank" in config:
        value = header.metadata.get(f"{name}.attention.value_length")
        rope = config.get("qk_rope_head_dim")
        key = config.get("head_dim")
        if isinstance(key, int) and isinstance(rope, int):
            config["qk_nope_head_dim"] = key - rope
        config["v_head_dim"] = value
    else:
        config.pop("qk_rope_head_dim", None)
    return config
