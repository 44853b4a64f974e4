"""Facts of a model under transformers' names, for architectures beside the plain dense ones."""

from collections.abc import Callable
from typing import Any

from kvexp.contract import Model, simulate


def facts_of(model: Model) -> dict[str, Any]:
    """The facts under the names that transformers gives them.

    Raises:
        Untraceable: the facts of this architecture are not all known here.
    """
    if model.model_type not in _FURTHER:
        raise simulate.Untraceable(
            "not all facts that transformers needs are known; give profiler.config_path"
        )
    return {**_common(model), **_FURTHER[model.model_type](model)}


def _common(model: Model) -> dict[str, Any]:
    return {
        "model_type": model.model_type,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": model.attention_bias,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _windows(model: Model) -> dict[str, Any]:
    """Full and sliding layers side by side, each with a mask of its own."""
    count = model.num_hidden_layers
    return {
        "sliding_window": model.sliding_window,
        "layer_types": [model.layer_type(index) for index in range(count)],
    }


def _qwen3_moe(model: Model) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        raise simulate.Untraceable("its experts are not described")
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "use_sliding_window": False,
    }


def _gpt_oss(model: Model) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        raise simulate.Untraceable("its experts are not described")
    return {
        **_windows(model),
        "intermediate_size": moe.moe_intermediate_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "attention_bias": True,
    }


def _deepseek_v2(model: Model) -> dict[str, Any]:
    moe, mla = model.moe, model.mla
    if moe is None or mla is None:
        raise simulate.Untraceable("its experts or its latent attention are not described")
    return {
        "kv_lora_rank": mla.kv_lora_rank,
        "q_lora_rank": mla.q_lora_rank,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "head_dim": mla.qk_rope_head_dim,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "n_shared_experts": moe.shared_intermediate_size // moe.moe_intermediate_size,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "topk_method": "greedy",
    }


_FURTHER: dict[str, Callable[[Model], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _windows,
    "gemma2": _windows,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
}
