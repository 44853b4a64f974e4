"""Buffers for a step's tokens that a model's class allocates with its weights.

vLLM 0.10 to 0.33: `models/gemma3n_mm.py`, `models/gemma4_mm.py`, the classes of encoders with
deepstack layers, and `models/deepseek_v4`.
"""

from kvexp.contract import Deployment
from kvexp_vllm import multimodal, sparse_attention
from kvexp_vllm.rules import VersionRules

ALIGNMENT_BYTES = 256  # of tensors that share a buffer
SCALE_BLOCK = 32  # elements of a scale of mxfp4


def allocated(deployment: Deployment, rules: VersionRules, *, last_stage: bool) -> int:
    """Bytes of all such buffers of one rank."""
    size = _deepstack_bytes(deployment, rules) + _per_layer_bytes(deployment)
    return size + _picked_bytes(deployment, rules, last_stage=last_stage)


def _per_layer_bytes(deployment: Deployment) -> int:
    """Embeddings of a step's tokens for every layer, beside the decoder of a model of images.

    0.10 to 0.33 `models/gemma3n_mm.py`, from 0.19 `models/gemma4_mm.py`.
    """
    model, size = deployment.model, deployment.dtype.itemsize_bytes
    if model.per_layer_input is None or not model.tower_parameters:
        return 0
    width = model.num_hidden_layers * model.per_layer_input.hidden_size_per_layer_input
    return deployment.max_num_batched_tokens * width * size


def _deepstack_bytes(deployment: Deployment, rules: VersionRules) -> int:
    """Room for what an encoder's layers add to a step's tokens, which V1's models allocate."""
    model, encoder = deployment.model, deployment.model.encoder
    if encoder is None or rules.is_v0 or not multimodal.towers_built(deployment, rules)["vision"]:
        return 0
    elements = encoder.deepstack_layers * deployment.max_num_batched_tokens * model.hidden_size
    return elements * deployment.dtype.itemsize_bytes


def _picked_bytes(deployment: Deployment, rules: VersionRules, *, last_stage: bool) -> int:
    """DeepSeek V4: which compressed vectors each token reads, and what drafts start from.

    Those are the residual streams of the last layer, kept without drafts too up to 0.26; 0.27 and
    0.28 also have a pool for queries and what an indexer or a compressor makes of a token.
    """
    known, tokens = deployment.model.compressed, deployment.max_num_batched_tokens
    if known is None:
        return 0
    size = 4 * tokens * known.index_topk
    if last_stage and (deployment.draft is not None or rules.keeps_streams):
        item = deployment.dtype.itemsize_bytes
        size += item * tokens * known.hc_mult * deployment.model.hidden_size
    return size + (_pool_bytes(deployment) if rules.pools_queries else 0)


def _pool_bytes(deployment: Deployment) -> int:
    """0.27 `deepseek_v4/eager_scratch.py`: queries, and the largest of three tensors' groups."""
    known, tokens = deployment.model.compressed, deployment.max_num_batched_tokens
    assert known is not None
    width = deployment.model.head_size
    heads = sparse_attention.padded_heads(deployment)
    index = known.index_n_heads * known.index_head_dim
    groups = (
        (tokens * index // 2, tokens * index // SCALE_BLOCK, 4 * tokens * known.index_n_heads),
        (4 * tokens * known.index_topk, 4 * tokens),
        (4 * tokens * width,),
    )
    aligned = (sum(-(-size // ALIGNMENT_BYTES) for size in group) for group in groups)
    return 2 * tokens * heads * width + ALIGNMENT_BYTES * max(aligned)
