"""The record on disk: round trips, atomic files, folders that nobody shares."""

import json
import math
import multiprocessing
import os
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path

import pytest
import yaml

from kvexp import record
from kvexp.errors import RequestError
from kvexp.results import (
    Budget,
    KvGroup,
    Part,
    Profile,
    Provenance,
    RankResult,
    Refusal,
    Result,
    Stage,
    Status,
)

GIB = 1 << 30


def part(name, size_bytes):
    return Part(
        name=name, size_bytes=size_bytes, provenance=Provenance.measured, reason=f"why {name}"
    )


def full_result(**changes):
    terms = {"non_torch": GIB, "weights": 14 * GIB, "activation": 4 * GIB, "cudagraph": 0}
    parts = {name: part(name, size) for name, size in terms.items()}
    profile = Profile(**parts)
    budget = Budget(
        base="total",
        total_bytes=80 * GIB,
        free_bytes=79 * GIB,
        requested_bytes=72 * GIB,
        available_bytes=53 * GIB,
        parts=(*profile.parts, part("kv_cache", 52 * GIB), part("unused", GIB)),
    )
    values = {
        "status": Status.ok,
        "stage": Stage.done,
        "reason": "",
        "num_blocks": 3876,
        "block_size": 256,
        "block_bytes": 14_680_064,
        "kv_tokens": 992_256,
        "max_concurrency": 242.25,
        "budget": budget,
        "profile": profile,
        "layout": "uniform",
        "groups": (
            KvGroup(
                kind="full",
                num_layers=28,
                block_size=256,
                page_size_bytes=524288,
                num_blocks=3876,
                blocks_per_request=16,
            ),
        ),
        "ranks": (
            RankResult(
                rank=0,
                tp_rank=0,
                pp_rank=0,
                first_layer=0,
                num_layers=28,
                num_blocks=3876,
                block_bytes=14_680_064,
                profile=profile,
                budget=budget,
            ),
        ),
        "log_lines": ("GPU KV cache size: 992,256 tokens",),
        "notes": ("häßlich",),
        "requested": {"util": None},
        "effective": {"util": 0.9, "tp": 1},
        "readings": {"phases": [1, 2, {"peak": 3}]},
        "duration_s": 0.25,
        **changes,
    }
    return Result(**values)


def refused_result():
    refusal = Refusal(
        kind="max_len_too_large",
        message="too long",
        rank=1,
        needed_bytes=3 * GIB,
        available_bytes=GIB,
        estimated_max_model_len=3664,
    )
    return full_result(
        status=Status.infeasible, stage=Stage.budget, reason="too long", refusal=refusal
    )


@pytest.mark.parametrize(
    "result",
    [
        full_result(),
        refused_result(),
        Result(status=Status.invalid, stage=Stage.resolve, reason="util must be above 0"),
    ],
)
def test_a_result_survives_the_disk(tmp_path, result):
    record.write(tmp_path, record.to_dict(result), "a: 1\n")
    back, data = record.read(tmp_path)
    assert back == result
    assert data["schema_version"] == record.SCHEMA_VERSION
    assert record.read(tmp_path / "result.json")[0] == result


def test_keys_of_the_record():
    data = record.to_dict(refused_result())
    assert list(data) == [
        *("schema_version", "identity", "overrides", "started_at", "status", "stage", "reason"),
        *("num_blocks", "num_blocks_low", "num_blocks_high", "block_size", "block_bytes"),
        *("kv_tokens", "kv_tokens_low", "kv_tokens_high"),
        *("max_concurrency", "max_concurrency_low", "max_concurrency_high"),
        *("allocated_bytes", "num_replicas", "kv_tokens_total", "max_concurrency_total"),
        *("budget", "profile", "holding", "refusal"),
        *(
            "layout",
            "verified",
            "largest_util",
            "groups",
            "ranks",
            "log_lines",
            "notes",
            "requested",
            "effective",
        ),
        *("readings", "versions", "host", "git", "duration_s"),
    ]
    assert list(data["profile"]) == [
        *("weights_bytes", "activation_bytes", "non_torch_bytes", "cudagraph_bytes", "parts")
    ]
    assert data["refusal"]["gap_bytes"] == 2 * GIB
    assert data["budget"]["parts"][0] == {
        "name": "non_torch",
        "size_bytes": GIB,
        "provenance": "measured",
        "reason": "why non_torch",
        "low_bytes": None,
        "high_bytes": None,
    }


