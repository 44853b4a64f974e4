"""What flags ask for beside a record's inputs: adapters, drafts, limits, engine options."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args

from omegaconf.errors import OmegaConfBaseException

from kvexp.dtypes import DType
from kvexp.errors import InvalidValue
from kvexp.request import LARGEST, Limits, Lora, Model, Speculative
from kvexp.schema import Run, typed
from kvexp.startup_logs.options import human_int
from kvexp.units import parse_bytes
from kvexp.validate import compilation
from kvexp.validate.flags import Flag, Flags

_DEFAULT_ROOM = Lora(max_loras=1, max_rank=16)
"""vLLM's defaults where LoRA is turned on."""

_LIMITS = ("limit_mm_per_prompt", "limit_mm", "language_model_only", "image", "video", "audio")
_MODALITIES = ("image", "video", "audio")

_DRAFTS: Mapping[str, str] = {
    "speculative_model": "model",
    "spec_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "spec_tokens": "num_speculative_tokens",
    "spec_method": "method",
}
"""Flags that are entries of `speculative_config` under other names."""

_ENTRIES = {"draft_model": "model", "num_spec_tokens": "num_speculative_tokens"}
"""Entries as engines print them, by the names of the flag's."""

_NOT_THE_ENGINES = ("version", "usage", "share_of_total", "free_after_load_bytes")
"""Options here of which no engine has one of that name."""

_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp", "dspark")

_DFLASH: Mapping[str, Any] = {
    "architecture": "DFlashDraftModel",
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_DFLASH_OF_2048: Mapping[str, Any] = {"num_hidden_layers": 8, "num_key_value_heads": 4}
"""What z-lab/Qwen3.6-35B-A3B-DFlash has instead, whose MLP is 6,144 wide too (0.88 GiB)."""

_DFLASH_WIDTH, _DFLASH_MLP = 2048, 6144
_DFLASH_TOKENS = 7
"""Drafted tokens where nothing says how many: those of syvai/Qwen3.8-27B-DFlash2."""

_WINDOWS: Mapping[str, Any] = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}
"""What a DFlash2 draft has instead: a token of Qwen3.6-27B takes the bytes of 25 layers beside a
DFlash draft (noonghunna/club-3090#46), one of Qwen3.8-27B those of 20 beside DFlash2 (#1084)."""

_EAGLE3: Mapping[str, Any] = {
    "architecture": "Eagle3LlamaForCausalLM",
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "draft_vocab_size": 32000,
}

_ADAPTERS = re.compile(r"lora enabled", re.IGNORECASE)
DRAFT_IN_WORDS = re.compile(
    r"(mtp|dspark|ngram)\b(?!.*\b(?:off|no|not|without|disabled|false|none)\b)\D*(\d+)?\D*$", re.I
)
"""Words about a draft that needs no other model: `MTP 3 tokens`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """Something that flags ask for: the run with it, and the flags' own words."""

    words: str
    apply: Callable[[Run], Run]


@dataclass(kw_only=True, slots=True)
class Asked:
    """What flags ask for, and notes on what has no rule or is assumed."""

    features: list[Feature] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def asked(flags: Flags, draft: Callable[[str], Model | None]) -> Asked:
    """The features that flags turn on; `draft` finds a drafting model by its id."""
    found = Asked()
    _adapters(flags, found)
    _drafts(flags, found, draft)
    _limits(flags, found)
    _pixels(flags, found)
    return found


def with_features(run: Run, engine: str, found: Asked) -> tuple[Run, list[str]]:
    """The run with what was asked for and the engine has rules for, and notes on the rest."""
    notes = list(found.notes)
    for feature in found.features:
        try:
            changed = feature.apply(run)
            changed.engine.decide(changed, engine)
        except InvalidValue as error:
            notes.append(f"other_flags: no rule for {feature.words!r}: {error}")
        else:
            run = changed
    return run, notes


def options(flags: Flags, cls: type, release: tuple[int, ...]) -> Asked:
    """Flags that are an engine's own options at a release; notes on values that do not fit."""
    kinds = {item.name: item.type for item in fields(cls) if item.name not in _NOT_THE_ENGINES}
    found = Asked()
    for flag in _options_among(flags, kinds, release):
        value = _member(kinds[flag.name], human_int(flag.value))
        try:
            change = {flag.name: _fitted(cls, flag.name, kinds[flag.name], value)}
        except (OmegaConfBaseException, ValueError):
            found.notes += without_rule([flag])
        else:
            found.features.append(Feature(words=flag.words, apply=_with_options(change)))
    return found


def _with_options(change: Mapping[str, Any]) -> Callable[[Run], Run]:
    return lambda run: replace(run, engine=replace(run.engine, **change))


def _options_among(
    flags: Flags, names: Collection[str], release: tuple[int, ...]
) -> Iterator[Flag]:
    """The flags of these names in their order, or that mean one of them."""
    if "compilation_mode" in names:
        yield from compilation.translated(flags, release)
    yield from sorted(flags.take(*names), key=lambda flag: list(names).index(flag.name))


