"""Limits of images, videos and audio in a request, and which towers vLLM builds under them.

From vLLM 0.26 `config/multimodal.py: get_limit_per_prompt` and
`model_executor/models/interfaces.py: _mark_tower_model`: a tower is left out when every modality
that it serves is limited to 0.
"""

import re
from collections.abc import Mapping

from kvexp.contract import Deployment, InvalidValue, Knobs, Model
from kvexp_vllm.rules import VersionRules, patch_release_of

_VIDEO = re.compile(
    r"(?<!Deepseek)(?<!OCR)(?<!HunYuan)(?<!Kimi)(?<!Step)(?<!Step3)VL|Omni|Intern|Glm4v|GlmOcr"
    r"|LlavaNextVideo|LlavaOnevision|Gemma4|Qwen3_5|Exaone4_5|Molmo2|Keye|MiniCPM[VO]|Ovis2_5"
)
"""Classes whose vision tower serves videos too."""


_MROPE = re.compile(
    r"Qwen2VL|Qwen2_5_VL|Qwen2_5Omni|Qwen3VL|Qwen3Omni|Qwen3_5|Glm4v|GlmOcr|Keye|PaddleOCRVL"
)
"""Classes whose positions have a time, a height and a width (`MRotaryEmbedding`)."""


ENCODER_MODES = ("weights", "data")
WHOLE_ITEMS_SINCE, RAISED_SINCE = (0, 20, 0), (0, 22, 0)
"""An item of Gemma 4 in one step (`is_mm_prefix_lm`), and defaults that are enough for it."""


def has_mrope(model: Model) -> bool:
    """Whether a token's position is one in time, height and width."""
    return _MROPE.match(model.architecture) is not None


def modalities(model: Model) -> tuple[str, ...]:
    """What a request may hold beside text, by the model's towers and class."""
    if model.cross_attention and model.tower_parameters:
        return ("audio",)
    found: tuple[str, ...] = ()
    seeing = model.tower_parameters - model.audio_tower_parameters
    if seeing or (model.has_towers and not model.tower_parameters):
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


def least_tokens(model: Model, limits: Mapping[str, int], version: str) -> tuple[int, int]:
    """What an item that must be in one step needs: (at least, and what a default is raised to).

    An image, or a video where a request may hold one: 32 frames of Gemma 4 are 2,496 tokens.
    """
    encoder, release = model.encoder, patch_release_of(version)
    if encoder is None or not encoder.looks_ahead or release < WHOLE_ITEMS_SINCE:
        return 0, 0
    video = encoder.video_items * encoder.frame_tokens
    sizes = {"image": encoder.tokens_per_item, "video": video}
    needed = max((size for name, size in sizes.items() if limits.get(name, 0)), default=0)
    return needed, max(sizes.values()) if release >= RAISED_SINCE else 0


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


def note(deployment: Deployment, *, profiled: bool) -> str:
    """What a profile without images, videos and audio leaves out; empty where nothing is."""
    taken = [name for name, limit in deployment.mm_limits.items() if limit]
    if profiled or not taken:
        return ""
    return (
        f"the profile passes no {' or '.join(taken)} through the encoder: what one takes there is"
        " in no term of the budget; `items` has it under full load"
    )
