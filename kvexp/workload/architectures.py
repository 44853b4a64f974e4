"""The transformers configuration of a model."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvexp.errors import InvalidValue
from kvexp.request import Model
from kvexp.simulate import Untraceable, make_config, read_facts

MEASURABLE_MODEL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""Dense models whose attention is run as full in every layer."""


def can_build(model: Model) -> bool:
    """Whether all facts that transformers needs are known."""
    known = (*MEASURABLE_MODEL_TYPES, *_FURTHER)
    return model.model_type in known or config_path(model) is not None


def buildable() -> tuple[str, ...]:
    """The model types that need no config.json."""
    return (*MEASURABLE_MODEL_TYPES, *_FURTHER)


def config_path(model: Model) -> str | None:
    """The config.json that the model's facts were read from, where there is one."""
    if model.path is None:
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


def config_facts(model: Model) -> Mapping[str, Any]:
    """What the configuration is made from: a config.json, or the model's facts.

    Raises:
        InvalidValue: the facts of this architecture are not all known.
    """
    if (path := config_path(model)) is not None:
        return read_facts(path)
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

    facts = {
        **_common(model),
        "rope_theta": model.rope_theta,
        "rope_scaling": dict(model.rope_scaling) if model.rope_scaling else None,
        "sliding_window": None,
    }
    del facts["model_type"]
    try:
        return AutoConfig.for_model(model.model_type, **facts)
    except Exception as error:  # each release has its own validation errors
        raise InvalidValue(
            f"transformers refuses model={model.name}: {' '.join(str(error).split())}"
        ) from None


def facts_of(model: Model) -> dict[str, Any]:
    """The facts under the names that transformers gives them.

    Raises:
        InvalidValue: the facts of this architecture are not all known here.
    """
    if model.model_type not in _FURTHER:
        raise InvalidValue("not all facts that transformers needs are known")
    return {**_common(model), **_FURTHER[model.model_type](model)}


def _common(model: Model) -> dict[str, Any]:
    return {
        "model_type": model.model_type,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": model.attention_bias,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _windows(model: Model) -> dict[str, Any]:
    """Full and sliding layers side by side, each with a mask of its own."""
    count = model.num_hidden_layers
    return {
        "sliding_window": model.sliding_window,
        "layer_types": [model.layer_type(index) for index in range(count)],
    }


def _qwen3_moe(model: Model) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        raise InvalidValue("its experts are not described")
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "use_sliding_window": False,
    }


def _gpt_oss(model: Model) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        raise InvalidValue("its experts are not described")
    return {
        **_windows(model),
        "intermediate_size": moe.moe_intermediate_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "attention_bias": True,
    }


def _deepseek_v2(model: Model) -> dict[str, Any]:
    moe, mla = model.moe, model.mla
    if moe is None or mla is None:
        raise InvalidValue("its experts or its latent attention are not described")
    return {
        "kv_lora_rank": mla.kv_lora_rank,
        "q_lora_rank": mla.q_lora_rank,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "head_dim": mla.qk_rope_head_dim,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "n_shared_experts": moe.shared_intermediate_size // moe.moe_intermediate_size,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "topk_method": "greedy",
    }


_FURTHER: dict[str, Callable[[Model], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _windows,
    "gemma2": _windows,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
}

_NOT_FACTS = ("name", "hf_id", "source", "aliases", "notes", "checkpoint_bytes")
