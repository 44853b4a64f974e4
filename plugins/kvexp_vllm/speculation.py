"""Speculative decoding: which method a request means, and the tensors of the drafting model.

From vLLM 0.26 `config/speculative.py`, `config/vllm.py`, `v1/spec_decode/llm_base_proposer.py`,
`v1/worker/gpu/spec_decode/eagle/utils.py` and the classes `llama_eagle3.py`, `llama_eagle.py`,
`deepseek_mtp.py`, `qwen3_next_mtp.py`. Drafts live on the last pipeline stage; embedding and head
of the model are shared where the draft does not keep its own.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvexp.contract import (
    Deployment,
    DType,
    InvalidValue,
    Knobs,
    Model,
    Slice,
    Speculation,
    Tensor,
    weights,
)

METHODS = ("eagle3", "eagle", "mtp", "draft_model", "ngram", "ngram_gpu", "suffix")
OVERLAPPED = ("eagle3", "eagle", "mtp", "ngram_gpu")
"""Methods that keep asynchronous scheduling."""

ON_V2_RUNNER = ("eagle3", "eagle", "mtp")
WITH_MODEL = ("eagle3", "eagle", "draft_model")
EAGLES = ("eagle3", "eagle")

MTP_BY_LAYER = (
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe",
    "glm4_moe_lite",
    "ernie4_5_moe",
    "hy_v3",
)
"""Types whose every drafting layer has a projection and norms of its own."""

MTP_ONCE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "exaone_moe")
"""Types whose drafting layers share one projection and its norms."""

AUX_HIDDEN_STATES = 3  # of the model's, that EAGLE3 works from


def resolve(knobs: Knobs) -> Speculation | None:
    """The method, the tokens and the drafting model that the request means.

    Raises:
        InvalidValue: something is missing, not known or does not belong together.
    """
    asked = knobs.speculative
    if not asked.is_asked:
        return None
    method = asked.method or _method_of(asked.model, asked.draft)
    if method not in METHODS:
        raise InvalidValue(
            f"speculative.method must be one of {', '.join(METHODS)}, got {method!r}: what others"
            " take is not known"
        )
    if (asked.model is not None) is not (method in WITH_MODEL):
        problem = "must be given" if method in WITH_MODEL else "must be left out"
        raise InvalidValue(f"speculative.model {problem} with speculative.method={method}")
    draft = _mtp(knobs.model) if method == "mtp" else asked.draft
    if draft is not None and method == "eagle3" and not draft.is_eagle3:
        draft = replace(draft, architecture=f"Eagle3{draft.architecture}")  # as vLLM names it
    if draft is not None:
        _check(knobs, method, draft)
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
    if speculation.method not in EAGLES or deployment_pp > 1:
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
    before = list(_own_embedding(deployment, draft, share))
    if method == "mtp":
        once = draft.model_type in MTP_ONCE
        before += _mtp_projection(draft, dtype, 1 if once else draft.num_hidden_layers, share.tp)
        return before, []
    width = draft.target_hidden_size or draft.hidden_size
    inputs = AUX_HIDDEN_STATES * width if method == "eagle3" else 2 * draft.hidden_size
    before.append(_tensor("fc", inputs * draft.hidden_size, dtype, "linear"))
    if method == "eagle":
        return before, []
    vocab = draft.draft_vocab_size or draft.vocab_size
    rows = -(-vocab // 64) * 64 // share.tp
    return before, [
        _tensor("norm", draft.hidden_size, dtype, "norm"),
        _tensor("lm_head", rows * draft.hidden_size, dtype, "embedding"),
        Tensor(name="draft_id_to_target_id", numel=vocab, itemsize_bytes=8, role="scale"),
    ]


def norms(draft: Model, dtype: DType, method: str, index: int) -> list[Tensor]:
    """The norms of one of the draft's layers."""
    found = list(weights.layer_norms(draft, dtype))
    if method == "eagle3":
        found.append(_tensor("hidden_norm", draft.hidden_size, dtype, "norm"))
    if method == "eagle" and index == 0:
        found = found[1:]  # the first layer's input is projected, not normed
    return found


