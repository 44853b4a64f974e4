"""What a person reads of a measured point."""

from dataclasses import replace
from pathlib import Path

from kvexp import measured, record
from kvexp.results import Result, Stage, Status

ACCOUNTS = {
    "closes": True,
    "stage": "verify",
    "residual_bytes": 2097152,
    "tolerance_bytes": 33554432,
    "driver_used_bytes": 138 << 30,
}


def lines(readings):
    result = Result(status=Status.ok, stage=Stage.done, reason="", readings=readings)
    return list(measured.lines(result))


def test_the_accounts_are_one_line_a_rank():
    (line,) = lines({"accounting": ACCOUNTS})
    assert line == (
        "accounts         closed at verify: 2,097,152 B of the driver's 138.00 GiB unexplained"
        " (tolerance 33,554,432 B)"
    )
    ranks = [{"accounting": ACCOUNTS}, {"accounting": {**ACCOUNTS, "closes": False}}]
    first, second = lines({"ranks": ranks})
    assert first.endswith("rank 0")
    assert "NOT closed" in second and second.endswith("rank 1")


def test_a_point_that_was_not_measured_has_none():
    assert lines({}) == []
    assert lines({"accounting": None}) == []


def test_graphs_and_the_largest_places_of_the_peak_are_shown():
    place = {"module": "model.layers.3.mlp", "line": "modeling_llama.py:140 forward", "blocks": 2,
             "size_bytes": 3 << 30, "stays": False}  # fmt: skip
    workspace = {**place, "module": "model.rotary_emb", "stays": True, "size_bytes": 32 << 20}
    at_peak = {"growth_bytes": 4 << 30, "places": [place, workspace, *[place] * 9]}
    told = lines({"graphs_bytes": 1 << 30, "at_peak": at_peak})
    assert told[0] == "graphs           1.00 GiB beyond the cache"
    assert told[1] == "at the peak      4.00 GiB over the weights, of which"
    assert told[2] == ("  3.00 GiB in model.layers.3.mlp (modeling_llama.py:140 forward, 2 blocks)")
    assert told[3].endswith("2 blocks, stays)")
    assert len(told) == 2 + measured.SHOWN


def test_measured_terms_stand_beside_the_engines_rules():
    path = Path(__file__).with_name("data") / "h200_llama3_8b_vllm_torch_allocator.json"
    result, _ = record.read(path)
    rules = {"weights": 16062685184, "activation": 939540992, "non_torch": None}
    told = list(measured.lines(replace(result, readings={"rules_by_rank": [rules]})))
    assert told == [
        "to the rules     measured / rule: weights 1.000, activation 1.076,"
        " non_torch without a rule"
    ]