def test_origin_is_kept_with_the_time_in_utc():
    zone = timezone(timedelta(hours=2))
    origin = record.Origin(
        identity="abc",
        overrides=["util=0.9"],
        started_at=datetime(2026, 1, 1, 1, 30, tzinfo=zone),
        versions={"kvexp": "0.1"},
        host=record.host(),
    )
    data = record.to_dict(full_result(), origin)
    assert data["started_at"] == "2025-12-31T23:30:00+00:00"
    assert (data["identity"], data["overrides"]) == ("abc", ["util=0.9"])
    assert data["host"]["name"]


def test_no_nan_reaches_the_file(tmp_path):
    result = full_result(max_concurrency=math.nan, readings={"ratio": [math.inf, 1.5]})
    record.write(tmp_path, record.to_dict(result), "")
    text = (tmp_path / "result.json").read_text()
    data = json.loads(text, parse_constant=pytest.fail)
    assert data["max_concurrency"] is None
    assert data["readings"] == {"ratio": [None, 1.5]}


def test_plain_turns_everything_into_json_data():
    class Colour(Enum):
        red = 1

    values = {
        "enum": Colour.red,
        "status": Status.ok,
        1: (Path("a"), {3}),
        "bytes": b"x",
        "b": True,
    }
    assert record.plain(values) == {
        "enum": "red",
        "status": "ok",
        "1": ["a", [3]],
        "bytes": "b'x'",
        "b": True,
    }


def test_config_and_overrides_can_be_read_by_any_yaml_reader(tmp_path):
    odd = ["a=[1,2]", "b='x: #y'", "c=ü\n", "- d", "${x}"]
    data = record.to_dict(full_result(), record.Origin(overrides=odd))
    record.write(tmp_path, data, "model:\n  name: x\n")
    assert yaml.safe_load((tmp_path / "overrides.yaml").read_text("utf-8")) == odd
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"model": {"name": "x"}}
    (tmp_path / "b").mkdir()
    record.write(tmp_path / "b", record.to_dict(full_result()), "")
    assert yaml.safe_load((tmp_path / "b" / "overrides.yaml").read_text()) == []


def test_a_result_is_never_overwritten(tmp_path):
    record.write(tmp_path, record.to_dict(full_result()), "")
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(RequestError, match="never overwritten"):
        record.write(tmp_path, record.to_dict(refused_result()), "other")
    assert (tmp_path / "result.json").read_bytes() == before
    assert (tmp_path / "config.yaml").read_text() == ""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file_or_none(tmp_path, monkeypatch, call):
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    record.write_text(old, "whole\n")

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), crash)
    for path in (old, new):
        with pytest.raises(KeyboardInterrupt):
            record.write_text(path, "half")
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]
    assert old.read_text() == "whole\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged: not JSON"),
        ('{"schema_version": 1, "status": ', "is damaged: not JSON"),
        ("[1]", "is not a result of kvexp"),
        ('{"a": 1}', "is not a result of kvexp"),
        ('{"schema_version": 1}', "is damaged: no "),
        ('{"schema_version": 2}', "schema version 2 is newer .* pip install --upgrade kvexp"),
        ('{"schema_version": "x"}', "schema version x is newer"),
        ('{"schema_version": 0}', "schema version 0 is not one"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, text, message):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message) as raised:
        record.read(tmp_path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"status": "fine"},
        {"budget": {"parts": []}},
        {"ranks": [3]},
        {"groups": [{"kind": "full"}]},
    ],
)
def test_wrong_content_is_damage(tmp_path, change):
    data = {**record.to_dict(full_result()), **change}
    (tmp_path / "result.json").write_text(json.dumps(data))
    with pytest.raises(RequestError, match="is damaged"):
        record.read(tmp_path)


