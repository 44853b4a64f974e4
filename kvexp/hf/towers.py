"""Parameters of encoders beside the decoder: by their class, or by the rule of a plain encoder.

A class decides biases, norms and projectors. Where it is not one of `CLASSES` the figure is an
estimate and is noted; a checkpoint beside the config gives the exact one.
"""

import re
from dataclasses import dataclass
from typing import Literal

from kvexp.hf import class_encoders
from kvexp.hf.section import Section
from kvexp.request import LIMITS

VISION_KEYS = ("vision_config", "visual", "vision_tower_config", "vit_config")
AUDIO_KEYS = ("audio_config", "speech_config", "encoder_config", "sound_config")
GATED = (
    *("qwen2_5_vl", "qwen2_5_omni", "qwen2_5_omni_vision_encoder", "pixtral", "mistral3"),
    *("gemma4_vision", "glm4v", "glm4v_moe", "glm4v_vision", "glm4v_moe_vision"),
    *("glm_ocr", "glm_ocr_vision", "dots_ocr", "dots_vit"),
    *("exaone4_5", "exaone4_5_vision", "opencua"),
)
"""Vision encoders whose MLP has a gate."""

MOST_PATCH, MOST_SIDE, MOST_POSITIONS = 1 << 10, 1 << 16, 1 << 20
"""Pixels along a side of a patch and of an image, positions of an image: more is damage."""

CONFORMERS = ("gemma4_audio", "parakeet")
CONFORMER_SQUARES = 24
"""Of its width, in a layer: two MLPs of four widths, attention with positions, a convolution."""

PLAIN_SHARE = 0.4
"""How much more than a plain encoder those of `CLASSES` have, but for a visual vocabulary's."""

MOST_PARAMETERS = 1_300_000_000
"""Nine in ten of the catalogue's encoders have no more."""

MINIMAX_MERGED = 4
"""Projected patches that are merged, each into the decoder's width."""

_QWEN3 = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Types with one vision encoder."""

_QWEN25 = ("qwen2_5_vl", "qwen2_5_omni", "opencua")
_INTERN = ("internvl", "internvl_chat", "interns1", "skywork_chat", "qianfan_ocr")
KEYE, KEYE15 = "keye", "keye_vl1_5"

DEFAULTS = {
    "siglip_vision_model": (1152, 27, 4304, 14),
    "clip_vision_model": (1024, 24, 4096, 14),
    "pixtral": (1024, 24, 4096, 16),
    **dict.fromkeys(_QWEN25, (1280, 32, 3420, 14)),
    "qwen2_vl": (1280, 32, 5120, 14),
    **dict.fromkeys(_QWEN3, (1152, 27, 4304, 16)),
}
"""Width, layers, MLP width and patch where a published config leaves them out."""

_ITEM = re.compile(r"(image|img|vision|video|audio|speech)\w*_token(_id|_index)?$")

SIDES = ("image_size", "patch_size", "spatial_patch_size")
"""Sizes that some configs state as two equal numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Class:
    """What the class of a vision encoder and its projector decide.

    `around_norms`: norms before and behind all layers. `frames`: images that share a patch.
    `positions`: learned ones, a patch each (`patches`), one more for a class token whose embedding
    is learned too (`class`), or as many as the config says (`stated`, `rows`), or of the
    largest image and one more (`largest`), or beside those of patches a long row of them
    (`packed`). `head_norms`: a norm for queries of a head and one for keys. `scales`: two a layer,
    with norms and biases of its projections as the config says.
    """

    projector: (
        Literal["merger", "gemma3", "linears", "mistral3", "glm4v", "minimax_m3"]
        | Literal["idefics3", "cohere", "resampler", "hunyuan", "ovis2_5", "lfm2"]
        | Literal["internvl", "normed"]
    )
    rms: bool = False
    bias: bool = True
    patch_bias: bool = False
    around_norms: int = 0
    frames: int = 1
    positions: Literal["patches", "class", "stated", "rows", "largest", "packed"] | None = None
    head_norms: bool = False
    scales: bool = False


