"""Images and audio in vLLM's profile run, against what public logs printed as its peak (GiB)."""

import json

import pytest

import kvexp
from thinned import thinned

GIB = 1 << 30
PRINTED = 0.0151 * GIB
ORIN = "gpu=jetson_agx_orin model=qwen25_vl_7b quantization=w4a16 max_model_len=4096"
OMNI = (
    "gpu=rtx_4090_48gb model=qwen3_omni_30b_a3b quantization=gptq engine.version=0.9.3-v0"
    " model.quantization_config.method=gptq model.quantization_config.bits=8"
    " model.quantization_config.group_size=32 max_num_seqs=8 max_model_len=32768"
    " mm.limits.image=3 mm.limits.video=3 mm.limits.audio=3"
)

PEAKS = {  # asked, the peak that a log shows, how near
    "a step too short for the images holds none": (
        "gpu=rtx_3090 model=qwen2_vl_7b engine.version=0.6.6 max_model_len=8192",
        1.16,
        0.06,
    ),
    "the same with adapters on four cards": (
        "gpu=a100_80gb model=qwen25_vl_7b engine.version=0.8.2-v0 tp=4 max_model_len=3072"
        " lora.max_loras=1 lora.max_rank=16",
        0.32,
        0.02,
    ),
    "an image longer than the step on four cards": (
        "gpu=a100_40gb model=qwen25_vl_72b engine.version=0.8.3-v0 tp=4 max_model_len=4096"
        " mm.limits.video=0",
        2.51,
        0.002,
    ),
    "a step that they fill": (
        "gpu=rtx_5090 model=qwen25_vl_3b engine.version=0.7.4 max_model_len=32768",
        4.06,
        0.002,
    ),
    "a video as long as the context": (
        "gpu=rtx_5090 model=qwen25_vl_3b engine.version=0.7.4 max_model_len=128000",
        20.85,  # of the total, when 3040 tokens were left
        0.002,
    ),
    "images longer than the step": (f"{ORIN} engine.version=0.10.0-v0", 4.93, 0.002),
    "an image for each of 128 requests": (
        "gpu=h100 model=llama32_11b_vision engine.version=0.6.6 max_num_seqs=128"
        " max_model_len=65536 enforce_eager=true",
        36.63,
        0.01,
    ),
    "audio of 30 seconds for each of 400 requests": (
        "gpu=rtx_4070_laptop model=whisper_tiny engine.version=0.6.6 kv_dtype=fp8 max_num_seqs=400",
        7.09,
        0.01,
    ),
    "16 images of 13 tiles, by an encoder whose 25 heads 8 ranks do not share": (
        "gpu=l40s model=internvl3_78b engine.version=0.6.6 tp=8 max_model_len=8192"
        " mm.limits.image=16",
        15.73,
        0.002,
    ),
    "three images and three videos of one frame, all longer than the step": (f"{OMNI}", 6.49, 0.1),
    "without videos": (f"{ORIN} engine.version=0.10.0-v0 mm.limits.video=0", 2.47, 0.002),
}


@pytest.mark.parametrize("name", thinned(PEAKS))
def test_the_peak_of_v0_with_images_is_what_the_log_shows(name):
    asked, printed, near = PEAKS[name]
    peak = kvexp.run(asked.split()).profile.activation

    assert peak.size_bytes == pytest.approx(printed * GIB, rel=near)
    low, high = peak.size_bytes - peak.below_bytes, peak.size_bytes + peak.above_bytes
    assert low - PRINTED <= printed * GIB <= high + PRINTED


def test_the_audio_of_400_requests_leaves_no_cache_on_8_gib():
    result = kvexp.run(PEAKS["audio of 30 seconds for each of 400 requests"][0].split())

    assert result.refusal is not None
    assert result.refusal.available_bytes < 0


def test_v0_samples_one_row_a_prompt_of_images():
    asked = ["gpu=h100", "model=qwen25_vl_7b", "engine.version=0.7.3"]
    short, long = (kvexp.run([*asked, f"max_model_len={n}"]) for n in (4096, 128000))

    for result in (short, long):
        assert "max_num_seqs" in result.effective
        assert result.effective["max_num_seqs"] == 256
    sampled = 38 * 256 * 152064
    assert short.profile.activation_bytes < sampled < long.profile.activation_bytes


