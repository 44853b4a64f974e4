"""Which entry of the catalogue a log's model text means, and how its weights are stored.

A log names an id, a folder or a file; whoever keeps logs adds notes such as `(4-bit)` or `class`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvexp.dtypes import KvDtype, Quantization
from kvexp.hf import ids
from kvexp.request import QuantizationConfig

_HF_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TEXT_ONLY = re.compile(r"[-_ ]text$")
_VARIANT = re.compile(r"-(instruct|chat|it|hf|base|class|family|like|llm|fp16|bf16|sft)$")
_HUB_FOLDER = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_TYPE = r"i?q\d_\w+|b?f16|f32"
_GGUF = re.compile(rf"[-.]?({_TYPE})?[-.]gguf(?::({_TYPE}))?$")
_GGUF_TYPE = re.compile(r"\bi?q\d_\w+")
_NOTE = re.compile(r"\(([^)]*)\)")
_EITHER = re.compile(r"\b([A-Za-z]+)(\d[\d.]*)/(\d[\d.]*)(?=-)")
"""Two releases of one name: `Qwen3.5/3.6-35B-A3B`."""
_KAGGLE = re.compile(r"/([\w.-]+)/(?:transformers|pytorch)/([\w.-]+)/\d+$")
_SIZE = re.compile(r"\d+(?:\.\d+)?b")
_ACTIVE = re.compile(r"[-_]a\d+(?:\.\d+)?b(?=[-_]|$)")
"""Active parameters in a name, which people leave out: `gemma-4-26B` of `gemma-4-26B-A4B`."""
_ANOTHER_SHAPE = re.compile(
    r"reap|prune|puzzle|slim|draft|eagle|specul|dflash|embed|rerank|reward"
    r"|vision|omni|audio|multimodal|ocr|\bvl\b"
)
"""Words of a repository whose layers are no longer those of the model it was made from."""
_SHORTEST_NAME = 6
_BITS = re.compile(r"(?<![\d.])(\d\.\d+)[-_ ]?(?:bits?|bpw)\b")
"""Bits of an element on average, where a repository mixes formats: `4.75bit`."""

_FORMATS: tuple[tuple[str, Quantization], ...] = (
    (r"nvfp4", Quantization.nvfp4),
    (r"mxfp4", Quantization.mxfp4),
    (r"awq", Quantization.awq),
    (r"gptq|auto.?round", Quantization.gptq),
    (r"bitsandbytes|bnb", Quantization.bitsandbytes),
    (r"w4a16|int4|4.?bit", Quantization.w4a16),
    (r"w8a8|int8|8.?bit", Quantization.w8a8),
    (r"fp8", Quantization.fp8),
)


@dataclass(frozen=True, slots=True)
class Named:
    """What a text names: an option of the group `model`, and the format of its weights.

    `gguf` is the type of a GGUF file, F16 where its name does not say; `bits` are those of an
    element on average where formats are mixed; `text_only` means the
    decoder of a multimodal model; `within` is the known name that a longer one contains. `stored`,
    `experts` and `kv_cache_scheme` are those of `ids.Known`.
    """

    option: str
    quantization: Quantization | None = None
    kv_dtype: KvDtype | None = None
    gguf: str | None = None
    bits: float | None = None
    text_only: bool = False
    within: str | None = None
    stored: QuantizationConfig | None = None
    experts: str | None = None
    kv_cache_scheme: KvDtype | None = None


class Catalogue:
    """The models that are known, to be found by text; `known` is `ids.index`."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        whole: dict[str, str] = {}
        bases: dict[str, str] = {}
        for name, option in known.items():
            whole.setdefault(_squeezed(name), option)
            whole.setdefault(_squeezed(option), option)
            bases.setdefault(_squeezed(_without_variant(name)), option)
        shortened = _shortened(known)
        self._names = {**{_squeezed(name): shortened[name] for name in shortened}, **bases}
        self._names |= whole
        self._in_names: dict[tuple[str, frozenset[str]], str] = {}
        for name, option in known.items():
            for form in (
                name.rpartition("/")[2],
                _without_variant(name.rpartition("/")[2]),
                option,
            ):
                self._in_names.setdefault(_identity(_words(form)), option)
        for name, option in shortened.items():
            self._in_names.setdefault(_identity(_words(name)), option)

    def find(self, text: str) -> Named | None:
        """The entry that a text means, or None.

        An id counts as it is; where it is no entry's, owner, notes and variants are set aside. A
        model made from another often carries its name: the longest one that is known counts then.
        """
        either = [_EITHER.sub(rf"\1\{group}", text) for group in (3, 2) if _EITHER.search(text)]
        for candidate in (each for form in (text, *either) for each in _candidates(form)):
            named = self._find(candidate)
            if named is not None:
                return named
        return self._made_from(text)

    def _made_from(self, text: str) -> Named | None:
        """The known model whose name stands within the text, unless it may have other layers."""
        lower = text.strip().lower().rstrip("/")
        if _ANOTHER_SHAPE.search(lower):
            return None
        words = _words(lower if "(" in lower else lower.rpartition("/")[2])
        for length in range(len(words), 0, -1):
            for start in range(len(words) - length + 1):
                run = words[start : start + length]
                name, sizes = _identity(run)
                rest = words[:start] + words[start + length :]
                option = self._in_names.get((name, sizes))
                if option is None or not _is_no_accident(name) or _identity(rest)[1] - sizes:
                    continue
                bits = _BITS.search(lower)
                if bits is not None:
                    return Named(option, bits=float(bits[1]), within="-".join(run))
                return Named(option, format_of("-".join(rest)), within="-".join(run))
        return None

    def _find(self, name: str) -> Named | None:
        gguf = _GGUF.search(name)
        if gguf is not None:
            base = self._find(name[: gguf.start()])
            kind = (gguf[1] or gguf[2] or "f16").upper()
            return None if base is None else Named(base.option, gguf=kind)
        for form in dict.fromkeys((name, _without_variant(name))):
            known = ids.find(form, self._known)
            if known is not None:
                return Named(
                    known.option,
                    known.quantization,
                    known.kv_dtype,
                    stored=known.stored,
                    experts=known.experts,
                    kv_cache_scheme=known.kv_cache_scheme,
                )
            option = self._names.get(_squeezed(form))
            if option is not None:
                return Named(option)
        text_only = _TEXT_ONLY.search(name)
        if text_only is not None:
            option = self._names.get(_squeezed(name[: text_only.start()]))
            return None if option is None else Named(option, text_only=True)
        return None