CLASSES = {
    "qwen2_vl": _Class(projector="merger", frames=2),
    **dict.fromkeys((*_QWEN25, "exaone4_5"), _Class(projector="merger", frames=2, rms=True)),
    **dict.fromkeys(
        _INTERN,
        _Class(projector="internvl", patch_bias=True, positions="class", scales=True),
    ),
    **dict.fromkeys(
        (KEYE, KEYE15),
        _Class(projector="merger", patch_bias=True, around_norms=1, positions="packed"),
    ),
    **dict.fromkeys(
        ("r_vl", "bee"), _Class(projector="normed", patch_bias=True, positions="patches")
    ),
    **dict.fromkeys(
        (*_QWEN3, "qwen3_omni_moe"),
        _Class(projector="merger", frames=2, patch_bias=True, positions="stated"),
    ),
    "gemma3": _Class(projector="gemma3", patch_bias=True, around_norms=1, positions="patches"),
    "llava": _Class(projector="linears", around_norms=2, positions="class"),
    "llava_next": _Class(projector="linears", around_norms=2, positions="class"),
    "llava_onevision": _Class(projector="linears", patch_bias=True, positions="patches"),
    **dict.fromkeys(
        ("lighton_ocr", "mistral3"),
        _Class(projector="mistral3", rms=True, bias=False, around_norms=1),
    ),
    "minimax_m3_vl": _Class(projector="minimax_m3", frames=2, around_norms=1),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe"),
        _Class(
            projector="glm4v",
            rms=True,
            bias=False,
            patch_bias=True,
            around_norms=2,
            frames=2,
            positions="patches",
        ),
    ),
    "glm_ocr": _Class(
        projector="glm4v", rms=True, patch_bias=True, around_norms=1, frames=2, head_norms=True
    ),
    "paddleocr_vl": _Class(
        projector="merger", patch_bias=True, around_norms=1, positions="patches"
    ),
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        _Class(projector="idefics3", patch_bias=True, around_norms=1, positions="patches"),
    ),
    **dict.fromkeys(
        ("lfm2_vl", "lfm2-vl"),
        _Class(projector="lfm2", patch_bias=True, around_norms=1, positions="rows"),
    ),
    **dict.fromkeys(
        ("aya_vision", "cohere2_vision"),
        _Class(projector="cohere", patch_bias=True, around_norms=1, positions="patches"),
    ),
    **dict.fromkeys(
        ("minicpmo", "minicpmv"),
        _Class(projector="resampler", patch_bias=True, around_norms=1, positions="patches"),
    ),
    "hunyuan_vl": _Class(projector="hunyuan", patch_bias=True, positions="largest"),
    "ovis2_5": _Class(projector="ovis2_5", patch_bias=True, around_norms=1, positions="patches"),
    "dots_ocr": _Class(
        projector="merger",
        rms=True,
        bias=False,
        patch_bias=True,
        around_norms=3,  # of patches, of the last layer, and the bias of its merger's
    ),
}
"""By the model's type, from transformers' modules: equal to their parameters."""

_OWN = {
    "llava": "clip_vision_model",
    "llava_next": "clip_vision_model",
    "llava_onevision": "siglip_vision_model",
    "lighton_ocr": "pixtral",
    "mistral3": "pixtral",
}
"""The type of the encoder that the class was read for, where a model may have another."""


def encoder_section(place: Section, keys: tuple[str, ...]) -> Section | None:
    """The section of an encoder; the side of a square is one number, where a config has two.

    None where there is none, or nothing in it.
    """
    tower = place.inner(*keys)
    if tower is None or not tower.values:
        return None
    values = {
        name: _side(value) if name in SIDES else value for name, value in tower.values.items()
    }
    return Section(values, tower.path, tower.outer, tower.notes)


def patch_size(tower: Section) -> int | None:
    """The side of a patch in pixels, or None where the config does not say it.

    Raises:
        InvalidValue: it is no side of a patch.
    """
    return tower.integer("patch_size", "spatial_patch_size", most=MOST_PATCH)


def patches_a_side(tower: Section, patch: int, *, default: int, why: str) -> int:
    """Patches along a side of the encoder's square image.

    Raises:
        InvalidValue: the image is no size, or smaller than a patch.
    """
    side = tower.assumed("image_size", default=default, why=why, most=MOST_SIDE)
    if side < patch:
        raise tower.wrong(("image_size",), f"at least patch_size ({patch})", side)
    return side // patch


