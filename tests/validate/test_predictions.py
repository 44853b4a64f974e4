"""What a record's text means, and what is predicted from it."""

from dataclasses import replace

import pytest

from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.hf import ids
from kvexp.registry import config_dirs
from kvexp.validate import models, versions
from kvexp.validate.cards import Cards
from kvexp.validate.case import Inputs
from kvexp.validate.models import Catalogue, Named
from kvexp.validate.predict import predict
from kvexp.validate.prediction import VALUES
from kvexp.validate.request import Known, request_of

GIB = 1 << 30
CATALOGUE = Catalogue(ids.index(config_dirs()))
CARDS = Cards.of(config_dirs())
KNOWN = Known.here()

LLAMA = Inputs(
    id="llama",
    engine="vllm",
    engine_version="0.19.0",
    model="meta-llama/Llama-3.1-8B-Instruct",
    gpu="H100 80GB",
    gpu_total_gib=79.19,
    tp=1,
    pp=1,
    weight_dtype="bfloat16",
    kv_cache_dtype="auto",
    gpu_memory_utilization=0.95,
    max_model_len=8192,
    max_num_batched_tokens=8192,
    max_num_seqs=1024,
    stated=("engine_version", "model", "gpu", "gpu_total_gib", "tp", "weight_dtype"),
    init_free_gib=78.68,
)

IMAGES = Inputs(
    id="images",
    engine="vllm",
    engine_version="0.8.x (V0)",
    model="Qwen2.5-VL-7B",
    gpu="80 GB card (79.33 GiB)",
    gpu_total_gib=79.33,
    num_gpus=4,
    tp=4,
    gpu_memory_utilization=0.9,
    max_model_len=3072,
    other_flags="LoRA enabled",
)


def run_of(inputs):
    named = CATALOGUE.find(inputs.model)
    card = CARDS.find(inputs.gpu, inputs.gpu_total_gib)
    return request_of(inputs, KNOWN, card, named).run


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", Named("llama31_8b")),
        ("DeepSeek-R1 AWQ (671B, moe_wna16_marlin)", Named("deepseek_r1", Quantization.awq)),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", Named("llama33_70b", Quantization.fp8)),
        ("Qwen2.5-0.5B bnb-4bit (inferred)", Named("qwen25_0_5b", Quantization.bitsandbytes)),
        ("Llama-3.2-3B-Instruct-Q8_0.gguf", Named("llama32_3b", gguf="Q8_0")),
        ("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", Named("llama32_3b", gguf="Q4_K_M")),
        ("Qwen3-8B-GGUF", Named("qwen3_8b", gguf="F16")),
        ("Llama-2-7B", Named("llama2_7b")),
        ("Chinese-Alpaca-2 (Llama-2-7B class)", Named("llama2_7b")),
        ("QwQ-32B / Qwen2.5-32B (Qwen2ForCausalLM, 14 shards)", Named("qwq_32b")),
        ("/data/models-hf/Qwen2.5-0.5B/", Named("qwen25_0_5b")),
        ("/hub/models--facebook--opt-125m/snapshots/27dcfa74", Named("opt_125m")),
        ("gemma3_12b_text", Named("gemma3_12b", text_only=True)),
        ("GLM-5 fp8 (DeepSeek-V3.2 style sparse MLA)", Named("glm5", Quantization.fp8)),
        ("58.99 GiB model (name outside excerpt)", None),
        ("/models/qwen/Qwen2___5-3B", Named("qwen25_3b")),
        ("/kaggle/input/models/qwen-lm/qwen-3/transformers/8b/1", Named("qwen3_8b")),
        ("/kaggle/input/gpt-oss-120b/transformers/default/1", Named("gpt_oss_120b")),
        ("train/checkpoints/qwen25-3b-distill-merged", Named("qwen25_3b", within="qwen25-3b")),
        ("Qwen3-235B", Named("qwen3_235b_a22b")),  # without its active parameters
        (
            "models/hf-mattbucci/gemma-4-26B-AWQ",
            Named("gemma4_26b_a4b", Quantization.awq, within="gemma-4-26b"),
        ),
        (
            "huihui-ai/Huihui-gpt-oss-20b-mxfp4-abliterated-v2",
            Named("gpt_oss_20b", Quantization.mxfp4, within="gpt-oss-20b"),
        ),
        (
            "rdtand/Qwen3.6-35B-A3B-PrismaQuant-4.75bit-vllm",
            Named("qwen35_35b_a3b", bits=4.75, within="qwen3.6-35b-a3b"),
        ),
        ("cerebras/Qwen3-Coder-REAP-25B-A3B-FP8", None),  # experts were pruned
        ("Qwen3.5/3.6-35B-A3B NVFP4 class", Named("qwen35_35b_a3b", Quantization.nvfp4)),
        ("Qwen/Qwen2-58B-A14B-Instruct", None),  # no Qwen2.5-7B, for all its letters
        ("someone/Llama-3.1-8B-as-a-13B", None),
    ],
)
def test_a_text_means_an_entry_of_the_catalogue(text, named):
    assert CATALOGUE.find(text) == named


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Qwen/Qwen3-8B", True), ("Qwen3-8B", False), ("A/B class (inferred)", False)],
)
def test_only_an_id_is_an_id(text, expected):
    assert models.is_id(text) is expected


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("awq/moe_wna16", Quantization.awq),
        ("gptq_marlin", Quantization.gptq),
        ("auto_round", Quantization.gptq),
        ("bitsandbytes-4bit", Quantization.bitsandbytes),
        ("compressed-tensors int4", Quantization.w4a16),
        ("modelopt nvfp4", Quantization.nvfp4),
        ("deepseek_v4_fp8", Quantization.fp8),
        ("compressed-tensors", None),
    ],
)
def test_an_engines_name_of_a_format(text, method):
    assert models.format_of(text) is method


