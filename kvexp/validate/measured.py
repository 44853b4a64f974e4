"""Starts measured from inside vLLM, as records: every figure in whole bytes."""

import re
from collections.abc import Mapping
from typing import Any

from kvexp.units import GIB

_OPTIONS = ("enable_expert_parallel", "disable_custom_all_reduce")
_ESTIMATE = re.compile(r"estimated maximum model length is (\d+)")


def is_measured(record: Mapping[str, Any]) -> bool:
    """Whether a line is such a measurement: a `case` with the engine's `args` and `config`."""
    return all(key in record for key in ("case", "args", "config", "versions"))


def as_record(measured: Mapping[str, Any]) -> dict[str, Any]:
    """A measurement as a record; of several ranks the one with the least for its cache.

    Raises:
        KeyError: a figure is missing.
        TypeError: a figure is none.
    """
    args, config = measured["args"], measured["config"]
    ranks = measured.get("ranks") or [measured]
    rank = min(ranks, key=lambda each: each["available_kv_cache_memory_bytes"])
    first = rank["init_snapshot"]
    tp, pp = args.get("tensor_parallel_size", 1), args.get("pipeline_parallel_size", 1)
    flags = [f"{name}={args[name]}" for name in _OPTIONS if name in args]
    error = measured.get("error") or ""
    estimate = _ESTIMATE.search(error)
    inputs = {
        "engine_version": measured["versions"]["vllm"],
        "model": args["model"],
        "gpu": None,
        "gpu_total_gib": first["total_memory"] / GIB,
        "num_gpus": tp * pp,
        "tp": tp,
        "pp": pp,
        "weight_dtype": args.get("dtype"),
        "quantization": args.get("quantization"),
        "kv_cache_dtype": args.get("kv_cache_dtype", "auto"),
        "gpu_memory_utilization": args["gpu_memory_utilization"],
        "max_model_len": measured["max_model_len"],
        "max_num_batched_tokens": config["max_num_batched_tokens"],
        "max_num_seqs": config["max_num_seqs"],
        "block_size": args.get("block_size"),
        "enforce_eager": args.get("enforce_eager", False),
        "other_flags": "; ".join([*flags, f"v2_model_runner={config['v2']}"]),
    }
    return {
        "id": measured["case"],
        "engine": "vllm",
        **inputs,
        "explicit": list(inputs),
        "outputs": {
            "num_gpu_blocks": measured.get("num_blocks"),
            "kv_tokens": measured.get("kv_tokens"),
            "max_concurrency": measured.get("max_concurrency"),
            "available_kv_gib": rank["available_kv_cache_memory_bytes"] / GIB,
            "weights_gib": rank["weights_memory"] / GIB,
            "non_torch_gib": rank["non_torch_memory"] / GIB,
            "activation_peak_gib": rank["peak_activation_memory"] / GIB,
            "error": "max_len_too_large" if estimate is not None else "none",
        },
        "extra": {
            "init_free_gib": first["free_memory"] / GIB,
            "cudagraph_estimated_gib": rank["cudagraph_memory_estimate"] / GIB,
            **({} if estimate is None else {"estimated_max_len": int(estimate[1])}),
        },
    }
