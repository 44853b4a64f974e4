"""CUDA graphs of vLLM: sizes and modes by release, and what they take."""

import pytest

import kvexp
from kvexp import api
from kvexp.results import Status
from thinned import thinned

LLAMA = ("model=llama31_8b", "gpu=h100")
EIGHTS = (1, 2, 4, *range(8, 513, 8))
SIXTEENS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def sizes_of(*overrides):
    (point,) = api.compose_points([*LLAMA, *overrides])
    return point.run.engine.graph_batch_sizes(point.run.engine.resolve(point.run, "vllm"))


SIZES = {  # `_set_cudagraph_sizes` of the wheels
    "0.9 has 67, whatever the requests": ("0.9.2", "max_num_seqs=64", EIGHTS),
    "0.10 goes by the requests": ("0.10.2", "max_num_seqs=64", EIGHTS[:19]),
    "0.12 has 51": ("0.12.0", "", SIXTEENS),
    "0.26 too": ("0.26.0", "", SIXTEENS),
    "the largest is asked for": (
        "0.26.0",
        "engine.max_cudagraph_capture_size=16",
        (1, 2, 4, 8, 16),
    ),
    "no more than a step": (
        "0.19.0",
        "max_num_batched_tokens=20 max_num_seqs=20",
        (1, 2, 4, 8, 16),
    ),
    "from 0.21 a whole step too": (
        "0.21.0",
        "max_num_batched_tokens=20 max_num_seqs=20",
        (1, 2, 4, 8, 16, 20),
    ),
    "drafts are counted": (
        "0.19.0",
        "max_num_seqs=2 speculative.method=ngram speculative.num_tokens=3",
        (1, 2, 4, 8, 16),
    ),
    "not before 0.13": (
        "0.12.0",
        "max_num_seqs=2 speculative.method=ngram speculative.num_tokens=3",
        (1, 2, 4),
    ),
    "gpt-oss": ("0.26.0", "model=gpt_oss_20b max_num_seqs=64", (*SIXTEENS, *range(528, 1025, 16))),
    "decoding alone ends with the requests": (
        "0.26.0",
        "max_num_seqs=4 engine.cudagraph_mode=full_decode_only",
        (1, 2, 4),
    ),
    "beside an encoder decoding alone": (  # `Capturing CUDA graphs (decode, FULL): 35/35`
        "0.15.1",
        "model=whisper_large_v3 gpu=rtx_4090 max_model_len=448",
        tuple(size for size in SIXTEENS if size <= 256),
    ),
    "none": ("0.26.0", "engine.cudagraph_mode=none", ()),
    "pieces need a compiled model": (
        "0.26.0",
        "engine.cudagraph_mode=piecewise engine.compilation_mode=0",
        (),
    ),
    "whole ones do not": (
        "0.26.0",
        "engine.cudagraph_mode=full engine.compilation_mode=0",
        SIXTEENS,
    ),
    "every small one": (
        "0.26.0",
        "max_num_seqs=24 engine.performance_mode=interactivity",
        (*range(1, 33), 40, 48),
    ),
    "0.9.0 captures whatever is asked": ("0.9.0", "engine.cudagraph_mode=none", EIGHTS),
    "0.9.2 does not": ("0.9.2", "engine.cudagraph_mode=none", ()),
    "0.10.0 compiles whatever is asked": ("0.10.0", "engine.compilation_mode=0", EIGHTS),
    "0.10.1 does not": ("0.10.1", "engine.compilation_mode=0", ()),
    "V0 goes by the requests": ("0.7.3", "max_num_seqs=12", (1, 2, 4, 8, 16)),
}


@pytest.mark.parametrize("name", thinned(SIZES))
def test_the_sizes_are_those_of_the_release(name):
    version, asked, sizes = SIZES[name]

    assert sizes_of(f"engine.version={version}", *asked.split()) == sizes


V1 = ("engine.version=0.26.0", "engine.v2_model_runner=false", "max_num_seqs=256")


