"""What vLLM's releases chose by themselves, as their wheels say it."""

import pytest

import kvexp
from kvexp_vllm import rules
from thinned import thinned

LLAMA = "model=llama31_8b"
SHORT = ("max_model_len=512",)

BATCHES = {  # of the API server unless `usage` says otherwise: (tokens of a step, requests)
    "0.5.1 takes a whole prompt": ("0.5.1", "a40", "", (131072, 256)),
    "0.5.3 splits long prompts": ("0.5.3", "a40", "", (512, 256)),
    "but not up to 32768": ("0.5.3", "a40", "max_model_len=32768", (32768, 256)),
    "0.6.4 too": ("0.6.4", "a100_80gb", "", (512, 256)),
    "0.6.5 into larger parts": ("0.6.5", "a40", "", (2048, 256)),
    "a short prompt": ("0.7.3", "h100", "max_model_len=1024", (2048, 256)),
    "0.8 with adapters": (
        "0.8.5-v0",
        "h100",
        "lora.max_loras=1 lora.max_rank=8 max_model_len=40000",
        (40000, 256),
    ),
    "V0 of 0.8 holds more than all requests": (
        "0.8.5-v0",
        "a40",
        "max_num_seqs=2 max_model_len=512",
        (2048, 2),
    ),
    "V0 of 0.9 does not": ("0.9.0-v0", "a40", "max_num_seqs=2 max_model_len=512", (1024, 2)),
    "V1 of 0.8.3, any card": ("0.8.3", "a40", "", (2048, 1024)),
    "V1 of 0.8.3, H100": ("0.8.3", "h100", "", (8192, 1024)),
    "0.8.4, H100 by name": ("0.8.4", "h100_nvl", "", (8192, 1024)),
    "0.8.4, B200 by name": ("0.8.4", "b200", "", (2048, 256)),
    "0.8.5, A100 by memory": ("0.8.5", "a100_80gb", "", (8192, 1024)),
    "0.8.5 in the LLM class": ("0.8.5", "a100_80gb", "engine.usage=llm", (16384, 1024)),
    "two numbers mean the last": ("0.8", "a100_80gb", "", (8192, 1024)),
    "0.9 leaves the A100 out": ("0.9.0", "a100_80gb", "", (2048, 256)),
    "0.9, MI300X": ("0.9.0", "mi300x", "", (8192, 1024)),
    "0.9 holds more than all requests": (
        "0.9.2",
        "a40",
        "max_num_seqs=2 max_model_len=512",
        (2048, 2),
    ),
    "0.10.1, fewer tokens than requests": (
        "0.10.1",
        "h100",
        "max_num_batched_tokens=512",
        (512, 512),
    ),
    "0.12 does not": ("0.12.0", "a40", "max_num_seqs=2 max_model_len=512", (1024, 2)),
    "twice as much for throughput": (
        "0.26.0",
        "h200",
        "engine.performance_mode=throughput",
        (16384, 2048),
    ),
    "of what is not given": (
        "0.26.0",
        "h200",
        "engine.performance_mode=throughput max_num_seqs=64",
        (16384, 64),
    ),
    "0.27, B200": ("0.27.0", "b200", "", (8192, 1024)),
    "0.28, B200": ("0.28.0", "b200", "", (16384, 1024)),
    "0.13, GB10": ("0.13.0", "gb10", "", (2048, 256)),
    "0.33, GB10": ("0.33.0", "gb10", "", (2048, 256)),
    "0.28, H200": ("0.28.0", "h200", "", (8192, 1024)),
}


@pytest.mark.parametrize("name", thinned(BATCHES))
def test_tokens_and_requests_of_a_step_are_those_of_the_release(name):
    version, gpu, asked, expected = BATCHES[name]
    effective = kvexp.run(
        [LLAMA, f"gpu={gpu}", f"engine.version='{version}'", *asked.split()]
    ).effective

    assert (effective["max_num_batched_tokens"], effective["max_num_seqs"]) == expected


def test_v0_takes_at_least_5120_tokens_with_images_and_splits_none_of_their_prompts():
    asked = ["model=qwen25_vl_3b", "gpu=h100", "engine.version=0.7.3"]
    short, long = (kvexp.run([*asked, f"max_model_len={n}"]).effective for n in (4096, 100000))

    assert short["max_num_batched_tokens"] == 5120
    assert long["max_num_batched_tokens"] == 100000


