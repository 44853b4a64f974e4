"""The JSON interface: cases in, answers out, whatever comes."""

import io
import json
import subprocess
import sys

import pytest
from kv_cases import GIB

from kvexp import plan as cli

LAYER = {"type": "full", "num_kv_heads": 8, "head_size": 128, "repeat": 32}
MAMBA = {"type": "mamba", "shapes": [[4, 64]], "dtypes": ["bfloat16"]}
CASE = {"id": 7, "layers": [LAYER], "max_model_len": 8192, "available_bytes": 20 * GIB}


def ask(*lines):
    out = io.StringIO()
    cli.run([line if isinstance(line, bytes) else line.encode() for line in lines], out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def one(**changes):
    return ask(json.dumps({**CASE, **changes}))[0]


def layered(**changes):
    layer = {key: value for key, value in {**LAYER, **changes}.items() if value != "absent"}
    return one(layers=[layer])


def test_a_case_gives_every_promised_key():
    got = one()
    assert got == {
        "id": 7,
        "ok": True,
        "num_blocks": 10_240,
        "num_blocks_per_worker": [10_240],
        "bytes_per_block": 2_097_152,
        "max_model_len": 8192,
        "max_in_flight_tokens": 16_384,
        "kv_cache_size_tokens": 163_840,
        "max_concurrency": 20.0,
        "max_concurrency_hex": (20.0).hex(),
        "log_concurrency": "20.00",
        "blocks_per_request": 512,
        "needed_bytes_per_worker": [GIB],
        "groups": [
            {
                "kind": "full",
                "num_layers": 32,
                "block_size": 16,
                "page_size_bytes": 65_536,
                "max_memory_usage_bytes": 512 * 65_536,
            }
        ],
    }


def test_refusals_carry_their_figures():
    got = one(available_bytes=GIB - 1)
    assert got.pop("message")
    assert got == {
        "id": 7,
        "ok": False,
        "code": "max_len_too_large",
        "worker": 0,
        "needed_bytes": GIB,
        "available_bytes": GIB - 1,
        "estimated_max_model_len": 8176,
    }
    assert one(available_bytes=0)["code"] == "no_memory"
    assert one(available_bytes=100, original_max_model_len=-1)["code"] == "autofit_failed"


def test_no_layers():
    got = one(layers=[], available_bytes=[1, 2])
    assert got["ok"]
    assert got["num_blocks"] == 1
    assert got["num_blocks_per_worker"] == [1, 1]
    assert got["needed_bytes_per_worker"] is None
    assert "max_concurrency" not in got


def test_lines_are_answered_in_order_and_bad_ones_do_not_stop_the_rest():
    lines = ["nonsense", "", json.dumps(CASE), "[1]", "  ", json.dumps({**CASE, "id": "b"}), "null"]
    got = ask(*lines)
    assert [answer["id"] for answer in got] == [None, 7, None, "b", None]
    assert [answer.get("code") for answer in got] == [
        "invalid_case",
        None,
        "invalid_case",
        None,
        "invalid_case",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"id": 1, "layers": ' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"id": ' + "9" * 5000 + "}",
        "{",
        b"\xff\xfe{}",
        "\x00",
        '{"id": 1} {"id": 2}',
    ],
    ids=["deep", "deep layers", "huge number", "open", "bytes", "null byte", "two objects"],
)
def test_hostile_lines_are_refused_with_id_null(line):
    (got,) = ask(line)
    assert (got["id"], got["ok"], got["code"]) == (None, False, "invalid_case")
    assert got["message"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"surprise": 1}, "surprise"),
        ({"pcp": 2}, "pcp"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"max_model_len": True}, "max_model_len"),
        ({"max_model_len": 8192.0}, "max_model_len"),
        ({"max_model_len": float("nan")}, "max_model_len"),
        ({"max_model_len": "8192"}, "max_model_len"),
        ({"max_model_len": None}, "max_model_len"),
        ({"max_model_len": 2**63}, "max_model_len"),
        ({"original_max_model_len": -2}, "original_max_model_len"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_in_flight_tokens": -1}, "max_in_flight_tokens"),
        ({"async_scheduling": 1}, "async_scheduling"),
        ({"hybrid": "yes"}, "hybrid"),
        ({"pp": 0}, "pp"),
        ({"tp": -1}, "tp"),
        ({"dcp": 0}, "dcp"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype"),
        ({"num_gpu_blocks_override": -1}, "num_gpu_blocks_override"),
        ({"available_bytes": []}, "available_bytes"),
        ({"available_bytes": None}, "available_bytes"),
        ({"available_bytes": [1, True]}, "available_bytes"),
        ({"available_bytes": float("inf")}, "available_bytes"),
        ({"available_bytes": 10**30}, "available_bytes"),
        ({"layers": None}, "layers"),
        ({"layers": {}}, "layers"),
        ({"layers": [1]}, "layers"),
        ({"layers": [{**LAYER, "name": "a", "repeat": 1}] * 2}, "name"),
        ({"workers": []}, "workers"),
        ({"workers": "all"}, "workers"),
        ({"workers": ["all"]}, "workers"),
        ({"workers": [[""]]}, "workers"),
        ({"workers": [["nowhere"]]}, "workers"),
        ({"workers": [[[0, 33]]]}, "workers"),
        ({"workers": [[[3, 1]]]}, "workers"),
        ({"workers": [[[0, 1, 2]]]}, "workers"),
        ({"workers": [[[0, 32]]], "available_bytes": [1, 2]}, "available_bytes"),
        ({"layers": [{**MAMBA, "shapes": []}]}, "shapes"),
        ({"layers": [{**MAMBA, "shapes": [[0]]}]}, "shapes"),
        ({"layers": [{**MAMBA, "shapes": [4]}]}, "shapes"),
        ({"layers": [{**MAMBA, "dtypes": []}]}, "dtypes"),
        ({"layers": [{**MAMBA, "dtypes": [1]}]}, "dtypes"),
        ({"layers": [{**MAMBA, "num_kv_heads": 1}]}, "num_kv_heads"),
    ],
)
def test_impossible_cases_name_the_key(changes, named):
    got = one(**changes)
    assert (got["id"], got["ok"], got["code"]) == (7, False, "invalid_case")
    assert named in got["message"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"type": "absent"}, "type"),
        ({"type": "fuller"}, "fuller"),
        ({"type": ["full"]}, "type"),
        ({"window": 4}, "window"),
        ({"num_kv_heads": "absent"}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_size": -128}, "head_size"),
        ({"head_size_v": -1}, "head_size_v"),
        ({"dtype": "bfloat17"}, "dtype"),
        ({"page_size_padded": 0}, "page_size_padded"),
        ({"repeat": -1}, "repeat"),
        ({"repeat": 10**9}, "repeat"),
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"indexes_kv_by_block_stride": 0}, "indexes_kv_by_block_stride"),
        ({"type": "sliding"}, "sliding_window"),
        ({"type": "chunked"}, "attention_chunk_size"),
        ({"type": "rswa"}, "rswa_window"),
        ({"type": "sink"}, "sink_len"),
        ({"type": "mla", "compress_ratio": 0}, "compress_ratio"),
        ({"type": "mla", "cache_dtype_str": 5}, "cache_dtype_str"),
    ],
)
def test_impossible_layers_name_the_key(changes, named):
    got = layered(**changes)
    assert got["code"] == "invalid_case"
    assert named in got["message"]