def graphs_of(*overrides):
    part = kvexp.run([*LLAMA, *V1, *overrides]).profile.cudagraph
    return part.size_bytes - part.below_bytes, part.size_bytes, part.size_bytes + part.above_bytes


def test_an_estimate_has_a_first_graph_and_as_much_for_each_further_one():
    """51 sizes, of which 35 up to 256 are of decoding: `PIECEWISE=51, FULL=35` in the log.

    Whole graphs have FlashAttention 3's outputs of 32 parts in fp32, on Hopper alone.
    """
    pieces, whole, decoding = (
        graphs_of(f"engine.cudagraph_mode={mode}")[1]
        for mode in ("piecewise", "full", "full_decode_only")
    )
    both = graphs_of("engine.cudagraph_mode=full_and_piecewise")
    parts = 32 * 4096 * 4  # of a row

    assert graphs_of() == both
    assert whole - pieces == pytest.approx(512 * parts, abs=2)
    assert both[1] - decoding == pytest.approx(pieces - 52 * 2**20, abs=2)  # 32 MiB are cuBLAS's
    assert (both[1] - pieces - 256 * parts) / (both[1] - decoding) == pytest.approx(34 / 50)
    assert both[0] < both[1] < both[2]
    assert graphs_of("engine.cudagraph_mode=none") == (0, 0, 0)
    older = graphs_of("gpu=a100_80gb", "engine.cudagraph_mode=full")[1]
    assert older == pytest.approx(whole - 512 * parts - 24 * 2**20 + 2**17, abs=2)


@pytest.mark.parametrize(
    ("model", "measured_bytes"),
    thinned(
        [
            ("llama3_8b", 532_676_608),
            ("qwen3_30b_a3b", 689_963_008),
            ("qwen3_4b", 532_676_608),
            ("gemma2_9b", 585_105_408),
            ("phi4", 654_311_424),
            ("qwen25_1_5b", 415_236_096),
        ]
    ),
)
def test_estimates_of_0_26_on_an_h200(model, measured_bytes):
    asked = [f"model={model}", "gpu=h200", "engine.version=0.26.0", "engine.v2_model_runner=false"]
    part = kvexp.run([*asked, "util=0.9"]).profile.cudagraph

    assert part.low_bytes <= measured_bytes <= part.high_bytes
    assert part.size_bytes == pytest.approx(measured_bytes, rel=0.2)


def test_nothing_compiled_and_nothing_captured_is_eager():
    eager = kvexp.run([*LLAMA, *V1, "enforce_eager=true"])
    asked = kvexp.run([*LLAMA, *V1, "engine.compilation_mode=0"])

    assert asked.profile.parts == eager.profile.parts
    assert asked.num_blocks == eager.num_blocks


MEASURED = [  # tests/data/h200_vllm_worker.json, the V2 runner
    ("qwen3_0_6b", "full_and_piecewise", (), 532_676_608),
    ("qwen3_0_6b", "piecewise", (), 268_435_456),
    ("qwen3_0_6b", "full", (), 299_892_736),
    ("qwen3_0_6b", "full_decode_only", ("engine.compilation_mode=0",), 301_989_888),
    ("qwen3_0_6b", "full_decode_only", ("engine.max_cudagraph_capture_size=128",), 132_120_576),
    ("llama3_8b", "full", (), 729_808_896),
]


@pytest.mark.parametrize(("model", "mode", "options", "taken"), MEASURED)
def test_what_a_mode_took_on_an_h200_lies_in_its_interval(model, mode, options, taken):
    asked = [f"model={model}", "gpu=h200", f"engine.cudagraph_mode={mode}", *options]
    holding = kvexp.run(asked).holding

    (part,) = [part for part in holding.parts if part.name == "graphs"]
    assert part.low_bytes <= taken <= part.high_bytes


