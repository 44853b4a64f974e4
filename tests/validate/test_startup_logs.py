"""Lines as engines of each family print them, and the record that they make."""

import json

import pytest
from sample_logs import (
    BUSY,
    BUSY_NAMED,
    LMDEPLOY,
    LMDEPLOY_17,
    LMDEPLOY_CUT,
    NO_BLOCKS,
    OUT_OF_MEMORY,
    SGLANG,
    SGLANG_NONE,
    SGLANG_TP,
    TOO_LONG,
    TRT,
    TRT_OLD,
    TRT_TORCH,
    V0_2,
    V0_3,
    V0_5,
    V0_7,
    V0_64,
    V0_65,
    V0_ROCM,
    V1_08,
    V1_7,
    V1_8_GB,
    V1_10,
    V1_12,
    V1_17,
    V1_21,
    V1_27,
    V1_BANNER,
    V1_CONSUMED,
)

from kvexp.startup_logs import UnreadableLog, read_log
from kvexp.startup_logs.__main__ import main
from kvexp.validate.case import UnreadableRecord, case_of

CASES = {
    "vllm_0_2_too_long": (
        V0_2,
        {
            "model": "/models/alpaca-2",
            "weight_dtype": "float16",
            "max_model_len": 4096,
            "tp": 1,
            "enforce_eager": False,
            "quantization": None,
            "num_gpu_blocks": 229,
            "kv_tokens": 3664,
            "error": "max_len_too_large",
        },
    ),
    "vllm_0_3_weights_in_mb": (
        V0_3,
        {"model": "facebook/opt-125m", "num_gpu_blocks": 76240, "weights_gib": 244.61 / 1024},
    ),
    "vllm_0_5_workers": (
        V0_5,
        {
            "engine_version": "0.5.2",
            "tp": 2,
            "num_gpus": 2,
            "weights_gib": 6.1138,
            "num_gpu_blocks": 10039,
            "error": "none",
        },
    ),
    "vllm_0_6_names": (
        V0_64,
        {
            "engine_version": "0.6.4.post1",
            "gpu": "NVIDIA GeForce RTX 3070",
            "gpu_total_gib": 7.92,
            "gpu_memory_utilization": 0.9,
            "weights_gib": 2.6419,
            "activation_peak_gib": 3.12 - 2.6419,
            "non_torch_gib": 0.47,
            "available_kv_gib": 3.54,
            "num_gpu_blocks": 1207,
            "max_concurrency": 9.43,
        },
    ),
    "vllm_0_6_rocm": (
        V0_ROCM,
        {
            "gpu_total_gib": 191.98,
            "gpu_memory_utilization": 0.98,
            "non_torch_gib": 6.07,
            "available_kv_gib": 95.28,
            "num_gpu_blocks": 19513,
        },
    ),
    "vllm_0_6_table": (
        V0_65,
        {
            "model": "meta-llama/Meta-Llama-3-8B",
            "gpu_total_gib": 79.22,
            "gpu_memory_utilization": 0.9,
            "weights_gib": 14.96,
            "non_torch_gib": 1.79,
            "activation_peak_gib": 1.26,
            "available_kv_gib": 53.29,
            "error": None,
        },
    ),
    "vllm_0_7_sentences": (
        V0_7,
        {
            "engine_version": "0.7.2 (V0)",
            "max_model_len": 65536,
            "enforce_eager": True,
            "gpu_total_gib": 79.22,
            "weights_gib": 19.86,
            "non_torch_gib": 0.16,
            "activation_peak_gib": 36.63,
            "available_kv_gib": 14.65,
            "num_gpu_blocks": 6001,
            "max_concurrency": 1.47,
        },
    ),
    "vllm_0_8_v1": (
        V1_08,
        {
            "engine_version": "0.8.5.dev1 (V1)",
            "kv_tokens": 158656,
            "max_concurrency": 4.84,
            "weights_gib": 14.9889,
            "cudagraph_gib": 0.52,
        },
    ),
    "vllm_0_10_debug_of_two_ranks": (
        V1_10,
        {
            "engine_version": "0.10.2 (V1)",
            "gpu_total_gib": 23.52,  # 18.82 / 0.8
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "init_free_gib": 23.01,
            "available_kv_gib": 8.5,
            "activation_peak_gib": 1.5,
            "kv_tokens": 318304,
        },
    ),
    "vllm_0_12_last_line": (
        V1_12,
        {
            "model": "openai/gpt-oss-20b",
            "quantization": "mxfp4",
            "dp": 1,
            "init_free_gib": 43.91,
            "gpu_total_gib": 44.4,
            "gpu_memory_utilization": 0.9,
            "requested_gib": 39.96,
            "weights_gib": 13.72,
            "activation_peak_gib": 1.83,
            "non_torch_gib": 0.04,
            "cudagraph_gib": 0.0,
        },
    ),
    "vllm_0_17_estimate": (
        V1_17,
        {
            "block_size": 544,
            "cudagraph_estimated_gib": 0.26,
            "available_kv_gib": 17.36,
            "kv_tokens": 188640,
            "max_concurrency": 5.23,
        },
    ),
    "vllm_0_21_pool": (
        V1_21,
        {
            "gpu_memory_utilization": 0.82,
            "cudagraph_estimated_gib": 0.36,
            "cudagraph_gib": 0.11,
            "available_kv_gib": 6.87,
        },
    ),
    "vllm_0_27_one_line": (
        V1_27,
        {
            "kv_tokens": 1196643,
            "max_concurrency": 1.14,
            "max_model_len": 1048576,
            "cudagraph_gib": 0.2,
            "weights_plus_nontorch_gib": 83.1,
            "activation_peak_gib": 1.24,
            "non_torch_gib": None,
            "weights_gib": 81.11,
        },
    ),
    "vllm_too_long": (
        TOO_LONG,
        {
            "max_model_len": 262144,
            "needed_gib": 24.0,
            "available_kv_gib": 3.18,
            "estimated_max_len": 34736,
            "error": "max_len_too_large",
        },
    ),
    "vllm_busy_card": (
        BUSY,
        {
            "free_gib": 31.44,
            "gpu_total_gib": 47.38,
            "gpu_memory_utilization": 0.95,
            "desired_gib": 45.01,
            "error": "free_memory_too_low",
        },
    ),
    "vllm_busy_named_card": (BUSY_NAMED, {"free_gib": 19.77, "gpu_total_gib": 22.05}),
    "vllm_no_blocks": (NO_BLOCKS, {"cudagraph_estimated_gib": 118.65, "error": "no_cache_blocks"}),
    "vllm_out_of_memory": (
        OUT_OF_MEMORY,
        {"kv_tokens": 67856, "gpu_total_gib": 79.19, "error": "oom"},
    ),
    "sglang": (
        SGLANG,
        {
            "engine": "sglang",
            "model": "Qwen/Qwen3-0.6B",
            "gpu_memory_utilization": 0.88,
            "weight_dtype": "bfloat16",
            "max_model_len": 40960,
            "max_num_seqs": None,
            "init_free_gib": 3.23,
            "free_gib": 2.03,
            "weights_gib": 1.2,
            "kv_tokens": 15387,
            "available_kv_gib": 1.64,
            "avail_after_pool_gib": 0.0,
        },
    ),
    "sglang_ranks_and_latent_cache": (
        SGLANG_TP,
        {
            "init_free_gib": 137.29,
            "free_gib": 75.06,
            "kv_tokens": 524288,
            "available_kv_gib": 17.16,
        },
    ),
    "vllm_v1_before_tokens": (
        V1_7,
        {"weights_gib": 67.7229, "num_gpu_blocks": 1381, "max_concurrency": 10.79},
    ),
    "vllm_v1_weights_in_gb": (V1_8_GB, {"weights_gib": 15.1749, "kv_tokens": 148096}),
    "vllm_banner": (
        V1_BANNER,
        {"engine_version": "0.17.1rc1.dev126+gbc2c0c86e", "available_kv_gib": 5.69},
    ),
    "vllm_consumed": (
        V1_CONSUMED,
        {"init_free_gib": 17.06, "activation_peak_gib": 0.27, "cudagraph_gib": 0.78},
    ),
    "sglang_nothing_left": (
        SGLANG_NONE,
        {"free_gib": 21.73, "profiled_tokens": -561981, "error": "no_cache_blocks"},
    ),
    "tensorrt_llm_runtime": (
        TRT,
        {
            "engine": "tensorrt-llm",
            "engine_version": "0.17.0",
            "gpu_total_gib": 31.84,
            "free_gib": 17.83,
            "block_size": 32,
            "num_gpu_blocks": 8219,
            "kv_tokens": 263008,
            "available_kv_gib": 16.05,
            "max_num_seqs": 64,
            "max_model_len": 8192,
        },
    ),
    "tensorrt_llm_torch": (
        TRT_TORCH,
        {
            "engine_version": "1.2.0rc6",
            "gpu_memory_utilization": 0.9,
            "gpu_total_gib": 119.7,
            "max_model_len": 131072,
            "weights_gib": 63.52,
            "activation_peak_gib": 0.85,
            "outside_torch_gib": 49.28,
            "available_kv_gib": 5.95,
            "kv_tokens": 86720,
        },
    ),
    "tensorrt_llm_old": (
        TRT_OLD,
        {"kv_tokens": 132608, "available_kv_gib": 69524783104 / 2**30},
    ),
    "lmdeploy_blocks": (
        LMDEPLOY,
        {
            "engine": "lmdeploy",
            "engine_version": "0.9.2",
            "num_gpu_blocks": 863,
            "available_kv_gib": 863 * 9 / 1024,
        },
    ),
    "lmdeploy_shortened_session": (
        LMDEPLOY_CUT,
        {"max_model_len": 131072, "kv_tokens": 111360, "error": "max_len_too_large"},
    ),
    "lmdeploy_region": (
        LMDEPLOY_17,
        {
            "gpu_memory_utilization": 0.8763,
            "max_model_len": 32768,
            "free_gib": 63488.19 / 1024,
            "available_kv_gib": 55634.7 / 1024,
        },
    ),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_a_log_becomes_the_record_of_what_it_prints(text, expected):
    record = read_log(text, "a-log")
    found = {**record, **record["extra"], **record["outputs"]}

    assert {key: found.get(key) for key in expected} == pytest.approx(expected)
    assert record["id"] == "a-log"


def test_only_what_was_printed_is_explicit():
    record = read_log(V1_10, "a-log")

    assert "gpu_memory_utilization" in record["explicit"]
    assert "gpu_total_gib" not in record["explicit"]  # from the request and its share
    assert "max_num_batched_tokens" in record["explicit"]
    assert "gpu" not in record["explicit"]


def test_every_rank_is_kept_and_the_one_with_least_memory_governs():
    ranks = read_log(V1_10, "a-log")["extra"]["per_rank"]

    assert ranks["Worker_TP0"]["available_kv_gib"] == 8.6
    assert ranks["Worker_TP1"]["available_kv_gib"] == 8.5
    assert ranks["Worker_TP1"]["activation_peak_gib"] == 1.5


def test_of_several_starts_the_last_one_counts():
    record = read_log(V0_2 + V1_08, "a-log")

    assert record["outputs"]["error"] == "none"
    assert record["outputs"]["num_gpu_blocks"] is None
    assert record["model"] == "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("path", "gpu"),
    [
        ("E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3.json", "NVIDIA_H100_80GB_HBM3"),
        ("E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8.json", "NVIDIA_H200"),
        ("N=1536,K=4096,device_name=NVIDIA_A100-SXM4-80GB,dtype=w8a8", "NVIDIA_A100-SXM4-80GB"),
    ],
)
def test_a_card_is_read_where_tuned_kernels_are_looked_for(path, gpu):
    text = f"INFO Using default MoE config. Config file not found at /configs/{path}\n{V1_08}"

    assert read_log(text, "a-log")["gpu"] == gpu


