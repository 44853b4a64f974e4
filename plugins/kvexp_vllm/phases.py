"""The phases of a profile run that read tokens: forward, logits or sampler, and drafts.

T = tokens of a step, S = rows that are sampled, H = hidden size, I = intermediate size of a rank,
V = padded vocabulary, n = tensor-parallel size, e = bytes of an element, W = cuBLAS's workspace:

    forward      = e T (3 I + k H) + W, on the V2 runner + index buffers of S  (experts: their
                   workspace, not 3 I; 2 I without a gate)
    embedding    = e H V / n + 2 e H T, with torch.compile on the V2 runner, of text alone
    attention    = e T (queries, keys, values, their copies, outputs, 2 to 4 H) + W, with the
                   workspace that earlier layers' experts keep; latent attention has latents,
                   queries, outputs, 2 H and the chunked prefill's workspace instead
    V2 logits    = e V S (1, or 2 + 1/n when gathered) + e H T + e H S + W, and for n = 1 the
                   sampler's block maxima; soft-capping has them twice instead
    V0, V1 sampler = B V S + e H T + 2 e H S + W, with B = e + 36 where top-k and top-p sort (to
                   0.16), e + 12 with FlashInfer's kernel, and e + 12 with the Triton kernel (from
                   0.17), in tensors of 4 V S in segments of their own, which keeps 4 V bytes a
                   multiprocessor; 16 V S more where drafts are rejected (from 0.12)
    draft        = its own forward, and its logits on the V2 runner, while the model's hidden
                   states are alive: 1 H a token, 5 for EAGLE3 (three of inner layers, one combined)

k = 3 for a plain decoder block, one more where q and k are changed after their projection (a bias
or norms of heads), one more with norms behind attention and MLP; 5 with learned positions, whose
embeddings and those of the tokens outlive their sum (whisper-large-v3). A product with a bias has
1 MiB of workspace beside W. Fitted to vLLM 0.26.0 on one and two H200 and, for the V0 and V1
runners of other versions, to public start-up logs.
"""

from dataclasses import replace

from kvexp.contract import MIB, Deployment, Model, Quantization, RankShape, drafts, weights
from kvexp_vllm import sparse_attention
from kvexp_vllm.peaks import (
    FP32_BYTES,
    PRINTED_BYTES,
    UNSPLIT_BYTES,
    Peak,
    around,
    bias_workspace_bytes,
    fitted_to,
    index_buffers,
    is_compiled,
    is_hopper,
    kept_bytes,
    sampled_rows,
    takes_items,
    workspace_bytes,
)
from kvexp_vllm.rules import MEASURED, VersionRules, is_v0, release_of

COMPILED_INDEX_BYTES = 5  # a token, with torch.compile

DRAFT_SPREAD = 0.02
HIDDEN_STATES = {"eagle3": 5, "mtp": 4, "dspark": 5}
"""Of a token, alive beside a draft's forward, where it is not the model's last one alone."""

V1_COMPILED_BYTES = 13 * MIB  # instead of the workspace, three models of 0.19
SORTED_ARGUMENT_BYTES = 3 * 1024  # of a row: temperatures, penalties and index arrays
ARGUMENT_BYTES, TABLES_BYTES = 48, 2048  # the same with the Triton kernel, and its two tables

FLASHINFER_BYTES = 12  # fp32 logits, the same masked, and their probabilities
SAMPLER_BLOCK = 1024  # vocabulary entries that one program of the V2 sampler reduces
MLA_WORKSPACE_TOKENS = 65536  # of the chunked prefill

MEASURED_FORWARDS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma3_text")
"""Types whose dense forward was measured."""

MEASURED_EXPERTS = ("qwen3_moe", "qwen3_5_moe_text", "gpt_oss")
"""Types with experts whose forward was measured on the V1 runner."""


def of_tokens(
    deployment: Deployment, shape: RankShape, rules: VersionRules, *, v2_runner: bool
) -> list[Peak]:
    """The peaks of one rank's phases: those after the forward are the last stage's."""
    found = [_forward(deployment, shape, rules, v2_runner=v2_runner)]
    embeds = shape.pp_rank == 0 and not takes_items(deployment)  # else before what is compiled
    if embeds and v2_runner and is_compiled(deployment):
        found.append(_embedding(deployment))
    if shape.pp_rank == deployment.pp - 1:
        found += _of_drafts(deployment, rules, v2_runner=v2_runner)
        if not rules.pools:  # whose embeddings of all tokens in fp32 are less than an MLP
            last = _logits(deployment, rules) if v2_runner else _sampler(deployment, shape, rules)
            found.append(last)
    return found


