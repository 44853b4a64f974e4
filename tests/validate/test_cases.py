"""Records as they are read: inputs, printed figures with their rounding, a line for a bad one."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from kvexp.validate.case import Figure, Inputs, UnreadableRecord, case_of, read

DATA = Path(__file__).parents[1] / "data" / "engine_logs.jsonl"
RECORDS = [json.loads(line) for line in DATA.read_text().splitlines()]
GIB = 1 << 30

SMALL = {
    "id": "a-case",
    "engine": "vllm",
    "engine_version": "0.19.0",
    "model": "Qwen/Qwen3-8B",
    "gpu": "H100 80GB",
    "gpu_total_gib": 79.19,
    "tp": 1,
    "gpu_memory_utilization": 0.95,
    "explicit": ["engine", "model", "tp", "kv_tokens"],
    "outputs": {"kv_tokens": 1000, "available_kv_gib": 58.1, "max_concurrency": 4.84},
    "extra": {"free_gib": 60.85, "est_max_len": 122080, "per_rank": {}},
}


def lines(*records):
    return [json.dumps(record) for record in records]


def test_every_kept_record_is_read():
    found = read(DATA.read_text().splitlines(), "engine_logs.jsonl")

    assert found.problems == ()
    assert len(found.cases) == len(RECORDS)


def test_inputs_hold_nothing_that_the_engine_printed():
    inputs = case_of(SMALL).inputs

    assert inputs.stated == ("engine", "model", "tp")
    assert inputs.free_gib == 60.85
    outputs = {key for record in RECORDS for key in record["outputs"]}
    extra = {key for record in RECORDS for key in record.get("extra") or {}}
    assert {item.name for item in fields(Inputs)} & (outputs | extra) == {
        "free_gib",
        "init_free_gib",
    }


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["id"])
def test_inputs_stay_the_same_without_outputs_extra_and_notes(record):
    free = {
        key: value
        for key, value in (record.get("extra") or {}).items()
        if key in ("free_gib", "init_free_gib")
    }
    blank = {k: v for k, v in record.items() if k not in ("outputs", "notes", "extra", "source")}

    assert case_of({**blank, "extra": free}).inputs == case_of(record).inputs


def test_printed_figures_keep_their_rounding():
    figures = case_of(SMALL).logged.figures

    assert figures["available_kv_bytes"] == Figure(value=round(58.1 * GIB), error=0.005 * GIB)
    assert figures["kv_tokens"] == Figure(value=1000)
    assert figures["max_concurrency"] == Figure(value=4.84, error=0.005)
    assert figures["estimated_max_len"] == Figure(value=122080)


def test_four_digits_are_rounded_at_the_fourth():
    record = {**SMALL, "outputs": {"weights_gib": 14.9889}}

    assert case_of(record).logged.figures["weights_bytes"].error == pytest.approx(5e-5 * GIB)


def test_a_size_in_whole_bytes_is_exact():
    record = {**SMALL, "outputs": {"weights_gib": 16062685184 / GIB}}

    assert case_of(record).logged.figures["weights_bytes"] == Figure(value=16062685184)


@pytest.mark.parametrize("printed", [15, 15.0, 14.5])
def test_printed_digits_that_happen_to_be_whole_bytes_are_rounded_too(printed):
    record = {**SMALL, "outputs": {"weights_gib": printed}}

    figure = case_of(record).logged.figures["weights_bytes"]
    assert figure == Figure(value=printed * GIB, error=0.005 * GIB)


@pytest.mark.parametrize(("error", "outcome"), [("none", "ok"), (None, None), ("oom", "oom")])
def test_how_a_start_ended(error, outcome):
    assert case_of({**SMALL, "outputs": {"error": error}}).logged.outcome == outcome


def test_a_record_without_outputs_is_a_case():
    record = {key: value for key, value in SMALL.items() if key not in ("outputs", "extra")}

    assert case_of(record).logged.figures == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": None}, "id must be a text, got None"),
        ({"engine": 3}, "engine must be a text, got 3"),
        ({"max_model_len": "8k"}, "max_model_len must be int or null, got '8k'"),
        ({"tp": True}, "tp must be int or null, got True"),
        ({"tp": 1.5}, "tp must be int or null, got 1.5"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"num_gpus": 0}, "num_gpus must be at least 1, got 0"),
        ({"max_num_seqs": -1}, "max_num_seqs must be at least 1, got -1"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be more than 0, got 0"),
        ({"gpu_total_gib": 0}, "gpu_total_gib must be more than 0, got 0"),
        ({"gpu_total_gib": -1}, "gpu_total_gib must not be negative, got -1"),
        ({"gpu_total_gib": 1e308}, "gpu_total_gib must be a number below 2^32, got 1e+308"),
        ({"outputs": {"kv_tokens": 10**400}}, "outputs.kv_tokens must be a number below 2^53"),
        ({"explicit": "model"}, "explicit must be a list of keys, got 'model'"),
        ({"outputs": [1]}, "outputs must be an object or null, got [1]"),
        ({"outputs": {"kv_tokens": "many"}}, "outputs.kv_tokens must be a number or null"),
        ({"outputs": {"error": "crash"}}, "outputs.error must be one of none, max_len_too_large"),
        ({"extra": {"free_gib": "9"}}, "extra.free_gib must be int or float or null, got '9'"),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(UnreadableRecord) as raised:
        case_of({**SMALL, **changes})

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "NaN",
        '{"id": "x", "engine": "vllm", "tp": 1e999}',
        '{"id": "x", "tp": NaN}',
        "[" * 5000,
    ],
)
def test_a_line_that_is_no_record_costs_that_line_alone(line):
    found = read([*lines(SMALL), line], "some.jsonl")

    assert len(found.cases) == 1
    (problem,) = found.problems
    assert problem.startswith("some.jsonl:2: ")


def test_an_id_stands_once():
    found = read(lines(SMALL, SMALL), "some.jsonl")

    assert len(found.cases) == 1
    assert found.problems == ("some.jsonl:2: id 'a-case' stands in an earlier line too",)


MEASURED = {
    "case": "02_llama3_8b_eager",
    "args": {"model": "llama3_8b", "gpu_memory_utilization": 0.92, "enforce_eager": True},
    "versions": {"vllm": "0.26.0"},
    "config": {"v2": True, "max_num_batched_tokens": 8192, "max_num_seqs": 1024},
    "max_model_len": 8192,
    "init_snapshot": {"free_memory": 149557477376, "total_memory": 150109880320},
    "weights_memory": 16062685184,
    "peak_activation_memory": 939540992,
    "non_torch_memory": 241172480,
    "cudagraph_memory_estimate": 0,
    "available_kv_cache_memory_bytes": 120857691239,
    "num_blocks": 57629,
    "kv_tokens": 922064,
    "max_concurrency": 112.556640625,
}


def test_a_measurement_from_inside_the_engine_is_exact():
    case = case_of(MEASURED)

    assert case.inputs.id == "02_llama3_8b_eager"
    assert case.inputs.gpu_total_gib * GIB == 150109880320
    assert case.logged.figures["available_kv_bytes"] == Figure(value=120857691239)
    assert case.logged.outcome == "ok"


def test_a_measurement_without_a_figure_is_named():
    broken = {key: value for key, value in MEASURED.items() if key != "weights_memory"}

    with pytest.raises(UnreadableRecord, match="a measurement without 'weights_memory'"):
        case_of(broken)
