"""torch_peak_increase of vLLM 0.26: the largest of the profile run's phases, by rule.

Fitted to vLLM 0.26.0 on one and two H200 (dense models, bf16). T = tokens of a step, S = rows that
are sampled, H = hidden size, I = intermediate size, V = padded vocabulary, n = tensor-parallel
size, e = bytes of an element:

    forward  = e T (3 I / n + k H) + 32 MiB + index buffers of S    (k by model type; experts: their
               workspace instead of 3 I / n; MLA: the chunked prefill's workspace more)
    logits   = e V S (1, or 2 + 1/n when gathered) + e H T + e H S + 32 MiB, and for n = 1 the
               sampler's block maxima
    V1 sampler = 14 V S + 132 x 4 V + e H T + 2 e H S + 32 MiB, and the experts' kept workspace
"""

from dataclasses import dataclass

from kvexp.contract import MIB, Deployment, Quantization, RankShape, weights

WORKSPACE_BYTES = 32 * MIB  # cuBLAS on compute capability 9.0
COMPILE_EXTRA_BYTES = 10526720  # with torch.compile, beside one more gate-up tensor (llama3-8b)
SAMPLER_BLOCK = 1024  # vocabulary entries that one program of the sampler reduces

MLA_WORKSPACE_TOKENS = 65536  # of the chunked prefill


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Constants of a model type's forward.

    `hidden`: k, tensors of the hidden size that are alive at the peak. `compiled_gate_up`: tensors
    of the intermediate size that torch.compile keeps beside, and `compiled_bytes` of others.
    `confirmed`: measured on more than one model or setting.
    """

    hidden: float
    compiled_gate_up: int = 1
    compiled_bytes: int = COMPILE_EXTRA_BYTES
    confirmed: bool = True


FORWARD = {
    "llama": Forward(hidden=3.0),
    "mistral": Forward(hidden=3.0),
    "phi3": Forward(hidden=3.0),
    "qwen2": Forward(hidden=4.0),
    "qwen3": Forward(hidden=4.0),
    "gemma3_text": Forward(hidden=5.0, compiled_gate_up=4, compiled_bytes=29892608),
    "deepseek_v2": Forward(hidden=2.8125, confirmed=False),
    "qwen3_moe": Forward(hidden=4.0, confirmed=False),
    "llama4_text": Forward(hidden=3.0, confirmed=False),
    "gpt_oss": Forward(hidden=3.0, confirmed=False),
    "granitemoehybrid": Forward(hidden=3.0, confirmed=False),
}

UNKNOWN = Forward(hidden=4.0, confirmed=False)
"""For a type of which no forward was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak of one rank and the phase that reaches it."""

    size_bytes: int
    phase: str
    exact: bool


def peak(deployment: Deployment, shape: RankShape, *, v2_runner: bool) -> Peak:
    """The activation peak of one rank; a type without constants takes those of most others."""
    phases = [_forward(deployment, shape)]
    if shape.pp_rank == deployment.pp - 1:
        phases.append(_logits(deployment) if v2_runner else _v1_sampler(deployment))
    return max(phases, key=lambda phase: phase.size_bytes)


def _rows(deployment: Deployment) -> int:
    return min(deployment.max_num_seqs, deployment.max_num_batched_tokens)


def _forward(deployment: Deployment, shape: RankShape) -> Peak:
    model, item = deployment.model, deployment.dtype.itemsize_bytes
    known = FORWARD.get(model.model_type, UNKNOWN)
    hidden = known.hidden
    if deployment.quantization is Quantization.fp8:
        hidden -= 0.5  # the quantised input replaces one tensor of two-byte elements
    if shape.pp_rank > 0:
        hidden -= 1  # the embedding's output arrives in a buffer that is already there
    token_bytes = int(item * (_mlp_width(deployment) + hidden * model.hidden_size))
    size = deployment.max_num_batched_tokens * token_bytes + WORKSPACE_BYTES
    size += _index_buffers(_rows(deployment)) + _mla_workspace_bytes(deployment)
    if not deployment.enforce_eager:
        width = model.intermediate_size // deployment.tp
        kept = known.compiled_gate_up * width * deployment.max_num_batched_tokens
        size += item * kept + known.compiled_bytes
    return Peak(
        size_bytes=size, phase="forward", exact=deployment.enforce_eager and known.confirmed
    )


def _mlp_width(deployment: Deployment) -> int:
    """Elements a token of the widest MLP: gate, up and their product, or the experts' workspace."""
    model, tp = deployment.model, deployment.tp
    if model.moe is None:
        return 3 * (model.intermediate_size // tp)
    moe, width = model.moe, model.moe.moe_intermediate_size // tp
    rows = moe.num_experts_per_tok
    workspace = rows * max(2 * width, model.hidden_size) + rows * width
    return workspace + 3 * (moe.shared_intermediate_size // tp)


def _mla_workspace_bytes(deployment: Deployment) -> int:
    mla = deployment.model.mla
    if mla is None:
        return 0
    heads = deployment.model.num_attention_heads // deployment.tp
    elements = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return MLA_WORKSPACE_TOKENS * elements * deployment.dtype.itemsize_bytes


def _logits(deployment: Deployment) -> Peak:
    model, rows, n = deployment.model, _rows(deployment), deployment.tp
    item = deployment.dtype.itemsize_bytes
    vocab = weights.padded_vocab_size(model)
    logits = item * vocab * rows
    size = item * model.hidden_size * (deployment.max_num_batched_tokens + rows) + WORKSPACE_BYTES
    size += _mla_workspace_bytes(deployment)
    if n == 1:
        maxima = -(-vocab // SAMPLER_BLOCK) * (8 + 4) * rows  # an index and a value each
        size += logits + maxima + 28 * rows + _index_buffers(rows)
    else:
        size += 2 * logits + logits // n  # gathered, transposed, and the local share
    return Peak(size_bytes=size, phase="logits", exact=n <= 2 and model.mla is None)


def _v1_sampler(deployment: Deployment) -> Peak:
    model, rows = deployment.model, _rows(deployment)
    item = deployment.dtype.itemsize_bytes
    vocab = weights.padded_vocab_size(model)
    size = (item + 12) * vocab * rows + 4 * vocab * min(132, rows)
    size += item * model.hidden_size * (deployment.max_num_batched_tokens + 2 * rows)
    if model.moe is not None and model.moe.format is None:  # the experts' workspace is kept
        tokens = deployment.max_num_batched_tokens * model.moe.num_experts_per_tok
        size += 2 * item * model.hidden_size * tokens
    return Peak(size_bytes=size + WORKSPACE_BYTES, phase="sampler", exact=False)


def _index_buffers(rows: int) -> int:
    """Three int32 arrays of the rows and one of row starts, each in whole 512 bytes."""
    return 3 * _round(4 * rows) + _round(4 * (rows + 1))


def _round(size_bytes: int) -> int:
    return -(-size_bytes // 512) * 512
