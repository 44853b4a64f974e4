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
from dataclasses import dataclass
from typing import ClassVar
from kvexp.contract import GIB, DeviceFacts
from kvexp_analytic import Analytic, _Prediction


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@dataclass
class Fake(Analytic):
    """A device that holds so much and no more."""

    holds: str = "1000GiB"
    dies_at: float = 2.0
    shares: bool = True
    isolated: ClassVar[bool] = True

    def load_key(self, deployment, engine):
        return deployment.model.name if self.shares else None

    def open(self, deployment, engine):
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
        return True

    def release(self):
        self.log("release")

    def close(self):
        self.log("close")
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


def test_a_search_over_nothing_that_holds_says_so(fake):
    done, _, (result,) = fake("profiler.holds=0GiB", "util=0.9")

    assert result["largest_util"] is None
    assert "no share that was tried holds" in done.stdout


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
