"""A process of any engine, watched from outside."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvexp import api, pipeline
from kvexp.contract import InvalidValue, NvmlDevice, ProfilerUnavailable
from kvexp_nvml import Nvml, Watch

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def nvml(kit):
    fake = kit.FakeNvml()
    fake.total_bytes = 150754820096
    fake.used_mib = 90 * 1024
    return fake


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def run():
    (point,) = api.compose_points(["model=llama3_8b", "gpu=h200", "profiler=nvml", "util=0.9"])
    return point.run


@pytest.fixture
def watch(nvml, run):
    def make(pid, seconds=0.05, devices=None):
        nvml.processes = [SimpleNamespace(pid=pid, usedGpuMemory=80 * GIB)]
        return Watch(
            run.engine.resolve(run, "vllm"),
            run.engine,
            pid,
            seconds,
            0.005,
            devices or (lambda pid: [NvmlDevice(nvml, "0000-1111", pid)]),
        )

    return make


def test_the_peak_of_the_process_stands_beside_the_engines_share(watch, sleeper, nvml):
    found = watch(sleeper.pid)
    facts = found.start()
    # CUDA's total is without the driver's own; what the process has is free for it
    assert facts.total_bytes == nvml.total_bytes - 20 * MIB
    assert facts.free_bytes == facts.total_bytes - 90 * GIB + 80 * GIB
    (profile,) = found.warmup()
    assert profile.weights_bytes > 16e9
    seen = found.readings()["watched"]
    assert seen["sampler"]["peak_process_bytes"] == 80 * GIB
    assert seen["sampler"]["num_samples"] > 1
    assert 0.05 <= seen["seconds"] < 5
    expected = -(-150109880320 * 9 // 10) + 552402944
    assert seen["expected_bytes"] == expected
    assert seen["ratio"] == round(80 * GIB / expected, 6)
    (note,) = found.notes()
    assert note.startswith(f"process {sleeper.pid} took at most 80.00 GiB in 0.")
    found.close()
    assert nvml.initialised == 0


def test_it_ends_with_the_process(watch, sleeper):
    found = watch(sleeper.pid, seconds=None)
    found.start()
    sleeper.kill()
    found.warmup()  # though it is not collected yet
    assert found.readings()["watched"]["seconds"] < 30


def test_a_process_that_is_not_there_is_named(watch, sleeper):
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(ProfilerUnavailable, match=f"pid={sleeper.pid}: there is no such process"):
        watch(sleeper.pid).start()


def test_of_several_devices_it_is_the_one_on_which_the_process_works(watch, kit, nvml, sleeper):
    other = kit.FakeNvml()
    other.total_bytes, other.uuid = nvml.total_bytes, "GPU-2222"

    def devices(pid):
        return [NvmlDevice(other, "2222", pid), NvmlDevice(nvml, "0000-1111", pid)]

    found = watch(sleeper.pid, devices=devices)
    found.start()
    assert found.readings()["nvml"]["uuid"] == "0000-1111"
    nvml.processes = []
    with pytest.raises(ProfilerUnavailable, match="works on none of the 2 visible devices"):
        watch_again = watch(sleeper.pid, devices=devices)
        nvml.processes = []
        watch_again.start()


def test_a_hidden_process_id_is_null_with_a_reason(watch, sleeper, nvml):
    found = watch(sleeper.pid)
    nvml.processes = []
    found.start()
    found.warmup()
    seen = found.readings()["watched"]
    assert seen["sampler"]["peak_process_bytes"] is None
    assert seen["sampler"]["peak_used_bytes"] == 90 * GIB
    assert seen["ratio"] is None
    assert "unknown" in found.notes()[0]


def test_the_pipeline_takes_it_and_plans_by_the_rules(run, sleeper, watch, monkeypatch):
    monkeypatch.setattr(Nvml, "open", lambda self, deployment, engine: watch(sleeper.pid))
    monkeypatch.setattr(Nvml, "load_key", lambda self, deployment, engine: None)
    run.gpu.total_bytes = 150754820096 - 20 * MIB
    result = pipeline.execute(run, "vllm")
    assert result.ok, result.reason
    assert result.num_blocks > 50000
    assert any(note.startswith("process ") for note in result.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 1.0}, r"profiler\.seconds needs profiler\.pid"),
        ({"pid": 1, "seconds": 0.0}, r"profiler\.seconds must be more than 0, got 0"),
        ({"pid": 0}, r"profiler\.pid must be a process id, got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InvalidValue, match=message):
        Nvml(**options)


def test_a_model_that_cannot_be_built_can_be_watched(kit):
    deployment = kit.make_deployment({"model_type": "mamba2"}, tp=4)
    assert isinstance(Nvml(pid=os.getpid()).open(deployment, kit.StubEngine()), Watch)
