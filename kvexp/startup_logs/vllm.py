"""Lines of vLLM, V0 and V1, from 0.2 on."""

from kvexp.startup_logs.lines import Dialect, Introduction, Line

VLLM = Dialect(
    engine="vllm",
    lines=(
        Line(
            r"Initializing an? (?:(?P<generation>V[01]) )?LLM engine(?: "
            r"\(v(?P<engine_version>[^)]+)\))?",
            resets=True,
        ),
        Line(r"vLLM API server version v?(?P<engine_version>\d\S*)"),
        Line(r"vLLM Version\s*: v?(?P<engine_version>\d\S*)"),
        Line(r"█ +version (?P<engine_version>\d\S*)"),
        Line(r"vllm==(?P<engine_version>\d\S*)"),
        Line(r"VLLM_USE_V2_MODEL_RUNNER=['\"]?(?P<v2_model_runner>[01])", precedes=True),
        Line(  # as set, not as the engine speaks of it
            r"(?<!set )(?<![\w(])VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS="
            r"['\"]?(?P<estimate_cudagraphs>[01])['\"]?(?=[\s\\]|$)",
            precedes=True,
        ),
        Line(  # as set, not as torch proposes it when memory is out
            r"(?<!setting )PYTORCH_(?:CUDA_)?ALLOC_CONF['\"]?(?:=|: +)['\"]?(?:[\w:.]+,)*"
            r"expandable_segments:(?P<expandable_segments>True|False)",
            precedes=True,
        ),
        Line(r"Using FlashInfer for top-p & top-k sampling", states=(("flashinfer_sampler", 1),)),
        Line(
            r"FlashInfer is (?:not available|available, but it is not enabled)\. Falling back to"
            r"|FlashInfer top-p(?:/| & )top-k sampling (?:is available but|sampler is) disabled",
            states=(("flashinfer_sampler", 0),),
        ),
        Line(r"GPU 0(?:-\d+)?: (?P<gpu>[^(\n]+?)\s*(?:\(|$)"),
        Line(r"device_name=(?P<gpu>[\w-]+)(?:,|\.json)"),
        Line(
            r"Chunked prefill is enabled with max_num_batched_tokens={max_num_batched_tokens}",
            precedes=True,
        ),
        Line(r"Using max model len {max_model_len}", precedes=True),
        Line(r"Setting attention block size to {block_size} tokens"),
        Line(r"current --gpu-memory-utilization={gpu_memory_utilization}"),
        # weights
        Line(r"Model loading took {weights_gib} Gi?B"),  # GB to 0.8.2, of 2^30 bytes too
        Line(r"Loading model weights took {weights_gib} GB"),
        Line(r"Loading model weights took {weights_mb} MB"),
        # V0's profile: as names and values, as a table or in two sentences
        Line(
            r"Memory profiling results:.* total_gpu_memory={gpu_total_gib}GiB,?"
            r" initial_memory_usage={init_used_gib}GiB,? peak_torch_memory={peak_torch_gib}GiB.*"
            r" non_torch_memory={non_torch_gib}GiB,? kv_cache_size={available_kv_gib}GiB,?"
            r" gpu_memory_utilization={gpu_memory_utilization}"
        ),
        Line(r"total_gpu_memory\s+\(?{gpu_total_gib}GiB"),
        Line(r"gpu_memory_utilization\s+\(?{gpu_memory_utilization}\b"),
        Line(r"model weights take\s+{weights_gib}GiB"),
        Line(r"non_torch_memory(?: takes)?\s+{non_torch_gib}GiB"),
        Line(r"PyTorch activation peak memory(?: takes)?\s+{activation_peak_gib}GiB"),
        Line(r"reserved for KV Cache is {available_kv_gib}GiB"),
        Line(r"available_kv_cache_memory\s+{available_kv_gib}GiB"),
        # V1's
        Line(
            r"free_memory={init_free_gib}GiB, total_memory={gpu_total_gib}GiB"
            r"(?:.*non_torch_memory={init_non_torch_gib}GiB)?"
        ),
        Line(
            r"Initial free memory: {init_free_gib} GiB; "
            r"Requested memory: {gpu_memory_utilization} \(util\), {requested_gib} GiB"
        ),
        Line(
            r"Total non KV cache memory: {total_non_kv_gib}\s?GiB; "
            r"torch peak memory increase: {activation_peak_gib}\s?GiB; "
            r"non-torch forward increase memory: {non_torch_gib}\s?GiB; "
            r"weights memory: {weights_gib}\s?GiB"
        ),
        Line(r"Available KV cache memory: {available_kv_gib} GiB"),
        Line(
            r"Free memory on device \S*\s?\({init_free_gib}/{gpu_total_gib} GiB\) on startup\. "
            r"Desired GPU memory utilization is \({gpu_memory_utilization}, {requested_gib} GiB\)"
        ),
        Line(
            r"Actual usage(?: is|:) {weights_gib} GiB for weights?, "
            r"{activation_peak_gib} GiB for peak activation, "
            r"{non_torch_gib} GiB for non-torch memory"
            r"(?:, (?:and )?{cudagraph_gib} GiB for CUDAGraph memory)?"
        ),
        Line(
            r"Actual usage is {weights_plus_nontorch_gib} GiB for "
            r"consumed memory \(weights \+ non-torch\), "
            r"{activation_peak_gib} GiB for peak activation"
            r"(?:, (?:and )?{cudagraph_gib} GiB for CUDAGraph memory)?"
        ),
        # capacity
        Line(r"# \w+ blocks: {num_gpu_blocks}(?:, # CPU blocks|$)"),
        Line(r" KV cache size: {kv_tokens} tokens"),
        Line(r"Maximum concurrency for {max_model_len} tokens per request: {max_concurrency}x"),
        # graphs
        Line(r"Estimated CUDA graph memory: {cudagraph_estimated_gib} GiB"),
        Line(r"Graph capturing finished in \d+ secs?, took {cudagraph_gib} GiB"),
        Line(
            r"CUDA graph pool memory: {cudagraph_gib} GiB \(actual\), "
            r"{cudagraph_estimated_gib} GiB \(estimated\)"
        ),
        # failures
        Line(
            r"Free memory on device \S*\s?\({free_gib}/{gpu_total_gib} "
            r"GiB\) on startup is less than "
            r"desired GPU memory utilization \({gpu_memory_utilization}, {desired_gib} GiB\)",
            outcome="free_memory_too_low",
        ),
        Line(
            r"max seq len \({max_model_len}\), \(?{needed_gib} GiB KV "
            r"cache is needed, which is larger "
            r"than the available KV cache memory \({available_kv_gib} GiB\)"
            r"(?:.*estimated maximum model length is {estimated_max_len})?",
            outcome="max_len_too_large",
        ),
        Line(
            r"max seq len \({max_model_len}\) is larger than the maximum "
            r"number of tokens that can be stored "
            r"in KV cache \({kv_tokens}\)",
            outcome="max_len_too_large",
        ),
        Line(r"No available memory for the cache blocks", outcome="no_cache_blocks"),
        Line(
            r"max_num_seqs \({max_num_seqs}\) exceeds available Mamba cache blocks "
            r"\({num_gpu_blocks}\)",
            outcome="max_num_seqs_too_large",
        ),
        Line(r"has a total capaci?ty of {gpu_total_gib} GiB"),
        Line(r"CUDA out of memory|OutOfMemoryError", outcome="oom"),
    ),
    arguments={
        "model": ("model", "model_tag"),
        "weight_dtype": ("dtype",),
        "quantization": ("quantization",),
        "kv_cache_dtype": ("kv_cache_dtype",),
        "gpu_memory_utilization": ("gpu_memory_utilization",),
        "max_model_len": ("max_model_len", "max_seq_len"),
        "max_num_batched_tokens": ("max_num_batched_tokens",),
        "max_num_seqs": ("max_num_seqs",),
        "block_size": ("block_size",),
        "enforce_eager": ("enforce_eager",),
        "tp": ("tensor_parallel_size",),
        "pp": ("pipeline_parallel_size",),
        "dp": ("data_parallel_size",),
    },
    introductions=(
        Introduction("non-default args:"),
        Introduction("args: Namespace(", is_complete=True),
        Introduction("with config:", is_complete=True, precedes=False),
        Introduction("vllm serve ", is_command=True),
        Introduction("vllm.entrypoints.openai.api_server ", is_command=True),
    ),
    engines=r"EngineCore_DP\d+",
    groups=("compilation_config",),
    aliases={
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "dp": "data_parallel_size",
        "dcp": "decode_context_parallel_size",
        "ep": "enable_expert_parallel",
        "q": "quantization",
        "sc": "speculative_config",
        "cc": "compilation_config",
        "o": "optimization_level",
        **{f"o{level}": f"optimization_level_{level}" for level in range(4)},
        "kv_cache_memory": "kv_cache_memory_bytes",
    },
    ranks=(
        r"[(\[](VllmWorkerProcess pid=\d+|VllmWorker rank=\d+|RayWorkerWrapper pid=\d+|Worker_\w+)"
    ),
)