def test_a_budget_that_does_not_add_up_is_damage(tmp_path):
    data = record.to_dict(full_result())
    data["budget"]["requested_bytes"] += 1
    (tmp_path / "result.json").write_text(json.dumps(data))
    with pytest.raises(RequestError, match="parts sum to"):
        record.read(tmp_path)


def test_a_missing_result_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"cannot read .*result\.json"):
        record.read(tmp_path)


def test_older_versions_are_upgraded_step_by_step(monkeypatch):
    monkeypatch.setattr(record, "SCHEMA_VERSION", 3)
    monkeypatch.setitem(record._UPGRADES, 1, lambda data: {**data, "reason": "two"})
    monkeypatch.setitem(
        record._UPGRADES, 2, lambda data: {**data, "reason": data["reason"] + " three"}
    )
    data = {**record.to_dict(full_result()), "schema_version": 1}
    assert record.from_dict(data).reason == "two three"


def test_identity_ignores_order_and_where_results_go():
    config = {"util": 0.9, "model": {"name": "x", "layers": 2}}
    other = {"model": {"layers": 2, "name": "x"}, "util": 0.9, "tracking": {"uri": "x"}, "hydra": 1}
    versions = {"kvexp": "0.1"}
    found = record.identity(config, versions)
    assert found == record.identity(other, versions)
    assert len(found) == 16
    assert int(found, 16) >= 0
    assert found != record.identity({**config, "util": 0.91}, versions)
    assert found != record.identity(config, {"kvexp": "0.2"})


def test_versions_are_a_copy_and_lack_what_is_not_installed():
    record.versions()["python"] = "changed"
    found = record.versions()
    assert found["python"].startswith("3.")
    assert "hydra-core" in found
    assert "" not in found.values()


def test_git_state(tmp_path):
    assert record.git_state(tmp_path / "absent") == {}
    state = record.git_state(Path(__file__).parent)
    if state:
        assert len(state["commit"]) == 40
        assert isinstance(state["dirty"], bool)


def test_no_git_no_state(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.git_state(tmp_path) == {}


def test_a_new_folder_never_holds_a_result(tmp_path):
    path = tmp_path / "a" / "b"
    assert record.new_folder(path) == path
    record.write(path, record.to_dict(full_result()), "")
    assert sorted(p.name for p in path.iterdir()) == [
        "config.yaml",
        "overrides.yaml",
        "result.json",
    ]
    second = record.new_folder(path)
    assert second == tmp_path / "a" / "b-1"
    assert record.new_folder(path) == tmp_path / "a" / "b-2"  # b-1 is still being filled
    assert not (path / ".claim").exists()


def test_an_existing_folder_without_a_result_is_used(tmp_path):
    (tmp_path / "log.txt").write_text("x")
    assert record.new_folder(tmp_path) == tmp_path
    record.write(tmp_path, record.to_dict(full_result()), "")


def _claim_and_end(path):
    record.new_folder(Path(path))
    os._exit(1)


def _claim(path, ready, sent):
    ready.wait()
    sent.put(str(record.new_folder(Path(path))))
    ready.wait()


def test_the_folder_of_a_dead_process_is_free_again(tmp_path):
    process = multiprocessing.get_context("spawn").Process(
        target=_claim_and_end, args=(str(tmp_path / "p"),)
    )
    process.start()
    process.join()
    assert (tmp_path / "p").is_dir()
    assert record.new_folder(tmp_path / "p") == tmp_path / "p"
    record.write(tmp_path / "p", record.to_dict(full_result()), "")


def test_processes_never_share_a_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, sent = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_claim, args=(str(tmp_path / "p"), ready, sent)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    folders = {sent.get(timeout=20) for _ in processes}
    for process in processes:
        process.join()
    assert folders == {str(tmp_path / name) for name in ("p", "p-1", "p-2", "p-3")}


def test_an_unwritable_place_is_named_with_what_to_change(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"cannot write to .*file/x.*hydra\.run\.dir"):
        record.new_folder(tmp_path / "file" / "x")
    with pytest.raises(RequestError, match=r"cannot write to .*file.*hydra\.run\.dir"):
        record.new_folder(tmp_path / "file")
    with pytest.raises(RequestError, match=r"cannot write to .*absent"):
        record.write(tmp_path / "absent", record.to_dict(full_result()), "")
