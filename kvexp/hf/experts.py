"""Mixtures of experts in every spelling: how many, how wide, and in which layers."""

from kvexp.hf.section import Section
from kvexp.request import Moe

NUM_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k_experts",
    "moe_top_k",
    "num_selected_experts",
)
WIDTH_KEYS = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")


SAME_WIDTH = (
    "mixtral",
    "phimoe",
    "jamba",
    "granitemoe",
    "granitemoeshared",
    "granitemoe_swa",
    "granitemoehybrid",
    "olmoe",
    "flex_olmo",
    "cohere2_moe",
    "gpt_oss",
    "minimax",
    "minimax_m2",
    "llama4_text",
    "grok-1",
)
"""Types whose `intermediate_size` is that of an expert."""

SHARED = (
    "deepseek",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "kimi_linear",
    "axk1",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "ernie4_5_moe",
    "exaone_moe",
    "hy_v3",
    "afmoe",
    "qwen2_moe",
    "qwen3_next",
    "granitemoeshared",
    "granitemoehybrid",
    "bailing_moe",
    "bailing_moe_v2",
    "hunyuan_v1_moe",
    "laguna",
    "solar_open",
    "step3p5",
)
"""Types with experts that every token passes, and mostly with dense layers first."""

_SHARED_NUMBERS = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
)
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "share_expert_dim",
)
HASHED = "hash_moe"
_WIDTH_OF_ONE = ("bailing_moe", "bailing_moe_v2")
"""Types whose stated width is that of each of their shared experts."""
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def experts(section: Section, model_type: str, num_layers: int, width: int) -> Moe | None:
    """The mixture of experts, None for a dense model; `width` is that of the dense MLP.

    Raises:
        InvalidValue: a key that it needs is missing or wrong.
    """
    count = section.integer(*NUM_KEYS, least=0)
    top = section.of_layers(*TOP_KEYS, least=0)
    own_width = section.of_layers(*WIDTH_KEYS, least=0)
    if not count:
        if count is None and (top or own_width or model_type in SAME_WIDTH):
            raise section.missing(*NUM_KEYS)
        return None
    if top is None:
        raise section.missing(*TOP_KEYS)
    layers = _layers(section, model_type, num_layers)
    if model_type == "minimax_m3_vl_text":
        own_width = section.required("intermediate_size")
    elif model_type in SAME_WIDTH:
        own_width = width or section.required("intermediate_size")
    elif not own_width:
        raise section.missing(*WIDTH_KEYS)
    at_the_end = layers == list(range(num_layers - len(layers), num_layers))
    return Moe(
        num_experts=count,
        num_experts_per_tok=top,
        moe_intermediate_size=own_width,
        shared_intermediate_size=_shared(section, model_type, own_width, width),
        first_k_dense_replace=num_layers - len(layers) if at_the_end else 0,
        layers=None if at_the_end else layers,
        latent_size=section.integer("moe_latent_size"),
        bias=model_type == "gpt_oss",
        num_hash_layers=_hash_layers(section),
    )


def _hash_layers(section: Section) -> int:
    """Layers whose experts go by the token: DeepSeek V4's first ones, by either of its configs."""
    kinds = section.texts("mlp_layer_types") or []
    return kinds.count(HASHED) or section.integer("num_hash_layers", least=0) or 0


def _shared(section: Section, model_type: str, width: int, dense_width: int) -> int:
    if model_type == "llama4_text":
        return width
    stated = section.integer(*_SHARED_WIDTHS, least=0)
    if stated is not None and model_type not in _WIDTH_OF_ONE:
        return stated
    number = section.of_layers(*_SHARED_NUMBERS, least=0)
    if model_type == "hunyuan_v1_moe":
        mixed = section.flag("use_mixed_mlp_moe") is not False
        return (number or 0) * dense_width if mixed else 0
    if number is None and model_type in SHARED:
        known = [*_SHARED_NUMBERS, *_SHARED_WIDTHS]
        section.assume(f"none of {', '.join(known)} is given: no shared experts")
    return (number or 0) * (stated or width)


def _layers(section: Section, model_type: str, count: int) -> list[int]:
    """The layers that have experts."""
    kinds = section.texts("mlp_layer_types")
    if kinds is not None:
        allowed = (HASHED, "moe") if model_type == "deepseek_v4" else ("dense", "sparse")
        if len(kinds) < count or set(kinds) - set(allowed):
            names = ("mlp_layer_types",)
            raise section.wrong(names, f"{count} of {' and '.join(allowed)}", kinds)
        return [index for index in range(count) if kinds[index] != "dense"]
    if model_type == "llama4_text":
        numbers = section.integers("moe_layers")
        if numbers is not None:
            return sorted(index for index in numbers if 0 <= index < count)
        step = section.integer("interleave_moe_layer_step") or 1
        return list(range(step - 1, count, step))
    listed = section.text("moe_layers_enum")
    if listed is not None:
        parts = listed.replace(" ", "").split(",")
        if not all(part.isdigit() for part in parts):
            raise section.wrong(("moe_layers_enum",), "numbers of layers with commas", listed)
        return sorted(index for index in map(int, parts) if index < count)
    blocks = section.texts("layers_block_type") or []
    if "moe" in blocks:
        return [index for index in range(min(count, len(blocks))) if blocks[index] == "moe"]
    letters = section.get("hybrid_override_pattern")
    if isinstance(letters, str):
        return [index for index in range(min(count, len(letters))) if letters[index] == "E"]
    if model_type == "jamba" or section.has("expert_layer_period"):
        period = section.required("expert_layer_period")
        offset = section.required("expert_layer_offset", least=0)
        return [index for index in range(count) if index % period == offset]
    return _from_first(section, model_type, count)


def _from_first(section: Section, model_type: str, count: int) -> list[int]:
    first = section.integer(*_FIRST, least=0)
    usual = model_type in SHARED or model_type == "mimo_v2_flash"
    told = isinstance(section.get("moe_layer_freq"), list) or section.has("decoder_sparse_step")
    if first is None and usual and not told:
        known = ("mlp_layer_types", *_FIRST)
        section.assume(f"none of {', '.join(known)} is given: every layer has experts")
    first = first or 0
    last = section.integer("moe_layer_end_index", least=-1)
    last = count - 1 if last is None or last < 0 else last
    if isinstance(section.get("moe_layer_freq"), list):
        flags = section.integers("moe_layer_freq") or []
        if len(flags) < count:
            raise section.wrong(("moe_layer_freq",), f"{count} numbers", flags)
        return [index for index in range(count) if flags[index]]
    step = section.integer("decoder_sparse_step", least=0)
    if step is not None:
        dense = section.integers("mlp_only_layers") or []
        if step == 0:
            return []
        return [i for i in range(count) if (i + 1) % step == 0 and i not in dense]
    every = section.integer("moe_layer_freq", "moe_layer_interval") or 1
    return [index for index in range(first, min(last + 1, count)) if index % every == 0]