def test_v1_encodes_its_largest_item_once_where_the_step_is_shorter():
    asked = ["gpu=a10g", "model=qwen25_vl_3b", "engine.version=0.9.2", "max_num_seqs=8"]
    one, more = (
        kvexp.run([*asked, f"max_model_len={n}"]).profile.activation_bytes for n in (8192, 65536)
    )

    assert one < 2.4 * GIB  # a video of two frames is as much as an image
    assert more == pytest.approx(3 * one, rel=0.02)  # three of them stand beside one image


def test_encoders_and_tables_keep_the_base_dtype_beside_experts_of_8_bits():
    assert kvexp.run(OMNI.split()).profile.weights_bytes == pytest.approx(33.06 * GIB, rel=0.001)


def test_tiles_of_five_images_stand_beside_a_step_of_v1():
    asked = "gpu=h100 model=llava16_mistral_7b engine.version=0.10.2 max_model_len=4096"
    result = kvexp.run(f"{asked} max_num_batched_tokens=16384".split())

    assert result.profile.activation_bytes == pytest.approx(1.97 * GIB, rel=0.01)
    assert result.num_blocks * 16 == pytest.approx(451744, rel=0.002)


def test_encoders_may_be_whole_on_each_rank():
    asked = "gpu=h100 model=qwen25_vl_7b engine.version=0.19.0 tp=4"
    split, whole = (
        kvexp.run(f"{asked} engine.mm_encoder_tp_mode={mode}".split()).profile
        for mode in ("weights", "data")
    )

    more = 2 * 676_550_144 * 3 / 4
    assert whole.weights_bytes - split.weights_bytes == pytest.approx(more, abs=4 * 2**20)
    refused = kvexp.run([*asked.split(), "engine.mm_encoder_tp_mode=rows"])
    assert refused.reason == "engine.mm_encoder_tp_mode must be one of weights, data, got 'rows'"


def test_a_profile_may_skip_its_items():
    asked = "gpu=h100 model=qwen25_vl_7b engine.version=0.19.0 enforce_eager=true"
    skipped, without = (
        kvexp.run(f"{asked} {more}".split()).profile.activation_bytes
        for more in ("engine.skip_mm_profiling=true", "mm.limits.image=0 mm.limits.video=0")
    )

    assert skipped == without < kvexp.run(asked.split()).profile.activation_bytes


@pytest.mark.parametrize(
    ("options", "left_out"),
    {
        "the V2 runner": ("", True),
        "the V1 runner": ("engine.v2_model_runner=false", False),
        "the V1 runner, asked not to": (
            "engine.v2_model_runner=false engine.skip_mm_profiling=true",
            True,
        ),
    }.values(),
)
def test_a_profile_without_images_says_what_is_in_no_term(options, left_out):
    result = kvexp.run(f"gpu=l40s model=glm_ocr {options}".split())

    said = [note for note in result.notes if "no image or video through the encoder" in note]
    assert len(said) == left_out
    assert (result.profile.activation_bytes < 2**30) == left_out


@pytest.mark.parametrize("version", ["0.8.5-v0", "0.10.2"])
def test_no_image_passes_where_only_videos_that_are_not_known_may(version):
    asked = f"gpu=l40s model=internvl25_8b engine.version={version} mm.limits.image=0"
    without, neither = (
        kvexp.run(each.split()).profile.activation_bytes
        for each in (asked, f"{asked} mm.limits.video=0")
    )

    assert without == neither


def test_layers_that_feed_the_decoder_have_room_for_a_steps_tokens():
    asked = "gpu=h200 model=qwen3_vl_30b_a3b engine.version=0.11.0"
    small, large = (
        kvexp.run(f"{asked} max_num_batched_tokens={n}".split()).profile.weights_bytes
        for n in (2048, 8192)
    )

    assert large - small == 3 * (8192 - 2048) * 2048 * 2


@pytest.mark.parametrize(
    ("version", "images"),
    [
        ("0.9.2", 2),  # 6000 tokens begin a second image of 3328
        ("0.10.0", 1),
    ],
)
def test_v1_rounds_its_items_down_from_0_10(version, images):
    asked = "gpu=h100 model=internvl3_78b tp=8 enforce_eager=true"
    one, two = (
        kvexp.run(f"{asked} engine.version={version} max_num_batched_tokens={n}".split())
        for n in (3328, 6656)
    )
    asked += f" engine.version={version} max_num_batched_tokens=6000"
    between = kvexp.run(asked.split()).profile.activation_bytes

    expected = (one, two)[images - 1].profile.activation_bytes
    assert between == pytest.approx(expected, rel=0.1)


