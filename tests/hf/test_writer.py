"""A config.json that is written is read back to the same facts."""

import dataclasses
import json

import pytest
from omegaconf import OmegaConf

from kvexp.errors import InvalidValue
from kvexp.hf import config_json, read_model
from kvexp.registry import config_dir
from kvexp.request import Model

WRITTEN = (
    "codellama_7b",
    "gemma2_9b",
    "gemma3_12b",
    "gpt_oss_20b",
    "llama2_70b",
    "llama31_8b",
    "llama3_8b",
    "mistral_7b",
    "mistral_7b_v01",
    "phi3_mini",
    "phi4",
    "qwen25_7b",
    "qwen3_30b_a3b",
    "qwen3_8b",
    "deepseek_v2_lite",
)
NOT_FACTS = ("name", "hf_id", "source", "aliases", "notes", "path")


def catalogued(name):
    file = config_dir() / "model" / f"{name}.yaml"
    merged = OmegaConf.merge(OmegaConf.structured(Model), OmegaConf.load(file))
    return OmegaConf.to_object(merged)


def facts(model):
    found = {
        item.name: getattr(model, item.name)
        for item in dataclasses.fields(model)
        if item.name not in NOT_FACTS
    }
    found["layer_types"] = [model.layer_type(i) for i in range(model.num_hidden_layers)]
    if model.mla is not None:
        del found["head_dim"]  # the latent attention has sizes of its own
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_back(name, tmp_path):
    model = catalogued(name)
    (tmp_path / "config.json").write_text(json.dumps(config_json(model)))

    assert facts(read_model(tmp_path)) == facts(model)


def test_the_file_that_a_model_was_read_from_is_kept_whole(tmp_path):
    stated = {**config_json(catalogued("llama3_8b")), "rms_norm_eps": 1e-5, "mlp_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(stated))

    assert config_json(read_model(tmp_path)) == stated
    assert config_json(read_model(tmp_path / "config.json")) == stated


def test_a_fact_that_the_file_does_not_state_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(catalogued("llama3_8b"))))
    model = dataclasses.replace(read_model(tmp_path), num_hidden_layers=4)

    with pytest.raises(InvalidValue, match=r"model\.num_hidden_layers=4 is not what .* \(32\)"):
        config_json(model)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("jamba15_mini", "no config.json can be written for model.model_type=jamba"),
        ("qwen25_vl_7b", "the encoders of model=qwen25_vl_7b are not described"),
        ("phi4_mini", "the factors of longrope are not among the facts"),
    ],
)
def test_a_model_whose_facts_do_not_say_enough_is_refused(name, problem):
    with pytest.raises(InvalidValue, match=problem):
        config_json(catalogued(name))
