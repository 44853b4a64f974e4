"""Heads, windows and latent sizes of a decoder from its section of a config.json."""

from typing import Any

from kvexp.errors import InvalidValue
from kvexp.hf import blocks
from kvexp.hf import layers as kinds
from kvexp.hf.locate import LAYER_KEYS
from kvexp.hf.section import Section
from kvexp.request import BlockIndexer, Compressed, Dspark, Heads, Mla

HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
KV_HEAD_KEYS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
MLA_TYPES = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe_lite",
    "kimi_k2",
    "kimi_linear",
    "longcat_flash",
    "mistral4",
    "pangu_ultra_moe",
    "bailing_hybrid",
)
"""Types whose latent vector is cached as it is; other types cache the heads expanded from it."""


def attention_facts(
    section: Section, model_type: str, hidden: int, layer_types: list[str]
) -> dict[str, Any]:
    """Values for the fields of `Model` that say what attention caches.

    Raises:
        InvalidValue: a size is missing, wrong or not known.
    """
    if not set(layer_types) - {kinds.MAMBA, kinds.MLP, kinds.CONV}:
        return {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden}
    heads = section.required(*HEAD_KEYS)
    mla = None if model_type == "deepseek_v4" else _mla(section, model_type)
    facts: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(section, model_type, heads),
        "head_dim": _head_dim(section, hidden, heads, needed=mla is None),
        "mla": mla,
    }
    if mla is not None:
        facts["head_dim"] = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        facts["num_key_value_heads"] = heads
    elif model_type == "mimo_v2_flash":
        facts["v_head_dim"] = section.required("v_head_dim")
    if kinds.SLIDING in layer_types:
        facts["sliding_window"] = kinds.window(section, model_type)
        facts.update(_sliding_heads(section, model_type, facts, layer_types))
    if kinds.CHUNKED in layer_types:
        facts["attention_chunk_size"] = section.required("attention_chunk_size")
    if model_type == "deepseek_v4":
        facts["sliding_window"] = section.required("sliding_window")
    if section.flag("use_qk_norm") is True and model_type in ("glm4_moe", "cohere"):
        facts["qk_norm"] = "head" if model_type == "glm4_moe" else "heads"
    return facts


def _kv_heads(section: Section, model_type: str, heads: int) -> int:
    if model_type == "falcon" and section.flag("new_decoder_architecture") is not True:
        if not section.has("new_decoder_architecture"):
            section.assume("new_decoder_architecture is not given: false")
        return 1 if section.flag("multi_query") is not False else heads
    if model_type == "gpt_bigcode":
        return 1 if section.flag("multi_query") is not False else heads
    stated = section.integer(*KV_HEAD_KEYS)
    if stated is None:
        stated = blocks.kv_heads(section, heads)
    if stated is None and section.flag("multi_query") is True:
        return 1
    if stated is None:
        section.assume(
            f"none of {', '.join(KV_HEAD_KEYS)} is given: one KV head for each of the {heads}"
            " attention heads"
        )
        return heads
    if stated > heads or heads % stated:
        raise section.wrong(KV_HEAD_KEYS, f"a divisor of the {heads} attention heads", stated)
    return stated


