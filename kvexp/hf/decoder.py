"""The facts of a decoder from its section of a config.json."""

from collections.abc import Mapping
from typing import Any

from kvexp.architectures import ARCHITECTURES, Architecture
from kvexp.errors import InvalidValue
from kvexp.hf import blocks, images
from kvexp.hf import layers as kinds
from kvexp.hf.attention import attention_facts, block_indexer, compressed, dspark
from kvexp.hf.defaults import TIED, completed
from kvexp.hf.dtype import checkpoint_dtype
from kvexp.hf.experts import NUM_KEYS, experts
from kvexp.hf.locate import LAYER_KEYS, language_section
from kvexp.hf.quantization import quantization
from kvexp.hf.recurrent import linear_attention, mamba
from kvexp.hf.rope import context_length, rope
from kvexp.hf.section import Section
from kvexp.hf.towers import tower_parameters
from kvexp.parts import PerLayerInput
from kvexp.request import LIMITS

WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
MLP_KEYS = (
    "intermediate_size",
    "ffn_hidden_size",
    "ffn_dim",
    "decoder_ffn_dim",
    "n_inner",
    "dense_intermediate_size",
    "block_ff_dim",
)

TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "llama4": "llama4_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_asr_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "minicpm": "llama",
    "phi4mm": "phi3",
    "phi4_multimodal": "phi3",
    "kimi_k25": "kimi_k2",
    "deepseek_vl_v2": "deepseek_v2",
    "paddleocr_vl": "ernie4_5",
    "paddleocr_vl_text": "ernie4_5",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "dots_ocr": "qwen2",
    "phi3_v": "phi3",
    "hunyuan_vl": "hunyuan_v1_dense",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "minimax_m3": "minimax_m3_vl_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "chatglm": "glm",
    "exaone4_5_text": "exaone4",
    "refinedweb": "falcon",
    "refinedwebmodel": "falcon",
}
"""Types by whose rule a language model inside another type is built."""

BY_CLASS = {
    "BailingMoeV2For": "bailing_moe_v2",
    "HunYuanMoEV1": "hunyuan_v1_moe",
    "HunYuanDenseV1": "hunyuan_v1_dense",
    "KeyeFor": "qwen3",
    "KeyeVL1_5For": "qwen3",
}
"""Types that their class tells apart, whose configs share a name."""

MINICPM = {
    "minicpmv": {"2.5": "llama", "2.6": "qwen2", "4": "llama", "4.0": "llama", "4.5": "qwen3"},
    "minicpmo": {"None": "qwen2", "2.6": "qwen2", "4.5": "qwen3"},
}
"""Types that their version tells apart (vLLM 0.26 `models/minicpmv.py`, `minicpmo.py`)."""

OVERRIDABLE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "tie_word_embeddings",
    "attention_bias",
)
"""Facts that have the same name and kind in a config, so that a given one completes it."""

REFUSED = {
    "bert": "an encoder keeps no KV cache",
    "roberta": "an encoder keeps no KV cache",
    "camembert": "an encoder keeps no KV cache",
    "xlm-roberta": "an encoder keeps no KV cache",
    "megatron-bert": "an encoder keeps no KV cache",
    "bert-generation": "an encoder keeps no KV cache",
    "modernbert": "an encoder keeps no KV cache",
    "rwkv": "its state is not known",
    "rwkv5": "its state is not known",
    "rwkv6": "its state is not known",
    "rwkv7": "its state is not known",
    "recurrent_gemma": "its recurrent blocks are not known",
    "hrm_text": "its layers run in cycles and cache more than once",
    "inkling_text": "its convolution states are not known",
    "t5": "its relative attention is not known",
    "reformer": "its hashed attention is not known",
    "bigbird_pegasus": "its block-sparse attention is not known",
}
"""Types refused by name, with the reason."""

BIASED = (
    "qwen",
    "qwen2",
    "mimo",
    "qwen2_moe",
    "gpt2",
    "gpt_bigcode",
    "opt",
    "bloom",
    "gpt_neox",
    "gpt_neox_japanese",
    "phi",
    "whisper",
    "bart",
    "mbart",
    "blenderbot",
    "blenderbot-small",
)
"""Types whose q, k and v have a bias that the config does not state."""

STATED_BIAS = {
    "gpt_oss": True,
    "starcoder2": True,
    "seed_oss": True,
    "glm": False,
    "glm4": False,
    "jais2": True,
}
"""Types whose published configs state a bias, with transformers' default."""

BIAS_KEYS = (
    "attention_bias",
    "qkv_bias",
    "use_qkv_bias",
    "add_qkv_bias",
    "use_bias",
    "enable_bias",
    "bias",
)


