"""The SGLang engine plugin."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kvexp.contract import (
    GIB,
    CachePlan,
    Deployment,
    DType,
    FreeMemoryEngine,
    InvalidValue,
    Knobs,
    KvGroup,
    Part,
    Profile,
    RankShape,
    Refusal,
    check_count,
    gib,
    layers,
    terms,
)
from kvexp_sglang import flags, fraction, load, lora, pools, refusals, speculation, states
from kvexp_sglang.flags import MOST_REQUESTS
from kvexp_sglang.pools import Cell, Pools
from kvexp_sglang.states import Slots

FEWEST_REQUESTS, REQUESTS_PER_CONTEXT = 2048, 512
MAX_PREFILL_TOKENS = 16384
KNOWN_TWO_POOLS = ("gpt_oss", "llama4_text")
DEFAULT_SWA_RATIO = 0.8


@dataclass
class Sglang(FreeMemoryEngine):
    """SGLang by the rules of 0.5.23; its fraction is of what is free before the weights load.

    `max_total_tokens`, `swa_full_tokens_ratio`, `disable_hybrid_swa_memory`,
    `mamba_full_memory_ratio`, `max_mamba_cache_size`, `mamba_ssm_dtype`, `disable_radix_cache`,
    `mamba_radix_cache_strategy` (`mamba_scheduler_strategy` before 0.5.14),
    `disable_overlap_schedule` and `lora_target_modules`: the engine's own options of those names.
    `num_draft_layers`: layers of a draft in a token's bytes; null: by `speculative` and release.
    """

    version: str = "0.5.23"
    num_draft_layers: int | None = None
    max_total_tokens: int | None = None
    swa_full_tokens_ratio: float | None = None
    disable_hybrid_swa_memory: bool = False
    mamba_full_memory_ratio: float = 0.9
    max_mamba_cache_size: int | None = None
    mamba_ssm_dtype: DType = DType.fp32
    disable_radix_cache: bool = False
    mamba_radix_cache_strategy: str = states.AUTO
    disable_overlap_schedule: bool = False
    lora_target_modules: list[str] | None = None

    counts: ClassVar[tuple[str, ...]] = ("dp", "pp_partition", "lora", "speculative")
    title: ClassVar[str] = "SGLang"
    base: ClassVar[str] = "free before load"
    fraction_name: ClassVar[str] = "mem_fraction_static"
    connects_before: ClassVar[bool] = True

    def settle(self, knobs: Knobs, name: str) -> Deployment:
        """See `FreeMemoryEngine.settle`."""
        release = self._release
        if release < pools.STATES_ALONE_SINCE:
            terms.check_attention(knobs.model, f"{self.title} {self.version}")
        if self.max_mamba_cache_size is not None:
            check_count("engine.max_mamba_cache_size", self.max_mamba_cache_size)
        for option in ("swa_full_tokens_ratio", "mamba_full_memory_ratio"):
            ratio = getattr(self, option)
            if ratio is not None and not 0 < ratio < math.inf:
                raise InvalidValue(f"engine.{option} must be above 0, got {ratio:g}")
        overlaps = not self.disable_overlap_schedule
        states.check(self.mamba_radix_cache_strategy, release, overlaps=overlaps)
        terms.check_parallel(knobs, self.title)
        length = terms.requested_len(knobs, self.title)
        longest = terms.context_len(knobs.model)
        if length > longest:
            raise InvalidValue(
                f"max_model_len must be at most {longest} for {knobs.model.name} with SGLang,"
                f" got {length}"
            )
        kv_dtype = terms.cache_dtype(knobs, self.title, tuple(flags.CACHE_DTYPES))
        chunk = knobs.max_num_batched_tokens or fraction.card_row(knobs.gpu.total_bytes).chunk
        drafts = speculation.resolve(knobs, release, self.num_draft_layers)
        util = knobs.util
        if util is None:
            method = None if drafts is None else drafts.method
            reserve = speculation.reserve_mib(method, release)
            util = fraction.automatic(knobs, self.version, chunk, reserve)
        most = MOST_REQUESTS if drafts is None else speculation.MAX_RUNNING_REQUESTS
        deployment = Deployment(
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
            max_num_seqs=knobs.max_num_seqs or most,
            tp=knobs.tp,
            pp=knobs.pp,
            dp=knobs.dp,
            pp_partition=tuple(knobs.pp_partition) if knobs.pp_partition else None,
            enforce_eager=knobs.enforce_eager,
            total_bytes=knobs.gpu.total_bytes,
            free_bytes=terms.free_at_start(knobs, after_communicator=self.connects_before),
            used_by_others_bytes=knobs.gpu.used_by_others_bytes,
            lora=lora.room(knobs, self.lora_target_modules, release),
            speculation=drafts,
            notes=(*knobs.model.notes, *self._notes(knobs)),
        )
        if self.free_after_load_bytes is None or knobs.gpu.free_bytes is not None:
            return deployment
        return replace(deployment, free_bytes=self._free_before_load(deployment))

    def _free_before_load(self, deployment: Deployment) -> int:
        """What is free after the load and what the load takes, where that alone is stated."""
        growth = load.growth(deployment, read=False)
        charged = self.charged(deployment, replace(self._predicted(deployment), non_torch=growth))
        after = self._size("free_after_load_bytes")
        assert after is not None
        before = after + sum(part.size_bytes for part in charged)
        return min(before, deployment.total_bytes)

    def flags(self, deployment: Deployment) -> str:
        """See `Engine.flags`."""
        return " ".join(flags.command(deployment, self))

    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """What the largest prefill takes; SGLang does not subtract it."""
        chunk = deployment.max_num_batched_tokens
        size = terms.forward_bytes(deployment, tokens=chunk, rows=_graph_rows(deployment))
        return terms.assumed("activation", size, f"a chunk of {chunk} tokens, {self.unverified}")

    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `load.growth`."""
        return load.growth(deployment, read=self.free_after_load_bytes is not None)

    def most_taken_until_pool(self, deployment: Deployment) -> int:
        """See `FreeMemoryEngine.most_taken_until_pool`."""
        return load.until_pool_bytes(deployment)

    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_cudagraph`."""
        return terms.derived("cudagraph", 0, "captured after the pool, nothing is subtracted")

    def charged(self, deployment: Deployment, profile: Profile) -> tuple[Part, ...]:
        """Weights, what they are served with and what loading takes; no forward runs before."""
        held = deployment.free_bytes - int(deployment.free_bytes * deployment.util)
        beside = [
            part
            for part in (
                speculation.part(deployment, self._release),
                lora.part(deployment, self.lora_target_modules),
            )
            if part is not None
        ]
        loaded = sum(p.size_bytes for p in (profile.weights, profile.non_torch, *beside))
        return (
            profile.non_torch,
            profile.weights,
            *beside,
            terms.derived(
                "activation",
                0,
                f"not subtracted: no forward runs before the pool; {gib(profile.activation_bytes)}"
                f" must fit into the {gib(held)} held back, graphs as well;"
                f" {fraction.interval(deployment.free_bytes, loaded, profile.activation_bytes)}",
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
        if not deployment.model.is_hybrid or rest <= 0:
            return (), rest
        counted = self._slots(deployment)
        slots, slot = counted.within(rest), counted.slot_bytes
        left = rest - counted.taken_bytes(slots)
        if deployment.model.is_attention_free and left > 0:
            return (self._share_of_tokens(counted, left + slot),), slots * slot
        parts = [
            terms.derived(
                "recurrent_states",
                (slots + 1) * slot,
                f"{slots:,} slots of {slot:,} bytes and one of padding",
            )
        ]
        if drafted := counted.drafted_bytes(slots):
            why = f"states of the {counted.verified} tokens that each request verifies at once"
            parts.append(terms.derived("drafted_states", drafted, why))
        return tuple(parts), left

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
                draft_bytes=self._draft_bytes(cell, deployment),
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
        if deployment.draft is not None:
            lines.append(speculation.log_line(deployment, plan.kv_tokens, slots))
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
        draft_bytes = self._draft_bytes(cells[rank], deployment)
        notes = [
            f"at most {requests:,} requests run at once",
            *speculation.plan_notes(deployment, self._release, tokens, draft_bytes),
        ]
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
        slot = self._slots(deployment).slot_bytes
        slots = self._num_slots(deployment, available_bytes)
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

    def _share_of_tokens(self, counted: Slots, size_bytes: int) -> Part:
        """What a model without K and V leaves empty."""
        why = "the slot of padding, and what is left beside the slots that were given"
        if counted.given is None:
            why = (
                "the slot of padding, and the share of K and V, which no layer keeps (at"
                f" mamba_full_memory_ratio {counted.share:g})"
            )
        return terms.derived("kv_share", size_bytes, why)

    def _slots_per_request(self, deployment: Deployment) -> int:
        if self.disable_radix_cache:
            return 1
        return states.slots_per_request(
            self._release,
            self.mamba_radix_cache_strategy,
            deployment.model.architecture,
            overlaps=not self.disable_overlap_schedule,
            pages=deployment.block_size > 1,
        )

    @property
    def _release(self) -> tuple[int, ...]:
        return fraction.release_of(self.version)

    @property
    def _swa_ratio(self) -> float:
        ratio = self.swa_full_tokens_ratio
        return DEFAULT_SWA_RATIO if ratio is None else ratio

    def _cell(self, deployment: Deployment, shape: RankShape) -> Cell:
        return pools.cell_of(deployment, shape, two_pools=not self.disable_hybrid_swa_memory)

    def _draft_bytes(self, cell: Cell, deployment: Deployment) -> int:
        return speculation.token_bytes(cell, deployment, self._release, self.num_draft_layers)

    def _slots(self, deployment: Deployment) -> Slots:
        """Slots by the rank that holds most of a state; they are the same on all."""
        item = self.mamba_ssm_dtype.itemsize_bytes
        return Slots(
            slot_bytes=max(pools.slot_bytes(deployment, s, item) for s in self.ranks(deployment)),
            per_request=self._slots_per_request(deployment),
            share=self.mamba_full_memory_ratio,
            given=self._given_slots(deployment),
            verified=speculation.verified(deployment),
            max_requests=deployment.max_num_seqs,
            jointly=self._release >= states.JOINTLY_SINCE,
        )

    def _requests(self, deployment: Deployment, tokens: int, available_bytes: Sequence[int]) -> int:
        """The cap on running requests: given, or by tokens; states allow their own number."""
        if deployment.max_num_seqs != MOST_REQUESTS:
            cap = deployment.max_num_seqs
        else:
            by_context = int(tokens / deployment.max_model_len * REQUESTS_PER_CONTEXT)
            cap = min(max(min(by_context, MOST_REQUESTS), FEWEST_REQUESTS), tokens // 2)
        if deployment.model.is_hybrid:
            slots = self._num_slots(deployment, available_bytes)
            cap = min(cap, slots // self._slots_per_request(deployment))
        return max(cap, 1)

    def _given_slots(self, deployment: Deployment) -> int | None:
        """Slots that are not a share of memory; without a radix cache one a request is enough."""
        if self.max_mamba_cache_size is not None:
            return self.max_mamba_cache_size
        if self.disable_radix_cache and deployment.max_num_seqs != MOST_REQUESTS:
            return deployment.max_num_seqs
        return None

    def _num_slots(self, deployment: Deployment, available_bytes: Sequence[int]) -> int:
        """Slots of states that every rank holds: all there is, or what was split off before."""
        counted, least = self._slots(deployment), min(available_bytes)
        if deployment.model.is_attention_free:
            return least // counted.slot_bytes
        return counted.beside(least)

    def _too_few_slots(
        self, deployment: Deployment, rank: int, available_bytes: Sequence[int]
    ) -> Refusal | None:
        """States of not even one request."""
        if not deployment.model.is_hybrid:
            return None
        slots, counted = self._num_slots(deployment, available_bytes), self._slots(deployment)
        if slots >= counted.per_request:
            return None
        needed, slot = counted.per_request, counted.slot_bytes
        return refusals.too_few_slots(deployment, rank, slots, needed, slot)

    def _states_line(self, deployment: Deployment, available_bytes: Sequence[int]) -> str:
        slots = self._num_slots(deployment, available_bytes)
        convolution, recurrent = layers.state_elements(deployment, self.ranks(deployment)[0])
        conv = (slots + 1) * convolution * deployment.dtype.itemsize_bytes / GIB
        ssm = (slots + 1) * recurrent * self.mamba_ssm_dtype.itemsize_bytes / GIB
        return (
            f"Mamba Cache is allocated. max_mamba_cache_size: {slots},"
            f" conv_state size: {conv:.2f}GB, ssm_state size: {ssm:.2f}GB"
        )

    def _notes(self, knobs: Knobs) -> list[str]:
        notes = []
        kinds = {knobs.model.layer_type(i) for i in range(knobs.model.num_hidden_layers)}
        mixed = kinds & set(layers.WINDOWED) and kinds - set(layers.WINDOWED)
        if mixed and knobs.model.model_type not in KNOWN_TWO_POOLS:
            notes.append(
                f"unverified: a pool of its own for the windows of {knobs.model.model_type}"
            )
        if knobs.util is None and self.share_of_total is None:
            if self._release < fraction.FORMULA_SINCE:
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
