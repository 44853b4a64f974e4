"""The worked figures that kvexp must reproduce, through the command line or the API."""

import json

import pytest

import kvexp
from kvexp.units import GIB

LLAMA = ["model=llama3_8b", "gpu=h100", "gpu.total_bytes=80GiB", "max_model_len=8192"]
FIGURE_2 = [
    *LLAMA,
    "util=0.92",
    "profiler.weights_bytes=15GiB",
    "profiler.activation_bytes=2GiB",
    "profiler.non_torch_bytes=0",
]


def qwen(tp, weights, activation):
    return [
        "model=qwen25_7b",
        "gpu=h100",
        "gpu.total_bytes=80GiB",
        "engine=nano_vllm",
        "util=0.9",
        f"tp={tp}",
        f"profiler.weights_bytes={weights}GiB",
        f"profiler.activation_bytes={activation}GiB",
        "profiler.non_torch_bytes=1GiB",
    ]


def test_figure_1_a_token_of_llama3_8b_takes_128_kib():
    result = kvexp.run(FIGURE_2)

    assert result.block_bytes == 2 * 2**20
    assert result.block_bytes // result.block_size == 131_072
    assert result.groups[0].blocks_per_request * result.block_bytes == 1 * GIB


def test_figure_2_through_the_command_line(kvexp_command, tmp_path):
    done = kvexp_command(*FIGURE_2, "tracking=off", f"hydra.run.dir={tmp_path / 'point'}")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "GPU KV cache size: 463,664 tokens" in lines
    assert "Maximum concurrency for 8,192 tokens per request: 56.60x" in lines
    data = json.loads((tmp_path / "point" / "result.json").read_text())
    assert data["num_blocks"] == 28_979
    assert data["kv_tokens"] == 463_664
    assert f"{data['max_concurrency']:.2f}" == "56.60"
    assert data["budget"]["requested_bytes"] == -(-80 * GIB * 92 // 100)
    assert data["budget"]["available_bytes"] == data["budget"]["requested_bytes"] - 17 * GIB
    assert (
        sum(part["size_bytes"] for part in data["budget"]["parts"])
        == (data["budget"]["requested_bytes"])
    )
    given = {p["name"]: p["provenance"] for p in data["budget"]["parts"]}
    assert given["weights"] == given["activation"] == given["non_torch"] == "given"


@pytest.mark.parametrize(
    ("tp", "weights", "activation", "block_bytes", "kv_gib", "num_blocks"),
    [
        pytest.param(1, 14, 4, 14_680_064, 53, 3_876, id="figure 3"),
        pytest.param(2, 7, 2, 7_340_032, 62, 9_069, id="figure 4, tp 2"),
        pytest.param(4, 3.5, 1, 3_670_016, 66.5, 19_456, id="figure 4"),
    ],
)
def test_figures_3_and_4_nano_vllm(tp, weights, activation, block_bytes, kv_gib, num_blocks):
    result = kvexp.run(qwen(tp, weights, activation))

    assert result.block_size == 256
    assert result.block_bytes == block_bytes
    assert result.budget.available_bytes == kv_gib * GIB
    assert result.num_blocks == num_blocks
    assert len(result.ranks) == tp
    assert all(rank.num_blocks == num_blocks for rank in result.ranks)


def test_figure_3_requests_of_4096_tokens():
    result = kvexp.run(qwen(1, 14, 4))

    assert result.groups[0].blocks_per_request == 16
    assert result.max_concurrency == 242
    capped = kvexp.run([*qwen(1, 14, 4), "max_num_seqs=100"])
    assert capped.max_concurrency == 100


def test_figure_4_four_ranks_hold_five_times_the_blocks_of_one():
    one, four = kvexp.run(qwen(1, 14, 4)), kvexp.run(qwen(4, 3.5, 1))

    assert round(four.num_blocks / one.num_blocks, 2) == 5.02


def test_figure_6_an_8_bit_cache_doubles_the_blocks():
    given = [o for o in FIGURE_2 if not o.startswith("util")]
    # a share of the card that gives 1,000 blocks of the 16-bit cache
    util = (17 * GIB + 1000 * 2**21) / (80 * GIB)
    bf16 = kvexp.run([*given, f"util={util!r}"])
    fp8 = kvexp.run([*given, f"util={util!r}", "kv_dtype=fp8"])

    assert bf16.num_blocks == 1000
    assert fp8.num_blocks == 2000
    assert fp8.block_bytes * 2 == bf16.block_bytes
    assert (bf16.requested["kv_dtype"], fp8.requested["kv_dtype"]) == ("auto", "fp8")
    assert (bf16.effective["kv_dtype"], fp8.effective["kv_dtype"]) == ("bf16", "fp8")
    assert fp8.effective["dtype"] == bf16.effective["dtype"] == "bf16"
    assert fp8.effective["quantization"] is None


def test_quantised_weights_never_decide_the_cache_dtype():
    result = kvexp.run(["model=llama31_8b", "gpu=h200", "quantization=fp8", "max_model_len=8192"])

    assert result.effective["kv_dtype"] == "bf16"
    assert result.block_bytes == 2 * 2**20
