"""Limits of images, videos and audio in a request, and which towers vLLM builds under them.

From vLLM 0.26 `config/multimodal.py: get_limit_per_prompt` and
`model_executor/models/interfaces.py: _mark_tower_model`: a tower is left out when every modality
that it serves is limited to 0.
"""

import re
from collections.abc import Mapping

from kvexp.contract import Deployment, InvalidValue, Knobs, Model
from kvexp_vllm.rules import VersionRules

_VIDEO = re.compile(
    r"VL|Omni|Intern|Glm4v|GlmOcr|LlavaNextVideo|LlavaOnevision|Gemma4|Qwen3_5|Exaone4_5|Molmo2"
    r"|Keye|MiniCPMV|Ovis2_5"
)
"""Classes whose vision tower serves videos too."""


_MROPE = re.compile(r"Qwen2VL|Qwen2_5_VL|Qwen2_5Omni|Qwen3VL|Qwen3Omni|Qwen3_5|Glm4v|Keye")
"""Classes whose positions have a time, a height and a width (`MRotaryEmbedding`)."""


ENCODER_MODES = ("weights", "data")


def has_mrope(model: Model) -> bool:
    """Whether a token's position is one in time, height and width."""
    return _MROPE.match(model.architecture) is not None


def modalities(model: Model) -> tuple[str, ...]:
    """What a request may hold beside text, by the model's towers and class."""
    if model.cross_attention and model.tower_parameters:
        return ("audio",)
    found: tuple[str, ...] = ()
    if model.tower_parameters > model.audio_tower_parameters:
        found = ("image", "video") if _VIDEO.search(model.architecture) else ("image",)
    return (*found, "audio") if model.audio_tower_parameters else found


def limits(knobs: Knobs, rules: VersionRules) -> Mapping[str, int]:
    """The limit of every modality of the model; where none is given the version's own.

    Raises:
        InvalidValue: the model takes no such modality, or cannot work without it.
    """
    model, asked = knobs.model, knobs.mm.limits.given
    known = modalities(model)
    for name in asked:
        if name not in known and asked[name]:
            takes = ", ".join(known) or "text alone"
            raise InvalidValue(f"mm.limits.{name}: {model.name} takes {takes}")
    if model.cross_attention and asked.get("audio") == 0:
        raise InvalidValue(
            f"mm.limits.audio must be at least 1 for {model.name}, whose decoder reads its encoder"
        )
    if model.cross_attention:  # a prompt has one audio, whatever is asked
        return dict.fromkeys(known, 1)
    return {name: asked.get(name, rules.mm_limit) for name in known}


def check_encoder_mode(mode: str) -> None:
    """Encoders are split over the ranks, or whole on each.

    Raises:
        InvalidValue: it is neither.
    """
    if mode not in ENCODER_MODES:
        raise InvalidValue(
            f"engine.mm_encoder_tp_mode must be one of {', '.join(ENCODER_MODES)}, got {mode!r}"
        )


def towers_built(deployment: Deployment, rules: VersionRules) -> dict[str, bool]:
    """Whether the vision and the audio tower are built, as arguments of `weights.towers`."""
    found = deployment.mm_limits
    if not found or not rules.skips_towers:
        return {"vision": True, "audio": True}
    vision = [limit for name, limit in found.items() if name != "audio"]
    return {"vision": any(vision), "audio": found.get("audio", 0) > 0}
