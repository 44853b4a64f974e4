"""Damaged configs: always an answer with its assumptions or one line, never a traceback."""

import copy
import dataclasses
import json
import random

import pytest

from kvexp import weights
from kvexp.errors import InvalidValue

from .shapes import SHAPES

WRONG = (
    *(None, "x", "", -1, 0, 3.7, True, [], {}, [1, 2], ["a"], {"a": 1}),
    *(10**30, float("inf"), float("nan")),
)
CONFIGS = [row[1] for row in SHAPES]

IRRELEVANT = {
    "vision_config",  # a config without it describes a text model
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "num_kv_shared_layers",
}
"""Keys whose absence is a statement of its own."""


def sections(config):
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from sections(value)


@pytest.mark.parametrize("seed", range(60))
def test_mutated_configs_are_read_or_refused_in_one_line(seed, read):
    chance = random.Random(seed)
    for _ in range(10):
        config = copy.deepcopy(chance.choice(CONFIGS))
        for _ in range(chance.choice([1, 1, 2, 3])):
            section = chance.choice([s for s in sections(config) if s])
            key = chance.choice(sorted(section))
            if chance.random() < 0.4:
                del section[key]
            else:
                section[key] = chance.choice(WRONG)
        try:
            assert weights.parameters(read(config)) > 0
        except InvalidValue as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 400


def facts(model):
    values = dataclasses.asdict(model)
    return {name: values[name] for name in values if name not in ("notes", "source")}


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: row[0])
def test_a_removed_key_is_an_error_a_note_or_no_change(row, read):
    config = row[1]
    before = facts(read(config))
    for section in sections(config):
        for key in [key for key in section if key not in IRRELEVANT]:
            value = section.pop(key)
            try:
                model = read(config)
            except InvalidValue:
                continue
            finally:
                section[key] = value
            changed = [name for name, fact in facts(model).items() if fact != before[name]]
            told = any(key in note for note in model.notes)
            assert told or not changed, (key, changed)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "1", "{}", '{"a": NaN', "\x00\x01", "[" * 100000, '{"a":' * 50000],
)
def test_foreign_files_are_one_line(text, tmp_path):
    from kvexp.hf import read_model

    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidValue) as caught:
        read_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_mutated_config_is_one_invalid_point_on_the_command_line(tmp_path, command_line):
    config = {**CONFIGS[0], "hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, _, err = command_line("model=hf", f"model.path={tmp_path}", "tracking=off")

    assert status == 2
    assert "hidden_size must be a whole number, got 'wide'" in err
    assert err.count("\n") == 1