def _forward(
    deployment: Deployment, shape: RankShape, rules: VersionRules, *, v2_runner: bool
) -> Peak:
    compiled = is_compiled(deployment)
    if deployment.model.compressed is not None:
        size = sparse_attention.forward_bytes(deployment, shape)
        size += sparse_attention.aux_bytes(deployment)
    else:
        size = _layers_bytes(deployment, shape, rules, v2_runner=v2_runner)
    fused_alone = compiled and not v2_runner and not kept_bytes(deployment, rules)
    size += V1_COMPILED_BYTES if fused_alone else workspace_bytes(deployment)
    size += 0 if compiled else bias_workspace_bytes(deployment)
    size += index_buffers(sampled_rows(deployment)) if v2_runner else 0
    source = _forward_source(deployment, v2_runner=v2_runner)
    spread = _forward_spread(deployment, v2_runner=v2_runner)
    fused = compiled and v2_runner and deployment.model.mla is None
    states = deployment.max_num_batched_tokens * deployment.model.hidden_size
    above = deployment.dtype.itemsize_bytes * states if fused else 0  # phi4 has 3/4 of it
    return around("forward", size, source, spread=spread, above_bytes=above)


def _layers_bytes(
    deployment: Deployment, shape: RankShape, rules: VersionRules, *, v2_runner: bool
) -> int:
    """What is alive at the peak of the widest layer: its MLP or experts, or its attention."""
    model, item = deployment.model, deployment.dtype.itemsize_bytes
    tokens = deployment.max_num_batched_tokens
    hidden = _hidden_elements(deployment)
    if deployment.quantization is Quantization.fp8:
        hidden -= model.hidden_size // 2  # the quantised input replaces one two-byte tensor
    if is_compiled(deployment) and not v2_runner:
        hidden = max(hidden, 4 * model.hidden_size)
    if v2_runner and (takes_items(deployment) or shape.pp_rank > 0):
        hidden -= model.hidden_size  # what the first layer reads is in a buffer that is there
    if rules.is_v0 and deployment.tp > 1:
        hidden += model.hidden_size  # an output that ranks have summed is freed late
    between = 0 if v2_runner or shape.pp_rank == 0 else 2 * model.hidden_size
    size = item * tokens * (_mlp_width(deployment) + hidden + between)
    if model.mla is not None:
        return max(size, _latent_attention_bytes(deployment, shape, rules, v2_runner=v2_runner))
    attention = _attention_elements(deployment, rules)
    if kept := kept_bytes(deployment, rules):
        routed = _shared_elements(deployment) + 3 * model.hidden_size
        return kept + item * tokens * (max(attention, routed) + between)
    if _norms_natively(deployment, rules):
        size = max(size, item * tokens * (attention + between))
    return size


def _embedding(deployment: Deployment) -> Peak:
    """The first compiled piece on the V2 runner: a copy of the embedding's table is alive in it.

    Two tensors of hidden states stand beside it, whatever the layers and their MLP: to the byte for
    llama3-8b, qwen3-8b and gemma3-12b, within 2 KiB for four others.
    """
    model, tokens = deployment.model, deployment.max_num_batched_tokens
    item = deployment.dtype.itemsize_bytes
    table = item * model.hidden_size * weights.padded_vocab_size(model) // deployment.tp
    size = _segment(table) + 2 * item * model.hidden_size * tokens + COMPILED_INDEX_BYTES * tokens
    size += index_buffers(sampled_rows(deployment))
    known = release_of(deployment.engine_version) == MEASURED
    return around(
        "embedding",
        size,
        fitted_to(deployment, v2_runner=True),
        spread=0.0 if known else 0.05,
    )


def _segment(size_bytes: int) -> int:
    """A block in a new segment of whole 2 MiB: a rest of at most 1 MiB is not split off."""
    rest = -size_bytes % (2 * MIB)
    return size_bytes + (rest if rest <= MIB else 0)


def _latent_attention_bytes(
    deployment: Deployment, shape: RankShape, rules: VersionRules, *, v2_runner: bool
) -> int:
    """Latent attention in a layer behind one with experts, whose workspace is still held.

    Queries and outputs of all heads, the hidden states and their residual, what is projected down,
    and its normed copies, which torch.compile fuses away. The profile adds the largest context that
    a chunk of a prefill reads.
    """
    model, mla = deployment.model, deployment.model.mla
    assert mla is not None
    heads = model.num_attention_heads // deployment.tp
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
    elements = queries + heads * mla.v_head_dim + latents + mla.qk_rope_head_dim
    if v2_runner and is_compiled(deployment):
        elements += model.hidden_size
    else:
        rotated = mla.qk_rope_head_dim if model.rope_type == "yarn" else 0
        elements += 2 * model.hidden_size + latents + rotated
    if v2_runner and shape.pp_rank > 0:
        elements -= model.hidden_size
    size = deployment.dtype.itemsize_bytes * deployment.max_num_batched_tokens * elements
    return size + kept_bytes(deployment, rules) + _mla_workspace_bytes(deployment)