def is_id(text: str) -> bool:
    """Whether a text is an id as Hugging Face writes it, and nothing else."""
    return _HF_ID.fullmatch(text) is not None


def format_of(text: str) -> Quantization | None:
    """The format that an engine's name of a quantisation means, None where it is none of ours."""
    for pattern, quantization in _FORMATS:
        if re.search(pattern, text.lower()):
            return quantization
    return None


def gguf_type(text: str) -> str | None:
    """The type of a GGUF file that a text names."""
    found = _GGUF_TYPE.search(text.lower())
    return None if found is None else found[0].upper()


def _candidates(text: str) -> Iterator[str]:
    """Names that may be meant, in lower case, the most literal one first."""
    lower = text.strip().lower().rstrip("/").replace("___", ".")
    hub, kaggle = _HUB_FOLDER.search(lower), _KAGGLE.search(lower)
    yield f"{hub[1]}/{hub[2]}" if hub is not None else lower
    if kaggle is not None:
        yield kaggle[1] if kaggle[2] == "default" else f"{kaggle[1]}-{kaggle[2]}"
    notes = [note for note in _NOTE.findall(lower) if note.endswith(" class")]
    for part in (_NOTE.sub(" ", lower), *notes):
        for name in re.split(r" / | \+ |[,;:]", part):
            words = name.split()
            yield "-".join(words)
            if len(words) > 1:
                yield words[0]


def _shortened(known: Mapping[str, str]) -> dict[str, str]:
    """Names without their active parameters, of those that only one entry has."""
    found: dict[str, set[str]] = {}
    for name, option in known.items():
        whole = _without_variant(name.rpartition("/")[2])
        short = _ACTIVE.sub("", whole)
        if short != whole:
            found.setdefault(short, set()).add(option)
    return {short: min(options) for short, options in found.items() if len(options) == 1}


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", name.lower())


def _identity(words: list[str]) -> tuple[str, frozenset[str]]:
    """Letters and digits of a name, and the sizes among its words: 2-57B is not 2.5-7B."""
    return "".join(words).replace(".", ""), frozenset(filter(_SIZE.fullmatch, words))


def _is_no_accident(name: str) -> bool:
    return len(name) >= _SHORTEST_NAME and any(letter.isdigit() for letter in name)


def _without_variant(name: str) -> str:
    while (match := _VARIANT.search(name)) is not None:
        name = name[: match.start()]
    return name


def _squeezed(name: str) -> str:
    """Letters and digits of a repository's name."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower().removeprefix("meta-"))
