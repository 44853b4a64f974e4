"""Images and audio in vLLM's profile run on an H200: terms by the rules against measured starts."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvexp
from kvexp.api import compose_points
from kvexp.hf.decoder import decoder_facts
from kvexp.request import Encoder
from kvexp_vllm import attention_splits

DATA = json.loads((Path(__file__).parent / "data" / "h200_vllm_images.json").read_text())
POINTS = {point["name"]: point for point in DATA["points"]}
MIB = 1 << 20
H200 = SimpleNamespace(compute_capability="9.0", num_sms=132)
A100 = SimpleNamespace(compute_capability="8.0", num_sms=108)
ENCODER = Encoder(
    tokens_per_item=1, patches_per_item=1, patch_size=1, hidden_size=1, intermediate_size=1
)
TO_THE_BYTE = (
    "qwen3_vl_4b_v1",
    "qwen3_vl_30b_a3b",
    "qwen25_vl_3b_v2",
    "qwen25_vl_3b_text",
    "whisper",
)

LAYER_BY_LAYER = (
    *("qwen25_vl_3b_v1", "qwen25_vl_3b_v2", "qwen25_vl_3b_img", "qwen3_vl_4b_v1", "gemma3_4b_v1"),
    *("glm41v_9b_video", "qwen35_35b_a3b", "whisper", "paddleocr_vl", "glm_ocr", "smolvlm_2b"),
)
"""Points whose encoders are replayed through the allocator matrix by matrix."""

ESTIMATED = ("gemma4_e4b_video", "gemma4_26b_a4b_video", "internvl35_8b_video")
"""Points whose config does not say how many parameters their encoders have."""


WHOLE_NUMBERS = {"smolvlm_2b": 2 * 17 * 384 * 384 * 6}
"""What a mask of the pixels had more there, twice: transformers without torchvision makes it of 8
bytes, with it of the model's 2."""


UNSPLIT_MIB = {"paddleocr_vl": 4}
"""How much the rests of its blocks are, which the allocator does not split, where over 3 MiB."""


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
    expected, near = measured - WHOLE_NUMBERS.get(name, 0), UNSPLIT_MIB.get(name, 3) * MIB

    assert part.size_bytes == pytest.approx(expected, abs=near)
    assert (part.low_bytes or part.size_bytes) <= measured <= (part.high_bytes or part.size_bytes)


@pytest.mark.parametrize("name", TO_THE_BYTE)
def test_activation_beside_what_items_hold_is_vllms_to_the_byte(predicted, name):
    assert predicted(name).profile.activation_bytes == POINTS[name]["activation_bytes"]


@pytest.mark.parametrize("name", [name for name in POINTS if name not in ESTIMATED])
def test_blocks_and_weights_with_encoders_are_near(predicted, name):
    found, point = predicted(name), POINTS[name]

    assert found.num_blocks == pytest.approx(point["num_blocks"], rel=0.0005)
    assert found.profile.weights_bytes == pytest.approx(point["weights_bytes"], rel=0.002)


@pytest.mark.parametrize("name", LAYER_BY_LAYER)
def test_weights_with_an_encoder_are_vllms_but_for_a_mib(predicted, name):
    measured = POINTS[name]["weights_bytes"]

    assert predicted(name).profile.weights_bytes == pytest.approx(measured, abs=MIB)


@pytest.mark.parametrize("name", ESTIMATED)
def test_an_encoder_whose_parameters_are_an_estimate_is_inside_its_interval(predicted, name):
    found, point = predicted(name), POINTS[name]
    weights = found.profile.weights

    assert weights.low_bytes <= point["weights_bytes"] <= weights.high_bytes
    assert found.num_blocks == pytest.approx(point["num_blocks"], rel=0.01)


