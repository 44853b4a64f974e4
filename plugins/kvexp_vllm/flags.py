"""What to paste to start vLLM with a deployment's values, in the words of its release.

Flags are those of `engine/arg_utils.py`, `config` and `envs.py` of the wheels from 0.5.0 on.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from kvexp.contract import Deployment, InvalidValue, Knobs, Quantization, Speculation, drafts
from kvexp_vllm.defaults import BALANCED, compute_dtype
from kvexp_vllm.graphs import FULL, LARGEST_SINCE, NONE
from kvexp_vllm.rules import V1_COLUMNS, is_v0, patch_release_of

MODES_SINCE = (0, 10, 1)
SINCE: Mapping[str, tuple[int, int, int]] = {
    "pp": (0, 5, 1),
    "pp_partition": (0, 5, 4),
    "dp": (0, 8, 3),
    "kv_dtype=bf16": (0, 11, 0),
    "kv_dtype=fp16": (0, 18, 0),
    "kv_dtype=fp8_ds_mla": (0, 11, 1),
    "kv_dtype=turboquant_k8v4": (0, 20, 0),
    "kv_dtype=turboquant_4bit_nc": (0, 20, 0),
    "kv_dtype=turboquant_k3v4_nc": (0, 20, 0),
    "kv_dtype=turboquant_3bit_nc": (0, 20, 0),
    "kv_dtype=int8_per_token_head": (0, 20, 0),
    "kv_dtype=fp8_per_token_head": (0, 20, 0),
    "kv_dtype=nvfp4": (0, 20, 0),
    "kv_dtype=int4_per_token_head": (0, 25, 0),
    "mm.limits": (0, 5, 5),
    "speculative.method=mtp": (0, 7, 3),
    "speculative.method=eagle3": (0, 8, 5),
    "speculative.method=suffix": (0, 11, 1),
    "speculative.method=ngram_gpu": (0, 18, 0),
    "speculative.method=dspark": (0, 25, 0),
    "engine.v2_model_runner": (0, 12, 0),
    "engine.estimate_cudagraphs": (0, 18, 0),
    "engine.flashinfer_sampler": (0, 8, 0),
    "engine.async_scheduling": (0, 10, 0),
    "engine.runner": (0, 10, 0),
    "engine.cpu_offload_gb": (0, 5, 3),
    "engine.enable_expert_parallel": (0, 8, 0),
    "engine.decode_context_parallel_size": (0, 10, 2),
    "engine.disable_hybrid_kv_cache_manager": (0, 9, 1),
    "engine.kv_cache_memory_bytes": (0, 10, 2),
    "engine.mm_encoder_tp_mode": (0, 9, 1),
    "engine.skip_mm_profiling": (0, 10, 1),
    "engine.cudagraph_capture_sizes": (0, 6, 5),
    "engine.max_cudagraph_capture_size": (0, 9, 0),
    "engine.cudagraph_mode": (0, 6, 5),
    "engine.cudagraph_mode=full": (0, 9, 0),
    "engine.cudagraph_mode=full_decode_only": MODES_SINCE,
    "engine.cudagraph_mode=full_and_piecewise": MODES_SINCE,
    "engine.compilation_mode": (0, 6, 5),
    "engine.performance_mode": (0, 17, 0),
    "engine.mamba_cache_dtype": (0, 10, 2),
    "engine.mamba_ssm_cache_dtype": (0, 10, 2),
    "engine.mamba_block_size": (0, 11, 1),
    "engine.mamba_cache_mode": (0, 15, 0),
}
"""The first release that takes an option, or one value of it."""

SERVE_SINCE = (0, 5, 2)
LAST_V0 = (0, 10)
JSON_LIMITS_SINCE = (0, 8, 5)
ENCODER_MODE_SINCE = (0, 10, 2)
SPECULATIVE_CONFIG_SINCE = (0, 8, 2)
MTP_SINCE = (0, 11, 0)
"""The method by that name; before it a model's own layers draft where no other is named."""

NGRAM_WINDOW = 5  # tokens, which releases before 0.8.2 do not choose by themselves
LOADS_BITSANDBYTES_SINCE = (0, 8, 2)
SWITCHES = (
    "enable_expert_parallel",
    "disable_hybrid_kv_cache_manager",
    "disable_custom_all_reduce",
    "skip_mm_profiling",
)
NO_PREFIX_CACHING_SINCE = (0, 6, 5)
"""A switch that could not be turned off before, when it was off by default."""

UNLIMITED = 999  # items of a modality where no limit is given
WHILE_LOADING = (Quantization.fp8, Quantization.bitsandbytes)
"""Formats that vLLM makes of a checkpoint that is not quantised; the others a checkpoint states."""


