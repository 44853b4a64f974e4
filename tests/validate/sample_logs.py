# ruff: noqa: E501 (lines as engines print them)
"""Lines as engines of each family print them."""

V0_2 = """\
INFO 01-11 15:51:02 llm_engine.py:70] Initializing an LLM engine with config: model='/models/alpaca-2', tokenizer='/models/alpaca-2', tokenizer_mode=auto, revision=None, trust_remote_code=False, dtype=torch.float16, max_seq_len=4096, download_dir=None, load_format=auto, tensor_parallel_size=1, quantization=None, enforce_eager=False, seed=0)
INFO 01-11 15:51:18 llm_engine.py:275] # GPU blocks: 229, # CPU blocks: 512
ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3664). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""
V0_3 = """\
INFO 02-29 19:21:40 llm_engine.py:79] Initializing an LLM engine with config: model='facebook/opt-125m', tokenizer='facebook/opt-125m', dtype=torch.float16, max_seq_len=2048, tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, device_config=cuda, seed=0)
INFO 02-29 19:21:45 model_runner.py:90] Loading model weights took 244.61 MB
INFO 02-29 19:21:45 llm_engine.py:338] # GPU blocks: 76240, # CPU blocks: 7281
"""
V0_5 = """\
INFO 07-17 23:40:55 llm_engine.py:174] Initializing an LLM engine (v0.5.2) with config: model='meta-llama/Llama-2-7b-hf', tokenizer='meta-llama/Llama-2-7b-hf', dtype=torch.float16, max_seq_len=4096, tensor_parallel_size=2, pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
(VllmWorkerProcess pid=6923) INFO 07-17 23:41:16 model_runner.py:559] Loading model weights took 6.1138 GB
(VllmWorkerProcess pid=6922) INFO 07-17 23:41:16 model_runner.py:559] Loading model weights took 6.1138 GB
INFO 07-17 23:41:28 distributed_gpu_executor.py:56] # GPU blocks: 10039, # CPU blocks: 1310
"""
V0_64 = """\
GPU models and configuration : GPU 0: NVIDIA GeForce RTX 3070
[pip3] vllm==0.6.4.post1
INFO 12-06 11:39:30 llm_engine.py:249] Initializing an LLM engine (v0.6.4.post1) with config: model='microsoft/phi-1_5', dtype=torch.float16, max_seq_len=2048, tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
INFO 12-06 11:39:34 model_runner.py:1077] Loading model weights took 2.6419 GB
INFO 12-06 11:39:36 worker.py:232] Memory profiling results: total_gpu_memory=7.92GiB initial_memory_usage=3.09GiB peak_torch_memory=3.12GiB memory_usage_post_profile=3.12GiB non_torch_memory=0.47GiB kv_cache_size=3.54GiB gpu_memory_utilization=0.90
INFO 12-06 11:39:36 gpu_executor.py:113] # GPU blocks: 1207, # CPU blocks: 1365
INFO 12-06 11:39:36 gpu_executor.py:117] Maximum concurrency for 2048 tokens per request: 9.43x
"""
V0_ROCM = """\
INFO 12-25 14:00:28 worker.py:265] Memory profiling results: duration=18.41 seconds, total_gpu_memory=191.98GiB, initial_memory_usage=71.40GiB, peak_torch_memory=86.79GiB, memory_usage_post_profile=73.77GiB, non_torch_memory=6.07GiB, kv_cache_size=95.28GiB, gpu_memory_utilization=0.98.
INFO 06-05 13:03:17 [executor_base.py:112] # rocm blocks: 19513, # CPU blocks: 819
"""
V0_65 = """\
$ vllm serve meta-llama/Meta-Llama-3-8B -tp 2
INFO 12-13 19:54:18 worker.py:243] Memory profiling results:
INFO 12-13 19:54:18 worker.py:243] duration     0.75 seconds
INFO 12-13 19:54:18 worker.py:243] total_gpu_memory     79.22GiB
INFO 12-13 19:54:18 worker.py:243] gpu_memory_utilization       0.90
INFO 12-13 19:54:18 worker.py:243] the current vLLM instance can use    71.29GiB
INFO 12-13 19:54:18 worker.py:243] model weights take   14.96GiB
INFO 12-13 19:54:18 worker.py:243] non_torch_memory     1.79GiB
INFO 12-13 19:54:18 worker.py:243] PyTorch activation peak memory       1.26GiB
INFO 12-13 19:54:18 worker.py:243] available_kv_cache_memory    53.29GiB
"""
V1_7 = """\
INFO 01-30 03:18:12 gpu_model_runner.py:848] Loading model weights took 67.7229 GB
INFO 01-30 03:19:14 kv_cache_utils.py:395] # GPU blocks: 1381
INFO 01-30 03:19:14 kv_cache_utils.py:398] Maximum concurrency for 2048 tokens per request: 10.79x
"""
V1_8_GB = """\
INFO 04-05 05:52:54 [gpu_model_runner.py:1186] Model loading took 15.1749 GB and 59.268527 seconds
INFO 04-05 05:54:20 [kv_cache_utils.py:566] GPU KV cache size: 148,096 tokens
"""
V1_BANNER = """\
qwen3.5-35b  | (APIServer pid=1) INFO 03-20 10:11:00 [utils.py:297]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.17.1rc1.dev126+gbc2c0c86e
qwen3.5-35b  | (EngineCore pid=164) INFO 03-20 10:20:32 [gpu_worker.py:452] Available KV cache memory: 5.69 GiB
"""
V1_CONSUMED = """\
Available KV cache memory: 3.1 GiB
Free memory on device (17.06/22.04 GiB) on startup. Desired GPU memory utilization is (0.62, 13.66 GiB). Actual usage is 10.29 GiB for consumed memory (weights + non-torch), 0.27 GiB for peak activation, and 0.78 GiB for CUDAGraph memory.
"""
V0_7 = """\
INFO 01-16 09:39:00 llm_engine.py:234] Initializing a V0 LLM engine (v0.7.2) with config: model='/home/me/.cache/huggingface/hub/models--meta-llama--Llama-3.2-11B-Vision/snapshots/27dc', dtype=torch.bfloat16, max_seq_len=65536, tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, enforce_eager=True, kv_cache_dtype=auto
INFO 01-16 09:40:00 worker.py:238] Memory profiling takes 4.10 seconds
INFO 01-16 09:40:00 worker.py:238] the current vLLM instance can use total_gpu_memory (79.22GiB) x gpu_memory_utilization (0.90) = 71.29GiB
INFO 01-16 09:40:00 worker.py:238] model weights take 19.86GiB; non_torch_memory takes 0.16GiB; PyTorch activation peak memory takes 36.63GiB; the rest of the memory reserved for KV Cache is 14.65GiB.
INFO 01-16 09:40:00 executor_base.py:95] # CUDA blocks: 6001, # CPU blocks: 1638
INFO 01-16 09:40:00 executor_base.py:98] Maximum concurrency for 65536 tokens per request: 1.47x
"""
V1_08 = """\
INFO 04-24 16:32:50 [core.py:58] Initializing a V1 LLM engine (v0.8.5.dev1) with config: model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
INFO 04-24 16:33:00 [gpu_model_runner.py:1316] Model loading took 14.9889 GiB and 3.652170 seconds
INFO 04-24 16:33:13 [kv_cache_utils.py:634] GPU KV cache size: 158,656 tokens
INFO 04-24 16:33:13 [kv_cache_utils.py:637] Maximum concurrency for 32,768 tokens per request: 4.84x
INFO 04-24 16:33:33 [gpu_model_runner.py:1686] Graph capturing finished in 20 secs, took 0.52 GiB
"""
V1_10 = """\
(APIServer pid=7) INFO 09-28 21:12:10 [api_server.py:1882] vLLM API server version 0.10.2
(APIServer pid=7) INFO 09-28 21:12:10 [utils.py:328] non-default args: {'model_tag': 'Qwen/Qwen2.5-VL-7B-Instruct', 'model': 'Qwen/Qwen2.5-VL-7B-Instruct', 'max_model_len': 1024, 'tensor_parallel_size': 2, 'gpu_memory_utilization': 0.8, 'max_num_seqs': 64, 'enforce_eager': True}
(APIServer pid=7) INFO 09-28 21:12:12 [scheduler.py:222] Chunked prefill is enabled with max_num_batched_tokens=2048.
(EngineCore_DP0 pid=8) INFO 09-28 21:12:23 [core.py:75] Initializing a V1 LLM engine (v0.10.2) with config: model='Qwen/Qwen2.5-VL-7B-Instruct', dtype=torch.bfloat16, max_seq_len=1024, tensor_parallel_size=2, pipeline_parallel_size=1, quantization=None, enforce_eager=True, kv_cache_dtype=auto
(Worker_TP0 pid=9) DEBUG 09-28 21:12:43 [gpu_worker.py:284] Initial free memory: 23.08 GiB; Requested memory: 0.80 (util), 18.82 GiB
(Worker_TP0 pid=9) DEBUG 09-28 21:12:43 [gpu_worker.py:291] Free memory after profiling: 14.23 GiB (total), 9.97 GiB (within requested)
(Worker_TP0 pid=9) DEBUG 09-28 21:12:43 [gpu_worker.py:297] Memory profiling takes 14.40 seconds. Total non KV cache memory: 10.22GiB; torch peak memory increase: 1.40GiB; non-torch forward increase memory: 0.02GiB; weights memory: 8.80GiB.
(Worker_TP0 pid=9) INFO 09-28 21:12:43 [gpu_worker.py:298] Available KV cache memory: 8.60 GiB
(Worker_TP1 pid=10) DEBUG 09-28 21:12:43 [gpu_worker.py:284] Initial free memory: 23.01 GiB; Requested memory: 0.80 (util), 18.82 GiB
(Worker_TP1 pid=10) DEBUG 09-28 21:12:43 [gpu_worker.py:297] Memory profiling takes 14.42 seconds. Total non KV cache memory: 10.32GiB; torch peak memory increase: 1.50GiB; non-torch forward increase memory: 0.02GiB; weights memory: 8.80GiB.
(Worker_TP1 pid=10) INFO 09-28 21:12:43 [gpu_worker.py:298] Available KV cache memory: 8.50 GiB
(EngineCore_DP0 pid=8) INFO 09-28 21:12:44 [kv_cache_utils.py:864] GPU KV cache size: 318,304 tokens
(EngineCore_DP0 pid=8) INFO 09-28 21:12:44 [kv_cache_utils.py:868] Maximum concurrency for 1,024 tokens per request: 310.84x
"""
V1_12 = """\
(EngineCore_DP0 pid=5) INFO 12-01 19:48:40 [v1/engine/core.py:93] Initializing a V1 LLM engine (v0.12.0) with config: model='openai/gpt-oss-20b', dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, quantization=mxfp4, enforce_eager=True, kv_cache_dtype=auto
(EngineCore_DP0 pid=5) DEBUG 12-01 19:49:03 [v1/worker/gpu_worker.py:484] Free memory on device (43.91/44.4 GiB) on startup. Desired GPU memory utilization is (0.9, 39.96 GiB). Actual usage is 13.72 GiB for weight, 1.83 GiB for peak activation, 0.04 GiB for non-torch memory, and 0.0 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=26017729126` (24.23 GiB) to fit into requested memory, or `--kv-cache-memory=30260962304` (28.18 GiB) to fully utilize gpu memory. Current kv cache memory in use is 24.38 GiB.
"""
V1_17 = """\
(EngineCore_DP0 pid=387) INFO 03-08 16:43:00 [core.py:100] Initializing a V1 LLM engine (v0.17.1) with config: model='Qwen/Qwen3.5-27B', dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=1
(EngineCore_DP0 pid=387) INFO 03-08 16:44:20 [interface.py:645] Setting attention block size to 544 tokens to ensure that attention page size is >= mamba page size.
(EngineCore_DP0 pid=387) INFO 03-08 16:44:28 [gpu_model_runner.py:5651] Estimated CUDA graph memory: 0.26 GiB total
(EngineCore_DP0 pid=387) INFO 03-08 16:44:29 [gpu_worker.py:456] Available KV cache memory: 17.36 GiB
(EngineCore_DP0 pid=387) INFO 03-08 16:44:29 [gpu_worker.py:490] In v0.19, CUDA graph memory profiling will be enabled by default (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1). To try it now, increase --gpu-memory-utilization from 0.7000 to 0.7021 to maintain the same effective KV cache size.
(EngineCore_DP0 pid=387) INFO 03-08 16:44:29 [kv_cache_utils.py:1314] GPU KV cache size: 188,640 tokens
(EngineCore_DP0 pid=387) INFO 03-08 16:44:29 [kv_cache_utils.py:1319] Maximum concurrency for 131,072 tokens per request: 5.23x
"""
V1_21 = """\
(Worker_TP0 pid=447) INFO 08-14 14:07:22 [gpu_model_runner.py:6806] Estimated CUDA graph memory: 0.36 GiB total
(Worker_TP0 pid=447) INFO 08-14 14:07:22 [gpu_worker.py:563] Available KV cache memory: 6.87 GiB
(Worker_TP0 pid=447) INFO 08-14 14:07:22 [gpu_worker.py:578] CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.8200 is equivalent to --gpu-memory-utilization=0.8048 without CUDA graph memory profiling. To maintain the same effective KV cache size as before, increase --gpu-memory-utilization to 0.8352.
(EngineCore pid=1) INFO 05-26 21:34:12 [kv_cache_utils.py:1710] GPU KV cache size: 396,928 tokens
(EngineCore pid=1) INFO 05-26 21:34:12 [kv_cache_utils.py:1711] Maximum concurrency for 131,072 tokens per request: 3.03x
(Worker_TP0 pid=447) INFO 05-26 21:34:14 [gpu_model_runner.py:6243] Graph capturing finished in 2 secs, took 0.11 GiB
(Worker_TP0 pid=447) INFO 05-26 21:34:14 [gpu_worker.py:621] CUDA graph pool memory: 0.11 GiB (actual), 0.36 GiB (estimated), difference: 0.25 GiB (227.0%).
"""
V1_27 = """\
[Worker_TP0] [model_runner.py:411] Model loading took 81.11 GiB memory and 53.488019 seconds
[Worker_TP0] [model_runner.py:1048] Graph capturing finished in 4 secs, took 0.31 GiB
[Worker_TP0] [gpu_worker.py:628] Available KV cache memory: 7.94 GiB
[EngineCore] [kv_cache_utils.py:2208] GPU KV cache size: 1,196,643 tokens, Maximum concurrency for 1,048,576 tokens per request: 1.14x
[Worker_TP0] [model_runner.py:1048] Graph capturing finished in 4 secs, took 0.20 GiB
[Worker_TP0] [gpu_worker.py:859] Free memory on device (93.79/94.97 GiB) on startup. Desired GPU memory utilization is (0.975, 92.6 GiB). Actual usage is 83.1 GiB for consumed memory (weights + non-torch), 1.24 GiB for peak activation, and 0.2 GiB for CUDAGraph memory.
"""
TOO_LONG = """\
(EngineCore_DP0 pid=1094) ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the estimated maximum model length is 34736. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""
BUSY = """\
ERROR 06-30 13:53:19 [multiproc_executor.py:492] ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
"""
BUSY_NAMED = """\
ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB).
"""
NO_BLOCKS = """\
(Worker_DP1_TP1 pid=3585771) INFO 08-19 05:56:57 [gpu_model_runner.py:6936] Estimated CUDA graph memory: 118.65 GiB total
(EngineCore_DP0 pid=3584999) ERROR 08-19 05:56:57 [core.py:1346] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.
"""
OUT_OF_MEMORY = """\
INFO 05-14 10:43:22 [kv_cache_utils.py:634] GPU KV cache size: 67,856 tokens
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.19 GiB
"""
SGLANG = """\
[2025-05-02 16:13:41] server_args=ServerArgs(model_path='Qwen/Qwen3-0.6B', tokenizer_path='Qwen/Qwen3-0.6B', load_format='auto', dtype='auto', kv_cache_dtype='auto', quantization=None, context_length=None, mem_fraction_static=0.88, max_running_requests=None, max_total_tokens=None, chunked_prefill_size=2048, page_size=1, tp_size=1, pp_size=1, dp_size=1, disable_cuda_graph=False)
[2025-05-02 16:13:42] Init torch distributed ends. mem usage=0.00 GB
[2025-05-02 16:13:42] Load weight begin. avail mem=3.23 GB
[2025-05-02 16:14:33] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=2.03 GB, mem usage=1.20 GB.
[2025-05-02 16:14:33] KV Cache is allocated. #tokens: 15387, K size: 0.82 GB, V size: 0.82 GB
[2025-05-02 16:14:33] Memory pool end. avail mem=0.00 GB
[2025-05-02 16:14:58] Capture cuda graph end. Time elapsed: 24.85 s. mem usage=0.00 GB. avail mem=0.00 GB.
[2025-05-02 16:14:58] max_total_num_tokens=15387, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=2049, context_len=40960
"""
SGLANG_TP = """\
[2025-10-16 09:06:09 TP0] Init torch distributed ends. mem usage=1.96 GB
[2025-10-16 09:06:10 TP1] Load weight begin. avail mem=137.29 GB
[2025-10-16 09:06:10 TP0] Load weight begin. avail mem=137.34 GB
[2025-11-04 05:27:13 TP0] Load weight end. elapsed=23.18 s, type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, avail mem=75.11 GB, mem usage=62.07 GB.
[2025-11-04 05:27:13 TP1] Load weight end. elapsed=23.18 s, type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, avail mem=75.06 GB, mem usage=62.07 GB.
[2025-11-04 05:27:13 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 524288, KV size: 17.16 GB
[2025-11-04 05:27:13 TP1] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 524288, KV size: 17.16 GB
[2025-11-04 05:27:20 TP0] Memory pool end. avail mem=12.68 GB
"""
SGLANG_NONE = """\
[2025-07-02 07:41:58 DP0 TP0] Load weight end. type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, avail mem=21.73 GB, mem usage=166.59 GB.
[2025-07-02 07:41:59 DP0 TP0] max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead.
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
"""
TRT = """\
[TensorRT-LLM][INFO] Engine version 0.17.0 found in the config file, assuming engine(s) built by new builder API.
[TensorRT-LLM][INFO] MPI size: 1, MPI local size: 1, rank: 0
[TensorRT-LLM][INFO] TRTGptModel maxBatchSize: 64
[TensorRT-LLM][INFO] TRTGptModel maxSequenceLen: 8192
[TensorRT-LLM][INFO] TRTGptModel maxNumTokens: 4096
[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 31.84 GiB, available: 17.83 GiB
[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 8219
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 16.05 GiB for max tokens in paged KV cache (263008)
"""
TRT_TORCH = """\
[12/20/2025-04:21:09] [TRT-LLM] [I] TensorRT-LLM version: 1.2.0rc6
[12/20/2025-04:21:09] [TRT-LLM] [I] max_seq_len is not specified, using inferred value 131072
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[12/20/2025-04:21:10] [TRT-LLM] [I] max_seq_len=8224, max_num_requests=64, max_num_tokens=8192, max_batch_size=64
[12/20/2025-04:21:50] [TRT-LLM] [I] Memory used after loading model weights (inside torch) in memory usage profiling: 63.52 GiB
[12/20/2025-04:21:50] [TRT-LLM] [I] Memory used after loading model weights (outside torch) in memory usage profiling: 49.78 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Memory dynamically allocated during inference (inside torch) in memory usage profiling: 0.85 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Memory used outside torch (e.g., NCCL and CUDA graphs) in memory usage profiling: 49.28 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 113.65 GiB, available KV cache memory when calculating max tokens: 5.95 GiB, fraction is set 0.8999999761581421, kv size is 73728. device total memory 119.70 GiB, , tmp kv_mem 0.56 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Estimated max memory in KV cache : 5.95 GiB
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 5.95 GiB for max tokens in paged KV cache (86720).
"""
TRT_OLD = """\
[TensorRT-LLM][INFO] [MemUsageChange] TensorRT-managed allocation in IExecutionContext creation: CPU +0, GPU +0, now: CPU 0, GPU 6683 (MiB)
[TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache.
[TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache.
"""
LMDEPLOY = """\
lmdeploy: 0.9.2
[TM][INFO] [BlockManager] block_size = 9.000 MB
[TM][INFO] [BlockManager] max_block_count = 863
[TM][INFO] [BlockManager] chunk_size = 863
"""
LMDEPLOY_CUT = """\
[TM][INFO] [BlockManager] block_size = 0.844 MB
[TM][INFO] [BlockManager] max_block_count = 1740
[TM][WARNING] No enough blocks for `session_len` (131072), `session_len` truncated to 111360.
"""
LMDEPLOY_17 = """\
2026-09-30 14:36:57,224 - lmdeploy - INFO - async_engine.py:130 - input backend=turbomind, backend_config=TurbomindEngineConfig(dtype='auto', tp=1, session_len=32768, cache_max_entry_count=0.8763, quant_policy=0)
Loading:   0%|          | 0/36 [00:00<?, ?it/s]\rLoading: 100%|##########| 36/36 [00:02<00:00, 15.2it/s]\r[TM][INFO][0930.14:37:15.641964][turbomind.cc:319] Object cache budget: 55634.70 MB from free 63488.19 MB and ratio 0.876
"""