DRAFTING_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Names of the number of layers that draft tokens (MTP)."""


def decoder_facts(
    config: Mapping[str, Any], chosen: str | None, notes: list[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Values for the fields of `Model`; `given` ones take the place of the config's.

    Raises:
        InvalidValue: a fact is missing, wrong or not known.
    """
    section = language_section(_counted(config), chosen, notes)
    stated = section.text("model_type") or section.around().text("model_type")
    if stated is None:
        section.assume("model_type is not given: the common decoder block is assumed")
    model_type = _model_type(section, (stated or "unknown").lower())
    if model_type in REFUSED:
        raise InvalidValue(f"config.json: model_type {stated!r}: {REFUSED[model_type]}")
    plain = {name: value for name, value in given.items() if name in OVERRIDABLE}
    section = completed(
        Section({**section.values, **plain}, section.path, section.outer, section.notes), model_type
    )
    if model_type not in ARCHITECTURES:
        section.assume(
            f"the structure of model_type {stated!r} is not known: a gated decoder is assumed"
        )
    count = section.required(*LAYER_KEYS)
    hidden = section.required(*WIDTH_KEYS)
    layer_types = kinds.layer_types(section, model_type, count)
    facts: dict[str, Any] = {
        "architecture": _architecture(section),
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": count,
        "vocab_size": _vocab(section),
        "max_position_embeddings": context_length(section),
        "torch_dtype": checkpoint_dtype(section),
        "tie_word_embeddings": _tied(section, model_type),
        "attention_bias": _bias(section, model_type),
        "final_logit_softcapping": section.number("final_logit_softcapping"),
        "layer_types": _shortest(layer_types),
        "num_kv_shared_layers": section.integer("num_kv_shared_layers", least=0) or 0,
        "cross_attention": section.has("decoder_layers"),
    }
    facts.update(attention_facts(section, model_type, hidden, layer_types))
    full = layer_types.index(kinds.FULL) if kinds.FULL in layer_types else 0
    facts["rope_theta"], facts["rope_scaling"] = rope(
        section.at(full, "rope_theta", "partial_rotary_factors"),
        head_dim=facts.get("head_dim"),
        used=ARCHITECTURES.get(model_type, Architecture()).rotary > 0,
    )
    if set(layer_types) & {kinds.MAMBA, kinds.HYBRID}:
        facts["mamba"] = mamba(section, model_type, hidden)
    if model_type == "deepseek_v4":
        facts["compressed"], facts["dspark"] = compressed(section), dspark(section)
    if model_type == "minimax_m3_vl_text":
        facts["block_indexer"] = block_indexer(section)
    if kinds.LINEAR in layer_types:
        facts["linear"] = linear_attention(section, model_type, hidden)
    if kinds.CONV in layer_types:
        facts["conv_L_cache"] = section.required("conv_L_cache")
    facts["intermediate_sizes"] = blocks.mlp_widths(section, hidden)
    facts["intermediate_size"] = max(
        facts["intermediate_sizes"] or (_mlp_width(section, model_type, hidden),)
    )
    facts["moe"] = experts(section, model_type, count, facts["intermediate_size"])
    moe = facts["moe"]
    some_dense = moe is not None and (moe.layers or moe.first_k_dense_replace)
    if not facts["intermediate_size"] and some_dense and model_type != "nemotron_h":
        raise section.missing("intermediate_size")
    if model_type == "llama4_text" and facts["moe"] is not None:
        facts["intermediate_size"] = section.required("intermediate_size_mlp")
    form, scheme, expert_format = quantization(section)
    facts["quantization_config"], facts["kv_cache_scheme"] = form, scheme
    expert_format = expert_format or section.text("expert_dtype") == "fp4"
    if expert_format and facts["moe"] is not None:
        facts["moe"].format = "mxfp4"
        section.assume("the experts are stored as mxfp4 (quantization_config)")
    facts["per_layer_input"] = _per_layer_input(section, model_type)
    facts["use_double_wide_mlp"] = section.flag("use_double_wide_mlp") or False
    facts["num_nextn_predict_layers"] = section.integer(*DRAFTING_KEYS, least=0) or 0
    facts["draft_vocab_size"] = section.around().integer("draft_vocab_size")
    facts["target_hidden_size"] = section.around().integer("target_hidden_size")
    facts.update(tower_parameters(section, hidden))
    facts["encoder"] = images.encoder(section)
    return facts


