"""Models that draft tokens for another one: which one a request means, and its tensors.

The classes read: vLLM 0.26 `llama_eagle3.py`, `llama_eagle.py`, `deepseek_mtp.py`,
`qwen3_next_mtp.py`, `deepseek_v4/nvidia/mtp.py` and `dspark.py`; SGLang 0.5.23 those of the same
names, and `dflash.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvexp import terms, weights
from kvexp.deployment import Deployment
from kvexp.dtypes import DType, Quantization
from kvexp.engine import RankShape
from kvexp.errors import InvalidValue
from kvexp.formats import linear
from kvexp.request import Knobs, Model
from kvexp.results import Part
from kvexp.simulate.allocator import CachingAllocator
from kvexp.weights import Slice, Tensor

WITH_MODEL = ("eagle3", "eagle", "draft_model", "dflash")
"""Methods whose drafts another checkpoint makes."""

OWN = ("mtp", "dspark")
"""Methods whose drafts the model's own layers make."""

EAGLES = ("eagle3", "eagle")

LEAVES_OUT_DRAFTS = (Quantization.awq, Quantization.w4a16, Quantization.nvfp4)
"""Formats whose tools leave a model's own drafting layers in its dtype."""

MTP_BY_LAYER = (
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
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


def chosen(knobs: Knobs, methods: Sequence[str]) -> tuple[str, Model | None]:
    """The method that a request means, and the model that drafts where the method has one.

    Raises:
        InvalidValue: something is missing, not known or does not belong together.
    """
    asked = knobs.speculative
    method = asked.method or _method_of(asked.model, asked.draft, methods)
    if method not in methods:
        raise InvalidValue(
            f"speculative.method must be one of {', '.join(methods)}, got {method!r}: what others"
            " take is not known"
        )
    if (asked.model is not None) is not (method in WITH_MODEL):
        problem = "must be given" if method in WITH_MODEL else "must be left out"
        raise InvalidValue(f"speculative.model {problem} with speculative.method={method}")
    own = {"mtp": mtp_of, "dspark": dspark_of}
    draft = own[method](knobs.model) if method in own else asked.draft
    if draft is not None and method == "eagle3" and not draft.is_eagle3:
        draft = replace(draft, architecture=f"Eagle3{draft.architecture}")  # as vLLM names it
    if draft is not None:
        _check(knobs, method, draft)
    return method, draft


def has_mtp(model: Model) -> bool:
    """Whether a model of its type may come with drafting layers, by the rules here."""
    return model.model_type in MTP_ONCE or (
        model.model_type in MTP_BY_LAYER and model.num_nextn_predict_layers > 0
    )


def mtp_of(model: Model) -> Model:
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
    return _own_layers(model, "mtp", count)


def dspark_of(model: Model) -> Model:
    """The layers of DeepSeek V4 that draft a block at once, as a model.

    Raises:
        InvalidValue: it has none.
    """
    if model.dspark is None:
        raise InvalidValue(
            f"speculative.method=dspark needs model.dspark, the layers of {model.name} that draft a"
            " block of tokens"
        )
    return _own_layers(model, "dspark", model.dspark.num_layers)


def _own_layers(model: Model, method: str, count: int) -> Model:
    mla, moe = model.mla, model.moe
    kind = "full_attention" if model.compressed is None else "sliding_attention"
    if moe is not None:
        moe = replace(moe, layers=None, first_k_dense_replace=0, num_hash_layers=0)
    return replace(
        model,
        name=f"{model.name}_{method}",
        num_hidden_layers=count,
        layer_types=[kind] * count,
        mla=None if mla is None else replace(mla, index_layers=None),
        moe=moe,
        checkpoint_bytes=None,
        tower_parameters=0,
        audio_tower_parameters=0,
        uncounted_tower_parameters=0,
    )


def around(draft: Model, dtype: DType, method: str, tp: int) -> tuple[list[Tensor], list[Tensor]]:
    """What a draft has before and after its layers, beside the tables of its vocabulary.

    EAGLE3's head is its own, over the words that it drafts.
    """
    if method == "dspark":
        return _dspark(draft, dtype, tp), []
    if method == "mtp":
        once = draft.model_type in MTP_ONCE
        return _mtp_projection(draft, dtype, 1 if once else draft.num_hidden_layers, tp), []
    inputs = _projected(draft, method)
    before = [_tensor("fc", inputs * draft.hidden_size, dtype, "linear")] if inputs else []
    if method != "eagle3":
        return before, []
    vocab = draft.draft_vocab_size or draft.vocab_size
    rows = -(-vocab // 64) * 64 // tp
    return before, [
        _tensor("norm", draft.hidden_size, dtype, "norm"),
        _tensor("lm_head", rows * draft.hidden_size, dtype, "embedding"),
        Tensor(name="draft_id_to_target_id", numel=vocab, itemsize_bytes=8, role="scale"),
    ]


def norms(draft: Model, dtype: DType, method: str, index: int) -> list[Tensor]:
    """The norms of one of the draft's layers."""
    found = list(weights.layer_norms(draft, dtype, index))
    if method == "eagle3":
        found.append(_tensor("hidden_norm", draft.hidden_size, dtype, "norm"))
    if method == "eagle" and index == 0:
        found = found[1:]  # the first layer's input is projected, not normed
    return found


def alone(deployment: Deployment, tp: int | None = None) -> Deployment:
    """The draft as if it were the model, stored as its checkpoint says; `tp`: on fewer ranks.

    Drafting layers of the model's own are stored as the model, where the format's tools do that:
    files that they keep beside the weights leave `mtp*` out, but for AutoRound's and GPTQ's.
    """
    draft, speculation = deployment.draft, deployment.speculation
    assert draft is not None and speculation is not None
    own = draft.quantization_config
    stored = own.method if own is not None else None
    if speculation.method in OWN:
        left_out = deployment.quantization in LEAVES_OUT_DRAFTS
        stored = None if left_out else deployment.quantization
    return replace(
        deployment,
        model=draft,
        quantization=stored,
        speculation=None,
        pp=1,
        tp=deployment.tp if tp is None else tp,
    )


def shape(deployment: Deployment) -> RankShape:
    """All of a draft's layers on one rank."""
    draft = deployment.draft
    assert draft is not None
    return RankShape(
        rank=0, tp_rank=0, pp_rank=0, first_layer=0, num_layers=draft.num_hidden_layers
    )


def weights_bytes(
    deployment: Deployment, *, embedding: bool, head: bool, tp: int | None = None
) -> int:
    """Tensors of the draft on one of `tp` ranks, through the allocator with its ordinary settings.

    `embedding`, `head`: with tables of its own, where the model's are not used. DFlash has none,
    EAGLE3 always a head.
    """
    own, method = alone(deployment, tp), _method(deployment)
    share = Slice(
        tp=own.tp, num_layers=own.model.num_hidden_layers, first_stage=True, last_stage=True
    )
    before, after = around(own.model, own.dtype, method, own.tp)
    allocator = CachingAllocator()
    if embedding and method != "dflash":
        _allocate(allocator, weights.embedding(own.model, share, own.dtype))
    _allocate(allocator, before)
    for index in range(own.model.num_hidden_layers):
        _allocate(allocator, terms.matrices(own, share, index))
        _allocate(allocator, norms(own.model, own.dtype, method, index))
    _allocate(allocator, after)
    if head and method not in ("dflash", "eagle3"):
        _allocate(allocator, _head(own.model, share, own.dtype, method))
    return allocator.allocated_bytes


def beside(part: Part, deployment: Deployment, size_bytes: int) -> Part:
    """The weights of a rank with so many bytes of the draft, as a share of them."""
    draft = deployment.draft
    assert draft is not None
    own = Part(
        name="draft",
        size_bytes=size_bytes,
        provenance=part.provenance,
        reason=f"{draft.name} by {_method(deployment)}",
    )
    return replace(part, size_bytes=part.size_bytes + size_bytes, includes=(*part.includes, own))


def _head(draft: Model, share: Slice, dtype: DType, method: str) -> list[Tensor]:
    """The head; the norm before it is a whole model's, EAGLE has none."""
    found = weights.head(draft, share, dtype)
    return [each for each in found if method == "draft_model" or each.role != "norm"]


def _allocate(allocator: CachingAllocator, tensors: Iterator[Tensor] | list[Tensor]) -> None:
    for tensor in tensors:
        allocator.allocate(tensor.size_bytes)


def _method(deployment: Deployment) -> str:
    assert deployment.speculation is not None
    return deployment.speculation.method


def _method_of(model: str | None, draft: Model | None, methods: Sequence[str]) -> str:
    """The method by the drafting model's name or class."""
    if model in ("ngram", "[ngram]"):
        raise InvalidValue("write speculative.method=ngram rather than speculative.model=ngram")
    if model is None:
        alone = ", ".join(each for each in methods if each not in WITH_MODEL)
        raise InvalidValue(
            f"speculative.num_tokens needs speculative.method ({alone}) or speculative.model"
        )
    names = f"{model} {draft.hf_id if draft else ''}".lower()
    if "eagle3" in names or (draft is not None and draft.is_eagle3):
        return "eagle3"
    if "dflash" in f"{names} {draft.architecture if draft else ''}".lower():
        return "dflash"
    is_eagle = draft is not None and draft.architecture.lower().startswith("eagle")
    return "eagle" if "eagle-" in names or is_eagle else "draft_model"


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


def _projected(draft: Model, method: str) -> int:
    """Numbers that a draft projects to its hidden size, 0 for a whole model.

    DFlash's are as many of the model's hidden states as it has layers, unless its config says
    otherwise.
    """
    if method == "eagle3":
        return AUX_HIDDEN_STATES * (draft.target_hidden_size or draft.hidden_size)
    counts = {"eagle": 2, "dflash": draft.num_hidden_layers}
    return counts.get(method, 0) * draft.hidden_size


def _mtp_projection(draft: Model, dtype: DType, count: int, tp: int) -> list[Tensor]:
    """The projection of embedding and hidden state, and a norm of each and of the output."""
    hidden = draft.hidden_size
    rows = hidden // tp if draft.model_type in MTP_ONCE else hidden
    norms_around = [_tensor("norm", hidden, dtype, "norm") for _ in range(3)]
    if draft.compressed is not None:  # stored as the model's own, with streams of each layer
        each = [*_stored_linear(draft, dtype, 2 * hidden), *norms_around, weights.streams(draft)]
    else:
        each = [_tensor("fc", 2 * hidden * rows, dtype, "linear"), *norms_around]
    return each * count


def _dspark(draft: Model, dtype: DType, tp: int) -> list[Tensor]:
    """The projection of hidden states, two norms, the last streams, and the Markov head's tables.

    Those are split as the vocabulary is; embedding and head are the model's.
    """
    known = draft.dspark
    assert known is not None
    table = weights.padded_vocab_size(draft) // tp * known.markov_rank
    return [
        *_stored_linear(draft, dtype, known.num_target_layers * draft.hidden_size),
        *(_tensor("norm", draft.hidden_size, dtype, "norm") for _ in range(2)),
        weights.streams(draft),
        *(_tensor(name, table, dtype, "embedding") for name in ("markov_w1", "markov_w2")),
    ]


def _stored_linear(draft: Model, dtype: DType, inputs: int) -> list[Tensor]:
    """A projection to the hidden size in the model's own format, whole on every rank."""
    stored = draft.quantization_config
    return list(linear("fc", draft.hidden_size, inputs, dtype, stored))


def _tensor(name: str, numel: int, dtype: DType, role: str) -> Tensor:
    return Tensor(name=name, numel=numel, itemsize_bytes=dtype.itemsize_bytes, role=role)
