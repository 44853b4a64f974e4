"""What options mean for memory: every option of vLLM has a place, and the lists keep their word."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_flags import LLAMA, notes_of, request_with

from kvexp.startup_logs import arguments, costs_of, read_log
from kvexp.validate import sglang, speculative
from kvexp.validate.flags import read
from kvexp.validate.predict import predict

NAMES = json.loads((Path(__file__).parents[1] / "data/vllm_engine_args.json").read_text())
"""Fields of vLLM's EngineArgs in the wheel of 0.26.0, and some that older ones had."""

VLLM = costs_of("vllm")
INPUTS = {name for names in arguments("vllm").values() for name in names}
SAMPLES = {  # values that are not the defaults
    "max_loras": "enable_lora; max_loras=2; max_lora_rank=16",
    "max_lora_rank": "enable_lora; max_loras=1; max_lora_rank=32",
    "enable_lora": "enable_lora; max_loras=1; max_lora_rank=16",
    "fully_sharded_loras": "enable_lora; max_loras=1; max_lora_rank=16; fully_sharded_loras",
    "speculative_config": "speculative_config={'method': 'ngram', 'num_speculative_tokens': 3}",
    "speculative_model": "speculative_model=[ngram]; num_speculative_tokens=3",
    "num_speculative_tokens": "speculative_model=[ngram]; num_speculative_tokens=3",
    "spec_method": "spec_method=ngram; spec_tokens=3",
    "spec_model": "spec_model=meta-llama/Llama-3.2-1B; spec_tokens=3",
    "spec_tokens": "spec_method=ngram; spec_tokens=3",
    "limit_mm_per_prompt": "limit_mm_per_prompt={'image': 1}",
    "language_model_only": "language_model_only=True",
    "mm_encoder_tp_mode": "mm_encoder_tp_mode=data",
    "skip_mm_profiling": "skip_mm_profiling",
    "mm_processor_kwargs": "mm_processor_kwargs={'max_pixels': 1003520}",
    "max_pixels": "mm_processor_kwargs={'max_pixels': 1003520}",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes=8G",
    "num_gpu_blocks_override": "num_gpu_blocks_override=512",
    "enable_expert_parallel": "enable_expert_parallel",
    "decode_context_parallel_size": "decode_context_parallel_size=1",
    "disable_hybrid_kv_cache_manager": "disable_hybrid_kv_cache_manager",
    "disable_custom_all_reduce": "disable_custom_all_reduce",
    "async_scheduling": "no-async-scheduling",
    "v2_model_runner": "v2_model_runner=0",
    "estimate_cudagraphs": "estimate_cudagraphs=0",
    "flashinfer_sampler": "flashinfer_sampler=1",
    "runner": "runner=pooling",
    "pooler_config": "pooler_config={'pooling_type': 'LAST'}",
    "expandable_segments": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "cpu_offload_gb": "cpu_offload_gb=2",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "performance_mode": "performance_mode=throughput",
    "enable_prefix_caching": "enable_prefix_caching",
    "mamba_cache_mode": "mamba_cache_mode=align",
    "mamba_block_size": "mamba_block_size=512",
    "mamba_cache_dtype": "mamba_cache_dtype=float32",
    "mamba_ssm_cache_dtype": "mamba_ssm_cache_dtype=bfloat16",
    "cuda_graph_sizes": "cuda_graph_sizes=[1, 2]",
    "cudagraph_capture_sizes": "cudagraph_capture_sizes=[1, 2]",
    "max_cudagraph_capture_size": "max_cudagraph_capture_size=8",
    "compilation_config": "compilation_config={'cudagraph_capture_sizes': [1, 2]}",
    "cudagraph_mode": "cudagraph_mode=PIECEWISE",
    "mode": "mode=3",
    "level": "level=3",
    "use_cudagraph": "use_cudagraph=False",
    "full_cuda_graph": "full_cuda_graph=True",
    "optimization_level": "optimization_level=1",
}
IMAGES = (
    *("limit_mm_per_prompt", "language_model_only", "mm_encoder_tp_mode", "skip_mm_profiling"),
    *("mm_processor_kwargs", "max_pixels"),
)


@pytest.mark.parametrize("name", [*NAMES["0.26.0"], *NAMES["older"]])
def test_every_option_has_a_place(name):
    assert name in INPUTS or VLLM.knows(name)


