"""Encoders whose sizes stand in a model's class, whatever its config.json says of them.

Read in vLLM 0.26: DeepSeek-OCR (`models/deepencoder.py`, `deepencoder2.py`, `deepseek_ocr.py`) has
SAM's, and CLIP's or a decoder of Qwen2 behind it; Phi-3-vision (`phi3v.py`) CLIP's up to the layer
that is read, Phi-4-multimodal (`phi4mm.py`) SigLIP's and a conformer. Parameters equal those of
its modules on the meta device. RADIO (`radio.py`) goes by the name of a model of timm.
"""

from typing import Any

from kvexp.hf.section import Section

OCR, OCR2 = "deepseek_ocr", "deepseek_ocr2"
CLASSES = {
    "DeepseekOCRFor": OCR,
    "DeepseekOCR2For": OCR2,
    "KeyeFor": "keye",
    "KeyeVL1_5For": "keye_vl1_5",
    "RFor": "r_vl",
    "BeeFor": "bee",
}
"""Types by the class of a config; what it states is another's (DeepSeek-VL2), or not known."""

_SAM = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 1024,
    "patch_size": 16,
}
_CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
_SECTIONS: dict[str, tuple[str, dict[str, int]]] = {
    OCR: ("sam_vit_b", _SAM),
    OCR2: ("sam_vit_b", _SAM),
    "phi3_v": ("clip_vision_model", _CLIP),
    "phi4mm": ("siglip_vision_model", _SIGLIP),
}
KINDS = tuple(_SECTIONS)

_GLOBAL_LAYERS, _WINDOW, _HEAD = 4, 14, 64  # of SAM's
_NECK, _HALVED = 256, 512
_OCR_CLIP = {**_CLIP, "num_hidden_layers": 24, "image_size": 224}
_QWEN2 = (896, 4864, 24, 128)
_QUERIES = 144 + 256
_PHI3_MERGED = 4
_CONFORMER = (1024, 1536, 24)  # width, MLP's width, layers
_CONFORMER_REST = 16_160  # a bias of distances in each head, mean and deviation of its bins
_SUBSAMPLED = 10  # bins of a position after its convolutions


NEMOTRON = (
    "NemotronH_Nano_VL_V2",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
)
_RADIO = {
    "vit_base_patch16_224": (768, 12, 12, 3072),
    "vit_large_patch16_224": (1024, 24, 16, 4096),
    "vit_huge_patch16_224": (1280, 32, 16, 5120),
}
RADIO_PREFIX = 10  # tokens of classes and registers
_RADIO_SIDE = 2048  # pixels that its table of positions covers


def kind_of(around: Section) -> str:
    """The type of a model, by its class where several share a name."""
    names = around.texts("architectures") or [""]
    found = (own for start, own in CLASSES.items() if names[0].startswith(start))
    return next(found, around.text("model_type") or "")


def section(kind: str, around: Section) -> Section:
    """The section that would describe the encoder which patches enter."""
    name, sizes = _SECTIONS[kind]
    values: dict[str, Any] = {"model_type": name, **sizes}
    return Section(values, "", around.outer, around.notes)


def parameters(kind: str, around: Section, hidden: int) -> tuple[int, int]:
    """Parameters beside the decoder, projectors and separators too, and those for audio."""
    if kind == "phi3_v":
        return _plain(_CLIP) + 4 * _CLIP["hidden_size"] + _phi3_projector(hidden), 0
    if kind == "phi4mm":
        width = _SIGLIP["hidden_size"]
        images = _plain(_SIGLIP) + width + 2 * width + _projector(width, hidden)
        heard = _conformer() + 2 * _projector(_CONFORMER[0], hidden)
        return images + heard, heard
    second, width, joined, separators = _qwen2(), _QWEN2[0], 1, 1
    if kind == OCR:
        width = _OCR_CLIP["hidden_size"]
        second, joined, separators = _plain(_OCR_CLIP) + 4 * width, 2, 2
    projector = around.inner("projector_config")
    inputs = projector.integer("input_dim") if projector is not None else None
    rows = (inputs or joined * width) + 1 + separators
    return _sam(width) + second + rows * hidden, 0


def radio(tower: Section) -> Section:
    """RADIO's section with the sizes that its name stands for.

    Raises:
        InvalidValue: the name is not known.
    """
    args = tower.inner("args")
    name = (args.text("model") if args is not None else None) or "vit_huge_patch16_224"
    if args is None or not args.has("model"):
        tower.assume(f"{tower.name_of('args')}.model is not given: {name}")
    if name not in _RADIO:
        raise tower.wrong(("args",), f"a model of {', '.join(_RADIO)}", name)
    width, layers, heads, mlp = _RADIO[name]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    values = {**tower.values, "model_type": "radio", **sizes, "intermediate_size": mlp}
    return Section(values, tower.path, tower.outer, tower.notes)