def test_heads_that_ranks_do_not_share_are_whole_on_each():
    asked = "gpu=l40s model=internvl3_78b engine.version=0.6.6 max_model_len=8192"

    assert kvexp.run(f"{asked} tp=8".split()).profile.weights_bytes == pytest.approx(
        21.67 * GIB, rel=0.003
    )


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        ("gpu=rtx_5090 model=qwen25_vl_3b engine.version=0.7.4", 7.16),
        ("gpu=jetson_agx_orin model=qwen25_vl_7b quantization=awq engine.version=0.10.0-v0", 6.59),
        ("gpu=rtx_4090 model=qwen2_vl_7b engine.version=0.6.6", 15.51),  # 15.5083
        ("gpu=a100_40gb model=qwen25_vl_72b engine.version=0.8.3-v0 tp=4", 34.43),
    ],
)
def test_positions_in_time_have_a_table_four_times_as_long_from_0_7_2(asked, printed):
    assert kvexp.run(asked.split()).profile.weights_bytes == pytest.approx(
        printed * GIB, abs=PRINTED
    )


@pytest.mark.parametrize(("video", "logged", "error"), [(999, 5.26, 0.06), (0, 25.05, 0.005)])
def test_a_long_video_takes_most_of_a_card_in_0_11(video, logged, error):
    """Qwen2.5-VL-3B on an A100 of 40 GB, as vLLM's pull request 25631 prints it."""
    asked = "model=qwen25_vl_3b gpu=a100_40gb engine.version=0.11.0"
    result = kvexp.run([*asked.split(), f"mm.limits={{image:999,video:{video}}}"])

    assert result.budget.available_bytes == pytest.approx(logged * GIB, rel=error)


def test_a_video_of_qwen3_vl_is_kept_as_long_as_its_times_count_in_0_11_and_0_12():
    """Four RTX 3090 whose log reads `encoder cache budget of 153600 tokens` and `1 video items`."""
    asked = "model=qwen3_vl_30b_a3b gpu=rtx_3090 tp=4 engine.flashinfer_sampler=false"
    asked += " max_model_len=65536 max_num_batched_tokens=2048"
    of_0_11, of_0_12, of_0_13, pictured, short = (
        kvexp.run([*asked.split(), *more.split()])
        for more in (
            "engine.version=0.11.0",
            "engine.version=0.12.0",
            "engine.version=0.13.0",
            "engine.version=0.11.0 mm.limits.video=0",
            "engine.version=0.11.0 max_model_len=16199",
        )
    )

    assert of_0_11.budget.available_bytes == pytest.approx(2.31 * GIB, rel=0.03)
    kept = 4 * 2048 * 2  # a row of the output: the hidden size, and as much for each of 3 layers
    peaks = [r.profile.activation_bytes for r in (of_0_11, of_0_12, of_0_13, pictured, short)]
    assert min(peaks[:2]) > kept * 153_600 > peaks[2]
    assert peaks[3] < peaks[2]
    assert peaks[0] - peaks[4] >= kept * (153_600 - 151_250)  # two frames of 12,100 tokens


def test_a_prompt_of_whisper_has_one_audio_whatever_is_asked():
    asked = "gpu=h200 model=whisper_large_v3 engine.version=0.8.5-v0"
    one, many = (
        kvexp.run([*asked.split(), *more]).profile.activation_bytes
        for more in ([], ["mm.limits={audio:16}"])
    )

    assert many == one


def test_a_limit_of_none_is_no_matter_what_a_model_takes():
    asked = "gpu=h200 model=gemma3_4b_vision"

    assert kvexp.run([*asked.split(), "mm.limits={image:1,video:0}"]).ok
    refused = kvexp.run([*asked.split(), "mm.limits={image:1,video:1}"])
    assert refused.reason == "mm.limits.video: gemma3_4b_vision takes image"


@pytest.mark.parametrize(("ranks", "printed"), [(1, 2.92), (2, 2.85)])
def test_the_rotary_table_of_moonvit_is_alive_while_the_sampler_runs(ranks, printed):
    """512 x 512 positions, 36 pairs of fp32 each; Kimi-VL under 0.19, the peak as it prints it."""
    asked = "gpu=h100 model=kimi_vl_a3b engine.version=0.19.0 util=0.95 max_model_len=8192"
    found = kvexp.run([*asked.split(), "max_num_batched_tokens=8192", f"tp={ranks}"])

    assert found.profile.activation_bytes == pytest.approx(printed * GIB, abs=0.0051 * GIB)