@pytest.mark.parametrize("name", ["gemma4_e4b", "gemma4_26b_a4b"])
def test_gemma_4_of_the_catalogue_is_what_vllm_loads(name):
    """With rotary tables of whole heads, and room for every layer's embeddings of a step."""
    point = POINTS[f"{name}_video"]
    found = kvexp.run([f"model={name}", *point["overrides"]])

    assert found.profile.weights_bytes == pytest.approx(point["weights_bytes"], rel=0.002)
    assert found.profile.activation_bytes == pytest.approx(point["activation_bytes"], abs=3 * MIB)
    assert found.num_blocks == pytest.approx(point["num_blocks"], rel=0.001)


@pytest.mark.parametrize("name", [name for name in POINTS if "alive_at_peak" in POINTS[name]])
def test_what_was_alive_at_the_peak_is_the_activation(name):
    """The history misses blocks under 1 MiB and what the allocator rounds up."""
    point = POINTS[name]

    alive = sum(size for size, _ in point["alive_at_peak"])
    near = 1.5 * UNSPLIT_MIB[name] if name in UNSPLIT_MIB else 3
    assert alive == pytest.approx(point["activation_bytes"], abs=near * MIB)


def test_an_encoder_of_a_catalogue_entry_is_that_of_its_config(predicted):
    for name in ("qwen25_vl_3b_few", "qwen3_vl_30b_few"):
        point = POINTS[name]
        own = kvexp.run([f"model={point['model']}", *point["overrides"]])

        assert own.profile.activation_bytes == predicted(name).profile.activation_bytes


@pytest.mark.parametrize(
    "name", ["gemma4_e4b", "gemma4_26b_a4b", "qwen35_35b_a3b", "qwen25_omni_7b"]
)
def test_the_encoder_of_a_catalogue_entry_has_the_sizes_of_its_config(name):
    config = DATA["configs"][name]
    path = "thinker_config.text_config" if "thinker_config" in config else "text_config"
    stated = decoder_facts(config, path, [], {})["encoder"]

    (point,) = compose_points([f"model={name}", "gpu=h200"])
    ahead = name == "gemma4_26b_a4b"  # what was measured did not say so, the checkpoint does
    assert point.run.model.encoder == replace(stated, looks_ahead=ahead)


def test_keys_of_short_sequences_are_split_as_they_were_on_an_h200():
    """Outputs of four parts for a frame of InternVL, of one for images of gemma-3 and Qwen3-VL."""
    internvl = replace(ENCODER, hidden_size=1024, num_attention_heads=16)
    siglip = replace(ENCODER, hidden_size=1152, num_attention_heads=16)
    hopper, ampere = (SimpleNamespace(tp=1, gpu=gpu) for gpu in (H200, A100))

    assert attention_splits.parts(hopper, internvl, 1025) == 4
    assert attention_splits.parts(hopper, siglip, 4096) == 1
    assert attention_splits.parts(hopper, siglip, 65536) == 1
    assert attention_splits.parts(ampere, internvl, 1025) == 1


def test_older_transformers_look_positions_of_gemma_4_up_in_one_hot_rows():
    """32 frames of 630 patches, 2 x 10240 rows, 8 bytes and 2 of their cast: 4,128,768,000."""
    asked = ["model=gemma4_e4b", *POINTS["gemma4_e4b_video"]["overrides"]]
    older = kvexp.run([*asked, "engine.version=0.22.1"]).profile.activation
    newer = kvexp.run(asked).profile.activation

    assert older.size_bytes > 4_128_768_000 > newer.high_bytes
    assert older.low_bytes <= newer.size_bytes  # with a newer transformers beside it


def test_the_audio_encoder_of_a_catalogue_entry_is_loaded():
    """3,089,710,080 bytes on an H200; 0.26 leaves out towers whose items are limited to 0."""
    found = kvexp.run(["gpu=h200", "model=whisper_large_v3", "enforce_eager=true"])

    assert found.profile.weights_bytes == pytest.approx(3089710080, rel=0.001)
