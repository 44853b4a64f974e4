"""The command line on a real GPU: options, faults and neighbours, each as a user would run it.

The commands start together and wait for the device in turn, so that their imports overlap. A
neighbour that keeps still holds 3 GiB all the while.
"""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is not installed"),
]

GIB = 1 << 30
NEIGHBOUR = Path(__file__).with_name("neighbour.py")
SMALL = ("model=qwen3_0_6b", "gpu=auto", "max_model_len=8192", "max_num_batched_tokens=8192")
COMMANDS = {
    "two_shares": (*SMALL, "profiler=torch_allocator", "-m", "util=0.5,0.6"),
    "mistakes": (
        *SMALL,
        "profiler=torch_allocator",
        "-m",
        "profiler.warmup=worst_case,no_reset,short_prompt,decode,none",
    ),
    "snapshot": (*SMALL, "profiler=torch_allocator", "profiler.snapshot=true"),
    "graphs": (*SMALL, "profiler=torch_allocator", "profiler.graphs=true"),
    "nvml": (*SMALL, "profiler=nvml", "enforce_eager=true"),
    "wrong_card": ("model=qwen3_0_6b", "gpu=rtx_4090", "profiler=torch_allocator"),
    "emulated": (
        *("model=qwen3_0_6b", "gpu=rtx_4090", "gpu.emulate=true", "profiler=torch_allocator"),
        *("max_model_len=8192", "util=0.7"),
    ),
    "too_high": ("model=llama3_8b", "gpu=auto", "profiler=torch_allocator", "util=0.97"),
    "killed": (
        *("model=llama3_8b", "gpu=auto", "profiler=torch_allocator"),
        *("profiler.batch_size=16", "profiler.seq_len=8192"),
    ),
}


def start(folder, *arguments, **environment):
    folder.mkdir()
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "kvexp", "tracking=off", *arguments],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=stdout,
            stderr=stderr,
        )


def results(folder):
    return [json.loads(p.read_text()) for p in sorted((folder / "outputs").rglob("result.json"))]