@pytest.mark.parametrize(
    ("text", "total_gib", "name"),
    [
        ("H100 80GB", 79.22, "NVIDIA H100 80GB HBM3"),
        ("A100-80GB (79.15 GiB)", 79.15, "NVIDIA A100-SXM4-80GB"),
        ("A100", 39.5, "NVIDIA A100-SXM4-40GB"),
        ("A800-80GB", None, "NVIDIA A800-SXM4-80GB"),
        ("4x 22 GB modded RTX 2080 Ti (21.66 GiB)", 21.66, "NVIDIA GeForce RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 3090Ti", None, "NVIDIA GeForce RTX 3090 Ti"),
        ("8x 44.39 GiB PCIe (L40S)", 44.39, "NVIDIA L40S"),
        (None, 150109880320 / GIB, "NVIDIA H200"),
        ("8 GB laptop GPU", 8.0, "8 GB laptop GPU"),
        ("A800-80G", None, "NVIDIA A800-SXM4-80GB"),
        ("NVIDIA Thor", None, "NVIDIA Thor"),
        ("Jetson AGX Thor 128GB", None, "NVIDIA Thor"),
        ("DGX Spark", None, "NVIDIA GB10"),
        ("NVIDIA L20", None, "NVIDIA L20"),
        ("8x H800", None, "NVIDIA H800 80GB HBM3"),
        ("NVIDIA A10G", None, "NVIDIA A10G"),
        ("RTX 4080 SUPER", None, "NVIDIA GeForce RTX 4080"),
        ("RTX 3060 Ti 8GB", None, "RTX 3060 Ti 8GB"),
        ("RTX 4090 Laptop GPU (16 GB)", None, "RTX 4090 Laptop GPU (16 GB)"),
        ("A30", None, "A30"),
        ("H20 141GB", None, "NVIDIA H20-3e"),
        ("H20-96G", None, "NVIDIA H20"),
        ("RTX 3080 20GB", None, "RTX 3080 20GB"),
        ("4x RTX 3090 24GB, 96 GB in all", None, "NVIDIA GeForce RTX 3090"),
    ],
)
def test_a_text_means_a_card(text, total_gib, name):
    assert CARDS.find(text, total_gib).facts["name"] == name


@pytest.mark.parametrize(
    ("text", "total_gib"),
    [
        ("RTX 3090 (WSL)", 24.0),
        ("RTX 4080, WSL2", 16.0),
        ("RTX 3090", 23.56),
        ("Quadro X 16GB (WSL2)", 16.0),
        ("Quadro X 16GB", 15.76),
    ],
)
def test_under_wsl_a_card_has_its_nominal_size(text, total_gib):
    facts = CARDS.find(text, None).facts
    gib = facts.get("total_printed_gib") or facts["total_bytes"] / GIB

    assert gib == pytest.approx(total_gib)


