"""Repeating the layers that are equal gives the trace that all of them give, or is refused."""

from types import SimpleNamespace

import pytest

from kvexp import simulate
from kvexp.errors import InvalidValue
from kvexp.simulate import device as devices

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

DENSE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 13,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,
    "pad_token_id": None,
}
WINDOWS = {**DENSE, "sliding_window": 64}
ARCHITECTURES = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "phi3": DENSE,
    "mistral": WINDOWS,
    "gemma2": WINDOWS,
    "gemma3_text": {**WINDOWS, "num_hidden_layers": 20},
    "gpt_oss": {**WINDOWS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**DENSE, "num_experts": 8, "moe_intermediate_size": 64},
    "deepseek_v3": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "vocab_size": 500,
    },
    "qwen3_next": {
        **DENSE,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 16,
    },
    "codegen": {"n_embd": 128, "n_head": 4, "n_layer": 10, "rotary_dim": 16, "vocab_size": 500},
    "gpt2": {"n_embd": 128, "n_head": 4, "n_layer": 10, "vocab_size": 500},
    "opt": {"hidden_size": 96, "ffn_dim": 256, "num_hidden_layers": 9, "vocab_size": 500},
    "bloom": {"hidden_size": 128, "n_head": 4, "n_layer": 9, "vocab_size": 500},
}
CASES = (
    {},
    {"use_cache": True},
    {"attn": "eager", "mask": True},
    {"logits": "all", "sampler": "random", "batch": 2},
)


def trace(facts, *, repeat_layers, **case):
    from kvexp.simulate import tracing

    case = simulate.Case(**{"batch": 1, "seq": 96, **case})
    config = simulate.make_config(facts)
    return tracing.trace(config, case, devices.load("h200"), repeat_layers=repeat_layers)


@pytest.fixture
def layers_run(monkeypatch):
    """How many times a module at the place of a layer was called."""
    from kvexp.simulate.tracker import Tracker

    called = []
    enter = Tracker.enter

    def counted(self, module):
        name = self.names.get(id(module), "")
        if name.count(".") == 2 and name.rpartition(".")[2].isdigit():
            called.append(name)
        enter(self, module)

    monkeypatch.setattr(Tracker, "enter", counted)
    return called


QUICK = ("llama", "gpt_oss")


def forwards():
    for kind in ARCHITECTURES:
        for case in CASES:
            marks = [] if kind in QUICK else [pytest.mark.slow]
            yield pytest.param(kind, case, id=f"{kind}-{'-'.join(case) or 'plain'}", marks=marks)


@pytest.mark.parametrize(("kind", "case"), list(forwards()))
def test_the_trace_is_that_of_all_layers(kind, case):
    facts = {"model_type": kind, **ARCHITECTURES[kind]}
    if kind == "qwen3_next" and "attn" in case:
        case = {"mask": True}

    assert trace(facts, repeat_layers=True, **case) == trace(facts, repeat_layers=False, **case)


def test_only_some_layers_run(layers_run):
    trace({"model_type": "llama", **DENSE}, repeat_layers=True)

    assert [name.rpartition(".")[2] for name in layers_run] == ["0", "1", "2", "12"]


def test_too_few_layers_are_all_run(layers_run):
    trace({"model_type": "llama", **DENSE, "num_hidden_layers": 4}, repeat_layers=True)

    assert len(layers_run) == 4


def types(last):
    return ["full_attention"] * 11 + ["sliding_attention"] * last


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            {"model_type": "qwen3", **WINDOWS, "num_hidden_layers": 12, "layer_types": types(1)},
            "model.layers.10 and model.layers.11 differ in",
        ),
        ({"model_type": "diffllama", **DENSE}, "model.layers.11 and model.layers.12 differ in"),
    ],
)
def test_layers_that_are_not_equal_are_refused_by_name(facts, reason):
    with pytest.raises(InvalidValue, match=reason) as refused:
        trace(facts, repeat_layers=True)

    assert str(refused.value).startswith("profiler.repeat_layers is refused: ")
    assert "\n" not in str(refused.value)


