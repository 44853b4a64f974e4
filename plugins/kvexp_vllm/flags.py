"""What to paste to start vLLM with a deployment's values."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvexp.contract import Deployment
from kvexp_vllm.defaults import BALANCED
from kvexp_vllm.graphs import FULL, MODES_SINCE, NONE
from kvexp_vllm.rules import patch_release_of


def command(deployment: Deployment, options: Mapping[str, Any]) -> str:
    """One line for a shell; `options` are those of the engine, by their names."""
    words = [
        f"vllm serve {deployment.model.hf_id} --gpu-memory-utilization {deployment.util:g}",
        f"--block-size {deployment.block_size} --max-model-len {deployment.max_model_len}",
        f"--max-num-batched-tokens {deployment.max_num_batched_tokens}",
        f"--max-num-seqs {deployment.max_num_seqs}",
        f"--tensor-parallel-size {deployment.tp} --pipeline-parallel-size {deployment.pp}",
    ]
    if deployment.pp_partition is not None:
        layers = ",".join(map(str, deployment.pp_partition))
        words.insert(0, f"VLLM_PP_LAYER_PARTITION={layers}")
    if deployment.dp > 1:
        words.append(f"--data-parallel-size {deployment.dp}")
    if deployment.kv_dtype.name != deployment.dtype.name:
        words.append(f"--kv-cache-dtype {deployment.kv_dtype.value}")
    if deployment.dtype is not deployment.model.torch_dtype:
        words.append(f"--dtype {deployment.dtype.value}")
    if deployment.quantization is not None:
        words.append(f"--quantization {deployment.quantization.value}")
    if deployment.enforce_eager:
        words.append("--enforce-eager")
    if deployment.lora is not None:
        room = deployment.lora
        words.append(f"--enable-lora --max-loras {room.max_loras} --max-lora-rank {room.max_rank}")
        if options["fully_sharded_loras"]:
            words.append("--fully-sharded-loras")
    if deployment.speculation is not None:
        words.append(f"--speculative-config '{_speculative(deployment)}'")
    limited = {name: limit for name, limit in deployment.mm_limits.items() if limit < UNLIMITED}
    if limited:
        words.append(f"--limit-mm-per-prompt '{json.dumps(limited)}'")
    if options["v2_model_runner"] is not None:
        words.insert(0, f"VLLM_USE_V2_MODEL_RUNNER={options['v2_model_runner']:d}")
    return " ".join((*words, *_options(options)))


def _options(options: Mapping[str, Any]) -> Iterator[str]:
    """Options of the engine that are not its defaults."""
    for name in SWITCHES:
        if options[name]:
            yield f"--{name.replace('_', '-')}"
    for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if options[name]:
            yield f"--{name.replace('_', '-')} {options[name]}"
    if options["decode_context_parallel_size"] != 1:
        yield f"--decode-context-parallel-size {options['decode_context_parallel_size']}"
    if options["mm_encoder_tp_mode"] != "weights":
        yield f"--mm-encoder-tp-mode {options['mm_encoder_tp_mode']}"
    if options["enable_chunked_prefill"] is not None:
        yield _chunked(options["version"], options["enable_chunked_prefill"])
    if options["performance_mode"] != BALANCED:
        yield f"--performance-mode {options['performance_mode']}"
    if not options["async_scheduling"]:
        yield "--no-async-scheduling"
    if options["cpu_offload_gb"]:
        yield f"--cpu-offload-gb {options['cpu_offload_gb']:g}"
    compilation = dict(_compilation(options))
    if compilation:
        yield f"--compilation-config '{json.dumps(compilation)}'"


def _compilation(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries of `compilation_config`, by the release's names."""
    release = patch_release_of(options["version"])
    mode = options["cudagraph_mode"]
    if options["compilation_mode"] is not None:
        yield "mode" if release >= (0, 12, 0) else "level", options["compilation_mode"]
    if mode is not None and release >= MODES_SINCE:
        yield "cudagraph_mode", mode.upper()
    elif mode == FULL:
        yield "full_cuda_graph", True
    elif mode == NONE:
        yield "use_cudagraph", False
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if options[name] is not None:
            value = options[name]
            yield name, value if isinstance(value, int) else list(value)


def _chunked(version: str, chunked: bool) -> str:
    """A switch that took its value after `=` before 0.8.5."""
    if chunked:
        return "--enable-chunked-prefill"
    takes_value = patch_release_of(version) < (0, 8, 5)
    return "--enable-chunked-prefill=False" if takes_value else "--no-enable-chunked-prefill"


SWITCHES = (
    "enable_expert_parallel",
    "disable_hybrid_kv_cache_manager",
    "disable_custom_all_reduce",
    "skip_mm_profiling",
)
UNLIMITED = 999  # items of a modality where no limit is given


def _speculative(deployment: Deployment) -> str:
    drafts = deployment.speculation
    assert drafts is not None
    config: dict[str, object] = {"method": drafts.method}
    if drafts.draft is not None and drafts.method != "mtp":
        config["model"] = drafts.draft.hf_id
    return json.dumps({**config, "num_speculative_tokens": drafts.num_tokens})