def test_a_printed_total_keeps_its_rounding_and_an_exact_one_has_none():
    printed = CARDS.find("H100 80GB", 79.22).facts
    exact = CARDS.find("H200", 150109880320 / GIB).facts

    assert (printed["total_bytes"], printed["total_printed_gib"]) == ("79.22GiB", 79.22)
    assert (exact["total_bytes"], exact["total_printed_gib"]) == (150109880320, None)


def test_a_card_that_is_not_known_has_its_size_assumed():
    card = CARDS.find("24 GB-class pair", None)

    assert 23.5 * GIB < card.facts["total_bytes"] < 23.7 * GIB
    assert "24 GB-class pair" in card.assumptions[0]
    assert CARDS.find("AMD Radeon", None) is None
    assert CARDS.find("RTX 3060 Ti", None) is None  # 8 GB, where the one without Ti has 12


@pytest.mark.parametrize(
    ("text", "capability", "expected"),
    [
        ("0.8.5.dev (V1)", 8.0, "0.8.5"),
        ("0.9.x (V0, ROCm)", None, "0.9-v0"),
        ("0.8.5", 7.0, "0.8.5-v0"),  # V1 needs 8.0
        ("0.7.3 (V1)", 9.0, "0.8.0"),
        ("0.6.6.post2.dev (V0)", 8.0, "0.6.6"),
        ("0.11-0.14 (image latest, Jan-Feb 2026)", 9.0, "0.14"),
        ("0.10.2/0.11rc", 9.0, "0.11"),
        ("0.2.5", 8.0, "0.5.0"),
        ("0.11.0 (container 26.0x)", 12.1, "0.11.0"),
        ("0.10.2.dev378+g4d7fe40fc.d20250829 (V1)", 9.0, "0.10.2"),
        ("0.13.0+faa43dbf.nv26.01 (V1)", 12.1, "0.13.0"),
        ("0.20.1rc1.dev16+g7a1eb8ac2 (V1)", 8.9, "0.20.0"),  # 16 commits after it
        ("0.2x (Jul 2026)", 8.6, None),
        ("1Cat-vLLM 1.3.0 fork", 7.0, None),
        ("0.1.dev20073 (Aug 2026)", 12.1, None),
        (None, 8.0, None),
        (None, 7.0, "0.10.1-v0"),  # V1 does not run on it
    ],
)
def test_a_text_means_a_release(text, capability, expected):
    found = versions.find("vllm", text, capability)

    assert found.text == expected
    assert found.text is not None or found.assumptions


@pytest.mark.parametrize(
    ("text", "family"),
    [("0.19.1 (V1)", "0.19"), ("0.8.2 (V0)", "V0"), ("0.6.4", "V0"), ("fork", "unknown")],
)
def test_versions_make_families(text, family):
    assert versions.family("vllm", text) == family


@pytest.mark.parametrize(
    ("text", "first"),
    [("0.8.x (V0)", "0.8.0 (V0)"), ("0.11", "0.11.0"), ("0.8.5", None), ("0.7.4.dev", None)],
)
def test_of_a_release_without_its_patch_the_first_is_known(text, first):
    assert versions.first_patch("vllm", text) == first
    assert versions.first_patch("sglang", text) is None


def test_a_record_becomes_the_request_that_a_user_would_make():
    run = run_of(replace(LLAMA, kv_cache_dtype="fp8", quantization="fp8", tp=2))

    assert (run.util, run.max_model_len, run.tp) == (0.95, 8192, 2)
    assert (run.dtype, run.kv_dtype, run.quantization) == (
        DType.bf16,
        KvDtype.fp8,
        Quantization.fp8,
    )
    assert run.gpu.free_bytes == int(78.68 * GIB)
    assert run.engine.version == "0.19.0"