def test_tensorrt_llm_names_its_model_where_its_files_lie():
    text = "[TensorRT-LLM] TensorRT LLM version: 1.2.0rc4\n"
    text += "[TRT-LLM] [I] Prefetching /hub/models--meta-llama--Meta-Llama-3-8B-Instruct"
    text += "/snapshots/8afb486c/model-00002-of-00004.safetensors to memory...\n"
    record = read_log(text + TRT_TORCH.partition("\n")[2], "a-log")

    assert record["engine_version"] == "1.2.0rc4"
    assert record["model"] == "models--meta-llama--Meta-Llama-3-8B-Instruct"


def test_sglang_says_what_is_free_after_the_load_with_a_dtype_or_without():
    text = "[2026-06-07 19:05:53] server_args=ServerArgs(model_path='Qwen/Qwen2.5-1.5B-Instruct')\n"
    text += "[2026-06-07 19:06:22] Load weight end. elapsed=22.28 s, type=Qwen2ForCausalLM, "
    older = read_log(f"{text}dtype=torch.bfloat16, avail mem=109.01 GB, mem usage=3.25 GB.", "a")
    newer = read_log(f"{text}avail mem=109.01 GB, mem usage=3.25 GB.", "a")

    assert (older["weight_dtype"], newer["weight_dtype"]) == ("bfloat16", None)
    for record in (older, newer):
        assert record["extra"]["free_gib"] == 109.01
        assert record["outputs"]["weights_gib"] == 3.25


