"""Speculative decoding: which method a request means, and the tensors of the drafting model.

From vLLM 0.26 `config/speculative.py`, `config/vllm.py`, `v1/spec_decode/llm_base_proposer.py`
and `v1/worker/gpu/spec_decode/eagle/utils.py`. Drafts live on the last pipeline stage; embedding
and head of the model are shared where the draft does not keep its own.
"""

from collections.abc import Iterator

from kvexp.contract import (
    Deployment,
    InvalidValue,
    Knobs,
    Model,
    Slice,
    Speculation,
    Tensor,
    drafts,
    weights,
)

METHODS = (
    *("eagle3", "eagle", "mtp", "dspark", "draft_model", "dflash"),
    *("ngram", "ngram_gpu", "suffix"),
)
OVERLAPPED = ("eagle3", "eagle", "mtp", "dspark", "ngram_gpu")
"""Methods that keep asynchronous scheduling."""

ON_V2_RUNNER = ("eagle3", "eagle", "mtp", "dspark")


def resolve(knobs: Knobs) -> Speculation | None:
    """The method, the tokens and the drafting model that the request means.

    Raises:
        InvalidValue: something is missing, not known or does not belong together.
    """
    if not knobs.speculative.is_asked:
        return None
    method, draft = drafts.chosen(knobs, METHODS)
    return Speculation(method=method, num_tokens=_num_tokens(knobs, draft, method), draft=draft)


def check_batch(speculation: Speculation | None, tokens: int, seqs: int, *, lora: bool) -> None:
    """Steps must hold the drafted tokens.

    Raises:
        InvalidValue: they do not.
    """
    if speculation is None:
        return
    if speculation.method == "draft_model" and tokens <= seqs:
        raise InvalidValue(
            f"max_num_batched_tokens must be more than max_num_seqs ({seqs}) with a draft model,"
            f" got {tokens}"
        )
    if lora and tokens < seqs * (speculation.num_tokens + 1):
        raise InvalidValue(
            f"max_num_batched_tokens must be at least max_num_seqs x (speculative.num_tokens + 1) ="
            f" {seqs * (speculation.num_tokens + 1)} with lora, got {tokens}"
        )


def notes(deployment_pp: int, speculation: Speculation | None) -> list[str]:
    """What is assumed of the drafting model."""
    if speculation is None or speculation.draft is None:
        return []
    if speculation.method not in drafts.EAGLES or deployment_pp > 1:
        return []
    return [f"the {speculation.method} draft is taken to share the model's embedding"]


def tensors(
    deployment: Deployment, draft: Model, share: Slice, method: str
) -> tuple[list[Tensor], list[Tensor]]:
    """What stands before the draft's layers, and after them; a draft_model is a whole model."""
    dtype = deployment.dtype
    if method == "draft_model":
        before = [*weights.towers(draft, share, dtype), *weights.embedding(draft, share, dtype)]
        return before, list(weights.head(draft, share, dtype))
    before, after = drafts.around(draft, dtype, method, share.tp)
    return [*_own_embedding(deployment, draft, share), *before], after


def _num_tokens(knobs: Knobs, draft: Model | None, method: str) -> int:
    asked = knobs.speculative.num_tokens
    layers = draft.num_hidden_layers if draft is not None and method == "mtp" else None
    if asked is None:
        if layers is None:
            raise InvalidValue(
                f"speculative.num_tokens must be given with speculative.method={method}"
            )
        return layers
    if layers is not None and asked > layers and asked % layers:
        raise InvalidValue(
            f"speculative.num_tokens must be a multiple of the {layers} drafting layers of"
            f" {knobs.model.name}, got {asked}"
        )
    return asked


def _own_embedding(deployment: Deployment, draft: Model, share: Slice) -> Iterator[Tensor]:
    """The draft's embedding, where it is not the model's: over stages, or of another width."""
    if deployment.pp == 1 and draft.hidden_size == deployment.model.hidden_size:
        return
    rows = weights.padded_vocab_size(draft) // share.tp
    item = deployment.dtype.itemsize_bytes
    numel = rows * draft.hidden_size
    yield Tensor(name="embed_tokens", numel=numel, itemsize_bytes=item, role="embedding")
