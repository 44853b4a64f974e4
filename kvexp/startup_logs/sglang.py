"""Lines of SGLang; its GB are GiB."""

from kvexp.startup_logs.lines import Dialect, Introduction, Line

SGLANG = Dialect(
    engine="sglang",
    lines=(
        Line(r"server_args=ServerArgs\(", resets=True),
        Line(r"sglang(?:==|\s+version:?\s*|:\s+)v?(?P<engine_version>\d+\.\d+\S*)"),
        Line(r"Init torch distributed ends\. (?:elapsed=\S+ s, )?mem usage={init_dist_mem_gib} GB"),
        Line(r"Load weight begin\. avail mem={init_free_gib} GB"),
        Line(
            r"Load weight end\.(?:.*?dtype=torch\.(?P<weight_dtype>\w+),)?"
            r".*?avail mem={free_gib} GB(?:, mem usage={weights_gib} GB)?",
            after="free_gib",
        ),
        Line(
            r"Mamba Cache is allocated\. max_mamba_cache_size: {state_slots}, "
            r"conv_state size: {conv_state_gib}GB, ssm_state size: {ssm_state_gib}GB"
            r"(?:\s*intermediate_ssm_state_cache size: {draft_ssm_state_gib}GB)?"
        ),
        Line(
            r"KV Cache is allocated\..*?#tokens: {kv_tokens}, "
            r"(?:KV size: {available_kv_gib} GB|K size: {k_gib} GB, V size: {v_gib} GB)",
            after="avail_after_pool_gib",
        ),
        Line(r"SWAKVPool mem usage: {swa_pool_gib} GB"),
        Line(
            r"Memory pool end\. avail mem={avail_after_pool_gib} GB",
            after="avail_after_pool_gib",
        ),
        Line(
            r"Capture (?:target (?:decode|verify) )?(?:cuda|CUDA|npu) graph end\."
            r"(?:.*?mem usage={cudagraph_gib} GB)?.*?avail mem={avail_at_end_gib} GB"
        ),
        Line(
            r"Capture draft (?:decode )?(?:cuda|CUDA) graph end\..*?mem usage={draft_graph_gib} GB"
            r".*?avail mem={avail_at_end_gib} GB"
        ),
        Line(
            r"Capture draft extend (?:cuda|CUDA) graph end\."
            r".*?mem usage={draft_extend_graph_gib} GB.*?avail mem={avail_at_end_gib} GB"
        ),
        Line(
            r"max_total_num_tokens={kv_tokens}, chunked_prefill_size={max_num_batched_tokens}"
            r".*context_len={max_model_len}"
        ),
        Line(r"is larger than the profiled value {profiled_tokens}"),
        Line(r"RuntimeError: Not enough memory\b", outcome="no_cache_blocks"),
        Line(r"CUDA out of memory|OutOfMemoryError", outcome="oom"),
    ),
    arguments={
        "model": ("model_path", "model"),
        "weight_dtype": ("dtype",),
        "quantization": ("quantization",),
        "kv_cache_dtype": ("kv_cache_dtype",),
        "gpu_memory_utilization": ("mem_fraction_static",),
        "max_model_len": ("context_length",),
        "max_num_batched_tokens": ("chunked_prefill_size",),
        "max_num_seqs": ("max_running_requests",),
        "block_size": ("page_size",),
        "enforce_eager": ("disable_cuda_graph",),
        "tp": ("tp_size", "tensor_parallel_size"),
        "pp": ("pp_size", "pipeline_parallel_size"),
        "dp": ("dp_size", "data_parallel_size"),
    },
    introductions=(
        Introduction("ServerArgs(", is_complete=True, precedes=False),
        Introduction("sglang.launch_server ", is_command=True),
        Introduction("sglang serve ", is_command=True),
    ),
    ranks=r"^\[[\d-]+ [\d:.]+ ((?:DP\d+ )?(?:PP\d+ )?TP\d+|PP\d+)",
    aliases={
        "tp": "tp_size",
        "pp": "pp_size",
        "dp": "dp_size",
        "ep": "ep_size",
        "mem_fraction": "mem_fraction_static",
        "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
        "speculative_algo": "speculative_algorithm",
        "speculative_draft": "speculative_draft_model_path",
        "speculative_draft_model": "speculative_draft_model_path",
        "speculative_dflash_block_size": "speculative_num_draft_tokens",
    },
)
