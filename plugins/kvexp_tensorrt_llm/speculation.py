"""Speculative decoding in TensorRT-LLM's PyTorch backend: what a draft adds.

From `_torch/pyexecutor/_util.py: KvCacheCreator._get_kv_size_per_token` and
`_torch/speculative/utils.py: get_num_spec_layers` of 2026: a token's bytes are the model's and, on
the last pipeline stage, those of the draft's layers in their own layout. A model's own layers share
its embedding and head, EAGLE3 its embedding.
"""

from kvexp.contract import (
    Deployment,
    InvalidValue,
    Knobs,
    Part,
    RankShape,
    Speculation,
    drafts,
)
from kvexp_tensorrt_llm import pools

DECODING_TYPES = {
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "draft_model": "Draft_Target",
    "ngram": "NGram",
}
"""TensorRT-LLM's types by the methods of a request."""


def resolve(knobs: Knobs) -> Speculation | None:
    """The method, the tokens and the drafting model that the request means.

    Raises:
        InvalidValue: something is missing, not known or does not belong together.
    """
    asked = knobs.speculative
    if not asked.is_asked:
        return None
    method, draft = drafts.chosen(knobs, tuple(DECODING_TYPES))
    if knobs.model.is_hybrid:
        raise InvalidValue(
            f"speculative is not known for {knobs.model.name} with TensorRT-LLM: its layers keep"
            " states"
        )
    if method == "draft_model" and knobs.pp > 1:
        raise InvalidValue(
            f"pp must be 1 with speculative.method=draft_model for TensorRT-LLM, got {knobs.pp}"
        )
    if asked.num_tokens is None:
        raise InvalidValue("speculative.num_tokens must be given for TensorRT-LLM (max_draft_len)")
    return Speculation(method=method, num_tokens=asked.num_tokens, draft=draft)


def with_draft(part: Part, deployment: Deployment, shape: RankShape) -> Part:
    """The weights of a rank with those of the draft."""
    draft, speculation = deployment.draft, deployment.speculation
    if draft is None or speculation is None or not _is_last(deployment, shape):
        return part
    whole = speculation.method == "draft_model"
    size = drafts.weights_bytes(deployment, embedding=whole, head=whole)
    return drafts.beside(part, deployment, size)


def token_bytes(deployment: Deployment, shape: RankShape) -> int:
    """Bytes of a token in the draft's layers on one rank."""
    if deployment.draft is None or not _is_last(deployment, shape):
        return 0
    own = drafts.alone(deployment)
    return pools.token_bytes(own, drafts.shape(deployment))


def options(deployment: Deployment) -> list[str]:
    """The entry of the options file that drafts so."""
    speculation = deployment.speculation
    if speculation is None:
        return []
    entries = [f"decoding_type: {DECODING_TYPES[speculation.method]}"]
    name = "max_draft_len"
    if speculation.method == "mtp":
        name = "num_nextn_predict_layers"
    entries.append(f"{name}: {speculation.num_tokens}")
    draft = speculation.draft
    if draft is not None and speculation.method != "mtp":
        entries.append(f"speculative_model_dir: {draft.checkpoint}")
    return [f"speculative_config: {{{', '.join(entries)}}}"]


def _is_last(deployment: Deployment, shape: RankShape) -> bool:
    return shape.pp_rank == deployment.pp - 1
