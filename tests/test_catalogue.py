"""The catalogue: every file loads into its dataclass, and its facts agree with published totals."""

from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvexp import weights
from kvexp.dtypes import DType
from kvexp.request import Gpu, Model
from kvexp.units import GIB

CONF = Path(__file__).parents[1] / "conf"
MODEL_FILES = sorted((CONF / "model").glob("*.yaml"))
GPU_FILES = sorted((CONF / "gpu").glob("*.yaml"))
H200_CONTEXT_BYTES = 552_402_944

# Keys that a model file states even where the default would do.
STATED = {
    "name",
    "hf_id",
    "source",
    "architecture",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "torch_dtype",
    "attention_bias",
}

# Parameters of the published checkpoints, a shared embedding and head counted once.
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "llama33_70b": 70_553_706_496,
    "deepseek_r1_distill_llama_8b": 8_030_261_248,
    "deepseek_r1_distill_llama_70b": 70_553_706_496,
    "qwen25_0_5b": 494_032_768,
    "qwen25_1_5b": 1_543_714_304,
    "qwen25_7b": 7_615_616_512,
    "qwen25_14b": 14_770_033_664,
    "qwen25_32b": 32_763_876_352,
    "qwen25_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "mistral_7b": 7_248_023_552,
    "phi4": 14_659_507_200,
    "phi3_mini": 3_821_079_552,
    "mistral_7b_v01": 7_241_732_096,
}

# The same of models that are not dense decoders alone; without towers for images.
OTHER_PARAMETERS = {
    "gemma3_12b": 11_766_034_176,
    "gpt_oss_20b": 20_914_757_184,
    "deepseek_v2_lite": 15_706_484_224,
    "qwen3_30b_a3b": 30_532_122_624,
    "llama4_scout": 107_769_861_120,
}

# Totals of model cards and papers in billions, to the digits given there.
PUBLISHED_BILLIONS = {
    "mistral_small_31_24b": 23.57,
    "deepseek_r1": 671.0,
    "deepseek_v3": 671.0,
    "llama31_405b": 405.9,
    "mixtral_8x22b": 140.6,
    "mixtral_8x7b": 46.7,
    "gpt_oss_120b": 116.8,
    "qwen3_235b_a22b": 235.1,
    "qwen3_235b_a22b_2507": 235.1,
    "qwen3_30b_a3b_2507": 30.5,
    "minimax_m2": 228.7,
    "minimax_m25": 228.7,
    "mimo_v2_flash": 308.8,
    "nemotron3_nano_30b_a3b": 31.6,
    "gemma3_1b": 1.0,
    "gemma3_4b": 3.9,
    "gemma3_27b": 27.0,
    "gemma2_2b": 2.61,
    "gemma2_9b": 9.24,
    "gemma2_27b": 27.2,
    "gemma_7b": 8.54,
    "falcon_7b": 6.92,
    "falcon_40b": 41.3,
    "codellama_7b": 6.74,
    "codellama_34b": 33.7,
    "tinyllama_1b": 1.1,
    "olmo2_7b": 7.3,
    "phi2": 2.78,
    "phi4_mini": 3.84,
    "qwen25_3b": 3.09,
    "qwen2_7b": 7.62,
    "qwen25_math_1_5b": 1.54,
    "qwq_32b": 32.8,
    "mistral_large_2407": 122.6,
    "smollm2_1_7b": 1.71,
    "stablelm2_1_6b": 1.64,
    "baichuan2_7b": 7.51,
    "internlm2_7b": 7.74,
    "internlm25_7b": 7.74,
    "starcoder2_7b": 7.17,
    "exaone4_32b": 32.0,
    "smollm3_3b": 3.08,
    "granite31_2b": 2.53,
    "granite31_8b": 8.17,
    "opt_125m": 0.125,
    "opt_1_3b": 1.32,
    "opt_6_7b": 6.66,
    "qwen15_7b": 7.72,
    "qwen15_72b": 72.3,
    "jamba15_mini": 51.6,
    "mistral_nemo": 12.2,
}

