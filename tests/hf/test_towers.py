"""Parameters of encoders from a config.json alone, against the modules that transformers builds."""

import json

import pytest

import kvexp
from kvexp.errors import InvalidValue
from kvexp.hf import read_model
from kvexp.hf.decoder import decoder_facts

from .shapes import TEXT

CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "patch_size": 14}
INTERNVIT = {
    "hidden_size": 1024,
    "image_size": 448,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
QWEN3 = {
    "num_position_embeddings": 2304,
    "spatial_merge_size": 2,
    "patch_size": 16,
    "deepstack_visual_indexes": [5, 11, 17],
}

CASES = [
    (
        "qwen2_vl",
        {},
        3584,
        {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14},
        675_759_104,
    ),
    (
        "qwen2_5_vl",
        {},
        2048,
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 2048,
            "patch_size": 14,
        },
        668_684_288,
    ),
    (
        "qwen3_vl",
        {},
        2560,
        {
            **QWEN3,
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
        },
        415_347_712,
    ),
    (
        "qwen3_vl_moe",
        {},
        2048,
        {
            **QWEN3,
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 2048,
        },
        538_631_408,
    ),
    (
        "qwen3_5",
        {},
        5120,
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_position_embeddings": 2304,
            "out_hidden_size": 5120,
            "patch_size": 16,
            "deepstack_visual_indexes": [],
        },
        460_730_096,
    ),
    (
        "gemma3",
        {},
        2560,
        {**SIGLIP, "image_size": 896, "intermediate_size": 4304, "num_hidden_layers": 27},
        419_816_304,
    ),
    ("llava", {}, 4096, {**CLIP, "intermediate_size": 4096, "num_hidden_layers": 24}, 324_487_168),
    (
        "llava_next",
        {},
        4096,
        {**CLIP, "intermediate_size": 4096, "num_hidden_layers": 24},
        324_491_264,
    ),
    (
        "mistral3",
        {"spatial_merge_size": 2},
        5120,
        {
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
        438_958_080,
    ),
    (
        "lighton_ocr",
        {"spatial_merge_size": 2},
        5120,
        {
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
        438_958_080,
    ),
    (
        "glm4v",
        {},
        4096,
        {
            "depth": 24,
            "hidden_size": 1536,
            "intermediate_size": 13696,
            "out_hidden_size": 4096,
            "image_size": 336,
            "patch_size": 14,
        },
        892_498_432,
    ),
    (
        "llava_onevision",
        {},
        2048,
        {**SIGLIP, "image_size": 384, "intermediate_size": 4304, "num_hidden_layers": 26},
        404_305_184,  # without transformers' last norm, which vLLM leaves out
    ),
    (
        "minimax_m3_vl",  # what the published total has beyond the decoder
        {"projector_hidden_size": 6144},
        6144,
        {
            "model_type": "clip_vision_model",
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "patch_size": 14,
        },
        865_567_232,
    ),
    ("gemma4_unified", {}, 3840, {"patch_size": 16}, 49_922_304),
    (
        "deepseek_vl_v2",  # SAM's, CLIP's, the projector and two separators
        {"architectures": ["DeepseekOCRForCausalLM"]},
        1280,
        {"width": {"sam_vit_b": {}, "clip-l-14-224": {}}},
        95_569_152 + 303_177_728 + 2049 * 1280 + 2 * 1280,
    ),
    (
        "deepseek_vl_v2",  # SAM's, a decoder of Qwen2, the projector and a separator
        {"architectures": ["DeepseekOCR2ForCausalLM"]},
        1280,
        {"width": {"sam_vit_b": {}, "qwen2-0-5b": {"dim": 896}}},
        94_979_328 + 358_256_512 + 897 * 1280 + 1280,
    ),
    (
        "paddleocr_vl",
        {"spatial_merge_size": 2},
        1024,
        {**SIGLIP, "image_size": 384, "intermediate_size": 4304, "num_hidden_layers": 27},
        438_947_440,
    ),
    (
        "dots_ocr",
        {},
        1536,
        {
            "embed_dim": 1536,
            "hidden_size": 1536,
            "intermediate_size": 4224,
            "num_hidden_layers": 42,
            "patch_size": 14,
        },
        1_262_091_264,
    ),
    (
        "idefics3",
        {"scale_factor": 3},
        2048,
        {**SIGLIP, "image_size": 384, "intermediate_size": 4304, "num_hidden_layers": 27},
        434_220_912,
    ),
    (
        "lfm2_vl",
        {"downsample_factor": 2, "projector_hidden_size": 2560},
        2048,
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "num_patches": 256,
            "patch_size": 16,
        },
        397_410_208 + 17_053_184,
    ),
    (
        "cohere2_vision",  # SigLIP's of 512 pixels, and the projector of transformers' modules
        {"downsample_factor": 2, "alignment_intermediate_size": 36864},
        12288,
        {
            **SIGLIP,
            "image_size": 512,
            "patch_size": 16,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
        },
        413_534_448 + 396_410_880,
    ),
    (
        "minicpmv",  # what the published 8.1 billion of MiniCPM-V-2.6 leave beside Qwen2-7B
        {"query_num": 64},
        3584,
        {**SIGLIP, "image_size": 980, "intermediate_size": 4304, "num_hidden_layers": 27},
        486_411_504,
    ),
    (
        "hunyuan_vl",
        {},
        1024,
        {**SIGLIP, "patch_size": 16, "intermediate_size": 4304, "num_hidden_layers": 27},
        457_198_064,
    ),
    (
        "ovis2_5",
        {"visual_vocab_size": 65536},
        2048,
        {
            **SIGLIP,
            "image_size": 512,
            "patch_size": 16,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
        },
        849_854_696,
    ),
    ("phi3_v", {}, 3072, {}, 312_943_616),
    ("phi4mm", {}, 3072, {}, 411_069_856 + 466_416_416),
    (
        "NemotronH_Nano_VL_V2",
        {"projector_hidden_size": 20480},
        5120,
        {"args": {"model": "vit_huge_patch16_224"}, "patch_size": 16},
        651_727_360 + 5120 + 5120 * 20480 + 20480 * 5120,
    ),
    ("internvl", {}, 4096, {**INTERNVIT, "attention_bias": False}, 303_938_560 + 33_570_816),
    (
        "exaone4_5",
        {},
        5120,
        {
            "depth": 28,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_heads": 16,
            "num_key_value_heads": 8,
            "out_hidden_size": 5120,
            "patch_size": 14,
        },
        1_345_231_872,
    ),
    (
        "Keye",  # PaddleOCR-VL's, 32768 rows more and a projector of its own width
        {"architectures": ["KeyeForConditionalGeneration"]},
        1024,
        {**SIGLIP, "image_size": 384, "intermediate_size": 4304, "num_hidden_layers": 27},
        438_947_440 + 32768 * 1152,
    ),
    (
        "another",  # as LLaVA-OneVision's, a norm before its projector and no separator
        {"architectures": ["RForConditionalGeneration"]},
        2048,
        {**SIGLIP, "image_size": 384, "intermediate_size": 4304, "num_hidden_layers": 26},
        404_305_184 + 2 * 1152,
    ),
]

