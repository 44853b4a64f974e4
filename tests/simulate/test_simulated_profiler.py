"""profiler=simulated through the pipeline."""

import json
import pickle

import pytest

import kvexp
from kvexp import record
from kvexp.results import Provenance, Status

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

POINT = ["profiler=simulated", "model=qwen3_0_6b", "gpu=h200", "enforce_eager=true", "tracking=off"]


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def run(shared_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("KVEXP_CACHE_DIR", str(shared_cache))
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: kvexp.run([*POINT, *overrides])


@pytest.mark.slow
def test_the_engines_worst_case_is_the_default(run):
    result = run()
    profile = result.profile

    assert result.status is Status.ok
    assert result.readings["case"]["batch"] * result.readings["case"]["seq"] == 8192
    assert profile.activation.provenance is Provenance.simulated
    assert profile.activation_bytes - profile.warm_activation_bytes == 33554432
    assert profile.weights_bytes == 1192115712
    assert profile.allocated_peak_bytes == 1449147904
    assert profile.reserved_peak_low_bytes <= 1568669696 <= profile.reserved_peak_high_bytes


def test_the_engines_budget_stays_as_its_rules_make_it(run):
    by_rules = kvexp.run([*POINT[1:], "profiler=analytic"])
    simulated = run()
    nano = run("engine=nano_vllm")
    nano_by_rules = kvexp.run([*POINT[1:], "profiler=analytic", "engine=nano_vllm"])

    assert simulated.num_blocks == by_rules.num_blocks
    assert nano.num_blocks == nano_by_rules.num_blocks
    delta = simulated.budget.part("engine_delta")
    assert delta.size_bytes == simulated.profile.engine_delta_bytes != 0
    assert "the engine's own" in delta.reason


@pytest.mark.slow
def test_the_four_wrong_warm_ups_reserve_too_little_or_too_much(run):
    right = run()
    wrong = {name: run(f"profiler.warmup={name}") for name in ("none", "decode", "short_prompt")}
    loading = run("profiler.warmup=no_reset")

    assert wrong["none"].profile.activation_bytes == 0
    for name, result in wrong.items():
        assert result.profile.activation_bytes < right.profile.activation_bytes / 4
        assert result.num_blocks > right.num_blocks
        assert "a mistake" in result.profile.activation.reason, name
    # the head that is tied afterwards makes loading the larger peak
    assert loading.profile.activation_bytes > right.profile.activation_bytes
    assert "not reset" in loading.profile.activation.reason


@pytest.mark.slow
def test_each_wrong_warm_up_says_what_comes_of_it(run):
    right = run().profile.activation_bytes
    for name in ("none", "decode", "short_prompt"):
        profile = run(f"profiler.warmup={name}").profile
        assert profile.missing_activation_bytes == right - profile.activation_bytes > 0
        assert "out of memory later" in profile.activation.reason
    loading = run("profiler.warmup=no_reset", "profiler.loading=state_dict").profile

    assert run().profile.missing_activation_bytes is None
    # a checkpoint's tensors, the tied head's among them, lay beside the model
    assert loading.activation_bytes >= loading.weights_bytes
    assert loading.missing_activation_bytes == right - loading.activation_bytes < 0
    assert "too few blocks" in loading.activation.reason


def test_full_load_takes_the_same_beside_the_cache_however_wrong_the_warm_up_was(run):
    def beside_cache(result):
        return result.holding.held_under_load_bytes - result.budget.kv_cache_bytes

    right = run()
    # transformers' forward is what full load takes where the engine's own is not set right
    taken = beside_cache(right) - right.profile.engine_delta_bytes
    none = run("profiler.warmup=none")
    loading = run("profiler.warmup=no_reset", "profiler.loading=state_dict")

    assert beside_cache(none) == beside_cache(loading) == taken
    assert none.holding.largest_safe_util < right.holding.largest_safe_util
    assert loading.holding.largest_safe_util > right.holding.largest_safe_util


@pytest.mark.slow
def test_without_a_peak_of_loading_a_missing_reset_does_no_harm(run):
    untied = ("profiler.seq_len=8192", "model.tie_word_embeddings=false")
    right, wrong = run(*untied), run(*untied, "profiler.warmup=no_reset")

    assert wrong.profile.missing_activation_bytes == 0
    assert wrong.num_blocks == right.num_blocks
    assert "without harm" in wrong.profile.activation.reason


def test_the_first_full_forward_after_a_wrong_warm_up_runs_out_of_memory(run):
    # what is left beside the cache holds one small forward, not the largest
    options = ("max_num_batched_tokens=131072", "max_model_len=32768", "util=0.99")
    right, wrong = run(*options), run(*options, "profiler.warmup=none")

    assert right.status is Status.ok
    assert wrong.status is Status.oom
    assert wrong.num_blocks > right.num_blocks
    assert "model.layers.0" in wrong.reason
    assert 0 < wrong.largest_util < 0.99


def test_the_warm_ups_are_a_sweep(run):
    results = kvexp.sweep(["sweep=warmup", *POINT[1:]])

    assert [result.status for result in results] == [Status.ok] * 5
    blocks = [result.num_blocks for result in results]
    assert blocks[1] < blocks[0] < blocks[2] <= blocks[3] <= blocks[4]


def test_options_choose_the_forward(run):
    result = run(
        *("profiler.batch_size=3", "profiler.seq_len=1000"),
        *("profiler.logits=all", "profiler.sampler=random"),
    )
    case = result.readings["case"]

    assert (case["batch"], case["seq"], case["sampler"]) == (3, 1000, "random")
    assert result.profile.engine_delta_bytes == 0
    assert run("profiler.batch_size=4").readings["case"]["seq"] == 2048
    assert run("profiler.seq_len=2048").readings["case"]["batch"] == 4


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("profiler.warmup=cold", "profiler.warmup must be one of"),
        ("profiler.loading=twice", "profiler.loading must be one of in_place, state_dict"),
        ("profiler.logits=some", "profiler.logits must be one of"),
        ("profiler.attn=flash", "profiler.attn must be one of"),
        ("profiler.seq_len=0", "profiler.seq_len must be at least 1"),
        ("profiler.allocator_conf=backend:cudaMallocAsync", "not simulated"),
        ("profiler.device=/no/such/card.yaml", "device profile /no/such/card.yaml cannot be read"),
        ("profiler.config_path=/no/such/config.json", "not a config.json"),
    ],
)
def test_a_value_that_is_not_allowed_ends_as_invalid(run, override, reason):
    result = run(override)

    assert result.status is Status.invalid
    assert reason in result.reason


