"""The SGLang engine plugin."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kvexp.contract import (
    GIB,
    MIB,
    CachePlan,
    Deployment,
    DType,
    FreeMemoryEngine,
    InvalidValue,
    Knobs,
    KvDtype,
    KvGroup,
    Part,
    Profile,
    RankShape,
    Refusal,
    gib,
    layers,
    terms,
)
from kvexp_sglang import fraction, pools, refusals, states
from kvexp_sglang.pools import Cell, Pools

KV_FORMATS = (KvDtype.bf16, KvDtype.fp8, KvDtype.fp8_e4m3, KvDtype.fp8_e5m2, KvDtype.nvfp4)
FLAG_NAMES = {
    KvDtype.bf16: "bf16",
    KvDtype.fp8: "fp8_e4m3",
    KvDtype.fp8_e4m3: "fp8_e4m3",
    KvDtype.fp8_e5m2: "fp8_e5m2",
    KvDtype.nvfp4: "fp4_e2m1",
}
MOST_REQUESTS, FEWEST_REQUESTS, REQUESTS_PER_CONTEXT = 4096, 2048, 512
MAX_PREFILL_TOKENS = 16384
LOAD_GROWTH_BYTES = 64 * MIB  # Qwen2.5-0.5B on an H100: 0.98 GiB for 0.92 GiB of tensors
GROWTH_OF_UNIFIED_BYTES = (123 * MIB, 373 * MIB, 473 * MIB)  # jethac/dgx-spark-hijinks results/
KNOWN_TWO_POOLS = ("gpt_oss", "llama4_text")
DEFAULT_SWA_RATIO = 0.8


@dataclass
class Sglang(FreeMemoryEngine):
    """SGLang by the rules of 0.5.23; its fraction is of what is free before the weights load.

    `max_total_tokens`, `swa_full_tokens_ratio`, `disable_hybrid_swa_memory`,
    `mamba_full_memory_ratio`, `max_mamba_cache_size`, `mamba_ssm_dtype`, `disable_radix_cache`,
    `mamba_radix_cache_strategy` (`mamba_scheduler_strategy` before 0.5.14) and
    `disable_overlap_schedule`: the engine's own options of those names.
    `num_draft_layers`: of a draft that shares the pool.
    """

    version: str = "0.5.23"
    num_draft_layers: int = 0
    max_total_tokens: int | None = None
    swa_full_tokens_ratio: float | None = None
    disable_hybrid_swa_memory: bool = False
    mamba_full_memory_ratio: float = 0.9
    max_mamba_cache_size: int | None = None
    mamba_ssm_dtype: DType = DType.fp32
    disable_radix_cache: bool = False
    mamba_radix_cache_strategy: str = states.AUTO
    disable_overlap_schedule: bool = False

    counts: ClassVar[tuple[str, ...]] = ("dp", "pp_partition")
    title: ClassVar[str] = "SGLang"
    base: ClassVar[str] = "free before load"
    fraction_name: ClassVar[str] = "mem_fraction_static"

    def settle(self, knobs: Knobs, name: str) -> Deployment:
        """See `FreeMemoryEngine.settle`."""
        if fraction.release_of(self.version) < pools.STATES_ALONE_SINCE:
            terms.check_attention(knobs.model, f"{self.title} {self.version}")
        if self.max_mamba_cache_size is not None and self.max_mamba_cache_size < 1:
            raise InvalidValue(
                f"engine.max_mamba_cache_size must be at least 1, got {self.max_mamba_cache_size}"
            )
        states.check(
            self.mamba_radix_cache_strategy,
            fraction.release_of(self.version),
            overlaps=not self.disable_overlap_schedule,
        )
        terms.check_parallel(knobs, self.title)
        length = terms.requested_len(knobs, self.title)
        longest = terms.context_len(knobs.model)
        if length > longest:
            raise InvalidValue(
                f"max_model_len must be at most {longest} for {knobs.model.name} with SGLang,"
                f" got {length}"
            )
        kv_dtype = terms.cache_dtype(knobs, self.title, KV_FORMATS)
        chunk = knobs.max_num_batched_tokens or fraction.card_row(knobs.gpu.total_bytes).chunk
        util = knobs.util
        if util is None:
            util = fraction.automatic(knobs, self.version, chunk)
        return Deployment(
            model=knobs.model,
            gpu=knobs.gpu,
            engine=name,
            engine_version=self.version,
            usage="serve",
            dtype=terms.compute_dtype(knobs),
            quantization=terms.weight_format(knobs),
            kv_dtype=kv_dtype,
            block_size=knobs.block_size or _page_size(knobs),
            util=util,
            max_model_len=length,
            max_num_batched_tokens=chunk,
            max_num_seqs=knobs.max_num_seqs or MOST_REQUESTS,
            tp=knobs.tp,
            pp=knobs.pp,
            dp=knobs.dp,
            pp_partition=tuple(knobs.pp_partition) if knobs.pp_partition else None,
            enforce_eager=knobs.enforce_eager,
            total_bytes=knobs.gpu.total_bytes,
            free_bytes=terms.free_at_start(knobs, after_communicator=True),
            used_by_others_bytes=knobs.gpu.used_by_others_bytes,
            notes=(*knobs.model.notes, *self._notes(knobs)),
        )

    def flags(self, deployment: Deployment) -> str:
        """See `Engine.flags`."""
        words = [
            f"python -m sglang.launch_server --model-path {deployment.model.hf_id}",
            f"--mem-fraction-static {deployment.util:g} --page-size {deployment.block_size}",
            f"--context-length {deployment.max_model_len}",
            f"--chunked-prefill-size {deployment.max_num_batched_tokens}",
            f"--tp-size {deployment.tp} --pp-size {deployment.pp}",
            *([f"--dp-size {deployment.dp}"] if deployment.dp > 1 else []),
        ]
        if deployment.kv_dtype.name != deployment.dtype.name:
            words.append(f"--kv-cache-dtype {FLAG_NAMES[deployment.kv_dtype]}")
        if deployment.dtype is not deployment.model.torch_dtype:
            words.append(f"--dtype {deployment.dtype.value}")
        if deployment.quantization is not None and deployment.model.quantization_config is None:
            words.append(f"--quantization {deployment.quantization.value}")
        if deployment.max_num_seqs != MOST_REQUESTS:
            words.append(f"--max-running-requests {deployment.max_num_seqs}")
        if self.max_total_tokens is not None:
            words.append(f"--max-total-tokens {self.max_total_tokens}")
        if deployment.enforce_eager:
            words.append("--disable-cuda-graph")
        if self.disable_radix_cache:
            words.append("--disable-radix-cache")
        if self.max_mamba_cache_size is not None:
            words.append(f"--max-mamba-cache-size {self.max_mamba_cache_size}")
        if self.mamba_radix_cache_strategy != states.AUTO:
            name = states.flag_of(fraction.release_of(self.version))
            words.append(f"{name} {self.mamba_radix_cache_strategy}")
        if self.disable_overlap_schedule:
            words.append("--disable-overlap-schedule")
        return " ".join(words)

    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """What the largest prefill takes; SGLang does not subtract it."""
        chunk = deployment.max_num_batched_tokens
        size = terms.forward_bytes(deployment, tokens=chunk, rows=_graph_rows(deployment))
        return terms.assumed("activation", size, f"a chunk of {chunk} tokens, {self.unverified}")

    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """What loading takes beside the tensors; of unified memory the process takes some too."""
        if deployment.gpu.unified_memory and self.free_after_load_bytes is None:
            low, best, high = GROWTH_OF_UNIFIED_BYTES
            reason = "growth while the weights load, the median of eleven logs of GB10"
            part = terms.assumed("non_torch", best, reason)
            return replace(part, low_bytes=low, high_bytes=high)
        return terms.assumed(
            "non_torch", LOAD_GROWTH_BYTES, "growth while the weights load, from one public log"
        )

    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_cudagraph`."""
        return terms.derived("cudagraph", 0, "captured after the pool, nothing is subtracted")

    def charged(self, deployment: Deployment, profile: Profile) -> tuple[Part, ...]:
        """Weights and what loading takes; a forward does not run before the pool."""
        held = deployment.free_bytes - int(deployment.free_bytes * deployment.util)
        return (
            profile.non_torch,
            profile.weights,
            terms.derived(
                "activation",
                0,
                f"not subtracted: no forward runs before the pool; {gib(profile.activation_bytes)}"
                f" must fit into the {gib(held)} held back, graphs as well;"
                f" {_interval(deployment, profile)}",
            ),
            terms.derived("cudagraph", 0, "not subtracted: captured after the pool"),
        )

    def base_bytes(self, deployment: Deployment, left_bytes: int) -> int:
        """What was free before the load."""
        return deployment.free_bytes

    def divide(self, deployment: Deployment, left_bytes: int) -> tuple[tuple[Part, ...], int]:
        """avail - pre x (1 - f) in GiB as a float, then less the slots of recurrent states."""
        avail, before = left_bytes / GIB, deployment.free_bytes / GIB
        rest = int((avail - before * (1 - deployment.util)) * GIB)
        slot = self._slot_bytes(deployment)
        if slot == 0 or rest <= 0:
            return (), rest
        slots = self._given_slots(deployment)
        if slots is None:
            slots = pools.slots_of(rest, slot, self.mamba_full_memory_ratio)
        states = terms.derived(
            "recurrent_states",
            (slots + 1) * slot,
            f"{slots:,} slots of {slot:,} bytes and one of padding",
        )
        left = rest - states.size_bytes
        if deployment.model.is_attention_free and left > 0:
            return (self._share_of_tokens(deployment, left + slot),), slots * slot
        return (states,), left

    def plan(self, deployment: Deployment, available_bytes: Sequence[int]) -> CachePlan | Refusal:
        """Whole pages of tokens on each rank; the least counts."""
        least = min(range(len(available_bytes)), key=available_bytes.__getitem__)
        if available_bytes[least] <= 0:
            return refusals.nothing_left(deployment, least, available_bytes[least])
        if refusal := self._too_few_slots(deployment, least, available_bytes):
            return refusal
        if deployment.model.is_attention_free:
            return self._plan_of_states(deployment, available_bytes)
        page, shapes = deployment.block_size, self.ranks(deployment)
        cells = [self._cell(deployment, shape) for shape in shapes]
        found = [
            pools.pools_of(
                cell,
                left,
                page=page,
                ratio=self._swa_ratio,
                num_draft_layers=self.num_draft_layers,
            )
            for cell, left in zip(cells, available_bytes, strict=True)
        ]
        rank = min(range(len(found)), key=lambda index: found[index].tokens)
        tokens = found[rank].tokens
        if self.max_total_tokens is not None:
            tokens = min(tokens, self.max_total_tokens // page * page)
        if tokens <= 0:
            return refusals.no_tokens(deployment, rank, available_bytes[rank], cells[rank])
        swa = None
        if found[rank].swa_tokens is not None:
            swa = int(tokens * self._swa_ratio) // page * page
            needed = layers.window(deployment) + page
            if swa <= needed:
                return refusals.window_too_large(
                    deployment, rank, available_bytes[rank], swa, needed
                )
        return self._plan(deployment, available_bytes, (rank, tokens, swa), cells, found)

    def log_lines(self, deployment: Deployment, plan: CachePlan) -> tuple[str, ...]:
        """Lines of the memory pools and of the scheduler."""
        cell = self._cell(deployment, self.ranks(deployment)[0])
        slots = plan.kv_tokens + deployment.block_size  # one page of padding
        k, v = slots * cell.full_k_bytes / GIB, slots * cell.full_v_bytes / GIB
        is_latent = deployment.model.mla is not None
        size = f"KV size: {k:.2f} GB" if is_latent else f"K size: {k:.2f} GB, V size: {v:.2f} GB"
        requests = self._requests(deployment, plan.kv_tokens, plan.available_bytes_per_rank)
        lines = [f"KV Cache is allocated. #tokens: {plan.kv_tokens}, {size}"]
        if deployment.model.is_attention_free:
            lines.insert(0, self._states_line(deployment, plan.available_bytes_per_rank))
        if len(plan.groups) > 1:
            swa = plan.groups[1].num_blocks * deployment.block_size
            lines.insert(
                0,
                "Use Sliding window memory pool."
                f" full_layer_tokens={plan.kv_tokens}, swa_layer_tokens={swa}",
            )
        lines.append(
            f"max_total_num_tokens={plan.kv_tokens},"
            f" chunked_prefill_size={deployment.max_num_batched_tokens},"
            f" max_prefill_tokens={MAX_PREFILL_TOKENS}, max_running_requests={requests},"
            f" context_len={deployment.max_model_len}"
        )
        return tuple(lines)

    def _plan(
        self,
        deployment: Deployment,
        available_bytes: Sequence[int],
        limit: tuple[int, int, int | None],
        cells: Sequence[Cell],
        found: Sequence[Pools],
    ) -> CachePlan:
        rank, tokens, swa = limit
        page, length = deployment.block_size, deployment.max_model_len
        requests = self._requests(deployment, tokens, available_bytes)
        concurrency = tokens / length
        notes = [f"at most {requests:,} requests run at once"]
        if tokens < found[rank].tokens:
            notes.append(f"limited by max_total_tokens, {found[rank].tokens:,} would fit")
        groups = [
            _group("full", cells[rank].num_full, page, cells[rank].full_bytes, tokens, length)
        ]
        if swa is not None:
            kept = min(length, layers.window(deployment) + page)
            concurrency = min(concurrency, swa / kept)
            groups.append(
                _group("window", cells[rank].num_swa, page, cells[rank].swa_bytes, swa, kept)
            )
        if tokens < length:
            notes.append(
                f"a request of {length:,} tokens is refused: the pool holds {tokens:,} tokens"
            )
        return CachePlan(
            num_blocks=tokens // page,
            block_size=page,
            kv_tokens=tokens,
            max_concurrency=min(concurrency, float(requests)),
            max_model_len=length,
            num_blocks_per_rank=tuple(
                (each.tokens if each.cell_bytes else tokens) // page for each in found
            ),
            block_bytes_per_rank=tuple(int(each.cell_bytes * page) for each in found),
            groups=tuple(groups),
            layout=" and ".join(f"{g.num_layers} layers in the {g.kind} pool" for g in groups),
            notes=tuple(notes),
            available_bytes_per_rank=tuple(available_bytes),
        )

    def _plan_of_states(self, deployment: Deployment, available_bytes: Sequence[int]) -> CachePlan:
        """No layer keeps K and V: the blocks are the slots of states, tokens take no memory.

        `DefaultPoolConfigurator`: a token of 0 bytes gives max_total_tokens, or one context.

        Raises:
            InvalidValue: a page is longer than that.
        """
        page, length = deployment.block_size, deployment.max_model_len
        tokens = (self.max_total_tokens or length) // page * page
        if tokens < 1:
            raise InvalidValue(
                f"block_size must be at most {self.max_total_tokens or length}, the tokens of"
                f" {deployment.model.name} with SGLang, got {page}"
            )
        slots, slot = self._slots(deployment, available_bytes), self._slot_bytes(deployment)
        requests = self._requests(deployment, tokens, available_bytes)
        num_layers = max(shape.num_layers for shape in self.ranks(deployment))
        return CachePlan(
            num_blocks=slots,
            block_size=length,
            kv_tokens=tokens,
            max_concurrency=min(tokens / length, float(requests)),
            max_model_len=length,
            num_blocks_per_rank=tuple(left // slot for left in available_bytes),
            block_bytes_per_rank=(slot,) * len(available_bytes),
            groups=(
                KvGroup(
                    kind="mamba",
                    num_layers=num_layers,
                    block_size=length,
                    page_size_bytes=slot // num_layers,
                    num_blocks=slots,
                    blocks_per_request=self._slots_per_request(deployment),
                ),
            ),
            layout=f"{num_layers} layers in slots of states, no K and V",
            notes=(
                f"at most {requests:,} requests run at once",
                "the blocks are slots of states: no layer keeps K and V, so that a token takes no"
                f" memory; their number, {tokens:,}, is engine.max_total_tokens, else one context",
            ),
            available_bytes_per_rank=tuple(available_bytes),
        )

    def _share_of_tokens(self, deployment: Deployment, size_bytes: int) -> Part:
        """What a model without K and V leaves empty."""
        why = "the slot of padding, and what is left beside the slots that were given"
        if self._given_slots(deployment) is None:
            why = (
                "the slot of padding, and the share of K and V, which no layer keeps (at"
                f" mamba_full_memory_ratio {self.mamba_full_memory_ratio:g})"
            )
        return terms.derived("kv_share", size_bytes, why)

    def _slots_per_request(self, deployment: Deployment) -> int:
        if self.disable_radix_cache:
            return 1
        return states.slots_per_request(
            fraction.release_of(self.version),
            self.mamba_radix_cache_strategy,
            deployment.model.architecture,
            overlaps=not self.disable_overlap_schedule,
            pages=deployment.block_size > 1,
        )

    @property
    def _swa_ratio(self) -> float:
        ratio = self.swa_full_tokens_ratio
        return DEFAULT_SWA_RATIO if ratio is None else ratio

    def _cell(self, deployment: Deployment, shape: RankShape) -> Cell:
        return pools.cell_of(deployment, shape, two_pools=not self.disable_hybrid_swa_memory)

    def _slot_bytes(self, deployment: Deployment) -> int:
        """Bytes of a state on the rank that holds most; slots are the same on all."""
        if not deployment.model.is_hybrid:
            return 0
        item = self.mamba_ssm_dtype.itemsize_bytes
        return max(pools.slot_bytes(deployment, s, item) for s in self.ranks(deployment))

    def _requests(self, deployment: Deployment, tokens: int, available_bytes: Sequence[int]) -> int:
        """The cap on running requests: given, or by tokens; states allow their own number."""
        if deployment.max_num_seqs != MOST_REQUESTS:
            cap = deployment.max_num_seqs
        else:
            by_context = int(tokens / deployment.max_model_len * REQUESTS_PER_CONTEXT)
            cap = min(max(min(by_context, MOST_REQUESTS), FEWEST_REQUESTS), tokens // 2)
        if deployment.model.is_hybrid:
            cap = min(
                cap, self._slots(deployment, available_bytes) // self._slots_per_request(deployment)
            )
        return max(cap, 1)

    def _given_slots(self, deployment: Deployment) -> int | None:
        """Slots that are not a share of memory; without a radix cache one a request is enough."""
        if self.max_mamba_cache_size is not None:
            return self.max_mamba_cache_size
        if self.disable_radix_cache and deployment.max_num_seqs != MOST_REQUESTS:
            return deployment.max_num_seqs
        return None

    def _slots(self, deployment: Deployment, available_bytes: Sequence[int]) -> int:
        """Slots of states that every rank holds: all there is, or what was split off before."""
        if deployment.model.is_attention_free:
            return min(available_bytes) // self._slot_bytes(deployment)
        given = self._given_slots(deployment)
        if given is not None:
            return given
        return self._slots_beside(min(available_bytes), self._slot_bytes(deployment))

    def _too_few_slots(
        self, deployment: Deployment, rank: int, available_bytes: Sequence[int]
    ) -> Refusal | None:
        """States of not even one request."""
        slot = self._slot_bytes(deployment)
        if not slot:
            return None
        slots = self._slots(deployment, available_bytes)
        needed = self._slots_per_request(deployment)
        if slots >= needed:
            return None
        return refusals.too_few_slots(deployment, rank, slots, needed, slot)

    def _states_line(self, deployment: Deployment, available_bytes: Sequence[int]) -> str:
        slots = self._slots(deployment, available_bytes)
        convolution, recurrent = layers.state_elements(deployment, self.ranks(deployment)[0])
        conv = (slots + 1) * convolution * deployment.dtype.itemsize_bytes / GIB
        ssm = (slots + 1) * recurrent * self.mamba_ssm_dtype.itemsize_bytes / GIB
        return (
            f"Mamba Cache is allocated. max_mamba_cache_size: {slots},"
            f" conv_state size: {conv:.2f}GB, ssm_state size: {ssm:.2f}GB"
        )

    def _slots_beside(self, tokens_bytes: int, slot: int) -> int:
        """Slots that were split off when `tokens_bytes` remained for tokens."""
        ratio = self.mamba_full_memory_ratio
        around = int(tokens_bytes * ratio // slot)
        for slots in range(max(0, around - 3), around + 4):
            rest = tokens_bytes + (slots + 1) * slot
            if pools.slots_of(rest, slot, ratio) == slots:
                return slots
        return max(0, around - 1)

    def _notes(self, knobs: Knobs) -> list[str]:
        notes = []
        kinds = {knobs.model.layer_type(i) for i in range(knobs.model.num_hidden_layers)}
        mixed = kinds & set(layers.WINDOWED) and kinds - set(layers.WINDOWED)
        if mixed and knobs.model.model_type not in KNOWN_TWO_POOLS:
            notes.append(
                f"unverified: a pool of its own for the windows of {knobs.model.model_type}"
            )
        if knobs.util is None and self.share_of_total is None:
            if fraction.release_of(self.version) < fraction.FORMULA_SINCE:
                notes.append("unverified: mem_fraction_static by tp, as releases before 0.5 had it")
            else:
                notes.append(
                    "automatic mem_fraction_static; unverified: the card's capacity is taken as"
                    " the driver's total, and prefill graphs by the list of sizes of 0.5.9"
                )
            if knobs.model.tower_parameters:
                notes.append("unverified: the lower automatic fraction of vision models")
        if knobs.model.is_hybrid:
            notes.append(f"unverified: recurrent states in {self.mamba_ssm_dtype.name}")
        return notes


def _interval(deployment: Deployment, profile: Profile) -> str:
    """The fractions between which weights, a token and a forward fit."""
    free = max(deployment.free_bytes, 1)
    loaded = profile.weights_bytes + profile.non_torch_bytes
    low = math.ceil(loaded / free * 1000) / 1000
    high = math.floor((1 - profile.activation_bytes / free) * 1000) / 1000
    if low < high:
        return f"mem_fraction_static fits between {low:g} and {high:g}"
    return "no mem_fraction_static fits: weights and a forward exceed what is free"


def _page_size(knobs: Knobs) -> int:
    """1, or what the sparse or latent kernels of a card force."""
    mla = knobs.model.mla
    blackwell = (knobs.gpu.compute_capability or "").startswith("10.")
    if mla is not None and (mla.index_head_dim is not None or blackwell):
        return 64
    return 1


def _graph_rows(deployment: Deployment) -> int:
    return min(deployment.max_num_seqs, deployment.max_num_batched_tokens, 256)


def _group(
    kind: str, num_layers: int, page: int, token_bytes: int, tokens: int, kept: int
) -> KvGroup:
    return KvGroup(
        kind=kind,
        num_layers=num_layers,
        block_size=page,
        page_size_bytes=token_bytes * page // max(num_layers, 1),
        num_blocks=tokens // page,
        blocks_per_request=-(-kept // page),
    )
