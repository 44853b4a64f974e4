"""Formats of weights: how they are read, and what matrices take."""

import json
from pathlib import Path

import pytest

import kvexp
from kvexp import weights
from kvexp.dtypes import DType, Quantization
from kvexp.errors import InvalidValue
from kvexp.formats import format_of, linear, stored_as
from kvexp.request import QuantizationConfig

from .shapes import dense

ROWS, COLUMNS = 4096, 1024
ELEMENTS = ROWS * COLUMNS


def group(bits, kind="int", strategy="group", size=128, **more):
    inner = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": size, **more}
    return {"group_0": {"weights": inner, "targets": ["Linear"]}}


COMPRESSED = "compressed-tensors"
CONFIGS = {
    "fp8_blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "fp8",
        ELEMENTS + 4 * (ROWS // 128) * (COLUMNS // 128),
    ),
    "fp8_tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", ELEMENTS + 4),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "fp8", ELEMENTS + 4 * ROWS),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        "awq",
        ELEMENTS // 2 + 2 * ELEMENTS // 128 + ELEMENTS // 256,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
        "gptq",
        ELEMENTS // 2 + 2 * ELEMENTS // 128,
    ),
    "gptq_act_order": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": True},
        "gptq",
        ELEMENTS + 2 * ROWS + 4 * COLUMNS,
    ),
    "auto_round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True},
        "gptq",
        ELEMENTS // 2 + 2 * ELEMENTS // 128,
    ),
    "w4a16": (
        {"quant_method": COMPRESSED, "format": "pack-quantized", "config_groups": group(4)},
        "w4a16",
        ELEMENTS // 2 + 2 * ELEMENTS // 128,
    ),
    "w8a8": (
        {
            "quant_method": COMPRESSED,
            "format": "int-quantized",
            "config_groups": group(8, strategy="channel", size=None),
        },
        "w8a8",
        ELEMENTS + 4 * ROWS,
    ),
    "fp8_dynamic": (
        {
            "quant_method": COMPRESSED,
            "format": "float-quantized",
            "config_groups": group(8, kind="float", strategy="channel", size=None),
        },
        "fp8",
        ELEMENTS + 4 * ROWS,
    ),
    "mxfp8_modelopt": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        "fp8",
        ELEMENTS + ELEMENTS // 32,
    ),
    "mxfp8_compressed": (
        {
            "quant_method": COMPRESSED,
            "format": "mxfp8-quantized",
            "config_groups": group(8, kind="float", size=32),
        },
        "fp8",
        ELEMENTS + ELEMENTS // 32,
    ),
    "nvfp4_compressed": (
        {
            "quant_method": COMPRESSED,
            "format": "nvfp4-pack-quantized",
            "config_groups": group(4, kind="float", strategy="tensor_group", size=16),
        },
        "nvfp4",
        ELEMENTS // 2 + ELEMENTS // 16 + 8,
    ),
    "nvfp4_modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "nvfp4",
        ELEMENTS // 2 + ELEMENTS // 16 + 8,
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes",
        ELEMENTS // 2 + 4 * ELEMENTS // 64,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_matrix_takes_its_elements_and_scales(name, read):
    config, method, expected = CONFIGS[name]
    model = read(dense("llama", 4, 8, 8, 64, quantization_config=config))
    stored = format_of(model, model.quantization_config.method)

    assert model.quantization_config.method is Quantization[method]
    assert any("weights are stored as" in note for note in model.notes)
    sizes = (t.size_bytes for t in linear("w", ROWS, COLUMNS, DType.bf16, stored))
    assert sum(sizes) == expected


