"""What flags in a record mean, and what a prediction makes of them."""

import json
from dataclasses import replace

import pytest

from kvexp.dtypes import DType
from kvexp.validate.case import Inputs, case_of
from kvexp.validate.flags import read
from kvexp.validate.predict import predict
from kvexp.validate.request import Known, request_of

KNOWN = Known.here()
LLAMA = Inputs(
    id="llama",
    engine="vllm",
    engine_version="0.19.0",
    model="meta-llama/Llama-3.1-8B-Instruct",
    gpu="H100 80GB",
    gpu_total_gib=79.19,
    tp=1,
    gpu_memory_utilization=0.9,
    max_model_len=8192,
    max_num_batched_tokens=8192,
    max_num_seqs=256,
    stated=("model", "gpu", "gpu_total_gib", "gpu_memory_utilization", "max_num_seqs"),
)
DRAFT = "meta-llama/Llama-3.2-1B"


def request_with(flags, **changes):
    inputs = replace(LLAMA, other_flags=flags, **changes)
    card = KNOWN.cards.find(inputs.gpu, inputs.gpu_total_gib)
    return request_of(inputs, KNOWN, card, KNOWN.models.find(inputs.model))


def notes_of(flags, **changes):
    assumptions = request_with(flags, **changes).assumptions
    return [each for each in assumptions if each.startswith("other_flags")]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("--enable-lora --max-loras 4", {"enable_lora": True, "max_loras": 4}),
        ("--enable-lora, --max-loras=4; x", {"enable_lora": True, "max_loras": 4, "x": True}),
        ("enable_lora=True max_loras=4", {"enable_lora": True, "max_loras": 4}),
        ("enable_lora=True,max_loras=4", {"enable_lora": True, "max_loras": 4}),
        ("limit_mm_per_prompt image=1 video=0", {"limit_mm_per_prompt": {"image": 1, "video": 0}}),
        ("--limit-mm-per-prompt '{\"image\": 2}'", {"limit_mm_per_prompt": {"image": 2}}),
        (
            '--limit-mm-per-prompt {"image": 2, "video": 0}',
            {"limit_mm_per_prompt": {"image": 2, "video": 0}},
        ),
        (
            "speculative_config={'method': 'ngram', 'x': None}",
            {"speculative_config": {"method": "ngram", "x": None}},
        ),
        (
            "--speculative-config.method mtp --speculative-config.num_speculative_tokens 2",
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        ),
        (
            "--cuda-graph-sizes 1 2 4 --swap-space 0",
            {"cuda_graph_sizes": [1, 2, 4], "swap_space": 0},
        ),
        ("enable-expert-parallel; swap-space 0", {"enable_expert_parallel": True, "swap_space": 0}),
        ("no-enable-chunked-prefill", {"enable_chunked_prefill": False}),
        ("cpu_offload_gb=2", {"cpu_offload_gb": 2}),
        ("max tokens configured", {"max": "tokens configured"}),
        (
            "chunked prefill; no custom all-reduce",
            {"chunked": "prefill", "no": "custom all-reduce"},
        ),
        ("39 capture sizes", {"": None}),
        (None, {}),
        ("", {}),
        ("((", {"": None}),
    ],
)
def test_flags_are_read_each_with_its_value(text, flags):
    assert {flag.name: flag.value for flag in read(text or "")} == flags


@pytest.mark.parametrize(
    "flags",
    [
        "--enable-lora --max-loras 4 --max-lora-rank 64",
        "enable_lora=True max_loras=4 max_lora_rank=64",
        "enable_lora=True; max_loras=4; max_lora_rank=64",
        "max-lora-rank 64, max-loras 4, enable-lora",
    ],
)
def test_adapters_have_the_room_that_is_stated(flags):
    lora = request_with(flags).run.lora

    assert (lora.max_loras, lora.max_rank) == (4, 64)
    assert notes_of(flags) == []
    without = predict(LLAMA).values["weights_bytes"].best
    weights = predict(replace(LLAMA, other_flags=flags)).values["weights_bytes"].best
    # for each adapter and layer (inputs + outputs) x rank in bf16: q, o, k and v, gate, up, down
    layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert weights - without > 4 * 64 * 2 * 32 * layer


