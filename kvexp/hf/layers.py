"""What kind of layer stands at each place: windows, chunks, recurrent states.

A list in the config wins; else the rule by which the model type lays out its layers
(transformers' configuration classes).
"""

from collections.abc import Callable, Sequence

from kvexp.errors import InvalidValue
from kvexp.hf import blocks
from kvexp.hf.section import Section
from kvexp.request import HEAVY, LARGEST, LAYER_TYPES, SPARSE

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
MAMBA, LINEAR, CONV, HYBRID, MLP = "mamba", "linear_attention", "conv", "hybrid", "mlp"
CROSS = "cross_attention"

NAMES = {
    "attention": FULL,
    "full": FULL,
    "global": FULL,
    "softmax": FULL,
    "deepseek_sparse_attention": FULL,
    "local": SLIDING,
    "sliding": SLIDING,
    "sliding_window": SLIDING,
    "chunked": CHUNKED,
    "mamba2": MAMBA,
    "ssm": MAMBA,
    "short_conv": CONV,
    "moe": MLP,
    **{name: name for name in LAYER_TYPES},
}
"""Names in published lists of layers, by ours."""

UNKNOWN_CACHES = (
    "compress_ratios",
    "block_types",
    "retention_heads",
    "rwkv_rescale_every",
    "index_block_size",
    "block_configs",
)
"""Keys of caches that are not known here."""

KNOWN_OF = {
    "compress_ratios": "deepseek_v4",
    "block_configs": "nemotron-nas",
    "index_block_size": "minimax_m3_vl_text",
}
"""The one type each that such a key is known of."""

WINDOW_BY_FLAG = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "qwen2_vl", "qwen2_5_vl")
"""Types that ignore a window unless `use_sliding_window` is true."""

_PATTERNS = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gpt_oss": 2,
    "cohere2": 4,
    "cohere2_moe": 4,
    "olmo3": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "afmoe": 4,
}
"""Types where each n-th layer is full and the others slide."""

NEEDS_LIST = ("gemma4_text", "granitemoehybrid", "granitemoe_swa", "cwm", "ministral")
"""Types whose layers follow no rule: the config must list them."""

_UNIFORM = ("mistral", "mixtral", "phi3", "starcoder2", "ministral3")
"""Types whose window is that of every layer."""

_MAMBA_ONLY = ("mamba", "mamba2", "falcon_mamba")


def layer_types(section: Section, model_type: str, count: int) -> list[str]:
    """The kind of every layer.

    Raises:
        InvalidValue: a kind or its window is not known.
    """
    for key in UNKNOWN_CACHES:
        if section.has(key) and KNOWN_OF.get(key) != model_type:
            raise InvalidValue(
                f"config.json: {section.name_of(key)} belongs to a cache that is not known;"
                f" known layers: {', '.join(LAYER_TYPES)}"
            )
    kinds = _stated(section, model_type, count) or _by_type(section, model_type, count)
    if kinds is None:
        _check_absent(section, model_type)
        kinds = [SLIDING if window(section, model_type) else FULL] * count
    if SLIDING in kinds and window(section, model_type) is None:
        if _window_is_off(section, model_type):
            kinds = [FULL if kind == SLIDING else kind for kind in kinds]
        else:
            raise section.missing("sliding_window")
    return kinds


def _check_absent(section: Section, model_type: str) -> None:
    """Refuse a missing list or window of a type that needs one, note a missing optional window."""
    if model_type in NEEDS_LIST:
        raise section.missing("layer_types")
    if model_type in _PATTERNS and "sliding_window" not in section.values:
        raise section.missing("sliding_window")
    if section.flag("use_sliding_window") and not section.has("sliding_window"):
        section.assume("use_sliding_window is true, sliding_window is not given: no layer slides")
    if model_type in _UNIFORM:
        if "sliding_window" not in section.values:
            section.assume("sliding_window is not given: every layer is full")
    elif window(section, model_type) is not None:
        size = window(section, model_type)
        section.assume(f"layer_types is not given: every layer slides over {size} tokens")


