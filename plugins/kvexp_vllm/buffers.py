"""What vLLM keeps on a card outside its budget, beside context, communicators and graphs."""

from collections.abc import Iterable

from kvexp.contract import MIB, Deployment, KvGroup, RankShape, weights
from kvexp_vllm.fitted import Estimate
from kvexp_vllm.peaks import takes_items
from kvexp_vllm.rules import VersionRules, release_of

ROW_BYTES = 18700  # of the V2 runner's state beside the vocabulary's
FIXED_BYTES = 800_000
VOCABULARY_BYTES = 4.25  # an int32 count and two bits of masks an entry
V1_BUFFERS_BYTES = 66 * MIB  # 41 to 77 MiB in four cases on one H200
CACHED_SHARE = 1.35  # of the warm-up's fp32 logits, by what stays reserved in nine cases
SLACK_BYTES = 100 * MIB  # reserved and not allocated, whatever the shape
FRAGMENTS_SINCE = (0, 19)  # torch 2.10


def runner(deployment: Deployment, shape: RankShape, *, v2_runner: bool) -> Estimate:
    """Buffers that are allocated after the weights were measured and before the profile.

    V2 runner: max_num_seqs x (4.25 x vocabulary + 18.7 KB) + 0.8 MB on the last stage, and two
    buffers of hidden states on later stages; within 1 % in all cases measured on H200s. Where
    embeddings of images come in, one buffer of hidden states.
    """
    model = deployment.model
    hidden = deployment.dtype.itemsize_bytes * model.hidden_size * deployment.max_num_batched_tokens
    items = hidden if takes_items(deployment) else 0
    if not v2_runner:
        return Estimate(
            low_bytes=40 * MIB + items,
            size_bytes=V1_BUFFERS_BYTES + items,
            high_bytes=160 * MIB + items,
            source="four cases of the V1 runner of 0.26 on H200",
        )
    size = float(items)
    if shape.pp_rank == deployment.pp - 1:
        row = VOCABULARY_BYTES * weights.padded_vocab_size(model) + ROW_BYTES
        size = deployment.max_num_seqs * row + FIXED_BYTES
    if shape.pp_rank > 0:
        size += 2 * hidden
    return Estimate(
        low_bytes=int(size * 0.99),
        size_bytes=int(size),
        high_bytes=int(size * 1.01),
        source="vLLM 0.26 on one and two H200s",
    )


def block_tables(deployment: Deployment, groups: Iterable[KvGroup], *, v2_runner: bool) -> int:
    """Numbers of blocks, int32, of every request at the longest length, for each group.

    The V2 runner keeps a second table for the step's requests (`v1/worker/gpu/block_table.py`).
    """
    rows = sum(-(-deployment.max_model_len // group.block_size) for group in groups)
    return (2 if v2_runner else 1) * 4 * deployment.max_num_seqs * rows


def fragments(deployment: Deployment, shape: RankShape, rules: VersionRules) -> Estimate:
    """Halves of freed segments that MXFP4 experts leave where loading has no split limit.

    A down projection is placed into the freed segment of a gate and up projection twice its size;
    the rest is too small for the next and stays reserved (PyTorch 2.10, vLLM's pull request 41268).
    """
    moe = deployment.model.moe
    since = release_of(deployment.engine_version) >= FRAGMENTS_SINCE
    if moe is None or moe.format != "mxfp4" or rules.load_split_limit or not since:
        return Estimate.exactly(0, "")
    width = moe.moe_intermediate_size // deployment.tp
    down = moe.num_experts * width * deployment.model.hidden_size // 2
    size = down * shape.num_layers
    return Estimate(
        low_bytes=size * 9 // 10,
        size_bytes=size,
        high_bytes=size,
        source="the mechanism that the pull request describes",
    )


def cached(deployment: Deployment, rules: VersionRules, *, v2_runner: bool) -> int:
    """What torch keeps of the warm-up's sampler when the engine is ready, by runner."""
    if rules.pools:
        return SLACK_BYTES
    rows = min(deployment.max_num_seqs, deployment.max_num_batched_tokens)
    entries = rows * weights.padded_vocab_size(deployment.model)
    # with tp the logits of all ranks and their copy in order; three cases
    gathered = 2 * deployment.dtype.itemsize_bytes * entries if deployment.tp > 1 else 0
    if v2_runner:
        capped = deployment.model.final_logit_softcapping is not None
        copy = deployment.dtype.itemsize_bytes * entries if capped else 0
        return int(CACHED_SHARE * 4 * entries) + copy + gathered + SLACK_BYTES
    sampled = (deployment.dtype.itemsize_bytes + rules.sampler_bytes) * entries
    return sampled + gathered + SLACK_BYTES
