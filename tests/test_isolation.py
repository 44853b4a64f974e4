"""Measured points in processes of their own: one load for all that share it, and what is proved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvexp import pipeline
from kvexp.results import Stage, Status

PLUGIN = '''
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import ClassVar
from kvexp.contract import GIB, DeviceFacts, Ranks
from kvexp_analytic import Analytic, _Prediction


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@dataclass
class Fake(Analytic):
    """A device that holds so much and no more."""

    holds: str = "1000GiB"
    dies_at: float = 2.0
    shares: bool = True
    graphs_fit: bool | None = None
    fails_at_verify: bool = False
    neighbour_moves: int = 0
    keeps_file: bool = False
    isolated: ClassVar[bool] = True

    def load_key(self, deployment, engine):
        return deployment.model.name if self.shares else None

    def open(self, deployment, engine):
        if deployment.tp > 1:
            return Ranks(partial(OneRank, self, deployment, engine), deployment.tp)
        return Holder(self, deployment, engine)


class Holder(_Prediction):
    def __init__(self, options, deployment, engine):
        super().__init__(deployment, engine, {})
        self.options = options

    def log(self, text):
        with open(os.environ["FAKE_LOG"], "a") as stream:
            stream.write(f"{os.getpid()} {text}\\n")

    def start(self):
        self.log("start")
        return DeviceFacts(
            name="fake", total_bytes=self.deployment.total_bytes, free_bytes=140 * GIB
        )

    def load(self):
        self.log("load")

    def allocate(self, plan):
        self.allocated = plan.num_blocks * plan.block_bytes_per_rank[0]
        self.log(f"allocate {self.allocated}")
        if self.allocated > float(self.options.holds.removesuffix("GiB")) * GIB:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        if self.options.dies_at < 1:
            os.kill(os.getpid(), 9)
        return self.allocated

    def verify(self):
        self.log("verify")
        if self.options.fails_at_verify:
            raise KeyError("deep inside")
        return True

    @property
    def captures(self):
        return self.options.graphs_fit is not None

    def capture(self):
        self.log("capture")
        if not self.options.graphs_fit and self.allocated > 50 * GIB:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 MiB")

    def readings(self):
        runs = open(os.environ["FAKE_LOG"]).read().count(" load")
        moved = runs <= self.options.neighbour_moves
        found = {"neighbours": {"contaminated": moved, "drift_bytes": 7 * GIB if moved else 0}}
        if self.options.keeps_file:
            folder = tempfile.mkdtemp()
            with open(folder + "/seen.bin", "wb") as stream:
                stream.write(b"1234")
            found["files"] = [folder + "/seen.bin"]
        return found

    def release(self):
        self.log("release")

    def close(self):
        self.log("close")


class OneRank(Holder):
    def __init__(self, options, deployment, engine, rank):
        super().__init__(options, deployment, engine)
        self.rank = rank

    def warmup(self):
        self.log(f"warmup {self.rank.index}")
        return (super().warmup()[self.rank.index],)
'''


@pytest.fixture
def fake(tmp_path):
    """Run the command line with the fake profiler; gives (completed process, log, results)."""
    site = tmp_path / "site"
    info = site / "kvexp_fake-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "kvexp_fake.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvexp-fake\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvexp.profiler]\nfake = kvexp_fake:Fake\n")
    log = tmp_path / "log"

    def run(*arguments):
        log.write_text("")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "kvexp", "gpu=h200", "profiler=fake", "tracking=off"),
                *arguments,
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site), "FAKE_LOG": str(log)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
        paths = sorted(Path(tmp_path / "outputs").rglob("result.json"))
        return done, lines, [json.loads(path.read_text()) for path in paths]

    return run


def test_points_that_share_a_load_run_in_one_process_with_one_load(fake):
    done, log, results = fake("-m", "util=0.5,0.6,0.7")

    assert done.returncode == 0, done.stderr
    assert len({pid for pid, _ in log}) == 1
    assert [what.split()[0] for _, what in log] == [
        *("start", "load"),
        *("allocate", "verify", "release") * 3,
        "close",
    ]
    assert [r["verified"] for r in results] == [True] * 3
    blocks = [r["num_blocks"] for r in results]
    assert blocks == sorted(blocks)
    for result in results:
        assert result["allocated_bytes"] == result["num_blocks"] * result["block_bytes"]


def test_a_new_key_gets_a_new_process(fake):
    _, log, _ = fake("-m", "model=llama3_8b,qwen3_8b", "util=0.5,0.6")

    assert len({pid for pid, _ in log}) == 2
    assert [what for _, what in log].count("load") == 2
    assert [what for _, what in log].count("close") == 2


@pytest.mark.slow
def test_without_a_key_every_point_starts_from_nothing(fake):
    _, log, _ = fake("-m", "profiler.shares=false", "util=0.5,0.6")

    assert len({pid for pid, _ in log}) == 2


def test_out_of_memory_at_the_cache_is_a_status_and_the_share_that_holds_is_found(fake):
    done, _, (result,) = fake("profiler.holds=60GiB", "util=0.9")

    assert done.returncode == 1
    assert (result["status"], result["stage"]) == ("oom", "allocate")
    assert result["reason"].startswith("CUDA out of memory")
    assert result["verified"] is False
    assert result["num_blocks"] > 0
    # 60 GiB of cache beside weights, activation and the rest on this card
    assert 0.5 < result["largest_util"] < 0.56
    assert "util=" in done.stdout


def test_a_sweep_goes_on_after_a_point_that_was_killed(fake):
    done, log, results = fake("-m", "util=0.5,0.6", "profiler.dies_at=0.5")

    assert done.returncode == 1
    assert [(r["status"], r["stage"]) for r in results] == [("killed", "allocate")] * 2
    assert len({pid for pid, _ in log}) == 2


@pytest.mark.slow
def test_a_search_over_nothing_that_holds_says_so(fake):
    done, _, (result,) = fake("profiler.holds=0GiB", "util=0.9")

    assert result["largest_util"] is None
    assert "no share that was tried holds" in done.stdout


@pytest.mark.slow
def test_out_of_memory_at_the_graphs_is_a_status_and_a_smaller_share_is_found(fake):
    done, _, (result,) = fake("profiler.graphs_fit=false", "util=0.9")

    assert done.returncode == 1
    assert (result["status"], result["stage"]) == ("oom", "graphs")
    assert result["verified"] is False
    assert 0.4 < result["largest_util"] < 0.52


@pytest.mark.slow
def test_ranks_are_processes_of_their_own_below_the_measuring_one(fake):
    done, log, (result,) = fake("tp=2", "util=0.5")

    assert done.returncode == 0, done.stderr
    assert (result["status"], result["verified"]) == ("ok", True)
    by_rank = {what: pid for pid, what in log if what.startswith("warmup")}
    assert set(by_rank) == {"warmup 0", "warmup 1"}
    assert len(set(by_rank.values())) == 2
    assert len(result["ranks"]) == 2
    assert result["allocated_bytes"] == result["num_blocks"] * result["block_bytes"]
    assert len(result["readings"]["ranks"]) == 2
    assert {pid for pid, what in log if what == "close"} == set(by_rank.values())


@pytest.mark.slow
def test_graphs_that_fit_end_well(fake):
    _, log, (result,) = fake("profiler.graphs_fit=true")

    assert (result["status"], result["verified"]) == ("ok", True)
    assert [what.split()[0] for _, what in log][2:5] == ["allocate", "verify", "capture"]


@pytest.mark.slow
def test_an_error_after_the_plan_keeps_the_counts(fake):
    done, _, (result,) = fake("profiler.fails_at_verify=true")

    assert done.returncode == 1
    assert (result["status"], result["stage"]) == ("error", "verify")
    assert result["reason"] == "KeyError: 'deep inside'"
    assert result["num_blocks"] > 0
    assert result["verified"] is False
    assert "traceback" in result["readings"]
    assert "neighbours" in result["readings"]


@pytest.mark.slow
def test_a_point_whose_neighbours_moved_is_measured_again_in_a_new_process(fake):
    _, log, (result,) = fake("profiler.neighbour_moves=1")

    assert len({pid for pid, _ in log}) == 2
    assert result["readings"]["first_neighbours"][0]["drift_bytes"] == 7 << 30
    assert result["readings"]["neighbours"]["contaminated"] is False
    assert result["notes"][-1] == "measured twice: the first time was contaminated"


@pytest.mark.slow
def test_a_neighbour_that_keeps_moving_is_measured_twice_and_no_more(fake):
    _, log, (result,) = fake("profiler.neighbour_moves=9")

    assert [what for _, what in log].count("load") == 2
    assert result["readings"]["neighbours"]["contaminated"] is True
    assert result["status"] == "ok"


@pytest.mark.slow
def test_what_a_process_left_is_in_the_result_of_its_last_point(fake):
    _, _, results = fake("-m", "util=0.5,0.6")

    assert "device_after" not in results[0]["readings"]
    (ending,) = results[1]["readings"]["device_after"]
    assert ending["residual_bytes"] is None or abs(ending["residual_bytes"]) <= 2 << 20


@pytest.mark.slow
def test_the_files_of_a_measurement_lie_beside_its_result(fake, tmp_path):
    _, _, (result,) = fake("profiler.keeps_file=true", "profiler.shares=false")

    assert result["readings"]["files"] == ["seen.bin"]
    (path,) = (tmp_path / "outputs").rglob("seen.bin")
    assert path.read_bytes() == b"1234"
    assert (path.parent / "result.json").exists()


class Unified:
    """Held devices that share the host's memory."""

    is_unified = True

    def __init__(self, num_devices):
        pass

    def give_back(self):
        return []


