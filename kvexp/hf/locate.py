"""Finds the language model in a config.json: at the top, or in a section known by its keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvexp.errors import InvalidValue
from kvexp.hf.section import Section

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "n_heads")
TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "language_model")
NO_DECODER = ("vision", "visual", "audio", "speech", "image", "video", "talker", "wav", "draft")
DEEPEST = 3


def language_section(config: Mapping[str, Any], chosen: str | None, notes: list[str]) -> Section:
    """The section that describes the decoder.

    `chosen` is a dotted path that decides where several fit.

    Raises:
        InvalidValue: none or several fit; the message lists them and the key that chooses.
    """
    if chosen is not None:
        return _at(config, chosen, notes)
    found = dict(_candidates(config))
    named = [path for path in found if path.rpartition(".")[2] in TEXT_SECTIONS]
    if len(named) == 1:
        path = named[0]
    elif not named and _is_decoder(config):
        path = ""
    elif len(found) == 1:
        path = next(iter(found))
    elif not found:
        raise InvalidValue(
            "config.json: num_hidden_layers is missing and no section describes a language model"
            f"; keys: {', '.join(sorted(map(str, config))[:12]) or 'none'}"
        )
    else:
        raise InvalidValue(
            f"config.json: several sections describe a language model ({', '.join(sorted(found))});"
            f" choose one with model.config_path={sorted(found)[0]}"
        )
    if path:
        notes.append(f"config_path={path}: the language model is read from this section")
    return Section(found[path] if path else config, path, config, notes)


def _at(config: Mapping[str, Any], path: str, notes: list[str]) -> Section:
    section: Any = config
    for part in path.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict):
        raise InvalidValue(f"model.config_path: config.json has no section {path!r}")
    return Section(section, path, config, notes)


def _candidates(
    config: Mapping[str, Any], path: str = "", depth: int = 1
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in config.items():
        if not isinstance(value, dict) or any(word in name.lower() for word in NO_DECODER):
            continue
        inner = f"{path}.{name}" if path else name
        if _is_decoder(value) or (name in TEXT_SECTIONS and value.get("model_type")):
            yield inner, value
        elif depth < DEEPEST:
            yield from _candidates(value, inner, depth + 1)


def _is_decoder(section: Mapping[str, Any]) -> bool:
    def has(names: tuple[str, ...]) -> bool:
        return any(section.get(name) is not None for name in names)

    return has(LAYER_KEYS) and has(WIDTH_KEYS)
