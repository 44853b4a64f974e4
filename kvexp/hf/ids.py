"""Hugging Face ids: which catalogue entry an id means, and how a quantised repository differs.

An entry states its id and aliases. A copy keeps the repository's name under another owner. A
repository that was quantised carries the format at the end of its name; without it the name is the
base model's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from kvexp.dtypes import KvDtype, Quantization
from kvexp.formats import MX_GROUP, PER_ROW
from kvexp.request import QuantizationConfig

_NAMES = re.compile(r"^(?:hf_id|aliases):(?=\s).*(?:\n(?:[ \t\-#\]].*)?)*", re.MULTILINE)
"""The two keys with their values, to the next key: a whole file takes YAML ten times as long."""

_METHOD = re.compile(r"^quantization_config:\n(?:  .*\n)*?  method: (\w+)", re.MULTILINE)

_SUFFIXES: tuple[tuple[str, Quantization], ...] = (
    (r"fp8(-(dynamic|block|kv|kv-cache|static|tensorwise|pertensor))*", Quantization.fp8),
    (r"quantized\.w8a8|w8a8|int8-w8a8|int8", Quantization.w8a8),
    (r"(qat-)?(quantized\.w4a16|(int4-)?w4a16(-g\d+)?(-ct)?)", Quantization.w4a16),
    (r"(qat-)?(int4-)?(autoround-)?awq(-(int4|4bit|w4a16|marlin|sym|g?\d+g?))*", Quantization.awq),
    (r"(int4-)?(autoround-)?gptq(-(int4|4bit|4b|w4a16|marlin|sym|g?\d+g?))*", Quantization.gptq),
    (r"int4-autoround|autoround-int4", Quantization.gptq),
    (r"(unsloth-)?bnb-(4bit|nf4)", Quantization.bitsandbytes),
    (r"(nvfp4(a16)?|fp4)(-(kv|awq|v\d+))*", Quantization.nvfp4),
    (r"mxfp4(-\w+)?", Quantization.mxfp4),
    (r"int4(-(w4a16|g\d+|mixed))*|4bit", Quantization.w4a16),
)
_UNQUANTISED = re.compile(r"(.+?)-(?:qat-)?(?:q4_0-)?unquantized")
"""A checkpoint trained for a format that is stored without it."""

_UNNAMED = (
    (
        r"gptq-(int8|8bit)",
        QuantizationConfig(method=Quantization.gptq, bits=8, group_size=128),
    ),
    (
        r"(quantized\.)?w8a16",
        QuantizationConfig(method=Quantization.w4a16, bits=8, group_size=PER_ROW),
    ),
    (  # compressed-tensors; 33.5 GiB of cyankiwi/gemma-4-31B-it-AWQ-8bit have groups of 32
        r"awq-(int8|8bit)",
        QuantizationConfig(method=Quantization.w4a16, bits=8, group_size=32),
    ),
    (r"mxfp8", QuantizationConfig(method=Quantization.fp8, group_size=MX_GROUP)),
)
"""Formats that `quantization` has no name for: of 4 bits in 8, of 8 with a scale for each 32."""

_KV_SUFFIX = re.compile(r"fp8-kv", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """An entry and, for a quantised repository, its format and the dtype of its cache.

    `stored` is a format that `quantization` has no name for, or what its publisher leaves out of
    one; `experts` the format of experts alone, as `model.moe.format`; `kv_cache_scheme` what the
    checkpoint asks for its cache.
    """

    option: str
    quantization: Quantization | None = None
    stored: QuantizationConfig | None = None
    experts: str | None = None
    kv_dtype: KvDtype | None = None
    kv_cache_scheme: KvDtype | None = None


def index(folders: Iterable[Path]) -> dict[str, str]:
    """Option names by the ids of all model files, in lower case."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((folder / "model").glob("*.yaml")):
            for name in _names(path):
                found.setdefault(name.lower(), path.stem)
    return found


def _names(path: Path) -> list[str]:
    """The ids that a file states; none where it cannot be read: Hydra says so when it is chosen."""
    try:
        text = "\n".join(_NAMES.findall(path.read_text(encoding="utf-8")))
        stated = yaml.load(text, Loader=yaml.CSafeLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    aliases = stated.get("aliases")
    names = [stated.get("hf_id"), *(aliases if isinstance(aliases, list) else [aliases])]
    return [name for name in names if isinstance(name, str)]


def own_format(folders: Iterable[Path], option: str) -> str | None:
    """The format in which an entry's checkpoint is stored; None where it is not quantised."""
    for folder in folders:
        file = folder / "model" / f"{option}.yaml"
        if file.is_file() and (match := _METHOD.search(file.read_text(encoding="utf-8"))):
            return match[1]
    return None


def find(name: str, known: Mapping[str, str]) -> Known | None:
    """The entry that an id means, whatever its case and owner; None where there is none."""
    wanted = name.lower()
    if wanted in known:
        return Known(option=known[wanted])
    if (option := _of_name(wanted, known)) is not None:
        return Known(option=option)
    own = _split(wanted)
    if own is None:
        return None
    base, quantization, stored = own
    option = _of_name(base, known) or _of_name(f"{base}-bf16", known)
    if option is None:
        return None
    recipe = next((each for each in _recipes() if re.fullmatch(each["id"], wanted)), {})
    kept = {key: recipe[key] for key in ("ignore", "fp8", "head", "group_size") if key in recipe}
    if quantization is not None and kept:
        stored = QuantizationConfig(method=quantization, **kept)
    scheme, experts = recipe.get("kv_cache_scheme"), recipe.get("experts")
    return Known(
        option=option,
        quantization=None if experts else quantization,
        stored=stored,
        experts=experts,
        kv_dtype=KvDtype.fp8 if _KV_SUFFIX.search(wanted) else None,
        kv_cache_scheme=None if scheme is None else KvDtype[scheme],
    )


@cache
def _recipes() -> list[dict[str, Any]]:
    """How publishers quantise, of `recipes.yaml`."""
    found = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("recipes.yaml")))
    assert isinstance(found, list)
    return found


def _of_name(name: str, known: Mapping[str, str]) -> str | None:
    """The entry of a repository with this name, whoever its owner is: copies keep the name."""
    plain = _plain(name)
    return next((option for each, option in known.items() if _plain(each) == plain), None)


def _split(name: str) -> tuple[str, Quantization | None, QuantizationConfig | None] | None:
    """A name without its format, and the format: one that has a name here, or one that has none."""
    if (plain := _UNQUANTISED.fullmatch(name)) is not None:
        return plain[1], None, None
    for pattern, stored in _UNNAMED:
        if (match := re.fullmatch(rf"(.+?)-({pattern})", name)) is not None:
            return match[1], None, stored
    for pattern, quantization in _SUFFIXES:
        if (match := re.fullmatch(rf"(.+?)-({pattern})", name)) is not None:
            return match[1], quantization, None
    return None


def _plain(name: str) -> str:
    """What is compared: a repository's name without owner, dots, Meta's prefix and `-hf`."""
    return name.rpartition("/")[2].replace(".", "").removeprefix("meta-").removesuffix("-hf")