def _side(value: object) -> object:
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return value[0]
    return value


def tower_parameters(config: Section, hidden: int) -> dict[str, int]:
    """Parameters beside the decoder, of them for audio, and how many more may be there, as facts.

    All are 0 for a text model.
    """
    stated = class_encoders.kind_of(config.around())
    if stated in class_encoders.KINDS:
        total, audio = class_encoders.parameters(stated, config.around(), hidden)
        return {"tower_parameters": total, "audio_tower_parameters": audio}
    vision, audio, more, sees = 0, _own_encoder(config, hidden), 0, False
    for place in places(config):
        for keys in (VISION_KEYS, AUDIO_KEYS):
            tower = encoder_section(place, keys)
            if tower is None:
                continue
            count, doubt = _encoder(tower, config, hidden)
            more += doubt
            sees = sees or keys is VISION_KEYS
            vision, audio = (
                (vision + count, audio) if keys is VISION_KEYS else (vision, audio + count)
            )
    around = config.around()
    if not sees and around.text("model_type") in CLASSES:
        around.assume(f"{VISION_KEYS[0]} is not given: no encoder of images is counted")
        more += MOST_PARAMETERS
    elif config.path and not around.has("model_type"):
        around.assume("model_type is not given: encoders are counted by their sections alone")
    elif not vision + audio + more and (tokens := _tokens_of_items(around)):
        around.assume(f"{tokens} is given and no encoder's section: none is counted")
        more += MOST_PARAMETERS
    return {
        "tower_parameters": vision + audio,
        "audio_tower_parameters": audio,
        "uncounted_tower_parameters": more,
    }


def _tokens_of_items(around: Section) -> str | None:
    """A key that says by which token an item stands in a prompt; None where there is none."""
    return next((key for key in around.values if _ITEM.match(key) and around.has(key)), None)


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


def places(config: Section) -> list[Section]:
    """The top level, or the section around the language model where encoders stand there."""
    parent = config.path.rpartition(".")[0]
    places = [config.around()]
    if parent and isinstance(config.outer.get(parent), dict):
        places.append(Section(config.outer[parent], parent, config.outer, config.notes))
    return places


def _encoder(tower: Section, config: Section, hidden: int) -> tuple[int, int]:
    """Parameters of one encoder and its projector, and how many more there may be."""
    kind = own_type(tower, config.around().text("model_type") or "")
    around = class_encoders.kind_of(config.around())
    if around == "gemma4_unified":
        return _gemma4_unified(tower, hidden), 0
    if tower.text("model_type") in class_encoders.WINDOWED_AUDIO and tower.has("d_model"):
        return class_encoders.windowed_audio_parameters(tower, hidden), 0
    if around in class_encoders.WHISPERS and "audio" in tower.path:
        return class_encoders.whisper_parameters(around, tower, hidden), 0
    if around in class_encoders.NEMOTRON and tower.has("args", "version"):
        return class_encoders.radio_parameters(tower, config.around(), hidden), 0
    defaults = DEFAULTS.get(kind, (None, None, None, None))
    width = tower.integer("embed_dim", "d_model", "width", "hidden_size") or defaults[0]
    layers = tower.integer("num_hidden_layers", "depth", "layers", "encoder_layers")
    if layers is None and defaults[1] is not None:
        layers = tower.assumed("num_hidden_layers", "depth", default=defaults[1], why=_WHY)
    if width is None or layers is None:
        tower.assume(
            f"{tower.path} lacks hidden_size or num_hidden_layers (embed_dim, depth): its weights"
            " are not counted"
        )
        return 0, MOST_PARAMETERS
    mlp = mlp_width(tower, kind, width) or defaults[2] or 4 * width
    patch = patch_size(tower) or defaults[3] or 14
    gated = kind in GATED
    known = CLASSES.get(around) if _OWN.get(around, kind) == kind else None
    if known is not None:
        sizes = _Sizes(width=width, layers=layers, mlp=mlp, patch=patch, gated=gated)
        return _of_class(known, sizes, tower, config, hidden), 0
    layer = 4 * width * width + (3 if gated else 2) * width * mlp + 9 * width + mlp
    if kind in CONFORMERS:
        layer = CONFORMER_SQUARES * width * width + 15 * width
    patches = width * 3 * patch * patch
    projector = 2 * width * hidden + hidden * hidden
    total = layers * layer + patches + projector
    tower.assume(
        f"{tower.path}: about {total:,} parameters by the rule of a plain encoder; a checkpoint"
        " gives the exact figure"
    )
    return total, int(PLAIN_SHARE * total)


