"""Errors, intervals and groups, on cases made for it."""

import json

import pytest

from kvexp.errors import RequestError
from kvexp.validate import output, page, pictures, report, score
from kvexp.validate.case import case_of
from kvexp.validate.prediction import Interval, Prediction
from kvexp.validate.score import STATED, Comparison, Scored

GIB = 1 << 30


def scored(name, tokens=None, logged=None, *, engine="vllm", outcome="ok", **record):
    """A case that logs `logged` tokens, predicted as the interval `tokens`."""
    outputs = {"kv_tokens": logged, "error": "none", **record.pop("outputs", {})}
    case = case_of({"id": name, "engine": engine, "outputs": outputs, **record})
    values = {} if tokens is None else {"kv_tokens": Interval(*tokens)}
    return Scored(case=case, prediction=Prediction(answered=True, outcome=outcome, values=values))


def unanswered(name):
    case = case_of({"id": name, "engine": "vllm", "model": "a/b"})
    return Scored(case=case, prediction=Prediction.unanswered("no rules"))


STATED_KEYS = {"explicit": list(STATED)}
CASES = [
    scored("a-1", (95, 100, 105), 100, model="Qwen/Qwen3-8B", **STATED_KEYS),
    scored("a-2", (90, 110, 120), 100, engine_version="0.8.2 (V0)"),
    scored("b-1", (195, 200, 205), 100, engine="sglang", gpu="H100 80GB (avail 78.43)"),
    scored("b-2", outcome="oom", outputs={"error": "oom"}),
    scored("b-3", (50, 60, 70), 0, outputs={"error": "max_len_too_large"}),
    unanswered("c-1"),
]


def test_an_error_is_relative_and_zero_within_the_printed_digits():
    (near,) = [each for each in CASES if each.id == "a-2"]
    assert near.capacity_compared.error == pytest.approx(0.1)
    printed = case_of({"id": "x", "engine": "vllm", "outputs": {"weights_gib": 14.99}})
    figure = printed.logged.figures["weights_bytes"]
    close, far = (Interval.exactly(each * GIB) for each in (14.9889, 14.9))

    assert Comparison(predicted=close, logged=figure).error == 0
    assert Comparison(predicted=close, logged=figure).inside
    assert Comparison(predicted=far, logged=figure).error == pytest.approx(14.9 / 14.99 - 1)


def test_inside_is_of_tokens_else_of_blocks_else_unknown():
    blocks = case_of({"id": "x", "engine": "vllm", "outputs": {"num_gpu_blocks": 10}})
    values = {"num_blocks": Interval(9, 10, 11), "kv_tokens": Interval.exactly(1)}
    prediction = Prediction(answered=True, outcome="ok", values=values)

    assert Scored(case=blocks, prediction=prediction).inside_interval is True
    assert [each.inside_interval for each in CASES] == [True, True, False, None, False, None]


def test_a_refusal_instead_of_a_capacity_lies_beside_it():
    assert scored("x", None, 100, outcome="no_cache_blocks").inside_interval is False


def test_a_summary_counts_what_it_is_a_share_of():
    found = score.summary(CASES, ["a-", "b-"])

    everything = found["all"]
    assert (everything["cases"], everything["answered"]) == (6, 5)
    assert everything["answered_share"] == pytest.approx(5 / 6)
    assert (everything["inside_cases"], everything["inside_share"]) == (4, 0.5)
    assert (everything["failures"], everything["failure_share"]) == (2, 0.5)
    assert (everything["starts"], everything["start_share"]) == (3, 1.0)
    capacity = everything["capacity"]
    assert capacity["cases"] == 4
    assert capacity["median_error"] == pytest.approx(0.1)
    assert (capacity["worst"], capacity["worst_error"]) == ("b-1", 1.0)
    assert capacity["within_10_percent_share"] == pytest.approx(2 / 3)
    assert capacity["median_width"] == pytest.approx((0.1 + 30 / 110) / 2)