def test_a_projection_takes_no_more_than_its_items_and_their_outputs():
    """Three videos of 32 frames in a step of 8192 tokens, as the processor allows them."""
    asked = ["model=gemma4_12b", "gpu=h100", "max_num_batched_tokens=8192", "max_num_seqs=64"]
    asked += ["engine.version=0.22.0", "mm.limits.audio=0"]
    none = kvexp.run([*asked, "mm.limits.image=0", "mm.limits.video=0"])
    videos = kvexp.run([*asked, "mm.limits.image=1", "mm.limits.video=1"])
    held = 96 * (70 * 6912 + 78 * 3840) * 2

    more = videos.profile.activation_bytes - none.profile.activation_bytes
    assert more == pytest.approx(held, rel=0.01)


def test_gemma4_takes_an_item_in_one_step():
    """A start of 0.25.1 on an L40S: 12.75 GiB are 321,600 tokens, 9.81 requests of 32,768."""
    asked = ["model=gemma4_26b_a4b", "gpu=l40s", "max_model_len=32768", "quantization=fp8"]
    asked += ["util=0.92", "engine.version=0.25.1", "engine.kv_cache_memory_bytes=12.75GiB"]
    found = kvexp.run(asked)

    assert found.effective["max_num_batched_tokens"] == 32 * 78
    assert found.max_concurrency == pytest.approx(9.81, abs=0.01)
    assert found.kv_tokens == pytest.approx(321_600, rel=0.001)
    assert kvexp.run([*asked, "gpu=h100"]).effective["max_num_batched_tokens"] == 8192


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        ("model=gemma4_26b_a4b engine.version=0.20.0", 2496),
        ("model=gemma4_31b engine.version=0.26.0 max_num_batched_tokens=2048", 2496),
        ("model=gemma4_31b engine.version=0.20.0 mm.limits.video=0", None),
        ("model=gemma4_e4b engine.version=0.20.0", None),
        ("model=gemma4_26b_a4b engine.version=0.19.0", None),
    ],
)
def test_less_than_an_item_is_refused(overrides, least):
    """`max_tokens_per_mm_item (2496) is larger than max_num_batched_tokens (2048)` of 0.20."""
    found = kvexp.run(["gpu=rtx_a6000", *overrides.split(), "util=0.95", "max_model_len=8192"])

    said = found.reason or ""
    assert (f"must be at least {least}" in said) == (least is not None)


@pytest.mark.parametrize(
    ("model", "version", "printed"),
    [("glm_ocr", "0.17.0", 2.2), ("dots_ocr", "0.10.0", 5.7174)],
)
def test_weights_of_two_that_read_pages(model, version, printed):
    """GLM-OCR's rotary table has four times its positions, as of all with a place in an image."""
    found = kvexp.run([f"model={model}", "gpu=l4", f"engine.version={version}", "util=0.95"])

    assert found.profile.weights_bytes == pytest.approx(printed * GIB, rel=0.001)


V1 = "gpu=h200 enforce_eager=true engine.v2_model_runner=false max_num_seqs=16"
WORKSPACES = 33_554_432 + 1_048_576  # cuBLAS's on an H200

FIGURES = {  # what is alive at the widest point by the class's code, bytes of two
    "deepseek_ocr max_num_batched_tokens=2048": (  # a bias of all pairs in twelve heads of SAM's
        12 * 4096**2 * 2 + 8 * 768 * 4096 * 2,
        2 * (10496 * 768 + 693 * 1280) * 2,  # pixels and outputs of two images
    ),
    "dots_ocr max_num_batched_tokens=2048": (  # queries and keys of an image turned in fp32
        57600 * (20 * 1536 * 2 + 3 * 64 * 4),
        57600 * 588 * 2,
    ),
    "hunyuan_ocr max_num_batched_tokens=8192": (  # one image beside both of its MLP, fp32 positions
        16384 * (4 * 1152 + 2 * 4304) * 2 + 16384 * 1152 * 4,
        16384 * 768 * 2,
    ),
}


@pytest.mark.parametrize("asked", FIGURES)
def test_peak_of_an_encoder_is_what_its_code_keeps(asked):
    layers, held = FIGURES[asked]
    part = kvexp.run(
        ["model=" + asked.split()[0], *V1.split(), asked.split()[1]]
    ).profile.activation

    assert "encoder" in part.reason
    assert part.size_bytes == layers + held + WORKSPACES
    assert part.low_bytes < 0.91 * part.size_bytes  # it was never measured


