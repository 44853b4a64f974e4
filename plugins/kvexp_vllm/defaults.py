"""What vLLM chooses where the user chose nothing (`engine/arg_utils.py`, `config/model.py`)."""

from collections.abc import Sequence
from dataclasses import replace

from kvexp.contract import (
    AUTO_FIT,
    GIB,
    DType,
    InvalidValue,
    Knobs,
    KvDtype,
    Model,
    Quantization,
    terms,
    weights,
)
from kvexp_vllm.rules import VersionRules, patch_release_of

USAGES = ("serve", "llm")
LATENT_SINCE, UNPADDED_SINCE = (0, 7, 1), (0, 7, 0)
PADDED_HEAD = 256
LARGE_CARD_BYTES, VERY_LARGE_CARD_BYTES = 70 * GIB, 160 * GIB
LARGE_CARD_SEQS = 1024
GB10_CAPABILITY = "12.1"
BALANCED, INTERACTIVITY, THROUGHPUT = "balanced", "interactivity", "throughput"
PERFORMANCE_MODES = (BALANCED, INTERACTIVITY, THROUGHPUT)
POOLING = "pooling"
RUNNERS = ("auto", "generate", POOLING)
V0_TOKENS = 2048
V0_CHUNKED_LEN = 32768  # V0 splits the prompts of longer contexts


def batch_defaults(
    knobs: Knobs,
    rules: VersionRules,
    usage: str,
    max_model_len: int,
    chunked: bool | None = None,
    times: int = 1,
    of_item: tuple[int, int] = (0, 0),
) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs): what is given, or what the version takes.

    `chunked`: whether prompts are split (`enable_chunked_prefill`), None for the version's choice;
    `times` the defaults (`performance_mode`). `of_item`: see `multimodal.least_tokens`.

    Raises:
        InvalidValue: fewer tokens than requests, or than a prompt or an item that is not split.
    """
    asked_tokens, asked_seqs = knobs.max_num_batched_tokens, knobs.max_num_seqs
    large = _is_large(knobs, rules)
    seqs = asked_seqs or times * (LARGE_CARD_SEQS if large else rules.small_card_seqs)
    tokens = asked_tokens
    if tokens is None and rules.is_v0:
        tokens = _v0_tokens(knobs, rules, max_model_len, chunked)
    elif tokens is None:
        tokens = times * _v1_tokens(knobs, rules, usage, large=large)
        if chunked is False and rules.may_not_chunk:
            tokens = max(tokens, max_model_len)
        tokens = max(tokens, of_item[1])
    if asked_tokens is None and rules.caps_tokens:
        tokens = min(seqs * max_model_len, tokens)
    if asked_seqs is None and rules.caps_seqs:
        seqs = min(seqs, tokens)
    if tokens < seqs and asked_tokens is None:
        raise InvalidValue(
            f"max_num_seqs must be at most max_num_batched_tokens ({tokens}, the default),"
            f" got {seqs}"
        )
    if tokens < seqs:
        raise InvalidValue(
            f"max_num_batched_tokens must be at least max_num_seqs ({seqs}), got {tokens}"
        )
    if chunked is False and rules.may_not_chunk and asked_tokens and tokens < max_model_len:
        raise InvalidValue(
            f"max_num_batched_tokens must be at least max_model_len ({max_model_len}) with"
            f" engine.enable_chunked_prefill=false, got {tokens}"
        )
    if tokens < of_item[0]:
        raise InvalidValue(
            f"max_num_batched_tokens must be at least {of_item[0]}, which an item of"
            f" {knobs.model.name} takes in one step, got {tokens}"
        )
    return tokens, seqs


def _is_large(knobs: Knobs, rules: VersionRules) -> bool:
    """Whether a card gets the larger defaults; the name is what the driver calls it.

    The driver does not tell a GB10's memory, which counts as none: 2,048 tokens and graphs of 256
    requests in logs of 0.13 to 0.20.
    """
    name, gpu = knobs.gpu.name.lower(), knobs.gpu
    told = gpu.compute_capability != GB10_CAPABILITY
    much = told and int(gpu.total_bytes) >= LARGE_CARD_BYTES
    return {
        "none": False,
        "hopper": "h100" in name or "h200" in name,
        "memory": much,
        "memory_but_a100": much and "a100" not in name,
    }[rules.large_cards]


def _v1_tokens(knobs: Knobs, rules: VersionRules, usage: str, *, large: bool) -> int:
    if usage == "llm":
        return 16384 if large else 8192
    if not large:
        return 2048
    very_large = int(knobs.gpu.total_bytes) >= VERY_LARGE_CARD_BYTES
    return rules.very_large_server_tokens if very_large else 8192


def _v0_tokens(knobs: Knobs, rules: VersionRules, max_model_len: int, chunked: bool | None) -> int:
    """A whole prompt, unless V0 splits prompts (`_set_default_args_v0`, `SchedulerConfig`)."""
    model = knobs.model
    images = rules.image_tokens if model.has_towers else 0
    windows = all(
        model.layer_type(index) == "sliding_attention" for index in range(model.num_hidden_layers)
    )
    latent = model.mla is not None and not rules.chunks_latent
    apart = knobs.lora.is_asked or knobs.speculative.is_asked
    whole = images or windows or latent or apart
    if chunked is None:
        chunked = rules.chunks_long and max_model_len > V0_CHUNKED_LEN and not whole
    if chunked:
        return max(rules.chunk_tokens, images)
    return max(max_model_len, V0_TOKENS, images)


def block_size(knobs: Knobs, kv_dtype: KvDtype) -> int:
    """What the attention backend takes: 16, but larger kernels' blocks for some latent ones."""
    mla = knobs.model.mla
    if knobs.model.compressed is not None:
        return 256
    if knobs.model.block_indexer is not None:
        return knobs.model.block_indexer.block_size
    if mla is None or not mla.latent_cache:
        return 16
    if mla.index_head_dim is not None:
        return 64  # the indexer's kernels
    capability = knobs.gpu.compute_capability or ""
    if capability.startswith("9.") and kv_dtype.is_fp8:
        return 64  # FlashMLA: FLASH_ATTN_MLA takes no fp8 cache
    return 32 if capability.startswith("10.") else 16


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    """Whether an option of the engine is among its values.

    Raises:
        InvalidValue: it is not.
    """
    if value not in allowed:
        raise InvalidValue(f"engine.{option} must be one of {', '.join(allowed)}, got {value!r}")