@pytest.mark.parametrize("value", ["NaN", "[Infinity]", "1e999"])
def test_an_id_that_json_cannot_carry_is_dropped(value):
    (got,) = ask(json.dumps(CASE).replace('"id": 7', f'"id": {value}'))
    assert (got["id"], got["ok"]) == (None, True)


def test_informational_keys_change_nothing():
    plain = one()
    assert one(model="x", align={"any": 1}, tp=8, use_eagle=True) == plain


def test_workers_by_name_and_by_range():
    layers = [{**LAYER, "repeat": 1, "name": name} for name in "abcd"]
    by_range = one(layers=layers, workers=[[[0, 2]], [[2, 3], [3, 4]]])
    by_name = one(layers=layers, workers=[["a", "b"], ["c", "d"]])
    assert by_range == by_name
    assert by_range["num_blocks_per_worker"] == [20 * GIB // (2 * 65_536)] * 2
    empty = one(layers=layers, workers=[[[0, 4]], []])
    assert empty["code"] == "AssertionError"


def run_module(data, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "kvexp.plan", *arguments],
        input=data,
        capture_output=True,
        check=False,
        **options,
    )


def test_the_module_answers_each_line_and_exits_with_0():
    done = run_module(f"{json.dumps(CASE)}\noops\n".encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert [json.loads(line)["ok"] for line in done.stdout.splitlines()] == [True, False]
    assert run_module(b"").stdout == b""


def test_cases_are_no_arguments():
    done = run_module(b"", "cases.jsonl")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"kvexp: unrecognized arguments: cases.jsonl; see ")
    assert done.stderr.count(b"\n") == 1


def test_each_answer_is_there_before_the_next_case():
    process = subprocess.Popen(
        [sys.executable, "-m", "kvexp.plan"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        for number in range(3):
            process.stdin.write(json.dumps({**CASE, "id": number}).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number
        process.stdin.close()
    assert process.returncode == 0


def test_a_reader_that_leaves_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "kvexp.plan"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        process.stdin.write(json.dumps(CASE).encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()
        process.stdin.write((json.dumps(CASE) + "\n").encode() * 50)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_planner_needs_only_the_standard_library():
    code = (
        "import sys, kvexp.plan;"
        "outside = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names);"
        "print(sorted(outside & {'torch', 'numpy', 'omegaconf', 'hydra', 'mlflow', 'rich'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
