"""The transformers configuration of a model."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvexp.errors import InvalidValue
from kvexp.hf import WRITABLE, config_json, read_model, text_config
from kvexp.request import Model
from kvexp.simulate import Untraceable, make_config

MEASURABLE_MODEL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""Dense models whose attention is run as full in every layer."""


def can_build(model: Model) -> bool:
    """Whether all facts that transformers needs are known."""
    return model.model_type in WRITABLE or config_path(model) is not None


def buildable() -> tuple[str, ...]:
    """The model types that need no config.json."""
    return WRITABLE


def config_path(model: Model) -> str | None:
    """The config.json that the model's facts were read from, all of it, where there is one."""
    if model.path is None or model.config_path is not None:
        return None
    path = Path(model.path)
    path = path / "config.json" if path.is_dir() else path
    return str(path) if path.suffix == ".json" and path.is_file() else None


def checkpoint_path(model: Model) -> str | None:
    """The folder whose safetensors files hold the model's weights, where there is one."""
    if model.path is None:
        return None
    path = Path(model.path)
    folder = path if path.is_dir() else path.parent
    whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return str(folder) if whole else None


def check_describes(model: Model, path: str, key: str) -> None:
    """The config.json at `path`, which `key` named, is of this model.

    Raises:
        InvalidValue: it is of another one, or cannot be read.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        found = _sizes(read_model(file, key=key))
    except InvalidValue as error:
        raise InvalidValue(f"{key} {path} cannot be compared with the model: {error}") from None
    asked = _sizes(model)
    other = [
        f"{name} {found.get(name)} and not {value}"
        for name, value in asked.items()
        if found.get(name) != value
    ]
    if other or found.keys() - asked.keys():
        differing = ", ".join(other) or ", ".join(sorted(found.keys() - asked.keys()))
        raise InvalidValue(
            f"{key} {path} is of another model than {model.name} ({differing}): to run that one"
            f" give model=hf model.path={path}"
        )


def _sizes(model: Model) -> dict[str, Any]:
    """What tells two models apart: the facts that weights and caches are counted from."""
    kinds = [model.layer_type(index) for index in range(model.num_hidden_layers)]
    sizes: dict[str, Any] = {
        "num_hidden_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "vocab_size": model.vocab_size,
        **{f"{kind} layers": kinds.count(kind) for kind in set(kinds)},
    }
    if model.mla is None:
        sizes |= {"num_key_value_heads": model.kv_heads, "head_dim": model.head_size}
    else:
        sizes["latent_size"] = model.mla.latent_size
    if model.moe is not None:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            sizes[name] = getattr(model.moe, name)
    return sizes


def config_facts(model: Model) -> Mapping[str, Any]:
    """What the configuration is made from: a config.json, or the model's facts.

    Raises:
        InvalidValue: the facts of this architecture are not all known, or a fact was changed
            after it was read from a config.json.
    """
    if config_path(model) is not None:
        return config_json(model)
    if model.model_type in MEASURABLE_MODEL_TYPES:
        return {name: value for name, value in asdict(model).items() if name not in _NOT_FACTS}
    return facts_of(model)


def transformers_config(model: Model) -> Any:
    """The transformers configuration of a model: of its config.json, or of its facts.

    From facts alone, attention of the plain dense models is full in every layer, also where a
    checkpoint has a sliding window: transformers would build a mask of tokens x tokens for one,
    which no serving engine does.

    Raises:
        InvalidValue: transformers refuses the facts, or they are not all known.
    """
    try:
        if config_path(model) is None and model.model_type in MEASURABLE_MODEL_TYPES:
            return _dense(model)
        return make_config(config_facts(model))
    except Untraceable as error:
        raise InvalidValue(f"model={model.name}: {error}") from None


def _dense(model: Model) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415

    facts = {**facts_of(model), "sliding_window": None}
    facts.pop("model_type")
    facts.pop("layer_types", None)
    try:
        return AutoConfig.for_model(model.model_type, **facts)
    except Exception as error:  # each release has its own validation errors
        raise InvalidValue(
            f"transformers refuses model={model.name}: {' '.join(str(error).split())}"
        ) from None


def facts_of(model: Model) -> dict[str, Any]:
    """The facts under the names that transformers gives them, without what says how they are kept.

    Raises:
        InvalidValue: the facts of this architecture are not all known here.
    """
    facts = text_config(model)
    return {name: value for name, value in facts.items() if name not in _HOW_KEPT}


_HOW_KEPT = ("architectures", "torch_dtype", "quantization_config")
_NOT_FACTS = ("name", "hf_id", "source", "aliases", "notes", "checkpoint_bytes")
