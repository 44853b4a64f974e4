"""The line to paste for vLLM, in the words of each release's wheel."""

import json
import shlex

import pytest

import kvexp
from kvexp.results import Status
from thinned import thinned

LLAMA, VL = ("model=llama31_8b", "gpu=h100"), ("model=qwen25_vl_7b", "gpu=h100")


def line(*overrides):
    result = kvexp.run([*LLAMA, *overrides])
    assert result.status is Status.ok, result.reason
    return result.effective["flags"]


LINES = {  # version, option, what it adds to the line
    "no graphs, by any case": ("0.9.1", "cudagraph_mode=NONE", '{"use_cudagraph": false}'),
    "whole graphs": ("0.9.1", "cudagraph_mode=FULL", '{"full_cuda_graph": true}'),
    "modes by name": ("0.10.1", "cudagraph_mode=Full", '{"cudagraph_mode": "FULL"}'),
    "levels": ("0.6.5", "compilation_mode=0", '{"level": 0}'),
    "sizes": ("0.6.5", "cudagraph_capture_sizes=[8,16]", '{"cudagraph_capture_sizes": [8, 16]}'),
    "the largest": (
        "0.11.1",
        "max_cudagraph_capture_size=8",
        '{"max_cudagraph_capture_size": 8}',
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_entries_of_the_compilation_config(name):
    version, option, config = LINES[name]

    found = line(f"engine.version={version}", f"engine.{option}")
    assert found.endswith(f" --compilation-config '{config}'")


FLAGS = {
    "one size of graphs before 0.11.1": (
        "0.11.0",
        "max_cudagraph_capture_size=8",
        "--cuda-graph-sizes 8",
    ),
    "encoders whole on each rank": (
        "0.10.2",
        "mm_encoder_tp_mode=DATA",
        "--mm-encoder-tp-mode data",
    ),
    "before 0.10.2 too": (
        "0.10.1",
        "mm_encoder_tp_mode=data",
        "--enable-multimodal-encoder-data-parallel",
    ),
    "any case": ("0.26.0", "performance_mode=THROUGHPUT", "--performance-mode throughput"),
    "embeddings": ("0.10.0", "runner=POOLING", "--runner pooling"),
    "a switch": ("0.10.0", "async_scheduling=false", "--no-async-scheduling"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_have_the_releases_names(name):
    version, option, flag = FLAGS[name]

    assert line(f"engine.version={version}", f"engine.{option}").endswith(f" {flag}")


def test_the_allocators_setting_is_a_variable_before_the_command():
    found = line("engine.version=0.20.0", "engine.expandable_segments=true")

    assert found.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True vllm serve ")


@pytest.mark.parametrize(
    "option", ["async_scheduling=false", "v2_model_runner=false", "estimate_cudagraphs=false"]
)
def test_what_a_release_does_not_have_is_not_turned_off(option):
    assert line("engine.version=0.9.2", f"engine.{option}") == line("engine.version=0.9.2")


STARTS = {
    "0.5.1": "python -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-3.1-8B ",
    "0.5.2": "vllm serve meta-llama/Llama-3.1-8B ",
    "0.7.3": "vllm serve meta-llama/Llama-3.1-8B ",
    "0.7.3-v0": "vllm serve meta-llama/Llama-3.1-8B ",
    "0.8.5": "vllm serve meta-llama/Llama-3.1-8B ",
    "0.8.5-v0": "VLLM_USE_V1=0 vllm serve meta-llama/Llama-3.1-8B ",
    "0.10.2-V0": "VLLM_USE_V1=0 vllm serve meta-llama/Llama-3.1-8B ",
}


@pytest.mark.parametrize("version", STARTS)
def test_the_engine_is_the_one_that_was_planned_for(version):
    assert line(f"engine.version={version}").startswith(STARTS[version])


OLDER = {  # the release before the first one whose wheel has the option
    "pp=2": ("0.5.0", "pp needs vLLM 0.5.1"),
    "pp=2 pp_partition=[15,17]": ("0.5.3", "pp_partition needs vLLM 0.5.4"),
    "dp=2": ("0.8.2", "dp needs vLLM 0.8.3"),
    "kv_dtype=int4_per_token_head": ("0.24.0", "kv_dtype=int4_per_token_head needs vLLM 0.25"),
    "speculative.method=suffix speculative.num_tokens=2": (
        "0.11.0",
        "speculative.method=suffix needs vLLM 0.11.1",
    ),
    "engine.v2_model_runner=true": ("0.11.2", "engine.v2_model_runner needs vLLM 0.12"),
    "engine.enable_expert_parallel=true": ("0.7.3", "engine.enable_expert_parallel needs vLLM 0.8"),
    "tp=16 engine.decode_context_parallel_size=2": (
        "0.10.1",
        "engine.decode_context_parallel_size needs vLLM 0.10.2",
    ),
    "engine.disable_hybrid_kv_cache_manager=true": (
        "0.9.0",
        "engine.disable_hybrid_kv_cache_manager needs vLLM 0.9.1",
    ),
    "engine.kv_cache_memory_bytes=4GiB": (
        "0.10.1",
        "engine.kv_cache_memory_bytes needs vLLM 0.10.2",
    ),
    "engine.mm_encoder_tp_mode=data": ("0.9.0", "engine.mm_encoder_tp_mode needs vLLM 0.9.1"),
    "engine.skip_mm_profiling=true": ("0.10.0", "engine.skip_mm_profiling needs vLLM 0.10.1"),
    "engine.cudagraph_capture_sizes=[8]": (
        "0.6.4",
        "engine.cudagraph_capture_sizes needs vLLM 0.6.5",
    ),
    "engine.max_cudagraph_capture_size=8": (
        "0.8.5",
        "engine.max_cudagraph_capture_size needs vLLM 0.9",
    ),
    "engine.cudagraph_mode=none": ("0.6.4", "engine.cudagraph_mode needs vLLM 0.6.5"),
    "engine.cudagraph_mode=full": ("0.8.5", "engine.cudagraph_mode=full needs vLLM 0.9"),
    "engine.compilation_mode=0": ("0.6.4", "engine.compilation_mode needs vLLM 0.6.5"),
    "engine.performance_mode=interactivity": (
        "0.16.0",
        "engine.performance_mode needs vLLM 0.17",
    ),
}


@pytest.mark.parametrize("asked", thinned(OLDER))
def test_an_option_is_refused_by_older_releases(asked):
    version, words = OLDER[asked]
    result = kvexp.run([*LLAMA, f"engine.version={version}", *asked.split()])

    assert result.status is Status.invalid
    assert result.reason == f"{words} or newer, got engine.version={version}"


def test_limits_are_refused_by_older_releases():
    result = kvexp.run([*VL, "engine.version=0.5.4", "mm.limits.image=2"])

    assert result.reason == "mm.limits needs vLLM 0.5.5 or newer, got engine.version=0.5.4"


def test_the_v0_engine_ended_with_0_10():
    result = kvexp.run([*LLAMA, "engine.version=0.11.0-v0"])

    assert result.status is Status.invalid
    assert "must be 0.10 or older with -v0" in result.reason


@pytest.mark.parametrize(
    ("version", "written"),
    [("0.8.4", "image=2,video=0"), ("0.8.5", """'{"image": 2, "video": 0}'""")],
)
def test_limits_are_json_from_0_8_5(version, written):
    limits = ["mm.limits.image=2", "mm.limits.video=0"]
    flags = kvexp.run([*VL, f"engine.version={version}", *limits]).effective["flags"]

    assert flags.endswith(f" --limit-mm-per-prompt {written}")


SIZES = ("engine.cudagraph_capture_sizes=[16,32]", "max_num_seqs=8")


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        (["engine.max_cudagraph_capture_size=8"], "null or 32"),
        (["engine.max_cudagraph_capture_size=32", "max_num_batched_tokens=20"], "null or 16"),
        (["engine.max_cudagraph_capture_size=8", "max_num_batched_tokens=8"], "null"),
    ],
)
def test_a_maximum_beside_a_list_is_the_lists_own(overrides, allowed):
    """`customized max_cudagraph_capture_size should be consistent` (0.11.1 to 0.26)."""
    result = kvexp.run([*LLAMA, *SIZES, *overrides])

    assert result.status is Status.invalid
    assert result.reason.startswith(f"engine.max_cudagraph_capture_size must be {allowed}, by the")


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.max_cudagraph_capture_size=32"],
        ["engine.max_cudagraph_capture_size=8", "enforce_eager=true"],
        ["engine.max_cudagraph_capture_size=8", "engine.cudagraph_mode=none"],
        ["engine.max_cudagraph_capture_size=8", "engine.version=0.11.0"],
    ],
)
def test_it_is_not_looked_at_otherwise(overrides):
    assert kvexp.run([*LLAMA, *SIZES, *overrides]).status is Status.ok


