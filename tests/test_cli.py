"""The command line: its grammar, its exit status, and one clear line for every mistake."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from thinned import thinned

SWEEP = ["model=llama3_8b", "gpu=h100", "util=0.85,0.9,0.92"]


def results_below(folder):
    """Every result kept on disk below a folder, MLflow's copies left out."""
    paths = sorted(p for p in Path(folder).rglob("result.json") if "mlartifacts" not in p.parts)
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["model=llama3_8b", "gpu=h100", "-m", "util=0.85,0.9,0.92"], id="middle"),
        pytest.param(["-m", *SWEEP], id="front", marks=pytest.mark.slow),
        pytest.param([*SWEEP, "-m"], id="end", marks=pytest.mark.slow),
        pytest.param([*SWEEP, "--multirun"], id="long", marks=pytest.mark.slow),
    ],
)
def test_multirun_flag_stands_anywhere(command_line, arguments, tmp_path):
    status, out, err = command_line(*arguments, "tracking=off")

    assert status == 0, err
    assert "3 of 3 points ok" in out
    assert [r["effective"]["util"] for r in results_below(tmp_path)] == [0.85, 0.9, 0.92]


MISTAKES = [
    ("utl=0.9", "unknown option utl; did you mean util?"),
    ("gpu.totl_bytes=1", "did you mean gpu.total_bytes?"),
    ("profiler.weight_bytes=1", "did you mean profiler.weights_bytes?"),
    ("engine.vresion=0.26", "did you mean engine.version?"),
    ("modle=llama3_8b", "unknown option modle; did you mean model?"),
    ("model/foo=bar", "unknown option model/foo"),
    ("model=llama3_8c", "model=llama3_8c does not exist; did you mean llama3_8b?"),
    ("gpu=h1000", "did you mean h100?"),
    ("gpu=", "gpu= does not exist"),
    ("engine=vlm", "did you mean vllm?"),
    ("profiler=analitic", "did you mean analytic?"),
    ("experiment=nope", "experiment=nope does not exist; options:"),
    ("sweep=utl", "did you mean util?"),
    ("util=0", "util must be above 0 and at most 1 (a fraction of the card), got 0"),
    ("util=1.2", "util must be above 0 and at most 1 (a fraction of the card), got 1.2"),
    ("util=90", "did you mean 0.9?"),
    ("util=oops", "util must be a number, got 'oops'"),
    ("util=nan", "util must be above 0 and at most 1"),
    ("block_size=-1", "block_size must be at least 1, got -1"),
    ("block_size=8", "block_size must be a multiple of 16 for vLLM, got 8"),
    ("block_size=16.5", "block_size must be a whole number, got '16.5'"),
    ("tp=3", "tp must be one of 1, 2, 4, 8, 16, 32 for llama3_8b"),
    ("tp=0", "tp must be at least 1, got 0"),
    ("pp=99", "pp must be at most 32"),
    ("dtype=bf17", "dtype must be one of auto, bf16, fp16, fp32, got 'bf17'; did you mean bf16?"),
    ("kv_dtype=fp9", "did you mean fp8?"),
    ("gpu=H100", "did you mean h100?"),
    ("model=LLAMA3_8B", "model=LLAMA3_8B does not exist; did you mean llama3_8b?"),
    ("engine=VLLM", "did you mean vllm?"),
    ("profiler=ANALYTIC", "did you mean analytic?"),
    ("experiment=FP8_KV", "did you mean fp8_kv?"),
    ("sweep=UTIL", "did you mean util?"),
    ("tracking=MLFLOW", "did you mean mlflow?"),
    ("kv_dtype=FP8", "did you mean fp8?"),
    ("UTIL=0.9", "unknown option UTIL; did you mean util?"),
    ("engine.MAX_MODEL_LEN=1", "unknown option engine.MAX_MODEL_LEN; did you mean max_model_len?"),
    ("speculative.model=LLAMA32_1B", "did you mean llama32_1b?"),
    ("--MULTIRUN", "did you mean --multirun?"),
    ("model.qk_norm=all", "model.qk_norm must be one of head, heads, full or null, got 'all'"),
    ("gpu.num_sms=0", "gpu.num_sms must be at least 1, got 0"),
    ("max_num_seqs=1000000", "max_num_seqs must be at most max_num_batched_tokens (8192, the def"),
    ("max_num_seqs=1000000000", "max_num_seqs must be at most 1048576, got 1000000000"),
    ("max_num_batched_tokens=1000000000", "must be at most 16777216, got 1000000000"),
    ("lora.max_loras=1000000", "lora.max_loras must be at most 16384, got 1000000"),
    ("mm.limits.image=1000000000", "mm.limits.image must be at most 65536, got 1000000000"),
    ("engine.num_gpu_blocks_override=" + "9" * 20, "must be at most 4294967296, got 999"),
    ("engine.max_cudagraph_capture_size=1000000000", "must be at most 16777216, got 1000000000"),
    ("engine.cpu_offload_gb=1e9", "engine.cpu_offload_gb must be from 0 to 1048576 GiB, got 1e+09"),
    ("model.intermediate_size=" + "9" * 20, "must be at most 16777216, got 999"),
    ("enforce_eager=maybe", "enforce_eager must be true or false, got 'maybe'"),
    ("max_model_len=9000", "max_model_len must be at most 8192 for llama3_8b, got 9000"),
    ("gpu.total_bytes=80QiB", "gpu.total_bytes must be a size such as 80GiB"),
    ("gpu.total_bytes=-1", "gpu.total_bytes must not be negative"),
    ("gpu.free_bytes=900GiB", "gpu.free_bytes must not exceed gpu.total_bytes"),
    ("profiler.weights_bytes=lots", "profiler.weights_bytes must be a size such as 80GiB"),
    ("engine.version=0.1", "engine.version must be a vLLM version from 0.5 on"),
    ("engine.version=banana", "engine.version must be a vLLM version"),
    ("engine.usage=batch", "engine.usage must be one of serve, llm, got 'batch'"),
    ("util=0.85,0.9", "add -m to sweep over them"),
    ("foo", "cannot read 'foo': write key=value"),
    ("=3", "a group takes one option name"),
    ("tracking.uri=12ab://x", "MLflow"),
]


