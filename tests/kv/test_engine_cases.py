"""Equal to the engine: its own answers for 0.26, other versions', measured starts and logs."""

import pytest
from kv_cases import DATA, GIB, by_version, expand, read

from kvexp.kv import Plan, PlanRefusal, rules_for
from kvexp.plan import answer_case

CASES = read("vllm_0_26_cases.jsonl")
GROUP_KEYS = ("kind", "num_layers", "block_size", "page_size_bytes", "max_memory_usage_bytes")


@pytest.mark.parametrize("row", CASES, ids=lambda row: row["case"]["id"])
def test_equals_vllm_0_26_to_the_last_bit(row):
    expected = row["answer"]
    got = answer_case(expand(row["case"]))
    for key in expected.keys() - {"groups"}:
        want = expected[key]
        value = list(got[key]) if isinstance(got[key], tuple) else got[key]
        assert value == want, key
    if "groups" in expected:
        groups = [[group[key] for key in GROUP_KEYS] for group in got["groups"]]
        assert groups == expected["groups"]
        assert got["max_concurrency"].hex() == expected["max_concurrency_hex"]


def test_all_visible_cases_are_there():
    assert len(CASES) == 111


@pytest.mark.parametrize("row", read("vllm_versions.jsonl"))
def test_equals_the_planner_of_each_version(row):
    """Answers of the functions of the releases themselves."""
    for version, expected in row["answers"].items():
        outcome = by_version(expand(row["case"]), version)
        if isinstance(outcome, PlanRefusal):
            code, longest = expected
            assert outcome.code == code, version
            if longest is not None:
                assert (outcome.estimated_max_model_len or 0) == longest, version
        else:
            got = [outcome.num_blocks, outcome.kv_cache_size_tokens, outcome.max_concurrency.hex()]
            assert got == expected, version


@pytest.mark.parametrize("row", read("measured_h200.jsonl"), ids=lambda row: row["case"]["id"])
def test_equals_engines_measured_on_h200(row):
    """From the measured available bytes of each rank: blocks, tokens and concurrency."""
    got, expected = answer_case(row["case"]), row["answer"]
    if "estimated_max_model_len" in expected:
        assert got["code"] == "max_len_too_large"
        assert got["estimated_max_model_len"] == expected["estimated_max_model_len"]
        return
    assert got["num_blocks"] == expected["num_blocks"]
    assert got["num_blocks"] == min(got["num_blocks_per_worker"])
    assert got["kv_cache_size_tokens"] == expected["kv_tokens"]
    assert got["max_concurrency"] == expected["max_concurrency"]
    if "max_in_flight_tokens" in expected:
        assert got["max_in_flight_tokens"] == expected["max_in_flight_tokens"]


def _log_case(row, gib):
    keys = ("layers", "block_size", "max_model_len", "max_num_batched_tokens")
    return {**{key: row[key] for key in keys}, "available_bytes": int(gib * GIB)}


@pytest.mark.parametrize("row", read("engine_logs.jsonl"), ids=lambda row: row["id"])
def test_public_logs_lie_within_their_rounding(row):
    """A log prints GiB to two digits, so the figures lie between those of both ends.

    Logs of pipelines are left out: they print one rank's bytes, and another rank decides.
    """
    version = row["version"]
    ends = [
        by_version(_log_case(row, row["available_kv_gib"] + shift), version)
        for shift in (-0.0051, 0.0051)
    ]
    if row["error"] == "max_len_too_large":
        assert all(end.code == "max_len_too_large" for end in ends)
        low, high = (end.estimated_max_model_len for end in ends)
        assert low <= row["num_gpu_blocks"] * row["block_size"] <= high
        return
    low, high = ends
    assert isinstance(low, Plan), low
    if row["kv_tokens"] is not None:
        assert low.kv_cache_size_tokens <= row["kv_tokens"] <= high.kv_cache_size_tokens
    if row["num_gpu_blocks"] is not None:
        assert low.num_blocks <= row["num_gpu_blocks"] <= high.num_blocks
    if row["max_concurrency"] is not None:
        printed = row["max_concurrency"]
        assert low.max_concurrency - 0.006 <= printed <= high.max_concurrency + 0.006


def test_data_names_only_versions_with_rules():
    for row in read("vllm_versions.jsonl"):
        for version in row["answers"]:
            assert rules_for(version).note == ""
    assert (DATA / "engine_logs.jsonl").exists()
