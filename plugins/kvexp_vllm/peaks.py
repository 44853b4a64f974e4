"""The peak of one phase of a profile run, and what its rules have in common."""

from dataclasses import dataclass, replace

from kvexp.contract import MIB, Deployment, weights
from kvexp_vllm import sparse_attention
from kvexp_vllm.rules import MEASURED, VersionRules, is_v0, release_of

FP32_BYTES = 4

HOPPER_WORKSPACE_BYTES = 32 * MIB
WORKSPACE_BYTES = 8 * MIB + MIB // 8  # on other cards
BIAS_WORKSPACE_BYTES = 1 * MIB  # of cuBLASLt where a product adds a bias, on an H200

UNSPLIT_BYTES = 2 * MIB
"""What the rests of blocks that the allocator does not split may add to a peak."""

V1_FITTED = ((0, 6), (0, 26))
"""First and last release that the V0 and V1 runners' rules were fitted to."""

PRINTED_BYTES = int(0.0075 * 2**30)
"""Rounding of a log's two digits, with half as much again for what stands between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak of one rank, its interval and the phase that reaches it."""

    size_bytes: int
    low_bytes: int
    high_bytes: int
    phase: str
    source: str

    @property
    def is_confirmed(self) -> bool:
        """Whether the rule gave the engine's own bytes, but for what the allocator rounds up."""
        return self.low_bytes == self.size_bytes >= self.high_bytes - UNSPLIT_BYTES

    def with_held(self, held_bytes: int) -> "Peak":
        """The same phase while `held_bytes` of images are alive; a tenth of them is uncertain."""
        doubt = held_bytes // 10
        return replace(
            self,
            size_bytes=self.size_bytes + held_bytes,
            low_bytes=self.low_bytes + held_bytes - doubt,
            high_bytes=self.high_bytes + held_bytes + doubt,
        )

    def with_layer(self, returned_bytes: int) -> "Peak":
        """The same phase while an offloaded layer is back on the card; a second one may be."""
        return replace(
            self,
            size_bytes=self.size_bytes + returned_bytes,
            low_bytes=self.low_bytes + returned_bytes,
            high_bytes=self.high_bytes + 2 * returned_bytes,
        )


def around(
    phase: str,
    size_bytes: int,
    source: str,
    *,
    spread: float = 0.0,
    more_bytes: int = 0,
    above_bytes: int = 0,
    below_bytes: int = 0,
) -> Peak:
    """A peak with its interval: a share of it and `more_bytes` either way.

    `above_bytes` and `below_bytes` come to it on one side alone.
    """
    error = int(size_bytes * spread) + more_bytes
    return Peak(
        size_bytes=size_bytes,
        low_bytes=max(0, size_bytes - error - below_bytes),
        high_bytes=size_bytes + error + above_bytes,
        phase=phase,
        source=source,
    )


def fitted_to(deployment: Deployment, *, v2_runner: bool) -> str:
    """What a phase's rule was fitted to, and whether this version lies outside."""
    release = release_of(deployment.engine_version)
    if v2_runner:
        beyond = "" if release == MEASURED else f", not to {deployment.engine_version}"
        return f"fitted to vLLM 0.26 on H200{beyond}"
    beyond = "" if V1_FITTED[0] <= release <= V1_FITTED[1] else " and none of this version"
    return f"fitted to start-up logs of 0.6 to 0.19 and to 0.26 on H200{beyond}"


def sampled_rows(deployment: Deployment) -> int:
    """Rows of logits in a profile run."""
    return min(deployment.max_num_seqs, deployment.max_num_batched_tokens)


def chip(deployment: Deployment) -> str:
    """The card's compute capability without its digit; Hopper's of a card that is not known."""
    return (deployment.gpu.compute_capability or "9.0").partition(".")[0]


def is_hopper(deployment: Deployment) -> bool:
    """Whether FlashAttention 3 runs, as on a card that is not known."""
    return chip(deployment) == "9"


def workspace_bytes(deployment: Deployment) -> int:
    """cuBLAS's workspace by the card's compute capability, as torch asks for it."""
    return HOPPER_WORKSPACE_BYTES if chip(deployment) in ("9", "10") else WORKSPACE_BYTES


def bias_workspace_bytes(deployment: Deployment) -> int:
    """Workspace of the decoder's matrix products, where they add a bias."""
    known = weights.architecture_of(deployment.model)
    return BIAS_WORKSPACE_BYTES if deployment.model.attention_bias or known.mlp_bias else 0


def takes_items(deployment: Deployment) -> bool:
    """Whether the decoder reads embeddings of images, videos or audio among those of tokens.

    Its runner, V1 or V2, has a buffer for them; V0 has none, nor has an encoder-decoder.
    """
    model = deployment.model
    reads = model.has_towers and not model.cross_attention
    return reads and any(deployment.mm_limits.values()) and not is_v0(deployment.engine_version)


def is_compiled(deployment: Deployment) -> bool:
    """Whether torch.compile fuses the forward."""
    eager = deployment.enforce_eager or not deployment.compiled
    if deployment.model.compressed is not None:
        eager |= release_of(deployment.engine_version) >= sparse_attention.NOT_COMPILED_SINCE
    return not eager and not is_v0(deployment.engine_version)


def kept_bytes(deployment: Deployment, rules: VersionRules) -> int:
    """Workspaces that outlive the forward: the fused experts' two, or DeepSeek V4's.

    Experts in mxfp4 keep none elsewhere.
    """
    model, moe = deployment.model, deployment.model.moe
    if model.compressed is not None:
        return sparse_attention.kept_bytes(deployment)
    if moe is None or moe.format is not None or not rules.keeps_experts_workspace:
        return 0
    width, hidden = moe.moe_intermediate_size // deployment.tp, model.hidden_size
    rows = deployment.max_num_batched_tokens * moe.num_experts_per_tok
    elements = rows * (max(width, hidden) + max(2 * width, hidden))
    return deployment.dtype.itemsize_bytes * elements


def index_buffers(rows: int) -> int:
    """Three int32 arrays of the rows and one of row starts, each in whole 512 bytes."""
    return 3 * weights.round_up(4 * rows, 512) + weights.round_up(4 * (rows + 1), 512)