@pytest.mark.parametrize(
    ("argument", "message"), thinned(MISTAKES, one_of=4), ids=[m[0] for m in MISTAKES]
)
def test_a_mistake_is_one_line_with_what_would_be_right(command_line, argument, message, tmp_path):
    options = [] if argument.startswith("tracking") else ["tracking=off"]
    status, out, err = command_line(argument, *options)

    assert status == 2
    assert out == ""
    assert err.startswith("kvexp: ")
    assert err.count("\n") == 1, err
    assert message in err
    assert results_below(tmp_path) == []


def test_a_missing_config_dir_is_one_line(command_line):
    status, _, err = command_line("--config-dir", "nowhere", "tracking=off")

    assert status == 2
    assert "nowhere' not found" in err
    assert "Traceback" not in err


def test_a_bad_value_in_a_sweep_is_one_invalid_point(command_line, tmp_path):
    status, out, err = command_line("-m", "util=0.85,1.2,oops,0.9", "tracking=off")

    assert status == 1
    assert "2 of 4 points ok" in out
    assert [r["status"] for r in results_below(tmp_path)] == ["ok", "invalid", "invalid", "ok"]
    assert "util=1.2: invalid: util must be above 0" in err
    assert "util=oops: invalid: util must be a number, got 'oops'" in err


def test_an_unknown_option_name_in_a_sweep_is_one_invalid_point(command_line, tmp_path):
    status, _, err = command_line("-m", "gpu=h100,h1000,h200", "tracking=off")

    assert status == 1
    assert [r["status"] for r in results_below(tmp_path)] == ["ok", "invalid", "ok"]
    assert "did you mean h100?" in err


def test_a_misspelt_key_refuses_the_whole_sweep(command_line, tmp_path):
    status, out, err = command_line("-m", "utl=0.85,0.9", "tracking=off")

    assert status == 2
    assert "did you mean util?" in err
    assert out == ""
    assert results_below(tmp_path) == []


def test_an_infeasible_point_is_a_result_and_the_status_is_1(command_line, tmp_path):
    status, _out, _ = command_line("-m", "util=0.1,0.9", "tracking=off")

    assert status == 1
    first, second = results_below(tmp_path)
    assert (first["status"], first["stage"]) == ("infeasible", "budget")
    assert first["num_blocks"] == 0
    assert first["refusal"]["gap_bytes"] > 0
    assert second["status"] == "ok"


def test_a_profiler_that_cannot_run_here_is_a_wrong_request(command_line, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for profiler in ("torch_allocator", "nvml"):
        status, _out, err = command_line(f"profiler={profiler}", "tracking=off")

        assert status == 2
        assert f"profiler={profiler} cannot run here" in err
        assert err.count("\n") == 1


@pytest.fixture
def full_disk(monkeypatch):
    """No room for a second result.json, nor for what a sweep writes after it."""
    from kvexp import record

    written, write = [], record.write_text

    def write_text(path, text):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)
        written.extend([path] if path.name == record.RESULT_FILE else [])

    monkeypatch.setattr(record, "write_text", write_text)
    return written