def test_pools_of_windows_and_of_the_rest_are_one_cache():
    text = """\
[2026-06-10 01:54:12] server_args=ServerArgs(model_path='/data/models/gemma-4-12B-it-AWQ')
[2026-06-10 01:54:34 TP0] KV Cache is allocated. #tokens: 45942, K size: 3.51 GB, V size: 3.51 GB
[2026-06-10 01:54:34 TP0] KV Cache is allocated. #tokens: 459425, K size: 3.51 GB, V size: 3.51 GB
[2026-06-10 01:54:34 TP0] SWAKVPool mem usage: 14.02 GB, swa size: 45942, full size: 459425
[2026-06-10 01:54:34 TP0] Memory pool end. avail mem=3.43 GB
"""
    record = read_log(text, "a")

    assert record["outputs"]["available_kv_gib"] == 14.02
    assert record["outputs"]["kv_tokens"] == 459_425
    assert "swa_pool_gib" not in record["extra"]


def test_a_release_is_no_number():
    text = V1_08.replace("v0.8.5.dev1", "v0.20")

    assert read_log(text, "a-log")["engine_version"] == "0.20 (V1)"


def test_a_row_of_digits_beyond_all_counts_is_refused_as_too_large():
    found = read_log(f"INFO [x.py:1] GPU KV cache size: {'9' * 5000} tokens\n{V0_5}", "x")

    with pytest.raises(UnreadableRecord, match="kv_tokens must be a number below 2"):
        case_of(found)