def test_a_format_that_is_the_checkpoints_own_is_left_to_it():
    assert (
        run_of(replace(LLAMA, model="openai/gpt-oss-20b", quantization="mxfp4")).quantization
        is None
    )
    other = run_of(replace(LLAMA, model="DeepSeek-R1 AWQ", tp=8))
    assert (other.quantization, other.model.quantization_config) == (Quantization.awq, None)


def test_flags_are_options_of_the_engine_where_it_has_them():
    flags = "enable-expert-parallel; decode-context-parallel-size 8; swap-space 0"
    named, card = CATALOGUE.find("moonshotai/Kimi-K2-Thinking"), CARDS.find("H200", None)
    request = request_of(replace(LLAMA, tp=8, other_flags=flags), KNOWN, card, named)

    assert request.run.engine.enable_expert_parallel is True
    assert request.run.engine.decode_context_parallel_size == 8
    assert not [each for each in request.assumptions if each.startswith("other_flags")]


def test_all_cards_are_ranks_where_only_their_number_is_known():
    assert run_of(replace(LLAMA, tp=None, num_gpus=4)).tp == 4


def test_what_the_log_leaves_open_is_listed():
    found = predict(replace(LLAMA, max_num_seqs=None, gpu_total_gib=None))

    assert "max_num_seqs: the engine's default" in found.assumptions
    assert "gpu: h100's total of the catalogue" in found.assumptions


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"weight_dtype": "int4"}, "weight_dtype: no rule for 'int4', the model's own instead"),
        (
            {"weight_dtype": "float32", "stated": ()},
            "weight_dtype: float32 as recorded not used, the model's own",
        ),
        ({"block_size": 32}, "block_size: 32 as recorded not used, the engine's default"),
        ({"engine": "lmdeploy", "block_size": 32}, "block_size: 32 as recorded"),
    ],
)
def test_a_recorded_default_is_used_or_passed_over_in_so_many_words(changes, note):
    assert note in predict(replace(LLAMA, **changes)).assumptions


def test_a_model_known_by_a_name_within_its_own_is_an_assumption():
    inputs = replace(LLAMA, model="someone/tuned-Qwen3-8B-v2")
    card = CARDS.find(inputs.gpu, inputs.gpu_total_gib)
    request = request_of(inputs, KNOWN, card, CATALOGUE.find(inputs.model))

    note = "model: 'someone/tuned-Qwen3-8B-v2' counted as qwen3-8b, which it names"
    assert note in request.assumptions


def test_a_stated_dtype_and_block_size_are_asked_for():
    stated = (*LLAMA.stated, "block_size")
    run = run_of(replace(LLAMA, weight_dtype="float32", block_size=32, stated=stated))

    assert (run.dtype, run.block_size) == (DType.fp32, 32)


@pytest.mark.parametrize(
    "named",
    [
        {"model": "Llama-3.2-3B-Instruct-Q8_0.gguf", "quantization": "gguf"},
        {"model": "unsloth/Llama-3.2-3B-Instruct", "quantization": "gguf (Q8_0)"},
    ],
)
def test_a_gguf_file_takes_what_its_type_packs(named):
    """3.26 GiB of weights and 1,395 blocks in a public log of a laptop's card."""
    inputs = Inputs(
        id="gguf",
        engine="vllm",
        engine_version="0.8.2 (V0)",
        gpu="RTX 4070 Laptop 8GB",
        gpu_total_gib=7.65,
        gpu_memory_utilization=0.9,
        max_model_len=10_000,
        enforce_eager=True,
        **named,
    )
    values = predict(inputs).values

    assert values["weights_bytes"].best == pytest.approx(3.26 * GIB, rel=0.02)
    assert values["num_blocks"].best == pytest.approx(1395, rel=0.01)


def test_a_mixed_format_has_the_bits_of_its_name_and_the_draft_its_layers():
    """21.91 GiB of weights in a public log, of which a DFlash draft's checkpoint is 0.88."""
    inputs = Inputs(
        id="mixed",
        engine="vllm",
        engine_version="0.22.0 (V1)",
        model="rdtand/Qwen3.6-35B-A3B-PrismaQuant-4.75bit-vllm",
        gpu="DGX Spark GB10",
        quantization="compressed-tensors",
        other_flags='speculative_config={"method": "dflash",'
        ' "model": "z-lab/Qwen3.6-35B-A3B-DFlash", "num_spec_tokens": 6}',
    )
    alone = predict(replace(inputs, other_flags=None)).values["weights_bytes"].best
    both = predict(inputs).values["weights_bytes"].best

    assert both == pytest.approx(21.91 * GIB, rel=0.005)
    assert 0.88 * GIB < both - alone < 1.01 * GIB  # with the rotary cache


