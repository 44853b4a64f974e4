"""Prefix caching of models with recurrent states under vLLM, by release."""

from dataclasses import replace

import pytest

import kvexp
from caching.planned import KNOWN, PLAIN, cases, check
from kvexp.results import Status
from kvexp_vllm import Vllm
from kvexp_vllm_worker.arguments import engine_arguments

GPU = "gpu=b200"


def run(*overrides):
    return kvexp.run([GPU, *overrides])


def counted(*overrides):
    result = run(*overrides)
    assert result.status is Status.ok, result.reason
    return result


LOGGED = {  # bytes printed, in GiB, and what the engine printed of them
    "Qwen3.6-35B, prefix caching": (
        "model=qwen35_35b_a3b engine.version=0.24.0 max_model_len=131072 kv_dtype=fp8"
        " max_num_batched_tokens=8192 max_num_seqs=256 engine.enable_prefix_caching=true",
        5.98,
        (567_978, "4.33"),
    ),
    "Qwen3-Next-80B on two, without": (
        "model=qwen3_next_80b_a3b engine.version=0.11.0 tp=2",
        44.59,
        (973_760, "14.77"),
    ),
}


@pytest.mark.parametrize("name", LOGGED)
def test_the_bytes_of_a_log_give_its_tokens(name):
    options, size, logged = LOGGED[name]

    result = counted(*options.split(), f"engine.kv_cache_memory_bytes={size}GiB")
    assert (result.kv_tokens, f"{result.max_concurrency:.2f}") == logged


def test_a_log_with_drafts_is_that_of_a_whole_number_of_blocks():
    """Qwen3.6-27B on two cards, MTP of three tokens, prefix caching: 620,944 tokens, 2.37x."""
    result = counted(
        *["model=qwen35_27b", "engine.version=0.22.0", "tp=2", "kv_dtype=fp8_e5m2"],
        *["engine.enable_prefix_caching=true", "max_num_batched_tokens=8192"],
        *["speculative.method=mtp", "speculative.num_tokens=3", "max_num_seqs=256"],
        "engine.num_gpu_blocks_override=424",
    )
    assert result.block_size == 1600
    assert result.kv_tokens == 620_944
    assert f"{result.max_concurrency:.2f}" == "2.37"


STARTED = [  # vLLM 0.26.0 on an H200: bytes for the cache, what the engine made of them
    ((), 47_427_179_008, (1056, 2192, 1_890_196, 57.68421052631579)),
    (
        ("speculative.method=mtp", "speculative.num_tokens=3"),
        45_737_895_424,
        (1072, 1893, 1_348_474, 41.15217391304348),
    ),
]


@pytest.mark.parametrize(("drafts", "available", "planned"), STARTED, ids=["alone", "mtp"])
def test_a_started_engine_made_the_same_blocks_of_its_bytes(drafts, available, planned):
    result = counted(
        *["model=qwen35_35b_a3b", "max_model_len=32768", "max_num_seqs=16"],
        *["engine.enable_prefix_caching=true", "engine.v2_model_runner=false", *drafts],
        *["enforce_eager=true", f"engine.kv_cache_memory_bytes={available}"],
    )
    found = (result.block_size, result.num_blocks, result.kv_tokens, result.max_concurrency)
    assert found == planned


CASES = cases("vllm_state_caching.jsonl")


@pytest.mark.parametrize("model", sorted({case["model"] for case in CASES}))
def test_blocks_are_those_of_the_engines_own_planner(model):
    for case in (each for each in CASES if each["model"] == model):
        check(case)


ON = "engine.enable_prefix_caching=true"
MODES = {  # of Granite 4, whose kernels keep a state at every block, and of Qwen3.5
    "0.11.0": ("none", "none"),
    "0.11.1": ("all", "none"),
    "0.14.0": ("all", "none"),
    "0.15.0": ("all", "align"),
    "0.27.0": ("all", "align"),
    "0.28.0": ("align", "align"),
    "0.33.0": ("align", "align"),
}