TEXT = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 4096, "head_dim": 128}
TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8}
TEXT |= {"vocab_size": 4096, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
SIGLIP |= {"num_attention_heads": 16, "image_size": 384, "patch_size": 14}

CONFIGS = {  # class, its encoder, positions and what they hold by the class's code
    "KeyeForConditionalGeneration": (
        "keye",
        SIGLIP,
        4900,  # one image; queries and keys turned in fp32, as PaddleOCR-VL's
        (18 * 1152 * 2 + 3 * 36 * 4 + 8 * 8, 588 * 2),
    ),
    "Exaone4_5_ForConditionalGeneration": (
        "exaone4_5",
        {
            "depth": 28,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_heads": 16,
            "num_key_value_heads": 8,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "window_size": 112,
        },
        2 * 65536,  # a video of two images; the gated MLP is wider than attention of half the keys
        ((3 * 5120 + 3 * 2048) * 2 + 2 * 64 * 4, 1176 * 2),
    ),
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_peak_of_a_config_is_what_its_classs_code_keeps(architecture, tmp_path):
    kind, vision, positions, (layers, pixels) = CONFIGS[architecture]
    config = {"model_type": kind, "architectures": [architecture]}
    config |= {"text_config": TEXT, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["model=hf", f"model.path={tmp_path}", *V1.split(), "max_num_batched_tokens=2048"]
    part = kvexp.run(asked).profile.activation

    assert "encoder" in part.reason
    assert part.size_bytes == positions * (layers + pixels) + WORKSPACES
    assert part.low_bytes < 0.91 * part.size_bytes


def test_a_video_of_keye_is_what_the_length_leaves_beside_its_images(tmp_path):
    """One frame where a request may have any number of images, 16 where it may have one."""
    config = {"model_type": "keye", "architectures": ["KeyeForConditionalGeneration"]}
    config |= {"text_config": TEXT, "vision_config": SIGLIP}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["model=hf", f"model.path={tmp_path}", *V1.split(), "max_num_batched_tokens=2048"]
    many, one = (
        kvexp.run([*asked, *more]).profile.activation_bytes - WORKSPACES
        for more in ([], ["mm.limits={image:1,video:1}"])
    )

    assert one == 16 * many


def items_of(result):
    return [part for part in result.holding.parts if part.name == "items"]


def test_items_under_load_are_what_the_v1_runner_profiles():
    asked = ["gpu=l40s", "model=glm_ocr", "enforce_eager=true"]
    v2, v1 = (kvexp.run([*asked, *more]) for more in ([], ["engine.v2_model_runner=false"]))
    skipped = kvexp.run([*asked, "engine.v2_model_runner=false", "engine.skip_mm_profiling=true"])

    (part,), (other,) = items_of(v2), items_of(skipped)
    assert part.size_bytes == v1.profile.activation_bytes - v2.profile.activation_bytes
    assert other.size_bytes == v1.profile.activation_bytes - skipped.profile.activation_bytes
    assert not items_of(v1)
    assert part.low_bytes == 0  # a load of text
    load = v2.holding.held_under_load_bytes - part.size_bytes
    assert v2.holding.held_at_start_bytes <= load


@pytest.mark.parametrize("more", ["mm.limits={image:0,video:0}", "engine.version=0.27.0"])
def test_no_items_under_load_where_none_pass_or_all_were_profiled(more):
    assert not items_of(kvexp.run(["gpu=l40s", "model=glm_ocr", more]))


def test_a_load_that_fits_without_images_alone_starts():
    """A video as long as the context of 128,000 tokens takes 15 GiB in Qwen2.5-VL's encoder."""
    result = kvexp.run(["gpu=l40s", "model=qwen25_vl_7b", "util=0.95"])

    assert result.ok
    assert result.holding.held_under_load_bytes > result.holding.total_bytes
    assert result.holding.largest_safe_util < 0.7


@pytest.mark.parametrize(
    ("more", "has_items"),
    [
        ("engine.version=0.19.0", True),
        ("engine.version=0.25.0", False),  # the V2 runner's profile has text alone
        ("engine.version=0.27.0", True),
        ("engine.version=0.27.0 mm.limits={image:0}", False),
        ("engine.version=0.27.0 engine.skip_mm_profiling=true", False),
    ],
)
def test_an_encoder_that_is_not_known_widens_a_peak_that_has_items(more, has_items):
    asked = ["model=llama3_8b", "model.uncounted_tower_parameters=1000000", "gpu=h100"]
    peak = kvexp.run([*asked, *more.split()]).profile.activation

    assert (peak.high_bytes - peak.size_bytes > 2 * GIB) is has_items