@pytest.mark.parametrize(
    ("options", "taken_mib"),
    thinned(
        [
            (["model=llama3_8b"], 656),
            (["model=llama3_8b", "tp=2"], 518),
            (["model=qwen3_30b_a3b"], 816),
            (["model=qwen3_30b_a3b", "tp=2"], 690),
            (["model=gpt_oss_20b"], 1058),
            (["model=gpt_oss_20b", "tp=2"], 784),
        ]
    ),
)
def test_graphs_of_the_v1_runner_are_nodes_and_split_outputs(options, taken_mib):
    """vLLM 0.26.0 on one and two H200, 102 graphs, of gpt-oss 166."""
    holding = kvexp.run([*options, "gpu=h200", "engine.v2_model_runner=false"]).holding

    (part,) = [part for part in holding.parts if part.name == "graphs"]
    assert part.size_bytes == pytest.approx(taken_mib << 20, rel=0.03)
    assert part.low_bytes <= taken_mib << 20 <= part.high_bytes


@pytest.mark.parametrize(
    ("options", "taken_gib"),
    thinned(
        [
            ("model=llama31_8b gpu=a100_80gb engine.version=0.17.1", 0.5),
            ("model=phi4 gpu=a100_80gb engine.version=0.6.5", 0.27),
            ("model=qwen25_1_5b gpu=l40s engine.version=0.6.6", 0.21),
            ("model=qwen25_3b gpu=a100_80gb engine.version=0.17.1", 0.51),
            ("model=phi3_mini gpu=rtx_3090 engine.version=0.19.1", 0.46),
            ("model=dots_ocr gpu=l4 engine.version=0.10.0", 0.44),
            ("model=llama31_8b gpu=a100_40gb engine.version=0.10.1.1", 0.52),
            ("model=qwen3_32b gpu=h100 tp=8 engine.version=0.10.0", 1.17),
            ("model=llama31_8b gpu=h100 engine.version=0.19.0", 0.91),
            ("model=qwen25_7b gpu=h100 tp=4 engine.version=0.19.0", 0.64),
            ("model=mixtral_8x7b gpu=h100 tp=2 engine.version=0.19.0", 0.93),
            ("model=qwen3_30b_a3b gpu=h100 engine.version=0.19.0", 1.41),
            ("model=deepseek_v2_lite gpu=h100 engine.version=0.19.0", 1.57),
            ("model=qwen15_moe_a27b gpu=h100 engine.version=0.19.0", 1.1),
        ]
    ),
)
def test_graphs_of_older_releases_as_public_logs_print_them(options, taken_gib):
    """`Graph capturing finished in ... secs, took ... GiB`."""
    holding = kvexp.run([*options.split(), "max_model_len=4096"]).holding

    (part,) = [part for part in holding.parts if part.name == "graphs"]
    assert part.size_bytes == pytest.approx(taken_gib * 2**30, rel=0.11)
    assert part.low_bytes <= taken_gib * 2**30 <= part.high_bytes


def test_a_compiled_model_without_graphs_keeps_its_activation():
    graphed = kvexp.run([*LLAMA, *V1]).profile
    without = kvexp.run([*LLAMA, *V1, "engine.cudagraph_mode=none"]).profile
    eager = kvexp.run([*LLAMA, *V1, "enforce_eager=true"]).profile

    assert without.activation_bytes == graphed.activation_bytes
    assert without.non_torch_bytes == eager.non_torch_bytes


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.cudagraph_mode=some"], "must be one of none, piecewise, full,"),
        (["engine.performance_mode=fast"], "must be one of balanced, interactivity, throughput"),
        (
            ["engine.version=0.16.0", "engine.performance_mode=throughput"],
            "needs vLLM 0.17 or newer",
        ),
        (["engine.compilation_mode=4"], "must be 0 to 3, got 4"),
        (["engine.max_cudagraph_capture_size=0"], "must be at least 1, got 0"),
        (
            ["engine.version=0.9.2", "engine.cudagraph_mode=full_decode_only"],
            "needs vLLM 0.10.1 or newer",
        ),
    ],
)
def test_what_is_not_allowed_is_said(overrides, words):
    result = kvexp.run([*LLAMA, *overrides])

    assert result.status is Status.invalid
    assert words in result.reason


