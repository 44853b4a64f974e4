"""SGLang's flags of drafts and adapters, in the words that features are read from."""

import re
from collections.abc import Iterator
from typing import Any

from kvexp import drafts
from kvexp.request import Model
from kvexp.validate.features import DRAFT_IN_WORDS
from kvexp.validate.flags import Flag, Flags

_METHODS = {
    "EAGLE3": "eagle3",
    "EAGLE": "eagle",
    "NEXTN": "mtp",
    "STANDALONE": "draft_model",
    "DFLASH": "dflash",
    "NGRAM": "ngram",
}
_DRAFTS = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
_ADAPTERS = ("enable_lora", "lora_paths", "max_lora_rank", "max_loras_per_batch")
TRANSLATED = (*_DRAFTS, *_ADAPTERS)
"""Flags that are read as features, by SGLang's names."""

_MAX_LORAS = 8
_OWN_DRAFT = re.compile(r"nextn|mtp", re.IGNORECASE)
_NOTE = re.compile(r"\s*\(([^)]*)\)")
_DRAFTED = re.compile(r"\b(?:draft\w*|mtp|nextn|eagle|speculat\w*)\b", re.IGNORECASE)


def translate(flags: Flags, model_text: str, model: Model) -> list[str]:
    """Put features in the place of SGLang's flags; notes on what is assumed.

    `model_text` names the model, with what whoever kept the log says of a draft in brackets.
    """
    found = [*_drafted(flags, model_text, model), *_adapters(flags)]
    targets = flags.take("lora_target_modules")
    for each in targets:
        value = [each.value] if isinstance(each.value, str) else each.value
        found.append(Flag(each.name, value, each.words))
    notes = []
    said = _said(flags, model_text)
    if said is not None and not any(flag.name == "speculative_config" for flag in found):
        if drafts.has_mtp(model):
            flags.take_words(re.compile(re.escape(said), re.IGNORECASE))
            found.append(Flag("speculative_config", {"method": "mtp"}, said))
            notes.append(f"{said!r} counted as the model's own drafting layers")
        else:
            notes.append(f"{said!r}: no rule for a draft that is not named")
    flags.add(found)
    return notes


def without_draft(model_text: str) -> str:
    """The text without the brackets that speak of a draft."""
    return _NOTE.sub(lambda note: "" if _DRAFTED.search(note[1]) else note[0], model_text)


def _drafted(flags: Flags, model_text: str, model: Model) -> Iterator[Flag]:
    taken = flags.take(*_DRAFTS)
    given = {flag.name: flag.value for flag in taken if flag.value is not None}
    algorithm = str(given.get("speculative_algorithm", "")).upper()
    if not algorithm:
        return
    method = _METHODS.get(algorithm, algorithm.lower())
    path = given.get("speculative_draft_model_path")
    config: dict[str, Any] = {"method": method}
    is_own = path is None or str(path) == model_text or _OWN_DRAFT.search(str(path)) is not None
    if method in ("mtp", "eagle") and is_own:
        config["method"] = "mtp"
    elif path is not None:
        config |= {"method": "eagle" if method == "mtp" else method, "model": path}
    tokens = _tokens(given)
    if tokens is not None:
        config["num_speculative_tokens"] = tokens
    words = " ".join(flag.words for flag in taken)
    yield Flag("speculative_config", config, words)
    if config["method"] == "mtp" and path is not None:
        yield Flag("num_draft_layers", model.num_nextn_predict_layers or 1, words)


def _tokens(given: dict[str, Any]) -> Any:
    """Drafted tokens that a step verifies: one less than it verifies, or the steps of a chain."""
    verified, steps = given.get("speculative_num_draft_tokens"), given.get("speculative_num_steps")
    if isinstance(steps, int) and given.get("speculative_eagle_topk") in (None, 1):
        return steps
    return verified - 1 if isinstance(verified, int) and verified > 1 else verified


def _adapters(flags: Flags) -> Iterator[Flag]:
    taken = flags.take(*_ADAPTERS)
    given = {flag.name: flag.value for flag in taken if flag.value is not None}
    paths = given.get("lora_paths") not in (None, [], {})
    if not given or str(given.get("enable_lora", paths)).lower() in ("false", "0"):
        return
    room = {"max_loras": given.get("max_loras_per_batch", _MAX_LORAS)}
    if "max_lora_rank" in given:
        room["max_lora_rank"] = given["max_lora_rank"]
    yield Flag("enable_lora", room, " ".join(flag.words for flag in taken))


def _said(flags: Flags, model_text: str) -> str | None:
    """Words about a draft, beside the model's name or among the flags that nothing else reads."""
    read = DRAFT_IN_WORDS.match
    prose = (flag.words for flag in flags.left if flag.is_prose and not read(flag.words))
    return next(filter(_DRAFTED.search, (*_NOTE.findall(model_text), *prose)), None)
