"""What vLLM chooses where the user chose nothing (`engine/arg_utils.py`, `config/model.py`)."""

from kvexp.contract import GIB, InvalidValue, Knobs, Model
from kvexp_vllm.rules import VersionRules

USAGES = ("serve", "llm")


def batch_defaults(
    knobs: Knobs, rules: VersionRules, usage: str, max_model_len: int
) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) by the card's total memory and name."""
    total = int(knobs.gpu.total_bytes)
    large = total >= 70 * GIB and "a100" not in knobs.gpu.name.lower()
    if not rules.seqs_by_memory:  # v0 without chunked prefill
        tokens, seqs = max(max_model_len, 2048), 256
    elif large:
        server = rules.very_large_server_tokens if total >= 160 * GIB else 8192
        tokens, seqs = (16384 if usage == "llm" else server), 1024
    else:
        tokens, seqs = (8192 if usage == "llm" else 2048), 256
    if knobs.max_num_batched_tokens is not None:
        tokens = knobs.max_num_batched_tokens
    elif rules.seqs_by_memory:
        tokens = min((knobs.max_num_seqs or seqs) * max_model_len, tokens)
    seqs = min(seqs, tokens) if knobs.max_num_seqs is None else knobs.max_num_seqs
    if tokens < seqs:
        raise InvalidValue(
            f"max_num_batched_tokens must be at least max_num_seqs ({seqs}), got {tokens}"
        )
    return tokens, seqs


def derived_max_model_len(model: Model) -> int:
    """The longest context that the model's config states, rope scaling included."""
    length = model.max_position_embeddings
    scaling = model.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "default", "su", "longrope", "llama3"):
        return length
    if kind == "yarn":
        length = int(scaling.get("original_max_position_embeddings", length))
    return int(length * float(scaling.get("factor", 1.0)))


def max_model_len(knobs: Knobs) -> int:
    """The requested length, or the model's own.

    Raises:
        InvalidValue: the request is longer than the model allows.
    """
    longest = derived_max_model_len(knobs.model)
    if knobs.max_model_len is None:
        return longest
    if knobs.max_model_len > longest:
        raise InvalidValue(
            f"max_model_len must be at most {longest} for {knobs.model.name},"
            f" got {knobs.max_model_len}"
        )
    return knobs.max_model_len


def check_parallel(knobs: Knobs) -> None:
    """Heads must divide over tp; KV heads divide tp or tp divides them.

    Raises:
        InvalidValue: they do not; the message lists the sizes that work.
    """
    model = knobs.model
    allowed = [
        n
        for n in range(1, model.num_attention_heads + 1)
        if model.num_attention_heads % n == 0
        and (model.kv_heads % n == 0 or n % model.kv_heads == 0)
    ]
    if knobs.tp not in allowed:
        raise InvalidValue(
            f"tp must be one of {', '.join(map(str, allowed))} for {model.name}"
            f" ({model.num_attention_heads} attention heads, {model.kv_heads} KV heads),"
            f" got {knobs.tp}"
        )
    if knobs.pp > model.num_hidden_layers:
        raise InvalidValue(
            f"pp must be at most {model.num_hidden_layers}, the layers of {model.name},"
            f" got {knobs.pp}"
        )