def test_no_option_has_two_places():
    listed = [*VLLM.rule, *VLLM.no_rule]

    assert len(listed) == len(set(listed))
    assert [name for name in listed if VLLM.nothing.fullmatch(name)] == []
    assert INPUTS.isdisjoint(listed)


@pytest.mark.parametrize("name", VLLM.rule)
def test_an_option_with_a_rule_is_counted(name):
    model = "Qwen/Qwen2.5-VL-3B-Instruct" if name in IMAGES else LLAMA.model

    assert notes_of(SAMPLES[name], model=model) == []


@pytest.mark.parametrize("name", VLLM.no_rule)
def test_an_option_without_a_rule_is_named_with_what_it_changes(name):
    (note,) = notes_of(f"{name}=1")

    assert note == f"other_flags: no rule for '{name}=1': {VLLM.no_rule[name]}"


@pytest.mark.parametrize(
    "flags",
    [
        "swap-space 0",
        "load-format dummy",
        "--disable-log-stats --disable-log-requests --trust-remote-code --seed 7",
        "--tokenizer-mode mistral --served-model-name m --distributed-executor-backend ray",
        "enable_prefix_caching=False",
        "prefix caching",
        "max_cpu_loras=8; kv_offloading_size=4; scheduling_policy=priority",
    ],
)
def test_what_takes_nothing_on_the_card_is_not_named(flags):
    assert notes_of(flags) == []
    assert predict(replace(LLAMA, other_flags=flags)).values == predict(LLAMA).values


GRANITE = {"model": "ibm-granite/granite-4.0-h-small", "tp": 8, "engine_version": "0.26.0"}
CACHING = {
    "--enable-prefix-caching": (True, None, None),
    "prefix caching": (True, None, None),
    "Prefix caching enabled": (True, None, None),
    "enable_prefix_caching=True, mamba_cache_mode=align": (True, "align", None),
    "--mamba-block-size 1024 --mamba-cache-mode all --enable-prefix-caching": (True, "all", 1024),
    "--no-enable-prefix-caching": (False, None, None),
    "no prefix caching": (False, None, None),
    "prefix caching off": (False, None, None),
}


@pytest.mark.parametrize("flags", CACHING)
def test_prefix_caching_is_asked_for_in_any_words(flags):
    assert notes_of(flags, **GRANITE) == []
    engine = request_with(flags, **GRANITE).run.engine
    found = (engine.enable_prefix_caching, engine.mamba_cache_mode, engine.mamba_block_size)
    assert found == CACHING[flags]


def test_a_mode_that_a_release_has_not_is_named():
    (note,) = notes_of("enable_prefix_caching; mamba_cache_mode=each", **GRANITE)

    assert note.endswith("one of none, align, all in vLLM 0.26.0, got 'each'")


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "lmdeploy"])
def test_options_with_a_rule_are_options_of_the_engine(engine):
    names = set(vars(request_with(None, engine=engine).run.engine))

    assert set(costs_of(engine).rule) <= names | {*sglang.TRANSLATED, *speculative.TRANSLATED}


CONFIG = (
    "INFO [core.py:58] Initializing a V1 LLM engine (v0.19.0) with config: model='acme/m',"
    " dtype=torch.bfloat16, max_seq_len=1024, tensor_parallel_size=1, enforce_eager=False,"
    " enable_prefix_caching=True, seed=0, compilation_config={'mode': <CompilationMode.NONE: 0>,"
    " 'backend': 'inductor', 'custom_ops': ['none'], 'cudagraph_mode':"
    " <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>, 'cudagraph_num_of_warmups': 1,"
    " 'cudagraph_capture_sizes': [1, 2, 4], 'max_cudagraph_capture_size': 4}\n"
    "INFO [kv_cache_utils.py:634] GPU KV cache size: 158,656 tokens\n"
)


def test_a_logs_effective_graphs_and_prefix_caching_are_inputs():
    flags = read_log(CONFIG, "a-log")["other_flags"]

    assert {flag.name for flag in read(flags)} == {
        "mode",
        "cudagraph_mode",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "enable_prefix_caching",
    }
    engine = request_with(flags).run.engine
    assert (engine.compilation_mode, engine.cudagraph_mode) == (0, "full_decode_only")
    assert list(engine.cudagraph_capture_sizes) == [1, 2, 4]