def window(section: Section, model_type: str) -> int | None:
    """Tokens of the window, None where it is absent, not positive or switched off."""
    size = section.integer("sliding_window", "sliding_window_size", "window_size", least=-LARGEST)
    if size is None or size <= 0 or _window_is_off(section, model_type):
        return None
    return size


def _window_is_off(section: Section, model_type: str) -> bool:
    flag = section.flag("use_sliding_window")
    if flag is None and model_type in WINDOW_BY_FLAG:
        if section.has("sliding_window"):
            section.assume("use_sliding_window is not given: false, so no layer slides")
        return True
    return flag is False


def _stated(section: Section, model_type: str, count: int) -> list[str] | None:
    names = section.texts("layer_types", "layers_block_type")
    if names is None:
        return None
    own = dict(NAMES)
    if model_type == "granitemoehybrid":
        own["linear_attention"] = MAMBA
    unknown = [name for name in names if name not in own]
    if unknown:
        raise InvalidValue(
            f"config.json: {section.name_of('layer_types', 'layers_block_type')} has"
            f" {unknown[0]!r}, a cache that is not known; known: {', '.join(sorted(own))}"
        )
    if len(names) < count:
        raise InvalidValue(
            f"config.json: {section.name_of('layer_types', 'layers_block_type')} has {len(names)}"
            f" layers, num_hidden_layers is {count}"
        )
    if len(names) > count:
        section.assume(f"layer_types has {len(names)} layers: the first {count} are taken")
    return [own[name] for name in names[:count]]


def _by_type(section: Section, model_type: str, count: int) -> list[str] | None:
    rules: dict[str, Callable[[Section, int], list[str]]] = {
        "llama4_text": _llama4,
        "jamba": _jamba,
        "bamba": _bamba,
        "nemotron_h": _nemotron_h,
        "zamba2": _zamba2,
        "falcon_h1": lambda _, n: [HYBRID] * n,
        "kimi_linear": _kimi_linear,
        "minimax": _minimax,
        "minimax_text_01": _minimax,
        "minimax_m1": _minimax,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2,
        "gpt_neo": _gpt_neo,
        "mimo_v2_flash": _mimo,
        "deepseek_v4": _deepseek_v4,
        "nemotron-nas": blocks.layer_types,
        "mllama_text_model": _mllama,
    }
    if model_type in _MAMBA_ONLY:
        return [MAMBA] * count
    if model_type in rules:
        return rules[model_type](section, count)
    if model_type.startswith(("qwen3_next", "qwen3_5")):
        every = section.assumed("full_attention_interval", default=4, why="transformers' default")
        return _every(every, count, others=LINEAR)
    first = section.integer("max_window_layers", least=0)
    if window(section, model_type) is not None and (
        first is not None or model_type in WINDOW_BY_FLAG
    ):
        if first is None:
            first = 28
            section.assume(f"max_window_layers is not given: {first} (transformers' default)")
        return [SLIDING if index >= first else FULL for index in range(count)]
    return _pattern(section, model_type, count)


