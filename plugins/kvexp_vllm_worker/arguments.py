"""A deployment in the words of vLLM's `EngineArgs`."""

from typing import Any

from kvexp.contract import Deployment, Engine, InvalidValue, Quantization
from kvexp_vllm_worker.processor import takes_items

DEFAULT_BLOCK_SIZE = 16
"""vLLM's own; given explicitly it would keep an attention backend from choosing another."""


def engine_arguments(deployment: Deployment, engine: Engine) -> dict[str, Any]:
    """Keyword arguments of `vllm.engine.arg_utils.EngineArgs`, the folders of models aside.

    Raises:
        InvalidValue: vLLM would measure nothing with these values, or cannot be given them.
    """
    if getattr(engine, "kv_cache_memory_bytes", None):
        raise InvalidValue(
            "with engine.kv_cache_memory_bytes vLLM measures nothing: leave it out for"
            " profiler=vllm"
        )
    if deployment.dp > 1:
        raise InvalidValue(
            f"profiler=vllm starts one replica: leave dp out, got dp={deployment.dp}"
        )
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": not takes_items(deployment),
        "dtype": deployment.dtype.value,
        "gpu_memory_utilization": deployment.util,
        "max_model_len": -1 if deployment.auto_fit else deployment.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
        "tensor_parallel_size": deployment.tp,
        "pipeline_parallel_size": deployment.pp,
        "enforce_eager": deployment.enforce_eager,
        **_quantization(deployment),
        **_adapters(deployment, engine),
        **_options(engine),
    }
    if deployment.speculation is not None:
        arguments["speculative_config"] = {
            "method": deployment.speculation.method,
            "num_speculative_tokens": deployment.speculation.num_tokens,
        }
    if deployment.mm_limits:
        arguments["limit_mm_per_prompt"] = dict(deployment.mm_limits)
    if deployment.kv_dtype.value != deployment.dtype.value:
        arguments["kv_cache_dtype"] = deployment.kv_dtype.value
    if deployment.block_size != DEFAULT_BLOCK_SIZE and not deployment.model.is_hybrid:
        arguments["block_size"] = deployment.block_size
    return arguments


def _quantization(deployment: Deployment) -> dict[str, Any]:
    """Matrices that are quantised while loading; a quantised checkpoint says so in its config."""
    asked = deployment.quantization
    if asked is None or deployment.model.quantization_config is not None:
        return {}
    if asked is not Quantization.fp8:
        raise InvalidValue(
            "profiler=vllm quantises to fp8 while loading; for"
            f" quantization={asked.name} give model=hf model.path=FOLDER of such a checkpoint"
        )
    return {"quantization": "fp8"}


def _adapters(deployment: Deployment, engine: Engine) -> dict[str, Any]:
    if deployment.lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": deployment.lora.max_loras,
        "max_lora_rank": deployment.lora.max_rank,
        "fully_sharded_loras": bool(getattr(engine, "fully_sharded_loras", False)),
    }


_UNSET = (
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "mamba_cache_mode",
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
)
"""Options that are null where vLLM decides."""


def _options(engine: Engine) -> dict[str, Any]:
    """Options of the engine that have the same name in vLLM, where they are not its default."""
    chosen = {
        name: getattr(engine, name, None)
        for name in (
            "enable_expert_parallel",
            "disable_hybrid_kv_cache_manager",
            "disable_custom_all_reduce",
            "num_gpu_blocks_override",
            "cpu_offload_gb",
        )
    }
    found = {name: value for name, value in chosen.items() if value}
    ranks = getattr(engine, "decode_context_parallel_size", 1)
    if ranks != 1:
        found["decode_context_parallel_size"] = ranks
    for name in _UNSET:
        if getattr(engine, name, None) is not None:
            found[name] = getattr(engine, name)
    mode = getattr(engine, "performance_mode", "balanced")
    if mode != "balanced":
        found["performance_mode"] = mode
    compilation = _compilation(engine)
    if compilation:
        found["compilation_config"] = compilation
    if getattr(engine, "async_scheduling", True) is False:
        found["async_scheduling"] = False
    return found


def _compilation(engine: Engine) -> dict[str, Any]:
    """What is compiled and captured, where the engine's options say so."""
    names = {"compilation_mode": "mode", "max_cudagraph_capture_size": "max_cudagraph_capture_size"}
    found = {there: getattr(engine, here, None) for here, there in names.items()}
    sizes, mode = (getattr(engine, f"cudagraph_{name}", None) for name in ("capture_sizes", "mode"))
    found["cudagraph_capture_sizes"] = None if sizes is None else list(sizes)
    found["cudagraph_mode"] = None if mode is None else mode.upper()
    return {name: value for name, value in found.items() if value is not None}