@contextmanager
def neighbour(*arguments):
    """Another process on the device, as `neighbour.py` describes it."""
    command = [sys.executable, str(NEIGHBOUR), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().strip() == "held"
            yield process
        finally:
            process.kill()


def used_bytes(pid):
    """What NVML says that a process takes of the first device, 0 where it is not there."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((p.usedGpuMemory or 0 for p in running if p.pid == pid), 0)
    finally:
        pynvml.nvmlShutdown()


def children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def kill_worker(process, more_than):
    """Kill the measuring process once it holds the weights and works on top of them."""
    until = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until:
        for child in children(process.pid):
            if used_bytes(child) > more_than:
                os.kill(child, signal.SIGKILL)
                return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpu")
    with neighbour(3) as still:
        running = {name: start(root / name, *args) for name, args in COMMANDS.items()}
        running["watch"] = start(
            root / "watch",
            *(*SMALL, "profiler=nvml", f"profiler.pid={still.pid}", "profiler.seconds=1"),
        )
        running["by_uuid"] = start(
            root / "by_uuid",
            *(*SMALL, "profiler=torch_allocator", "util=0.5"),
            CUDA_VISIBLE_DEVICES=first_uuid(),
        )
        kill_worker(running["killed"], 20 * GIB)
        for process in running.values():
            process.wait(400)
    return {
        name: ((root / name / "stderr").read_text(), results(root / name), root / name)
        for name in running
    }


def first_uuid():
    listed = subprocess.check_output(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], text=True
    )
    return listed.split()[0]


def one(ran, name):
    stderr, found, _ = ran[name]
    assert len(found) == 1, stderr
    return found[0]


def test_two_shares_have_one_load_and_close_their_accounts(ran):
    stderr, found, _ = ran["two_shares"]
    assert [point["status"] for point in found] == ["ok", "ok"], stderr
    first, second = (point["readings"] for point in found)
    assert first["load"] == second["load"]
    for point in found:
        read = point["readings"]
        assert point["verified"] is True
        assert read["accounting"]["closes"], read["accounting"]
        assert read["accounting"]["terms"]["others"] >= 3 * GIB
        assert read["neighbours"]["contaminated"] is False
        assert min(read["neighbours"]["others_bytes"].values()) >= 3 * GIB
    (ending,) = second["device_after"]
    assert abs(ending["residual_bytes"]) <= 2 << 20


def test_wrong_warmups_run_and_say_what_they_would_cause(ran):
    stderr, found, _ = ran["mistakes"]
    by_kind = {point["readings"]["forward"]["warmup"]: point for point in found}
    assert len(by_kind) == 5, stderr
    activation = {
        kind: next(p for p in point["budget"]["parts"] if p["name"] == "activation")
        for kind, point in by_kind.items()
    }
    sizes = {kind: part["size_bytes"] for kind, part in activation.items()}
    assert sizes["none"] == 0
    assert sizes["decode"] <= sizes["short_prompt"] < sizes["worst_case"] < sizes["no_reset"]
    for kind, point in by_kind.items():
        flagged = any(note.startswith("profiler.warmup: ") for note in point["notes"])
        assert flagged is (kind != "worst_case")
    blocks = {kind: point["num_blocks"] for kind, point in by_kind.items()}
    assert blocks["none"] > blocks["worst_case"] > blocks["no_reset"]


def test_the_blocks_at_the_peak_sum_to_it(ran):
    point = one(ran, "snapshot")
    at_peak = point["readings"]["at_peak"]
    seen = sum(place["size_bytes"] for place in at_peak["places"]) + at_peak["further_bytes"]
    assert seen + at_peak["unsplit_bytes"] == at_peak["growth_bytes"]
    assert 0 <= at_peak["unsplit_bytes"] < 8 << 20
    activation = next(p for p in point["budget"]["parts"] if p["name"] == "activation")
    assert at_peak["growth_bytes"] == activation["size_bytes"]
    assert any(place["module"].startswith("model.layers.") for place in at_peak["places"])
    assert any(place["line"].startswith("modeling_qwen3.py:") for place in at_peak["places"])
    assert at_peak["stays_bytes"] >= 32 << 20  # the BLAS workspace
    (name,) = point["readings"]["files"]
    path = next((ran["snapshot"][2] / "outputs").rglob(name))
    opened = pickle.loads(path.read_bytes())
    assert opened["device_traces"][0]
    assert opened["segments"]


def test_graphs_are_captured_on_top_of_the_cache(ran):
    point = one(ran, "graphs")
    assert (point["status"], point["verified"]) == ("ok", True), point["reason"]
    assert 0 < point["readings"]["graphs_bytes"] < 2 * GIB
    assert point["readings"]["timings"]["graphs_s"] > 0
    assert point["readings"]["accounting"]["stage"] == "graphs"
    assert point["readings"]["accounting"]["closes"], point["readings"]["accounting"]


def test_nvml_has_a_peak_for_every_stage(ran):
    point = one(ran, "nvml")
    assert point["status"] == "ok", point["reason"]
    stages = point["readings"]["nvml"]["sampler"]["stages"]
    assert set(stages) == {"load", "warmup", "allocate", "verify"}
    assert all(stage["num_samples"] > 0 for stage in stages.values())
    assert stages["allocate"]["peak_used_bytes"] > stages["load"]["peak_used_bytes"]


def test_another_card_is_refused(ran):
    point = one(ran, "wrong_card")
    assert (point["status"], point["stage"]) == ("invalid", "start")
    assert "gpu=NVIDIA GeForce RTX 4090 has" in point["reason"]


def test_another_card_is_emulated_and_says_so(ran):
    point = one(ran, "emulated")
    assert (point["status"], point["verified"]) == ("ok", True), point["reason"]
    assert any(note.startswith("emulated: ") for note in point["notes"])
    assert point["effective"]["total_bytes"] < 26 * GIB
    used = point["readings"]["verify"]["reserved_bytes"]
    assert used <= point["readings"]["allocator"]["allowed_bytes"] < 26 * GIB


def test_a_share_that_is_too_high_ends_as_stated(ran):
    point = one(ran, "too_high")  # 3 GiB are with the neighbour
    assert point["status"] in ("oom", "infeasible")
    if point["status"] == "oom":
        assert point["stage"] in ("allocate", "verify")
        assert "out of memory" in point["reason"]
        assert 0 < point["largest_util"] < 0.97
        assert point["num_blocks"] > 0


def test_a_killed_worker_is_a_status_with_its_stage(ran):
    point = one(ran, "killed")
    assert (point["status"], point["stage"]) == ("killed", "warmup")
    assert "SIGKILL" in point["reason"]
    (ending,) = point["readings"]["device_after"]
    assert abs(ending["residual_bytes"]) <= 2 << 20


def test_a_process_is_watched(ran):
    point = one(ran, "watch")
    watched = point["readings"]["watched"]
    assert watched["sampler"]["num_samples"] > 10
    assert watched["sampler"]["peak_process_bytes"] >= 3 * GIB
    assert any(note.startswith(f"process {watched['pid']} took at most") for note in point["notes"])


def test_a_device_by_its_uuid_is_that_device(ran):
    point = one(ran, "by_uuid")
    assert point["status"] == "ok", point["reason"]
    assert f"GPU-{point['readings']['device']['uuid']}" == first_uuid()


def test_no_visible_device_is_said_in_one_line(tmp_path):
    process = start(tmp_path / "none", *SMALL[:1], "gpu=h200", "profiler=torch_allocator",
                    CUDA_VISIBLE_DEVICES="")  # fmt: skip
    assert process.wait(60) == 2
    assert "no device is visible" in (tmp_path / "none" / "stderr").read_text()


def test_a_neighbour_that_grows_is_seen_and_the_point_measured_again(ran, tmp_path):
    with neighbour(20, 0.5, 0.25, 160):
        start(tmp_path / "grows", *SMALL, "profiler=nvml", "util=0.3").wait(200)
    (point,) = results(tmp_path / "grows")
    read = point["readings"]
    assert all(abs(each["residual_bytes"]) <= 64 << 20 for each in read["device_after"])
    assert all(each["neighbours_moved_bytes"] > 1 * GIB for each in read["device_after"])
    assert read["first_neighbours"][0]["contaminated"] is True
    assert read["first_neighbours"][0]["drift_bytes"] > 64 << 20
    assert any("measured twice" in note for note in point["notes"])
