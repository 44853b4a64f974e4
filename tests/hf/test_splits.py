"""What one rank holds, and splits that do not work."""

import pytest

import kvexp
from kvexp.results import Status


def weights_of(*overrides):
    result = kvexp.run([*overrides, "gpu=h200", "enforce_eager=true", "max_model_len=8192"])
    assert result.profile is not None, result.reason
    return [rank.profile.weights_bytes for rank in result.ranks]


def test_whole_experts_take_a_map_of_them_more():
    model = ("model=qwen3_30b_a3b", "tp=2")
    sliced = kvexp.run([*model, "gpu=h200", "enforce_eager=true"])
    whole = kvexp.run([*model, "gpu=h200", "engine.enable_expert_parallel=true"])

    assert [rank.profile.weights_bytes for rank in sliced.ranks] == [30558146560] * 2
    assert [rank.profile.weights_bytes for rank in whole.ranks] == [30558171136] * 2  # measured


@pytest.mark.parametrize("tp", [2, 4, 8, 16, 32])
def test_kv_projections_are_replicated_beyond_their_heads(tp):
    one = weights_of("model=llama3_8b")[0]
    ranks = weights_of("model=llama3_8b", f"tp={tp}")

    assert len(set(ranks)) == 1
    copies = max(0, tp // 8 - 1)
    repeated = copies * 32 * 2 * 1024 * 4096 * 2 if tp > 8 else 0
    assert tp * ranks[0] == pytest.approx(one + repeated, rel=0.03)


def test_latent_down_projections_are_on_every_rank():
    one, two = weights_of("model=deepseek_v2_lite")[0], weights_of("model=deepseek_v2_lite", "tp=2")

    assert 2 * two[0] > one + 26 * 576 * 2048 * 2


def test_stages_hold_their_layers_and_the_tables_at_the_ends():
    first, middle, last = weights_of("model=llama31_8b", "pp=3")

    assert middle < first
    assert middle < last


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=llama31_8b", "tp=3"], "tp must be one of 1, 2, 4, 8, 16, 32"),
        (["model=laguna_s_21", "tp=16"], "tp must be one of 1, 2, 4, 8 for"),
        (["model=falcon_7b", "tp=2"], "tp must be one of 1 for falcon_7b"),
        (["model=qwen25_7b", "tp=8"], "tp must be one of 1, 2, 4 for"),
        (["model=jamba15_mini", "pp=40"], "pp must be at most 32"),
    ],
)
def test_splits_that_do_not_work_say_what_does(overrides, message):
    result = kvexp.run([*overrides, "gpu=h200"])

    assert result.status is Status.invalid
    assert message in result.reason