# Bytes of K and V of one token, all layers, at two bytes an element.
KV_BYTES_PER_TOKEN = {
    "whisper_large_v3": 163_840,
    "mistral_small_31_24b": 163_840,
    "llama2_7b": 524_288,
    "llama2_13b": 819_200,
    "llama2_70b": 327_680,
    "llama3_8b": 131_072,
    "llama3_70b": 327_680,
    "llama31_8b": 131_072,
    "llama31_70b": 327_680,
    "llama32_1b": 32_768,
    "llama32_3b": 114_688,
    "llama33_70b": 327_680,
    "deepseek_r1_distill_llama_8b": 131_072,
    "deepseek_r1_distill_llama_70b": 327_680,
    "qwen25_0_5b": 12_288,
    "qwen25_1_5b": 28_672,
    "qwen25_7b": 57_344,
    "qwen25_14b": 196_608,
    "qwen25_32b": 262_144,
    "qwen25_72b": 327_680,
    "qwen3_0_6b": 114_688,
    "qwen3_1_7b": 114_688,
    "qwen3_4b": 147_456,
    "qwen3_8b": 147_456,
    "qwen3_14b": 163_840,
    "qwen3_32b": 262_144,
    "mistral_7b": 131_072,
    "phi4": 204_800,
    "phi3_mini": 393_216,
    "mistral_7b_v01": 131_072,
    "qwen3_30b_a3b": 98_304,
    "baichuan2_7b": 524_288,
    "codellama_34b": 196_608,
    "codellama_7b": 524_288,
    "falcon_40b": 122_880,
    "falcon_7b": 8_192,
    "gemma_7b": 458_752,
    "granite31_2b": 81_920,
    "granite31_8b": 163_840,
    "internlm25_7b": 131_072,
    "internlm2_7b": 131_072,
    "llama31_405b": 516_096,
    "minimax_m2": 253_952,
    "minimax_m25": 253_952,
    "mistral_large_2407": 360_448,
    "mistral_nemo": 163_840,
    "mixtral_8x22b": 229_376,
    "mixtral_8x7b": 131_072,
    "olmo2_7b": 524_288,
    "opt_125m": 36_864,
    "opt_1_3b": 196_608,
    "opt_6_7b": 524_288,
    "phi2": 327_680,
    "qwen15_72b": 2_621_440,
    "qwen15_7b": 524_288,
    "qwen25_3b": 36_864,
    "qwen25_math_1_5b": 28_672,
    "qwen25_vl_7b": 57_344,
    "qwen2_7b": 57_344,
    "qwen3_235b_a22b": 192_512,
    "qwen3_235b_a22b_2507": 192_512,
    "qwen3_30b_a3b_2507": 98_304,
    "qwen3_vl_30b_a3b": 98_304,
    "qwq_32b": 262_144,
    "smollm2_1_7b": 196_608,
    "smollm3_3b": 73_728,
    "stablelm2_1_6b": 196_608,
    "tinyllama_1b": 22_528,
}

# Layers of each kind.
LAYERS = {
    "gemma4_31b": {"sliding_attention": 50, "full_attention": 10},
    "gemma3_12b": {"sliding_attention": 40, "full_attention": 8},
    "gpt_oss_20b": {"sliding_attention": 12, "full_attention": 12},
    "phi3_mini": {"sliding_attention": 32},
    "mistral_7b_v01": {"sliding_attention": 32},
    "llama4_scout": {"chunked_attention": 36, "full_attention": 12},
    "granite4_h_1b": {"mamba": 36, "full_attention": 4},
    "deepseek_v2_lite": {"full_attention": 27},
    "qwen3_30b_a3b": {"full_attention": 48},
    "deepseek_r1": {"full_attention": 61},
    "deepseek_v3": {"full_attention": 61},
    "deepseek_v32": {"full_attention": 61},
    "exaone4_32b": {"sliding_attention": 48, "full_attention": 16},
    "gemma2_27b": {"sliding_attention": 23, "full_attention": 23},
    "gemma2_2b": {"sliding_attention": 13, "full_attention": 13},
    "gemma2_9b": {"sliding_attention": 21, "full_attention": 21},
    "gemma3_1b": {"sliding_attention": 22, "full_attention": 4},
    "gemma3_27b": {"sliding_attention": 52, "full_attention": 10},
    "gemma3_4b": {"sliding_attention": 29, "full_attention": 5},
    "glm47_flash": {"full_attention": 47},
    "gpt_oss_120b": {"sliding_attention": 18, "full_attention": 18},
    "jamba15_mini": {"mamba": 28, "full_attention": 4},
    "kimi_k2": {"full_attention": 61},
    "kimi_k2_thinking": {"full_attention": 61},
    "llama4_maverick": {"chunked_attention": 36, "full_attention": 12},
    "mimo_v2_flash": {"full_attention": 9, "sliding_attention": 39},
    "nemotron3_nano_30b_a3b": {"mamba": 23, "mlp": 23, "full_attention": 6},
    "phi4_mini": {"sliding_attention": 32},
    "qwen35_27b": {"linear_attention": 48, "full_attention": 16},
    "qwen3_next_80b_a3b": {"linear_attention": 36, "full_attention": 12},
    "starcoder2_7b": {"sliding_attention": 32},
}

