"""vLLM 0.26.0 on H200s beyond plain dense models: what each phase of its profile had alive.

Weights and activation are what the engine itself found with random weights, the rules' from the
request alone.
"""

import json
from functools import cache
from pathlib import Path

import pytest

import kvexp

DATA = Path(__file__).parent / "data"
RECORDED = json.loads((DATA / "h200_vllm_worker.json").read_text())
POINTS = {point["name"]: point for point in RECORDED["points"]}
EAGLE3_HEAD = 32000 * 4096 * 2
"""Random weights share the model's head with eagle3, a checkpoint's own one stays beside it."""


@cache
def result_of(name):
    overrides = [
        each.replace("{models}", str(DATA / "models")) for each in POINTS[name]["overrides"]
    ]
    return kvexp.run([*overrides, "engine.version=0.26.0"])


def predict(name):
    """The first rank by the rules, and as the engine found it."""
    return result_of(name).ranks[0].profile, POINTS[name]["ranks"][0]


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v2_lite_2048",
        "deepseek_v2_lite_8192",
        "deepseek_v2_lite_graphs_8192",
        "mistral_7b_2048",
        "qwen3_8b_graphs_8192",
        "lora1x16_2048",
        "lora1x16_8192",
        "lora4x64_8192",
        "lora2x32_tp2_8192",
    ],
)
def test_phases_equal_the_engines_to_the_byte(name):
    profile, found = predict(name)

    assert profile.weights_bytes == found["weights_bytes"]
    assert profile.activation_bytes == found["activation_bytes"]


@pytest.mark.parametrize(
    "name",
    ["gemma2_9b_8192", "phi4_8192", "qwen25_32b_8192", "qwen3_0_6b_8192", "granite4_h_1b_8192"],
)
def test_dense_and_hybrid_models_that_no_rule_was_made_from(name):
    profile, found = predict(name)
    needed = found["requested_bytes"] - found["available_bytes"]

    assert profile.weights_bytes == found["weights_bytes"]
    assert profile.activation_bytes == pytest.approx(found["activation_bytes"], abs=2 << 20)
    by_rules = profile.weights_bytes + profile.activation_bytes + profile.non_torch_bytes
    assert abs(by_rules - needed) <= 4 << 20  # of 70 GB and more for the cache


def test_soft_capping_has_the_logits_twice():
    """1,024 rows of 256,000 logits, hidden states of 8,192 tokens and the rows, the workspace."""
    profile, found = predict("gemma2_9b_8192")

    twice = 2 * 1024 * 256000 * 2
    hidden = 2 * 3584 * (8192 + 1024)
    assert found["activation_bytes"] == twice + hidden + (32 << 20)
    assert profile.activation_bytes == found["activation_bytes"]


@pytest.mark.parametrize("point", RECORDED["compiled"], ids=lambda point: point["model"])
def test_compiled_a_copy_of_the_embedding_is_alive(point):
    """A table of V x H, two tensors of hidden states, and what the allocator does not split off."""
    overrides = [f"model={point['model']}", "gpu=h200", "util=0.92", "engine.version=0.26.0"]
    result = kvexp.run(overrides)
    activation, measured = result.profile.activation, point["activation_bytes"]

    if point["model"] == "phi4":  # 32 MiB more: the forward's peak is not the eager one's
        assert activation.low_bytes <= measured <= activation.high_bytes
    else:
        assert activation.size_bytes == pytest.approx(measured, abs=2048)
    assert result.num_blocks == pytest.approx(point["num_blocks"], rel=0.0005)


@pytest.mark.parametrize(("name", "head_bytes"), [("eagle_8192", 0), ("eagle3_8192", EAGLE3_HEAD)])
def test_a_draft_runs_while_the_models_hidden_states_are_alive(name, head_bytes):
    profile, found = predict(name)

    assert profile.weights_bytes == found["weights_bytes"] + head_bytes
    assert profile.activation_bytes == found["activation_bytes"]


@pytest.mark.parametrize("name", ["ngram_2048", "ngram_8192", "draft_model_8192"])
def test_the_v1_runners_profile_rejects_drafts_of_all_rows(name):
    profile, found = predict(name)
    activation, measured = profile.activation, found["activation_bytes"]

    assert activation.size_bytes == pytest.approx(measured, rel=0.0011)
    assert activation.low_bytes <= measured <= activation.high_bytes