def test_a_value_that_python_warns_of_is_read_without_a_word(recwarn):
    (flag,) = read("chat_template='a\\d' ".strip())
    list(read("speculative_config={'a': 1if}, lora_path=C:\\dir"))

    assert flag.value == "a\\d"
    assert list(recwarn) == []


def test_adapters_without_a_size_have_vllms():
    assert request_with("LoRA enabled (PunicaWrapper)").run.lora.max_rank == 16
    (note,) = notes_of("--enable-lora")
    assert note == "other_flags: '--enable-lora' as {'max_loras': 1, 'max_rank': 16}"


@pytest.mark.parametrize("flags", ["enable_lora=False max_loras=4", "--max-loras 4", ""])
def test_adapters_are_off_where_nothing_turns_them_on(flags):
    assert not request_with(flags).run.lora.is_asked


@pytest.mark.parametrize(
    "flags",
    [
        f'--speculative-config \'{{"model": "{DRAFT}", "num_speculative_tokens": 5}}\'',
        f"speculative_config={{'model': '{DRAFT}', 'num_speculative_tokens': 5}}",
        f"--speculative-model {DRAFT} --num-speculative-tokens 5",
        f"speculative_config: SpeculativeConfig(draft_model='{DRAFT}', num_spec_tokens=5)",
    ],
)
def test_a_draft_is_a_model_of_the_catalogue(flags):
    asked = request_with(flags).run.speculative

    assert (asked.model, asked.num_tokens) == ("llama32_1b", 5)
    assert notes_of(flags) == []
    without = predict(LLAMA).values["weights_bytes"].best
    weights = predict(replace(LLAMA, other_flags=flags)).values["weights_bytes"].best
    assert weights - without == pytest.approx(2 * 1_235_814_400, rel=0.01)  # 1.24e9 in bf16


@pytest.mark.parametrize(
    ("dtype", "max_model_len", "tokens"),
    [("bfloat16", 65_536, 214_135), ("fp8_e4m3", 147_456, 451_603)],
)  # noonghunna/club-3090#1086, #1085
def test_a_dflash_draft_of_no_catalogue_has_five_layers(dtype, max_model_len, tokens):
    draft = "qwen3.8-27b-dflash2-w4a16"
    asked = {"method": "dflash", "model": draft, "num_speculative_tokens": 7}
    log = replace(
        LLAMA,
        engine_version="0.27.1",
        model="Qwen3.8-27B-FP8",
        gpu="RTX 5090",
        gpu_total_gib=31.36,
        tp=2,
        kv_cache_dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=1,
        other_flags=f"kv_cache_memory_bytes={int(11.15 * 2**30)}; enable_prefix_caching=True; "
        f"speculative_config={json.dumps(asked)}",
    )

    prediction = predict(log)

    note = f"other_flags: {draft!r} counted with the layers of z-lab's drafts"
    assert note in prediction.assumptions
    assert prediction.values["kv_tokens"].best == pytest.approx(tokens, rel=0.03)


