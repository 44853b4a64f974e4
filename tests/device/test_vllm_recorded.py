"""vLLM 0.26.0's own worker on an H200, as recorded: against the rules and the reference cases."""

import json
from pathlib import Path

import pytest

import kvexp
from kvexp import pipeline, side_by_side
from kvexp.api import compose_points
from kvexp.results import Compared, Part, Profile, Provenance, Stage, Status
from kvexp_vllm_worker.measurement import WorkerMeasurement
from kvexp_vllm_worker.planned import Planned

DATA = Path(__file__).parents[1] / "data"
RECORDED = json.loads((DATA / "h200_vllm_worker.json").read_text())
CASES = {case["case"]: case for case in json.loads((DATA / "vllm_h200.json").read_text())["cases"]}


class Recorded:
    """An engine that answers as vLLM did on a real card."""

    version = "0.26.0"

    def __init__(self, point):
        self.ranks = point["ranks"]
        self.planned = point["planned"]

    def start(self):
        return self.ranks

    def load(self):
        return [{} for _ in self.ranks]

    profile = warm_up = verify = load

    def plan(self, available):
        given = {**self.planned, "groups": ()}
        given["block_bytes_per_rank"] = tuple(given["block_bytes_per_rank"])
        return Planned(**given)

    def allocate(self):
        return [self.planned["num_blocks"] * self.planned["block_bytes_per_rank"][0]]

    def close(self):
        pass


@pytest.mark.parametrize("point", RECORDED["points"], ids=lambda point: point["overrides"][0])
def test_what_vllm_found_on_an_h200_is_what_the_rules_say(monkeypatch, point):
    monkeypatch.setattr(WorkerMeasurement, "_made", lambda self: Recorded(point))
    (made,) = compose_points([*point["overrides"], "profiler=vllm"])

    result = pipeline.execute(made.run, "vllm")

    assert (result.status, result.num_blocks) == (Status.ok, point["num_blocks"])
    assert result.kv_tokens == point["kv_tokens"]
    assert result.max_concurrency == point["max_concurrency"]
    (note,) = result.notes[-1:]  # and none says that the planners differ
    assert note.startswith("by the rules")
    assert note.count("(+0)") == 5
    ruled = kvexp.run(point["overrides"])
    assert ruled.profile.weights_bytes == point["ranks"][0]["weights_bytes"]
    assert ruled.profile.activation_bytes == point["ranks"][0]["activation_bytes"]
    assert ruled.num_blocks == point["num_blocks"]


def test_a_recorded_start_is_that_of_the_reference_cases():
    for point, name in zip(
        RECORDED["points"],
        ("02_llama3_8b_eager", "10_qwen3_8b_eager", "13_gemma3_12b_text_eager"),
        strict=True,
    ):
        case, rank = CASES[name], point["ranks"][0]
        assert {key: rank[key] for key in ("weights_bytes", "activation_bytes")} == {
            key: case["ranks"][0][key] for key in ("weights_bytes", "activation_bytes")
        }
        assert rank["non_torch_bytes"] == case["ranks"][0]["non_torch_bytes"]
        assert rank["available_bytes"] == case["ranks"][0]["available_bytes"]
        assert point["num_blocks"] == case["num_blocks"]
        assert point["kv_tokens"] == case["kv_tokens"]


def test_the_four_profilers_on_an_h200_differ_most_in_activation():
    compared = [
        Compared(
            profiler=each["profiler"],
            status=Status.ok,
            stage=Stage.done,
            reason="",
            **{name: each[name] for name in ("num_blocks", "kv_tokens", "max_concurrency")},
            available_bytes=each["available_bytes"],
            profile=Profile(
                **{
                    name: Part(
                        name=name,
                        size_bytes=each[f"{name}_bytes"],
                        provenance=Provenance.measured,
                        reason="recorded",
                    )
                    for name in ("weights", "activation", "non_torch", "cudagraph")
                }
            ),
        )
        for each in RECORDED["compared"]
    ]

    assert list(side_by_side.largest_difference(compared)) == [RECORDED["note"]]
    assert RECORDED["note"].endswith("+234,864,128 bytes, x1.2500")
    table = [line.split() for line in side_by_side.table_lines(compared)]
    assert ["blocks", "57,629", "57,627", "x1.0000", "57,468", "x0.9972", "57,629", "x1.0000"] in (
        table
    )
