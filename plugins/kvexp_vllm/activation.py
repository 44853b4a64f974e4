"""torch_peak_increase of vLLM 0.26: the largest of the profile run's phases, by rule.

Fitted to vLLM 0.26.0 on one and two H200 (dense models, bf16). T = tokens of a step, S = rows that
are sampled, H = hidden size, I = intermediate size, V = padded vocabulary, n = tensor-parallel
size, e = bytes of an element:

    forward  = e T (3 I / n + k H) + 32 MiB + index buffers of S    (k by model type)
    logits   = e V S (1, or 2 + 1/n when gathered) + e H T + e H S + 32 MiB, and for n = 1 the
               sampler's block maxima
    V1 sampler = 14 V S + 132 x 4 V + e H T + 2 e H S + 32 MiB
"""

from dataclasses import dataclass

from kvexp.contract import MIB, Deployment, InvalidValue, Quantization, RankShape, weights

WORKSPACE_BYTES = 32 * MIB  # cuBLAS on compute capability 9.0
COMPILE_EXTRA_BYTES = 10526720  # with torch.compile, beside one more gate-up tensor (llama3-8b)
SAMPLER_BLOCK = 1024  # vocabulary entries that one program of the sampler reduces

HIDDEN_TENSORS = {"llama": 3.0, "mistral": 3.0, "phi3": 3.0, "qwen2": 4.0, "qwen3": 4.0}
"""k: tensors of the hidden size that are alive at the peak, by model type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak of one rank and the phase that reaches it."""

    size_bytes: int
    phase: str
    exact: bool


def peak(deployment: Deployment, shape: RankShape, *, v2_runner: bool) -> Peak:
    """The activation peak of one rank.

    Raises:
        InvalidValue: no constants are known for the model's type.
    """
    phases = [_forward(deployment, shape)]
    if shape.pp_rank == deployment.pp - 1:
        phases.append(_logits(deployment) if v2_runner else _v1_sampler(deployment))
    return max(phases, key=lambda phase: phase.size_bytes)


def _rows(deployment: Deployment) -> int:
    return min(deployment.max_num_seqs, deployment.max_num_batched_tokens)


def _forward(deployment: Deployment, shape: RankShape) -> Peak:
    model = deployment.model
    try:
        hidden = HIDDEN_TENSORS[model.model_type]
    except KeyError:
        raise InvalidValue(
            f"no activation rule for model_type {model.model_type!r}; known:"
            f" {', '.join(sorted(HIDDEN_TENSORS))}; give profiler.activation_bytes instead"
        ) from None
    if deployment.quantization is Quantization.fp8:
        hidden -= 0.5  # the quantised input replaces one tensor of two-byte elements
    if shape.pp_rank > 0:
        hidden -= 1  # the embedding's output arrives in a buffer that is already there
    width = model.intermediate_size // deployment.tp
    token_bytes = int(deployment.dtype.itemsize_bytes * (3 * width + hidden * model.hidden_size))
    size = deployment.max_num_batched_tokens * token_bytes + WORKSPACE_BYTES
    size += _index_buffers(_rows(deployment))
    if not deployment.enforce_eager:
        gate_up = 2 * width * deployment.max_num_batched_tokens
        size += deployment.dtype.itemsize_bytes // 2 * gate_up + COMPILE_EXTRA_BYTES
    return Peak(size_bytes=size, phase="forward", exact=deployment.enforce_eager)


def _logits(deployment: Deployment) -> Peak:
    model, rows, n = deployment.model, _rows(deployment), deployment.tp
    item = deployment.dtype.itemsize_bytes
    vocab = weights.padded_vocab_size(model)
    logits = item * vocab * rows
    size = item * model.hidden_size * (deployment.max_num_batched_tokens + rows) + WORKSPACE_BYTES
    if n == 1:
        maxima = -(-vocab // SAMPLER_BLOCK) * (8 + 4) * rows  # an index and a value each
        size += logits + maxima + 28 * rows + _index_buffers(rows)
    else:
        size += 2 * logits + logits // n  # gathered, transposed, and the local share
    return Peak(size_bytes=size, phase="logits", exact=n <= 2)


def _v1_sampler(deployment: Deployment) -> Peak:
    model, rows = deployment.model, _rows(deployment)
    item = deployment.dtype.itemsize_bytes
    vocab = weights.padded_vocab_size(model)
    size = (item + 12) * vocab * rows + 4 * vocab * min(132, rows)
    size += item * model.hidden_size * (deployment.max_num_batched_tokens + 2 * rows)
    return Peak(size_bytes=size + WORKSPACE_BYTES, phase="sampler", exact=False)


def _index_buffers(rows: int) -> int:
    """Three int32 arrays of the rows and one of row starts, each in whole 512 bytes."""
    return 3 * _round(4 * rows) + _round(4 * (rows + 1))


def _round(size_bytes: int) -> int:
    return -(-size_bytes // 512) * 512
