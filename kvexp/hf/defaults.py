"""What transformers fills in where a published config leaves a key out.

Only sections inside a multimodal config, and types that are published that way, are completed: at
the top of a file an absent size is an error. Values are those of the configuration classes.
"""

from collections.abc import Mapping
from typing import Any

from kvexp.hf.section import Section

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "rope_theta": 1000000.0,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        **_LLAMA,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "laurel_rank": 64,
        "altup_num_inputs": 4,
    },
}

PUBLISHED_SPARSE = ("gemma3_text", "gemma3n_text")
"""Types completed at the top of a file too."""

TIED = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "cohere",
    "cohere2",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "starcoder2",
    "whisper",
    "mamba",
    "falcon_mamba",
    "lfm2",
    "minicpm3",
)
"""Types whose embedding doubles as the output head where the config says nothing."""


def completed(section: Section, model_type: str) -> Section:
    """The section with transformers' defaults for the keys that it leaves out, each noted."""
    nested = bool(section.path)
    known = DEFAULTS.get(model_type)
    if known is None or not (nested or model_type in PUBLISHED_SPARSE):
        return section
    filled = {name: value for name, value in known.items() if name not in section.values}
    if nested and "vocab_size" in filled and section.around().has("vocab_size"):
        del filled["vocab_size"]
    for name, value in filled.items():
        section.assume(
            f"{section.name_of(name)} is not given: {value} (transformers' default for"
            f" {model_type})"
        )
    return Section({**filled, **section.values}, section.path, section.outer, section.notes)