def _gemma4_unified(tower: Section, hidden: int) -> int:
    """Patches and frames of audio enter by projections alone, patches with norms and positions."""
    frame = tower.integer("audio_embed_dim", most=LIMITS["hidden_size"])
    if frame is not None:
        return frame * hidden
    pooled = tower.assumed("pooling_kernel_size", default=3, why=_WHY, most=MOST_PATCH)
    numbers = 3 * (pooled * (patch_size(tower) or 16)) ** 2
    width = tower.assumed("mm_embed_dim", default=3840, why=_WHY, most=LIMITS["hidden_size"])
    rows = tower.assumed("mm_posemb_size", default=1120, why=_WHY, most=MOST_POSITIONS)
    return 2 * numbers + (numbers + 5) * width + 2 * rows * width + width * hidden


def own_type(tower: Section, around: str) -> str:
    """The type of an encoder, where its section does not say it that of its model's class."""
    stated = tower.text("model_type")
    if stated is None and around in _OWN:
        tower.assume(f"{tower.name_of('model_type')} is not given: {_OWN[around]} ({_WHY})")
    return stated or _OWN.get(around, around)


def mlp_width(tower: Section, kind: str, width: int) -> int | None:
    """The width of an encoder's MLP where its section states it, or the ratio to its own."""
    if kind.startswith("glm4v"):  # the stated one is its merger's
        return tower.integer("out_hidden_size", most=LIMITS["hidden_size"])
    stated = tower.integer("intermediate_size", "vt_intermediate_size", "encoder_ffn_dim")
    ratio = tower.number("mlp_ratio")
    return stated or (int(ratio * width) if ratio else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    width: int
    layers: int
    mlp: int
    patch: int
    gated: bool


def _of_class(known: _Class, sizes: _Sizes, tower: Section, config: Section, hidden: int) -> int:
    """Parameters of the encoder and its projector."""
    width, mlp = sizes.width, sizes.mlp
    norm = (1 if known.rms else 2) * width
    widths = 3 if sizes.gated else 2
    layer = 4 * width * width + widths * width * mlp + 2 * norm
    if known.bias:
        layer += 4 * width + (widths - 1) * mlp + width
    if known.scales:
        layer += _scales_and_norms(tower, width)
    if keys := tower.integer("num_key_value_heads"):
        heads = tower.assumed("num_heads", "num_attention_heads", default=keys, why=_WHY)
        layer -= 2 * (width + 1) * (width - width * keys // heads)
    if known.head_norms:
        heads = tower.assumed("num_heads", "num_attention_heads", default=16, why=_WHY)
        layer += 2 * (width // heads)
    patches = width * 3 * known.frames * sizes.patch**2 + (width if known.patch_bias else 0)
    total = sizes.layers * layer + patches + known.around_norms * norm
    total += _positions(known, sizes, tower) * width
    return total + _projector(known, norm, width, tower, config, hidden)


def _scales_and_norms(tower: Section, width: int) -> int:
    """What a layer of InternViT has beyond a plain one (vLLM 0.26 `models/intern_vit.py`)."""
    normed = tower.flag("qk_normalization") or tower.flag("use_qk_norm")
    more = (2 + 2 * bool(normed)) * width
    if tower.flag("qkv_bias") is False or tower.flag("attention_bias") is False:
        more -= 3 * width
    return more - 2 * width * (tower.text("norm_type") == "rms_norm")


def _positions(known: _Class, sizes: _Sizes, tower: Section) -> int:
    """Rows of learned positions, with that of a class token where there is one."""
    if known.positions is None:
        return 0
    if known.positions == "largest":
        side = tower.assumed("max_image_size", default=2048, why=_WHY, most=MOST_SIDE)
        return (side // sizes.patch) ** 2 + 1
    if known.positions == "rows":
        return tower.assumed("num_patches", default=256, why=_WHY, most=MOST_POSITIONS)
    if known.positions == "stated":
        return tower.assumed("num_position_embeddings", default=2304, why=_WHY, most=MOST_POSITIONS)
    side = patches_a_side(tower, sizes.patch, default=_SIDES[known.positions], why=_WHY)
    return side * side + _MORE_ROWS[known.positions]


_SIDES = {"patches": 896, "class": 336, "packed": 384}
_MORE_ROWS = {"patches": 0, "class": 2, "packed": 32768}
_WHY = "of its encoder's class"


def _projector(
    known: _Class, norm: int, width: int, tower: Section, config: Section, hidden: int
) -> int:
    around = config.around()
    if known.projector == "gemma3":
        return width * hidden + width
    if known.projector == "linears":
        newline = 0 if around.text("model_type") == "llava" else hidden
        return width * hidden + hidden + hidden * hidden + hidden + newline
    if known.projector == "normed":
        inner = (4 if class_encoders.kind_of(around) == "bee" else 1) * hidden
        return 2 * width + (width + 1 + hidden) * inner + 2 * hidden
    if known.projector == "internvl":
        merged = 4 * width
        return 2 * merged + (merged + 1) * hidden + (hidden + 1) * hidden
    if known.projector == "mistral3":
        merged = around.assumed("spatial_merge_size", default=2, why=_WHY, most=MOST_PATCH) ** 2
        return merged * width * width + width + width * hidden + hidden * hidden
    if known.projector == "minimax_m3":
        inner = around.assumed("projector_hidden_size", default=hidden, why=_WHY)
        merged = MINIMAX_MERGED * hidden
        return (width + merged + 2) * inner + 2 * (inner * hidden + hidden)
    if known.projector == "idefics3":
        scale = around.assumed("scale_factor", default=2, why=_WHY, most=MOST_PATCH)
        return scale * scale * width * hidden
    if known.projector == "cohere":
        factor = around.assumed("downsample_factor", default=2, why=_WHY, most=MOST_PATCH)
        inner, merged = around.integer("alignment_intermediate_size") or hidden, factor**2 * width
        own_norm = 2 * merged if around.text("model_type") == "aya_vision" else 0
        return own_norm + (merged + 1) * inner + (inner // 2 + 1) * hidden
    if known.projector == "resampler":
        queries = around.assumed("query_num", default=64, why=_WHY, most=MOST_POSITIONS)
        return (queries + width + 5 * hidden + 10) * hidden
    if known.projector == "hunyuan":
        merged = 4 * width
        inner = (merged + 1) * 2 * width + (2 * width + 1) * merged
        return inner + (merged + 1) * hidden + merged + 3 * hidden + width + hidden
    if known.projector == "ovis2_5":
        rows = around.assumed("visual_vocab_size", default=65536, why=_WHY, most=MOST_POSITIONS)
        stride = tower.assumed("hidden_stride", default=2, why=_WHY, most=MOST_PATCH)
        return (stride * stride * width + 2) * max(0, rows - 4) + rows * hidden
    if known.projector == "lfm2":
        factor = around.assumed("downsample_factor", default=2, why=_WHY, most=MOST_PATCH)
        inner, merged = around.assumed("projector_hidden_size", default=2560, why=_WHY), factor**2
        return (2 + inner) * merged * width + inner + inner * hidden + hidden
    if known.projector == "glm4v":
        out = tower.integer("out_hidden_size", most=LIMITS["hidden_size"]) or hidden
        widths = config if around.text("model_type") == "glm_ocr" else tower
        mlp = 3 * out * widths.assumed("intermediate_size", default=13696, why=_WHY)
        return 4 * width * out + out + out * out + 2 * out + mlp
    merged = tower.assumed("spatial_merge_size", default=2, why=_WHY, most=MOST_PATCH) ** 2 * width
    out = tower.integer("out_hidden_size", most=LIMITS["hidden_size"]) or hidden
    mlp = merged * merged + merged + merged * out + out
    deep = len(tower.integers("deepstack_visual_indexes") or ())
    if class_encoders.kind_of(around) == KEYE15:
        norm = 2 * merged
    return norm + mlp + deep * (2 * merged + mlp)