def test_a_cap_that_is_too_low_ends_as_out_of_memory_with_the_place(run):
    loading = run("profiler.memory_limit=1300MiB")
    result = run("profiler.memory_limit=1465MiB", "profiler.seq_len=16384")

    assert loading.status is result.status is Status.oom
    assert "while the model is loaded" in loading.reason
    assert "model.layers.0" in result.reason
    assert "modeling_qwen3.py:" in result.reason


def test_settings_of_the_allocator_change_what_is_reserved(run):
    plain, expandable = run(), run("profiler.allocator_conf=expandable_segments:True")

    assert expandable.profile.activation_bytes == plain.profile.activation_bytes
    assert expandable.profile.reserved_peak_high_bytes < plain.profile.reserved_peak_high_bytes


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("tp=2",), "one GPU is simulated"),
        (("quantization=fp8",), "unquantised weights are simulated"),
        (("gpu=mi300x",), "no device profile"),
    ],
)
def test_what_cannot_be_simulated_falls_back_to_the_rules_and_says_so(run, overrides, reason):
    result = run(*overrides)
    by_rules = kvexp.run([*POINT[1:], "profiler=analytic", *overrides])

    assert result.status is Status.ok
    assert result.profile.activation_bytes == by_rules.profile.activation_bytes
    assert result.profile.allocated_peak_bytes is None
    assert f"not simulated (qwen3: {reason}" in result.profile.activation.reason.replace(
        "there is ", ""
    )
    assert reason in result.readings["simulation"]["refused"]


