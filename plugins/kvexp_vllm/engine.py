"""The vLLM engine plugin."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvexp.contract import (
    AUTO_FIT,
    MIB,
    CachePlan,
    Deployment,
    DType,
    Engine,
    InvalidValue,
    Knobs,
    KvDtype,
    Model,
    Part,
    Profile,
    Provenance,
    Quantization,
    Quota,
    RankShape,
    Refusal,
    cache,
    gib,
    parse_bytes_of,
    share_of_total,
    weights,
)
from kvexp_vllm import activation, defaults
from kvexp_vllm.rules import MEASURED, VersionRules, release_of, version_rules
from kvexp_vllm.weights import adjusted_bytes, weights_memory_bytes

MEASURED_TYPES = (
    "llama",
    "mistral",
    "phi3",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2",
)
"""Model types whose weights were measured."""

MEASURED_CARD = "NVIDIA H200"
NON_TORCH_BYTES = 230 * MIB
NON_TORCH_PARALLEL_BYTES = 66 * MIB  # NCCL's start has caused the rest before the baseline
V2_MOE = (
    "DeepseekV2ForCausalLM",
    "GraniteMoeForCausalLM",
    "InklingForCausalLM",
    "LongcatFlashNgramForCausalLM",
    "Qwen2MoeForCausalLM",
)
"""Architectures with experts that run on the V2 model runner by default in 0.26."""

SWAP_SPACE_BYTES = 4 << 30  # v0, for each card
V1_GRAPH_ESTIMATE_BYTES = 532676608  # llama3-8b, 51 sizes


@dataclass
class Vllm(Engine):
    """vLLM at any version from 0.5 on; memory terms as measured on 0.26.

    `usage`: serve (the API server's batch defaults) or llm (the LLM class's).
    `v2_model_runner`: null for the version's default, or forced (VLLM_USE_V2_MODEL_RUNNER).
    `async_scheduling`: batches in flight overlap, as is the default.
    `enable_expert_parallel`: whole experts on each tensor-parallel rank instead of slices of all.
    `decode_context_parallel_size`, `disable_hybrid_kv_cache_manager`, `num_gpu_blocks_override`,
    `kv_cache_memory_bytes`: the engine's own options of those names.
    `share_of_total`: `util` by the name that all engines know, for comparisons.
    """

    version: str = "0.26.0"
    usage: str = "serve"
    v2_model_runner: bool | None = None
    async_scheduling: bool = True
    enable_expert_parallel: bool = False
    decode_context_parallel_size: int = 1
    disable_hybrid_kv_cache_manager: bool = False
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: Any = None
    share_of_total: float | None = None

    @property
    def rules(self) -> VersionRules:
        """The facts of the version's column."""
        return version_rules(self.version)

    def uses_v2_runner(self, model: Model) -> bool:
        """Whether a model runs on the V2 model runner (`use_v2_model_runner`)."""
        if self.v2_model_runner is not None:
            return self.v2_model_runner
        plain = not model.is_hybrid and (model.moe is None or model.architecture in V2_MOE)
        return self.rules.v2_runner == "all" or (self.rules.v2_runner == "dense" and plain)

    def resolve(self, knobs: Knobs, name: str) -> Deployment:
        """See `Engine.resolve`."""
        rules = self.rules
        if self.usage not in defaults.USAGES:
            raise InvalidValue(
                f"engine.usage must be one of {', '.join(defaults.USAGES)}, got {self.usage!r}"
            )
        defaults.check_block_size(knobs)
        defaults.check_parallel(knobs)
        defaults.check_context_parallel(knobs, self.decode_context_parallel_size)
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 1:
            raise InvalidValue(
                "engine.num_gpu_blocks_override must be at least 1,"
                f" got {self.num_gpu_blocks_override}"
            )
        self._cache_memory_bytes()
        dtype, dtype_note = defaults.compute_dtype(knobs)
        quantization = _quantization(knobs)
        kv_dtype = _kv_dtype(knobs, dtype)
        length = defaults.max_model_len(knobs)
        tokens, seqs = defaults.batch_defaults(knobs, rules, self.usage, length)
        gpu = knobs.gpu
        free = gpu.free_bytes
        if free is None:
            free = max(0, gpu.total_bytes - gpu.context_bytes - gpu.used_by_others_bytes)
        deployment = Deployment(
            model=knobs.model,
            gpu=gpu,
            engine=name,
            engine_version=self.version,
            usage=self.usage,
            dtype=dtype,
            quantization=quantization,
            kv_dtype=kv_dtype,
            block_size=knobs.block_size or defaults.block_size(knobs, kv_dtype),
            util=share_of_total(knobs, self.share_of_total, default=rules.util),
            max_model_len=length,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            tp=knobs.tp,
            pp=knobs.pp,
            enforce_eager=knobs.enforce_eager,
            auto_fit=knobs.max_model_len == AUTO_FIT,
            total_bytes=gpu.total_bytes,
            free_bytes=free,
            used_by_others_bytes=gpu.used_by_others_bytes,
            notes=(*self._notes(knobs), *((dtype_note,) if dtype_note else ())),
        )
        return replace(deployment, flags=self.flags(deployment))

    def flags(self, deployment: Deployment) -> str:
        """See `Engine.flags`."""
        words = [
            f"vllm serve {deployment.model.hf_id} --gpu-memory-utilization {deployment.util:g}",
            f"--block-size {deployment.block_size} --max-model-len {deployment.max_model_len}",
            f"--max-num-batched-tokens {deployment.max_num_batched_tokens}",
            f"--max-num-seqs {deployment.max_num_seqs}",
            f"--tensor-parallel-size {deployment.tp} --pipeline-parallel-size {deployment.pp}",
        ]
        if deployment.kv_dtype.name != deployment.dtype.name:
            words.append(f"--kv-cache-dtype {deployment.kv_dtype.value}")
        if deployment.dtype is not deployment.model.torch_dtype:
            words.append(f"--dtype {deployment.dtype.value}")
        if deployment.quantization is not None:
            words.append(f"--quantization {deployment.quantization.value}")
        if deployment.enforce_eager:
            words.append("--enforce-eager")
        return " ".join(words)

    def ranks(self, deployment: Deployment) -> tuple[RankShape, ...]:
        """Pipeline stages in order, the tensor-parallel ranks of a stage side by side."""
        shapes: list[RankShape] = []
        ranges = cache.pp_layer_ranges(deployment.model.num_hidden_layers, deployment.pp)
        for pp_rank, (first, last) in enumerate(ranges):
            for tp_rank in range(deployment.tp):
                shapes.append(
                    RankShape(
                        rank=len(shapes),
                        tp_rank=tp_rank,
                        pp_rank=pp_rank,
                        first_layer=first,
                        num_layers=last - first,
                    )
                )
        return tuple(shapes)

    def predict_weights(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_weights`."""
        model, doubts = deployment.model, []
        if deployment.quantization is Quantization.fp8:
            doubts.append("fp8 scales and residue from one measured case")
        elif deployment.quantization is not None:
            doubts.append(f"no measurement of {deployment.quantization.name} weights")
        if model.model_type not in MEASURED_TYPES:
            doubts.append("no measurement of this model type")
        if adjusted_bytes(deployment):
            doubts.append("scaled to the checkpoint's tensors, which the formula does not describe")
        known = weights.is_known(model)
        return Part(
            name="weights",
            size_bytes=weights_memory_bytes(
                deployment, shape, whole_experts=self.enable_expert_parallel
            ),
            provenance=Provenance.derived if known else Provenance.assumed,
            reason="; ".join(["tensors of this rank through the loader's allocator", *doubts]),
        )

    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_activation`."""
        peak = activation.peak(deployment, shape, v2_runner=self.uses_v2_runner(deployment.model))
        doubts = self._doubts(deployment)
        if not peak.exact:
            doubts.append("rule fitted to few cases")
        rows = min(deployment.max_num_seqs, deployment.max_num_batched_tokens)
        return _predicted(
            "activation",
            peak.size_bytes,
            f"peak of the {peak.phase}: {deployment.max_num_batched_tokens} tokens, {rows} rows",
            doubts,
        )

    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_non_torch`."""
        doubts = self._doubts(deployment)
        if not deployment.enforce_eager and not self.uses_v2_runner(deployment.model):
            doubts.append("graphs took 8 to 46 MiB more on the V1 runner")
        alone = deployment.num_ranks == 1
        size = NON_TORCH_BYTES if alone else NON_TORCH_PARALLEL_BYTES
        if deployment.model.mla is not None:
            size += 2 * MIB if alone else 4 * MIB
        elif not alone and not self.uses_v2_runner(deployment.model):
            size += 2 * MIB
        if deployment.num_ranks > 2:
            doubts.append("measured for two ranks")
        return _predicted(
            "non_torch", size, "growth over the baseline: kernels and library handles", doubts
        )

    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_cudagraph`."""
        estimates = self.rules.estimates_graphs
        if deployment.enforce_eager:
            return _predicted("cudagraph", 0, "eager: no graphs", [])
        if estimates == "never":
            return _predicted("cudagraph", 0, f"vLLM {self.version} subtracts no graph memory", [])
        if estimates == "v1_runner" and self.uses_v2_runner(deployment.model):
            return _predicted(
                "cudagraph",
                0,
                "the V2 model runner subtracts no graph memory, capture still takes some",
                [],
            )
        return _predicted(
            "cudagraph",
            V1_GRAPH_ESTIMATE_BYTES,
            "estimate of llama3-8b with 51 sizes",
            [*self._doubts(deployment), "V1 runner of vLLM 0.26"],
        )

    def refuse_start(self, deployment: Deployment) -> Refusal | None:
        """Free memory at the baseline below the request (`request_memory`)."""
        requested = self._requested_bytes(deployment)
        if not self.rules.checks_free_memory or deployment.free_bytes >= requested:
            return None
        reachable = deployment.free_bytes / deployment.total_bytes
        return Refusal(
            kind="free_memory_too_low",
            message=(
                f"{gib(deployment.free_bytes)} of {gib(deployment.total_bytes)} are free at start,"
                f" less than the {gib(requested)} that util={deployment.util:g} requests; util may"
                f" be at most {math.floor(reachable * 10000) / 10000:g}"
            ),
            rank=0,
            needed_bytes=requested,
            available_bytes=deployment.free_bytes,
        )

    def quota(self, deployment: Deployment, profile: Profile) -> Quota:
        """requested - (non-torch + weights + activation) - graph estimate."""
        requested = self._requested_bytes(deployment)
        given = self._cache_memory_bytes()
        if given:
            return self._given_quota(profile, given)
        taken = sum(part.size_bytes for part in profile.parts)
        if not self.rules.requested_is_whole:
            available = int(deployment.total_bytes * deployment.util - taken)
            requested = available + taken
        return Quota(
            base="total",
            requested_bytes=requested,
            available_bytes=requested - taken,
            parts=profile.parts,
        )

    def plan(self, deployment: Deployment, available_bytes: Sequence[int]) -> CachePlan | Refusal:
        """Divide by the planner of vLLM at this version."""
        options = cache.PlanOptions(
            in_flight_tokens=cache.max_in_flight_tokens(
                deployment.max_num_batched_tokens,
                pp=deployment.pp,
                async_scheduling=self.async_scheduling,
                v2_model_runner=self.uses_v2_runner(deployment.model),
            ),
            auto_fit=deployment.auto_fit,
            hybrid=not self.disable_hybrid_kv_cache_manager,
            dcp=self.decode_context_parallel_size,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
        )
        return cache.plan(
            deployment,
            self.ranks(deployment),
            available_bytes,
            rules=cache.rules_for(self.version),
            options=options,
        )

    def log_lines(self, deployment: Deployment, plan: CachePlan) -> tuple[str, ...]:
        """The engine core's lines about capacity, in the version's shape."""
        length = plan.max_model_len
        if self.rules.log_shape == "v0":
            swapped = SWAP_SPACE_BYTES // max(plan.block_bytes_per_rank[0], 1)
            return (
                f"# GPU blocks: {plan.num_blocks}, # CPU blocks: {swapped}",
                f"Maximum concurrency for {length} tokens per request: {plan.max_concurrency:.2f}x",
            )
        size = f"GPU KV cache size: {plan.kv_tokens:,} tokens"
        concurrency = (
            f"Maximum concurrency for {length:,} tokens per request: {plan.max_concurrency:.2f}x"
        )
        if self.rules.log_shape == "one_line":
            return (f"{size}, {concurrency}",)
        return size, concurrency

    def _requested_bytes(self, deployment: Deployment) -> int:
        product = deployment.total_bytes * deployment.util
        return math.ceil(product) if self.rules.requested_is_whole else int(product)

    def _cache_memory_bytes(self) -> int:
        """`kv_cache_memory_bytes`, where 0 counts as unset."""
        if self.kv_cache_memory_bytes is None:
            return 0
        return parse_bytes_of("engine.kv_cache_memory_bytes", self.kv_cache_memory_bytes)

    def _given_quota(self, profile: Profile, given: int) -> Quota:
        """The cache gets what the user gave; util plays no part beyond the check at start."""
        taken = sum(part.size_bytes for part in profile.parts)
        return Quota(
            base="kv_cache_memory_bytes",
            requested_bytes=taken + given,
            available_bytes=given,
            parts=profile.parts,
        )

    def _notes(self, knobs: Knobs) -> tuple[str, ...]:
        notes = list(knobs.model.notes)
        if not weights.is_known(knobs.model):
            kind = knobs.model.model_type
            notes.append(f"the structure of model_type {kind!r} is assumed: a gated decoder")
        if knobs.model.head_dim is None:
            notes.append(f"head_dim = hidden_size / heads = {knobs.model.head_size}")
        if knobs.model.num_key_value_heads is None:
            notes.append(f"num_key_value_heads = num_attention_heads = {knobs.model.kv_heads}")
        if release_of(self.version) != MEASURED:
            notes.append(f"memory terms of vLLM {self.version} follow the rules measured on 0.26")
        return tuple(notes)

    def _doubts(self, deployment: Deployment) -> list[str]:
        """Why a measured constant may not hold for this card and version."""
        doubts = []
        if deployment.gpu.name != MEASURED_CARD:
            doubts.append(f"taken from {MEASURED_CARD}")
        if release_of(self.version) != MEASURED:
            doubts.append("taken from vLLM 0.26")
        return doubts


def _predicted(name: str, size_bytes: int, reason: str, doubts: list[str]) -> Part:
    return Part(
        name=name,
        size_bytes=size_bytes,
        provenance=Provenance.assumed if doubts else Provenance.derived,
        reason="; ".join([reason, *doubts]),
    )


def _quantization(knobs: Knobs) -> Quantization | None:
    """The checkpoint's own format, or the one asked for.

    Raises:
        InvalidValue: they differ.
    """
    own = knobs.model.quantization_config
    if own is None or knobs.quantization in (None, own.method):
        return knobs.quantization if own is None else own.method
    assert knobs.quantization is not None
    raise InvalidValue(
        f"quantization must be null or {own.method.name} for {knobs.model.name}, whose checkpoint"
        f" is stored so, got {knobs.quantization.name}"
    )


def _kv_dtype(knobs: Knobs, dtype: DType) -> KvDtype:
    """Read auto as the checkpoint's KV scheme, else the compute dtype."""
    if knobs.kv_dtype is KvDtype.auto:
        mla = knobs.model.mla
        if mla is not None and mla.index_head_dim is not None:
            return KvDtype.fp8  # the sparse kernels' own format
        return knobs.model.kv_cache_scheme or KvDtype[dtype.name]
    if knobs.kv_dtype is KvDtype.fp32 and dtype is not DType.fp32:
        raise InvalidValue(f"kv_dtype=fp32 needs dtype=fp32 with vLLM, got dtype={dtype.name}")
    return knobs.kv_dtype
