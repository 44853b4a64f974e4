"""Hugging Face ids: which catalogue entry an id means, and how a quantised repository differs.

An entry states its id and aliases. A repository that its publisher quantised carries the format at
the end of its name; without it the name is the base model's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvexp.dtypes import KvDtype, Quantization

_ID = re.compile(r"^hf_id:\s*(\S+)", re.MULTILINE)
_ALIASES = re.compile(r"^aliases:[^\n]*\n((?:\s+- \S+\n)+)", re.MULTILINE)
_ITEM = re.compile(r"- (\S+)")

_SUFFIXES: tuple[tuple[str, Quantization], ...] = (
    (r"fp8(-(dynamic|block|kv|kv-cache|static|tensorwise))*", Quantization.fp8),
    (r"quantized\.w8a8|w8a8|int8-w8a8|int8", Quantization.w8a8),
    (r"quantized\.w4a16|w4a16(-g\d+)?", Quantization.w4a16),
    (r"awq(-(int4|4bit|w4a16|marlin))*", Quantization.awq),
    (r"(autoround-)?gptq(-(int4|4bit|w4a16|marlin))*", Quantization.gptq),
    (r"(unsloth-)?bnb-(4bit|nf4)", Quantization.bitsandbytes),
    (r"nvfp4(-(kv|awq))*|fp4", Quantization.nvfp4),
    (r"mxfp4(-\w+)?", Quantization.mxfp4),
)
_KV_SUFFIX = re.compile(r"fp8-kv", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """An entry and, for a quantised repository, its format and the dtype of its cache."""

    option: str
    quantization: Quantization | None = None
    kv_dtype: KvDtype | None = None


def index(folders: Iterable[Path]) -> dict[str, str]:
    """Option names by the ids of all model files, in lower case."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((folder / "model").glob("*.yaml")):
            text = path.read_text(encoding="utf-8")
            ids = _ID.findall(text)
            for block in _ALIASES.findall(text):
                ids += _ITEM.findall(block)
            for name in ids:
                found.setdefault(name.lower(), path.stem)
    return found


def find(name: str, known: Mapping[str, str]) -> Known | None:
    """The entry that an id means, whatever its case; None where there is none."""
    wanted = name.lower()
    if wanted in known:
        return Known(option=known[wanted])
    own = _split(wanted)
    if own is None:
        return None
    base, quantization = own
    for candidate, option in known.items():
        if _plain(candidate) == _plain(base):
            kv_dtype = KvDtype.fp8 if _KV_SUFFIX.search(wanted) else None
            return Known(option=option, quantization=quantization, kv_dtype=kv_dtype)
    return None


def _split(name: str) -> tuple[str, Quantization] | None:
    """A name without its format, and the format."""
    for pattern, quantization in _SUFFIXES:
        match = re.fullmatch(rf"(.+?)-({pattern})", name)
        if match is not None:
            return match[1], quantization
    return None


def _plain(name: str) -> str:
    """What is compared: the repository's name, without its owner and the older Meta prefix."""
    return name.rpartition("/")[2].removeprefix("meta-")
