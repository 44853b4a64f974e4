"""Lines of LMDeploy; MB in TurboMind's lines are MiB."""

from kvexp.startup_logs.lines import Dialect, Introduction, Line

LMDEPLOY = Dialect(
    engine="lmdeploy",
    lines=(
        Line(r"input backend=(?P<backend>\w+), backend_config=", resets=True),
        Line(r"lmdeploy:?\s+v?(?P<engine_version>\d+\.\d+\S*)"),
        Line(r"\[BlockManager\] block_size = {block_mb} MB"),
        Line(r"\[BlockManager\] max_block_count = {num_gpu_blocks}"),
        Line(
            r"Object cache budget: {available_kv_mb} MB from (?:free|cacheable) {free_mb} MB "
            r"and ratio {fraction}"
        ),
        Line(
            r"No enough blocks for `?session_len`? \({max_model_len}\), "
            r"`?session_len`? truncated to {kv_tokens}",
            outcome="max_len_too_large",
        ),
        Line(r"CacheConfig\(.*num_gpu_blocks={num_gpu_blocks}"),
        Line(r"No enough blocks\.|No enough gpu memory", outcome="no_cache_blocks"),
        Line(
            r"CUDA out of memory|CUDA runtime error: out of memory|OutOfMemoryError", outcome="oom"
        ),
    ),
    arguments={
        "model": ("model", "model_path"),
        "weight_dtype": ("dtype",),
        "quantization": ("model_format",),
        "gpu_memory_utilization": ("cache_max_entry_count",),
        "max_model_len": ("session_len",),
        "max_num_batched_tokens": ("max_prefill_token_num",),
        "max_num_seqs": ("max_batch_size",),
        "block_size": ("cache_block_seq_len", "block_size"),
        "tp": ("tp",),
    },
    introductions=(
        Introduction("TurbomindEngineConfig(", is_complete=True, precedes=False),
        Introduction("PytorchEngineConfig(", is_complete=True, precedes=False),
        Introduction("lmdeploy serve api_server ", is_command=True),
    ),
    ranks=r"(?!)",
)
