"""The vLLM engine plugin."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from kvexp.contract import (
    AUTO_FIT,
    UNDER_LOAD,
    CachePlan,
    Deployment,
    Engine,
    InvalidValue,
    Knobs,
    KvGroup,
    Part,
    Profile,
    Provenance,
    Quota,
    RankShape,
    Refusal,
    cache,
    check_count,
    gib,
    parse_bytes_of,
    share_of_total,
    terms,
)
from kvexp_vllm import (
    activation,
    buffers,
    defaults,
    fitted,
    flags,
    graphs,
    kv_formats,
    lines,
    lora,
    multimodal,
    notes,
    offload,
    parts,
    speculation,
    states,
)
from kvexp_vllm.fitted import Estimate
from kvexp_vllm.rules import VersionRules, version_rules
from kvexp_vllm.weights import Loaded, Options, weights_memory


@dataclass
class Vllm(Engine):
    """vLLM at any version from 0.5 on; memory terms fitted by version, with intervals.

    `usage`: serve (the API server's batch defaults) or llm (the LLM class's).
    `v2_model_runner`: null for the version's default, or forced (VLLM_USE_V2_MODEL_RUNNER).
    `estimate_cudagraphs`: whether the estimate of graphs is subtracted, null for the version's
    default (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS).
    `flashinfer_sampler`: top-k and top-p by FlashInfer's kernel (VLLM_USE_FLASHINFER_SAMPLER); null
    for the version's default, from 0.8 to 0.11.0 where it is installed (the low end). It counts on
    the V1 engine's V1 runner.
    `runner`: `pooling` makes embeddings, without an output head and a sampler; auto serves text.
    `expandable_segments`: torch's allocator rounds no tensor up (PYTORCH_CUDA_ALLOC_CONF).
    `async_scheduling`: batches in flight overlap, as is the default.
    `enable_expert_parallel`: whole experts on each rank of all replicas instead of slices of all.
    `fully_sharded_loras`: both matrices of an adapter are split over the ranks.
    `cudagraph_mode`: none, piecewise, full, full_decode_only or full_and_piecewise;
    `compilation_mode`: 0 without torch.compile, 3 with (the level before 0.12); null for the
    version's own.
    `decode_context_parallel_size`, `disable_hybrid_kv_cache_manager`, `num_gpu_blocks_override`,
    `disable_custom_all_reduce`, `skip_mm_profiling` (no item passes its encoder in the profile),
    `kv_cache_memory_bytes`, `cudagraph_capture_sizes`, `max_cudagraph_capture_size`,
    `cpu_offload_gb` (GiB a card), `enable_chunked_prefill`, `performance_mode`,
    `enable_prefix_caching`, `mamba_cache_mode` and `mamba_block_size` (how often recurrent states
    are kept), `mamba_cache_dtype` and `mamba_ssm_cache_dtype` (auto, float32, bfloat16, float16):
    the engine's own options of these names. `mm_encoder_tp_mode`: `weights` splits encoders over
    the ranks; `data` has them whole on each rank, which share the items.
    `share_of_total`: `util` by the name that all engines know, for comparisons.
    """

    version: str = "0.26.0"
    usage: str = "serve"
    v2_model_runner: bool | None = None
    estimate_cudagraphs: bool | None = None
    flashinfer_sampler: bool | None = None
    runner: str = "auto"
    expandable_segments: bool = False
    async_scheduling: bool = True
    enable_expert_parallel: bool = False
    fully_sharded_loras: bool = False
    decode_context_parallel_size: int = 1
    disable_hybrid_kv_cache_manager: bool = False
    disable_custom_all_reduce: bool = False
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: Any = None
    cudagraph_capture_sizes: list[int] | None = None
    mm_encoder_tp_mode: str = "weights"
    skip_mm_profiling: bool = False
    max_cudagraph_capture_size: int | None = None
    cudagraph_mode: str | None = None
    compilation_mode: int | None = None
    cpu_offload_gb: float = 0.0
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    mamba_cache_mode: str | None = None
    mamba_block_size: int | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    performance_mode: str = defaults.BALANCED
    share_of_total: float | None = None

    counts: ClassVar[tuple[str, ...]] = ("dp", "pp_partition", "lora", "speculative", "mm")

    def __post_init__(self) -> None:
        named = ("cudagraph_mode", "mm_encoder_tp_mode", "performance_mode", "mamba_cache_mode")
        for name in ("runner", *named):
            value = getattr(self, name)
            setattr(self, name, value if value is None else value.lower())

    @property
    def rules(self) -> VersionRules:
        """The facts of the version's column, with what the options make of them."""
        rules = version_rules(self.version)
        if self.runner == defaults.POOLING:
            rules = replace(rules, pools=True)
        if self.flashinfer_sampler is not None and not rules.is_v0:
            rules = replace(rules, flashinfer_samples=self.flashinfer_sampler)
        return rules

    @property
    def _estimates_graphs(self) -> str:
        """The rule of the release, or of whoever sets the variable for it."""
        rule = self.rules.estimates_graphs
        if self.estimate_cudagraphs is False:
            return "never"
        return "v1_runner" if self.estimate_cudagraphs and rule == "never" else rule

    def uses_v2_runner(self, deployment: Deployment) -> bool:
        """Whether a model runs on the V2 model runner (`use_v2_model_runner`)."""
        if self.v2_model_runner is not None:
            return self.v2_model_runner
        if self.rules.pools and self.rules.v2_runner != "all":
            return False
        model, drafts = deployment.model, deployment.speculation
        if drafts is not None and drafts.method == "dspark":
            return True
        if drafts is not None and (
            drafts.method not in speculation.ON_V2_RUNNER
            or (drafts.method == "eagle3" and deployment.pp > 1)
        ):
            return False
        listed = model.architecture in self.rules.v2_architectures
        quantized = deployment.quantization is not None or model.quantization_config is not None
        return {
            "none": False,
            "listed_unquantized": listed and not quantized,
            "listed": listed,
            "dense": listed or not (model.is_hybrid or model.moe is not None),
            "all": True,
        }[self.rules.v2_runner]

    def _runner(self, deployment: Deployment) -> str:
        """What runs the model, as terms.yaml names it."""
        if self.rules.is_v0:
            return "v0"
        return "v2" if self.uses_v2_runner(deployment) else "v1"

    def _profiles_items(self, deployment: Deployment) -> bool:
        """Whether items pass through their encoder in the profile run."""
        takes = self.rules.v2_profiles_images or not self.uses_v2_runner(deployment)
        return takes and not self.skip_mm_profiling

    def resolve(self, knobs: Knobs, name: str) -> Deployment:
        """See `Engine.resolve`."""
        rules = self.rules
        if self.usage not in defaults.USAGES:
            raise InvalidValue(
                f"engine.usage must be one of {', '.join(defaults.USAGES)}, got {self.usage!r}"
            )
        defaults.check_block_size(knobs)
        defaults.check_parallel(knobs)
        defaults.check_replicas(knobs, expert_parallel=self.enable_expert_parallel)
        defaults.check_context_parallel(knobs, self.decode_context_parallel_size)
        multimodal.check_encoder_mode(self.mm_encoder_tp_mode)
        adapters, drafts = lora.room(knobs), speculation.resolve(knobs)
        if self.fully_sharded_loras:
            lora.check_sharding(knobs, adapters, expert_parallel=self.enable_expert_parallel)
        if self.num_gpu_blocks_override is not None:
            check_count("engine.num_gpu_blocks_override", self.num_gpu_blocks_override)
        self._cache_memory_bytes()
        offload.check(self.cpu_offload_gb, self.version, rules, lora=adapters is not None)
        graphs.check(self._graphs)
        defaults.check_choice("performance_mode", self.performance_mode, defaults.PERFORMANCE_MODES)
        defaults.check_choice("runner", self.runner, defaults.RUNNERS)
        unasked = {item.name: item.default for item in fields(self)}
        flags.check(knobs, drafts, self._options, unasked)
        prefixes = states.asked(self._options)
        dtype, dtype_note = defaults.compute_dtype(knobs, self.version)
        quantization = terms.weight_format(knobs)
        kv_dtype = kv_formats.resolve(knobs, dtype, self.version)
        skipped = kv_formats.skip_layers(knobs.model, kv_dtype)
        length, limits = defaults.max_model_len(knobs), multimodal.limits(knobs, rules)
        tokens, seqs = defaults.batch_defaults(
            knobs,
            rules,
            self.usage,
            length,
            self.enable_chunked_prefill,
            times=2 if self.performance_mode == defaults.THROUGHPUT else 1,
            of_item=multimodal.least_tokens(knobs.model, limits, self.version),
        )
        speculation.check_batch(drafts, tokens, seqs, lora=adapters is not None)
        if not knobs.enforce_eager:
            graphs.check_largest(self._graphs, rules, self.version, tokens)
        block_size = kv_formats.aligned_block_size(
            knobs.block_size or defaults.block_size(knobs, kv_dtype), self.version, skipped
        )
        gpu = knobs.gpu
        deployment = Deployment(
            model=defaults.cached_model(knobs.model, self.version),
            gpu=gpu,
            engine=name,
            engine_version=self.version,
            usage=self.usage,
            dtype=dtype,
            quantization=quantization,
            kv_dtype=kv_dtype,
            kv_skip_layers=skipped,
            block_size=block_size,
            states=states.caching(knobs, prefixes, drafts, block_size, length),
            util=share_of_total(knobs, self.share_of_total, default=rules.util),
            max_model_len=length,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            tp=knobs.tp,
            pp=knobs.pp,
            dp=knobs.dp,
            pp_partition=tuple(knobs.pp_partition) if knobs.pp_partition else None,
            lora=adapters,
            speculation=drafts,
            mm_limits=limits,
            enforce_eager=knobs.enforce_eager or graphs.is_eager(self._graphs, rules),
            compiled=graphs.compiles(self._graphs, rules),
            auto_fit=knobs.max_model_len == AUTO_FIT,
            total_bytes=gpu.total_bytes,
            free_bytes=terms.free_at_start(knobs),
            used_by_others_bytes=gpu.used_by_others_bytes,
            notes=(
                *notes.of_model(knobs.model),
                *((dtype_note,) if dtype_note else ()),
                *speculation.notes(knobs.pp, drafts),
                *notes.of_replicas(knobs, expert_parallel=self.enable_expert_parallel),
            ),
        )
        states.check(deployment)
        v2_runner = self.uses_v2_runner(deployment)
        offloaded = offload.note(deployment, rules, self.cpu_offload_gb, v2_runner=v2_runner)
        profiled = self._profiles_items(deployment)
        said = (
            *(offloaded, flags.note(deployment), multimodal.note(deployment, profiled=profiled)),
            *states.notes(deployment, prefixes),
            *kv_formats.notes(deployment),
            *notes.of_card(deployment, marlin_capability=rules.marlin_capability),
        )
        return replace(
            deployment,
            flags=self.flags(deployment),
            notes=(*deployment.notes, *filter(None, said)),
        )

    def flags(self, deployment: Deployment) -> str:
        """See `Engine.flags`."""
        return flags.command(deployment, self._options)

    def ranks(self, deployment: Deployment) -> tuple[RankShape, ...]:
        """Pipeline stages in order, the tensor-parallel ranks of a stage side by side."""
        return terms.stages(deployment)

    def predict_weights(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_weights`."""
        return parts.weights_of(deployment, self._loaded(deployment, shape), self.rules)

    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_activation`."""
        passes = self._passes(deployment, shape)
        peak = activation.peak(deployment, shape, self.rules, passes)
        rows = min(deployment.max_num_seqs, deployment.max_num_batched_tokens)
        return parts.predicted(
            "activation",
            f"peak of the {peak.phase}: {deployment.max_num_batched_tokens} tokens, {rows} rows",
            Estimate(
                low_bytes=peak.low_bytes,
                size_bytes=peak.size_bytes,
                high_bytes=peak.high_bytes,
                source=peak.source,
                confirmed=peak.is_confirmed,
            ),
        )

    def _passes(self, deployment: Deployment, shape: RankShape) -> activation.Passes:
        is_v0 = self.rules.is_v0
        return activation.Passes(
            v2_runner=self.uses_v2_runner(deployment),
            takes_items=self._profiles_items(deployment),
            shares_items=self.mm_encoder_tp_mode == "data",
            returned_bytes=self._loaded(deployment, shape).returned_bytes if is_v0 else 0,
        )

    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_non_torch`."""
        v2_runner = self.uses_v2_runner(deployment)
        graphed = bool(self.graph_batch_sizes(deployment))
        growth = fitted.non_torch(deployment, v2_runner=v2_runner, graphed=graphed)
        if not self.rules.charges_whole_device:
            why = "growth over the baseline: kernels and library handles"
            return parts.predicted("non_torch", why, growth)
        before = sum(part.size_bytes for part in self._before_baseline(deployment))
        before += deployment.used_by_others_bytes
        return parts.predicted(
            "non_torch",
            f"all that is in use on the device, {gib(before)} of context, communicators and other"
            " processes included",
            replace(
                growth,
                low_bytes=growth.low_bytes + before * 4 // 5,
                size_bytes=growth.size_bytes + before,
                high_bytes=growth.high_bytes + before * 6 // 5,
            ),
        )

    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_cudagraph`."""
        estimates, v2_runner = self._estimates_graphs, self.uses_v2_runner(deployment)
        nothing, captured = "", graphs.captured(deployment, self.rules, self._graphs)
        if not captured.sizes:
            nothing = "eager: no graphs" if deployment.enforce_eager else "no size to capture"
        elif estimates == "never":
            said = "engine.estimate_cudagraphs=false" if self.estimate_cudagraphs is False else ""
            nothing = f"{said or f'vLLM {self.version}'} subtracts no graph memory"
        elif estimates == "v1_runner" and v2_runner:
            nothing = "the V2 model runner subtracts no graph memory, capture still takes some"
        if nothing:
            return parts.predicted("cudagraph", nothing, Estimate.exactly(0, ""))
        return parts.predicted(
            "cudagraph",
            f"the runner's estimate for {len(captured.sizes)} sizes",
            fitted.graphs(deployment, "estimate", captured, self._runner(deployment)),
        )

    def beyond_budget(
        self, deployment: Deployment, shape: RankShape, groups: Sequence[KvGroup]
    ) -> tuple[Part, ...]:
        """See `Engine.beyond_budget`."""
        captured = graphs.captured(deployment, self.rules, self._graphs)
        capture = (
            fitted.graphs(deployment, "actual", captured, self._runner(deployment))
            if captured.sizes
            else Estimate.exactly(0, "")
        )
        taken = parts.predicted("graphs", _capture_of(captured.sizes), capture)
        charged = self.rules.charges_whole_device
        before = () if charged else self._before_baseline(deployment)
        if not self.rules.charges_adapters:
            before += parts.adapters(deployment, self._loaded(deployment, shape))
        if self.rules.is_v0:
            return *before, taken
        v2_runner = self.uses_v2_runner(deployment)
        return (
            *before,
            parts.predicted(
                "runner_buffers",
                "the runner's state of each request, allocated between load and profile",
                buffers.runner(deployment, shape, v2_runner=v2_runner),
            ),
            parts.derived(
                "block_tables",
                buffers.block_tables(deployment, groups, v2_runner=v2_runner),
                "block numbers of the longest requests, for each group of layers",
            ),
            parts.predicted(
                "fragments",
                "freed blocks that the loader's temporaries pin",
                buffers.fragments(deployment, shape, self.rules),
            ),
            *kv_formats.workspace(deployment),
            taken,
            *self._items(deployment, shape),
        )

    def _items(self, deployment: Deployment, shape: RankShape) -> tuple[Part, ...]:
        """What the images of a step take under load, where the profile had none."""
        found = activation.items(deployment, shape, self.rules, self._passes(deployment, shape))
        if found is None:
            return ()
        return (
            Part(
                name=UNDER_LOAD,
                size_bytes=found.size_bytes,
                provenance=Provenance.assumed,
                reason="what a step of items takes in the encoder beyond the profile's peak, and"
                f" text does not; {found.source}",
                low_bytes=found.low_bytes,
                high_bytes=found.high_bytes,
            ),
        )

    def cached_bytes(self, deployment: Deployment, profile: Profile) -> int:
        """See `Engine.cached_bytes`."""
        v2_runner = self.uses_v2_runner(deployment)
        lasting = activation.lasting_bytes(deployment, self.rules)
        return lasting + buffers.cached(deployment, self.rules, v2_runner=v2_runner)

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
                async_scheduling=self.async_scheduling and _overlaps(deployment),
                v2_model_runner=self.uses_v2_runner(deployment),
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

    def refuse_capture(self, deployment: Deployment, plan: CachePlan) -> Refusal | None:
        """Fewer blocks than requests (`resolve_cudagraph_mode_and_sizes`), of recurrent states."""
        recurrent = any(group.kind == states.KIND for group in plan.groups)
        requests, blocks = deployment.max_num_seqs, plan.num_blocks
        if not self.rules.state_for_each_request or not recurrent or requests <= blocks:
            return None
        if not graphs.captured(deployment, self.rules, self._graphs).whole:
            return None
        rank = max(range(len(plan.block_bytes_per_rank)), key=plan.block_bytes_per_rank.__getitem__)
        block_bytes = plan.block_bytes_per_rank[rank]
        return Refusal(
            kind="max_num_seqs_too_large",
            message=(
                f"max_num_seqs={requests} exceeds the {blocks} blocks of the cache, of which graphs"
                " of whole decoding steps need one of recurrent states a request; max_num_seqs may"
                f" be at most {blocks}"
            ),
            rank=rank,
            needed_bytes=requests * block_bytes,
            available_bytes=blocks * block_bytes,
        )

    def graph_batch_sizes(self, deployment: Deployment) -> tuple[int, ...]:
        """See `Engine.graph_batch_sizes`."""
        return graphs.captured(deployment, self.rules, self._graphs).sizes

    def largest_graph(self, count: int) -> int:
        """See `Engine.largest_graph`."""
        return graphs.largest_of(count, self.rules)

    def log_lines(self, deployment: Deployment, plan: CachePlan) -> tuple[str, ...]:
        """The engine core's lines about capacity, in the version's shape."""
        return lines.capacity(plan, self.rules)

    def _before_baseline(self, deployment: Deployment) -> tuple[Part, ...]:
        """What a rank has in use before its baseline."""
        gpu = deployment.gpu
        error = gpu.context_error_bytes
        context = Part(
            name="context",
            size_bytes=gpu.context_bytes,
            provenance=Provenance.assumed if error else Provenance.derived,
            reason="one CUDA context, in use before the baseline",
            low_bytes=gpu.context_bytes - error if error else None,
            high_bytes=gpu.context_bytes + error if error else None,
        )
        connected = parts.predicted(
            "communicators",
            "NCCL and all-reduce buffers, in use before the baseline",
            fitted.communicators(deployment, custom_all_reduce=not self.disable_custom_all_reduce),
        )
        return context, connected

    def _loaded(self, deployment: Deployment, shape: RankShape) -> Loaded:
        """What loading leaves on one rank."""
        v2_runner = self.uses_v2_runner(deployment)
        return weights_memory(
            deployment,
            shape,
            Options(
                rules=self.rules,
                expert_parallel=self.enable_expert_parallel,
                fully_sharded_loras=self.fully_sharded_loras,
                whole_encoders=self.mm_encoder_tp_mode == "data",
                expandable_segments=self.expandable_segments,
                offload_bytes=offload.limit_bytes(
                    deployment, self.rules, self.cpu_offload_gb, v2_runner=v2_runner
                ),
            ),
        )

    @property
    def _graphs(self) -> graphs.Asked:
        return graphs.Asked(
            sizes=self.cudagraph_capture_sizes,
            largest=self.max_cudagraph_capture_size,
            mode=self.cudagraph_mode,
            compilation_mode=self.compilation_mode,
            every_small=self.performance_mode == defaults.INTERACTIVITY,
        )

    @property
    def _options(self) -> dict[str, Any]:
        options = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**options, "kv_cache_memory_bytes": self._cache_memory_bytes() or None}

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


def _overlaps(deployment: Deployment) -> bool:
    """Whether steps may overlap: not with every method of speculation."""
    drafts = deployment.speculation
    return drafts is None or drafts.method in speculation.OVERLAPPED


def _capture_of(sizes: Sequence[int]) -> str:
    if not sizes:
        return "nothing is captured"
    return f"what capture of {len(sizes)} sizes up to {max(sizes)} takes"