def test_a_measurement_on_unified_memory_ends_before_the_host_is_full(monkeypatch):
    import time
    from types import SimpleNamespace

    from kvexp import isolate

    monkeypatch.setattr(isolate, "host_memory", lambda: (1000, 20))
    worker = isolate.Worker(Unified)
    worker._held = Unified(1)
    sent = []
    pipe = SimpleNamespace(
        send=sent.append, poll=lambda seconds: time.sleep(seconds), close=lambda: None
    )
    run = SimpleNamespace(profiler=SimpleNamespace(timeout_s=None))
    result = worker._run(run, "vllm", None, pipe)

    assert (result.status, result.stage) == (Status.oom, Stage.start)
    assert result.reason.startswith("less than 3% of the host's memory was left")


CARD = {"name": "NVIDIA Big", "total_bytes": 100 << 30, "free_bytes": 97 << 30}


@pytest.mark.parametrize(
    ("total", "emulate", "expected"),
    [
        (100 << 30, False, None),
        (80 << 30, False, "the device is NVIDIA Big with 100.00 GiB, gpu=NVIDIA H200 has 80.00"),
        (80 << 30, True, None),
        (120 << 30, True, "gpu.emulate needs a card of at least 120.00 GiB"),
    ],
)
def test_another_card_is_refused_or_emulated(total, emulate, expected):
    from kvexp import api
    from kvexp.errors import InvalidValue
    from kvexp.profiler import DeviceFacts

    asked = [f"gpu.total_bytes={total}", f"gpu.emulate={emulate}", "gpu.total_printed_gib=null"]
    (point,) = api.compose_points(["gpu=h200", *asked])
    deployment = point.run.engine.resolve(point.run, "vllm")
    if expected is not None:
        with pytest.raises(InvalidValue, match=expected):
            pipeline.on_device(deployment, DeviceFacts(**CARD))
        return
    found = pipeline.on_device(deployment, DeviceFacts(**CARD))
    assert (found.total_bytes, found.free_bytes) == (total, total - (3 << 30))
    assert any(note.startswith("emulated: ") for note in found.notes) is emulate


def test_stages_are_told_in_order():
    from kvexp import api

    (point,) = api.compose_points(["gpu=h200"])
    stages = []
    result = pipeline.execute(point.run, "vllm", on_stage=stages.append)

    assert result.status is Status.ok
    assert stages == [
        *(Stage.resolve, Stage.start, Stage.load, Stage.warmup),
        *(Stage.budget, Stage.allocate, Stage.verify),
    ]
