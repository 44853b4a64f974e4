"""Tracing tensors without data: each pitfall that would change a peak."""

import pytest

from kvexp import simulate
from kvexp.simulate import device as devices
from kvexp.simulate import simulation

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # torch and transformers deprecate things at import
]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}


def subject(facts):
    return simulate.Subject(facts=facts, make_config=lambda: simulate.make_config(facts))


def traced(facts, device=None, **case):
    case = simulate.Case(**{"batch": 1, "seq": 512, **case})
    return simulate.traces_of(subject(facts), case, device or devices.load("h200"))


def sizes(trace):
    return [event for event in trace.events if event >= 0]


def named(trace, operator):
    return [
        size for number, size in enumerate(sizes(trace)) if trace.cause(number).operator == operator
    ]


def peak(trace):
    alive, total, highest = [], 0, 0
    for event in trace.events:
        if event >= 0:
            alive.append(event)
            total += event
        else:
            total -= alive[-event - 1]
        highest = max(highest, total)
    return highest


def test_no_mask_is_materialised_where_is_causal_serves():
    (trace,) = traced(LLAMA, seq=1024)

    assert max(sizes(trace)) < 1024 * 1024 * 2
    assert trace.backends == {"cudnn": 2}


def test_attention_takes_the_cards_backend_not_the_builds_own():
    (fused,) = traced(LLAMA, seq=1024)
    (flash,) = traced(LLAMA, seq=1024, cudnn=False)
    (eager,) = traced(LLAMA, seq=1024, attn="eager")

    assert flash.backends == {"flash": 2}
    assert fused.backends == {"cudnn": 2}
    assert peak(fused) <= peak(flash) < peak(eager) / 2


def test_attention_that_goes_round_the_stand_in_is_an_error(monkeypatch):
    import torch

    from kvexp.simulate import attention

    original = torch._C._nn.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.StandIn, "__call__", lambda _, q, k, v, **__: original(q, k, v, is_causal=True)
    )
    with pytest.raises(simulate.Untraceable, match=r"self_attn reaches torch's own choice"):
        traced({**LLAMA, "num_key_value_heads": 4})


def test_softmax_of_half_precision_in_fp32_is_one_kernel():
    (trace,) = traced(LLAMA, attn="eager", dtype="float16")
    scores = 4 * 512 * 512

    assert named(trace, "aten._softmax.default") == [4 * scores] * 2
    assert not [size for size in named(trace, "aten._to_copy.default") if size == 4 * scores]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts_trace_in_every_dtype(dtype):
    (trace,) = traced(MOE, dtype=dtype)
    item = 4 if dtype == "float32" else 2

    assert 512 * 2 * 256 * item in named(trace, "aten._grouped_mm.default")


def test_temporaries_inside_composite_operators_are_seen():
    (trace,) = traced({**LLAMA, "num_key_value_heads": 4, "head_dim": 36}, dtype="float32")
    (math,) = traced({**LLAMA, "num_key_value_heads": 2}, dtype="float32")

    assert trace.backends == {"efficient": 2}
    assert math.backends == {"math": 2}
    assert named(math, "aten._safe_softmax.default") or named(math, "aten._softmax.default")
    assert peak(math) > peak(trace)


def test_every_allocation_names_operator_module_and_line():
    (trace,) = traced(LLAMA)
    causes = [trace.cause(number) for number in range(len(sizes(trace)))]
    assert all(cause.operator.startswith("aten.") for cause in causes)
    assert {"model.layers.1.mlp.gate_proj", "lm_head"} <= {cause.module for cause in causes}
    assert any("modeling_llama.py:" in cause.line for cause in causes)


def test_every_hidden_state_but_the_result_is_freed():
    (trace,) = traced(LLAMA)
    alive = set()
    count = 0
    for event in trace.events:
        if event >= 0:
            alive.add(count)
            count += 1
        else:
            alive.remove(-event - 1)

    assert [sizes(trace)[number] for number in alive] == [2 * 1000]


def test_a_tied_head_is_built_and_dropped_while_loading():
    (tied,) = traced({**LLAMA, "tie_word_embeddings": True})
    (own,) = traced(LLAMA)
    table = 2 * 1000 * 256

    assert tied.load.count(table) == own.load.count(table) == 2
    assert [event for event in tied.load if event < 0]
    assert not [event for event in own.load if event < 0]
    assert own.weights_bytes - tied.weights_bytes == table