def test_a_negative_rest_is_a_number():
    text = "INFO [gpu_worker.py:563] Available KV cache memory: -7.83 GiB\n"

    assert read_log(text, "a-log")["outputs"]["available_kv_gib"] == -7.83


def test_blocks_for_fewer_requests_than_allowed_are_a_kind_of_refusal():
    text = "INFO [core.py:210] GPU KV cache size: 191,632 tokens\n"
    text += "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each "
    text += "decode sequence requires one Mamba cache block, so CUDA graph capture cannot proceed."
    record = read_log(text, "a-log")

    assert record["max_num_seqs"] == 1024
    assert record["outputs"]["num_gpu_blocks"] == 856
    assert record["outputs"]["error"] == "max_num_seqs_too_large"


def test_colours_and_commands_over_several_lines_are_read():
    text = "$ vllm serve \\\n  Qwen/Qwen3-8B \\\n  --gpu-memory-utilization 0.85 \\\n"
    text += "  --max-num-seqs=8\n"
    text += "\x1b[36m(EngineCore pid=1)\x1b[0m INFO GPU KV cache size:\x1b[K 10,032 tokens\n"
    record = read_log(text, "a-log")

    assert record["model"] == "Qwen/Qwen3-8B"
    assert (record["gpu_memory_utilization"], record["max_num_seqs"]) == (0.85, 8)
    assert record["outputs"]["kv_tokens"] == 10032