def _pattern(section: Section, model_type: str, count: int) -> list[str] | None:
    """Layers by a pattern: a number, or letters for local and global."""
    if window(section, model_type) is None:
        return None
    letters = section.get("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(letters, str):
        if not letters or set(letters) - {"L", "G"}:
            names = ("sliding_window_pattern",)
            raise section.wrong(names, "a number or letters L and G", letters)
        return [SLIDING if letters[i % len(letters)] == "L" else FULL for i in range(count)]
    every = section.integer(
        "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"
    )
    if every is None:
        every = _PATTERNS.get(model_type)
        if every is not None:
            section.assume(f"each {every}th layer is full, the others slide ({model_type}'s rule)")
    return None if every is None else _every(every, count, others=SLIDING)


def _every(every: int, count: int, *, others: str) -> list[str]:
    return [FULL if (index + 1) % every == 0 else others for index in range(count)]


def _at(indices: Sequence[int], kind: str, others: str, count: int) -> list[str]:
    return [kind if index in indices else others for index in range(count)]


def _integers(section: Section, key: str, *instead: str) -> list[int]:
    """A list that the config must state; one of the keys `instead` would have served as well."""
    value = section.integers(key)
    if value is None:
        raise section.missing(key, *instead)
    return value


def _llama4(section: Section, count: int) -> list[str]:
    if "attention_chunk_size" not in section.values:
        section.assume("attention_chunk_size is not given: every layer is full")
    if section.integer("attention_chunk_size") is None:
        return [FULL] * count
    rope = section.integers("no_rope_layers")
    if rope:  # 1 where a layer has positions, and is chunked
        if len(rope) < count:
            raise InvalidValue(f"config.json: no_rope_layers has {len(rope)} layers, not {count}")
        return [CHUNKED if rope[index] else FULL for index in range(count)]
    every = section.assumed("no_rope_layer_interval", default=4, why="transformers' default")
    return _every(every, count, others=CHUNKED)


def _jamba(section: Section, count: int) -> list[str]:
    period = section.required("attn_layer_period")
    offset = section.required("attn_layer_offset", least=0)
    return [FULL if index % period == offset else MAMBA for index in range(count)]


def _bamba(section: Section, count: int) -> list[str]:
    indices = _integers(section, "attn_layer_indices", "layer_types")
    return _at(indices, FULL, MAMBA, count)


def _nemotron_h(section: Section, count: int) -> list[str]:
    letters = section.text("hybrid_override_pattern")
    if letters is None:
        raise section.missing("hybrid_override_pattern", "layers_block_type")
    known = {"M": MAMBA, "*": FULL, "-": MLP, "E": MLP}
    if set(letters) - set(known) or len(letters) < count:
        names = ("hybrid_override_pattern",)
        raise section.wrong(names, f"{count} letters of {' '.join(known)}", letters)
    return [known[letter] for letter in letters[:count]]


def _zamba2(section: Section, count: int) -> list[str]:
    indices = _integers(section, "hybrid_layer_ids", "layers_block_type")
    return _at(indices, HYBRID, MAMBA, count)


def _kimi_linear(section: Section, count: int) -> list[str]:
    linear = section.inner("linear_attn_config")
    if linear is None:
        raise section.missing("linear_attn_config", "layer_types")
    full = _integers(linear, "full_attn_layers")
    return _at([index - 1 for index in full], FULL, LINEAR, count)  # counted from 1


def _minimax(section: Section, count: int) -> list[str]:
    kinds = _integers(section, "attn_type_list", "layer_types")
    if len(kinds) < count:
        raise InvalidValue(f"config.json: attn_type_list has {len(kinds)} layers, not {count}")
    return [FULL if kind else LINEAR for kind in kinds[:count]]


def _lfm2(section: Section, count: int) -> list[str]:
    indices = _integers(section, "full_attn_idxs", "layer_types")
    return _at(indices, FULL, CONV, count)


def _gpt_neo(section: Section, count: int) -> list[str]:
    names = section.texts("attention_layers")
    if names is None:
        raise section.missing("attention_layers")
    if len(names) < count or set(names) - {"global", "local"}:
        raise section.wrong(("attention_layers",), f"{count} of global and local", names)
    return [NAMES[name] for name in names[:count]]


def _mimo(section: Section, count: int) -> list[str]:
    pattern = _integers(section, "hybrid_layer_pattern", "layer_types")
    if len(pattern) < count:
        raise InvalidValue(f"config.json: hybrid_layer_pattern has {len(pattern)} layers")
    return [SLIDING if kind else FULL for kind in pattern[:count]]


def _mllama(section: Section, count: int) -> list[str]:
    indices = _integers(section, "cross_attention_layers")
    return _at(indices, CROSS, FULL, count)


def _deepseek_v4(section: Section, count: int) -> list[str]:
    """A ratio a layer, those of the layers that draft tokens behind them."""
    kinds = {0: SLIDING, 4: SPARSE, 128: HEAVY}
    ratios = _integers(section, "compress_ratios")
    if len(ratios) < count or set(ratios) - kinds.keys():
        raise section.wrong(("compress_ratios",), f"{count} of 0, 4 and 128", ratios)
    return [kinds[ratio] for ratio in ratios[:count]]
