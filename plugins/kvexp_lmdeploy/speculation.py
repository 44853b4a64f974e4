"""Speculative decoding in LMDeploy's PyTorch engine: what a draft adds.

Read in the wheel of 0.16.0: `engine/config_builder.py: build_specdecode_config` (ranks of a draft),
`engine/executor/base.py` (block bytes of ranks), `models/` and `spec_decode/proposers` (tables),
`configurations/qwen3_5.py` (states of drafted tokens). Drafting layers of Qwen3.5, Hunyuan V3 and
GLM-5 are split over the model's ranks; every other draft is whole on the first rank.
"""

from collections.abc import Iterator

from kvexp.contract import (
    Deployment,
    InvalidValue,
    Knobs,
    Part,
    RankShape,
    Speculation,
    drafts,
)
from kvexp_lmdeploy import rules

METHODS = ("eagle3", "eagle", "mtp")
ALGORITHMS = {
    "deepseek_v3": "deepseek_mtp",
    "deepseek_v32": "deepseek_mtp",
    "glm_moe_dsa": "deepseek_mtp",
    "hy_v3": "hy3_mtp",
    "qwen3_5_text": "qwen3_5_mtp",
    "qwen3_5_moe_text": "qwen3_5_mtp",
}
"""Names of a model's own drafting layers, by its type."""

SPLIT_TYPES = ("glm_moe_dsa", "hy_v3", "qwen3_5_text", "qwen3_5_moe_text")
NUM_TOKENS = 1
STATES_BY_TOKENS = ("qwen3_5_text", "qwen3_5_moe_text")
"""Types whose states hold those of drafted tokens."""


def resolve(knobs: Knobs, backend: str) -> Speculation | None:
    """The method, the tokens and the drafting model that the request means.

    Raises:
        InvalidValue: something is missing, not known or does not belong together.
    """
    asked, model = knobs.speculative, knobs.model
    if not asked.is_asked:
        return None
    if backend != "pytorch":
        raise InvalidValue(
            f"speculative needs engine.backend=pytorch for LMDeploy, {model.name} is served by"
            f" {backend}"
        )
    method, draft = drafts.chosen(knobs, METHODS)
    if method == "mtp" and model.model_type not in ALGORITHMS:
        raise InvalidValue(
            f"speculative.method=mtp is known for {', '.join(ALGORITHMS)} with LMDeploy;"
            f" {model.name} is {model.model_type}"
        )
    if model.is_hybrid and (method != "mtp" or model.model_type not in STATES_BY_TOKENS):
        raise InvalidValue(
            f"speculative is not known for {model.name} with LMDeploy: its layers keep states"
        )
    return Speculation(method=method, num_tokens=asked.num_tokens or NUM_TOKENS, draft=draft)


def with_draft(part: Part, deployment: Deployment, shape: RankShape) -> Part:
    """The weights of a rank with those of the draft.

    EAGLE keeps an embedding, DeepSeek's layers an embedding and a head; others use the model's.
    """
    draft, speculation = deployment.draft, deployment.speculation
    if draft is None or speculation is None or not _has_draft(deployment, shape):
        return part
    own_tables = speculation.method == "mtp" and draft.model_type in ("deepseek_v3", "deepseek_v32")
    size = drafts.weights_bytes(
        deployment,
        embedding=own_tables or speculation.method == "eagle",
        head=own_tables,
        tp=_ranks(deployment),
    )
    return drafts.beside(part, deployment, size)


def block_bytes(deployment: Deployment, shape: RankShape) -> int:
    """Bytes of a block in the draft's layers on one rank."""
    if not _has_draft(deployment, shape):
        return 0
    own = drafts.alone(deployment, _ranks(deployment))
    return rules.pytorch_block_bytes(own, drafts.shape(deployment))


def slot_bytes(deployment: Deployment, shape: RankShape) -> int:
    """Recurrent states of one request on one rank, with those of drafted tokens."""
    convolution, recurrent = rules.slot_bytes(deployment, shape)
    linear, speculation = deployment.model.linear, deployment.speculation
    if speculation is None or linear is None:
        return convolution + recurrent
    tokens, rows = speculation.num_tokens, linear.linear_conv_kernel_dim - 1
    return convolution * (rows + tokens) // rows + recurrent * (1 + tokens)


def flags(deployment: Deployment) -> Iterator[str]:
    """The options that draft so."""
    speculation = deployment.speculation
    if speculation is None:
        return
    is_own = speculation.method == "mtp"
    name = ALGORITHMS[deployment.model.model_type] if is_own else speculation.method
    yield f"--speculative-algorithm {name}"
    if speculation.draft is not None and not is_own:
        yield f"--speculative-draft-model {speculation.draft.checkpoint}"
    yield f"--speculative-num-draft-tokens {speculation.num_tokens}"


def _ranks(deployment: Deployment) -> int:
    """Ranks that share the draft."""
    speculation = deployment.speculation
    assert speculation is not None
    split = speculation.method == "mtp" and deployment.model.model_type in SPLIT_TYPES
    return deployment.tp if split else 1


def _has_draft(deployment: Deployment, shape: RankShape) -> bool:
    if deployment.draft is None:
        return False
    return _ranks(deployment) > 1 or shape.tp_rank == 0
