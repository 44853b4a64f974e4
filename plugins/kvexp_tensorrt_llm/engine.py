"""The TensorRT-LLM engine plugin."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kvexp.contract import (
    GIB,
    MIB,
    CachePlan,
    Deployment,
    FreeMemoryEngine,
    InvalidValue,
    Knobs,
    KvDtype,
    KvGroup,
    Part,
    Profile,
    RankShape,
    Refusal,
    check_count,
    gib,
    terms,
)
from kvexp_tensorrt_llm import pools, speculation
from kvexp_tensorrt_llm.pools import Pool

FRACTION, TOKENS_PER_BLOCK, MAX_NUM_TOKENS, MAX_BATCH_SIZE = 0.9, 32, 8192, 2048
KV_FORMATS = (KvDtype.fp8, KvDtype.fp8_e4m3, KvDtype.nvfp4)
LIBRARIES_BYTES = 2089 * MIB
"""Outside torch beyond the context, before and after the estimation run.

2.55 GiB with the context of an H200 (1.2.0rc4, Llama 3 8B, faradawn/bench3
logs/trtllm-serve-egine.log); what 860,320 tokens of Llama 3.1 8B leave of an H100 agrees within
0.03 GiB (1.0rc, NVIDIA/TensorRT-LLM#6294).
"""
LIBRARIES_ERROR_BYTES = 64 * MIB  # what two logs differ by, doubled
LAST_ROUNDED_UP = (1, 2)


@dataclass
class TensorrtLlm(FreeMemoryEngine):
    """TensorRT-LLM's PyTorch backend; its fraction is of what is left after everything else.

    `max_tokens`, `max_gpu_total_bytes` and `max_attention_window`: the options of KvCacheConfig.
    """

    version: str = "1.4.0rc4"
    max_tokens: int | None = None
    max_gpu_total_bytes: int | None = None
    max_attention_window: list[int] | None = None

    counts: ClassVar[tuple[str, ...]] = ("speculative",)
    title: ClassVar[str] = "TensorRT-LLM"
    base: ClassVar[str] = "left after everything else"
    fraction_name: ClassVar[str] = "free_gpu_memory_fraction"

    def settle(self, knobs: Knobs, name: str) -> Deployment:
        """See `FreeMemoryEngine.settle`."""
        self._rounds_up()
        terms.check_attention(knobs.model, f"{self.title}'s PyTorch backend")
        terms.check_parallel(knobs, self.title)
        for option in ("max_tokens", "max_gpu_total_bytes"):
            value = getattr(self, option)
            if value is not None:
                check_count(f"engine.{option}", value)
        if self.max_attention_window is not None and min(self.max_attention_window, default=0) < 1:
            raise InvalidValue("engine.max_attention_window must hold lengths of at least 1")
        drafting = speculation.resolve(knobs)
        if drafting is not None and drafting.draft and self.max_attention_window is not None:
            raise InvalidValue(
                "engine.max_attention_window must be null with a drafting model: how TensorRT-LLM"
                " splits bytes over windows and drafts is not known"
            )
        size = knobs.block_size or TOKENS_PER_BLOCK
        if size & (size - 1):
            raise InvalidValue(f"block_size must be a power of two for TensorRT-LLM, got {size}")
        if knobs.util == 1:
            raise InvalidValue("util must be below 1 for TensorRT-LLM, got 1")
        return Deployment(
            model=knobs.model,
            gpu=knobs.gpu,
            engine=name,
            engine_version=self.version,
            usage="serve",
            dtype=terms.compute_dtype(knobs),
            quantization=terms.weight_format(knobs),
            kv_dtype=terms.cache_dtype(knobs, self.title, KV_FORMATS),
            block_size=size,
            util=FRACTION if knobs.util is None else knobs.util,
            max_model_len=terms.requested_len(knobs, self.title),
            max_num_batched_tokens=knobs.max_num_batched_tokens or MAX_NUM_TOKENS,
            max_num_seqs=knobs.max_num_seqs or MAX_BATCH_SIZE,
            tp=knobs.tp,
            pp=knobs.pp,
            enforce_eager=knobs.enforce_eager,
            total_bytes=knobs.gpu.total_bytes,
            free_bytes=terms.free_at_start(knobs),
            used_by_others_bytes=knobs.gpu.used_by_others_bytes,
            speculation=drafting,
            notes=(*terms.model_notes(knobs.model, self.title), *self._notes(knobs)),
        )

    def flags(self, deployment: Deployment) -> str:
        """See `Engine.flags`."""
        if deployment.model.is_gguf:  # which it does not open
            return ""
        cache = [f"tokens_per_block: {deployment.block_size}"]
        if deployment.kv_dtype.name != deployment.dtype.name:
            cache.append(f"dtype: {'nvfp4' if deployment.kv_dtype is KvDtype.nvfp4 else 'fp8'}")
        if self.max_tokens is not None:
            cache.append(f"max_tokens: {self.max_tokens}")
        if self.max_attention_window is not None:
            cache.append(f"max_attention_window: {self.max_attention_window}")
        options = [
            f"kv_cache_config: {{{', '.join(cache)}}}",
            *speculation.options(deployment),
        ]
        return (
            f"trtllm-serve {shlex.quote(deployment.model.checkpoint)} --backend pytorch"
            f" --kv_cache_free_gpu_memory_fraction {deployment.util:g}"
            f" --max_num_tokens {deployment.max_num_batched_tokens}"
            f" --max_batch_size {deployment.max_num_seqs} --max_seq_len {deployment.max_model_len}"
            f" --tp_size {deployment.tp} --pp_size {deployment.pp}"
            f" --extra_llm_api_options cache.yaml"
            f"  # cache.yaml holds {', '.join(options)}"
        )

    def predict_weights(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_weights`; the last stage has the draft."""
        return speculation.with_draft(super().predict_weights(deployment, shape), deployment, shape)

    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """The estimation run: prompts of max_num_tokens together, one token each."""
        tokens = deployment.max_num_batched_tokens
        longest = max(1, min(tokens, deployment.max_model_len - 1))
        prompts = min(-(-tokens // longest), deployment.max_num_seqs)
        size = terms.forward_bytes(deployment, tokens=tokens, rows=prompts)
        return terms.assumed(
            "activation", size, f"{tokens} tokens, {prompts} rows of logits, {self.unverified}"
        )

    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """Growth over the context; what connects the ranks included."""
        size = LIBRARIES_BYTES
        if deployment.num_ranks > 1:
            size += terms.COMMUNICATOR_BYTES
        part = terms.assumed("non_torch", size, "libraries and NCCL, of public logs")
        if self.free_after_load_bytes is not None:
            return part  # what is free says what they take
        error = LIBRARIES_ERROR_BYTES
        return replace(part, low_bytes=size - error, high_bytes=size + error)

    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_cudagraph`."""
        return terms.assumed(
            "cudagraph", 0, "graphs captured in the estimation run are charged; no figure is known"
        )

    def charged(self, deployment: Deployment, profile: Profile) -> tuple[Part, ...]:
        """Everything that the estimation run saw; its own temporary cache is given back."""
        return profile.parts

    def base_bytes(self, deployment: Deployment, left_bytes: int) -> int:
        """What is left."""
        return left_bytes

    def divide(self, deployment: Deployment, left_bytes: int) -> tuple[tuple[Part, ...], int]:
        """int(left x fraction), capped by bytes and tokens; states of a full batch come first."""
        budget = int(left_bytes * deployment.util)
        parts = []
        cap = self.max_gpu_total_bytes
        if cap is not None and cap < budget:
            parts.append(terms.derived("above_cap", budget - cap, "engine.max_gpu_total_bytes"))
        each = max(pools.state_bytes(deployment, shape) for shape in self.ranks(deployment))
        if each:
            reason = f"of {deployment.max_num_seqs:,} requests, unverified"
            parts.append(terms.assumed("recurrent_states", deployment.max_num_seqs * each, reason))
        return tuple(parts), budget - sum(part.size_bytes for part in parts)

    def plan(self, deployment: Deployment, available_bytes: Sequence[int]) -> CachePlan | Refusal:
        """Tokens of each rank, the least of all, then whole blocks.

        A stage without attention holds any number.
        """
        shapes = self.ranks(deployment)
        drafts = [speculation.token_bytes(deployment, shape) for shape in shapes]
        sizes = [
            pools.token_bytes(deployment, shape) + draft
            for shape, draft in zip(shapes, drafts, strict=True)
        ]
        limits = {
            index: self._blocks(deployment, max(0, left) / size)
            for index, (left, size) in enumerate(zip(available_bytes, sizes, strict=True))
            if size
        }
        rank = min(limits, key=limits.__getitem__)
        blocks = limits[rank]
        counts = [limits.get(index, blocks) for index in range(len(sizes))]
        if blocks <= 0:
            block_bytes = sizes[rank] * deployment.block_size
            return Refusal(
                kind="no_memory",
                message=f"{gib(available_bytes[rank])} are left for the cache at"
                f" free_gpu_memory_fraction {deployment.util:g},"
                f" one block takes {gib(block_bytes)}",
                rank=rank,
                needed_bytes=block_bytes,
                available_bytes=available_bytes[rank],
            )
        found = pools.pools_of(deployment, shapes[rank], self.max_attention_window)
        if len(found) > 1:
            return self._by_windows(deployment, available_bytes, sizes, found, rank)
        tokens = blocks * deployment.block_size
        length = min(deployment.max_model_len, tokens)
        return CachePlan(
            num_blocks=blocks,
            block_size=deployment.block_size,
            kv_tokens=tokens,
            max_concurrency=_concurrency(deployment, [(found[0], blocks)], length),
            max_model_len=length,
            num_blocks_per_rank=tuple(counts),
            block_bytes_per_rank=tuple(size * deployment.block_size for size in sizes),
            groups=(_group(deployment, found[0], blocks, length),),
            layout=f"1 pool of {found[0].num_layers} layers",
            notes=(*self._fitted(deployment, tokens), *_of_draft(drafts[rank], tokens)),
            available_bytes_per_rank=tuple(available_bytes),
        )

    def log_lines(self, deployment: Deployment, plan: CachePlan) -> tuple[str, ...]:
        """The line of the pool's allocation."""
        size = sum(g.num_blocks * g.page_size_bytes * g.num_layers for g in plan.groups)
        return (
            f"[MemUsageChange] Allocated {size / GIB:.2f} GiB for max tokens in paged KV cache"
            f" ({plan.kv_tokens}).",
        )

    def _by_windows(
        self,
        deployment: Deployment,
        available_bytes: Sequence[int],
        sizes: Sequence[int],
        found: Sequence[Pool],
        rank: int,
    ) -> CachePlan:
        """Bytes are split by what one longest request keeps in each pool."""
        left = available_bytes[rank]
        kept = sum(pool.window * pool.token_bytes for pool in found)
        counted = [
            (
                pool,
                int(left * pool.window * pool.token_bytes / kept)
                // (pool.token_bytes * deployment.block_size),
            )
            for pool in found
        ]
        blocks = counted[0][1]
        tokens = blocks * deployment.block_size
        length = min(deployment.max_model_len, tokens)
        block_bytes = sum(n * pool.token_bytes for pool, n in counted) * deployment.block_size
        return CachePlan(
            num_blocks=blocks,
            block_size=deployment.block_size,
            kv_tokens=tokens,
            max_concurrency=_concurrency(deployment, counted, length),
            max_model_len=length,
            num_blocks_per_rank=(blocks,) * len(sizes),
            block_bytes_per_rank=(block_bytes // max(blocks, 1),) * len(sizes),
            groups=tuple(_group(deployment, pool, n, length) for pool, n in counted),
            layout=f"{len(found)} pools by window",
            notes=(
                "unverified: the split of bytes over windows",
                *self._fitted(deployment, tokens),
            ),
            available_bytes_per_rank=tuple(available_bytes),
        )

    def _blocks(self, deployment: Deployment, tokens: float) -> int:
        """Whole blocks of the tokens; releases up to 1.2 rounded up, beyond the budget."""
        if self.max_tokens is not None:
            tokens = min(tokens, self.max_tokens)
        if self._rounds_up():
            return int(-(-tokens // deployment.block_size))
        return int(tokens // deployment.block_size)

    def _rounds_up(self) -> bool:
        match = re.match(r"v?(\d+)\.(\d+)", self.version)
        if match is None:
            raise InvalidValue(
                "engine.version must be a TensorRT-LLM version such as 1.4.0rc4,"
                f" got {self.version!r}"
            )
        return (int(match[1]), int(match[2])) <= LAST_ROUNDED_UP

    def _fitted(self, deployment: Deployment, tokens: int) -> tuple[str, ...]:
        """What limited the tokens and with them the longest request."""
        lowered = self._lowered(deployment, tokens)
        if self.max_tokens is None or tokens + deployment.block_size <= self.max_tokens:
            return lowered
        return (f"limited by max_tokens={self.max_tokens:,}", *lowered)

    def _lowered(self, deployment: Deployment, tokens: int) -> tuple[str, ...]:
        if tokens >= deployment.max_model_len:
            return ()
        return (
            f"max_seq_len was lowered from {deployment.max_model_len:,} to {tokens:,}, the tokens"
            " of the cache",
        )

    def _notes(self, knobs: Knobs) -> list[str]:
        notes = ["the temporary cache of the estimation run and its graphs are not modelled"]
        if knobs.model.kv_heads < knobs.tp and knobs.model.mla is None:
            notes.append(
                "TensorRT-LLM's estimate counts part of a KV head a rank; the check with whole"
                " heads that follows decides, here with the same bytes"
            )
        kinds = {knobs.model.layer_type(i) for i in range(knobs.model.num_hidden_layers)}
        if "sliding_attention" in kinds and self.max_attention_window is None:
            notes.append("without engine.max_attention_window every layer keeps every token")
        if self._rounds_up():
            notes.append(f"unverified: {self.version} rounds tokens up to whole blocks")
        return notes


def _of_draft(token_bytes: int, tokens: int) -> tuple[str, ...]:
    return (f"the draft's cache takes {gib(token_bytes * tokens)} of them",) if token_bytes else ()


def _concurrency(deployment: Deployment, counted: Sequence[tuple[Pool, int]], length: int) -> float:
    """Requests of the longest length at once: the scarcest pool and the batch limit."""
    each = [n / -(-min(pool.window, length) // deployment.block_size) for pool, n in counted]
    return min(*each, float(deployment.max_num_seqs))


def _group(deployment: Deployment, pool: Pool, blocks: int, length: int) -> KvGroup:
    kept = min(pool.window, length)
    return KvGroup(
        kind="full" if pool.window >= deployment.max_model_len else f"window {pool.window}",
        num_layers=pool.num_layers,
        block_size=deployment.block_size,
        page_size_bytes=pool.token_bytes * deployment.block_size // pool.num_layers,
        num_blocks=blocks,
        blocks_per_request=-(-kept // deployment.block_size),
    )