def test_a_start_is_predicted_with_all_its_values():
    found = predict(LLAMA)

    assert (found.answered, found.outcome) == (True, "ok")
    assert set(found.values) == set(VALUES)
    tokens = found.values["kv_tokens"]
    assert tokens.low < tokens.best < tokens.high  # of the total two digits are known
    assert tokens.best == 16 * found.values["num_blocks"].best


def test_an_estimate_of_graphs_is_known_where_the_engine_subtracts_one():
    at = lambda version: predict(replace(LLAMA, engine_version=version)).values  # noqa: E731

    assert at("0.19.0")["graphs_estimate_bytes"] is None
    assert at("0.22.0")["graphs_estimate_bytes"].best > 0


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"init_free_gib": None, "free_gib": 60.85}, "free_memory_too_low"),
        ({"gpu_memory_utilization": 0.22}, "max_len_too_large"),
        ({"gpu_memory_utilization": 0.1}, "no_cache_blocks"),
    ],
)
def test_a_refusal_is_predicted_by_its_kind(changes, outcome):
    changes = {"max_model_len": 131072, **changes}

    assert predict(replace(LLAMA, **changes)).outcome == outcome


def test_a_length_that_does_not_fit_comes_with_the_longest_that_does():
    found = predict(replace(LLAMA, gpu_memory_utilization=0.25, max_model_len=131072))

    longest = found.values["estimated_max_len"]
    assert found.outcome == "max_len_too_large"
    assert 0 < longest.low < longest.best < 131072


def test_a_length_that_does_not_fit_leaves_the_blocks_that_there_are():
    """A start of 0.19.1 for 256,000 tokens that fitted: 62,496 tokens in 7.15 GiB."""
    qwen = Inputs(
        id="qwen",
        engine="vllm",
        engine_version="0.19.1 (V1)",
        model="Qwen3.5-35B-A3B NVFP4",
        gpu="RTX 5090",
        quantization="nvfp4",
        gpu_memory_utilization=0.85,
        max_model_len=256000,
        stated=("engine_version", "quantization", "gpu_memory_utilization", "max_model_len"),
    )
    found = predict(qwen)
    tokens = found.values["kv_tokens"]

    assert found.outcome == "max_len_too_large"
    assert tokens.low < tokens.best < 62_496 < tokens.high


def test_what_is_missing_has_the_terms_interval():
    """No block fits: what the engine would print is less than nothing, and may be something."""
    found = predict(replace(LLAMA, gpu_memory_utilization=0.2, max_model_len=131072))
    available = found.values["available_kv_bytes"]

    assert found.outcome == "no_cache_blocks"
    assert available.low < available.best < 0
    assert found.values["num_blocks"] is None


def test_v0_prints_its_blocks_before_it_refuses_the_length():
    found = predict(
        replace(
            LLAMA,
            engine_version="0.6.4",
            gpu_memory_utilization=0.4,
            max_model_len=131072,
            init_free_gib=None,
        )
    )

    assert found.outcome == "max_len_too_large"
    assert found.values["kv_tokens"].best == 16 * found.values["num_blocks"].best


def test_too_little_free_memory_needs_no_model():
    found = predict(
        replace(LLAMA, model=None, init_free_gib=None, free_gib=31.44, stated=("engine_version",))
    )

    assert (found.answered, found.outcome) == (True, "free_memory_too_low")
    assert set(found.values.values()) == {None}
    assert predict(replace(LLAMA, model=None, free_gib=79.0)).answered is False


def test_without_a_card_the_common_ones_give_the_bounds():
    found = predict(replace(LLAMA, gpu=None, gpu_total_gib=None, init_free_gib=None))

    assert found.answered
    tokens = found.values["kv_tokens"]
    assert tokens.low < tokens.best / 5 and tokens.best * 1.5 < tokens.high
    weights = found.values["weights_bytes"]
    assert weights == predict(LLAMA).values["weights_bytes"]