# Totals as printed, GiB: what cudaMemGetInfo gives, never the size on the box.
PRINTED_GIB = {
    "h100": 79.19,
    "h100_pcie": 79.11,
    "h100_nvl": 93.02,
    "h20": 95.0,
    "h20_3e": 139.72,
    "b200": 178.35,
    "b300": 267.69,
    "a100_80gb": 79.25,
    "a100_40gb": 39.49,
    "a10g": 22.06,
    "l4": 22.03,
    "l40s": 44.42,
    "t4": 14.56,
    "v100_32gb": 31.74,
    "v100_16gb": 15.77,
    "rtx_3090": 23.56,
    "rtx_4090": 23.52,
    "rtx_5090": 31.37,
    "rtx_pro_6000": 94.97,
    "gb10": 121.63,
    "jetson_agx_orin": 29.96,
}


def load(path, kind):
    merged = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.load(path))
    return OmegaConf.to_object(merged)


def given(path):
    return OmegaConf.to_container(OmegaConf.load(path))


def stems(files):
    return [path.stem for path in files]


def model(name):
    return load(CONF / "model" / f"{name}.yaml", Model)


def gpu(name):
    return load(CONF / "gpu" / f"{name}.yaml", Gpu)


def parameters(m):
    """Weights of a dense decoder: gated MLP, RMS norms, biases on q, k and v only."""
    q_size, kv_size = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    attention = m.hidden_size * (q_size + 2 * kv_size) + q_size * m.hidden_size
    if m.attention_bias:
        attention += q_size + 2 * kv_size
    if m.model_type == "qwen3":
        attention += 2 * m.head_dim
    mlp = 3 * m.hidden_size * m.intermediate_size
    layer = attention + mlp + 2 * m.hidden_size
    vocabulary = m.vocab_size * m.hidden_size * (1 if m.tie_word_embeddings else 2)
    return vocabulary + m.num_hidden_layers * layer + m.hidden_size


def tensors(m):
    """All tensors of a model that one rank holds alone."""
    share = weights.Slice(tp=1, num_layers=m.num_hidden_layers, first_stage=True, last_stage=True)
    yield from weights.embedding(m, share, m.torch_dtype)
    for index in range(m.num_hidden_layers):
        yield from weights.attention(m, share, m.torch_dtype, None, index)
        yield from weights.attention_norms(m, m.torch_dtype, index)
        yield from weights.mlp(m, share, m.torch_dtype, None, index)
        yield from weights.layer_norms(m, m.torch_dtype)
    yield from weights.head(m, share, m.torch_dtype)


def elements(m, tensor):
    """Elements that a checkpoint counts: no padding, no buffers, no scales of packed weights."""
    if tensor.role == "embedding" and tensor.name != "embed_positions":
        return m.vocab_size * m.hidden_size
    if tensor.name == "normalizer" or tensor.name.endswith("_scale"):
        return 0
    packed = tensor.role == "linear" and tensor.itemsize_bytes == 1  # two elements a byte
    return tensor.numel * (2 if packed else 1)


def held_parameters(m):
    return sum(elements(m, tensor) for tensor in tensors(m))


def test_catalogue_is_large_enough():
    assert len(MODEL_FILES) >= 90
    assert len(GPU_FILES) >= 25


