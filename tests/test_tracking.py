"""MLflow: real SQLite stores, odd inputs, odd places, and failures that must not cost a point."""

import csv
import json
import math
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvexp import record, report, tracking
from kvexp.errors import RequestError
from kvexp.results import Budget, Part, Profile, Provenance, Result, Stage, Status
from kvexp.tracking import Store, Tracking, open_store, param_name, shorten, ui_command

GIB = 1 << 30


def part(name, size_bytes):
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.derived, reason="a rule")


def result(**changes):
    terms = {"non_torch": GIB, "weights": 14 * GIB, "activation": 4 * GIB, "cudagraph": 0}
    profile = Profile(**{name: part(name, size) for name, size in terms.items()})
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
        "max_concurrency": 242.25,
        "budget": budget,
        "profile": profile,
        "log_lines": ("GPU KV cache size: 992,256 tokens",),
        "requested": {"util": None, "tp": 1},
        "effective": {"engine": "vllm", "engine_version": "0.26.0", "util": 0.9, "tp": 1},
        **changes,
    }
    return Result(**values)


INVALID = Result(
    status=Status.invalid, stage=Stage.resolve, reason="util is wrong", requested={"util": 92.0}
)


START = """
import json, sys
from pathlib import Path
from kvexp.tracking import Tracking, open_store
store = open_store(Tracking(experiment="first"), Path(sys.argv[1]))
run_id = store.start_point("p", {"a": 1}, {})
store.kill(run_id)
print(json.dumps([store.experiment_id, run_id, store.failures]))
"""


