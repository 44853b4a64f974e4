"""DeepSeek V4's forward: heads as its kernels take them, its workspaces, and what is alive in it.

Read in `models/deepseek_v4`, `layers/sparse_attn_indexer.py`, `v1/worker/workspace.py` and
`fused_moe/experts/marlin_moe.py` of vLLM 0.20 to 0.33. One workspace serves the indexer, the gather
of compressed vectors and the experts; the profile run asks for the largest.

    indexer  = 40 L / c (d + 4) + 1 MiB         of the longest length L, at c tokens a vector
    gather   = 4 e D (L / c + window + T)       four requests' vectors of D elements, FlashMLA alone
    experts  = e k T (max(N, H) + max(2 N, H))  k experts of width N a token

The forward is largest where an indexer picks, beside a stand-in of 512 MiB for its scores, or where
queries are projected and padded, or in the experts. Equal to the printed 1.84 and 2.03 GiB of two
starts on four GB10 (index ids 66812598096 and 58438889952).
"""

from kvexp.contract import MIB, Deployment, RankShape

FLASHMLA_HEADS = (64, 128)
SM120_HEADS = (16, 32, 64, 128)
"""Numbers of heads that kernels have; a rank's are padded to the next one."""

SM120_WORKSPACE_BYTES = 128 * MIB
LENGTHS = 40  # of the longest length that the indexer's buffer holds
PICKS_BYTES = 1 * MIB
SCORES_BYTES = 512 * MIB  # VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
GATHERED_REQUESTS = 4
FP32 = 4
SPREAD = 0.03  # beyond two starts on GB10

NOT_COMPILED_SINCE = (0, 24)
"""The class has no `@support_torch_compile` any more: graphs hold pieces of an eager forward."""


def is_sm120(deployment: Deployment) -> bool:
    """Whether the card's kernels are FlashInfer's for compute capability 12."""
    return (deployment.gpu.compute_capability or "").startswith("12.")


def padded_heads(deployment: Deployment) -> int:
    """Heads of a rank's queries and of its outputs, padded as the kernels need them."""
    heads = _heads(deployment)
    known = SM120_HEADS if is_sm120(deployment) else FLASHMLA_HEADS
    return next((number for number in known if heads <= number), heads)


def kept_bytes(deployment: Deployment) -> int:
    """Workspaces that the first forward allocates for good."""
    beside = SM120_WORKSPACE_BYTES if is_sm120(deployment) else 0
    return beside + max(
        _indexer_bytes(deployment), _gather_bytes(deployment), _experts_bytes(deployment)
    )


def forward_bytes(deployment: Deployment, shape: RankShape) -> int:
    """The forward's peak on one rank, its workspaces included."""
    phases = [_experts_phase_bytes(deployment)]
    for ratio in {_ratio(deployment, index) for index in _layers(shape)}:
        phases.append(_queries_phase_bytes(deployment, ratio))
        if ratio == _sparse_ratio(deployment):
            phases.append(_indexer_phase_bytes(deployment, ratio))
    return kept_bytes(deployment) + max(phases)


def aux_bytes(deployment: Deployment) -> int:
    """What DSpark reads of the model's last layers: streams of one, and means of those before."""
    drafts, known = deployment.speculation, deployment.model.dspark
    if drafts is None or drafts.method != "dspark" or known is None:
        return 0
    means = deployment.model.hidden_size * deployment.dtype.itemsize_bytes
    size = _streams(deployment) + (known.num_target_layers - 1) * means
    return deployment.max_num_batched_tokens * size


def _indexer_bytes(deployment: Deployment) -> int:
    known = deployment.model.compressed
    assert known is not None
    entries = LENGTHS * deployment.max_model_len // known.sparse_ratio
    return entries * (known.index_head_dim + FP32) + PICKS_BYTES


def _gather_bytes(deployment: Deployment) -> int:
    model, known = deployment.model, deployment.model.compressed
    assert known is not None and model.sliding_window is not None
    if is_sm120(deployment):
        return 0
    vectors = -(-deployment.max_model_len // known.sparse_ratio) + model.sliding_window
    vectors += deployment.max_num_batched_tokens
    return GATHERED_REQUESTS * vectors * model.head_size * deployment.dtype.itemsize_bytes


def _experts_bytes(deployment: Deployment) -> int:
    model, moe = deployment.model, deployment.model.moe
    if moe is None:
        return 0
    width, hidden = moe.moe_intermediate_size // deployment.tp, model.hidden_size
    rows = deployment.max_num_batched_tokens * moe.num_experts_per_tok
    elements = max(width, hidden) + max(2 * width, hidden)
    return rows * elements * deployment.dtype.itemsize_bytes


def _indexer_phase_bytes(deployment: Deployment, ratio: int) -> int:
    """Its quantised queries and weights, and the stand-in for its scores."""
    known = deployment.model.compressed
    assert known is not None
    own = known.index_n_heads * (known.index_head_dim + FP32)
    tokens = deployment.max_num_batched_tokens
    return SCORES_BYTES + tokens * (_attention_bytes(deployment, ratio) + own)


def _queries_phase_bytes(deployment: Deployment, ratio: int) -> int:
    """Queries of the rank's heads, and once more where they are padded."""
    heads, padded = _heads(deployment), padded_heads(deployment)
    copies = heads + (padded if padded > heads else 0)
    queries = copies * deployment.model.head_size * deployment.dtype.itemsize_bytes
    return deployment.max_num_batched_tokens * (_attention_bytes(deployment, ratio) + queries)


def _experts_phase_bytes(deployment: Deployment) -> int:
    """The experts' output, and the layers that every token passes."""
    model, item = deployment.model, deployment.dtype.itemsize_bytes
    shared = 3 * (model.moe.shared_intermediate_size // deployment.tp) if model.moe else 0
    own = item * (3 * model.hidden_size + shared)
    return deployment.max_num_batched_tokens * (2 * _streams(deployment) + own)


def _attention_bytes(deployment: Deployment, ratio: int) -> int:
    """Of a token, alive while attention works.

    Streams of two layers, two hidden states, outputs of all heads, the projections down with their
    normed copies, and scores of the compressors.
    """
    model, known = deployment.model, deployment.model.compressed
    assert known is not None
    item = deployment.dtype.itemsize_bytes
    elements = 2 * model.hidden_size + padded_heads(deployment) * model.head_size
    elements += 2 * (known.q_lora_rank + model.head_size)
    size = 2 * _streams(deployment) + item * elements
    if ratio == known.sparse_ratio:
        widths = 4 * (model.head_size + known.index_head_dim)
        size += FP32 * widths + item * known.index_n_heads
    elif ratio:
        size += FP32 * 2 * model.head_size
    return size


def _streams(deployment: Deployment) -> int:
    known = deployment.model.compressed
    assert known is not None
    return known.hc_mult * deployment.model.hidden_size * deployment.dtype.itemsize_bytes


def _ratio(deployment: Deployment, index: int) -> int:
    known = deployment.model.compressed
    assert known is not None
    return known.ratio(deployment.model.layer_type(index))


def _sparse_ratio(deployment: Deployment) -> int:
    known = deployment.model.compressed
    assert known is not None
    return known.sparse_ratio


def _layers(shape: RankShape) -> range:
    return range(shape.first_layer, shape.first_layer + shape.num_layers)


def _heads(deployment: Deployment) -> int:
    return deployment.model.num_attention_heads // deployment.tp