@pytest.mark.parametrize(
    ("overrides", "config"),
    [
        (["engine.cudagraph_mode=full_decode_only"], '{"cudagraph_mode": "FULL_DECODE_ONLY"}'),
        (["engine.compilation_mode=0"], '{"mode": 0}'),
        (["engine.version=0.11.0", "engine.compilation_mode=0"], '{"level": 0}'),
        (["engine.version=0.9.2", "engine.cudagraph_mode=none"], '{"use_cudagraph": false}'),
        (["engine.version=0.9.2", "engine.cudagraph_mode=full"], '{"full_cuda_graph": true}'),
    ],
)
def test_what_there_is_to_paste_has_the_releases_names(overrides, config):
    flags = kvexp.run([*LLAMA, *overrides]).effective["flags"]

    assert flags.endswith(f"--compilation-config '{config}'")


def test_without_vllms_own_all_reduce_the_ranks_have_38_mib_less():
    asked = ["model=llama3_8b", "gpu=h200", "tp=2", "engine.version=0.26.0"]
    own, other = (
        {part.name: part.size_bytes for part in kvexp.run([*asked, *each]).holding.parts}
        for each in ([], ["engine.disable_custom_all_reduce=true"])
    )

    assert own["communicators"] - other["communicators"] == 38 << 20


FLASHINFER = ["model=qwen3_4b", "gpu=rtx_5090", "engine.v2_model_runner=false"]


def test_the_workspace_of_flashinfers_kernels_comes_with_the_first_whole_graph():
    """394 MiB: estimates of 0.39 GiB on an RTX 5090 and 0.43 on a GB10 with an fp8 cache (0.20).

    Two starts of 0.24 do not have it, it is in what the interval reaches from 0.23 on.
    """
    workspace = 394 * 2**20

    def part(*overrides):
        return kvexp.run([*FLASHINFER, *overrides]).profile.cudagraph

    for version, counted in (("0.20.0", workspace), ("0.24.0", 0)):
        of16, of8 = (part(f"engine.version={version}", f"kv_dtype={k}") for k in ("bf16", "fp8"))
        assert of8.size_bytes - of16.size_bytes == counted
        assert of8.high_bytes - of16.high_bytes == workspace
    hopper = part("gpu=h200", "kv_dtype=fp8", "engine.version=0.20.0")
    assert hopper.size_bytes == part("gpu=h200", "engine.version=0.20.0").size_bytes
    pieces = [
        part("engine.version=0.20.0", "engine.cudagraph_mode=piecewise", f"kv_dtype={k}")
        for k in ("bf16", "fp8")
    ]
    assert pieces[0] == pieces[1]


def test_flashinfers_kernels_capture_no_drafts_off_compute_capability_10():
    """`FULL_AND_PIECEWISE is not supported with spec-decode for attention backend FlashInfer`.

    Qwen3.5-27B with MTP on an RTX 5090 says 0.08 GiB (noonghunna/club-3090#617).
    """
    drafts = ["engine.version=0.22.0", "speculative.method=ngram", "speculative.num_tokens=3"]

    def size(*overrides):
        return kvexp.run([*FLASHINFER, *drafts, *overrides]).profile.cudagraph.size_bytes

    pieces = "engine.cudagraph_mode=piecewise"
    assert size("kv_dtype=fp8") == size("kv_dtype=fp8", pieces)
    assert size("kv_dtype=bf16") > size("kv_dtype=bf16", pieces)
    assert size("gpu=b200", "kv_dtype=fp8") > size("gpu=b200", "kv_dtype=fp8", pieces)


@pytest.mark.parametrize(
    ("version", "asked", "estimates"),
    [
        ("0.26.0", "null", True),
        ("0.26.0", "false", False),
        ("0.19.0", "null", False),
        ("0.19.0", "true", True),
    ],
)
def test_the_estimate_is_subtracted_where_the_release_or_its_variable_says_so(
    version, asked, estimates
):
    options = ["model=qwen3_30b_a3b", f"engine.version={version}"]
    found = kvexp.run([*options, "gpu=h200", f"engine.estimate_cudagraphs={asked}"])

    assert (found.profile.cudagraph.size_bytes > 0) is estimates
    named = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS" in found.effective["flags"]
    assert named is (asked != "null")
