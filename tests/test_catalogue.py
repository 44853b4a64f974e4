"""The catalogue: every file loads into its dataclass, and its facts agree with published totals."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvexp import weights
from kvexp.dtypes import DType
from kvexp.hf import ids
from kvexp.request import Gpu, Model
from kvexp.units import GIB
from thinned import thinned

CONF = Path(__file__).parents[1] / "conf"
MODEL_FILES = sorted((CONF / "model").glob("*.yaml"))
GPU_FILES = sorted((CONF / "gpu").glob("*.yaml"))
FACTS = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "data" / "catalogue.yaml"))
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
    "a800_80gb": 79.25,
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
    "jetson_agx_thor": 122.82,
    "quadro_rtx_6000": 21.97,
}


@cache
def load(path, kind):
    merged = OmegaConf.merge(OmegaConf.structured(kind), _file(path))
    return OmegaConf.to_object(merged)


@cache
def given(path):
    return OmegaConf.to_container(_file(path))


@cache
def _file(path):
    return OmegaConf.load(path)


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
        yield from weights.layer_norms(m, m.torch_dtype, index)
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
    assert len(MODEL_FILES) >= 230
    assert len(GPU_FILES) >= 25


@pytest.mark.parametrize("path", MODEL_FILES + GPU_FILES, ids=stems(MODEL_FILES + GPU_FILES))
def test_file_says_what_it_is_and_where_it_was_read(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert lines[: len(header)] == header
    assert "Source: " in " ".join(line.removeprefix("# ") for line in header)
    assert given(path)["source"].strip()


@pytest.mark.parametrize("path", thinned(MODEL_FILES, one_of=5), ids=stems(MODEL_FILES))
def test_model_file_loads_and_states_its_facts(path):
    m = load(path, Model)
    assert isinstance(m, Model)
    assert m.name == path.stem
    assert m.hf_id.count("/") == 1
    assert set(given(path)) >= STATED
    assert m.architecture != "unknown"
    assert m.torch_dtype in (
        (DType.fp32,) if m.name == "whisper_tiny" else (DType.bf16, DType.fp16)
    )
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
    other = m.architecture.endswith("ForConditionalGeneration") or "MiniCPM" in m.architecture
    alone = not m.tower_parameters and not other
    if m.model_type in expected and alone:
        assert m.architecture == expected[m.model_type]
        assert m.attention_bias is (m.model_type in ("qwen2", "gpt_oss"))


@pytest.mark.parametrize("name", FACTS["parameters"])
def test_parameters_equal_the_published_total(name):
    assert parameters(model(name)) == FACTS["parameters"][name]


@pytest.mark.parametrize("name", [*FACTS["parameters"], *FACTS["other_parameters"]])
def test_tensors_add_up_to_the_published_total(name):
    assert held_parameters(model(name)) == (FACTS["parameters"] | FACTS["other_parameters"])[name]


def test_tensors_of_granite_add_up_to_the_published_1_46_billion():
    assert round(held_parameters(model("granite4_h_1b")) / 1e9, 2) == 1.46
    assert round(held_parameters(model("granite4_h_350m")) / 1e6) == 340


@pytest.mark.parametrize("name", FACTS["billions"])
def test_tensors_add_up_to_the_published_billions(name):
    published = FACTS["billions"][name]
    digits = len(str(published).partition(".")[2])

    assert round(held_parameters(model(name)) / 1e9, digits) == published


@pytest.mark.parametrize("name", FACTS["whole_parameters"])
def test_tensors_add_up_to_those_of_the_whole_model(name):
    assert weights.parameters(model(name)) == FACTS["whole_parameters"][name]


@pytest.mark.parametrize("name", FACTS["whole_billions"])
def test_tensors_add_up_to_the_published_billions_with_the_encoder(name):
    published = FACTS["whole_billions"][name]
    digits = len(str(published).partition(".")[2])

    assert round(weights.parameters(model(name)) / 1e9, digits) == published


def test_tensors_of_whisper_add_up_to_the_published_1_54_billion():
    assert round(weights.parameters(model("whisper_large_v3")) / 1e9, 2) == 1.54


def test_every_entry_has_its_cache_stated():
    assert {path.stem for path in MODEL_FILES} == FACTS["kv_bytes_per_token"].keys() | FACTS[
        "layers"
    ].keys()


def test_every_id_belongs_to_one_entry():
    names = [
        name.lower()
        for path in MODEL_FILES
        for name in (given(path)["hf_id"], *given(path).get("aliases", ()))
    ]
    assert len(names) == len(set(names))
    assert ids.index([CONF]).keys() == set(names)


@pytest.mark.parametrize("name", FACTS["layers"])
def test_layers_of_each_kind(name):
    m = model(name)
    assert (
        Counter(m.layer_type(index) for index in range(m.num_hidden_layers))
        == FACTS["layers"][name]
    )


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


@pytest.mark.parametrize("name", FACTS["latent_bytes_per_token"])
def test_latent_bytes_of_a_token(name):
    m = model(name)
    full = sum(m.layer_type(i) == "full_attention" for i in range(m.num_hidden_layers))
    assert m.mla.latent_cache
    assert full * m.mla.latent_size * 2 == FACTS["latent_bytes_per_token"][name]


@pytest.mark.parametrize(
    ("name", "layers"),
    [("deepseek_v2_lite", 26), ("qwen3_30b_a3b", 48), ("gpt_oss_20b", 24), ("llama4_scout", 48)],
)
def test_layers_with_experts(name, layers):
    m = model(name)
    assert sum(m.has_experts(index) for index in range(m.num_hidden_layers)) == layers


@pytest.mark.parametrize("name", FACTS["kv_bytes_per_token"])
def test_kv_bytes_of_a_token(name):
    m = model(name)
    assert (
        2 * m.num_hidden_layers * m.kv_heads * m.head_size * 2 == FACTS["kv_bytes_per_token"][name]
    )


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


LOGGED_CONTEXT_GIB = {  # what is not free at the start, in vLLM's logs
    "a100_80gb": 0.41,
    "b300": 0.61,
    "h100": 0.51,
    "l4": 0.19,
    "l40s": 0.49,
    "mi300x": 0.33,
    "rtx_5090": 0.50,
    "rtx_pro_6000": 0.56,
}


@pytest.mark.parametrize("path", GPU_FILES, ids=stems(GPU_FILES))
def test_a_context_is_that_of_a_log_or_goes_by_multiprocessors(path):
    card, name = load(path, Gpu), path.stem
    if name == "h200" or card.unified_memory:
        assert card.context_bytes == H200_CONTEXT_BYTES
        assert card.context_from == (None if name == "h200" else "h200")
    elif name in LOGGED_CONTEXT_GIB:
        assert card.context_bytes == pytest.approx(LOGGED_CONTEXT_GIB[name] * GIB, abs=1)
        assert card.context_from == "log"
    else:
        model = gpu(card.context_from)
        assert model.context_from == "log"
        share = card.num_sms / model.num_sms if card.num_sms else 1  # AMD's are not counted
        assert card.context_bytes == pytest.approx(share * model.context_bytes, abs=0.006 * GIB)


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


IMAGES = (
    *("Qwen2VL", "Qwen2_5", "Qwen3VL", "Qwen3_5", "Qwen3Omni", "Gemma3For", "Gemma4For"),
    *(
        "DeepseekOCR",
        "DotsOCR",
        "Gemma3n",
        "Glm4v",
        "GlmOcr",
        "InternVL",
        "Kimi",
        "Llama4",
        "Llava",
    ),
    *("HunYuanVL", "MiniCPMV", "Mistral3", "Mllama", "NemotronH_Nano_VL", "PaddleOCR", "Phi3V"),
    *("Phi4MM", "Voxtral", "Whisper"),
)
"""Classes whose images a config.json says, by the rules of `kvexp.hf.images`."""


@pytest.mark.parametrize(
    "name",
    [path.stem for path in MODEL_FILES if given(path)["architecture"].startswith(IMAGES)],
)
def test_a_model_whose_images_are_known_has_its_encoder(name):
    entry = model(name)

    assert (entry.encoder is None) == (entry.tower_parameters == 0)


@pytest.mark.parametrize(
    "name",
    [
        path.stem
        for path in MODEL_FILES
        if given(path)["architecture"].startswith(("Qwen3VL", "Qwen3_5"))
    ],
)
def test_sizes_of_an_encoder_add_up_to_its_parameters(name):
    entry = model(name)
    width, mlp = entry.encoder.hidden_size, entry.encoder.intermediate_size
    layer = 4 * width * width + 2 * width * mlp + 4 * width + mlp + width + 4 * width
    patches = width * entry.encoder.patch_size + width + 2304 * width
    merged, out = 4 * width, entry.hidden_size
    merger = merged * merged + merged + merged * out + out
    total = entry.encoder.num_hidden_layers * layer + patches + 2 * width + merger
    total += entry.encoder.deepstack_layers * (merger + 2 * merged)

    assert total == entry.tower_parameters