@pytest.mark.parametrize("text", ["", "INFO: started\n", "memory: 12 GiB\n" * 3])
def test_a_text_without_such_lines_is_no_start_up_log(text):
    with pytest.raises(UnreadableLog, match="no line about memory or capacity of vllm"):
        read_log(text, "a-log")


def test_the_command_prints_a_line_of_json_a_file(tmp_path, capsys):
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_text(V1_08)
    bad.write_text("nothing\n")

    assert main([str(good), str(bad)]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["id"] == "good"
    assert printed.err.count("\n") == 1 and "bad.log: no line about memory" in printed.err


@pytest.mark.parametrize(
    ("said", "flag"),
    [
        ("Using FlashInfer for top-p & top-k sampling.", "flashinfer_sampler=1"),
        (
            "FlashInfer is not available. Falling back to the PyTorch-native implementation",
            "flashinfer_sampler=0",
        ),
        (
            "FlashInfer is available, but it is not enabled. Falling back to the PyTorch-native",
            "flashinfer_sampler=0",
        ),
        (
            "FlashInfer top-p/top-k sampling is available but disabled by default. Set",
            "flashinfer_sampler=0",
        ),
        ("FlashInfer is not available on this platform", None),
    ],
)
def test_which_sampler_an_engine_took_is_a_flag(said, flag):
    text = f"INFO [topk_topp_sampler.py:50] {said}\nINFO Available KV cache memory: 5.01 GiB\n"

    assert read_log(text, "a-log")["other_flags"] == flag


ENGINE = "(EngineCore_0 pid=1812) INFO 09-04 01:02:54"
WHOLE = [
    "(APIServer pid=1671) INFO 09-04 01:02:21 [utils.py:326] non-default args: {'model_tag': "
    "'Qwen2-7B-Instruct', 'port': 8081, 'model': 'Qwen2-7B-Instruct', 'max_model_len': 16384,"
    " 'gpu_memory_utilization': 0.25}",
    f"{ENGINE} [core.py:74] Initializing a V1 LLM engine (v0.10.1.1) with config:"
    " model='Qwen2-7B-Instruct', dtype=torch.bfloat16, tensor_parallel_size=1, enforce_eager=False",
    f"{ENGINE} [gpu_worker.py:276] Available KV cache memory: 5.01 GiB",
    f"{ENGINE} [kv_cache_utils.py:849] GPU KV cache size: 93,872 tokens",
]


def test_lines_that_a_terminal_cut_are_whole():
    """As copied from a window of 90 columns; dennislee22/vLLM-benchmarking has such logs."""
    cut = "\n".join(whole[at : at + 90] for whole in WHOLE for at in range(0, len(whole), 90))
    record = read_log(cut, "a-log")

    assert record == read_log("\n".join(WHOLE), "a-log")
    assert (record["gpu_memory_utilization"], record["tp"]) == (0.25, 1)
    assert record["outputs"]["kv_tokens"] == 93_872


def test_a_line_of_its_own_stays_one_where_lines_are_as_long_by_chance():
    config = "INFO Initializing a V1 LLM engine (v0.10.0) with config: model='acme/m', "
    text = "\n".join([f"{config}tensor_parallel_size={n}" for n in (1, 2, 4)])
    text += "\nGPU KV cache size: 16 tokens"

    assert read_log(text, "a-log")["tp"] == 4


@pytest.mark.parametrize(
    "kept", [lambda line: {"log": f"{line}\n", "stream": "stderr"}, lambda line: {"message": line}]
)
def test_a_log_kept_as_json_is_read_as_it_was_printed(kept):
    sizes = "compilation_config={'cudagraph_capture_sizes': [1, 2, 4]}"
    printed = V1_12.replace("kv_cache_dtype=auto", f"kv_cache_dtype=auto, {sizes}")
    as_json = "\n".join(json.dumps(kept(line)) for line in printed.splitlines())
    assert read_log(as_json, "start") == read_log(printed, "start")
    assert "cudagraph_capture_sizes=[1, 2, 4]" in read_log(as_json, "start")["other_flags"]
