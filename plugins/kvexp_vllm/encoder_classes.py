"""Forwards of encoders that differ by vLLM's class: what is alive at the widest point of a layer.

Read in 0.26's `model_executor/models`, counted as the measured ones were (`encoders`): hidden sizes
of a position that each rank has (`whole`: inputs of the encoder and of the layer, their norm) or
shares (`shared`: projections, their copies, and those of queries and keys in fp32, which count
twice, beside what turning makes of them).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One class: `whole` and `shared` as above, `beside_mlp` hidden sizes beside the MLP.

    `at_once`: images, or tiles where it has them, that pass together; 0 for all of them. `tables`:
    fp32 tables of half a head that turning keeps beside. `indices`: whole numbers of a position.
    `kept_rows`: positions whose embeddings the first forward keeps in fp32. `native_norm`: hidden
    sizes more beside the MLP where the model is compiled, whose norms are then torch's, in fp32.
    """

    whole: int
    shared: int
    beside_mlp: int
    at_once: int = 0
    tables: int = 0
    indices: int = 0
    kept_rows: int = 0
    native_norm: int = 0


PASSES = {
    "DotsOCRFor": Pass(whole=2, shared=18, beside_mlp=3, tables=3),
    "Exaone4_5": Pass(whole=3, shared=5, beside_mlp=3, tables=2, native_norm=2),
    "HunYuanVL": Pass(whole=2, shared=4, beside_mlp=4, at_once=1, kept_rows=128 * 128),
    "Keye": Pass(whole=3, shared=15, beside_mlp=4, tables=3, indices=8),
    "Lfm2Vl": Pass(whole=3, shared=4, beside_mlp=4),
    "NemotronH_": Pass(whole=2, shared=4, beside_mlp=3, at_once=128),
    "Ovis2_5": Pass(whole=3, shared=9, beside_mlp=4, tables=8),
    "PaddleOCRVL": Pass(whole=3, shared=15, beside_mlp=4, at_once=1, tables=3, indices=8),
}
"""By the first letters of a class."""

SHARED_PROJECTORS = ("Cohere2Vision",)
"""Classes whose ranks share the projector."""

MASKED = ("Idefics3", "SmolVLM")
"""Classes that take a mask of the pixels beside them."""

COPIED = (*MASKED, "MiniCPMO", "MiniCPMV", "Phi4MM")
"""Classes that copy what the encoder takes, into one tensor or without what is padding."""

TIMED = ("Qwen3VL",)
"""Classes whose videos are written with the time of each frame."""

BY_LIMITS = ("Keye",)
"""Classes whose video is what the length leaves beside as many images as a request may have."""

MEASURED = (
    *("Gemma3For", "Glm4v", "GlmOcr", "Idefics3", "InternS1", "InternVL", "PaddleOCRVL"),
    *("Qwen2VL", "Qwen2_5_VL", "Qwen2_5Omni", "Qwen3Omni", "Qwen3VL", "Qwen3_5", "SmolVLM"),
)
"""Classes whose encoder, or one with the same layers, was measured on an H200."""


def pass_of(architecture: str) -> Pass | None:
    """The forward of a class, None where `encoders` knows it by its family."""
    return next((found for name, found in PASSES.items() if architecture.startswith(name)), None)
