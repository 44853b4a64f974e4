# ruff: noqa: E501 (lines as engines print them)
"""Options that logs show: those that become flags of a record, and those of the start before."""

import pytest
from sample_logs import (
    LMDEPLOY_17,
    SGLANG,
    TRT_OLD,
    TRT_TORCH,
)

from kvexp.startup_logs import read_log
from kvexp.validate.flags import read

GIVEN = """\
(APIServer pid=7) INFO 11-20 10:00:00 [utils.py:253] non-default args: {'model_tag': 'acme/m', 'api_key': ['sk-1'], 'served_model_name': ['m'], 'host': '0.0.0.0', 'model': 'acme/m', 'dtype': 'bfloat16', 'max_model_len': 32000, 'tensor_parallel_size': 2, 'enable_lora': True, 'max_loras': 4, 'max_lora_rank': 64, 'speculative_config': {'method': 'eagle3', 'model': 'acme/draft', 'num_speculative_tokens': 3}, 'limit_mm_per_prompt': {'image': 2, 'video': 0}, 'compilation_config': {'mode': <CompilationMode.VLLM_COMPILE: 3>, 'cudagraph_capture_sizes': [1, 2, 4]}, 'kv_cache_memory_bytes': 25769803776, 'enable_expert_parallel': True}
"""
NAMESPACE = """\
INFO 05-14 10:00:00 [api_server.py:1044] args: Namespace(subparser='serve', model_tag='acme/m', config='', host=None, port=8000, api_key=None, model='acme/m', dtype='auto', max_model_len=4096, block_size=None, swap_space=4, cpu_offload_gb=10.0, enable_lora=True, max_loras=1, max_lora_rank=64, limit_mm_per_prompt={'image': 2}, speculative_config=None, enable_chunked_prefill=None, num_gpu_blocks_override=512, disable_log_stats=False, dispatch_function=<function ServeSubcommand.cmd at 0x7f>)
"""
COMMAND = """\
$ vllm serve acme/m -tp 2 --max-model-len 32k --enable-lora --max-lora-rank 64 --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}' --limit-mm-per-prompt.image 2 --no-enable-chunked-prefill --api-key sk-1 --cuda-graph-sizes 1 2 4 --cpu-offload-gb=2 2>&1 | tee --append start.log
"""
CONFIG = """\
INFO [core.py:58] Initializing a V1 LLM engine (v0.11.0) with config: model='acme/m', speculative_config=SpeculativeConfig(method='mtp', model='acme/m', num_spec_tokens=2), tokenizer='acme/m', dtype=torch.bfloat16, max_seq_len=1024, tensor_parallel_size=1, quantization=None, enforce_eager=True, kv_cache_dtype=auto, decoding_config=DecodingConfig(backend='auto'), served_model_name=acme/m, enable_prefix_caching=True, compilation_config={"level":3,"cudagraph_capture_sizes":[512,504]}
"""
CACHE = "INFO [kv_cache_utils.py:634] GPU KV cache size: 158,656 tokens\n"


@pytest.mark.parametrize(
    ("text", "inputs", "flags"),
    [
        (
            GIVEN,
            {"model": "acme/m", "weight_dtype": "bfloat16", "max_model_len": 32000, "tp": 2},
            {
                "enable_lora": True,
                "max_loras": 4,
                "max_lora_rank": 64,
                "speculative_config": {
                    "method": "eagle3",
                    "model": "acme/draft",
                    "num_speculative_tokens": 3,
                },
                "limit_mm_per_prompt": {"image": 2, "video": 0},
                "mode": "<CompilationMode.VLLM_COMPILE: 3>",
                "cudagraph_capture_sizes": [1, 2, 4],
                "kv_cache_memory_bytes": 25769803776,
                "enable_expert_parallel": True,
            },
        ),
        (
            NAMESPACE,
            {"model": "acme/m", "weight_dtype": None, "max_model_len": 4096, "block_size": None},
            {
                "cpu_offload_gb": 10.0,
                "enable_lora": True,
                "max_lora_rank": 64,
                "limit_mm_per_prompt": {"image": 2},
                "num_gpu_blocks_override": 512,
            },
        ),
        (
            COMMAND,
            {"model": "acme/m", "tp": 2, "max_model_len": 32000},
            {
                "enable_lora": True,
                "max_lora_rank": 64,
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
                "limit_mm_per_prompt": {"image": 2},
                "enable_chunked_prefill": False,
                "cuda_graph_sizes": [1, 2, 4],
                "cpu_offload_gb": 2,
            },
        ),
        (
            CONFIG,
            {"model": "acme/m", "weight_dtype": "bfloat16", "max_model_len": 1024},
            {
                "speculative_config": {"method": "mtp", "model": "acme/m", "num_spec_tokens": 2},
                "enable_prefix_caching": True,
                "level": 3,
                "cudagraph_capture_sizes": [512, 504],
            },
        ),
    ],
    ids=["given", "namespace", "command", "config"],
)
def test_flags_reach_the_record_and_are_read_again(text, inputs, flags):
    record = read_log(text + CACHE, "a-log")

    assert {key: record[key] for key in inputs} == inputs
    assert {flag.name: flag.value for flag in read(record["other_flags"])} == flags
    assert "other_flags" in record["explicit"]