@pytest.fixture(scope="session")
def born(tmp_path_factory):
    """A new store that two processes started at once, and what each of them said.

    Making a store takes seconds, so the other tests copy this one.
    """
    folder = tmp_path_factory.mktemp("born")
    command = [sys.executable, "-c", START, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    return folder, [process.communicate(timeout=60) for process in processes]


@pytest.fixture
def template(born):
    return born[0] / "outputs" / "mlflow.db"


@pytest.fixture
def launch(template, tmp_path):
    return with_store(template, tmp_path)


def with_store(template, folder):
    (folder / "outputs").mkdir(parents=True)
    shutil.copy(template, folder / "outputs" / "mlflow.db")
    return folder


@pytest.fixture
def store(launch):
    return open_store(Tracking(), launch)


def keep(folder, kept):
    """A point's folder as the session leaves it; the content of its result.json."""
    folder = record.new_folder(folder)
    origin = record.Origin(
        identity="0123456789abcdef",
        versions={"kvexp": "0.1.0", "hydra-core": "1.3.8"},
        host={"name": "here"},
        git={"commit": "f" * 40, "dirty": False},
    )
    data = record.to_dict(kept, origin)
    record.write(folder, data, "util: 0.9\n")
    return data


def point(store, folder, kept, parent=None, **tags):
    run_id = store.start_point(folder.name, {"util": 0.9}, tags, parent)
    store.finish_point(run_id, keep(folder, kept), folder, parent is None)
    return run_id


def artifacts(store, run_id):
    return sorted(each.path for each in store._client.list_artifacts(run_id))


def test_a_single_point(store, tmp_path):
    run_id = point(store, tmp_path / "p", result(), profiler="analytic")
    run = store._client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "p"
    assert run.data.params == {"util": "0.9"}
    assert run.data.metrics == {
        "num_blocks": 3876,
        "block_size": 256,
        "max_concurrency": 242.25,
        "weights_bytes": 14 * GIB,
        "activation_bytes": 4 * GIB,
        "non_torch_bytes": GIB,
        "cudagraph_bytes": 0,
        "peak_bytes": 19 * GIB,
        "kv_cache_bytes": 52 * GIB,
        "total_bytes": 80 * GIB,
        "free_bytes": 79 * GIB,
        "requested_bytes": 72 * GIB,
        "available_bytes": 53 * GIB,
        "axis.util": 0.9,
        "axis.tp": 1,
    }
    tags = {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")}
    assert tags == {
        "kind": "point",
        "profiler": "analytic",
        "status": "ok",
        "stage": "done",
        "engine": "vllm",
        "engine_version": "0.26.0",
        "identity": "0123456789abcdef",
        "folder": str(tmp_path / "p"),
        "host": "here",
        "git_commit": "f" * 40,
        "git_dirty": "false",
        "kvexp_version": "0.1.0",
        "hydra-core_version": "1.3.8",
    }
    assert "992,256 tokens" in run.data.tags["mlflow.note.content"]
    assert artifacts(store, run_id) == ["config.yaml", "memory.png", "result.json"]
    assert store.failures == 0


def test_a_sweep(store, tmp_path):
    parent = store.start_sweep("util", {"engine": "vllm"}, {"model": "llama3_8b"})
    kept = [("a", result()), ("b", result(num_blocks=9)), ("c", INVALID)]
    children = [
        point(store, tmp_path / name, each, parent, sweep_id=parent, sweep_index=index)
        for index, (name, each) in enumerate(kept)
    ]
    table = tmp_path / "table.csv"
    table.write_text(report.csv_text(kept))
    picture = report.memory_picture(kept, tmp_path / "memory.png")
    store.finish_sweep(parent, kept, [table, picture, tmp_path / "absent"], tmp_path)

    found = store._client.search_runs(
        [store.experiment_id],
        filter_string=f"tags.sweep_id = '{parent}'",
        order_by=["metrics.`axis.util` DESC"],
    )
    assert found[0].info.run_id == children[2]
    assert {run.data.tags["mlflow.parentRunId"] for run in found} == {parent}
    assert [store._client.get_run(child).info.status for child in children] == [
        "FINISHED",
        "FINISHED",
        "FAILED",
    ]
    assert artifacts(store, children[0]) == ["config.yaml", "result.json"]
    run = store._client.get_run(parent)
    assert run.info.status == "FAILED"
    assert run.data.tags["status"] == "partial"
    assert run.data.tags["points"] == "2/3 ok"
    assert run.data.params == {"model": "llama3_8b"}
    assert run.data.metrics == {
        "points": 3,
        "points.ok": 2,
        "points.invalid": 1,
        "best.num_blocks": 3876,
        "best.max_concurrency": 242.25,
    }
    assert artifacts(store, parent) == ["memory.png", "table.csv"]
    with table.open() as stream:
        assert len(list(csv.DictReader(stream))) == 3


def test_the_best_of_a_sweep_goes_by_tokens_where_blocks_differ_in_size(store, tmp_path):
    # SGLang's blocks are single tokens: more blocks than vLLM's, yet fewer tokens
    engines = [
        ("engine=vllm", result(num_blocks=28962, block_size=16, kv_tokens=463392)),
        (
            "engine=sglang",
            result(num_blocks=394000, block_size=1, kv_tokens=394000, max_concurrency=48.1),
        ),
        ("engine=nano_vllm", INVALID),
    ]
    parent = store.start_sweep("engine", {}, {})
    store.finish_sweep(parent, engines, [], tmp_path)
    run = store._client.get_run(parent)

    assert run.data.metrics["best.kv_tokens"] == 463392
    assert run.data.metrics["best.max_concurrency"] == 242.25
    assert run.data.metrics["best.num_blocks"] == 28962
    assert run.data.tags["best"] == "engine=vllm"


@pytest.mark.parametrize(
    ("statuses", "expected", "tag"),
    [
        ([Status.ok, Status.ok], "FINISHED", "ok"),
        ([Status.ok, Status.killed, Status.oom], "KILLED", "partial"),
        ([Status.oom, Status.error], "FAILED", "failed"),
    ],
)
def test_how_a_sweep_ends(store, tmp_path, statuses, expected, tag):
    parent = store.start_sweep("s", {})
    rows = [(status, Result(status=status, stage=Stage.load, reason="")) for status in statuses]
    store.finish_sweep(parent, rows, [], tmp_path)
    run = store._client.get_run(parent)
    assert (run.info.status, run.data.tags["status"]) == (expected, tag)


def test_a_killed_run_stays_killed_and_a_finished_one_finished(store, tmp_path):
    killed = store.start_point("k", {"a": 1}, {})
    store.kill(killed)
    store.finish_point(killed, keep(tmp_path / "k", result()), tmp_path / "k", False)
    run = store._client.get_run(killed)
    assert (run.info.status, run.data.tags["status"], run.data.params) == (
        "KILLED",
        "killed",
        {"a": "1"},
    )
    finished = point(store, tmp_path / "f", result())
    store.kill(finished)
    store.kill(None)
    assert store._client.get_run(finished).info.status == "FINISHED"
    assert store.failures == 0


def test_odd_params_arrive(store, tmp_path):
    config = {
        "long": "ü" * 20_000,
        "none": None,
        "flag": True,
        "nan": math.nan,
        "list": [1, {"a": None}],
        "empty": {},
        "text": "",
        "a/b=c": {"[0]": "x", "..": 1, "": 2, "schlüssel %": 3},
        "tracking": {"uri": "secret"},
        "hydra": {"job": 1},
        **{f"many_{index}": index for index in range(250)},
    }
    run_id = store.start_point("odd " + "n" * 600, config, {"odd/tag=": "x" * 9000, "t": None})
    store.finish_point(run_id, keep(tmp_path / "p", result()), tmp_path / "p", False)
    assert store.failures == 0
    params = store._client.get_run(run_id).data.params
    assert len(params) == 261
    assert params["none"] == "null"
    assert params["flag"] == "true"
    assert params["nan"] == "null"
    assert params["list"] == '[1, {"a": null}]'
    assert params["empty"] == "{}"
    assert params["many_249"] == "249"
    assert params["a_x2F_b_x3D_c._x5B_0_x5D_"] == "x"
    assert len(params["long"]) == 500
    assert "20000 characters, sha256" in params["long"]


def test_names_never_collide():
    odd = ["", ".", "a.", "a/b", "a_x2F_b", "a_x", "a=", "a b", "a_b", "ab", "_x_", "_x41", "_x41/"]
    odd += ["ä", "_xE4_", "x" * 300, "x" * 301, "..", "._x2E_", "a__x", "a_/x", "a_x2F", "/"]
    names = [param_name(name) for name in odd]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 250
    for name in names:
        assert not name.startswith(".")
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    assert param_name("model.num_hidden_layers") == "model.num_hidden_layers"


def test_shorten_keeps_values_apart():
    first, second = shorten("a" * 900), shorten("a" * 901)
    assert len(first) == len(second) == tracking.MAX_VALUE_CHARS
    assert first != second
    assert shorten(Status.ok) == "ok"
    assert shorten("a" * 500) == "a" * 500


def test_unknown_figures_are_absent():
    data = record.to_dict(result(max_concurrency=math.nan, num_blocks=None))
    metrics = tracking.metrics_of({**data, "kv_tokens": math.inf})
    assert "max_concurrency" not in metrics
    assert "num_blocks" not in metrics
    assert "kv_tokens" not in metrics
    assert tracking.metrics_of(record.to_dict(INVALID)) == {"axis.util": 92.0}


def test_a_failure_on_the_way_costs_one_line_and_no_point(store, tmp_path, caplog):
    run_id = store.start_point("p", {}, {})
    data = keep(tmp_path / "p", result())
    before = {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()}
    client, store._client = store._client, None
    store.finish_point(run_id, data, tmp_path / "p", False)
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "WARNING"
    assert str(tmp_path / "p") in caplog.text
    lost = store.start_point("q", {}, {})
    store.finish_point(lost, keep(tmp_path / "q", result()), tmp_path / "q", True)
    assert lost is None
    assert "has no attribute" in caplog.records[1].getMessage()
    assert store.failures == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()} == before
    store._client = client
    point(store, tmp_path / "r", result())
    assert store.failures == 2


def test_a_locked_database_is_tried_again(store, monkeypatch):
    calls = []

    def action():
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("(sqlite3.OperationalError) database is locked")
        return "done"

    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert tracking._patiently(action) == "done"


def test_nothing_reaches_the_terminal(launch, tmp_path, capfd):
    point(open_store(Tracking(), launch), tmp_path / "p", result())
    assert capfd.readouterr() == ("", "")


def test_off_keeps_nothing(tmp_path):
    store = open_store(Tracking(kind="off"), tmp_path)
    parent = store.start_sweep("s", {})
    assert store.start_point("p", {}, {}, parent) is None
    store.finish_point(None, {}, tmp_path, True)
    store.finish_sweep(parent, [], [], tmp_path)
    store.kill(None)
    assert ui_command(store) == ""
    assert (type(store), store.failures) == (Store, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b#c", "100%41 ü?x", "plus+and&semi;'quote"])
def test_odd_places(template, tmp_path, name):
    folder = with_store(template, tmp_path / name)
    store = open_store(Tracking(), folder)
    run_id = point(store, folder / "p", result())
    assert artifacts(store, run_id) == ["config.yaml", "memory.png", "result.json"]
    assert (folder / "outputs" / "mlartifacts" / run_id).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    command = shlex.split(ui_command(store))
    assert command[:3] == ["mlflow", "ui", "--backend-store-uri"]
    again = open_store(Tracking(uri=command[3]), Path("/nowhere"))
    assert again._client.get_run(run_id).info.status == "FINISHED"
    assert again.experiment_id == store.experiment_id


def test_the_command_for_the_ui(launch):
    store = open_store(Tracking(), launch)
    path = launch / "outputs" / "mlflow.db"
    assert ui_command(store) == f"mlflow ui --backend-store-uri {shlex.quote(f'sqlite:///{path}')}"


def test_a_deleted_experiment_names_both_ways_out(launch):
    store = open_store(Tracking(), launch)
    store._client.delete_experiment(store.experiment_id)
    with pytest.raises(RequestError, match=r"restore --experiment-id \d+, or .*experiment=") as e:
        open_store(Tracking(), launch)
    assert "\n" not in str(e.value)
    open_store(Tracking(experiment="new name"), launch)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("mlruns", "is a folder"),
        ("file:///tmp/mlruns", "is a folder"),
        ("C:\\mlruns", "is a folder"),
        ("", "is a folder"),
        ("localhost:5000", "tracking.uri=http://localhost:5000"),
        ("htpp://localhost", "none of the kinds"),
        ("sqlite:outputs/mlflow.db", "must start with sqlite:///"),
        ("sqlite://outputs/mlflow.db", "must start with sqlite:///"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:///outputs", "is a folder; tracking.uri must name a file"),
        ("sqlite:///note.txt", "cannot be read as an SQLite database"),
        ("sqlite:///note.txt/mlflow.db", "cannot write to .*note.txt"),
        ("sqlite:///foreign.db", "another version .* mlflow db upgrade"),
    ],
)
def test_a_wrong_address_is_explained_at_once(tmp_path, uri, message):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "note.txt").write_text("no database, but some text that is long enough\n" * 9)
    connection = sqlite3.connect(tmp_path / "foreign.db")
    connection.execute("create table experiments (name text)")
    connection.close()
    started = time.perf_counter()
    with pytest.raises(RequestError, match=message) as raised:
        open_store(Tracking(uri=uri), tmp_path)
    assert "\n" not in str(raised.value)
    assert time.perf_counter() - started < 8