def config(folder):
    folder.mkdir()
    facts = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("file", ["", "/config.json"])
@pytest.mark.parametrize("name", ["model", "my model"])
def test_a_checkpoint_is_served_from_its_path(tmp_path, name, file):
    folder = config(tmp_path / name)
    result = kvexp.run(["model=hf", f"model.path='{folder}{file}'", "gpu=h100"])

    assert shlex.split(result.effective["flags"])[:3] == ["vllm", "serve", str(folder)]


def test_a_part_of_a_repository_is_no_name_of_one():
    result = kvexp.run(["model=gemma3_4b", "gpu=h100"])

    assert " google/gemma-3-4b-it --" in result.effective["flags"]
    assert any("google/gemma-3-4b-it is gemma3_4b_vision" in note for note in result.notes)


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "awq", "gptq", "mxfp4", "nvfp4"])
def test_a_format_that_a_checkpoint_states_has_no_flag(name):
    result = kvexp.run([*LLAMA, f"quantization={name}"])

    assert "--quantization" not in result.effective["flags"]
    place = "to be served in place of meta-llama/Llama-3.1-8B"
    assert f"weights of a checkpoint in {name}, {place}" in result.notes


@pytest.mark.parametrize("named", ["Qwen/Qwen3-14B-AWQ", "RedHatAI/Qwen3-8B-FP4"])
def test_a_repository_that_is_in_its_format_is_served_itself(named):
    result = kvexp.run([f"model={named}", "gpu=h100"])

    assert result.effective["flags"].startswith(f"vllm serve {named} ")
    assert not any("to be served" in note for note in result.notes)