def test_flags_of_sglang_are_those_that_differ_from_its_defaults():
    text = SGLANG.replace("max_total_tokens=None", "max_total_tokens=20480")
    text = text.replace("page_size=1", "page_size=1, cpu_offload_gb=0, max_mamba_cache_size=64")

    flags = read_log(text, "a-log")["other_flags"]
    assert flags == "max_total_tokens=20480; max_mamba_cache_size=64"
    assert read_log(SGLANG, "a-log")["other_flags"] is None


def test_options_in_a_group_of_options_are_read():
    text = "LLM engine args: LlmArgs(model='acme/m', dtype='bfloat16', tensor_parallel_size=2, kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.8, max_tokens=4096, dtype='fp8'), build_config=None)\n"
    record = read_log(text + TRT_OLD, "a-log")

    found = {key: record[key] for key in ("model", "weight_dtype", "kv_cache_dtype", "tp")}
    assert list(found.values()) == ["acme/m", "bfloat16", "fp8", 2]
    assert (record["gpu_memory_utilization"], record["other_flags"]) == (0.8, "max_tokens=4096")


@pytest.mark.parametrize("value", [0, 1])
def test_the_variable_that_chooses_the_runner_is_a_flag(value):
    text = f"$ VLLM_USE_V2_MODEL_RUNNER={value} vllm serve acme/m\n"

    assert read_log(text + CACHE, "a-log")["other_flags"] == f"v2_model_runner={value}"


def test_the_variable_of_the_estimate_is_a_flag_but_not_where_the_engine_speaks_of_it():
    name = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
    said = (
        f"profiling is enabled ({name}=1). To disable, set {name}=0.\nTo try it, set {name}=1 and"
    )

    assert read_log(f"{CACHE}{said}\n", "a-log")["other_flags"] is None
    text = f"$ {name}=0 vllm serve acme/m\n{CACHE}{said}\n"
    assert read_log(text, "a-log")["other_flags"] == "estimate_cudagraphs=0"


@pytest.mark.parametrize("said", ["=", ': "'])
def test_the_variable_of_the_allocator_is_a_flag_but_not_where_torch_proposes_it(said):
    name = "PYTORCH_CUDA_ALLOC_CONF"
    proposed = f"If reserved memory is large try setting {name}=expandable_segments:True to avoid"

    assert read_log(f"{proposed}\n{CACHE}", "a-log")["other_flags"] is None
    text = f"  {name}{said}expandable_segments:True\n{CACHE}"
    assert read_log(text, "a-log")["other_flags"] == "expandable_segments=True"


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve is deprecated and will be removed\n",
        "usage: vllm serve [model_tag] [options]\n",
        "run `vllm serve` with --help\n",
    ],
)
def test_prose_about_a_command_is_no_command(text):
    record = read_log(text + CACHE, "a-log")

    assert (record["model"], record["other_flags"]) == (None, None)


def test_what_an_engine_prints_for_nothing_is_no_count():
    text = SGLANG.replace("chunked_prefill_size=2048", "chunked_prefill_size=-1")

    assert read_log(text, "a-log")["max_num_batched_tokens"] is None