def mode_of(model, version, **options):
    run = replace(PLAIN, model=KNOWN.model(model), engine=Vllm(version=version, **options))
    run = replace(run, max_num_batched_tokens=8192)
    return run.engine.decide(run, "vllm").states.mode


@pytest.mark.parametrize("version", MODES)
def test_the_mode_that_prefix_caching_means_in_a_release(version):
    found = [
        mode_of(model, version, enable_prefix_caching=True)
        for model in ("granite4_h_small", "qwen35_35b_a3b")
    ]
    assert tuple(found) == MODES[version]


@pytest.mark.parametrize(
    ("version", "model", "mode"),
    [
        ("0.27.0", "qwen35_35b_a3b", "none"),
        ("0.28.0", "qwen35_35b_a3b", "align"),
        ("0.33.0", "granite4_h_small", "align"),
        ("0.33.0", "falcon_mamba_7b", "none"),
    ],
)
def test_states_are_cached_by_default_from_0_28_beside_attention(version, model, mode):
    assert mode_of(model, version) == mode


def test_mode_all_is_kept_where_it_is_asked_for_until_0_31():
    asked = {"enable_prefix_caching": True, "mamba_cache_mode": "all"}
    assert mode_of("granite4_h_small", "0.31.0", **asked) == "all"
    assert mode_of("qwen35_35b_a3b", "0.31.0", **asked) == "align"