def check(
    knobs: Knobs,
    speculation: Speculation | None,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> None:
    """Whether the release takes what is asked for beside the defaults.

    Raises:
        InvalidValue: it is older than an option, or newer than the V0 engine that it names.
    """
    version, release = options["version"], patch_release_of(options["version"])
    if version.lower().endswith("-v0") and release[:2] > LAST_V0:
        raise InvalidValue(
            "engine.version must be 0.10 or older with -v0, whose engine ended there,"
            f" got {version!r}"
        )
    named = () if speculation is None else (f"speculative.method={speculation.method}",)
    for name in (*_asked(knobs, options, defaults), *named):
        first = SINCE.get(name, release)
        if release < first:
            raise InvalidValue(
                f"{name} needs vLLM {_written(first)} or newer, got engine.version={version}"
            )


def _asked(knobs: Knobs, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """Keys of what is neither off nor a default, and each with its value."""
    dtype, _ = compute_dtype(knobs, options["version"])
    shared: dict[str, Any] = {
        "pp": knobs.pp > 1,
        "dp": knobs.dp > 1,
        "pp_partition": knobs.pp_partition,
        "mm.limits": knobs.mm.limits.given,
        f"kv_dtype={knobs.kv_dtype.name}": knobs.kv_dtype.name != dtype.name,
    }
    yield from (key for key, is_asked in shared.items() if is_asked)
    for name, value in options.items():
        if value != defaults[name] and value is not None and value is not False:
            yield from (f"engine.{name}", f"engine.{name}={value}")


def _written(release: tuple[int, int, int]) -> str:
    return ".".join(map(str, release if release[2] else release[:2]))


def command(deployment: Deployment, options: Mapping[str, Any]) -> str:
    """One line for a shell; `options` are those of the engine, by their names."""
    words = (*_variables(deployment, options), *_values(deployment, options), *_options(options))
    return " ".join(words)


def note(deployment: Deployment) -> str:
    """The checkpoint that is assumed where the line names one of another format, or nothing."""
    asked = deployment.quantization
    if asked is None or asked in WHILE_LOADING or deployment.model.quantization_config is not None:
        return ""
    served = deployment.model.checkpoint
    if _states_format(served, asked.value):
        return ""
    return f"weights of a checkpoint in {asked.value}, to be served in place of {served}"


def _states_format(checkpoint: str, name: str) -> bool:
    """Whether a repository's name says that it is in this format."""
    words = (name, name.removeprefix("nv"), "int4", "4bit", "int8", "8bit")
    return any(word in checkpoint.lower() for word in words)


def _variables(deployment: Deployment, options: Mapping[str, Any]) -> Iterator[str]:
    """The environment that stands before the command."""
    release = patch_release_of(options["version"])
    runner = options["v2_model_runner"]
    if is_v0(options["version"]) and release >= V1_COLUMNS[0].first:
        yield "VLLM_USE_V1=0"
    if runner is not None and release >= SINCE["engine.v2_model_runner"]:
        yield f"VLLM_USE_V2_MODEL_RUNNER={runner:d}"
    flashinfer = options["flashinfer_sampler"]
    if flashinfer is not None:
        yield f"VLLM_USE_FLASHINFER_SAMPLER={flashinfer:d}"
    if options["expandable_segments"]:
        yield "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    estimates = options["estimate_cudagraphs"]
    if estimates is not None and release >= SINCE["engine.estimate_cudagraphs"]:
        yield f"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS={estimates:d}"
    if deployment.pp_partition is not None:
        yield f"VLLM_PP_LAYER_PARTITION={','.join(map(str, deployment.pp_partition))}"


def _values(deployment: Deployment, options: Mapping[str, Any]) -> Iterator[str]:
    """What every engine has, by vLLM's names."""
    release = patch_release_of(options["version"])
    yield f"{_start(release)} {shlex.quote(deployment.model.checkpoint)}"
    yield f"--gpu-memory-utilization {deployment.util:g}"
    yield f"--block-size {deployment.block_size} --max-model-len {deployment.max_model_len}"
    yield f"--max-num-batched-tokens {deployment.max_num_batched_tokens}"
    yield f"--max-num-seqs {deployment.max_num_seqs}"
    yield f"--tensor-parallel-size {deployment.tp} --pipeline-parallel-size {deployment.pp}"
    if deployment.dp > 1:
        yield f"--data-parallel-size {deployment.dp}"
    if deployment.kv_dtype.name != deployment.dtype.name:
        yield f"--kv-cache-dtype {deployment.kv_dtype.value}"
    if deployment.dtype is not deployment.model.torch_dtype:
        yield f"--dtype {deployment.dtype.value}"
    yield from _quantization(deployment, release)
    if deployment.enforce_eager:
        yield "--enforce-eager"
    if deployment.lora is not None:
        room = deployment.lora
        yield f"--enable-lora --max-loras {room.max_loras} --max-lora-rank {room.max_rank}"
        if options["fully_sharded_loras"]:
            yield "--fully-sharded-loras"
    yield from _speculative(deployment, release)
    limited = {name: limit for name, limit in deployment.mm_limits.items() if limit < UNLIMITED}
    if limited and release >= SINCE["mm.limits"]:
        yield f"--limit-mm-per-prompt {_limits(limited, release)}"


def _start(release: tuple[int, int, int]) -> str:
    if release >= SERVE_SINCE:
        return "vllm serve"
    return "python -m vllm.entrypoints.openai.api_server --model"


def _quantization(deployment: Deployment, release: tuple[int, int, int]) -> Iterator[str]:
    asked = deployment.quantization
    if asked is None or asked not in WHILE_LOADING or deployment.model.quantization_config:
        return
    yield f"--quantization {asked.value}"
    if asked is Quantization.bitsandbytes and release < LOADS_BITSANDBYTES_SINCE:
        yield "--load-format bitsandbytes"


def _limits(limited: Mapping[str, int], release: tuple[int, int, int]) -> str:
    if release >= JSON_LIMITS_SINCE:
        return _json(limited)
    return ",".join(f"{name}={limit}" for name, limit in limited.items())


def _options(options: Mapping[str, Any]) -> Iterator[str]:
    """Options of the engine that are not its defaults."""
    release = patch_release_of(options["version"])
    for name in SWITCHES:
        if options[name]:
            yield f"--{name.replace('_', '-')}"
    if options["runner"] != "auto":
        yield f"--runner {options['runner']}"
    for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if options[name]:
            yield f"--{name.replace('_', '-')} {options[name]}"
    if options["decode_context_parallel_size"] != 1:
        yield f"--decode-context-parallel-size {options['decode_context_parallel_size']}"
    if options["mm_encoder_tp_mode"] == "data":
        named = release >= ENCODER_MODE_SINCE
        yield "--mm-encoder-tp-mode data" if named else "--enable-multimodal-encoder-data-parallel"
    if options["enable_chunked_prefill"] is not None:
        yield _chunked(release, options["enable_chunked_prefill"])
    yield from _prefix_caching(release, options)
    if options["performance_mode"] != BALANCED:
        yield f"--performance-mode {options['performance_mode']}"
    if not options["async_scheduling"] and release >= SINCE["engine.async_scheduling"]:
        yield "--no-async-scheduling"
    if options["cpu_offload_gb"]:
        yield f"--cpu-offload-gb {options['cpu_offload_gb']:g}"
    if options["max_cudagraph_capture_size"] is not None and release < LARGEST_SINCE:
        yield f"--cuda-graph-sizes {options['max_cudagraph_capture_size']}"
    compilation = dict(_compilation(options, release))
    if compilation:
        yield f"--compilation-config {_json(compilation)}"


def _compilation(
    options: Mapping[str, Any], release: tuple[int, int, int]
) -> Iterator[tuple[str, Any]]:
    """Entries of `compilation_config`, by the release's names."""
    mode = options["cudagraph_mode"]
    if options["compilation_mode"] is not None:
        yield "mode" if release >= (0, 12, 0) else "level", options["compilation_mode"]
    if mode is not None and release >= MODES_SINCE:
        yield "cudagraph_mode", mode.upper()
    elif mode == FULL:
        yield "full_cuda_graph", True
    elif mode == NONE:
        yield "use_cudagraph", False
    if options["cudagraph_capture_sizes"] is not None:
        yield "cudagraph_capture_sizes", list(options["cudagraph_capture_sizes"])
    if options["max_cudagraph_capture_size"] is not None and release >= LARGEST_SINCE:
        yield "max_cudagraph_capture_size", options["max_cudagraph_capture_size"]


def _prefix_caching(release: tuple[int, int, int], options: Mapping[str, Any]) -> Iterator[str]:
    asked = options["enable_prefix_caching"]
    if asked is not None and (asked or release >= NO_PREFIX_CACHING_SINCE):
        yield "--enable-prefix-caching" if asked else "--no-enable-prefix-caching"
    modes = ("mamba_cache_mode", "mamba_block_size")
    for name in (*modes, "mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        if options[name] is not None:
            yield f"--{name.replace('_', '-')} {options[name]}"


def _chunked(release: tuple[int, int, int], chunked: bool) -> str:
    """A switch that took its value after `=` before 0.8.5."""
    if chunked:
        return "--enable-chunked-prefill"
    takes_value = release < (0, 8, 5)
    return "--enable-chunked-prefill=False" if takes_value else "--no-enable-chunked-prefill"


def _speculative(deployment: Deployment, release: tuple[int, int, int]) -> Iterator[str]:
    speculation = deployment.speculation
    if speculation is None:
        return
    draft = speculation.draft if speculation.method not in drafts.OWN else None
    if release >= SPECULATIVE_CONFIG_SINCE:
        model = {} if draft is None else {"model": draft.checkpoint}
        is_named = speculation.method != "mtp" or release >= MTP_SINCE
        method = {"method": speculation.method} if is_named else {}
        config = {**method, **model, "num_speculative_tokens": speculation.num_tokens}
        yield f"--speculative-config {_json(config)}"
        return
    if draft is not None:
        yield f"--speculative-model {shlex.quote(draft.checkpoint)}"
    if speculation.method == "ngram":
        yield f"--speculative-model '[ngram]' --ngram-prompt-lookup-max {NGRAM_WINDOW}"
    yield f"--num-speculative-tokens {speculation.num_tokens}"


def _json(value: Mapping[str, Any]) -> str:
    return shlex.quote(json.dumps(value))
