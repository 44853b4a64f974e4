"""LMDeploy's and TensorRT-LLM's flags of drafts, in the words that features are read from."""

from typing import Any

from kvexp.validate.flags import Flag, Flags

TRANSLATED = (
    "speculative_config",
    "speculative_algorithm",
    "speculative_draft_model",
    "speculative_num_draft_tokens",
)
_ENTRIES = {
    "speculative_algorithm": "method",
    "decoding_type": "method",
    "speculative_draft_model": "model",
    "speculative_model": "model",
    "speculative_model_dir": "model",
    "speculative_num_draft_tokens": "num_speculative_tokens",
    "max_draft_len": "num_speculative_tokens",
    "num_nextn_predict_layers": "num_speculative_tokens",
}
_METHODS = {"draft_target": "draft_model", "eagle": "eagle3"}
"""TensorRT-LLM's names; its EAGLE is the third."""


def translate(flags: Flags) -> None:
    """Put one configuration of speculation in the place of the engines' own flags."""
    taken = flags.take(*TRANSLATED)
    config: dict[str, Any] = {}
    for flag in taken:
        named = flag.value if isinstance(flag.value, dict) else {flag.name: flag.value}
        of_trt = "decoding_type" in named
        for name, value in named.items():
            if value is not None:
                config[_ENTRIES.get(name, name)] = _method(value) if of_trt else value
    if config.keys() & {"method", "model"}:
        words = " ".join(flag.words for flag in taken)
        flags.add([Flag("speculative_config", config, words)])


def _method(value: Any) -> Any:
    return _METHODS.get(value.lower(), value) if isinstance(value, str) else value