def test_workspaces_belong_to_the_first_products():
    (plain,) = traced(LLAMA)
    (biased,) = traced({**LLAMA, "attention_bias": True})

    assert [name for _, name in plain.workspaces] == ["blas"]
    assert [name for _, name in biased.workspaces] == ["blas", "blas_lt"]


def test_keys_and_values_stay_with_use_cache():
    (without,), (held,) = traced(LLAMA), traced(LLAMA, use_cache=True)

    assert peak(held) - peak(without) >= 2 * 512 * 2 * 64 * 2


def test_logits_and_sampler_are_part_of_the_forward():
    last, every, none = (traced(LLAMA, logits=name)[0] for name in ("last", "all", "none"))
    (drawn,) = traced(LLAMA, sampler="random")

    assert 512 * 1000 * 2 in sizes(every)
    assert 512 * 1000 * 2 not in sizes(last)
    assert not [cause for cause in none.cause_table if cause.module == "lm_head"]
    assert named(drawn, "aten.exponential_.default") == []
    assert len(sizes(drawn)) > len(sizes(last))


def test_an_architecture_that_looks_at_computed_values_is_refused_by_place():
    facts = {**MOE, "model_type": "jetmoe", "num_local_experts": 8, "kv_channels": 64}
    with pytest.raises(simulate.Untraceable) as refused:
        traced(facts)

    assert "\n" not in str(refused.value)
    assert "model.layers.0" in str(refused.value)


def test_an_unknown_architecture_is_refused_with_transformers_reason():
    with pytest.raises(simulate.Untraceable, match="no_such_architecture"):
        traced({**LLAMA, "model_type": "no_such_architecture"})


def test_everything_that_was_replaced_is_put_back():
    import torch
    from transformers.utils import import_utils

    before = (
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.Module.__call__,
        torch.cuda.get_device_capability,
        getattr(import_utils, "is_fake_tensor", None),
    )
    traced(LLAMA)

    assert before == (
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.Module.__call__,
        torch.cuda.get_device_capability,
        getattr(import_utils, "is_fake_tensor", None),
    )


def test_tracing_twice_finds_the_same(cache_folder):
    (first,) = traced(MOE)
    for file in cache_folder.iterdir():
        file.unlink()
    (second,) = traced(MOE)

    assert first == second


def test_a_kept_trace_is_read_not_made_again(cache_folder, monkeypatch):
    (made,) = traced(LLAMA)
    monkeypatch.setattr(simulation, "_trace", lambda *_: pytest.fail("traced again"))
    (read,) = traced(LLAMA)

    assert read == made
    assert len(list(cache_folder.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"not a trace", b"\x1f\x8b damaged"])
def test_a_damaged_trace_is_made_again(cache_folder, content):
    (made,) = traced(LLAMA)
    (file,) = cache_folder.iterdir()
    file.write_bytes(content)

    assert traced(LLAMA) == [made]


def test_a_card_that_was_not_measured_gives_both_backends():
    first, second = traced(LLAMA, devices.find("another card", "8.6"))

    assert first.backends == {"flash": 2}
    assert second.backends == {"cudnn": 2}
    assert "was not measured" in first.doubts[0]


def test_an_operator_without_a_rule_makes_the_figure_a_range(monkeypatch):
    from kvexp.simulate import kernels

    monkeypatch.setattr(
        kernels, "BOUNDED", {"aten.mean.dim": lambda call, _: [1 << 30]}, raising=True
    )
    monkeypatch.setattr(kernels, "SPECIAL", kernels.SPECIAL | {"aten.mean.dim"})
    case = simulate.Case(batch=1, seq=512)
    traces = traced(LLAMA)
    h200 = devices.load("h200")
    found = simulate.simulate(traces, case, h200, simulate.AllocatorSettings(), simulate.Limits())

    assert found.confidence is simulate.Confidence.bounded
    assert found.first.activation_bytes - found.activation_low_bytes > 900 << 20
    assert "aten.mean.dim" in found.doubts[0]