def test_a_sweep_that_cannot_be_kept_any_longer_shows_all_that_was_computed(
    command_line, full_disk
):
    status, out, err = command_line("-m", "util=0.8,0.85,0.9", "tracking=off")

    assert status == 2
    assert "util=0.8 " in out and "util=0.85" in out and "util=0.9" not in out
    assert err.startswith("kvexp: cannot write to ")
    assert "No space left on device" in err and err.count("\n") == 1


def test_a_point_that_cannot_be_kept_is_shown(command_line, full_disk):
    full_disk.append("something else")
    status, out, err = command_line("util=0.9", "tracking=off")

    assert status == 2
    assert "blocks" in out and "results:" not in out
    assert "No space left on device" in err and err.count("\n") == 1


def test_a_mixed_sweep_skips_what_cannot_run(command_line, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, _, _err = command_line("-m", "profiler=analytic,nvml", "tracking=off")

    assert status == 1
    assert [r["status"] for r in results_below(tmp_path)] == ["ok", "skipped"]


def test_versions_keep_their_text(command_line, tmp_path):
    status, _, err = command_line("-m", "engine.version=0.19,0.20,0.26", "tracking=off")

    assert status == 0, err
    versions = [r["effective"]["engine_version"] for r in results_below(tmp_path)]
    assert versions == ["0.19", "0.20", "0.26"]


def test_run_and_sweep_folders_are_honoured(command_line, tmp_path):
    command_line("tracking=off", f"hydra.run.dir={tmp_path}/one")
    command_line("-m", "util=0.8,0.9", "tracking=off", f"hydra.sweep.dir={tmp_path}/many")

    assert (tmp_path / "one" / "result.json").is_file()
    assert (tmp_path / "many" / "0" / "result.json").is_file()
    assert (tmp_path / "many" / "1" / "result.json").is_file()
    assert (tmp_path / "many" / "table.csv").is_file()
    assert (tmp_path / "many" / "memory.png").stat().st_size > 10_000


def test_a_result_is_never_overwritten(command_line, tmp_path):
    for util in ("0.8", "0.9"):
        command_line(f"util={util}", "tracking=off", f"hydra.run.dir={tmp_path}/same")

    first = json.loads((tmp_path / "same" / "result.json").read_text())
    second = json.loads((tmp_path / "same-1" / "result.json").read_text())
    assert (first["effective"]["util"], second["effective"]["util"]) == (0.8, 0.9)


def test_a_users_own_yaml_joins_with_config_dir(command_line, tmp_path):
    folder = tmp_path / "mine" / "gpu"
    folder.mkdir(parents=True)
    (folder / "my_card.yaml").write_text(
        "name: My Card\nsource: measured here\ntotal_bytes: 48GiB\ncontext_bytes: 500MiB\n"
    )
    status, _, err = command_line(
        "--config-dir", str(tmp_path / "mine"), "gpu=my_card", "tracking=off"
    )

    assert status == 0, err
    (result,) = results_below(tmp_path)
    assert result["effective"]["total_bytes"] == 48 * 2**30


def test_a_card_without_a_needed_fact_names_it(command_line, tmp_path):
    folder = tmp_path / "mine" / "gpu"
    folder.mkdir(parents=True)
    (folder / "half.yaml").write_text("name: Half\nsource: x\n")
    status, _, err = command_line(
        "--config-dir", str(tmp_path / "mine"), "gpu=half", "tracking=off"
    )

    assert status == 2
    assert "total_bytes" in err
    assert err.count("\n") == 1


def test_requested_and_effective_values_are_both_kept(command_line, tmp_path):
    command_line("tracking=off")
    (result,) = results_below(tmp_path)

    assert result["requested"]["util"] is None
    assert result["requested"]["block_size"] is None
    assert (result["effective"]["util"], result["effective"]["block_size"]) == (0.92, 16)
    flags = result["effective"].pop("flags")  # the values again, as the engine takes them
    assert "--gpu-memory-utilization 0.92 --block-size 16" in flags
    assert result["requested"].keys() >= result["effective"].keys() - {"flags"}


def test_a_sweep_again_has_the_same_identities_and_numbers_in_a_folder_of_its_own(
    command_line, tmp_path
):
    for _ in range(2):
        command_line("-m", "util=0.85,0.9", "tracking=off", f"hydra.sweep.dir={tmp_path}/s")
    before, after = results_below(tmp_path / "s"), results_below(tmp_path / "s-1")

    kept = ("identity", "num_blocks", "kv_tokens", "max_concurrency", "budget", "profile")
    assert len(before) == len(after) == 2
    assert before[0]["identity"] != before[1]["identity"]
    for one, other in zip(before, after, strict=True):
        assert [one[name] for name in kept] == [other[name] for name in kept]


def test_help_and_composed_values_cost_no_point(command_line, tmp_path):
    status, out, _ = command_line("--help")
    assert status == 0
    assert "python -m kvexp model=llama3_8b gpu=h100 -m util=0.85,0.9" in out
    assert "model: " in out

    status, out, _ = command_line("--cfg", "job", "util=0.5")
    assert status in (0, None)
    assert "util: 0.5" in out
    assert results_below(tmp_path) == []


def test_the_version_is_kvexps_own(command_line):
    status, out, _ = command_line("--version")

    assert (status, out) == (0, f"kvexp {metadata.version('kvexp')}\n")


def test_listing_says_what_can_run_here(kvexp_command):
    done = kvexp_command(module="kvexp.list", env={"CUDA_VISIBLE_DEVICES": ""})

    assert done.returncode == 0, done.stderr
    for word in ("llama3_8b", "h200", "vllm", "nano_vllm", "analytic", "torch_allocator", "nvml"):
        assert word in done.stdout
    assert "derived, +-0.005 GiB" in done.stdout
    assert "no: " in done.stdout
    assert kvexp_command("nothing", module="kvexp.list").returncode == 2


SLOW_PLUGIN = '''
import os, time
from dataclasses import dataclass
from kvexp_analytic import Analytic, _Prediction

@dataclass
class Slow(Analytic):
    """Sleeps while it loads."""
    isolated = True
    def open(self, deployment, engine):
        return Sleeper(deployment, engine)

class Sleeper(_Prediction):
    def load(self):
        open("child.pid", "w").write(str(os.getpid()))
        time.sleep(60)
'''


@pytest.fixture
def slow_plugin(tmp_path):
    """A third party's profiler that hangs, installed on a path of its own."""
    site = tmp_path / "site"
    info = site / "kvexp_slow-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "kvexp_slow.py").write_text(SLOW_PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvexp-slow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvexp.profiler]\nslow = kvexp_slow:Slow\n")
    return {**os.environ, "PYTHONPATH": str(site)}