def test_an_eagle3_draft_of_no_catalogue_has_one_layer():
    asked = {"method": "eagle3", "model": "someone/llama-speculator", "num_speculative_tokens": 3}
    flags = f"speculative_config={json.dumps(asked)}"
    served = KNOWN.model("llama31_8b")
    width, mlp = served.hidden_size, served.intermediate_size
    attention = 2 * width * (4096 + 1024) + 2 * 4096 * width  # of two inputs, but for the output
    elements = attention - width * 4096 + 3 * width * mlp + 3 * width * width + 32000 * width

    without = predict(LLAMA).values["weights_bytes"].best
    both = predict(replace(LLAMA, other_flags=flags)).values["weights_bytes"].best
    run = request_with(flags).run
    assert (run.speculative.method, run.speculative.num_tokens) == ("eagle3", 3)
    assert both - without == pytest.approx(2 * elements, rel=0.1)
    assert "'someone/llama-speculator' counted as one layer" in " ".join(notes_of(flags))


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp"])
def test_a_model_that_drafts_for_itself_needs_no_draft(method):
    flags = (
        f'--speculative-config {{"method": "{method}", "model": "x", "num_speculative_tokens": 1}}'
    )
    run = request_with(flags, model="Qwen/Qwen3-Next-80B-A3B-Instruct", tp=8).run

    assert (run.speculative.method, run.speculative.model) == ("mtp", None)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            'speculative_config={"model": "acme/none", "num_speculative_tokens": 3}',
            "'acme/none' is in no catalogue",
        ),
        (
            'speculative_config={"method": "medusa", "num_speculative_tokens": 3}',
            "speculative.method must be one of",
        ),
        ("--enable-lora --max-loras 1 --max-lora-rank 17", "lora.max_rank must be one of"),
        ("limit_mm_per_prompt image=1", "llama31_8b takes text alone"),
        ("--offload-group-size 8", "'--offload-group-size 8'"),
        ("--cpu-offload-gb=-4", "engine.cpu_offload_gb must be from 0 to"),
        ("num_gpu_blocks_override=0", "engine.num_gpu_blocks_override must be at least 1"),
        ("num_gpu_blocks_override=many", "'num_gpu_blocks_override=many'"),
        ("--enable-lora=0 --max-loras 0", "'--max-loras 0'"),
        (f"limit_mm_per_prompt image={10**30}", "mm.limits.image must be at most 65536"),
        (f"speculative_config={{'num_spec_tokens': {10**30}}}", "'num_spec_tokens'"),
        ("usage stats disabled", "'usage stats disabled'"),
        ("MTP 3 tokens", "speculative.method=mtp is known for"),
        ("ngram drafter", "speculative.num_tokens must be given"),
        ("MTP off", "'MTP off'"),
        ("speculative drafter kept", "'speculative drafter kept'"),
    ],
)
def test_what_has_no_rule_is_named_once_and_the_case_is_answered(flags, reason):
    (note,) = notes_of(flags)

    assert note.startswith("other_flags: no rule for") and reason in note
    plain, found = predict(LLAMA), predict(replace(LLAMA, other_flags=flags))
    assert found.values == plain.values


def test_limits_are_those_of_modalities_that_the_model_has():
    flags = '--limit-mm-per-prompt \'{"image": 2, "video": 0, "audio": 0}\''
    run = request_with(flags, model="google/gemma-3-4b-it").run

    assert run.mm.limits.given == {"image": 2, "video": 0, "audio": 0}
    assert notes_of(flags, model="google/gemma-3-4b-it") == []


def test_sizes_of_items_are_named_and_their_limits_are_counted():
    flags = '--limit-mm-per-prompt \'{"image": {"count": 1, "width": 224, "height": 224}}\''
    (note,) = notes_of(flags, model="google/gemma-3-4b-it")

    assert "no rule for the size of items" in note
    assert request_with(flags, model="google/gemma-3-4b-it").run.mm.limits.given == {"image": 1}


@pytest.mark.parametrize(("flags", "level"), [("-O0 -O3", None), ("-O3 -O0", 0)])
def test_of_several_levels_the_last_counts(flags, level):
    run = request_with(flags, engine_version="0.12.0").run

    assert run.engine.compilation_mode == level


@pytest.mark.parametrize(
    "flags",
    [
        "cpu_offload_gb=nan",
        "--cpu-offload-gb 1e400",
        "--compilation-config '{\"cudagraph_capture_sizes\": [[1, 2]]}'",
    ],
)
def test_a_value_that_is_none_leaves_the_case_answered(flags):
    (note,) = notes_of(flags)

    assert note.startswith("other_flags: no rule for")


def test_without_images_no_tower_is_built():
    gemma = replace(LLAMA, model="google/gemma-3-4b-it")
    weights = [
        predict(replace(gemma, other_flags=flags)).values["weights_bytes"].best
        for flags in (None, "--limit-mm-per-prompt image=0", "--language-model-only")
    ]

    assert weights[1] == weights[2] < weights[0]


@pytest.mark.parametrize(
    "flag", ["kv_cache_memory_bytes=24G", "--kv-cache-memory=25769803776", "kv-cache-memory 24GiB"]
)
def test_a_given_cache_is_what_is_left_for_the_cache(flag):
    found = predict(replace(LLAMA, other_flags=flag))

    assert found.values["available_kv_bytes"].best == 24 << 30
    assert found.values["num_blocks"].best == (24 << 30) // (16 * 131072)


def test_an_engine_that_counts_no_adapters_says_so():
    (note,) = notes_of("--enable-lora --max-loras 2 --max-lora-rank 8", engine="nano-vllm")

    assert "lora is not counted for engine=nano_vllm" in note