def test_groups_are_made_by_inputs_engine_version_card_and_prefix():
    found = score.summary(CASES, ["a-", "b-"])

    assert found["stated"]["cases"] == 1 and found["assumed"]["cases"] == 5
    assert found["with_id"]["cases"] == 2 and found["with_id_assumed"]["answered"] == 0
    assert set(found["by_engine"]) == {"sglang", "vllm"}
    assert set(found["by_version"]) == {"sglang unknown", "vllm V0", "vllm unknown"}
    assert found["by_gpu"]["H100 80GB"]["cases"] == 1
    assert found["by_prefix"]["a-"]["capacity"]["median_error"] == pytest.approx(0.05)


def test_a_summary_of_nothing_has_no_figures():
    found = score.summary([])

    assert found["all"]["cases"] == 0
    assert found["all"]["capacity"]["median_error"] is None


def test_the_json_has_the_cases_and_the_summary():
    found = json.loads(output.as_json(CASES, score.summary(CASES)))

    first, *_, last = found["cases"]
    assert first["id"] == "a-1" and first["answered"] is True
    assert first["predicted"]["kv_tokens"] == 100
    assert first["predicted"]["num_blocks"] is None
    assert first["predicted"]["outcome"] == "ok"
    assert (first["low"]["kv_tokens"], first["high"]["kv_tokens"]) == (95, 105)
    assert first["logged"]["kv_tokens"] == 100 and first["logged"]["outcome"] == "ok"
    assert first["inside_interval"] is True
    assert (last["answered"], last["reason"], last["inside_interval"]) == (False, "no rules", None)
    assert found["summary"]["all"]["cases"] == 6


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        ({"all": {"cases": 6, "answered_share": 0.8}}, []),
        ({"all": {"answered_share": 0.9}}, ["all.answered_share is 0.8333, below 0.9"]),
        ({"all": {"capacity": {"median_error": 0.11}}}, []),
        (
            {"by_prefix": {"b-": {"capacity": {"worst_error": 0.5}}}},
            ["by_prefix.b-.capacity.worst_error is 1, above 0.5"],
        ),
        (
            {"stated": {"failure_share": 0.9}},
            ["stated.failure_share is not known: no case has it, the limit is 0.9"],
        ),
    ],
)
def test_limits_are_kept_or_named(limits, missed):
    assert output.missed(limits, score.summary(CASES, ["a-", "b-"])) == missed


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"al": {"cases": 1}}, "--check: al is no key of the summary; there: all, stated"),
        ({"all": {"capacity": {"mean": 1}}}, "--check: all.capacity.mean is no key"),
        ({"all": {"cases": "many"}}, "--check: all.cases must be a number, got 'many'"),
        ({"all": {"cases": True}}, "--check: all.cases must be a number, got True"),
        ({"all": 3}, "--check: all takes no limit, got 3"),
        ({"all": {"capacity": {"worst": 1}}}, "--check: all.capacity.worst takes no limit"),
    ],
)
def test_a_wrong_limit_is_named(limits, message):
    with pytest.raises(RequestError) as raised:
        output.missed(limits, score.summary(CASES))

    assert message in str(raised.value)


def test_every_case_and_group_is_shown():
    text = "\n".join([*report.case_lines(CASES), *report.summary_lines(score.summary(CASES))])

    for each in CASES:
        assert each.id in text
    assert "c-1: not answered: no rules" in text
    assert "+100.00%" in text and "inputs stated" in text


def test_the_page_shows_groups_worst_cases_and_what_is_not_covered():
    text = page.page_text(CASES, score.summary(CASES, ["a-"]), ["records.jsonl"])

    assert "`python -m kvexp.validate records.jsonl --page FILE`" in text
    for title in ("By term", "By engine", "By version", "By card", "What is not covered"):
        assert f"## {title}\n" in text
    assert "| `b-1` | sglang unknown | 200 | 100 | +100.00% |" in text
    assert "- `c-1` (vllm unknown): no rules" in text
    assert "| oom | oom | 1 |" in text


@pytest.mark.parametrize("cases", [CASES, []])
def test_the_picture_is_drawn(tmp_path, cases):
    path = tmp_path / "scatter.png"
    pictures.draw_scatter(cases, path)

    assert path.read_bytes().startswith(b"\x89PNG")
