"""Replicas, experts shared by them, stages cut by hand, towers that are left out."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvexp
from kvexp import weights
from kvexp.dtypes import DType
from kvexp.kv import pp_layer_ranges
from kvexp.request import Model, Moe
from kvexp.results import Status

QWEN3_MOE = ("model=qwen3_30b_a3b", "gpu=h200", "enforce_eager=true")
EXPERTS = 48 * 128 * 3 * 2048 * 768 * 2  # layers, experts, three matrices, bf16


def run(*overrides):
    result = kvexp.run(list(overrides))
    assert result.ok, result.reason
    return result


def test_replicas_of_a_dense_model_plan_alone():
    one, four = run("model=qwen3_8b", "gpu=h200"), run("model=qwen3_8b", "gpu=h200", "dp=4")

    assert four.num_blocks == one.num_blocks
    assert four.profile == one.profile
    assert (one.num_replicas, one.kv_tokens_total) == (None, None)
    assert four.num_replicas == 4
    assert four.kv_tokens_total == 4 * one.kv_tokens
    assert four.max_concurrency_total == 4 * one.max_concurrency
    assert "--data-parallel-size 4" in four.effective["flags"]


@pytest.mark.parametrize(("tp", "dp", "ranks"), [(1, 2, 2), (2, 2, 4), (1, 8, 8), (4, 2, 8)])
@pytest.mark.parametrize("whole", [False, True])
def test_experts_are_shared_by_all_ranks_of_all_replicas(tp, dp, ranks, whole):
    option = f"engine.enable_expert_parallel={str(whole).lower()}"
    alone = run(*QWEN3_MOE, f"tp={tp}").profile.weights_bytes
    shared = run(*QWEN3_MOE, f"tp={tp}", f"dp={dp}", option).profile.weights_bytes

    assert alone - shared == pytest.approx(EXPERTS // tp - EXPERTS // ranks, rel=2e-3)


def test_experts_that_all_tokens_pass_are_whole_where_tokens_are_dealt_out():
    asked = ["model=deepseek_v2_lite", "gpu=h200", "tp=2", "engine.enable_expert_parallel=true"]
    shared = 26 * 3 * 2048 * 2816 * 2  # layers with experts, three matrices, bf16
    routed = 26 * 64 * 3 * 2048 * 1408 * 2
    one, two = run(*asked), run(*asked, "dp=2")

    less = one.profile.weights_bytes - two.profile.weights_bytes
    assert less == pytest.approx(routed // 4 - shared // 2, rel=3e-3)


@given(experts=st.integers(1, 64), ranks=st.integers(2, 16))
def test_every_expert_is_on_one_rank(experts, ranks):
    moe = Moe(num_experts=experts, num_experts_per_tok=1, moe_intermediate_size=16)
    counts = []
    for rank in range(ranks):
        share = weights.Slice(
            tp=1, num_layers=1, first_stage=True, last_stage=True, ep=ranks, ep_rank=rank
        )
        tensors = weights.mlp(SMALL_MOE(moe), share, DType.bf16, None, 0)
        counts += [tensor.count for tensor in tensors if tensor.name == "experts.w2"]

    assert sum(counts) == experts
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def SMALL_MOE(moe):  # noqa: N802
    return Model(
        name="small",
        hf_id="small/moe",
        source="test",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=64,
        max_position_embeddings=64,
        moe=moe,
    )


def test_experts_that_do_not_divide_are_said_to_be_uneven():
    result = run(*QWEN3_MOE, "dp=3", "engine.enable_expert_parallel=true")

    assert any("128 experts are dealt out to 3 ranks unevenly" in note for note in result.notes)
    largest = run(*QWEN3_MOE, "dp=128", "engine.enable_expert_parallel=true").profile.weights_bytes
    assert result.profile.weights_bytes > largest


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dp=5"], "dp must be one of 1, 2, 3, 4, 6, 8, 12, 16"),
        (["dp=129", "engine.enable_expert_parallel=true"], "dp must be at most 128"),
        (["dp=2", "engine=tensorrt_llm"], "dp is not counted for engine=tensorrt_llm"),
    ],
)
def test_replicas_that_cannot_be_say_what_can(overrides, message):
    result = kvexp.run([*QWEN3_MOE[:2], *overrides])

    assert result.status is Status.invalid
    assert message in result.reason


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda cut: sum(cut) > 0))
def test_stages_hold_the_layers_that_were_cut(partition):
    ranges = pp_layer_ranges(sum(partition), len(partition), partition)

    assert [last - first for first, last in ranges] == partition
    assert ranges[0][0] == 0
    assert all(end == start for (_, end), (start, _) in pairwise(ranges))


@pytest.mark.parametrize("partition", [[1, 2], [3, 3, 0], [7, -1]])
def test_a_partition_of_other_layers_is_refused(partition):
    with pytest.raises(ValueError, match="does not cut 6 layers into 2 stages"):
        pp_layer_ranges(6, 2, partition)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_stages_may_be_cut_by_hand(engine):
    asked = ["model=llama31_8b", "gpu=h200", f"engine={engine}", "pp=2"]
    even = run(*asked).ranks
    cut = run(*asked, "pp_partition=[20,12]").ranks

    assert [rank.num_layers for rank in even] == [16, 16]
    assert [rank.num_layers for rank in cut] == [20, 12]
    layer = 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    more = cut[0].profile.weights_bytes - even[0].profile.weights_bytes
    assert more == pytest.approx(4 * layer, rel=1e-2)


QWEN_VL = ("model=qwen25_vl_7b", "gpu=h200")


@pytest.mark.parametrize(
    ("limits", "version", "built"),
    [
        ("{image:2,video:0}", "0.26.0", True),
        ("{image:0}", "0.26.0", True),  # videos pass the same tower
        ("{image:0,video:0}", "0.26.0", False),
        ("{image:0,video:0}", "0.13.0", True),
    ],
)
def test_a_tower_without_any_input_is_not_built(limits, version, built):
    asked = [*QWEN_VL, f"engine.version={version}"]
    whole = run(*asked).profile.weights_bytes
    result = run(*asked, f"mm.limits={limits}")

    tower = 0 if built else 2 * 652_000_000
    assert whole - result.profile.weights_bytes == pytest.approx(tower, rel=0.05)


def test_limits_are_kept_for_what_the_engine_does_with_them():
    result = run(*QWEN_VL, "mm.limits.image=2")

    assert result.effective["mm_limits"] == {"image": 2, "video": 999}
    assert """--limit-mm-per-prompt '{"image": 2}'""" in result.effective["flags"]