def _head_dim(section: Section, hidden: int, heads: int, *, needed: bool) -> int:
    stated = section.integer("head_dim", "attention_head_dim", "hidden_size_per_head", "d_kv")
    if stated is not None:
        return stated
    if hidden % heads:
        if not needed:
            return max(1, hidden // heads)
        raise InvalidValue(
            f"config.json: {section.name_of('head_dim')} is missing and hidden_size {hidden} is not"
            f" a multiple of the {heads} attention heads"
        )
    if needed:
        section.assume(
            f"{section.name_of('head_dim')} is not given: hidden_size / heads = {hidden // heads}"
        )
    return hidden // heads


def _mla(section: Section, model_type: str) -> Mla | None:
    """Latent attention; None for plain heads, of which small DeepSeek models state sizes of 0."""
    if not section.has("kv_lora_rank"):
        parts = [
            section.integer(name, least=0) for name in ("qk_rope_head_dim", "qk_nope_head_dim")
        ]
        if parts == [0, 0]:
            return None
        if any(part is not None for part in parts):
            raise section.missing("kv_lora_rank")
        if section.has("q_lora_rank", "o_lora_rank"):
            raise InvalidValue(
                f"config.json: {section.name_of('q_lora_rank', 'o_lora_rank')} is given without"
                " kv_lora_rank: a latent attention that is not known"
            )
        return None
    latent = model_type in MLA_TYPES
    if "q_lora_rank" not in section.values:
        section.assume("q_lora_rank is not given: queries are not compressed")
    sparse = model_type in ("deepseek_v32", "glm_moe_dsa") or section.has("index_head_dim")
    if not latent:
        section.assume(
            f"model_type {model_type!r} caches K and V of its heads, expanded from the latent"
        )
    return Mla(
        kv_lora_rank=section.required("kv_lora_rank"),
        qk_rope_head_dim=section.required("qk_rope_head_dim"),
        qk_nope_head_dim=section.required("qk_nope_head_dim"),
        v_head_dim=section.required("v_head_dim"),
        q_lora_rank=section.integer("q_lora_rank", least=0) or None,
        index_head_dim=section.required("index_head_dim") if sparse else None,
        index_n_heads=section.required("index_n_heads") if sparse else None,
        index_layers=_index_layers(section) if sparse else None,
        latent_cache=latent,
    )


def _index_layers(section: Section) -> list[int] | None:
    """The layers that have an indexer of their own, None for all of them.

    vLLM 0.26 `models/deepseek_v2.py`: each `index_topk_freq`-th layer from `index_skip_topk_offset`
    on, unless a pattern marks with S those that share; transformers lists the same as full, shared.
    """
    count = section.required(*LAYER_KEYS)
    shared = section.text("index_topk_pattern") or section.texts("indexer_types")
    if shared is not None:
        if len(shared) < count or not set(shared) <= {"F", "S", "full", "shared"}:
            names = ("index_topk_pattern", "indexer_types")
            raise section.wrong(names, f"{count} of F and S, or of full and shared", shared)
        own = [index for index in range(count) if shared[index] in ("F", "full")]
    else:
        every = section.integer("index_topk_freq") or 1
        offset = section.integer("index_skip_topk_offset", least=0)
        first = 2 if offset is None else offset
        own = [index for index in range(count) if max(index - first + 1, 0) % every == 0]
    return None if len(own) == count else own


def _sliding_heads(
    section: Section, model_type: str, facts: dict[str, Any], layer_types: list[str]
) -> dict[str, Any]:
    """Sliding layers with heads of their own; Gemma 4 states those of its full layers instead."""
    if section.has("swa_num_key_value_heads", "swa_head_dim") or model_type == "mimo_v2_flash":
        own = Heads(
            num_attention_heads=section.integer("swa_num_attention_heads")
            or facts["num_attention_heads"],
            num_key_value_heads=section.integer("swa_num_key_value_heads")
            or _sliding_kv_heads(section, model_type, facts["num_key_value_heads"]),
            head_dim=section.integer("swa_head_dim") or facts["head_dim"],
            v_head_dim=section.integer("swa_v_head_dim") or facts.get("v_head_dim"),
        )
        return {"sliding_heads": own}
    other = section.inner("attention_other_setting")
    if other is not None or section.has("num_attention_heads_per_layer"):
        heads = _num_sliding_heads(section, other, layer_types)
        groups = other.integer("num_attention_groups") if other is not None else None
        size = other.integer("head_dim") if other is not None else None
        own = Heads(
            num_attention_heads=heads or facts["num_attention_heads"],
            num_key_value_heads=groups or facts["num_key_value_heads"],
            head_dim=size or facts["head_dim"],
        )
        return {"sliding_heads": own}
    if section.has("per_layer_config"):
        raise InvalidValue(
            f"config.json: {section.name_of('per_layer_config')} gives single layers a cache of"
            " their own, which is not known; known: global_head_dim, num_global_key_value_heads"
        )
    if model_type != "gemma4_text" and not section.has("global_head_dim"):
        return {}
    own = Heads(
        num_attention_heads=facts["num_attention_heads"],
        num_key_value_heads=facts["num_key_value_heads"],
        head_dim=facts["head_dim"],
    )
    if "num_global_key_value_heads" not in section.values:
        section.assume("num_global_key_value_heads is not given: that of the sliding layers")
    return {
        "sliding_heads": own,
        "head_dim": section.required("global_head_dim"),
        "num_key_value_heads": section.integer("num_global_key_value_heads")
        or facts["num_key_value_heads"],
    }


def _num_sliding_heads(
    section: Section, other: Section | None, layer_types: list[str]
) -> int | None:
    """Query heads of sliding layers: Step's other setting, or Laguna's list of all layers.

    Raises:
        InvalidValue: layers of one kind differ.
    """
    if other is not None:
        return other.integer("num_attention_heads")
    numbers = section.integers("num_attention_heads_per_layer") or []
    for kind in (kinds.SLIDING, kinds.FULL):
        of_kind = {n for n, own in zip(numbers, layer_types, strict=False) if own == kind}
        others = {section.required(*HEAD_KEYS)} if kind == kinds.FULL else of_kind
        if len(numbers) < len(layer_types) or len(of_kind | others) > 1:
            names = ("num_attention_heads_per_layer",)
            raise section.wrong(names, f"one number for the layers of {kind}", numbers)
    return numbers[layer_types.index(kinds.SLIDING)]


def _sliding_kv_heads(section: Section, model_type: str, others: int) -> int:
    if model_type != "mimo_v2_flash":
        return others
    return section.assumed("swa_num_key_value_heads", default=8, why="transformers' default")


def block_indexer(section: Section) -> BlockIndexer | None:
    """MiniMax-M3's indexer, None where attention is not sparse.

    Raises:
        InvalidValue: a size is missing, or dense layers follow sparse ones.
    """
    own = section.inner("sparse_attention_config") or section
    first = 0
    flags = own.integers("sparse_attention_freq")
    if flags is not None:
        first = flags.index(1) if 1 in flags else len(flags)
        if set(flags[first:]) - {1}:
            raise own.wrong(("sparse_attention_freq",), "zeros, then ones", flags)
    if own.flag("use_sparse_attention") is False or not own.has(*_INDEX_DIMS):
        return None
    return BlockIndexer(
        index_head_dim=own.required(*_INDEX_DIMS),
        index_n_heads=own.required("sparse_num_index_heads", "index_n_heads"),
        block_size=own.integer("sparse_block_size", "index_block_size") or 128,
        first_layer=first,
    )


_INDEX_DIMS = ("sparse_index_dim", "index_head_dim")


def compressed(section: Section) -> Compressed:
    """DeepSeek V4's attention.

    Raises:
        InvalidValue: a size is missing.
    """
    return Compressed(
        q_lora_rank=section.required("q_lora_rank"),
        o_lora_rank=section.required("o_lora_rank"),
        o_groups=section.required("o_groups"),
        index_head_dim=section.required("index_head_dim"),
        index_n_heads=section.required("index_n_heads"),
        index_topk=section.required("index_topk"),
        hc_mult=section.required("hc_mult"),
    )


def dspark(section: Section) -> Dspark | None:
    """DeepSeek V4's layers that draft a block, where the checkpoint has them.

    Raises:
        InvalidValue: a size is no whole number.
    """
    rank = section.integer("dspark_markov_rank")
    if rank is None:
        return None
    targets = section.integers("dspark_target_layer_ids") or []
    return Dspark(
        num_layers=section.integer("n_mtp_layers") or Dspark.num_layers,
        num_target_layers=len(targets) or Dspark.num_target_layers,
        markov_rank=rank,
    )