def _attention_elements(deployment: Deployment, rules: VersionRules) -> int:
    """Elements a token of attention's widest point, with the hidden states around it.

    Eager, that is its output and all that it was made of, or the queries' norm where that is
    several fp32 tensors; compiled, the queries that were turned, beside the last layer's output.
    """
    model = deployment.model
    known = weights.architecture_of(model)
    queries = model.num_attention_heads * model.head_size // deployment.tp
    keys = max(model.kv_heads // deployment.tp, 1) * model.head_size
    projected = (2 if known.query_gate else 1) * queries + 2 * keys
    if _norms_natively(deployment, rules):
        in_fp32 = 3 * FP32_BYTES // deployment.dtype.itemsize_bytes
        return projected + (2 + in_fp32) * queries + 4 * model.hidden_size
    if known.qk_norm or model.qk_norm:
        projected += queries + keys
    if is_compiled(deployment):
        return projected + 2 * queries + 2 * model.hidden_size
    return projected + queries + 3 * model.hidden_size


def _norms_natively(deployment: Deployment, rules: VersionRules) -> bool:
    """Whether the norms of gated queries are torch's own operations, one after another."""
    gated = weights.architecture_of(deployment.model).query_gate
    return gated and rules.native_norms and not is_compiled(deployment)


def _shared_elements(deployment: Deployment) -> int:
    """Elements a token of the experts that every token passes: up, gate and what is made of it."""
    moe = deployment.model.moe
    return 3 * (moe.shared_intermediate_size // deployment.tp) if moe is not None else 0


def _hidden_elements(deployment: Deployment) -> int:
    """Elements a token outside the MLP that are alive at its peak: k H."""
    model = deployment.model
    known = weights.architecture_of(model)
    if known.positions is not None:
        return 5 * model.hidden_size
    changed = bool(known.qk_norm or model.qk_norm or model.attention_bias)
    return (3 + changed + (known.norms == 4)) * model.hidden_size


def _forward_source(deployment: Deployment, *, v2_runner: bool) -> str:
    if deployment.model.compressed is not None:
        return "read in vLLM's code, as two starts of 0.26 on GB10 printed it"
    return fitted_to(deployment, v2_runner=v2_runner)


def _forward_spread(deployment: Deployment, *, v2_runner: bool) -> float:
    model = deployment.model
    if model.compressed is not None:
        read = release_of(deployment.engine_version) >= sparse_attention.NOT_COMPILED_SINCE
        return sparse_attention.SPREAD if read else 0.15
    measured = model.moe is None and model.model_type in MEASURED_FORWARDS
    if release_of(deployment.engine_version) != MEASURED:
        return 0.05 if measured else 0.15
    if v2_runner and (measured or (model.mla is not None and model.moe is not None)):
        return 0.0
    return 0.05 if v2_runner or measured or model.model_type in MEASURED_EXPERTS else 0.15


def _mlp_width(deployment: Deployment) -> int:
    """Elements a token of the widest MLP: up, what is made of it and its gate, or of experts."""
    model, tp = deployment.model, deployment.tp
    if model.moe is None:
        widths = 3 if weights.architecture_of(model).gated else 2
        return widths * (model.intermediate_size // tp)
    moe, width = model.moe, model.moe.moe_intermediate_size // tp
    rows = moe.num_experts_per_tok
    fused = moe.format == "mxfp4" and is_hopper(deployment)  # the gate, in the Triton kernel
    gated = model.hidden_size if fused else max(2 * width, model.hidden_size)
    return rows * (gated + width) + _shared_elements(deployment)


def _mla_workspace_bytes(deployment: Deployment) -> int:
    mla = deployment.model.mla
    if mla is None or is_v0(deployment.engine_version):
        return 0
    heads = deployment.model.num_attention_heads // deployment.tp
    elements = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return MLA_WORKSPACE_TOKENS * elements * deployment.dtype.itemsize_bytes


def _logits(deployment: Deployment, rules: VersionRules) -> Peak:
    """The V2 runner's logits and plain sampler."""
    model, rows, n = deployment.model, sampled_rows(deployment), deployment.tp
    item = deployment.dtype.itemsize_bytes
    vocab = weights.padded_vocab_size(model)
    size = item * model.hidden_size * (deployment.max_num_batched_tokens + rows)
    size += workspace_bytes(deployment) + kept_bytes(deployment, rules)
    size += _gathered_bytes(deployment, vocab)
    if n == 1 and model.final_logit_softcapping is not None:
        size += item * vocab * rows
    elif n == 1:
        maxima = -(-vocab // SAMPLER_BLOCK) * (8 + 4) * rows  # an index and a value each
        size += maxima + 28 * rows + index_buffers(rows)
    known = n <= 2 and release_of(deployment.engine_version) == MEASURED
    source = fitted_to(deployment, v2_runner=True)
    spread = 0.0 if known else 0.02
    return around("logits", size, source, spread=spread, above_bytes=UNSPLIT_BYTES)


def _gathered_bytes(deployment: Deployment, vocab: int) -> int:
    """Logits of all rows: whole, or gathered, transposed and the local share."""
    logits, n = deployment.dtype.itemsize_bytes * vocab * sampled_rows(deployment), deployment.tp
    return logits if n == 1 else 2 * logits + logits // n


def _of_drafts(deployment: Deployment, rules: VersionRules, *, v2_runner: bool) -> list[Peak]:
    """The drafting model's phases, the model's own hidden states being alive."""
    speculation, draft = deployment.speculation, deployment.draft
    if speculation is None or draft is None:
        return []
    alone = replace(deployment, model=draft, speculation=None)
    own = _forward(alone, drafts.shape(deployment), rules, v2_runner=v2_runner)
    held = HIDDEN_STATES.get(speculation.method, 1)
    item, rows = deployment.dtype.itemsize_bytes, sampled_rows(deployment)
    tokens, width = deployment.max_num_batched_tokens, deployment.model.hidden_size
    alive = item * tokens * width * held + 16 * rows
    source = fitted_to(deployment, v2_runner=v2_runner)
    phases = [around("draft", own.size_bytes + alive, source, spread=DRAFT_SPREAD)]
    if v2_runner:
        logits = _draft_logits_bytes(deployment, draft)
        logits += item * width * (tokens + rows) + workspace_bytes(deployment)
        logits += index_buffers(rows)
        phases.append(around("draft_logits", alive + logits, source, spread=DRAFT_SPREAD))
    return phases


def _draft_logits_bytes(deployment: Deployment, draft: Model) -> int:
    """Logits of the draft's vocabulary, then spread over the model's by their ids."""
    vocab = draft.draft_vocab_size or draft.vocab_size
    gathered = _gathered_bytes(deployment, vocab)
    if draft.draft_vocab_size is None:
        return gathered
    both = deployment.dtype.itemsize_bytes * sampled_rows(deployment) * (vocab + draft.vocab_size)
    return max(gathered, both + 2 * 8 * vocab)


def _sampler(deployment: Deployment, shape: RankShape, rules: VersionRules) -> Peak:
    """The sampler with top-k and top-p of the V0 and V1 runners."""
    model, rows = deployment.model, sampled_rows(deployment)
    item = deployment.dtype.itemsize_bytes
    beside = FLASHINFER_BYTES if rules.flashinfer_samples else rules.sampler_bytes
    size = sampled = _sampled_bytes(deployment, rules, beside)
    less = 0
    if rules.flashinfer_samples is None:
        less = sampled - _sampled_bytes(deployment, rules, FLASHINFER_BYTES)
    size += item * model.hidden_size * (deployment.max_num_batched_tokens + 2 * rows)
    if shape.pp_rank > 0:
        size += 2 * item * model.hidden_size * deployment.max_num_batched_tokens
    size += kept_bytes(deployment, rules)
    size += workspace_bytes(deployment) + bias_workspace_bytes(deployment)
    doubt = PRINTED_BYTES
    if model.moe is not None and model.moe.format is not None:
        doubt += 16 * MIB
    source = fitted_to(deployment, v2_runner=False)
    if rules.flashinfer_samples:
        source = "FlashInfer's sampler, by its code and five logs"
    return around("sampler", size, source, more_bytes=doubt, below_bytes=less)


def _sampled_bytes(deployment: Deployment, rules: VersionRules, beside: int) -> int:
    """Logits of all rows and what is sorted, or scaled, normed and drawn, of them.

    `beside`: bytes of an entry beside its logit.

    With the Triton kernel each copy is an fp32 tensor of its own (0.26 `v1/sample`); what sorting
    takes was fitted to logs.
    """
    rows, item = sampled_rows(deployment), deployment.dtype.itemsize_bytes
    entries = weights.padded_vocab_size(deployment.model) * rows
    rejected = rules.rejection_bytes if deployment.speculation is not None else 0
    beside += rejected
    if not rules.sampler_keeps_rows:
        return (item + beside) * entries + SORTED_ARGUMENT_BYTES * rows
    kept = entries // rows * min(deployment.gpu.num_sms or 132, rows)
    copies = beside // 4 * _segment(4 * entries)
    return _segment(item * entries) + copies + 4 * kept + ARGUMENT_BYTES * rows + TABLES_BYTES