def test_only_the_experts_of_an_mxfp4_checkpoint_are_small(read):
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
    model = read(dense("gpt_oss", 4, 8, 8, 64, quantization_config=config, **more))

    assert (model.moe.format, model.quantization_config) == ("mxfp4", None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "magic"}, "quant_method must be one of"),
        ({"bits": 4}, "quant_method is missing"),
        ({"quant_method": "awq"}, "bits"),
        ({"quant_method": "gptq", "bits": 5}, "2, 3, 4 or 8"),
        ({"quant_method": 4}, "must be a text"),
        ({"quant_method": COMPRESSED, "config_groups": {"g": {}}}, "weights"),
        ({"quant_method": COMPRESSED, "config_groups": group(5)}, "not known"),
        ({"quant_method": "modelopt", "quant_algo": "INT2"}, "quant_algo"),
    ],
)
def test_unknown_formats_are_named(config, message, read):
    with pytest.raises(InvalidValue, match=message):
        read(dense("llama", 4, 8, 8, 64, quantization_config=config))


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.3.mlp.down_proj", "model.layers.3.mlp.down_proj", True),
        ("model.layers.3.mlp.down_proj", "model.layers.33.mlp.down_proj", False),
        ("model.layers.*.self_attn", "model.layers.12.self_attn.q_proj", True),
        ("re:.*self_attn.*", "model.layers.1.self_attn.o_proj", True),
        ("re:[", "x", False),
        ("mlp.down_proj", "model.layers.1.mlp.down_proj", True),
        ("proj", "model.layers.1.mlp.down_proj", False),
    ],
)
def test_lists_of_excluded_modules(pattern, module, expected):
    stored = QuantizationConfig(method=Quantization.fp8, ignore=[pattern])

    assert (stored_as(stored, [module]) is None) is expected


@pytest.mark.parametrize(
    "key", ["ignore", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules"]
)
def test_excluded_modules_keep_the_base_dtype(key, read):
    config = {"quant_method": "fp8", key: ["re:.*mlp.*"] if key == "ignore" else ["mlp"]}
    model = read(dense("llama", 4, 8, 8, 64, quantization_config=config))
    sizes = weights.bytes_by_module(model, Quantization.fp8)
    plain = weights.bytes_by_module(model, None)

    assert sizes["mlp"] == plain["mlp"]
    assert sizes["attention"] < 0.51 * plain["attention"]
    assert sizes["embedding"] == plain["embedding"]
    assert sizes["head"] == plain["head"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_weights_follow_the_requested_dtype_not_the_configs(dtype):
    result = kvexp.run(["model=llama3_8b", "gpu=h200", f"dtype={dtype}", "max_model_len=1024"])
    parameters = 8_030_261_248 * DType[dtype].itemsize_bytes

    assert result.profile.weights_bytes == pytest.approx(parameters, rel=0.002)


def test_the_checkpoints_format_is_the_effective_one_and_another_is_refused(tmp_path):
    config = dense("llama", 4, 8, 8, 64, quantization_config=CONFIGS["awq"][0])
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = ["model=hf", f"model.path={tmp_path}", "gpu=h200"]
    own, other = kvexp.run(base), kvexp.run([*base, "quantization=fp8"])

    assert own.requested["quantization"] is None
    assert own.effective["quantization"] == "awq"
    assert own.effective["kv_dtype"] == "bf16"
    assert "quantization must be null or awq" in other.reason


def test_online_fp8_is_within_a_fifth_of_a_percent_of_the_measured_one():
    data = json.loads((Path(__file__).parents[1] / "data" / "vllm_h200.json").read_text())
    case = next(c for c in data["cases"] if "fp8weights" in c["case"])
    result = kvexp.run([*case["overrides"], "gpu=h200", "engine.version=0.26.0"])

    measured = case["ranks"][0]["weights_bytes"]
    assert result.profile.weights_bytes == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize(
    ("model", "quantization", "gib"),
    [
        ("llama31_8b", "awq", 5.35),
        ("llama31_8b", "w4a16", 5.36),
        ("llama31_8b", "bitsandbytes", 5.65),
        ("llama33_70b", "w8a8", 67.7),
    ],
)
def test_quantised_checkpoints_have_about_the_published_size(model, quantization, gib):
    result = kvexp.run(
        [f"model={model}", "gpu=b300", f"quantization={quantization}", "max_model_len=1024"]
    )

    assert result.profile.weights_bytes / 2**30 == pytest.approx(gib, rel=0.01)
