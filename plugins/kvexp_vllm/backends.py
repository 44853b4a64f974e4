"""Which kernels attend, where that changes what graphs are and take (`platforms/cuda.py`)."""

from kvexp.contract import MIB, Deployment
from kvexp_vllm.peaks import chip

WORKSPACE_BYTES = 394 * MIB
"""`VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE`, taken with the first whole graph that is profiled."""

PROFILED_UNTIL = (0, 23)
"""Starts of 0.20 and 0.22 have it in their estimate, two of 0.24 on an RTX 5090 do not."""

OF_OTHERS = ("gpt_oss", "gemma4_text")
"""Types with attention sinks, or heads of two widths, which go to Triton's kernels."""


def is_flashinfer(deployment: Deployment) -> bool:
    """Whether FlashInfer comes first: on compute capability 10, and for an fp8 cache elsewhere.

    But on Hopper, whose FlashAttention 3 takes one; latent attention has kernels of its own.
    """
    model = deployment.model
    if model.mla is not None or model.compressed is not None or model.model_type in OF_OTHERS:
        return False
    on = chip(deployment)
    return on == "10" or (on != "9" and deployment.kv_dtype.is_fp8)


def captures_drafts(deployment: Deployment) -> bool:
    """Whether whole graphs of several tokens a request are captured (`AttentionCGSupport`)."""
    return chip(deployment) == "10" or not is_flashinfer(deployment)
