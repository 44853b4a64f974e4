"""The largest item of a config.json, against what vLLM 0.26's own processors made of it.

Tokens are the positions that take embeddings, patches those of the pixels that vLLM's dummy item
had, with the published limits of each processor.
"""

import pytest

from kvexp.hf.decoder import decoder_facts

from .shapes import TEXT

QWEN3 = {**TEXT, "model_type": "qwen3"}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
GRID = [[384, 384 * n] for n in range(1, 11)] + [[768, 1920], [3456, 384], [3840, 384]]
GEMMA4 = {"hidden_size": 768, "intermediate_size": 3072, "pooling_kernel_size": 3}

ITEMS = {  # kind, around the sections, vision_config: tokens, patches, numbers of a patch
    "pixtral": (
        "llava",
        {},
        {"model_type": "pixtral", "image_size": 1024, "patch_size": 16},
        (4096, 4096, 768),
    ),
    "llava 1.5": (
        "llava",
        {"vision_feature_select_strategy": "default"},
        {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
        (576, 577, 588),
    ),
    "granite vision": (
        "llava_next",
        {"image_grid_pinpoints": GRID, "vision_feature_select_strategy": "full"},
        {**SIGLIP, "image_size": 384, "patch_size": 14},
        (8289, 11 * 729, 588),
    ),
    "internvl in transformers' form": (
        "internvl",
        {"downsample_ratio": 0.5},
        {"image_size": [448, 448], "patch_size": [14, 14], "hidden_size": 1024},
        (256, 1025, 588),
    ),
    "glm 4.1v": (
        "glm4v",
        {},
        {"depth": 24, "hidden_size": 1536, "num_heads": 12, "patch_size": 14},
        (6084, 24336, 1176),
    ),
    "qwen3.5": (
        "qwen3_5",
        {},
        {"depth": 27, "hidden_size": 1152, "num_heads": 16, "patch_size": 16},
        (16384, 65536, 1536),
    ),
    "gemma 4": ("gemma4", {}, {**GEMMA4, "patch_size": 16}, (280, 2520, 768)),
    "llava onevision": (
        "llava_onevision",
        {"image_grid_pinpoints": [[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)]},
        {**SIGLIP, "image_size": 384, "patch_size": 14},
        (729 + 81 * 98 + 81, 13 * 729, 588),  # three by four tiles and the whole, unpadded
    ),
    "gemma 4 12b": ("gemma4_unified", {}, {"patch_size": 16}, (280, 280, 6912)),
    "deepseek ocr": (
        "deepseek_vl_v2",
        {"architectures": ["DeepseekOCRForCausalLM"]},
        {"width": {"sam_vit_b": {}, "clip-l-14-224": {}}},
        (693, 64 * 64 + 4 * 40 * 40, 768),
    ),
    "paddleocr-vl": ("paddleocr_vl", {}, {**SIGLIP, "patch_size": 14}, (3600, 14400, 588)),
    "glm-ocr": (
        "glm_ocr",
        {},
        {"depth": 24, "hidden_size": 1024, "num_heads": 16, "patch_size": 14},
        (6084, 24336, 1176),
    ),
    "smolvlm": (
        "idefics3",
        {"scale_factor": 3},
        {**SIGLIP, "image_size": 384, "patch_size": 14},
        (1377, 17 * 729, 588),
    ),
    "lfm2-vl": (
        "lfm2_vl",
        {"downsample_factor": 2},
        {**SIGLIP, "patch_size": 16},
        (256, 1024, 768),
    ),
    "phi-3.5-vision": ("phi3_v", {}, {}, (2653, 17 * 577, 588)),  # its class's known maximum
    "phi-4-multimodal": (
        "phi4mm",
        {},
        {},
        (576 * 16 + 576 + 16 * 17 + 1, 37 * 1024, 588),  # its own sum for a column of 36 tiles
    ),
    "command a vision": (
        "cohere2_vision",
        {"downsample_factor": 2, "alignment_intermediate_size": 36864},
        {**SIGLIP, "image_size": 512, "patch_size": 16},
        (13 * 256, 13 * 1024, 768),
    ),
    "hunyuan ocr": ("hunyuan_vl", {}, {**SIGLIP, "patch_size": 16}, (256 * 17 + 2, 16384, 768)),
    "ovis 2.5": ("ovis2_5", {}, {**SIGLIP, "patch_size": 16}, (3136, 12544, 768)),
    "nemotron nano vl": (
        "NemotronH_Nano_VL_V2",
        {"force_image_size": 512, "downsample_ratio": 0.5},
        {"args": {"model": "vit_huge_patch16_224"}, "patch_size": 16},
        (13 * 256, 13 * 1034, 768),
    ),
}

ITEMS |= {
    "exaone 4.5": (
        "exaone4_5",
        {},
        {"depth": 28, "hidden_size": 2048, "num_heads": 16, "patch_size": 14},
        (16384, 65536, 1176),  # as Qwen2.5-VL's
    ),
    "keye": (  # 35 by 35 of 28 pixels are below its 1,003,520
        "Keye",
        {"architectures": ["KeyeForConditionalGeneration"]},
        {**SIGLIP, "patch_size": 14},
        (1225, 4900, 588),
    ),
    "r-4b": (
        "another",
        {"architectures": ["RForConditionalGeneration"], "image_grid_pinpoints": [[768, 768]]},
        {**SIGLIP, "image_size": 384, "patch_size": 14},
        (4 * 729 + 54 + 729, 5 * 729, 588),
    ),
}

FRAMES = {  # tokens and patches of a frame, and of how many a video of 32768 tokens is
    "internvl in transformers' form": (256, 1025, 128),
    "glm 4.1v": (1, 4, 31974),
    "gemma 4": (78, 630, 32),
    "gemma 4 12b": (78, 70, 32),
    "llava onevision": (196, 729, 32),
    "glm-ocr": (1, 4, 31974),
    "nemotron nano vl": (256, 1034, 128),
}


def encoder_of(name):
    kind, around, vision, _ = ITEMS[name]
    config = {"model_type": kind, **around, "text_config": QWEN3, "vision_config": vision}
    return decoder_facts(config, "text_config", [], {})["encoder"]


@pytest.mark.parametrize("name", ITEMS)
def test_the_largest_image_is_the_one_that_vllm_makes(name):
    found = encoder_of(name)

    assert (found.tokens_per_item, found.patches_per_item, found.patch_size) == ITEMS[name][3]


@pytest.mark.parametrize("name", FRAMES)
def test_a_video_has_the_frames_that_vllm_makes(name):
    found = encoder_of(name)
    tokens, patches, frames = FRAMES[name]

    assert (found.frame_tokens, found.frame_patches) == (tokens, patches)
    assert min(found.video_items, 32768 // tokens) == frames


def test_tiles_of_internvl_have_the_whole_image_beside_them():
    config = {
        "model_type": "internvl_chat",
        "force_image_size": 448,
        "max_dynamic_patch": 12,
        "use_thumbnail": True,
        "downsample_ratio": 0.5,
        "llm_config": {**QWEN3, "model_type": "internlm2"},
        "vision_config": {"hidden_size": 1024, "image_size": 448, "patch_size": 14},
    }

    found = decoder_facts(config, "llm_config", [], {})["encoder"]

    assert (found.tokens_per_item, found.patches_per_item) == (13 * 256, 13 * 1025)
    assert found.video_items == 0  # its vocabulary has no token for them


def test_encoders_of_omni_stand_beside_its_thinkers_language_model():
    vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14}
    thinker = {"text_config": {**QWEN3, "model_type": "qwen2"}, "vision_config": vision}
    config = {"model_type": "qwen2_5_omni", "thinker_config": thinker}

    found = decoder_facts(config, "thinker_config.text_config", [], {})["encoder"]

    assert (found.tokens_per_item, found.patches_per_item) == (16384, 65536)
    assert (found.hidden_size, found.rotary) == (1280, True)


def test_audio_of_qwen3_asr_is_30_seconds_in_windows():
    """13 positions of every hundred frames, by its processor."""
    audio = {"d_model": 1024, "encoder_layers": 24, "encoder_ffn_dim": 4096, "n_window": 50}
    thinker = {"text_config": QWEN3, "audio_config": audio}
    config = {"model_type": "qwen3_asr", "thinker_config": thinker}

    found = decoder_facts(config, "thinker_config.text_config", [], {})["encoder"]

    assert (found.tokens_per_item, found.patches_per_item) == (390, 3000)
    assert (found.tile_patches, found.patch_size, found.convolved_channels) == (100, 128, 480)


def test_several_selected_layers_keep_the_outputs_of_all():
    kind, around, vision, _ = ITEMS["granite vision"]
    around = {**around, "vision_feature_layer": [-24, -20, -12, -1]}
    config = {"model_type": kind, **around, "text_config": QWEN3, "vision_config": vision}

    assert decoder_facts(config, "text_config", [], {})["encoder"].returned_layers == 27


def test_an_unknown_type_has_a_note_and_no_encoder():
    notes: list[str] = []
    config = {"model_type": "another", "text_config": QWEN3, "vision_config": {**SIGLIP}}

    assert decoder_facts(config, "text_config", notes, {})["encoder"] is None
    assert "model_type another: no rule for the size of images" in notes


@pytest.mark.parametrize(("said", "ahead"), [("vision", True), (None, False)])
def test_positions_of_an_item_look_ahead_where_the_text_config_says_so(said, ahead):
    kind, around, vision, _ = ITEMS["gemma 4"]
    text = {**QWEN3, "use_bidirectional_attention": said}
    config = {"model_type": kind, **around, "text_config": text, "vision_config": vision}

    assert decoder_facts(config, "text_config", [], {})["encoder"].looks_ahead is ahead