def test_a_card_that_was_not_measured_says_so(run):
    result = run("gpu=a100_80gb")

    assert "was not measured" in result.profile.activation.reason
    assert result.readings["device_profile"]["measured"] is False
    assert result.readings["simulation"]["confidence"] != "exact"


def test_a_profile_of_ones_own_takes_the_place_of_the_packaged(run, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: h200\nname: My Card\nblas_workspace: 8519680\nsource: this test\n")
    result, packaged = run(f"profiler.device={path}"), run()

    assert result.readings["device_profile"]["name"] == "My Card"
    assert packaged.profile.activation_bytes - result.profile.activation_bytes == 33554432 - 8519680
    assert "profiler.device is of My Card, the card is NVIDIA H200" in (
        result.profile.activation.reason
    )


def test_readings_say_what_is_alive_at_the_peak(run):
    found = run().readings
    json.dumps(found)
    blocks = found["simulation"]["blocks_at_peak"]

    assert (
        sum(block["size_bytes"] for block in blocks)
        > 0.9 * (found["simulation"]["warm_activation_bytes"])
    )
    assert blocks[0]["operator"].startswith("aten.")
    assert found["simulation"]["workspaces"] == {"blas": 33554432}
    assert found["driver"]["used_high_bytes"] > found["simulation"]["reserved_peak_high_bytes"]


def test_a_result_is_read_back_as_it_was(run):
    result = run()

    assert (
        record.from_dict(json.loads(json.dumps(record.to_dict(result)))).profile == result.profile
    )


def test_timeline_and_snapshot_are_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    run("profiler.timeline=timeline.png", "profiler.snapshot=snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    (events,) = snapshot["device_traces"]

    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert {event["action"] for event in events} == {"alloc", "free_requested", "free_completed"}
    assert all(event["frames"] for event in events)
    assert snapshot["segments"] == []


NEOX = {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000,
}


def test_a_config_json_of_any_architecture_is_traced(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NEOX))
    result = run("model=hf", f"model.path={tmp_path}", "profiler.seq_len=64")

    assert result.status is Status.ok
    assert result.profile.weights_bytes > 0
    assert result.profile.activation.provenance is Provenance.simulated


@pytest.mark.slow
def test_a_models_own_config_json_gives_what_its_facts_give(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    for path in (tmp_path, tmp_path / "config.json"):
        own = run(f"profiler.config_path={path}")
        assert own.status is Status.ok
        assert own.profile == run().profile


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "hidden_size 256 and not 1024"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"model_type": "rwkv"}, "its state is not known"),
    ],
)
def test_a_config_json_of_another_model_is_refused_in_one_line(run, tmp_path, change, said):
    (tmp_path / "config.json").write_text(json.dumps({**NEOX, **change}))
    result = run(f"profiler.config_path={tmp_path}")

    assert result.status is Status.invalid
    assert result.reason.startswith(f"profiler.config_path {tmp_path} ")
    assert said in result.reason
    assert "\n" not in result.reason
    assert change or result.reason.endswith(f"give model=hf model.path={tmp_path}")


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("num_hidden_layers", 27),
        ("num_key_value_heads", 4),
        ("head_dim", 64),
        ("vocab_size", 151937),
        ("intermediate_size", 3000),
    ],
)
def test_a_fact_changed_on_the_line_makes_it_another_model(run, tmp_path, fact, value):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    result = run(f"profiler.config_path={tmp_path}", f"model.{fact}={value}")

    assert f"and not {value}" in result.reason