WHISPER = {"hidden_size": 1280, "num_hidden_layers": 32, "intermediate_size": 5120}
HEARING = {  # by transformers' modules: the encoder and its projector
    "audioflamingo3": (4096, 636_968_960 + 22_028_288),
    "glmasr": (2048, 635_048_960 + 29_366_272),
    "qwen2_audio": (4096, 636_968_960 + 5_246_976),
    "qwen2_5_omni": (3584, 639_647_232),
    "voxtral": (3072, 636_968_960 + 25_165_824),
}


@pytest.mark.parametrize(
    ("kind", "around", "hidden", "vision", "parameters"), CASES, ids=[case[0] for case in CASES]
)
def test_an_encoder_of_a_known_class_is_counted_exactly(kind, around, hidden, vision, parameters):
    notes: list[str] = []
    config = {
        "model_type": kind,
        **around,
        "text_config": {"model_type": "llama", **TEXT, "hidden_size": hidden},
        "vision_config": vision,
    }

    facts = decoder_facts(config, "text_config", notes, {})

    assert facts["tower_parameters"] == parameters
    assert not any("plain encoder" in note for note in notes)


@pytest.mark.parametrize("kind", HEARING)
def test_an_encoder_like_whispers_is_counted_exactly(kind):
    hidden, parameters = HEARING[kind]
    text = {"model_type": "llama", **TEXT, "hidden_size": hidden}
    config = {"model_type": kind, "text_config": text, "audio_config": {**WHISPER}}

    facts = decoder_facts(config, "text_config", [], {})

    assert facts["tower_parameters"] == facts["audio_tower_parameters"] == parameters


def test_qwen3s_encoder_of_audio_is_counted_exactly():
    audio = {
        "model_type": "qwen3_asr_audio_encoder",
        "d_model": 1024,
        "encoder_layers": 24,
        "encoder_ffn_dim": 4096,
        "output_dim": 2048,
    }
    thinker = {"text_config": {"model_type": "llama", **TEXT}, "audio_config": audio}
    config = {"model_type": "qwen3_asr", "thinker_config": thinker}

    facts = decoder_facts(config, "thinker_config.text_config", [], {})

    assert facts["tower_parameters"] == facts["audio_tower_parameters"] == 317_477_504


def test_another_encoder_under_a_known_model_is_an_estimate():
    notes: list[str] = []
    config = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**SIGLIP, "intermediate_size": 4304, "num_hidden_layers": 27},
    }

    decoder_facts(config, "text_config", notes, {})

    assert any("by the rule of a plain encoder" in note for note in notes)