FIRST = """\
(APIServer pid=7) INFO 09-28 21:12:10 [api_server.py:1882] vLLM API server version 0.10.2
(APIServer pid=7) INFO 09-28 21:12:10 [utils.py:328] non-default args: {'model': 'acme/m', 'max_num_seqs': 4, 'block_size': 32, 'enable_lora': True}
(APIServer pid=7) INFO 09-28 21:12:12 [scheduler.py:222] Chunked prefill is enabled with max_num_batched_tokens=512.
(EngineCore_DP0 pid=8) INFO 09-28 21:12:23 [core.py:75] Initializing a V1 LLM engine (v0.10.2) with config: model='acme/m', dtype=torch.bfloat16, max_seq_len=4096, tensor_parallel_size=1, enforce_eager=True, kv_cache_dtype=fp8
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.19 GiB
"""
ARGS = "(APIServer pid=9) INFO 09-28 21:22:10 [utils.py:328] non-default args: {'model': 'acme/n', 'max_num_seqs': 8, 'cpu_offload_gb': 2}\n"
CHUNKS = "(APIServer pid=9) INFO 09-28 21:22:12 [scheduler.py:222] Chunked prefill is enabled with max_num_batched_tokens=2048.\n"
ENGINE = "(EngineCore_DP0 pid=10) INFO 09-28 21:22:23 [core.py:75] Initializing a V1 LLM engine (v0.10.2) with config: model='acme/n', dtype=torch.float16, max_seq_len=1024, enforce_eager=False\n"


@pytest.mark.parametrize(
    ("second", "seqs", "tokens", "flags"),
    [
        (ARGS + CHUNKS + ENGINE, 8, 2048, "cpu_offload_gb=2"),
        (CHUNKS + ENGINE, None, 2048, None),
        (ENGINE, None, None, None),
    ],
)
def test_a_start_has_no_input_of_the_one_before_it(second, seqs, tokens, flags):
    record = read_log(FIRST + second + CACHE, "a-log")

    assert (record["max_num_seqs"], record["max_num_batched_tokens"]) == (seqs, tokens)
    assert record["other_flags"] == flags
    assert (record["model"], record["weight_dtype"]) == ("acme/n", "float16")
    assert (record["block_size"], record["kv_cache_dtype"]) == (None, None)
    assert record["outputs"]["error"] == "none"
    # the machine's
    assert (record["engine_version"], record["gpu_total_gib"]) == ("0.10.2 (V1)", 79.19)


def test_a_command_that_follows_a_log_is_that_of_its_start():
    record = read_log(FIRST + CACHE + "$ vllm serve acme/m --max-num-seqs 16\n", "a-log")

    assert (record["max_num_seqs"], record["block_size"]) == (16, 32)
    assert record["outputs"]["kv_tokens"] == 158656


def test_engines_that_share_a_start_share_its_arguments():
    begins = FIRST.splitlines(keepends=True)[:4]
    other = begins[3].replace("EngineCore_DP0", "EngineCore_DP1")

    assert read_log("".join([*begins, other, CACHE]), "a-log")["max_num_seqs"] == 4


def test_starts_of_the_other_engines_have_inputs_of_their_own_too():
    again = SGLANG.replace("quantization=None", "quantization='fp8', max_total_tokens=64")
    assert read_log(again + SGLANG, "a-log")["quantization"] is None
    assert read_log(again + SGLANG, "a-log")["other_flags"] is None

    lmdeploy = LMDEPLOY_17.replace("tp=1", "tp=1, max_batch_size=4")
    assert read_log(lmdeploy, "a-log")["max_num_seqs"] == 4
    assert read_log(lmdeploy, "a-log")["other_flags"] == "backend=turbomind"
    assert read_log(lmdeploy + LMDEPLOY_17, "a-log")["max_num_seqs"] is None

    torch = "$ trtllm-serve acme/m --max_batch_size 4 --kv_cache_dtype fp8\n" + TRT_TORCH
    assert read_log(torch, "a-log")["kv_cache_dtype"] == "fp8"
    assert read_log(torch + TRT_TORCH, "a-log")["kv_cache_dtype"] is None
    version = TRT_TORCH.splitlines(keepends=True)[0]  # as each rank prints it
    ranks = torch.replace(version, version * 4)
    assert read_log(ranks, "a-log")["kv_cache_dtype"] == "fp8"