def test_another_schema_is_refused_and_left_alone(launch):
    path = launch / "outputs" / "mlflow.db"
    connection = sqlite3.connect(path)
    connection.execute("update alembic_version set version_num = '000000000000'")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(RequestError, match="copy the file, then run: mlflow db upgrade"):
        open_store(Tracking(), launch)
    assert path.read_bytes() == before


def test_wrong_kind_and_missing_package(launch, monkeypatch):
    with pytest.raises(RequestError, match="must be mlflow or off, got 'wandb'"):
        open_store(Tracking(kind="wandb"), launch)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(RequestError, match="pip install mlflow, or use tracking=off"):
        open_store(Tracking(), launch)


def test_a_server_that_is_not_there(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.perf_counter()
    with pytest.raises(RequestError, match=r"connection refused; check tracking\.uri") as raised:
        open_store(Tracking(uri=f"http://user:secret@127.0.0.1:{port}"), tmp_path)
    assert time.perf_counter() - started < 8
    assert "secret" not in str(raised.value)


def test_a_server_that_refuses_the_host(tmp_path):
    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(403)
            self.end_headers()
            self.wfile.write(b"Invalid Host header - possible DNS rebinding attack detected")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        with pytest.raises(RequestError, match=f"--allowed-hosts {host}"):
            open_store(Tracking(uri=f"http://{host}"), tmp_path)
        server.shutdown()


def test_files_that_would_land_nowhere(launch):
    store = open_store(Tracking(experiment="other place"), launch)
    (launch / "file").write_text("")
    store._client.create_experiment("elsewhere", artifact_location=f"{launch.as_uri()}/file/x")
    with pytest.raises(RequestError, match=r"file/x, which cannot be written to"):
        open_store(Tracking(experiment="elsewhere"), launch)


def test_processes_that_start_a_new_store_together(born):
    folder, ended = born
    assert [error for _, error in ended] == ["", ""]
    answers = [json.loads(output) for output, _ in ended]
    assert answers[0][0] == answers[1][0]
    assert [failures for _, _, failures in answers] == [0, 0]
    store = open_store(Tracking(experiment="first"), folder)
    assert {run_id for _, run_id, _ in answers} == {
        run.info.run_id for run in store._client.search_runs([store.experiment_id])
    }