def _counted(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the number of its layers, where it lists them alone (Nemotron-H)."""
    listed = config.get("layers_block_type")
    if not isinstance(listed, list) or any(config.get(key) is not None for key in LAYER_KEYS):
        return config
    return {**config, LAYER_KEYS[0]: len(listed)}


def _model_type(section: Section, stated: str) -> str:
    """The type by whose rule the model is built; some configs name another model's."""
    names = section.texts("architectures") or [""]
    if names[0].startswith("Grok1"):
        return "grok2" if section.flag("residual_moe") else "grok-1"
    for prefix, own in BY_CLASS.items():
        if names[0].startswith(prefix):
            return own
    if stated in MINICPM:
        return MINICPM[stated].get(str(section.get("version")), stated)
    return TEXT_TYPES.get(stated, stated)


def _per_layer_input(section: Section, model_type: str) -> PerLayerInput | None:
    """Embeddings of every layer, where the config gives them a size."""
    size = section.integer("hidden_size_per_layer_input", least=0)
    if not size:
        return None
    vocab = section.integer("vocab_size_per_layer_input")
    if vocab is None:
        vocab = _vocab(section)
        section.assume(f"vocab_size_per_layer_input is not given: vocab_size = {vocab}")
    own = model_type == "gemma3n_text"
    return PerLayerInput(
        vocab_size_per_layer_input=vocab,
        hidden_size_per_layer_input=size,
        laurel_rank=section.required("laurel_rank") if own else None,
        altup_num_inputs=section.required("altup_num_inputs") if own else None,
    )


def _architecture(section: Section) -> str:
    for where in (section.around(), section):
        names = where.texts("architectures")
        if names:
            return names[0]
    section.assume("architectures is not given")
    return "unknown"


def _vocab(section: Section) -> int:
    stated = section.integer("vocab_size")
    if stated is None:
        stated = section.around().integer("vocab_size")
    if stated is None:
        raise section.missing("vocab_size")
    return stated


def _tied(section: Section, model_type: str) -> bool:
    for where in (section, section.around()):
        stated = where.flag("tie_word_embeddings", "tie_embedding")
        if stated is not None:
            return stated
    tied = model_type in TIED
    section.assume(
        f"tie_word_embeddings is not given: {str(tied).lower()} (transformers' default for"
        f" {model_type})"
    )
    return tied


def _bias(section: Section, model_type: str) -> bool:
    stated = section.flag(*BIAS_KEYS)
    if stated is not None:
        return stated
    if model_type in STATED_BIAS:
        default = STATED_BIAS[model_type]
        section.assume(
            f"none of {', '.join(BIAS_KEYS)} is given: {str(default).lower()} (transformers'"
            f" default for {model_type})"
        )
        return default
    return model_type in BIASED


def _mlp_width(section: Section, model_type: str, hidden: int) -> int:
    if model_type in ("mamba", "mamba2", "falcon_mamba"):
        return 0
    if model_type == "granitemoehybrid" and not section.integer(*NUM_KEYS, least=0):
        return section.required("shared_intermediate_size")
    if model_type == "gpt_neox_japanese":
        return hidden * section.required("intermediate_multiple_size")
    if model_type == "qwen":  # of gate and up together
        return section.required("intermediate_size") // 2
    if model_type == "lfm2":
        return _lfm2_width(section)
    if model_type == "mpt":
        return hidden * section.assumed("expansion_ratio", default=4, why="transformers' default")
    experts_first = model_type.startswith("minimax_m3")
    names = ("dense_intermediate_size", *MLP_KEYS) if experts_first else MLP_KEYS
    if isinstance(section.get(*names), list):
        return _uniform(section, names)
    stated = section.integer(*names)
    if stated is not None:
        return stated
    if model_type in ("gpt2", "gpt_bigcode", "gpt_neo", "codegen", "gptj", "bloom", "falcon"):
        section.assume(
            f"{section.name_of(*names)} is not given: 4 x hidden_size, {model_type}'s rule"
        )
        return 4 * hidden
    if section.integer(*NUM_KEYS, least=0):
        section.assume("intermediate_size is not given: no layer has a dense MLP")
        return 0
    raise section.missing("intermediate_size")


def _uniform(section: Section, names: tuple[str, ...]) -> int:
    """A width that the config states for every layer.

    Raises:
        InvalidValue: the layers differ.
    """
    widths = section.integers(*names) or []
    if len(set(widths)) != 1 or not 1 <= widths[0] <= LIMITS["intermediate_size"]:
        raise section.wrong(names, "one width for all layers", widths)
    return widths[0]


def _lfm2_width(section: Section) -> int:
    """LFM2 rounds two thirds of the stated width up to a multiple."""
    width = section.required("intermediate_size", "block_ff_dim", "block_ffn_dim")
    if section.flag("block_auto_adjust_ff_dim") is False:
        return width
    width = 2 * width // 3
    factor = section.number("block_ffn_dim_multiplier")
    if factor is not None:
        width = int(factor * width)
    multiple = section.integer("block_multiple_of") or 256
    return -(-width // multiple) * multiple


def _shortest(layer_types: list[str]) -> list[str] | None:
    """None where every layer is full, else the shortest list that repeats to the same layers."""
    if set(layer_types) == {kinds.FULL}:
        return None
    count = len(layer_types)
    for length in range(1, count):
        if all(layer_types[i] == layer_types[i % length] for i in range(count)):
            return layer_types[:length]
    return layer_types
