"""The two encoders of DeepSeek-OCR: SAM's, and CLIP's or a decoder of Qwen2 behind it.

vLLM 0.26 `models/deepencoder.py`, `deepencoder2.py` and `deepseek_ocr.py`: their sizes stand in the
class, whatever the config says, so that only the projector's are read.
"""

from kvexp.hf.section import Section

OCR, OCR2 = "deepseek_ocr", "deepseek_ocr2"
CLASSES = {"DeepseekOCRFor": OCR, "DeepseekOCR2For": OCR2}
"""Types by the class of a config; the type that it states is DeepSeek-VL2's."""

KINDS = tuple(CLASSES.values())
PATCH = 16
_SAM = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 1024,
    "patch_size": PATCH,
}
_GLOBAL_LAYERS, _WINDOW, _HEAD = 4, 14, 64
_NECK, _HALVED = 256, 512
_CLIP = (1024, 4096, 24, 14, 224)
_QWEN2 = (896, 4864, 24, 128)
_QUERIES = 144 + 256


def kind_of(around: Section) -> str:
    """The type of a model, by its class where several share a name."""
    names = around.texts("architectures") or [""]
    found = (own for start, own in CLASSES.items() if names[0].startswith(start))
    return next(found, around.text("model_type") or "")


def sam(tower: Section) -> Section:
    """The section that describes the encoder which patches enter."""
    return Section({"model_type": "sam_vit_b", **_SAM}, tower.path, tower.outer, tower.notes)


def parameters(kind: str, around: Section, hidden: int) -> int:
    """Parameters of both encoders, of the projector and the two separators."""
    projector = around.inner("projector_config")
    second = _qwen2() if kind == OCR2 else _clip()
    width, joined, separators = (_QWEN2[0], 1, 1) if kind == OCR2 else (_CLIP[0], 2, 2)
    inputs = projector.integer("input_dim") if projector is not None else None
    rows = (inputs or joined * width) + 1 + separators
    return _sam(width) + second + rows * hidden


def _sam(out: int) -> int:
    width, mlp, layers = _SAM["hidden_size"], _SAM["intermediate_size"], _SAM["num_hidden_layers"]
    side = _SAM["image_size"] // PATCH
    layer = 4 * width * width + 2 * width * mlp + 9 * width + mlp
    distances = _GLOBAL_LAYERS * (2 * side - 1) + (layers - _GLOBAL_LAYERS) * (2 * _WINDOW - 1)
    relative = 2 * _HEAD * distances
    neck = width * _NECK + 9 * _NECK * _NECK + 4 * _NECK
    halving = 9 * (_NECK * _HALVED + _HALVED * out)
    patches = width * (3 * PATCH * PATCH + 1) + side * side * width
    return layers * layer + relative + neck + halving + patches


def _clip() -> int:
    width, mlp, layers, patch, image = _CLIP
    layer = 4 * width * width + 2 * width * mlp + 9 * width + mlp
    positions = (image // patch) ** 2 + 2
    return layers * layer + width * (3 * patch * patch + positions + 2)


def _qwen2() -> int:
    width, mlp, layers, keys = _QWEN2
    layer = 2 * width * width + 2 * width * keys + 3 * width * mlp + 3 * width + 2 * keys
    return layers * layer + width + _QUERIES * width