def wait_for(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.parametrize("module", ["kvexp", "kvexp.validate"])
def test_an_interrupt_while_modules_load_is_one_line(module, tmp_path):
    (tmp_path / "hydra.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "omegaconf.py").write_text("raise KeyboardInterrupt\n")
    ended = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert (ended.returncode, ended.stderr) == (130, "kvexp: interrupted\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own imports, in this process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_the_point_as_killed_and_leaves_no_child(slow_plugin, tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "kvexp", "profiler=slow", "-m", "util=0.8,0.9"],
        cwd=tmp_path,
        env=slow_plugin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child = int(wait_for(tmp_path / "child.pid"))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 130, err
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    (result,) = results_below(tmp_path / "outputs")
    assert (result["status"], result["reason"]) == ("killed", "interrupted")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'outputs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("kvexp")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["KILLED", "KILLED"]


@pytest.mark.slow
def test_the_run_of_a_sweep_carries_what_its_points_share(command_line, tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    status, _, err = command_line("-m", "gpu=h100,h200", f"tracking.uri={uri}")
    assert status == 0, err

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("kvexp")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.data.params["model"] == "llama3_8b"
    assert parent.data.params["engine"] == "vllm"
    assert "gpu" not in parent.data.params
    assert "None" not in parent.data.params.values()


def test_a_killed_child_and_a_timeout_are_statuses(slow_plugin, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "kvexp", "profiler=slow", "tracking=off"],
        cwd=tmp_path,
        env=slow_plugin,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.kill(int(wait_for(tmp_path / "child.pid")), signal.SIGKILL)
    process.communicate(timeout=60)
    (result,) = results_below(tmp_path / "outputs")

    assert process.returncode == 1
    assert (result["status"], result["stage"]) == ("killed", "load")
    assert "SIGKILL" in result["reason"]

    done = subprocess.run(
        [
            sys.executable,
            *("-m", "kvexp", "profiler=slow", "profiler.timeout_s=3", "tracking=off"),
            "hydra.run.dir=late",
        ],
        cwd=tmp_path,
        env=slow_plugin,
        timeout=60,
        check=False,
    )
    (result,) = results_below(tmp_path / "late")
    assert done.returncode == 1
    assert result["status"] == "timeout"
    assert "profiler.timeout_s=3" in result["reason"]


def test_a_reader_that_leaves_is_no_mistake(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "kvexp", "--help"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()

    assert (process.wait(), complaint) == (0, b"")
