"""Every YAML file composes, and every preset runs."""

import json
from pathlib import Path

import pytest
import yaml

import kvexp
from kvexp import api, registry
from kvexp.request import Knobs
from kvexp.results import Status

CONF = registry.config_dir()
OPTIONS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF.glob("*/*.yaml")
    if path.parent.name in ("experiment", "sweep", "tracking")
)
SWEEPS = sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_every_preset_composes(option):
    for point in api.compose_points([option]):
        assert point.run is not None, point.problem


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_every_model_gets_blocks_on_some_number_of_cards(model):
    (point,) = api.compose_points([f"model={model}", "gpu=h200", "tp=1", "max_model_len=256"])

    assert point.run is not None, point.problem
    assert point.run.model.name == model


def test_every_model_of_7b_and_less_runs_on_an_h200():
    results = kvexp.sweep(["model=llama2_7b,qwen25_7b,qwen3_0_6b,llama32_1b", "gpu=h200"])

    assert [result.status for result in results] == [Status.ok] * 4


@pytest.mark.slow
def test_every_card_answers():
    names = sorted(path.stem for path in (CONF / "gpu").glob("*.yaml"))
    results = kvexp.sweep(["model=qwen3_0_6b", "max_model_len=2048", f"gpu={','.join(names)}"])

    for name, result in zip(names, results, strict=True):
        assert result.status in (Status.ok, Status.infeasible, Status.oom), (name, result.reason)
    assert sum(result.ok for result in results) > 25


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_runs(name, command_line, tmp_path):
    status, out, err = command_line(f"sweep={name}", "tracking=off")

    params = yaml.safe_load((CONF / "sweep" / f"{name}.yaml").read_text())
    lists = params["hydra"]["sweeper"]["params"].values()
    expected = 1
    for values in lists:
        expected *= len(str(values).split(","))
    assert f"of {expected} points ok" in out, err
    assert len(list(tmp_path.rglob("result.json"))) == expected
    if name not in ("gpu",):
        assert status == 0, err


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name, command_line):
    status, _out, err = command_line(f"experiment={name}", "tracking=off")

    assert status == 0, err


def test_presets_that_were_promised_are_there():
    assert set(SWEEPS) >= {"util", "block_size", "dtype", "gpu", "engine", "context"}


def test_a_value_on_the_command_line_wins_over_a_preset(command_line, tmp_path):
    command_line("sweep=util", "util=0.95", "tracking=off")
    results = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]

    assert {r["effective"]["util"] for r in results} == {0.95}


def test_every_value_and_its_default_stands_in_config_yaml():
    written = yaml.safe_load((CONF / "config.yaml").read_text())
    knobs = {name for name in Knobs.__dataclass_fields__ if name not in ("model", "gpu")}

    assert knobs <= written.keys()


@pytest.mark.slow
def test_a_sweep_file_of_ones_own_is_reproduced_from_its_folder(command_line, tmp_path):
    folder = tmp_path / "mine" / "sweep"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /model: qwen3_8b\n  - override /gpu: h200\n"
        "max_model_len: 8192\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
        "      util: 0.8,0.9\n      engine.version: 0.20,0.26\n"
    )
    seen = []
    for number in range(2):
        status, _, err = command_line(
            *("--config-dir", str(tmp_path / "mine"), "sweep=ours", "tracking=off"),
            f"hydra.sweep.dir={tmp_path}/run{number}",
        )
        assert status == 0, err
        paths = sorted(Path(tmp_path / f"run{number}").rglob("result.json"))
        records = [json.loads(path.read_text()) for path in paths]
        seen.append([(r["identity"], r["num_blocks"], r["effective"]) for r in records])

    assert seen[0] == seen[1]
    assert [e["engine_version"] for _, _, e in seen[0]] == ["0.20", "0.26"] * 2