def radio_parameters(tower: Section, around: Section, hidden: int) -> int:
    """RADIO's parameters: layers with a scale each side, a table of positions, its projector."""
    sized = radio(tower)
    width, layers = sized.required("hidden_size"), sized.required("num_hidden_layers")
    mlp, patch = sized.required("intermediate_size"), sized.integer("patch_size") or 16
    layer = 4 * width * width + 2 * width * mlp + 11 * width + mlp
    rows = 3 * patch * patch + (_RADIO_SIDE // patch) ** 2 + RADIO_PREFIX
    merged, inner = 4 * width, around.integer("projector_hidden_size") or 20480
    return layers * layer + rows * width + merged * (1 + inner) + inner * hidden


WINDOWED_AUDIO = ("qwen3_asr_audio_encoder", "qwen3_omni_moe_audio_encoder")


def windowed_audio_parameters(tower: Section, hidden: int) -> int:
    """Qwen3's encoder of audio: three convolutions that halve, layers, two projections."""
    width, layers = tower.required("d_model"), tower.required("encoder_layers")
    mlp, out = tower.required("encoder_ffn_dim"), tower.integer("output_dim") or hidden
    channels = tower.integer("downsample_hidden_size") or 480
    bins = -(-(tower.integer("num_mel_bins") or 128) // 8)
    layer = 4 * width * width + 2 * width * mlp + 9 * width + mlp
    convolutions = 10 * channels + 2 * (9 * channels + 1) * channels + channels * bins * width
    return layers * layer + convolutions + (width + 3) * width + (width + 1) * out


WHISPERS = ("audioflamingo3", "glmasr", "qwen2_audio", "qwen2_5_omni", "voxtral")
"""Types whose encoder of audio is Whisper's, with a projector of their own."""

_UNSEATED = ("glmasr", "qwen2_5_omni")
"""Those of them that compute their positions."""


def whisper_parameters(kind: str, tower: Section, hidden: int) -> int:
    """Whisper's encoder: two convolutions, layers, positions; a projector by the type."""
    width = tower.required("d_model", "hidden_size")
    layers = tower.required("encoder_layers", "num_hidden_layers")
    mlp = tower.required("encoder_ffn_dim", "intermediate_size")
    bins = tower.integer("num_mel_bins") or 128
    rows = 0 if kind in _UNSEATED else tower.integer("max_source_positions") or 1500
    layer = 4 * width * width + 2 * width * mlp + 8 * width + mlp
    convolutions = 3 * width * (bins + width) + 2 * width
    return layers * layer + convolutions + (rows + 2) * width + _heard(kind, tower, width, hidden)


def _heard(kind: str, tower: Section, width: int, hidden: int) -> int:
    """The projector behind Whisper's encoder, of one or of four positions."""
    merged = 4 * width
    if kind == "qwen2_5_omni":
        out = tower.integer("output_dim") or hidden
        return (width + 3) * out
    if kind == "qwen2_audio":
        return (width + 1) * hidden
    if kind == "voxtral":
        return merged * hidden + hidden * hidden
    if kind == "glmasr":
        return (merged + 1) * 2 * hidden + (2 * hidden + 1) * hidden
    return (width + 1 + hidden + 1) * hidden


def _plain(sizes: dict[str, int]) -> int:
    """Layers with biases and norms, patches without a bias, a position each."""
    width, mlp, patch = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]
    layer = 4 * width * width + 2 * width * mlp + 9 * width + mlp
    positions = (sizes["image_size"] // patch) ** 2
    return sizes["num_hidden_layers"] * layer + width * (3 * patch * patch + positions)


def _projector(width: int, hidden: int) -> int:
    return (width + 1 + hidden + 1) * hidden


def _phi3_projector(hidden: int) -> int:
    merged = _PHI3_MERGED * _CLIP["hidden_size"]
    return _projector(merged, hidden) + 2 * merged


def _sam(out: int) -> int:
    width, layers = _SAM["hidden_size"], _SAM["num_hidden_layers"]
    side = _SAM["image_size"] // _SAM["patch_size"]
    distances = _GLOBAL_LAYERS * (2 * side - 1) + (layers - _GLOBAL_LAYERS) * (2 * _WINDOW - 1)
    neck = width * _NECK + 9 * _NECK * _NECK + 4 * _NECK
    halving = 9 * (_NECK * _HALVED + _HALVED * out)
    return _plain(_SAM) + width + 2 * _HEAD * distances + neck + halving


def _qwen2() -> int:
    width, mlp, layers, keys = _QWEN2
    layer = 2 * width * width + 2 * width * keys + 3 * width * mlp + 3 * width + 2 * keys
    return layers * layer + width + _QUERIES * width


def _conformer() -> int:
    """Two gated MLPs, attention and a convolution a layer, behind convolutions of the input."""
    width, mlp, layers = _CONFORMER
    layer = 6 * width * mlp + 8 * width * width + 32 * width
    convolutions = 10 * width + 2 * (10 * width + width * width + width)
    return layers * layer + convolutions + _SUBSAMPLED * width * width + width + _CONFORMER_REST
