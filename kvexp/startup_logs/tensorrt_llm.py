"""Lines of TensorRT-LLM: its C++ runtime and its PyTorch backend."""

from kvexp.startup_logs.lines import Dialect, Introduction, Line

TENSORRT_LLM = Dialect(
    engine="tensorrt-llm",
    lines=(
        Line(r"TensorRT[- ]LLM version: (?P<engine_version>\S+)", resets=True),
        Line(r"/(?P<model>models--[\w.-]+)/snapshots/"),
        Line(r"Engine version (?P<engine_version>\S+) found in the config file"),
        Line(r"MPI size: {tp},"),
        Line(r"TRTGptModel maxBatchSize: {max_num_seqs}"),
        Line(r"TRTGptModel maxNumTokens: {max_num_batched_tokens}"),
        Line(r"TRTGptModel maxSequenceLen: {max_model_len}"),
        Line(r"max_seq_len is not specified, using inferred value {max_model_len}"),
        Line(
            r"max_seq_len=\d+, max_num_requests=\d+, max_num_tokens={max_num_batched_tokens}"
            r"(?:, max_batch_size={max_num_seqs})?"
        ),
        # memory
        Line(
            r"calculating max tokens in paged kv cache: total: {gpu_total_gib} GiB, "
            r"available: {free_gib} GiB"
        ),
        Line(
            r"model weights(?: loading)? ?\(inside torch\) in memory "
            r"usage profiling: {weights_gib} GiB"
        ),
        Line(
            r"during inference \(inside torch\) in memory usage "
            r"profiling: {activation_peak_gib} GiB"
        ),
        Line(r"outside torch \(.*\) in memory usage profiling: {outside_torch_gib} GiB"),
        Line(
            r"Peak memory during memory usage profiling \(torch \+ non-torch\): {peak_gib} GiB, "
            r"available KV cache memory when calculating max tokens: {available_kv_gib} GiB"
            r"(?:, fraction is set {fraction})?(?:.*device total memory {gpu_total_gib} GiB)?"
        ),
        # capacity
        Line(r"Number of blocks in KV cache primary pool: {num_gpu_blocks}"),
        Line(r"tokens per block={block_size}, primary blocks={num_gpu_blocks}"),
        Line(r"Number of tokens per block: {block_size}"),
        Line(r"Allocate {available_kv_bytes} bytes for k/v cache"),
        Line(r"Using {kv_tokens} (?:total )?tokens in paged KV cache"),
        Line(
            r"\[MemUsageChange\] Allocated {available_kv_gib} GiB for max tokens in paged KV cache "
            r"\({kv_tokens}\)"
        ),
        Line(r"maxTokensInPagedKvCache must be large enough", outcome="no_cache_blocks"),
        Line(r"CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation", outcome="oom"),
    ),
    arguments={
        "model": ("model", "model_dir"),
        "weight_dtype": ("dtype",),
        "kv_cache_dtype": ("kv_cache_dtype", "kv_cache_config.dtype"),
        "gpu_memory_utilization": (
            "kv_cache_free_gpu_memory_fraction",
            "kv_cache_free_gpu_mem_fraction",
            "free_gpu_memory_fraction",
        ),
        "max_model_len": ("max_seq_len",),
        "max_num_batched_tokens": ("max_num_tokens",),
        "max_num_seqs": ("max_batch_size",),
        "tp": ("tensor_parallel_size", "tp_size"),
        "pp": ("pipeline_parallel_size", "pp_size"),
    },
    introductions=(
        Introduction("engine args:", is_complete=True),
        Introduction("trtllm-serve ", is_command=True),
        Introduction("LlmArgs(", is_complete=True),
    ),
    begins_once=False,
    groups=("kv_cache_config", "build_config"),
    ranks=r"\[RANK (\d+)\]",
)