@pytest.mark.parametrize(("value", "uses"), [("1", True), ("True", True), ("0", False)])
def test_the_runner_is_an_option(value, uses):
    request = request_with(f"v2_model_runner={value}", engine_version="0.26.0")

    assert request.run.engine.v2_model_runner is uses


def test_variables_of_the_environment_are_options():
    flags = "VLLM_USE_V2_MODEL_RUNNER=0; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"
    engine = request_with(flags, engine_version="0.26.0").run.engine

    assert (engine.v2_model_runner, engine.estimate_cudagraphs) == (False, False)
    assert notes_of(flags, engine_version="0.26.0") == []


@pytest.mark.parametrize(
    "flag",
    ["runner=pooling", "convert=embed", "task=embed", "pooler_config={'pooling_type': 'LAST'}"],
)
def test_what_makes_embeddings_is_one_option(flag):
    request = request_with(flag, engine_version="0.22.0")

    assert request.run.engine.runner == "pooling"
    assert notes_of(flag, engine_version="0.22.0") == []


def test_settings_of_the_allocator_are_options():
    flags = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512"
    request = request_with(flags, engine_version="0.20.0")

    assert request.run.engine.expandable_segments is True
    assert notes_of(flags, engine_version="0.20.0") == [
        "other_flags: no rule for 'max_split_size_mb:512'"
    ]


RECORD = {"id": "a-case", "engine": "vllm", "model": "Qwen/Qwen3-8B", "tp": 2}


def test_inputs_that_stand_among_the_flags_are_inputs():
    flags = "--max-num-seqs 16 --dtype half -tp 2 --max-model-len 32k --enable-lora; tp 2"
    inputs = case_of({**RECORD, "other_flags": flags}).inputs

    assert (inputs.max_num_seqs, inputs.weight_dtype, inputs.tp) == (16, "half", 2)
    assert inputs.max_model_len == 32000
    assert inputs.is_stated("max_num_seqs", "weight_dtype", "max_model_len")
    assert not inputs.is_stated("tp")
    assert notes_of("--max-num-seqs 256 --gpu-memory-utilization 0.9 -tp 1") == []


@pytest.mark.parametrize("flags", ["model runner v2", "tp unknown", "--max-num-seqs many"])
def test_words_about_an_input_are_none(flags):
    inputs = case_of({"id": "a-case", "engine": "vllm", "other_flags": flags}).inputs

    assert (inputs.model, inputs.tp, inputs.max_num_seqs) == (None, None, None)
    assert notes_of(flags) == [f"other_flags: no rule for {flags!r}"]


def test_a_flag_that_contradicts_the_record_is_named():
    assert notes_of("--max-num-seqs 8") == [
        "other_flags: '--max-num-seqs 8', but max_num_seqs is 256"
    ]


def test_a_dtype_is_given_by_its_name_in_torch():
    request = request_with("mamba_ssm_dtype=bfloat16; max_total_tokens=4096", engine="sglang")

    assert request.run.engine.mamba_ssm_dtype is DType.bf16
    assert request.run.engine.max_total_tokens == 4096


@pytest.mark.parametrize(
    "flags",
    [
        "--cudagraph-capture-sizes 1 2 4",
        """--compilation-config '{"cudagraph_capture_sizes": [1, 2, 4]}'""",
        """-cc '{"mode": 3, "cudagraph_capture_sizes": [4, 1, 2]}'""",
        "-cc.cudagraph_capture_sizes [1,2,4] -cc.cudagraph_num_of_warmups 1",
        "--cuda-graph-sizes 1 2 4",
        "compilation_config={'cudagraph_capture_sizes': [1, 2, 4]}",
    ],
)
def test_sizes_of_graphs_are_the_engines_option(flags):
    request = request_with(flags)

    assert sorted(request.run.engine.cudagraph_capture_sizes) == [1, 2, 4]
    assert notes_of(flags) == []