def test_a_model_that_no_common_card_holds_has_less_than_nothing_left():
    card = {"gpu": None, "gpu_total_gib": None, "init_free_gib": 177.0}
    found = predict(replace(LLAMA, model="Llama-4-Maverick-17B-128E", **card))

    left = found.values["available_kv_bytes"]
    assert found.outcome == "oom" and left.best < -600e9  # weights of 744 GiB
    assert left.low <= left.best <= left.high


@pytest.mark.parametrize("name", ["free_gib", "init_free_gib"])
def test_a_card_without_a_name_has_room_for_what_was_free(name):
    unnamed = replace(
        LLAMA, gpu=None, gpu_total_gib=None, init_free_gib=None, gpu_memory_utilization=0.5
    )
    found, without = predict(replace(unnamed, **{name: 46.5})), predict(unnamed)

    # an L40S has 44.39 GiB, what is smaller is ruled out as well
    assert "gpu: not known, h100, h200, b200 give low and high" in found.assumptions
    assert found.values["kv_tokens"].best > 5 * without.values["kv_tokens"].best


def test_free_memory_rules_out_a_smaller_size_of_a_card():
    found = predict(replace(LLAMA, gpu="A100", gpu_total_gib=None, init_free_gib=78.68))

    assert "gpu: not known, a100_80gb give low and high" in found.assumptions


def test_more_free_memory_than_any_common_card_has_is_not_answered():
    found = predict(replace(LLAMA, gpu=None, gpu_total_gib=None, init_free_gib=500.0))

    assert found.answered is False
    assert found.reason.endswith("has the 500 GiB that were free")


def test_unstated_patches_and_limits_widen_what_is_left_of_images():
    found = predict(replace(IMAGES, stated=("engine", "gpu_total_gib", "gpu_memory_utilization")))
    patched = predict(replace(IMAGES, engine_version="0.8.2 (V0)"))

    blocks = found.values["num_blocks"]
    assert blocks.low < 307335 <= blocks.high  # logged: a patch that holds no images
    assert patched.values["num_blocks"].best == pytest.approx(307335, rel=0.002)


V4 = replace(
    LLAMA,
    model="deepseek-ai/DeepSeek-V4-Flash",
    engine_version="0.26.0",
    gpu="B200",
    gpu_total_gib=178.35,
    init_free_gib=None,
    tp=4,
)


def test_layers_that_may_have_drafted_widen_what_is_left():
    stated = replace(
        V4, other_flags='--speculative-config {"method":"dspark","num_speculative_tokens":5}'
    )
    found, drafted = predict(V4), predict(stated)

    blocks = found.values["num_blocks"]
    assert blocks.low < drafted.values["num_blocks"].best < blocks.best


def test_a_case_that_says_that_nothing_drafts_is_not_widened_by_what_may_have():
    silent, without = predict(V4), predict(replace(V4, other_flags="MTP off"))

    assert silent.values["num_blocks"].low < without.values["num_blocks"].low


def test_experts_that_alone_are_converted_are_larger():
    converted = predict(replace(V4, model="nvidia/DeepSeek-V4-Flash-NVFP4", quantization="nvfp4"))

    ratio = converted.values["weights_bytes"].best / predict(V4).values["weights_bytes"].best
    assert ratio == pytest.approx(1.05, abs=0.01)


def test_ranks_that_may_have_been_more_widen_what_is_left():
    found, four = predict(replace(V4, tp=None)), predict(V4)

    assert "tp: 1" in found.assumptions
    assert found.values["num_blocks"].high > four.values["num_blocks"].best


def test_a_forks_cache_of_four_bits_is_as_large_as_that_of_eight():
    found = predict(replace(V4, kv_cache_dtype="nvfp4_ds_mla"))

    assert found.values["num_blocks"] == predict(V4).values["num_blocks"]
    assert any("nvfp4_ds_mla counted as fp8_ds_mla" in note for note in found.assumptions)
    other = predict(replace(LLAMA, kv_cache_dtype="nvfp4_ds_mla"))
    assert other.reason == "there are no rules for kv_cache_dtype 'nvfp4_ds_mla'"