@pytest.mark.parametrize("path", MODEL_FILES + GPU_FILES, ids=stems(MODEL_FILES + GPU_FILES))
def test_file_says_what_it_is_and_where_it_was_read(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert lines[: len(header)] == header
    assert "Source: " in " ".join(line.removeprefix("# ") for line in header)
    assert given(path)["source"].strip()


@pytest.mark.parametrize("path", MODEL_FILES, ids=stems(MODEL_FILES))
def test_model_file_loads_and_states_its_facts(path):
    m = load(path, Model)
    assert isinstance(m, Model)
    assert m.name == path.stem
    assert m.hf_id.count("/") == 1
    assert set(given(path)) >= STATED
    assert m.torch_dtype in (DType.bf16, DType.fp16)
    assert m.num_attention_heads % m.num_key_value_heads == 0


@pytest.mark.parametrize("path", MODEL_FILES, ids=stems(MODEL_FILES))
def test_model_architecture_matches_its_type(path):
    m = load(path, Model)
    expected = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    }
    if m.model_type in expected and not m.architecture.endswith("ForConditionalGeneration"):
        assert m.architecture == expected[m.model_type]
        assert m.attention_bias is (m.model_type in ("qwen2", "gpt_oss"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_equal_the_published_total(name):
    assert parameters(model(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", [*PARAMETERS, *OTHER_PARAMETERS])
def test_tensors_add_up_to_the_published_total(name):
    assert held_parameters(model(name)) == (PARAMETERS | OTHER_PARAMETERS)[name]


def test_tensors_of_granite_add_up_to_the_published_1_46_billion():
    assert round(held_parameters(model("granite4_h_1b")) / 1e9, 2) == 1.46


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_tensors_add_up_to_the_published_billions(name):
    published = PUBLISHED_BILLIONS[name]
    digits = len(str(published).partition(".")[2])

    assert round(held_parameters(model(name)) / 1e9, digits) == published


def test_tensors_of_whisper_add_up_to_the_published_1_54_billion():
    assert round(weights.parameters(model("whisper_large_v3")) / 1e9, 2) == 1.54


def test_every_entry_has_its_cache_stated():
    assert {path.stem for path in MODEL_FILES} == KV_BYTES_PER_TOKEN.keys() | LAYERS.keys()


def test_every_id_belongs_to_one_entry():
    ids = [
        name.lower()
        for path in MODEL_FILES
        for name in (given(path)["hf_id"], *given(path).get("aliases", ()))
    ]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_each_kind(name):
    m = model(name)
    assert Counter(m.layer_type(index) for index in range(m.num_hidden_layers)) == LAYERS[name]


@pytest.mark.parametrize(
    ("name", "window"),
    [("gemma3_12b", 1024), ("gpt_oss_20b", 128), ("phi3_mini", 2047), ("mistral_7b_v01", 4096)],
)
def test_window_of_the_sliding_layers(name, window):
    assert model(name).sliding_window == window


def test_chunk_of_the_chunked_layers():
    assert model("llama4_scout").attention_chunk_size == 8192


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gemma3_12b", range(5, 48, 6)),
        ("gpt_oss_20b", range(1, 24, 2)),
        ("llama4_scout", range(3, 48, 4)),
        ("granite4_h_1b", range(5, 40, 10)),
    ],
)
def test_places_of_the_full_layers(name, layers):
    m = model(name)
    full = [i for i in range(m.num_hidden_layers) if m.layer_type(i) == "full_attention"]
    assert full == list(layers)


def test_deepseek_caches_one_latent_a_token_and_layer():
    m = model("deepseek_v2_lite")
    assert m.mla.latent_size == 576
    assert m.num_hidden_layers * m.mla.latent_size * 2 == 31_104


@pytest.mark.parametrize(
    ("name", "layers"),
    [("deepseek_v2_lite", 26), ("qwen3_30b_a3b", 48), ("gpt_oss_20b", 24), ("llama4_scout", 48)],
)
def test_layers_with_experts(name, layers):
    m = model(name)
    assert sum(m.has_experts(index) for index in range(m.num_hidden_layers)) == layers


@pytest.mark.parametrize("name", KV_BYTES_PER_TOKEN)
def test_kv_bytes_of_a_token(name):
    m = model(name)
    assert 2 * m.num_hidden_layers * m.kv_heads * m.head_size * 2 == KV_BYTES_PER_TOKEN[name]


@pytest.mark.parametrize("name", ["llama2_7b", "llama2_13b", "llama2_70b"])
def test_llama2_checkpoints_are_fp16(name):
    assert model(name).torch_dtype is DType.fp16


@pytest.mark.parametrize(
    ("name", "factor"),
    [("llama31_8b", 8.0), ("llama31_70b", 8.0), ("llama32_1b", 32.0), ("llama33_70b", 8.0)],
)
def test_long_llamas_scale_their_rope(name, factor):
    m = model(name)
    assert m.max_position_embeddings == 131_072
    assert m.rope_scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("path", GPU_FILES, ids=stems(GPU_FILES))
def test_gpu_file_loads_and_says_how_its_total_is_known(path):
    card = load(path, Gpu)
    assert isinstance(card, Gpu)
    keys = given(path)
    printed = card.total_printed_gib
    if printed is None:
        assert isinstance(keys["total_bytes"], int)
        assert card.total_error_bytes == 0
    else:
        assert round(printed, 2) == printed
        assert card.total_bytes == int(round(printed * 100) * GIB // 100)
        assert card.total_error_bytes == int(GIB * 0.005)
        assert not printed.is_integer() or path.stem == "h20"  # a round figure is a data sheet's
    assert isinstance(keys.get("compute_capability", ""), str)


@pytest.mark.parametrize("path", GPU_FILES, ids=stems(GPU_FILES))
def test_gpu_context_is_measured_on_the_h200_only(path):
    card = load(path, Gpu)
    assert card.context_bytes == H200_CONTEXT_BYTES
    assert card.context_from == (None if path.stem == "h200" else "h200")


@pytest.mark.parametrize("name", PRINTED_GIB)
def test_printed_total(name):
    assert gpu(name).total_printed_gib == PRINTED_GIB[name]


def test_h200_total_is_exact():
    card = gpu("h200")
    assert card.total_bytes == 150_109_880_320
    assert card.total_printed_gib is None


@pytest.mark.parametrize("name", ["a100_80gb", "a100_40gb"])
def test_a100_carries_the_name_that_engines_look_for(name):
    assert "a100" in gpu(name).name.lower()
