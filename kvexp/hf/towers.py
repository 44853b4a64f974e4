"""Parameters of encoders beside the decoder, by a common rule.

An encoder's class decides biases and projectors, so that the figure is an estimate and is noted;
a checkpoint beside the config gives the exact one.
"""

from kvexp.hf.section import Section

VISION_KEYS = ("vision_config", "visual", "vision_tower_config")
AUDIO_KEYS = ("audio_config", "speech_config", "encoder_config")
GATED = ("qwen2_5_vl", "pixtral", "mistral3", "qwen2_5_omni_vision_encoder")
"""Vision encoders whose MLP has a gate."""

DEFAULTS = {
    "siglip_vision_model": (1152, 27, 4304, 14),
    "clip_vision_model": (1024, 24, 4096, 14),
    "pixtral": (1024, 24, 4096, 16),
    "qwen2_5_vl": (1280, 32, 3420, 14),
    "qwen2_vl": (1280, 32, 5120, 14),
}
"""Width, layers, MLP width and patch where a published config leaves them out."""


SIDES = ("image_size", "patch_size", "spatial_patch_size")


def encoder_section(place: Section, keys: tuple[str, ...]) -> Section | None:
    """The section of an encoder; the side of a square is one number, where a config has two."""
    tower = place.inner(*keys)
    if tower is None:
        return None
    values = {
        name: _side(value) if name in SIDES else value for name, value in tower.values.items()
    }
    return Section(values, tower.path, tower.outer, tower.notes)


def _side(value: object) -> object:
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return value[0]
    return value


def tower_parameters(config: Section, hidden: int) -> tuple[int, int]:
    """Parameters beside the decoder, and those of them for audio; 0 for a text model."""
    vision, audio = 0, _own_encoder(config, hidden)
    for place in _places(config):
        for keys in (VISION_KEYS, AUDIO_KEYS):
            tower = encoder_section(place, keys)
            if tower is None or not tower.values:
                continue
            count = _encoder(tower, config, hidden)
            vision, audio = (
                (vision + count, audio) if keys is VISION_KEYS else (vision, audio + count)
            )
    return vision + audio, audio


def _own_encoder(config: Section, width: int) -> int:
    """The encoder of an encoder-decoder: its layers, convolutions and positions (Whisper's)."""
    if not config.has("decoder_layers"):
        return 0
    layers = config.integer("encoder_layers")
    if layers is None:
        config.assume("encoder_layers is not given: no encoder is counted")
        return 0
    mlp = config.required("encoder_ffn_dim")
    layer = 4 * width * width + 2 * width * mlp + mlp + 8 * width
    bins, positions = config.integer("num_mel_bins"), config.integer("max_source_positions")
    if bins is None or positions is None:
        config.assume("num_mel_bins or max_source_positions is not given: its weights are left out")
    convolutions = 3 * width * ((bins or 0) + width) + 2 * width if bins else 0
    return layers * layer + convolutions + (positions or 0) * width + 2 * width


def _places(config: Section) -> list[Section]:
    """The top level, or the section around the language model where encoders stand there."""
    parent = config.path.rpartition(".")[0]
    places = [config.around()]
    if parent and isinstance(config.outer.get(parent), dict):
        places.append(Section(config.outer[parent], parent, config.outer, config.notes))
    return places


def _encoder(tower: Section, config: Section, hidden: int) -> int:
    kind = tower.text("model_type") or config.around().text("model_type") or ""
    defaults = DEFAULTS.get(kind, (None, None, None, None))
    width = tower.integer("embed_dim", "d_model", "width", "hidden_size") or defaults[0]
    layers = tower.integer("num_hidden_layers", "depth", "layers", "encoder_layers") or defaults[1]
    if width is None or layers is None:
        tower.assume(
            f"{tower.path} lacks hidden_size or num_hidden_layers (embed_dim, depth): its weights"
            " are not counted"
        )
        return 0
    ratio = tower.number("mlp_ratio")
    mlp = tower.integer("intermediate_size", "encoder_ffn_dim") or defaults[2]
    if mlp is None:
        mlp = int(ratio * width) if ratio else 4 * width
    patch = tower.integer("patch_size", "spatial_patch_size") or defaults[3] or 14
    gated = kind in GATED
    layer = 4 * width * width + (3 if gated else 2) * width * mlp + 9 * width + mlp
    patches = width * 3 * patch * patch
    projector = 2 * width * hidden + hidden * hidden
    total = layers * layer + patches + projector
    tower.assume(
        f"{tower.path}: about {total:,} parameters by the rule of a plain encoder; a checkpoint"
        " gives the exact figure"
    )
    return total