@pytest.mark.parametrize(
    ("version", "name", "flag"),
    [
        ("0.26.0", "fp8", "--quantization fp8"),
        ("0.8.2", "bitsandbytes", "--quantization bitsandbytes"),
        ("0.8.1", "bitsandbytes", "--quantization bitsandbytes --load-format bitsandbytes"),
    ],
)
def test_a_format_that_is_made_while_loading_has_its_flag(version, name, flag):
    result = kvexp.run([*LLAMA, f"engine.version={version}", f"quantization={name}"])

    assert result.effective["flags"].endswith(f" {flag}")
    assert not any("to be served" in note for note in result.notes)


DRAFTS = {
    "0.8.1 has a flag each": (
        "0.8.1",
        "speculative.method=draft_model speculative.model=llama32_1b",
        "--speculative-model meta-llama/Llama-3.2-1B --num-speculative-tokens 2",
    ),
    "and a name for n-grams": (
        "0.8.1",
        "speculative.method=ngram",
        "--speculative-model '[ngram]' --ngram-prompt-lookup-max 5 --num-speculative-tokens 2",
    ),
    "0.8.2 has them in one": (
        "0.8.2",
        "speculative.method=ngram",
        """--speculative-config '{"method": "ngram", "num_speculative_tokens": 2}'""",
    ),
    "0.10.2 finds drafting layers by itself": (
        "0.10.2",
        "model=deepseek_v3 model.num_nextn_predict_layers=1 gpu=h200 tp=8 speculative.method=mtp",
        """--speculative-config '{"num_speculative_tokens": 2}'""",
    ),
    "0.11 has a name for them": (
        "0.11.0",
        "model=deepseek_v3 model.num_nextn_predict_layers=1 gpu=h200 tp=8 speculative.method=mtp",
        """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'""",
    ),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_have_the_releases_flags(name):
    version, asked, flags = DRAFTS[name]
    overrides = [f"engine.version={version}", "speculative.num_tokens=2", *asked.split()]

    assert kvexp.run([*LLAMA, *overrides]).effective["flags"].endswith(f" {flags}")