CHUNKS = {  # version, options, tokens of a step: arg_utils.py and SchedulerConfig
    "V0 splits when asked": ("0.6.4", "max_model_len=4096 engine.enable_chunked_prefill=true", 512),
    "V0 from 0.6.5": ("0.7.3", "max_model_len=4096 engine.enable_chunked_prefill=true", 2048),
    "0.5.1 splits only when asked": (
        "0.5.1",
        "max_model_len=65536 engine.enable_chunked_prefill=true",
        512,
    ),
    "V0 leaves long prompts whole": (
        "0.8.5-v0",
        "max_model_len=65536 engine.enable_chunked_prefill=false",
        65536,
    ),
    "V1 heeds it from 0.12": (
        "0.12.0",
        "max_model_len=65536 engine.enable_chunked_prefill=false",
        65536,
    ),
    "V1 keeps its default for short ones": (
        "0.26.0",
        "max_model_len=4096 engine.enable_chunked_prefill=false",
        8192,
    ),
    "V1 did not heed it": (
        "0.11.0",
        "max_model_len=65536 engine.enable_chunked_prefill=false",
        8192,
    ),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_prompts_that_are_not_split_make_a_step_longer(name):
    version, asked, tokens = CHUNKS[name]
    effective = kvexp.run(
        [LLAMA, "gpu=h100", f"engine.version={version}", *asked.split()]
    ).effective

    assert effective["max_num_batched_tokens"] == tokens
    flag = "--enable-chunked-prefill" if asked.endswith("true") else "--no-enable-chunked-prefill"
    assert flag in effective["flags"].split()


def test_the_switch_took_its_value_before_0_8_5():
    asked = [LLAMA, "gpu=h100", "engine.version=0.7.3", "engine.enable_chunked_prefill=false"]

    assert "--enable-chunked-prefill=False" in kvexp.run(asked).effective["flags"].split()


def test_a_step_shorter_than_a_prompt_that_is_not_split_is_refused():
    asked = ["engine.enable_chunked_prefill=false", "max_model_len=8192"]
    refused = kvexp.run([LLAMA, "gpu=h100", *asked, "max_num_batched_tokens=4096"])

    assert "must be at least max_model_len (8192)" in refused.reason


def test_v0_splits_no_prompt_of_latent_attention_from_0_8_on():
    asked = ["model=deepseek_v2_lite", "gpu=h200", "max_model_len=65536"]
    tokens = {
        version: kvexp.run([*asked, f"engine.version={version}"]).effective[
            "max_num_batched_tokens"
        ]
        for version in ("0.7.3", "0.8.5-v0")
    }

    assert tokens == {"0.7.3": 2048, "0.8.5-v0": 65536}


def test_before_0_10_1_fewer_tokens_than_the_default_of_requests_are_refused():
    refused = kvexp.run([LLAMA, "gpu=h100", "engine.version=0.10.0", "max_num_batched_tokens=512"])

    assert "max_num_batched_tokens must be at least max_num_seqs (1024), got 512" in refused.reason


def test_the_share_and_the_graphs_changed_with_0_20():
    asked = [LLAMA, "gpu=h100"]
    before, after = (kvexp.run([*asked, f"engine.version={v}"]) for v in ("0.19.1", "'0.20.0'"))

    assert (before.effective["util"], after.effective["util"]) == (0.9, 0.92)
    assert before.profile.cudagraph_bytes == 0 < after.profile.cudagraph_bytes


def test_0_9_0_charges_the_whole_device_and_checks_no_free_memory_and_0_9_1_does():
    asked = ["gpu=rtx_3090", "model=opt_125m", "gpu.free_bytes=10GiB"]
    before, after = (kvexp.run([*asked, f"engine.version={v}"]) for v in ("0.9.0", "0.9.1"))

    assert "included" in before.profile.non_torch.reason
    assert after.reason.startswith("10.00 GiB of")


RUNNERS = {  # V2's estimate of graphs was nothing before 0.29
    "the list of 0.22": ("0.22.0", "qwen3_8b", True),
    "is short": ("0.22.0", "llama31_8b", False),
    "longer in 0.23": ("0.23.0", "llama31_8b", True),
    "nothing quantised in 0.23": ("0.23.0", "llama31_8b quantization=fp8", False),
    "quantised too in 0.24": ("0.24.0", "llama31_8b quantization=fp8", True),
    "another dense model in 0.24": ("0.24.0", "qwen25_7b", False),
    "in 0.25": ("0.25.0", "qwen25_7b", True),
    "experts in 0.28": ("0.28.0", "qwen3_30b_a3b", False),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_the_v2_runner_runs_what_the_release_lists(name):
    version, model, v2_runner = RUNNERS[name]
    graphs = kvexp.run(
        [*f"model={model}".split(), "gpu=h100", f"engine.version={version}"]
    ).profile.cudagraph

    assert ("V2 model runner" in graphs.reason) == v2_runner
    assert (graphs.size_bytes == 0) == v2_runner


def test_from_0_29_every_model_runs_on_the_v2_runner_and_its_graphs_are_estimated():
    for model in ("llama31_8b", "qwen3_30b_a3b"):
        profile = kvexp.run([f"model={model}", "gpu=h100", "engine.version=0.29.0"]).profile
        assert profile.cudagraph_bytes > 0


def test_latent_attention_was_cached_as_padded_heads_before_0_7_1():
    asked = ["model=deepseek_v2_lite", "gpu=h100", "tp=2", "max_model_len=4096"]
    elements = {
        version: kvexp.run([*asked, f"engine.version={version}"]).block_bytes // (16 * 27 * 2)
        for version in ("0.5.4", "0.6.6", "0.7.0", "0.7.1")
    }

    padded, query = 2 * 8 * 256, 2 * 8 * (128 + 64)  # K and V of eight heads
    assert elements == {"0.5.4": padded, "0.6.6": padded, "0.7.0": query, "0.7.1": 512 + 64}


@pytest.mark.parametrize(
    ("version", "gib"),
    # 5.3541 GiB in a log of unsloth/meta-llama-3.1-8b-instruct-bnb-4bit under 0.7.2: the fp32
    # scales of 109,051,904 groups of 64 are a byte each and fp32 for every 256 of them
    [
        ("0.7.2", 5.3541),
        ("0.9.1", 5.3541),
        ("0.9.2", 5.3541 + 109_051_904 * (3 - 1 / 64) / 2**30),
    ],
)
def test_scales_of_bitsandbytes_stay_quantised_before_092(version, gib):
    found = kvexp.run(
        [LLAMA, "gpu=t4", "quantization=bitsandbytes", f"engine.version={version}", *SHORT]
    )

    assert found.profile.weights_bytes / 2**30 == pytest.approx(gib, rel=0.002)


@pytest.mark.parametrize(
    ("version", "entry"), [("0.7.1", 1152), ("0.7.2", 1280), ("0.7.3", 1280), ("0.8.5-v0", 1152)]
)
def test_latent_vectors_started_at_256_bytes_in_072_and_073(version, entry):
    """14.96 GiB were 29,055 blocks of 27 layers under 0.7.2."""
    asked = ["model=deepseek_v2_lite", "gpu=l40s", f"engine.version={version}", *SHORT]
    found = kvexp.run(asked)

    assert found.block_bytes == 27 * 16 * entry


@pytest.mark.parametrize(
    ("asked", "has_zeros"),
    [  # the least compute capability of `gptq_marlin.py` is 8.0, from 0.14 on 7.5
        ("engine.version=0.7.3 gpu=t4", True),
        ("engine.version=0.7.3 gpu=a40", False),
        ("engine.version=0.13.0 gpu=t4", True),
        ("engine.version=0.14.0 gpu=t4", False),
        ("engine.version=0.14.0 gpu=v100_16gb", True),
    ],
)
def test_zero_points_stay_where_exllama_reads_them(asked, has_zeros):
    gptq = [LLAMA, "quantization=gptq", *SHORT]
    marlin = kvexp.run([*gptq, "engine.version=0.7.3", "gpu=a100_40gb"]).profile.weights_bytes
    found = kvexp.run([*gptq, *asked.split()]).profile.weights_bytes

    elements = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert found - marlin == pytest.approx(has_zeros * elements // 128 // 2, abs=1 << 20)


@pytest.mark.parametrize(("version", "bits"), [("0.18.1", 4), ("0.19.0", 16)])
def test_zero_points_of_awq_are_unpacked_on_hopper_from_019(version, bits):
    """0.19 `awq_marlin.py` hands its weights to the kernels of mixed precision, Machete."""
    awq = [LLAMA, "quantization=awq", f"engine.version={version}", *SHORT]
    hopper, ada = (
        kvexp.run([*awq, f"gpu={gpu}"]).profile.weights_bytes for gpu in ("h100", "l40s")
    )

    elements = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert hopper - ada == pytest.approx(elements // 128 * (bits - 4) // 8, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "tp", "rows"),
    [("rtx_5080", 2, 1024 - 928), ("gb10", 1, 1920 - 1856), ("l40s", 2, 0)],
)
def test_rows_of_experts_without_a_gate_are_filled_up_in_nvfp4(gpu, tp, rows):
    """A rank of two RTX 5080 took 9.83 GiB under 0.13, some layers of its checkpoint in BF16."""
    nano = ["model=nemotron3_nano_30b_a3b", "quantization=nvfp4", "kv_dtype=fp8", *SHORT]
    nano += ["engine.version=0.13.0", f"tp={tp}"]
    found, plain = (
        kvexp.run([*nano, f"gpu={each}"]).profile.weights_bytes for each in (gpu, "h100")
    )

    assert found - plain == pytest.approx(23 * 128 * 2 * rows * 2688 * 9 / 16, abs=1 << 20)
    assert tp == 1 or not rows or found == pytest.approx(9.83 * (1 << 30), rel=0.02)


@pytest.mark.parametrize(
    ("asked", "rounded", "printed"),
    [
        ("model=qwen25_14b gpu=gb10 engine.version=0.13.0 quantization=fp8", 15.38, 15.2227),
        (
            "model=qwen35_27b gpu=rtx_5090 engine.version=0.20.0 quantization=nvfp4"
            " mm.limits.image=0 mm.limits.video=0",
            17.76,
            17.62,
        ),
    ],
)
def test_expandable_segments_take_no_more_than_the_tensors(asked, rounded, printed):
    """The second log states the variable; the first one's figure is the sum of its tensors."""
    found = [
        kvexp.run(
            [*asked.split(), *SHORT, "enforce_eager=true", f"engine.expandable_segments={each}"]
        )
        for each in ("false", "true")
    ]

    sizes = [each.profile.weights_bytes / (1 << 30) for each in found]
    assert sizes == [pytest.approx(rounded, abs=0.006), pytest.approx(printed, abs=0.009)]


def test_embeddings_have_no_head_and_no_sampler():
    """A log of Qwen3-Embedding-8B under 0.22 prints 14.11 GiB of weights and graphs of pieces."""
    asked = ["model=qwen3_embedding_8b", "gpu=rtx_pro_6000", "engine.version=0.22.0", *SHORT]
    found, text = (kvexp.run([*asked, f"engine.runner={each}"]) for each in ("pooling", "auto"))

    assert found.profile.weights_bytes == pytest.approx(14.11 * (1 << 30), rel=0.0005)
    head = text.profile.weights_bytes - found.profile.weights_bytes
    assert head == pytest.approx(2 * 151_680 * 4096, abs=2 << 20)
    assert found.profile.activation.reason.startswith("peak of the forward")
    newer = kvexp.run([*asked, "engine.version=0.33.0", "engine.runner=pooling"]).profile
    assert newer.weights_bytes == pytest.approx(found.profile.weights_bytes, rel=0.001)


def test_every_column_is_that_of_its_first_release():
    columns = [each for each in vars(rules).values() if isinstance(each, rules.VersionRules)]

    for column in columns:
        version = ".".join(map(str, column.first)) + (".0" if len(column.first) == 2 else "")
        engine = "-v0" if column.is_v0 and column.first >= (0, 8) else ""
        assert rules.version_rules(version + engine) is column


@pytest.mark.parametrize("version", ["0.6.6", "0.7.2", "0.8.0-v0"])
def test_adapters_are_charged_but_from_065_to_07(version):
    """0.7.2 on a T4 loads 5.3541 GiB; room of rank 32 is made after that, and in no term."""
    bnb = [LLAMA, "gpu=t4", "quantization=bitsandbytes", f"engine.version={version}", *SHORT]
    result = kvexp.run([*bnb, "lora.max_loras=1", "lora.max_rank=32"])
    beyond = [part.size_bytes for part in result.holding.parts if part.name == "lora"]

    inputs_and_outputs = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    least = 32 * inputs_and_outputs * 32 * 2  # layers, rank, bytes; the head has some too
    if version < "0.8":
        assert result.profile.weights_bytes / 2**30 == pytest.approx(5.3541, rel=0.0005)
        assert least < beyond[0] < 1.2 * least
    else:
        assert result.profile.weights_bytes > 5.3541 * 2**30 + least
        assert not beyond


def test_bitsandbytes_takes_the_matrices_of_an_encoder_too():
    """2.5988 GiB in a log of Qwen2.5-VL-3B with an adapter under 0.9.2: the merger's too."""
    asked = ["model=qwen25_vl_3b", "gpu=rtx_4090", "quantization=bitsandbytes", *SHORT]
    asked += ["lora.max_loras=1", "lora.max_rank=16", "engine.version=0.9.2"]
    part = kvexp.run(asked).ranks[0].budget.part("weights")

    merger = (5120 * 5120 + 5120 * 2048) * (2 - 0.5 - 4 / 64)
    assert part.size_bytes - merger == pytest.approx(2.5988 * 2**30, rel=0.003)
    assert part.low_bytes <= 2.5988 * 2**30


CARDS = {  # card, format, release, from which compute capability on
    "awq on Volta": ("v100_32gb", "quantization=awq", "0.26.0", "awq weights from", 7.5),
    "Marlin's from Ampere on": ("t4", "quantization=fp8", "0.13.0", "fp8 weights from", 8.0),
    "and from 0.14 on Turing": ("t4", "quantization=fp8", "0.14.0", None, None),
    "experts in mxfp4": ("v100_32gb", "model=gpt_oss_20b", "0.26.0", "mxfp4 weights from", 8.0),
    "gptq on Volta": ("v100_32gb", "quantization=gptq", "0.26.0", None, None),
    "no wheel for Pascal": ("p100_16gb", "tp=2", "0.6.3", "models from", 7.0),
    "no capability on AMD": ("mi300x", "quantization=awq", "0.26.0", None, None),
}


@pytest.mark.parametrize("name", CARDS)
def test_weights_that_no_wheel_takes_on_a_card_are_named(name):
    """vLLM: `get_min_capability` of each format; vllm-project/vllm#4202 has the refusal of awq."""
    card, override, version, what, least = CARDS[name]
    result = kvexp.run(["model=llama3_8b", override, f"gpu={card}", f"engine.version={version}"])

    said = [note for note in result.notes if "compute capability" in note]
    assert len(said) == (what is not None)
    assert all(f"takes {what} compute capability {least} on" in note for note in said)


@pytest.mark.parametrize(
    ("card", "batch"), [("a100_80gb", (2048, 256)), ("a800_80gb", (8192, 1024))]
)
def test_an_a800_is_no_a100_by_its_name(card, batch):
    """Four A800 (0.13.0rc2) have 9.38 GiB for MiniMax-M2's cache; with an A100's steps 14.1."""
    asked = ["model=minimax_m2", "tp=4", "engine.version=0.13.0", "max_model_len=8192"]
    result = kvexp.run([*asked, f"gpu={card}"])

    effective = result.effective
    assert (effective["max_num_batched_tokens"], effective["max_num_seqs"]) == batch
    if card == "a800_80gb":
        assert result.budget.available_bytes / 2**30 == pytest.approx(9.38, rel=0.005)


DTYPES = {  # model, card, asked for, release: the dtype that is used
    "no bf16 on Turing": (("gemma3_12b", "t4", "auto", "0.26.0"), "fp32"),
    "in fp16 before": (("gemma3_12b", "t4", "auto", "0.10.1"), "fp16"),
    "as asked for": (("gemma3_12b", "t4", "fp16", "0.26.0"), "fp16"),
    "where there is bf16": (("gemma3_12b", "h100", "auto", "0.26.0"), "bf16"),
    "other models": (("llama3_8b", "t4", "auto", "0.26.0"), "fp16"),
    "GLM-4-0414": (("glm4_9b_0414", "v100_32gb", "auto", "0.26.0"), "fp32"),
}


@pytest.mark.parametrize("name", DTYPES)
def test_models_that_overflow_in_fp16_are_served_in_32_bits(name):
    """vLLM `config/model.py: _FLOAT16_NOT_SUPPORTED_MODELS, _resolve_auto_dtype`."""
    (model, card, dtype, version), used = DTYPES[name]
    asked = [f"model={model}", f"gpu={card}", f"dtype={dtype}", f"engine.version={version}"]
    result = kvexp.run([*asked, "tp=4", "max_model_len=8192"])

    assert result.effective["dtype"] == used, result.reason
    refuses = any("which vLLM 0.26.0 refuses" in note for note in result.notes)
    assert refuses == (name == "as asked for")
