"""Odd requests that were once accepted, lost or answered with a traceback."""

import json
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kvexp
import kvexp.calibrate.__main__ as calibrate
import kvexp.list as listing
import kvexp.startup_logs.__main__ as startup_logs
from kvexp.errors import nearest
from kvexp.results import Status
from kvexp.validate import command as validate
from thinned import thinned


def one_line(err):
    return err.startswith("kvexp: ") and err.count("\n") == 1 and "Traceback" not in err


REFUSED = [
    (["+utl=0.9"], "unknown option utl; did you mean util?"),
    (["++gpu.totl=1"], "unknown option gpu.totl"),
    (["-m", "util=0.85,0.9", "+foo=1,2"], "unknown option foo"),
    (["model=[llama3_8b,phi4]"], "model takes one option"),
    (["gpu=[h100,h200]"], "gpu takes one option"),
    (["model=llama3_8b,phi4"], "add -m to sweep over them\n"),
    (["~gpu"], "a value is missing: gpu"),
    (["gpu=null"], "a group takes one option name"),
    (["gpu=4090"], "gpu=4090 does not exist; did you mean rtx_4090?"),
    (["-m", "sweep=util,block_size"], "sweep takes one preset"),
    (["-m", "util=range(1,0)"], "the sweep is empty"),
    (["-m", "tracking.experiment=a,b", "tracking=mlflow"], "tracking cannot be swept over"),
    (["enforce_eager=-1"], "enforce_eager must be true or false, got -1"),
    (["engine.estimate_cudagraphs=2"], "engine.estimate_cudagraphs must be true or false, got 2"),
    (["profiler.timeout_s=0"], "profiler.timeout_s must be more than 0 seconds"),
    (["engine=nano_vllm", "engine.version=foo"], "engine.version must be bb823b3"),
    (["gpu.context_bytes=200GiB"], "gpu.context_bytes must not exceed gpu.total_bytes"),
    (["gpu.free_bytes=60GiB", "gpu.used_by_others_bytes=40GiB"], "together"),
    (["gpu.total_printed_gib=nan"], "gpu.total_printed_gib must be a size in GiB"),
    (["gpu.total_bytes=1e400"], "gpu.total_bytes must be"),
    (["gpu.free_bytes=1e99999999GiB"], "gpu.free_bytes must be a size"),
    (["gpu.total_bytes=" + "9" * 400], "must be at most"),
    (["util=" + "9" * 5000], "Exceeds the limit"),
    (["block_size=" + "9" * 400], "block_size must be at most"),
    (["model.num_hidden_layers=1000000000"], "must be at most 10000"),
    (["model=llama2_13b", "tp=5"], "tp must be one of 1, 2, 4, 8"),
    (["model=qwen25_7b", "tp=28"], "tp must be one of"),
    (["model.num_key_value_heads=5"], "must be a multiple of num_key_value_heads"),
    (["dtype=fp32", "quantization=fp8"], "quantization=fp8 needs dtype bf16 or fp16"),
    (["gpu=v100_16gb", "dtype=bf16"], "8.0, Tesla V100-SXM2-16GB has 7.0; use dtype=fp16"),
    (["util=${foo}"], "foo"),
    (["util=???"], "a value is missing: util\n"),
    (["gpu.compute_capability=???"], "a value is missing: gpu.compute_capability\n"),
    (["dtype=1.5"], "dtype must be one of auto, bf16, fp16, fp32, got 1.5"),
    (["quantization=[]"], "quantization must be one of fp8, w8a8"),
    (["mm.limits=[]"], "mm.limits takes {name:value,...}"),
    (["speculative.model=[a]"], "speculative.model must be a text, got ['a']"),
    (["-m", "util=range(0,1,0)"], "range() arg 3 must not be zero"),
    (["gpu=[-1]"], "a group takes one option name"),
    (["gpu.compute_capability=abc"], "gpu.compute_capability must be a number such as 9.0"),
    (["model.torch_dtype=auto"], "model.torch_dtype must be one of bf16, fp16, fp32"),
    (["model.checkpoint_bytes=-1"], "model.checkpoint_bytes must be at least 1"),
    (
        ["model=qwen3_30b_a3b", "model.moe.num_experts=-1"],
        "model.moe.num_experts must be at least 1",
    ),
    (["model=gemma3_12b", "model.rope_theta=nan"], "model.rope_theta must be at least 0, got nan"),
    (["model=deepseek_v2_lite", "model.mla.kv_lora_rank=0"], "model.mla.kv_lora_rank must be at"),
    (["model.tower_parameters=-5"], "model.tower_parameters must be at least 0"),
    (["model.quantization_config={method:fp8,bits:0}"], "quantization_config.bits must be from 1"),
    (["engine=sglang", "engine.mamba_full_memory_ratio=nan"], "must be above 0, got nan"),
    (["engine=sglang", "engine.swa_full_tokens_ratio=-1"], "must be above 0, got -1"),
    (["pp_partition={}"], "pp_partition must be a list in brackets, like pp_partition=[1,2]"),
    (["model=a\nb"], "model=a"),
    ([""], "cannot read an empty override"),
    (["--foo"], "unknown flag --foo"),
    (["--model", "llama3_8b"], "write model=llama3_8b"),
    (["model.moe.num_experts=3"], "a value is missing: model.moe.num_experts_per_tok"),
    (["model.mla={kv_lora_rank:512}"], "a value is missing: model.mla."),
    (["model.moe.num_exprts=3"], "did you mean model.moe.num_experts?"),
    (["model.layer_types.x=3"], "a key inside a null value cannot be set"),
    (["lora.max_rank=17"], "lora.max_rank must be one of 1, 8, 16"),
    (
        [
            "model=qwen3_30b_a3b",
            "tp=2",
            "lora.max_loras=1",
            "engine.fully_sharded_loras=true",
            "engine.enable_expert_parallel=true",
        ],
        "engine.fully_sharded_loras must be false",
    ),
    (["lora.max_loras=0"], "lora.max_loras must be at least 1, got 0"),
    (["lora.max_loras=2", "engine=nano_vllm"], "lora is not counted for engine=nano_vllm"),
    (["lora.max_loras=2", "model=falcon_7b"], "lora cannot be used with falcon_7b"),
    (["speculative.num_tokens=3"], "needs speculative.method"),
    (["speculative.method=eagel3"], "must be one of eagle3, eagle, mtp"),
    (["speculative.method=mtp"], "speculative.method=mtp is known for"),
    (["speculative.method=ngram"], "speculative.num_tokens must be given"),
    (["speculative.model=llama32_1", "speculative.num_tokens=3"], "did you mean llama32_1b?"),
    (["speculative.model=a/b", "speculative.num_tokens=3"], "no entry of the catalogue"),
    (["speculative.model=./a", "speculative.num_tokens=3"], "speculative.model a does not"),
    (["speculative.model=qwen3_0_6b", "speculative.num_tokens=3"], "vocabulary of speculative"),
    (["mm.limits={image:1}"], "mm.limits.image: llama3_8b takes text alone"),
    (["mm.limits={smell:1}"], "mm.limits has audio, image, video"),
    (["mm.limits=image:2"], "mm.limits takes {name:value,...}, in quotes for the shell"),
    (["mm.limits.image=-1"], "mm.limits.image must be at least 0, got -1"),
    (["dp=0"], "dp must be at least 1, got 0"),
    (["model=qwen3_30b_a3b", "dp=5"], "dp must be one of 1, 2, 3, 4, 6, 8"),
    (["dp=2", "engine=lmdeploy"], "dp is not counted for engine=lmdeploy"),
    (["pp=2", "pp_partition=[20,20]"], "pp_partition must be 2 numbers of layers"),
    (["pp=2", "pp_partition=[32]"], "that sum to 32"),
    (["profiler=simulated", "lora.max_loras=1", "lora.max_rank=3"], "lora.max_rank must be"),
    (["++model.rope_scaling.factor=2"], "must name its rope_type"),
    (["engine.cudagraph_capture_sizes=[8,0]"], "must be batch sizes from 1 on, got [8, 0]"),
    (["engine=sglang", "kv_dtype=fp16"], "must be one of auto, bf16, fp8, fp8_e4m3, fp8_e5m2"),
    (["tp=null"], "tp must be a whole number (by default 1), got null"),
    (["kv_dtype=null"], "kv_dtype must be one of auto, bf16, fp16"),
    (["mm=null"], "mm must be {name:value,...}, got null"),
    (["model.hidden_size=null"], "model.hidden_size must be a whole number, got null"),
    (["engine.cpu_offload_gb=null"], "must be a number (by default 0.0), got null"),
    (["engine.performance_mode=null"], "must be a text (by default balanced), got null"),
    (["engine.async_scheduling=null"], "must be true or false (by default true), got null"),
    (["engine.cudagraph_capture_sizes=[null]"], "[0] must be a whole number, got null"),
    (["model.notes=null"], "model.notes must be a list in brackets, got null"),
    (["pp_partition=8", "pp=2"], "must be a list in brackets, like pp_partition=[1,2]"),
    (["model.rope_scaling={type:yarn}"], "must have a factor for yarn"),
    (["model.rope_scaling={rope_type:yran,factor:2}"], "must be one of default, linear"),
    (["model.rope_scaling={rope_type:linear,factor:-2}"], "must be a positive number, got -2"),
    (["model.rope_scaling={rope_type:linear,factor:abc}"], "must be a positive number"),
    (["--cfg", "foo"], "--cfg takes one of job, hydra, all"),
    (["--config-dir="], "--config-dir takes a value"),
    (["hydra.run.dir=/dev/null/x"], "cannot use"),
    (["hydra.run.dir=" + "x" * 300], "cannot use"),
]


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (validate.run, [], "give a FILE.jsonl or --log FILE"),
        (validate.run, ["a.jsonl", "--chek", "b"], "unrecognized arguments: --chek b"),
        (listing.main, ["model"], "model is no section; choose from models, gpus, engines"),
        (listing.main, ["--config-dir", "none"], "--config-dir none is no folder"),
        (startup_logs.main, [], "the following arguments are required: FILE"),
        (calibrate.main, ["--foo"], "unrecognized arguments: --foo"),
    ],
)
def test_a_command_beside_the_runner_ends_with_one_line(main, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert one_line(error) and message in error and error.endswith(" --help\n")


@pytest.mark.parametrize(
    ("word", "near"),
    [
        *(("llama3", "llama3_8b"), ("Qwen3_8", "qwen3_8b"), ("h1000", "h100")),
        *(("qwen3-8b", "qwen3_8b"), ("h100_80gb", "h100"), ("4090", "rtx_4090")),
    ],
)
def test_what_begins_with_a_word_is_nearest_to_it(word, near):
    known = ["h100", "llama_30b", "llama3_8b", "llama3_70b", "qwen3_8b", "qwen35_397b_a17b"]
    known += ["a100_80gb", "rtx_4090_48gb", "rtx_4090"]

    assert nearest(word, known) == f"; did you mean {near}?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    thinned(REFUSED, one_of=8),
    ids=[" ".join(arguments)[:40] for arguments, _ in REFUSED],
)
def test_it_is_refused_in_one_line(command_line, arguments, message):
    track = [] if any("tracking" in a for a in arguments) else ["tracking=off"]
    status, out, err = command_line(*arguments, *track)

    assert status == 2, (out, err)
    assert one_line(err), err
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: b: c",
        "42",
        "hidden_size: 1\nhidden_size: 2",
        "? [1]\n: 2",
        "defaults: 3",
        "name: x\nvocab_size: ${oops",
        "num_layerz: 3",
        "num_hidden_layers: many",
        "# @package _global_\nutil: 0.9",
    ],
)
def test_yaml_that_is_wrong_is_refused_in_one_line(command_line, tmp_path, text):
    folder = tmp_path / "mine" / "model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(text)
    status, out, err = command_line(
        "model=mine", "--config-dir", str(tmp_path / "mine"), "tracking=off"
    )

    assert status == 2, (out, err)
    assert one_line(err), err
    assert len(err) > len("kvexp: \n") + 5


