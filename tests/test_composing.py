"""Points that are composed once for each choice of options are those that Hydra composes."""

import pytest
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf

import kvexp
from kvexp import api
from kvexp.composing import Composer

ASKED = [
    ["model=qwen3_8b", "gpu=h100", "util=0.85", "tp=2"],
    ["util=0.5", "model=qwen3_8b", "gpu=h100", "hydra.sweep.dir=other", "engine.version='0.20'"],
    ["model=qwen3_8b", "gpu=h100", "mm.limits={image:0,video:0}", "lora.max_loras=4"],
    ["gpu=h100", "model=qwen3_8b", "+model.mla.q_lora_rank=8", "util=0.8"],
    ["sweep=util", "gpu=h100", "max_model_len=${block_size}", "model.path=/nowhere"],
    ["model=qwen3_8b", "gpu=h100"],
]


def hydras(overrides):
    return compose("config", list(overrides), return_hydra_config=True)


def plain(cfg):
    return OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)


def test_a_configuration_is_the_one_that_hydra_composes():
    with api._hydra([override for asked in ASKED for override in asked]):
        composer = Composer(hydras)
        for asked in (*ASKED, *ASKED):
            assert plain(composer.compose(asked)) == plain(hydras(asked)), asked


def test_each_choice_is_composed_once_and_a_configuration_belongs_to_its_point():
    loaded = []
    with api._hydra():
        composer = Composer(lambda overrides: loaded.append(overrides) or hydras(overrides))
        for util in (0.5, 0.6, 0.7):
            cfg = composer.compose(["gpu=h100", f"util={util}", "model=phi4"])
            assert cfg.util == util
            cfg.gpu.name = "another"
        assert composer.compose(["gpu=h100", "model=phi4"]).gpu.name == "NVIDIA H100 80GB HBM3"
    assert loaded == [["gpu=h100", "model=phi4"]]


@pytest.mark.parametrize("wrong", ["utill=0.5", "util=high", "util=0.5,0.6", "gpu=none", "util="])
def test_what_is_wrong_is_refused_as_hydra_refuses_it(wrong):
    with api._hydra():
        said = []
        for made in (hydras, Composer(hydras).compose):
            try:
                said.append(plain(made(["gpu=h100", "model=phi4", wrong])))
            except HydraException as error:
                said.append(str(error))
    assert said[0] == said[1]


@pytest.mark.parametrize("option", ["mine", "team/lab/rack/mine"])
def test_files_that_changed_are_read_again(tmp_path, option):
    card = tmp_path / "gpu" / f"{option}.yaml"
    card.parent.mkdir(parents=True)
    card.with_name(".#mine.yaml").symlink_to("someone@a-host")  # as an editor locks a file

    def total(size):
        card.write_text(f"defaults: [/gpu/h100@_here_]\ntotal_bytes: {size}\n")
        asked = ["model=phi4", f"gpu={option}"]
        return kvexp.run(asked, config_dir=tmp_path).effective["total_bytes"]

    assert [total(80 << 30), total(100 << 30)] == [80 << 30, 100 << 30]


def test_files_of_installed_folders_are_looked_at_wherever_they_lie(tmp_path, monkeypatch):
    monkeypatch.setattr("kvexp.api.registry.config_dirs", lambda: [tmp_path])
    card = tmp_path / "gpu" / "team" / "rack" / "mine.yaml"
    card.parent.mkdir(parents=True)
    card.with_name(".#mine.yaml").symlink_to("someone@a-host")

    def state(text):
        card.write_text(text)
        return api._state(["gpu=team/rack/mine"])

    assert state("a: 1\n") != state("a: 12\n")
    assert api._state(["gpu=h100"]) == api._state(["gpu=h100"])


def test_a_working_directory_that_is_gone_is_one_line(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    with pytest.raises(kvexp.RequestError, match="cannot go on: No such file"):
        kvexp.run(["gpu=h100"])


def test_a_group_of_ones_own_with_the_name_of_a_value_is_a_group(tmp_path):
    (tmp_path / "util").mkdir()
    (tmp_path / "util" / "much.yaml").write_text("# @package _global_\nutil: 0.97\n")
    asked = ["model=phi4", "gpu=h100"]

    much = kvexp.run([*asked, "+util=much"], config_dir=tmp_path)
    assert much.effective["util"] == 0.97
    with pytest.raises(kvexp.RequestError, match="a group takes one option name"):
        kvexp.run([*asked, "util=0.5"], config_dir=tmp_path)