def _member(kind: Any, value: Any) -> Any:
    """A dtype by torch's name where the option is one, anything else unchanged."""
    if kind is not DType:
        return value
    return next((each for each in DType if each.value == value), value)


def _fitted(cls: type, name: str, kind: Any, value: Any) -> Any:
    """The value as an option of a class takes it.

    Raises:
        ValueError: it is null, a switch's value where no switch is, or no size.
        OmegaConfBaseException: it is of another type.
    """
    is_switch = kind is bool or bool in get_args(kind)
    if value is None or (isinstance(value, bool) and not is_switch):
        raise ValueError(value)
    if kind is Any:
        parse_bytes(value, key=name)
    return getattr(typed(cls, {name: value}), name)


def is_on(value: Any) -> bool:
    """Whether a switch's value turns it on."""
    return str(value).lower() not in ("false", "0", "no", "off", "none", "")


def _adapters(flags: Flags, found: Asked) -> None:
    said = [flag for flag, _ in flags.take_words(_ADAPTERS)]
    switches = [*flags.take("enable_lora"), *said]
    sizes = flags.take("max_loras", "max_lora_rank")
    if not any(is_on(each.value) for each in switches):
        found.notes += without_rule(sizes)
        return
    given: dict[str, Any] = {each.name: each.value for each in sizes}
    for each in switches:
        given |= each.value if isinstance(each.value, dict) else {}
    named = {"max_loras": given.get("max_loras"), "max_rank": given.get("max_lora_rank")}
    known = {name: size for name, size in named.items() if _is_count(size)}
    room = replace(_DEFAULT_ROOM, **known)
    words = _words([*switches, *sizes])
    if len(known) < len(named):
        found.notes.append(f"other_flags: {words!r} as {asdict(room)}")
    found.features.append(Feature(words=words, apply=lambda run: replace(run, lora=room)))


def _drafts(flags: Flags, found: Asked, draft: Callable[[str], Model | None]) -> None:
    given = [*flags.take("speculative_config", *_DRAFTS), *_drafts_in_words(flags)]
    config: dict[Any, Any] = {}
    for each in given:
        if each.name in _DRAFTS:
            config[_DRAFTS[each.name]] = each.value
        elif isinstance(each.value, dict):
            config |= {_ENTRIES.get(name, name): value for name, value in each.value.items()}
        elif each.value is not None:
            found.notes += without_rule([each])
    if not config:
        return
    method, name = _method(config)
    words, model = _words(given), None
    if name is not None:
        model = draft(name)
        if model is None and (method == "dflash" or "dflash" in name.lower()):
            _unknown_dflash(name, words, config, found)
            return
        if model is None and "eagle3" in f"{method} {name}".lower():
            _unknown_eagle3(name, words, config, found)
            return
        if model is None:
            found.notes.append(f"other_flags: no rule for {words!r}: {name!r} is in no catalogue")
            return
    tokens = config.get("num_speculative_tokens")
    if tokens is not None and not _is_count(tokens):
        found.notes += without_rule(given)
        return
    rest = set(config) - {"method", "model", "num_speculative_tokens"}
    found.notes += [
        f"other_flags: no rule for {f'speculative_config.{entry}={config[entry]}'!r}"
        for entry in sorted(rest)
        if config[entry] is not None
    ]
    speculative = Speculative(
        method=method, model=None if model is None else model.name, num_tokens=tokens, draft=model
    )
    found.features.append(
        Feature(words=words, apply=lambda run: replace(run, speculative=speculative))
    )


def _unknown_dflash(name: str, words: str, config: Mapping[str, Any], found: Asked) -> None:
    """A DFlash draft that is no entry: as z-lab's for Qwen3.6-27B (1.75 GB at 5120 wide)."""
    tokens = config.get("num_speculative_tokens")
    count = tokens if _is_count(tokens) else _DFLASH_TOKENS

    def apply(run: Run) -> Run:
        served, windowed = run.model, "dflash2" in name.lower()
        slim = served.hidden_size == _DFLASH_WIDTH and not windowed
        mlp = _DFLASH_MLP if slim else 6 * served.hidden_size // 5
        shape = {**_DFLASH, **(_DFLASH_OF_2048 if slim else {}), **(_WINDOWS if windowed else {})}
        return _drafting(run, "dflash", name, count, {"intermediate_size": mlp, **shape})

    found.notes.append(f"other_flags: {name!r} counted with the layers of z-lab's drafts")
    found.features.append(Feature(words=words, apply=apply))