@pytest.mark.parametrize(
    "name", ["dsv3_2048", "dsv3_8192", "dsv3_mtp_8192", "glm4_moe_8192", "glm4_moe_mtp_8192"]
)
def test_latent_attention_stands_on_what_experts_keep(name):
    profile, found = predict(name)

    # of DeepSeek's weights 30 MiB are not explained
    assert profile.weights_bytes == pytest.approx(found["weights_bytes"], rel=0.002)
    assert profile.weights.low_bytes <= found["weights_bytes"] <= profile.weights.high_bytes
    assert profile.activation_bytes == pytest.approx(found["activation_bytes"], rel=0.001)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("qwen3_30b_a3b_seqs16", 0),
        ("qwen3_30b_a3b_seqs16_graphs", 0),
        ("qwen35_35b_a3b_text_seqs16", 1e-3),
        ("gpt_oss_20b_seqs16", 0.025),  # half of a rotary cache is freed, blocks are not split
    ],
)
def test_attention_stands_on_what_experts_keep(name, off):
    """Few requests: the sampler is small, and the forward is the peak."""
    profile, found = predict(name)
    activation = profile.activation

    assert profile.weights_bytes == found["weights_bytes"]
    assert activation.size_bytes == pytest.approx(found["activation_bytes"], rel=off)
    assert activation.low_bytes <= found["activation_bytes"] <= activation.high_bytes


def test_the_peak_of_attention_after_experts_tensor_by_tensor():
    """Qwen3-30B-A3B eager, 8,192 tokens: what was alive at the peak, in MiB.

    The experts' workspace, q, k and v of one product, q and k normed, attention's output, cuBLAS's
    workspace, the residual, the layer's input and output.
    """
    alive = [512, 80, 64, 8, 64, 32, 32, 32, 32]

    assert predict("qwen3_30b_a3b_seqs16")[1]["activation_bytes"] == sum(alive) << 20


def test_stages_of_qwen3_moe_hold_the_embedding_and_the_head_each():
    ranks = result_of("qwen3_30b_a3b_pp2_8192").ranks
    found = POINTS["qwen3_30b_a3b_pp2_8192"]

    for rank, measured in zip(ranks, found["ranks"], strict=True):
        assert rank.profile.weights_bytes == measured["weights_bytes"]
        assert rank.profile.activation_bytes == measured["activation_bytes"]
    assert result_of("qwen3_30b_a3b_pp2_8192").num_blocks == found["planned"]["num_blocks"]


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("phi4_tp2_8192", 0),
        ("gemma2_9b_tp2_8192", 0),
        ("llama3_8b_tp2_kvfp8", 0),
        ("llama3_8b_pp2_graphs", 0),
        ("gemma3_12b_tp2_graphs", 0),
        ("deepseek_v2_lite_tp2_graphs", 0),
        ("qwen3_30b_a3b_tp2_graphs", 0.002),  # the V1 runner's estimate of its graphs
        ("gpt_oss_20b_tp2_graphs", 0.002),
    ],
)
def test_what_two_cards_leave_for_the_cache(name, off):
    available = min(rank["available_bytes"] for rank in POINTS[name]["ranks"])

    assert result_of(name).budget.available_bytes == pytest.approx(available, rel=off)


@pytest.mark.parametrize("name", ["glm4_moe_8192", "glm4_moe_mtp_8192"])
def test_routers_of_glm_are_kept_in_fp32(name):
    profile, found = predict(name)

    assert profile.weights_bytes == found["weights_bytes"]


def test_a_model_with_encoders_copies_no_embedding():
    """It embeds before what is compiled: Gemma-4-E4B says 0.27 GiB on an L4 of 0.28."""
    asked = ["model=gemma4_e4b", "gpu=l4", "engine.version=0.28.0", "max_model_len=32768"]
    activation = kvexp.run(asked).profile.activation_bytes

    table = 262144 * 2560 * 2
    assert activation < table / 2
    assert activation == pytest.approx(0.27 * 2**30, rel=0.2)