REFUSED = {
    "engine.mamba_cache_mode=each": "engine.mamba_cache_mode must be one of none, align, all",
    "engine.version=0.32.0 engine.mamba_cache_mode=all": "must be one of none, align in vLLM 0.32",
    "engine.version=0.14.0 engine.mamba_cache_mode=align": "needs vLLM 0.15 or newer",
    "engine.version=0.11.0 engine.mamba_block_size=512": "needs vLLM 0.11.1 or newer",
    "engine.mamba_block_size=512": "engine.mamba_block_size needs engine.enable_prefix_caching",
    f"{ON} engine.mamba_block_size=0": "engine.mamba_block_size must be at least 1, got 0",
    f"{ON} engine.enable_chunked_prefill=false max_model_len=2048": "must be true with mamba_cache",
    "model=granite4_h_small speculative.method=ngram speculative.num_tokens=3": (
        "block_size must be larger for granite4_h_small with speculative: vLLM makes its blocks of"
        " 528 tokens without what is drafted, got 16"
    ),
    f"{ON} max_num_batched_tokens=512": "at least the block of 544 tokens with mamba_cache_mode",
    f"{ON} engine.version=0.16.0 speculative.method=ngram speculative.num_tokens=2": (
        "speculative needs engine.enable_prefix_caching=false before vLLM 0.17"
    ),
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_a_release_refuses_is_one_line(options):
    result = run("model=qwen3_next_80b_a3b", "tp=2", *options.split())
    assert result.status is Status.invalid
    assert REFUSED[options] in result.reason
    assert "\n" not in result.reason


def test_a_model_without_states_is_the_same_with_prefix_caching():
    plain, cached, not_cached = (
        counted("model=qwen3_8b", *options)
        for options in ((), (ON,), ("engine.enable_prefix_caching=false",))
    )
    assert plain.num_blocks == cached.num_blocks == not_cached.num_blocks
    assert plain.notes == cached.notes


def test_the_line_to_paste_and_the_notes_say_it():
    result = counted(
        *f"model=granite4_h_small {ON} engine.mamba_cache_mode=ALL".split(),
        "engine.mamba_block_size=512",
    )
    asked = "--enable-prefix-caching --mamba-cache-mode all --mamba-block-size 512"
    assert asked in result.effective["flags"]
    assert result.effective["mamba_cache_mode"] == "all"
    said = "prefix caching: mamba_cache_mode=all keeps a state for every 1024 tokens"
    assert said in result.notes


OFF = "engine.enable_prefix_caching=false"


@pytest.mark.parametrize(("version", "is_pasted"), [("0.6.4", False), ("0.6.5", True)])
def test_prefix_caching_is_turned_off_where_that_can_be_asked(version, is_pasted):
    flags = counted("model=qwen25_7b", f"engine.version={version}", OFF).effective["flags"]
    assert ("--no-enable-prefix-caching" in flags) is is_pasted


def test_kernels_that_export_states_inside_a_prefill_keep_one_more():
    """Mamba2's from 0.32; FlashInfer's of GDN from 0.33, in blocks of a multiple of 64."""
    sizes = {
        (model, version): group_of(model, version)
        for model in ("granite4_h_small", "qwen3_next_80b_a3b")
        for version in ("0.31.0", "0.32.0", "0.33.0")
    }
    assert [states for _, states in sizes.values()] == [2, 3, 3, 2, 2, 3]
    assert [size for size, _ in sizes.values()] == [528, 528, 528, 544, 544, 576]


def group_of(model, version):
    """Tokens of a block and states of a request."""
    result = counted(f"model={model}", "tp=2", f"engine.version={version}")
    state = next(group for group in result.groups if group.kind == "mamba")
    return state.block_size, state.blocks_per_request


def test_a_model_without_attention_notes_its_own_block():
    result = counted(
        *f"model=falcon_mamba_7b {ON} engine.mamba_block_size=1024 max_model_len=8192".split()
    )
    said = "prefix caching: mamba_cache_mode=all keeps a state for every 1024 tokens"
    assert said in result.notes
    assert result.groups[0].blocks_per_request == 8192 // 1024


def test_the_profiler_gives_the_engine_the_same_options():
    options = {"enable_prefix_caching": True, "mamba_cache_mode": "all", "mamba_block_size": 512}
    run = replace(PLAIN, model=KNOWN.model("granite4_h_small"), engine=Vllm(**options))
    deployment = run.engine.decide(run, "vllm")
    given = engine_arguments(deployment, run.engine)
    assert {name: given[name] for name in options} == options
    assert not set(options) & set(engine_arguments(deployment, Vllm()))


STATES = {  # of GDN: 3 rows of 2 * 2048 + 6144, 48 states of 128 x 128; bytes of each element
    "auto is the model's own": ([], (2, 4)),
    "states alone": (["engine.mamba_ssm_cache_dtype=bfloat16"], (2, 2)),
    "both": (["engine.mamba_cache_dtype=float32"], (4, 4)),
    "said again": (["engine.mamba_ssm_cache_dtype=float32"], (2, 4)),
}


@pytest.mark.parametrize("name", STATES)
def test_states_have_the_dtype_that_is_asked_for(name):
    """Qwen3.5-27B and an fp8 cache: blocks of 1,568 tokens, of 800 with states in 16 bits."""
    options, (conv, state) = STATES[name]
    result = counted("model=qwen35_27b", "kv_dtype=fp8", "engine.version=0.26.0", *options)

    size = conv * 3 * (2 * 2048 + 6144) + state * 48 * 128 * 128
    assert result.block_size == 16 * -(-size // (16 * 2 * 4 * 256))
    flags = [option.removeprefix("engine.").replace("_", "-").split("=") for option in options]
    assert all(f"--{flag} {value}" in result.effective["flags"] for flag, value in flags)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["engine.mamba_cache_dtype=fp8"], "must be one of auto, float32, bfloat16, float16"),
        (["engine.mamba_ssm_cache_dtype="], "bfloat16, float16, got ''"),
        (
            ["engine.version=0.10.0", "engine.mamba_ssm_cache_dtype=float32"],
            "needs vLLM 0.10.2 or newer",
        ),
    ],
)
def test_a_dtype_of_states_that_there_is_not_is_refused(options, words):
    result = run("model=granite4_h_1b", *options)

    assert result.status is Status.invalid
    assert words in result.reason