def _unknown_eagle3(name: str, words: str, config: Mapping[str, Any], found: Asked) -> None:
    """An EAGLE3 draft that is no entry: one layer of the served model's width, 32,000 words."""
    tokens = config.get("num_speculative_tokens")
    count = tokens if _is_count(tokens) else None

    def apply(run: Run) -> Run:
        width, mlp = run.model.hidden_size, run.model.intermediate_size
        sizes = {"intermediate_size": mlp or 4 * width, "num_attention_heads": width // 128}
        return _drafting(run, "eagle3", name, count, {**sizes, **_EAGLE3})

    found.notes.append(f"other_flags: {name!r} counted as one layer of the model's width")
    found.features.append(Feature(words=words, apply=apply))


def _drafting(run: Run, method: str, name: str, count: int | None, shape: Mapping[str, Any]) -> Run:
    """The request with a draft of the served model's width and words, of this shape otherwise."""
    served = run.model
    draft = Model(
        name=f"{method}_draft",
        hf_id=name,
        hidden_size=served.hidden_size,
        vocab_size=served.vocab_size,
        max_position_embeddings=served.max_position_embeddings,
        tie_word_embeddings=False,
        torch_dtype=served.torch_dtype,
        **shape,
    )
    asked = Speculative(method=method, model=draft.name, num_tokens=count, draft=draft)
    return replace(run, speculative=asked)


def _drafts_in_words(flags: Flags) -> Iterator[Flag]:
    for flag, said in flags.take_words(DRAFT_IN_WORDS):
        tokens = {"num_speculative_tokens": int(said[2])} if said[2] else {}
        yield replace(flag, name="speculative_config", value={"method": said[1].lower()} | tokens)


def _method(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The method by its name here, and the drafting model where the method has one."""
    name = None if config.get("model") is None else str(config["model"])
    method = None if config.get("method") is None else str(config["method"]).lower()
    if method is None and name is not None and name.strip("[]") == "ngram":
        method = "ngram"
    if method is not None and method.endswith("mtp"):
        method = "mtp"  # of deepseek_mtp, qwen3_next_mtp
    return method, None if method in _WITHOUT_MODEL else name


def _limits(flags: Flags, found: Asked) -> None:
    for each in flags.take(*_LIMITS):
        limits = dict(_limits_of(each))
        if not limits:
            found.notes += without_rule([each])
        elif _sizes_items(each.value):
            found.notes.append(f"other_flags: no rule for the size of items in {each.words!r}")
        for name, limit in limits.items():
            words = each.words if len(limits) == 1 else f"{each.words} ({name})"
            found.features.append(Feature(words=words, apply=_limited(name, limit)))


def _limits_of(flag: Flag) -> Iterator[tuple[str, int]]:
    """Modalities with their limits; a limit may stand as the `count` of a mapping."""
    if flag.name == "language_model_only":
        yield from ((name, 0) for name in _MODALITIES if is_on(flag.value))
        return
    value = {flag.name: flag.value} if flag.name in _MODALITIES else flag.value
    if isinstance(value, str):  # image=1,video=0
        value = dict(part.partition("=")[::2] for part in value.split(","))
    for name, limit in (value if isinstance(value, dict) else {}).items():
        count = limit.get("count") if isinstance(limit, dict) else limit
        if name in _MODALITIES and count is not None and str(count).isdecimal():
            yield name, int(count)


def _sizes_items(value: Any) -> bool:
    """Whether a mapping of limits says how large an item is, beside its `count`."""
    limits = value.values() if isinstance(value, dict) else ()
    return any(isinstance(limit, dict) and set(limit) - {"count"} for limit in limits)


def _limited(name: str, limit: int) -> Callable[[Run], Run]:
    def apply(run: Run) -> Run:
        limits = Limits(**{**asdict(run.mm.limits), name: limit})
        return replace(run, mm=replace(run.mm, limits=limits))

    return apply


def _pixels(flags: Flags, found: Asked) -> None:
    for each in flags.take("max_pixels"):
        if _is_count(each.value):
            found.features.append(Feature(words=each.words, apply=_of_pixels(each.value)))
        else:
            found.notes += without_rule([each])


def _of_pixels(max_pixels: int) -> Callable[[Run], Run]:
    """Images of so many pixels at most, where they are packed patches of three colours by two."""

    def apply(run: Run) -> Run:
        encoder = run.model.encoder
        side = 0 if encoder is None else math.isqrt(encoder.patch_size // 6)
        if encoder is None or not encoder.rotary or 6 * side**2 != encoder.patch_size:
            raise InvalidValue(f"max_pixels: {run.model.name} takes none")
        merged = encoder.patches_per_item // encoder.tokens_per_item
        tokens = max(1, max_pixels // (side**2 * merged))
        limited = replace(encoder, tokens_per_item=tokens, patches_per_item=tokens * merged)
        return replace(run, model=replace(run.model, encoder=limited))

    return apply


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST


def _words(flags: list[Flag]) -> str:
    return " ".join(each.words for each in flags)


def without_rule(flags: Iterable[Flag], changes: Mapping[str, str] | None = None) -> list[str]:
    """A note on each of the flags, with what it changes where that is known."""
    known = changes or {}
    return [
        ": ".join(
            [f"other_flags: no rule for {flag.words!r}", *filter(None, [known.get(flag.name)])]
        )
        for flag in flags
    ]