def check_block_size(knobs: Knobs) -> None:
    """Attention kernels take multiples of 16.

    Raises:
        InvalidValue: it is none.
    """
    if knobs.block_size is not None and knobs.block_size % 16:
        raise InvalidValue(f"block_size must be a multiple of 16 for vLLM, got {knobs.block_size}")


def derived_max_model_len(model: Model) -> int:
    """The longest context that the model's config states, rope scaling included."""
    length = model.max_position_embeddings
    scaling, kind = model.rope_scaling or {}, model.rope_type
    unscaled = kind in (None, "default", "longrope", "llama3")
    if unscaled or model.model_type.startswith("gemma3"):
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
    if knobs.max_model_len is None and knobs.model.rope_type == "longrope":
        return int(knobs.model.rope_scaling.get("original_max_position_embeddings", longest))
    if knobs.max_model_len in (None, AUTO_FIT):
        return longest
    assert knobs.max_model_len is not None
    if knobs.max_model_len > longest:
        raise InvalidValue(
            f"max_model_len must be at most {longest} for {knobs.model.name},"
            f" got {knobs.max_model_len}"
        )
    return knobs.max_model_len


_REFUSED_IN_FP16 = {
    "Gemma2ForCausalLM": (0, 9, 1),
    "Gemma3ForCausalLM": (0, 10, 2),
    "Gemma3ForConditionalGeneration": (0, 9, 1),
    "Plamo2ForCausalLM": (0, 9, 1),
    "Glm4ForCausalLM": (0, 9, 1),
}
"""Classes that overflow there, by the release that knows it (`_FLOAT16_NOT_SUPPORTED_MODELS`)."""