UNKNOWN = {
    "sizes are missing": {"vision_config": {"model_type": "another"}},
    "a rule of thumb": {"vision_config": {"hidden_size": 1024, "num_hidden_layers": 24}},
    "no section at all": {"image_token_id": 3},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_weights_reach_further_up_where_an_encoder_is_not_known(case, tmp_path):
    """Two bytes a parameter: 1.3 billion, or 0.4 of the 316 million that the rule counts."""
    config = {"model_type": "another", "architectures": ["Another"]}
    config |= {"text_config": {"model_type": "llama", **TEXT}, "torch_dtype": "bfloat16"}

    def weights(more):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        asked = ["model=hf", f"model.path={tmp_path}", "gpu=h100"]
        return kvexp.run([*asked, "engine.version=0.19.0"]).profile

    text, found = weights({}), weights(UNKNOWN[case])

    assert text.weights.above_bytes < 2**20
    assert found.weights.above_bytes > 2 * 125_000_000
    assert found.activation.above_bytes > 2**31
    assert (found.weights_bytes == text.weights_bytes) == (case != "a rule of thumb")


@pytest.mark.parametrize("vision", [None, {}])
def test_a_model_of_images_without_its_encoder_is_noted(vision):
    notes: list[str] = []
    config = {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2", **TEXT}}
    config |= {} if vision is None else {"vision_config": vision}

    facts = decoder_facts(config, "text_config", notes, {})

    assert (facts["tower_parameters"], facts["encoder"]) == (0, None)
    assert facts["uncounted_tower_parameters"] > 0
    assert "vision_config is not given: no encoder of images is counted" in notes


def test_an_encoder_that_cannot_be_counted_is_not_called_absent():
    notes: list[str] = []
    config = {
        "model_type": "glm_ocr",
        "text_config": {"model_type": "glm_ocr_text", **TEXT},
        "vision_config": {"model_type": "glm_ocr_vision", "hidden_size": 1024, "patch_size": 14},
    }

    assert decoder_facts(config, "text_config", notes, {})["tower_parameters"] == 0
    assert any(note.startswith("vision_config lacks hidden_size or num_hid") for note in notes)
    assert not any("is not given: no encoder" in note for note in notes)


def test_what_an_encoder_lacks_is_its_classs_and_noted():
    notes: list[str] = []
    config = {
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]},
    }

    facts = decoder_facts(config, "text_config", notes, {})

    assert facts["tower_parameters"] == 538_631_408
    assert facts["encoder"].hidden_size == 1152
    for name in ("num_hidden_layers", "embed_dim", "intermediate_size", "patch_size"):
        assert any(name in note for note in notes)


VISION = {**SIGLIP, "image_size": 896, "intermediate_size": 4304, "num_hidden_layers": 27}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("image_size", "abc", "must be a whole number, got 'abc'"),
        ("image_size", 0, "must be at least 1 and no more than 65536, got 0"),
        ("image_size", -1, "must be at least 1 and no more than 65536, got -1"),
        ("image_size", 10**9, "must be at least 1 and no more than 65536, got 1000000000"),
        ("image_size", 13, "must be at least patch_size (14), got 13"),
        ("patch_size", 10**9, "must be at least 1 and no more than 1024, got 1000000000"),
        ("hidden_size", 2**39, "must be at least 1 and no more than 1048576, got 549755813888"),
        ("num_hidden_layers", 2**39, "must be at least 1 and no more than 10000, got 549755813888"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "mine.json"])
def test_a_wrong_size_of_images_is_named_as_the_file_names_it(tmp_path, file, key, value, message):
    vision = {**VISION, key: value}
    config = {"model_type": "gemma3", "text_config": TEXT, "vision_config": vision}
    (tmp_path / file).write_text(json.dumps(config))
    with pytest.raises(InvalidValue) as error:
        read_model(tmp_path / file)

    assert str(error.value) == f"{file}: vision_config.{key} {message}"


def test_sizes_of_images_that_are_absent_are_those_of_the_class_and_noted(tmp_path):
    vision = {name: value for name, value in VISION.items() if name != "image_size"}
    config = {"model_type": "gemma3", "text_config": TEXT, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path)

    assert model.encoder.patches_per_item == 64 * 64
    assert any("vision_config.image_size is not given: 896" in note for note in model.notes)


def test_a_conformer_is_counted_by_its_own_layers():
    """304,824,608 in Gemma4AudioModel of transformers, and the projection into the decoder."""
    notes: list[str] = []
    audio = {"model_type": "gemma4_audio", "hidden_size": 1024, "num_hidden_layers": 12}
    config = {
        "model_type": "gemma4",
        "text_config": {"model_type": "llama", **TEXT, "hidden_size": 2560},
        "audio_config": audio,
    }

    facts = decoder_facts(config, "text_config", notes, {})

    assert facts["audio_tower_parameters"] == pytest.approx(308_756_768, rel=0.03)