def test_yaml_that_is_not_utf_8(command_line, tmp_path):
    folder = tmp_path / "mine" / "gpu"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_bytes(b"name: \xff\xfe")
    status, _, err = command_line(
        "gpu=mine", "--config-dir", str(tmp_path / "mine"), "tracking=off"
    )

    assert status == 2
    assert one_line(err), err


def test_flags_stand_anywhere(command_line, tmp_path):
    (tmp_path / "mine").mkdir()
    status, _, err = command_line(
        "util=0.9", f"--config-dir={tmp_path / 'mine'}", "tracking=off", "--cfg", "job"
    )
    assert status in (0, None), err


def test_lists_and_null_in_a_preset_mean_what_they_mean_on_the_line(command_line, tmp_path):
    folder = tmp_path / "mine" / "sweep"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
        "      util: [0.8, 0.9]\n      quantization: null\n"
    )
    status, out, err = command_line(
        "sweep=ours", "--config-dir", str(tmp_path / "mine"), "tracking=off"
    )
    assert status == 0, err
    assert "2 of 2 points ok" in out
    assert list(tmp_path.rglob(".claim")) == []


@pytest.mark.slow
def test_the_same_point_has_one_identity_however_it_is_asked_for(command_line, tmp_path):
    command_line("util=0.9", "tracking=off", "hydra.run.dir=a")
    command_line("sweep=util", "util=0.9", "tracking=off", "hydra.sweep.dir=b")
    command_line("util=0.9", "hydra.run.dir=c")
    found = {
        json.loads((tmp_path / name / "result.json").read_text())["identity"]
        for name in ("a", "b/0", "c")
    }
    assert len(found) == 1


