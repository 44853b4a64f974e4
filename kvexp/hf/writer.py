"""A config.json that an engine or transformers can build a model from: what `reader` undoes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvexp.errors import InvalidValue
from kvexp.hf.decoder import OVERRIDABLE, decoder_facts
from kvexp.hf.files import read_json
from kvexp.request import Model, Moe

CONFIG = "config.json"


def config_json(model: Model) -> dict[str, Any]:
    """The content of a config.json with these facts.

    A model read from a config.json has that file's content, all of it. Else the facts that
    decide sizes are written; what is left out has transformers' default.

    Raises:
        InvalidValue: the facts of this model type do not say all that a config.json needs, or a
            fact was changed after it was read from a file.
    """
    if (file := _own_file(model)) is not None:
        return _unchanged(model, file)
    if model.tower_parameters or model.quantization_config is not None:
        what = "the encoders" if model.tower_parameters else "the quantised modules"
        raise InvalidValue(
            f"{what} of model={model.name} are not described for a config.json:"
            " give model=hf model.path=FOLDER that has one"
        )
    return text_config(model)


def text_config(model: Model) -> dict[str, Any]:
    """A config.json of the language model alone, from its facts.

    Raises:
        InvalidValue: the facts of this model type do not say all that it needs.
    """
    write = _WRITERS.get(model.model_type)
    if write is None:
        raise InvalidValue(
            f"no config.json can be written for model.model_type={model.model_type}"
            f" ({', '.join(_WRITERS)} can be): give model=hf model.path=FOLDER that has one"
        )
    return {**_common(model), **write(model)}


def _own_file(model: Model) -> Path | None:
    if model.path is None:
        return None
    path = Path(model.path)
    file = path / CONFIG if path.is_dir() else path
    if file.suffix == ".json" and not file.name.endswith(".index.json") and file.is_file():
        return file
    beside = file.with_name(CONFIG)
    return beside if file.suffix != ".gguf" and beside.is_file() else None


def _unchanged(model: Model, file: Path) -> dict[str, Any]:
    if model.config_path is not None:
        raise InvalidValue(
            f"model.config_path={model.config_path} is a section of {file}: the whole model would"
            " be built; give a config.json of that section alone"
        )
    content = read_json(file)
    facts = decoder_facts(content, None, [], {})
    for name in OVERRIDABLE:
        if name in facts and facts[name] != getattr(model, name):
            raise InvalidValue(
                f"model.{name}={getattr(model, name)} is not what {file} states"
                f" ({facts[name]}): change it there"
            )
    return content


def _common(model: Model) -> dict[str, Any]:
    scaling = dict(model.rope_scaling or {})
    if model.rope_type == "longrope":
        raise InvalidValue(
            f"the factors of longrope are not among the facts of model={model.name}:"
            " give model=hf model.path=FOLDER with its config.json"
        )
    partial = scaling.pop("partial_rotary_factor", None)
    return {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "torch_dtype": model.torch_dtype.value,
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
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling or None,
        **({} if partial is None else {"partial_rotary_factor": partial}),
        "sliding_window": model.sliding_window,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _plain(model: Model) -> dict[str, Any]:
    return {}


def _layer_types(model: Model) -> dict[str, Any]:
    return {"layer_types": [model.layer_type(i) for i in range(model.num_hidden_layers)]}


def _qwen(model: Model) -> dict[str, Any]:
    slides = model.sliding_window is not None
    return {"use_sliding_window": slides, **(_layer_types(model) if slides else {})}


def _gemma(model: Model) -> dict[str, Any]:
    return {
        **_layer_types(model),
        "query_pre_attn_scalar": model.head_size,
        "final_logit_softcapping": model.final_logit_softcapping,
    }


def _moe(model: Model) -> Moe:
    if model.moe is None:
        raise InvalidValue(f"model.moe must describe the experts of model={model.name}")
    return model.moe


def _qwen3_moe(model: Model) -> dict[str, Any]:
    moe = _moe(model)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "mlp_only_layers": [i for i in range(model.num_hidden_layers) if not model.has_experts(i)],
        "norm_topk_prob": True,
        "use_sliding_window": False,
    }


def _gpt_oss(model: Model) -> dict[str, Any]:
    moe = _moe(model)
    facts: dict[str, Any] = {
        **_layer_types(model),
        "intermediate_size": moe.moe_intermediate_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
    }
    if model.rope_type == "yarn":
        stated = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        facts["rope_scaling"] = {**stated, **model.rope_scaling}
    if moe.format is not None:
        facts["quantization_config"] = {
            "quant_method": moe.format,
            "modules_to_not_convert": list(_NOT_EXPERTS),
        }
    return facts


def _deepseek_v2(model: Model) -> dict[str, Any]:
    moe, mla = _moe(model), model.mla
    if mla is None:
        raise InvalidValue(f"model.mla must describe the latent attention of model={model.name}")
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
        "n_shared_experts": moe.shared_intermediate_size // moe.moe_intermediate_size or None,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }


_NOT_EXPERTS = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)

_WRITERS: Mapping[str, Callable[[Model], dict[str, Any]]] = {
    "llama": _plain,
    "mistral": _plain,
    "phi3": _plain,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
}

WRITABLE = tuple(_WRITERS)
"""Model types whose config.json can be written from facts."""
