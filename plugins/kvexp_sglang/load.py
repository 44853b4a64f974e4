"""What SGLang takes between the baseline and the pool beside its tensors, from public logs."""

from dataclasses import replace

from kvexp.contract import MIB, Deployment, Part, terms

GROWTH_BYTES = 64 * MIB  # Qwen2.5-0.5B on an H100: 0.98 GiB for 0.92 GiB of tensors
MOST_GROWTH_BYTES = 160 * MIB  # 10 to 140 MiB in ten logs of 16 bits
GROWTH_OF_UNIFIED_BYTES = (123 * MIB, 373 * MIB, 473 * MIB)  # jethac/dgx-spark-hijinks results/
UNTIL_POOL_BYTES = 84 * MIB  # 9 on an L40S; 24 to 79 on RTX 3090s, eleven logs of Gemma 4
UNTIL_POOL_OF_UNIFIED_BYTES = 128 * MIB  # 53 to 107 in six logs of GB10


def growth(deployment: Deployment, *, read: bool) -> Part:
    """What loading takes beside the tensors; of unified memory the process takes some too.

    `read`: what is free after it was read, so that the interval does not matter.
    """
    if deployment.gpu.unified_memory and not read:
        low, best, high = GROWTH_OF_UNIFIED_BYTES
        reason = "growth while the weights load, the median of eleven logs of GB10"
        part = terms.assumed("non_torch", best, reason)
        return replace(part, low_bytes=low, high_bytes=high)
    part = terms.assumed("non_torch", GROWTH_BYTES, "growth while the weights load, of public logs")
    return part if read else replace(part, low_bytes=0, high_bytes=MOST_GROWTH_BYTES)


def until_pool_bytes(deployment: Deployment) -> int:
    """The most that is taken between the reading that a log prints and the pool's own."""
    return UNTIL_POOL_OF_UNIFIED_BYTES if deployment.gpu.unified_memory else UNTIL_POOL_BYTES