def test_bf16_falls_back_where_the_card_has_none():
    result = kvexp.run(["model=qwen25_1_5b", "gpu=t4", "max_model_len=2048"])

    assert result.effective["dtype"] == "fp16"
    assert any("has no bf16" in note for note in result.notes)


def test_nothing_left_says_what_one_request_needs():
    refusal = kvexp.run(["gpu=h100", "util=0.15"]).refusal

    assert refusal.kind == "no_memory"
    assert refusal.needed_bytes == 2**30
    assert refusal.available_bytes < 0


def test_given_graph_bytes_are_charged_by_every_engine():
    for engine in ("vllm", "nano_vllm"):
        base = [f"engine={engine}", "gpu=h200", "util=0.9", "max_model_len=4096"]
        without = kvexp.run([*base, "profiler.cudagraph_bytes=0"])
        with_graphs = kvexp.run([*base, "profiler.cudagraph_bytes=3GiB"])

        assert without.budget.available_bytes - with_graphs.budget.available_bytes == 3 * 2**30


def test_the_callers_own_hydra_is_left_as_it_was(tmp_path):
    from hydra import compose, initialize_config_dir

    (tmp_path / "config.yaml").write_text("mine: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert kvexp.run(["gpu=h200"]).ok
        assert compose("config").mine == 1


def test_threads_may_ask_at_the_same_time():
    found, errors = [], []

    def ask():
        try:
            found.extend(kvexp.run(["gpu=h200"]).num_blocks for _ in range(2))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert len(set(found)) == 1
    assert len(found) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own imports, in this process
def test_a_tracked_sweep_from_python_lies_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = kvexp.sweep(
        ["util=0.8,1.2,0.9", "tracking=mlflow", f"hydra.sweep.dir={tmp_path}/mine"]
    )

    assert [result.status for result in results] == [Status.ok, Status.invalid, Status.ok]
    assert sorted(p.name for p in (tmp_path / "mine").iterdir() if p.is_dir()) == ["0", "1", "2"]
    assert (tmp_path / "mine" / "table.csv").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_an_interrupted_sweep_leaves_no_run_behind_that_still_runs(tmp_path, signals):
    utils = ",".join(f"0.{n}" for n in range(300, 900, 12))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvexp", "-m", f"util={utils}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while sum(1 for _ in (tmp_path / "outputs").rglob("[0-9]*/result.json")) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    out, err = process.communicate(timeout=90)

    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    kept = [
        json.loads(path.read_text())
        for path in Path(tmp_path / "outputs").rglob("result.json")
        if "mlartifacts" not in path.parts
    ]
    assert len(kept) < len(utils.split(","))
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'outputs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("kvexp")
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    assert {run.info.status for run in runs} <= {"FINISHED", "FAILED", "KILLED"}
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.info.status == "KILLED"
    assert next((tmp_path / "outputs").rglob("table.csv")).exists()


@pytest.mark.parametrize("module", ["kvexp.list", "kvexp.plan", "kvexp.startup_logs"])
def test_an_output_that_is_full_is_one_line(module, tmp_path):
    log = tmp_path / "start.log"
    log.write_text("INFO [kv_cache_utils.py:634] GPU KV cache size: 158,656 tokens\n")
    given = {"kvexp.list": ["engines"], "kvexp.startup_logs": [str(log)]}.get(module, [])
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", module, *given],
            input="{}\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )

    said = "kvexp: cannot go on: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, said)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("module", "given", "reads"),
    [
        ("kvexp.startup_logs", ["start.log"], "kvexp.startup_logs.read_text"),
        ("kvexp.list", ["engines"], "kvexp.registry.config_dirs"),
    ],
)
def test_an_interrupt_of_a_command_beside_the_runner_is_one_line(
    module, given, reads, monkeypatch, capsys
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(reads, interrupted)
    monkeypatch.setattr(sys, "argv", [module, *given])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")

    assert (ended.value.code, capsys.readouterr().err) == (130, "kvexp: interrupted\n")