MODES = {  # flags, release: compilation_mode, cudagraph_mode, eager
    "-O0": {"0.19.0": (0, "none", True), "0.11.0": (0, None, True)},
    "-O 0": {"0.19.0": (0, "none", True)},
    "-O1": {"0.19.0": (None, "piecewise", False), "0.11.0": (1, None, True)},
    "-O3": {"0.19.0": (None, None, False), "0.11.0": (3, None, False)},
    "--optimization-level 0": {"0.19.0": (0, "none", True)},
    "optimization_level=<OptimizationLevel.O2: 2>": {"0.19.0": (None, None, False)},
    "--compilation-config 0": {"0.11.0": (0, None, True)},
    """-O '{"level": 0, "cudagraph_mode": "FULL"}'""": {"0.11.0": (0, "full", False)},
    "-O.level=0": {"0.10.2": (0, None, True), "0.9.2": (0, None, False)},
    "-cc.mode 0 -cc.cudagraph_mode FULL_DECODE_ONLY": {"0.19.0": (0, "full_decode_only", False)},
    "mode=<CompilationMode.NONE: 0>; cudagraph_mode=<CUDAGraphMode.NONE: 0>": {
        "0.19.0": (0, "none", True)
    },
    "mode=<CompilationMode.NONE: 0>; max_cudagraph_capture_size=0": {"0.19.0": (0, "none", True)},
    "cudagraph_mode=[2,1]; mode=<CompilationMode.VLLM_COMPILE: 3>": {
        "0.19.0": (3, "full_and_piecewise", False)
    },
    "cudagraph_mode=<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>": {
        "0.19.0": (None, "full_and_piecewise", False)
    },
    """--compilation-config '{"use_cudagraph": false}'""": {"0.10.2": (None, "none", False)},
    """--compilation-config '{"full_cuda_graph": true}'""": {"0.9.2": (None, "full", False)},
}


@pytest.mark.parametrize(
    ("flags", "version"), [(flags, version) for flags, each in MODES.items() for version in each]
)
def test_what_is_compiled_and_captured_is_read_in_the_releases_words(flags, version):
    request = request_with(flags, engine_version=version)
    engine = request.run.engine
    eager = engine.decide(request.run, "vllm").enforce_eager

    assert (engine.compilation_mode, engine.cudagraph_mode, eager) == MODES[flags][version]
    assert notes_of(flags, engine_version=version) == []


@pytest.mark.parametrize(
    "flags",
    [
        '--compilation-config \'{"cudagraph_mode": "SOME"}\'',
        "cudagraph_mode=[7]",
        "mode=unknown",
        "-O 9",
    ],
)
def test_a_mode_that_is_none_is_named(flags):
    assert len(notes_of(flags)) == 1


@pytest.mark.parametrize(
    ("flags", "option", "value"),
    [
        ("chunked prefill; no custom all-reduce", "enable_chunked_prefill", True),
        ("no-enable-chunked-prefill", "enable_chunked_prefill", False),
        ("--max-cudagraph-capture-size 64", "max_cudagraph_capture_size", 64),
        ("--cuda-graph-sizes 64", "max_cudagraph_capture_size", 64),
        ("no custom all-reduce", "disable_custom_all_reduce", True),
        ("--cpu-offload-gb 2", "cpu_offload_gb", 2.0),
    ],
)
def test_switches_may_stand_in_words(flags, option, value):
    assert getattr(request_with(flags).run.engine, option) == value


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [("MTP 3 tokens", 3), ("mtp (n=2)", 2), ("mtp=4", 4), ("MTP drafter resident", None)],
)
def test_a_draft_of_the_models_own_may_stand_in_words(flags, tokens):
    drafts = request_with(flags, model="Qwen/Qwen3.5-27B").run.speculative

    assert (drafts.method, drafts.num_tokens) == ("mtp", tokens)


@pytest.mark.parametrize(
    ("version", "words", "requests", "largest"),
    [
        ("0.8.5 (V0)", "27 capture sizes", 192, None),
        ("0.8.5 (V0)", "39 capture sizes", 288, None),
        ("0.9.1 (V0)", "35 CUDA graph sizes", 256, None),
        ("0.6.6", "3 capture sizes", 4, None),
        ("0.9.2 (V1)", "67 capture sizes", None, 512),
        ("0.12.0", "51 capture sizes", None, 512),
        ("0.12.0", "35 capture sizes", None, 256),
    ],
)
def test_the_number_of_captured_sizes_says_the_largest(version, words, requests, largest):
    run = request_with(words, engine_version=version, max_num_seqs=None).run

    assert (run.max_num_seqs, run.engine.max_cudagraph_capture_size) == (requests, largest)


def test_stated_requests_are_not_those_of_captured_sizes():
    run = request_with("27 capture sizes", engine_version="0.8.5 (V0)", max_num_seqs=64).run

    assert run.max_num_seqs == 64
