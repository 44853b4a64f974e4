"""What vLLM prints, in the shape of its release."""

from kvexp.contract import CachePlan
from kvexp_vllm.rules import VersionRules

SWAP_SPACE_BYTES = 4 << 30  # v0, for each card


def capacity(plan: CachePlan, rules: VersionRules) -> tuple[str, ...]:
    """The engine core's lines about capacity."""
    length = plan.max_model_len
    if rules.log_shape == "v0":
        swapped = SWAP_SPACE_BYTES // max(plan.block_bytes_per_rank[0], 1)
        return (
            f"# GPU blocks: {plan.num_blocks}, # CPU blocks: {swapped}",
            f"Maximum concurrency for {length} tokens per request: {plan.max_concurrency:.2f}x",
        )
    size = f"GPU KV cache size: {plan.kv_tokens:,} tokens"
    concurrency = (
        f"Maximum concurrency for {length:,} tokens per request: {plan.max_concurrency:.2f}x"
    )
    if rules.log_shape == "one_line":
        return (f"{size}, {concurrency}",)
    return size, concurrency
