"""Images and audio in vLLM's profile run on an H200: terms by the rules against measured starts."""

import json
from functools import cache
from pathlib import Path

import pytest

import kvexp

DATA = json.loads((Path(__file__).parent / "data" / "h200_vllm_images.json").read_text())
POINTS = {point["name"]: point for point in DATA["points"]}
MIB = 1 << 20
TO_THE_BYTE = (
    "qwen3_vl_4b_v1",
    "qwen3_vl_30b_a3b",
    "qwen25_vl_3b_v2",
    "qwen25_vl_3b_text",
    "whisper",
)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """A point's result from its model's config.json alone."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in DATA["configs"].items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))

    @cache
    def run(name):
        point = POINTS[name]
        return kvexp.run(["model=hf", f"model.path={folder / point['model']}", *point["overrides"]])

    return run


@pytest.mark.parametrize("name", POINTS)
def test_activation_with_items_is_within_three_mib_and_inside(predicted, name):
    part = predicted(name).profile.activation
    measured = POINTS[name]["activation_bytes"]

    assert part.size_bytes == pytest.approx(measured, abs=3 * MIB)
    assert (part.low_bytes or part.size_bytes) <= measured <= (part.high_bytes or part.size_bytes)


@pytest.mark.parametrize("name", TO_THE_BYTE)
def test_activation_beside_what_items_hold_is_vllms_to_the_byte(predicted, name):
    assert predicted(name).profile.activation_bytes == POINTS[name]["activation_bytes"]


@pytest.mark.parametrize("name", POINTS)
def test_blocks_and_weights_with_encoders_are_near(predicted, name):
    found, point = predicted(name), POINTS[name]

    assert found.num_blocks == pytest.approx(point["num_blocks"], rel=0.0003)
    assert found.profile.weights_bytes == pytest.approx(point["weights_bytes"], rel=0.002)


@pytest.mark.parametrize("name", [name for name in POINTS if "alive_at_peak" in POINTS[name]])
def test_what_was_alive_at_the_peak_is_the_activation(name):
    """The history misses blocks under 1 MiB and what the allocator rounds up."""
    point = POINTS[name]

    alive = sum(size for size, _ in point["alive_at_peak"])
    assert alive == pytest.approx(point["activation_bytes"], abs=3 * MIB)


def test_an_encoder_of_a_catalogue_entry_is_that_of_its_config(predicted):
    for name in ("qwen25_vl_3b_few", "qwen3_vl_30b_few"):
        point = POINTS[name]
        own = kvexp.run([f"model={point['model']}", *point["overrides"]])

        assert own.profile.activation_bytes == predicted(name).profile.activation_bytes


def test_the_audio_encoder_of_a_catalogue_entry_is_loaded():
    """3,089,710,080 bytes on an H200; 0.26 leaves out towers whose items are limited to 0."""
    found = kvexp.run(["gpu=h200", "model=whisper_large_v3", "enforce_eager=true"])

    assert found.profile.weights_bytes == pytest.approx(3089710080, rel=0.001)