def names_of(layers, forward=None):
    from torch import nn

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    if forward is not None:
        Decoder.forward = forward
    model = Decoder()
    return {module: name for name, module in model.named_modules()}


def linears(count=8):
    from torch import nn

    return [nn.Linear(8, 8) for _ in range(count)]


def looks_at_number(self, x):
    for number, layer in enumerate(self.layers):
        x = layer(x) if number % 4 else layer(layer(x))
    return x


def has_no_loop(self, x):
    return self.layers[0](x)


def test_plain_layers_are_planned():
    from kvexp.simulate import repeating

    assert repeating.plan(names_of(linears())).kept == [0, 1, 2, 7]


def hooked():
    layers = linears()
    layers[3].register_forward_hook(lambda *_: None)
    return layers


def shared():
    layers = linears()
    layers[5].weight = layers[2].weight
    return layers


@pytest.mark.parametrize(
    ("make", "forward", "reason"),
    [
        (hooked, None, "layers.3 has hooks"),
        (shared, None, "layers.2 and layers.5 share weights"),
        (lambda: [linears(1)[0]] * 8, None, "share weights|lists of layers"),
        (linears, looks_at_number, "looks at a layer's number: number % 4"),
        (linears, has_no_loop, "has 0 loops over layers"),
        (lambda: linears(2), None, "no list of layers"),
    ],
)
def test_what_could_differ_from_layer_to_layer_is_refused(make, forward, reason):
    from kvexp.simulate import repeating

    with pytest.raises(InvalidValue, match=reason):
        repeating.plan(names_of(make(), forward))


def test_layers_that_turn_out_to_allocate_differently_are_refused():
    from kvexp.simulate import repeating
    from kvexp.simulate.repeating import Mark, Plan
    from kvexp.simulate.trace import Cause, Trace

    layers = [SimpleNamespace()] * 8
    found = Plan("layers", layers, 1, 3, 4)
    causes = [Cause("aten.mm.default", f"layers.{number}", "a.py:1") for number in (0, 1, 2, 7)]
    marks = [Mark(number, 2 * at, at, at, {}) for at, number in enumerate(found.kept)]

    def of(*sizes):
        events = [event for at, size in enumerate(sizes) for event in (size, -at - 1)]
        return Trace(events=events, causes=[0, 1, 2, 3], cause_table=causes, num_operators=4)

    whole = repeating.expand(of(512, 512, 512, 512), marks, found)
    assert whole.events == [event for at in range(8) for event in (512, -at - 1)]
    assert [cause.module for cause in whole.cause_table] == [f"layers.{at}" for at in range(8)]
    with pytest.raises(InvalidValue, match=r"layers\.1 and layers\.2 do not allocate alike"):
        repeating.expand(of(512, 512, 1024, 512), marks, found)
    with pytest.raises(InvalidValue, match="do not run once each in order"):
        repeating.expand(of(512, 512, 512, 512), marks[:2] + marks[3:], found)


def test_a_refusal_through_the_pipeline_is_an_invalid_point(tmp_path, monkeypatch):
    import json

    import kvexp

    monkeypatch.chdir(tmp_path)
    facts = {"model_type": "qwen3", **WINDOWS, "num_hidden_layers": 12, "layer_types": types(1)}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    point = ["profiler=simulated", "model=qwen3_0_6b", "gpu=h200", "tracking=off"]
    own = ["model=hf", "model.path=config.json"]
    refused = kvexp.run([*point, *own, "profiler.repeat_layers=true"])
    plain, short = (
        kvexp.run([*point, "profiler.seq_len=512", f"profiler.repeat_layers={value}"])
        for value in ("false", "true")
    )

    assert (refused.status, "repeat_layers is refused" in refused.reason) == ("invalid", True)
    assert short.profile == plain.profile
    assert short.readings["repeat_layers"] is True