def compute_dtype(knobs: Knobs, version: str) -> tuple[DType, str]:
    """The compute dtype, and what to note of it.

    Models that overflow in fp16 are served in 32 bits where the card has no bf16,
    by the releases that know them.

    Raises:
        InvalidValue: card or quantisation do not take it.
    """
    asked = knobs.dtype
    dtype = knobs.model.torch_dtype if asked is DType.auto else asked
    capability = float(knobs.gpu.compute_capability or 99)
    note = ""
    if dtype is DType.fp32 and asked is DType.auto:
        dtype, note = DType.bf16, "a checkpoint of 32 bits is served in 16"
    if dtype is DType.bf16 and capability < 8:
        if asked is DType.bf16:
            raise InvalidValue(
                f"dtype=bf16 needs compute capability 8.0, {knobs.gpu.name} has {capability:.1f};"
                " use dtype=fp16"
            )
        dtype, note = DType.fp16, f"{knobs.gpu.name} has no bf16: fp16 instead"
    since = _REFUSED_IN_FP16.get(knobs.model.architecture)
    if dtype is DType.fp16 and since is not None and patch_release_of(version) >= since:
        if asked is DType.auto:
            dtype = DType.fp32 if capability < 8 else DType.bf16
            note = f"{knobs.model.name} overflows in fp16: {dtype.name} instead"
        else:
            note = f"{knobs.model.name} overflows in fp16, which vLLM {version} refuses"
    if knobs.quantization is Quantization.fp8 and dtype is DType.fp32:
        raise InvalidValue("quantization=fp8 needs dtype bf16 or fp16, got fp32")
    return dtype, note


def check_parallel(knobs: Knobs) -> None:
    """Heads must divide over tp; KV heads divide tp or tp divides them (MLA: any division).

    Raises:
        InvalidValue: they do not; the message lists the sizes that work.
    """
    model = knobs.model
    if model.mla is None and model.num_attention_heads % model.kv_heads:
        raise InvalidValue(
            f"num_attention_heads ({model.num_attention_heads}) of {model.name} must be a multiple"
            f" of num_key_value_heads ({model.kv_heads})"
        )
    split = [model.intermediate_size, weights.padded_vocab_size(model)]
    if model.moe is not None:
        split.append(model.moe.moe_intermediate_size)
    if model.mamba is not None:
        split.append(model.mamba.mamba_n_heads)
    terms.check_parallel(knobs, "vLLM", split)


def check_replicas(knobs: Knobs, *, expert_parallel: bool) -> None:
    """Experts are shared by the replicas: split over all of their ranks, or dealt out whole.

    Raises:
        InvalidValue: they do not divide; the message lists the sizes that work.
    """
    moe = knobs.model.moe
    if knobs.dp == 1 or moe is None:
        return
    size = moe.moe_intermediate_size
    if expert_parallel:
        most = moe.num_experts // knobs.tp
        if knobs.dp > most:
            raise InvalidValue(
                f"dp must be at most {most} for {knobs.model.name} with tp={knobs.tp}:"
                f" {moe.num_experts} experts are dealt out, got {knobs.dp}"
            )
        return
    if size % (knobs.tp * knobs.dp):
        allowed = [n for n in range(1, size // knobs.tp + 1) if size % (knobs.tp * n) == 0]
        raise InvalidValue(
            f"dp must be one of {', '.join(map(str, allowed))} for {knobs.model.name} with"
            f" tp={knobs.tp}, by the width of an expert ({size}), got {knobs.dp};"
            " engine.enable_expert_parallel=true deals experts out whole"
        )


def check_context_parallel(knobs: Knobs, dcp: int) -> None:
    """Decode context parallelism divides tp, and needs spare ranks beyond the KV heads.

    Raises:
        InvalidValue: it does not; the message says what would be right.
    """
    key, model = "engine.decode_context_parallel_size", knobs.model
    if dcp == 1:
        return
    if dcp < 1 or knobs.tp % dcp:
        raise InvalidValue(f"{key} must divide tp ({knobs.tp}), got {dcp}")
    if "sliding_attention" in {model.layer_type(i) for i in range(model.num_hidden_layers)}:
        raise InvalidValue(f"{key} must be 1 for {model.name}: its sliding layers refuse it")
    if model.mla is None and dcp > knobs.tp // model.kv_heads:
        raise InvalidValue(
            f"{key} must be at most tp // KV heads = {knobs.tp // model.kv_heads}, got {dcp}"
        )


def cached_model(model: Model, version: str) -> Model:
    """The model as a release caches it: before 0.7.1 K and V of all heads for latent attention.

    Heads were padded to 256 elements, which the attention kernel took, or from 0.7 to those of a
    query (`get_head_size`).
    """
    mla, release = model.mla, patch_release_of(version)
    if mla is None or release >= LATENT_SINCE:
        return model
    query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    width = PADDED_HEAD if release < UNPADDED_SINCE else query
    return replace(model, mla=replace(mla, latent_cache=False), head_dim=width, v_head_dim=width)
