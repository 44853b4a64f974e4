"""The LMDeploy engine plugin."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kvexp.contract import (
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
    Quota,
    RankShape,
    Refusal,
    gib,
    layers,
    terms,
)
from kvexp_lmdeploy import rules, speculation

BACKENDS = ("pytorch", "turbomind")
LEAST_BLOCKS = {"pytorch": 3, "turbomind": 1}
LOAD_GROWTH_BYTES, MOST_MORE_BYTES = 64 * MIB, 1024 * MIB  # a log of 0.17 took 1.2 GiB more


@dataclass
class Lmdeploy(FreeMemoryEngine):
    """LMDeploy 0.16 and older; its fraction is of what is free after the weights are loaded.

    `backend`: pytorch or turbomind, null for the one that takes the model. `num_gpu_blocks`: the
    PyTorch engine's option, an exact count.
    """

    version: str = "0.16.0"
    backend: str | None = None
    num_gpu_blocks: int = 0

    counts: ClassVar[tuple[str, ...]] = ("speculative",)
    title: ClassVar[str] = "LMDeploy"
    base: ClassVar[str] = "free after load"
    fraction_name: ClassVar[str] = "cache_max_entry_count"

    def settle(self, knobs: Knobs, name: str) -> Deployment:
        """See `FreeMemoryEngine.settle`."""
        release = rules.release_of(self.version)
        if self.backend not in (None, *BACKENDS):
            raise InvalidValue(
                f"engine.backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}"
            )
        terms.check_attention(knobs.model, self.title)
        terms.check_parallel(knobs, self.title)
        if knobs.pp != 1:
            raise InvalidValue(f"pp must be 1 for LMDeploy, got {knobs.pp}")
        backend = self.backend or _backend_of(knobs)
        if self.num_gpu_blocks < 0 or (self.num_gpu_blocks and backend != "pytorch"):
            raise InvalidValue(
                "engine.num_gpu_blocks must be 0 or a count for the pytorch backend,"
                f" got {self.num_gpu_blocks}"
            )
        if backend == "turbomind" and release >= rules.REGION_SINCE and knobs.util == 1:
            raise InvalidValue("util must be below 1 for TurboMind, got 1")
        util = knobs.util
        if util is None:
            util = rules.TOTAL_FRACTION if self._of_total(backend) else rules.FRACTION
        return Deployment(
            model=knobs.model,
            gpu=knobs.gpu,
            engine=name,
            engine_version=self.version,
            usage=backend,
            dtype=terms.compute_dtype(knobs),
            quantization=terms.weight_format(knobs),
            kv_dtype=terms.cache_dtype(knobs, self.title, _formats(knobs)),
            block_size=rules.block_size(knobs),
            util=util,
            max_model_len=terms.requested_len(knobs, self.title),
            max_num_batched_tokens=knobs.max_num_batched_tokens or rules.MAX_PREFILL_TOKENS,
            max_num_seqs=knobs.max_num_seqs or rules.batch_of(knobs.gpu.name),
            tp=knobs.tp,
            pp=1,
            enforce_eager=knobs.enforce_eager,
            total_bytes=knobs.gpu.total_bytes,
            free_bytes=terms.free_at_start(knobs),
            used_by_others_bytes=knobs.gpu.used_by_others_bytes,
            speculation=speculation.resolve(knobs, backend),
            notes=(*terms.model_notes(knobs.model, self.title), *self._notes(knobs, backend)),
        )

    def flags(self, deployment: Deployment) -> str:
        """See `Engine.flags`."""
        model = deployment.model
        if model.is_gguf:  # which it does not open
            return ""
        words = [
            f"lmdeploy serve api_server {shlex.quote(model.checkpoint)}",
            f"--backend {deployment.usage}",
            f"--cache-max-entry-count {deployment.util:g}",
            f"--cache-block-seq-len {deployment.block_size}",
            f"--session-len {deployment.max_model_len}",
            f"--max-batch-size {deployment.max_num_seqs}",
            f"--max-prefill-token-num {deployment.max_num_batched_tokens}",
            f"--tp {deployment.tp}",
        ]
        if deployment.dtype is not model.torch_dtype:
            words.append(f"--dtype {deployment.dtype.value}")
        bits = rules.QUANT_BITS.get(deployment.kv_dtype)
        if bits is not None:
            words.append(f"--quant-policy {bits}")
        if deployment.usage == "pytorch" and deployment.enforce_eager:
            words.append("--eager-mode")
        words += speculation.flags(deployment)
        return " ".join(words)

    def predict_weights(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_weights`; the first rank may have the draft alone."""
        return speculation.with_draft(super().predict_weights(deployment, shape), deployment, shape)

    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """What the largest prefill takes; LMDeploy does not subtract it."""
        tokens = deployment.max_num_batched_tokens
        rows = min(deployment.max_num_seqs, tokens)
        size = terms.forward_bytes(deployment, tokens=tokens, rows=rows)
        return terms.assumed("activation", size, f"a prefill of {tokens} tokens, {self.unverified}")

    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """What loading takes beside the tensors; what connects the ranks included."""
        size, more = LOAD_GROWTH_BYTES, MOST_MORE_BYTES
        if deployment.num_ranks > 1:
            size, more = size + terms.COMMUNICATOR_BYTES, more + terms.COMMUNICATOR_BYTES // 2
        part = terms.assumed("non_torch", size, "kernels and NCCL, taken from other engines")
        return replace(part, low_bytes=0, high_bytes=size + more)

    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_cudagraph`."""
        return terms.derived("cudagraph", 0, "captured after the cache, nothing is subtracted")

    def charged(self, deployment: Deployment, profile: Profile) -> tuple[Part, ...]:
        """Weights and what loading takes; no forward runs before the cache."""
        return (
            profile.non_torch,
            profile.weights,
            terms.derived(
                "activation",
                0,
                f"not subtracted: no forward runs before the cache;"
                f" {gib(profile.activation_bytes)} must fit into what is held back",
            ),
            terms.derived("cudagraph", 0, "not subtracted: captured after the cache"),
        )

    def quota(self, deployment: Deployment, profile: Profile) -> Quota:
        """See `FreeMemoryEngine.quota`; the oldest releases took a share of the total."""
        found = super().quota(deployment, profile)
        if self._of_total(deployment.usage) and found.base == self.base:
            return replace(found, base="total")
        return found

    def base_bytes(self, deployment: Deployment, left_bytes: int) -> int:
        """What is free after the load, and after the PyTorch engine's reserves."""
        if self._of_total(deployment.usage):
            return deployment.total_bytes
        return left_bytes - sum(part.size_bytes for part in self._reserves(deployment, left_bytes))

    def divide(self, deployment: Deployment, left_bytes: int) -> tuple[tuple[Part, ...], int]:
        """int(free x ratio), after the PyTorch engine's states and runtime reserve."""
        reserves = self._reserves(deployment, left_bytes)
        return reserves, int(self.base_bytes(deployment, left_bytes) * deployment.util)

    def plan(self, deployment: Deployment, available_bytes: Sequence[int]) -> CachePlan | Refusal:
        """Whole blocks on each rank, the least of all."""
        sizes = [self._block_bytes(deployment, shape) for shape in self.ranks(deployment)]
        counts = [
            self.num_gpu_blocks or max(0, left) // size
            for left, size in zip(available_bytes, sizes, strict=True)
        ]
        blocks = min(counts)
        rank = counts.index(blocks)
        least = LEAST_BLOCKS[deployment.usage]
        if blocks < least or available_bytes[rank] <= 0:
            needed = least * sizes[rank]
            return Refusal(
                kind="no_memory",
                message=f"{gib(available_bytes[rank])} are left for the cache at"
                f" cache_max_entry_count {deployment.util:g}, {least} blocks take {gib(needed)}",
                rank=rank,
                needed_bytes=needed,
                available_bytes=available_bytes[rank],
            )
        size, tokens = deployment.block_size, blocks * deployment.block_size
        length = min(deployment.max_model_len, self._longest(deployment, blocks))
        num_layers = sum(
            layers.kv_elements(deployment, i)[0] > 0
            for i in range(deployment.model.num_hidden_layers)
        )
        per_request = -(-length // size)
        return CachePlan(
            num_blocks=blocks,
            block_size=size,
            kv_tokens=tokens,
            max_concurrency=min(blocks / per_request, float(deployment.max_num_seqs)),
            max_model_len=length,
            num_blocks_per_rank=tuple(counts),
            block_bytes_per_rank=tuple(sizes),
            groups=(
                KvGroup(
                    kind="full",
                    num_layers=num_layers,
                    block_size=size,
                    page_size_bytes=self._model_block_bytes(deployment, rank) // num_layers,
                    num_blocks=blocks,
                    blocks_per_request=per_request,
                ),
            ),
            layout=f"{num_layers} layers in one cache",
            notes=self._plan_notes(deployment, length),
            available_bytes_per_rank=tuple(available_bytes),
        )

    def log_lines(self, deployment: Deployment, plan: CachePlan) -> tuple[str, ...]:
        """TurboMind's lines; the PyTorch engine's figures by its own names."""
        if deployment.usage == "pytorch":
            return (f"num_gpu_blocks = {plan.num_blocks}, block_size = {plan.block_size}",)
        if self._is_region(deployment.usage):
            budget = min(plan.available_bytes_per_rank)
            return (
                f"Object cache budget: {budget / MIB:.2f} MB from free"
                f" {budget / deployment.util / MIB:.2f} MB and ratio {deployment.util:g}",
            )
        return (
            f"[BlockManager] block_size = {plan.block_bytes_per_rank[0] / MIB:.3f} MB",
            f"[BlockManager] max_block_count = {plan.num_blocks}",
        )

    def _is_region(self, backend: str) -> bool:
        return backend == "turbomind" and rules.release_of(self.version) >= rules.REGION_SINCE

    def _of_total(self, backend: str) -> bool:
        return backend == "turbomind" and rules.release_of(self.version) < rules.FREE_SINCE

    def _block_bytes(self, deployment: Deployment, shape: RankShape) -> int:
        """The model's and, where the rank has it, the draft's."""
        own = self._model_block_bytes(deployment, shape.rank)
        return own + speculation.block_bytes(deployment, shape)

    def _model_block_bytes(self, deployment: Deployment, rank: int) -> int:
        shape = self.ranks(deployment)[rank]
        if deployment.usage == "pytorch":
            return rules.pytorch_block_bytes(deployment, shape)
        return rules.turbomind_block_bytes(deployment, shape)

    def _reserves(self, deployment: Deployment, left_bytes: int) -> tuple[Part, ...]:
        """The PyTorch engine's states and runtime; TurboMind keeps none."""
        if deployment.usage != "pytorch" or left_bytes <= 0:
            return ()
        shape = self.ranks(deployment)[0]
        parts = []
        slots = deployment.max_num_seqs + rules.SPARE_SLOTS
        states = slots * speculation.slot_bytes(deployment, shape)
        if states:
            parts.append(terms.assumed("recurrent_states", states, f"{slots:,} slots, unverified"))
        free = left_bytes - states
        runtime = rules.runtime_bytes(deployment, free, self._block_bytes(deployment, shape))
        if runtime < 0:
            reason = "no prefill leaves 16 blocks: everything that is free"
            parts.append(terms.derived("runtime", max(0, free), reason))
        else:
            parts.append(
                terms.derived("runtime", runtime, "logits of a prefill and of two decode batches")
            )
        return tuple(parts)

    def _longest(self, deployment: Deployment, blocks: int) -> int:
        """The longest session: the PyTorch engine keeps one block for padding and one more."""
        spare = 2 if deployment.usage == "pytorch" else 0
        return max(1, blocks - spare) * deployment.block_size

    def _plan_notes(self, deployment: Deployment, length: int) -> tuple[str, ...]:
        notes = []
        if self.num_gpu_blocks:
            notes.append("num_gpu_blocks is given: memory plays no part")
        if length < deployment.max_model_len:
            notes.append(
                f"session_len was lowered from {deployment.max_model_len:,} to {length:,}, what"
                " the cache holds"
            )
        if self._is_region(deployment.usage):
            notes.append(
                "one region for all cache objects: the blocks are what it holds when nothing else"
                " is kept there, not a count of the engine's"
            )
        return tuple(notes)

    def _notes(self, knobs: Knobs, backend: str) -> list[str]:
        notes = []
        if self.backend is None:
            notes.append(f"backend {backend}; unverified: the list of models that TurboMind takes")
        if backend == "turbomind" and not self._is_region(backend):
            notes.append(f"unverified: TurboMind {self.version} by its documentation")
        if knobs.model.is_hybrid and knobs.model.model_type not in rules.STATE_TYPES:
            notes.append(
                f"LMDeploy has states of {', '.join(rules.STATE_TYPES)} alone: those of"
                f" {knobs.model.model_type} are counted by the same rule"
            )
        if backend == "turbomind" and knobs.model.is_hybrid:
            notes.append("unverified: recurrent states in TurboMind are not counted")
        if knobs.model.sliding_window is not None:
            notes.append("unverified: windowed layers are counted as keeping every token")
        return notes


def _backend_of(knobs: Knobs) -> str:
    return "turbomind" if knobs.model.model_type in rules.TURBOMIND_TYPES else "pytorch"


def _formats(knobs: Knobs) -> tuple[KvDtype, ...]:
    """Caches of 8 and 4 bit; an 8-bit float for latent vectors alone."""
    if knobs.model.mla is not None:
        return (KvDtype.fp8, KvDtype.fp8_e4m3)
    return (KvDtype.int8_per_token_head, KvDtype.int4_per_token_head)
