"""The keys of a record: what a start was given, and what it printed."""

from collections.abc import Mapping

INPUTS: Mapping[str, tuple[type, ...]] = {
    "engine_version": (str,),
    "model": (str,),
    "gpu": (str,),
    "gpu_total_gib": (int, float),
    "num_gpus": (int,),
    "tp": (int,),
    "pp": (int,),
    "dp": (int,),
    "weight_dtype": (str,),
    "quantization": (str,),
    "kv_cache_dtype": (str,),
    "gpu_memory_utilization": (int, float),
    "max_model_len": (int,),
    "max_num_batched_tokens": (int,),
    "max_num_seqs": (int,),
    "block_size": (int,),
    "enforce_eager": (bool,),
    "other_flags": (str,),
}
"""What a value may be; null where it is not known."""

OUTPUTS = (
    "num_gpu_blocks",
    "kv_tokens",
    "available_kv_gib",
    "max_concurrency",
    "weights_gib",
    "non_torch_gib",
    "activation_peak_gib",
    "cudagraph_gib",
)