def _method_of(model: str | None, draft: Model | None) -> str:
    """The method by the drafting model's name or class."""
    if model in ("ngram", "[ngram]"):
        raise InvalidValue("write speculative.method=ngram rather than speculative.model=ngram")
    if model is None:
        raise InvalidValue(
            "speculative.num_tokens needs speculative.method (mtp, ngram, suffix) or"
            " speculative.model"
        )
    names = f"{model} {draft.hf_id if draft else ''}".lower()
    if "eagle3" in names or (draft is not None and draft.is_eagle3):
        return "eagle3"
    is_eagle = draft is not None and draft.architecture.lower().startswith("eagle")
    return "eagle" if "eagle-" in names or is_eagle else "draft_model"


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


def _mtp(model: Model) -> Model:
    """The model's own drafting layers as a model: full attention, experts in each.

    Raises:
        InvalidValue: it has none.
    """
    if model.model_type not in (*MTP_BY_LAYER, *MTP_ONCE):
        raise InvalidValue(
            f"speculative.method=mtp is known for {', '.join((*MTP_BY_LAYER, *MTP_ONCE))};"
            f" {model.name} is {model.model_type}"
        )
    count = model.num_nextn_predict_layers or (1 if model.model_type in MTP_ONCE else 0)
    if not count:
        raise InvalidValue(
            f"speculative.method=mtp needs model.num_nextn_predict_layers, the drafting layers of"
            f" {model.name}"
        )
    moe = model.moe
    return replace(
        model,
        name=f"{model.name}_mtp",
        num_hidden_layers=count,
        layer_types=["full_attention"] * count,
        moe=None if moe is None else replace(moe, layers=None, first_k_dense_replace=0),
        checkpoint_bytes=None,
        tower_parameters=0,
        audio_tower_parameters=0,
    )


def _check(knobs: Knobs, method: str, draft: Model) -> None:
    model = knobs.model
    if method == "draft_model" and draft.vocab_size != model.vocab_size:
        raise InvalidValue(
            f"the vocabulary of speculative.model ({draft.name}, {draft.vocab_size}) must be that"
            f" of {model.name} ({model.vocab_size})"
        )
    if method in EAGLES and draft.target_hidden_size not in (None, model.hidden_size):
        raise InvalidValue(
            f"speculative.model {draft.name} drafts for a hidden size of"
            f" {draft.target_hidden_size}, {model.name} has {model.hidden_size}"
        )
    if draft.num_attention_heads % knobs.tp or (
        draft.mla is None and draft.kv_heads % knobs.tp and knobs.tp % draft.kv_heads
    ):
        raise InvalidValue(
            f"tp must divide the heads of speculative.model {draft.name}"
            f" ({draft.num_attention_heads} attention heads, {draft.kv_heads} KV heads),"
            f" got {knobs.tp}"
        )


def _own_embedding(deployment: Deployment, draft: Model, share: Slice) -> Iterator[Tensor]:
    """The draft's embedding, where it is not the model's: over stages, or of another width."""
    if deployment.pp == 1 and draft.hidden_size == deployment.model.hidden_size:
        return
    rows = weights.padded_vocab_size(draft) // share.tp
    yield _tensor("embed_tokens", rows * draft.hidden_size, deployment.dtype, "embedding")


def _mtp_projection(draft: Model, dtype: DType, count: int, tp: int) -> list[Tensor]:
    """The projection of embedding and hidden state, and a norm of each and of the output."""
    hidden = draft.hidden_size
    rows = hidden // tp if draft.model_type in MTP_ONCE else hidden
    return [
        tensor
        for _ in range(count)
        for tensor in (
            _tensor("fc", 2 * hidden * rows, dtype, "linear"),
            *(_tensor("norm", hidden, dtype, "norm") for _ in range(3)),
        )
    ]


def _tensor(name: str, numel: int, dtype: DType, role: str) -> Tensor:
    return Tensor(name=name, numel=numel, itemsize_bytes=dtype.itemsize_bytes, role=role)