def test_a_limit_of_pixels_makes_images_smaller():
    flags = """--mm-processor-kwargs '{"max_pixels": 1003520}'"""

    assert run_of(replace(IMAGES, other_flags=flags)).model.encoder.tokens_per_item == 1280
    found = predict(replace(IMAGES, model="gemma3_4b_vision", other_flags=flags))
    assert any("no rule for" in note and "max_pixels" in note for note in found.assumptions)


def test_a_card_of_a_known_size_is_linked_as_cards_of_that_size_are():
    assert CARDS.find("80 GB card", 79.33).facts["interconnect"] == "nvlink"
    assert "interconnect" not in CARDS.find("80 GB PCIe card", 79.33).facts
    assert "interconnect" not in CARDS.find("some card", 70.0).facts


def test_bytes_that_are_missing_lie_in_their_interval():
    found = predict(replace(LLAMA, gpu_memory_utilization=0.2))

    low, best, high = found.values["available_kv_bytes"]
    assert low <= best < 0 and best <= high


def test_replicas_share_the_experts():
    moe = replace(LLAMA, model="Qwen/Qwen3-30B-A3B", other_flags="--enable-expert-parallel")
    one, four = predict(replace(moe, dp=1)), predict(replace(moe, dp=4))

    weights = [each.values["weights_bytes"].best for each in (one, four)]
    assert weights[1] < 0.35 * weights[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "pegainfer"}, "there are no rules for engine 'pegainfer'"),
        ({"model": "acme/unheard-of"}, "model 'acme/unheard-of' is in no catalogue"),
        ({"model": None}, "no model is named"),
        ({"tp": 3}, "tp must be one of"),
    ],
)
def test_what_cannot_be_answered_says_why(changes, reason):
    found = predict(replace(LLAMA, **changes))

    assert found.answered is False
    assert reason in found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        # as the logs print them: free memory when the cache is sized, and its tokens
        (
            Inputs(
                id="runtime-0.20",
                engine="tensorrt-llm",
                engine_version="0.17-0.20",
                model="meta-llama/Llama-3.1-8B-Instruct (fp8)",
                gpu="RTX 5090",
                gpu_total_gib=31.84,
                kv_cache_dtype="fp8",
                gpu_memory_utilization=0.9,
                block_size=32,
                free_gib=17.83,
            ),
            263008,
        ),
        (
            Inputs(
                id="runtime-0.13",
                engine="tensorrt-llm",
                engine_version="0.13.0.dev2024082000",
                model="Qwen1.5-7B (sft)",
                gpu="40 GB card",
                gpu_total_gib=39.39,
                kv_cache_dtype="float16",
                gpu_memory_utilization=0.9,
                block_size=64,
                free_gib=21.89,
            ),
            631 * 64,
        ),
    ],
    ids=lambda each: getattr(each, "id", ""),
)
def test_stated_free_memory_sizes_the_pool_of_other_engines_within_its_rounding(inputs, tokens):
    found = predict(inputs).values["kv_tokens"]

    assert found.low <= tokens <= found.high
    assert found.high - found.low < 0.002 * tokens


def test_a_card_of_several_sizes_has_the_bounds_of_these():
    found = predict(replace(LLAMA, gpu="A100", gpu_total_gib=None, init_free_gib=None))

    assert CARDS.sizes("A100") == ("a100_40gb", "a100_80gb")
    assert CARDS.sizes("A100-80GB") == ("a100_40gb", "a100_80gb")
    assert "gpu: not known, a100_40gb, a100_80gb give low and high" in found.assumptions
    tokens = found.values["kv_tokens"]
    assert tokens.low < tokens.high / 2


def test_a_card_is_found_without_its_makers_words():
    assert CARDS.find("4090 48 GB", None).facts["name"] == "NVIDIA GeForce RTX 4090"
    assert CARDS.find("A6000", None).facts["name"] == "NVIDIA RTX A6000"


def test_a_card_has_at_least_what_was_free():
    found = predict(replace(LLAMA, engine="sglang", gpu_total_gib=79.1, free_gib=79.3))

    assert found.answered, found.reason
    assert "gpu: at least the 79.3 GiB that were free" in found.assumptions
