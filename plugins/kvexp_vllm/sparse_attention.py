"""DeepSeek V4's sparse attention: heads as its kernels take them, and their workspaces.

vLLM 0.20 to 0.33, `models/deepseek_v4`, `layers/sparse_attn_indexer.py`.
"""

from kvexp.contract import Deployment

FLASHMLA_HEADS = (64, 128)
SM120_HEADS = (16, 32, 64, 128)
"""Numbers of heads that kernels have; a rank's are padded to the next one."""


def is_sm120(deployment: Deployment) -> bool:
    """Whether the card's kernels are FlashInfer's for compute capability 12."""
    return (deployment.gpu.compute_capability or "").startswith("12.")


def padded_heads(deployment: Deployment) -> int:
    """Heads of a rank's queries and of its outputs, padded as the kernels need them."""
    heads = deployment.model.num_attention_heads // deployment.tp
    known = SM120_HEADS if is_sm120(deployment) else FLASHMLA_HEADS
    return next((number for number in known if heads <= number), heads)
