"""Which forward runs: the options, and the ways to get the warm-up wrong."""

import json

import pytest

from kvexp import api
from kvexp.contract import DType, ForwardOptions, InvalidValue, Profiler, Workload
from kvexp.hf import read_model
from kvexp.workload.building import parameter_bytes
from kvexp_nvml import Nvml
from kvexp_simulated import Simulated
from kvexp_torch_allocator import AllocatorMeasurement, TorchAllocator

MIB = 1 << 20
MEASURING = [TorchAllocator, Nvml, Simulated]


@pytest.mark.parametrize("profiler", MEASURING)
def test_all_that_run_or_simulate_a_forward_share_its_options(profiler):
    assert issubclass(profiler, ForwardOptions)
    assert issubclass(profiler, Profiler)


@pytest.mark.parametrize("profiler", MEASURING)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": "cold"}, "profiler.warmup must be one of worst_case, no_reset, .* 'cold'"),
        ({"logits": "some"}, "profiler.logits must be one of last, all, none, got 'some'"),
        ({"sampler": "beam"}, "profiler.sampler must be one of"),
        ({"attn": "flash"}, "profiler.attn must be one of"),
        ({"batch_size": 0}, "profiler.batch_size must be at least 1, got 0"),
        ({"logits": "none", "sampler": "argmax"}, "profiler.sampler needs logits"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_before_anything_runs(
    kit, profiler, options, message
):
    with pytest.raises(InvalidValue, match=message):
        profiler(**options).open(kit.make_deployment(), kit.StubEngine())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, 64)),
        ({"batch_size": 4}, (4, 32)),
        ({"seq_len": 16}, (8, 16)),
        ({"batch_size": 3, "seq_len": 7}, (3, 7)),
        ({"warmup": "short_prompt"}, (2, 16)),
        ({"warmup": "decode"}, (2, 1)),
    ],
)
def test_the_shape_is_the_engines_unless_it_is_given(kit, options, expected):
    forward = ForwardOptions(**options).forward(kit.make_deployment())
    assert (forward.case.batch, forward.case.seq) == expected
    if "warmup" in options:
        assert (forward.worst.batch, forward.worst.seq) == (2, 64)
        assert forward.mistake


class Spy:
    """A workload on the CPU, and the forwards that it ran."""

    def __init__(self, kit, **options):
        deployment = kit.make_deployment(dtype=DType.bf16)
        forward = ForwardOptions(**options).forward(deployment)
        self.work = Workload(deployment, forward, device="cpu")
        self.work.load()
        self.seen = []
        for called in (self.work._model, self.work._model.base_model):
            called.register_forward_hook(self._note(called), with_kwargs=True)

    def _note(self, called):
        def hook(module, arguments, keywords, output):
            logits = getattr(output, "logits", None)
            self.seen.append(
                (
                    called is self.work._model,
                    tuple(keywords["input_ids"].shape) if "input_ids" in keywords else None,
                    None if logits is None else tuple(logits.shape),
                    getattr(output, "past_key_values", None) is not None,
                )
            )

        return hook


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.torch
def test_each_warmup_runs_what_it_says_and_verify_the_worst_case(kit, torch):
    shapes = {}
    for warmup in ("worst_case", "no_reset", "short_prompt", "decode", "none"):
        spy = Spy(kit, warmup=warmup)
        at_peak = []
        spy.work.warmup(lambda: at_peak.append(True))  # noqa: B023
        assert at_peak == [True]
        shapes[warmup] = [shape for whole, shape, *_ in spy.seen if whole]
        spy.seen.clear()
        spy.work.verify()
        assert [shape for whole, shape, *_ in spy.seen if whole] == [(2, 64)]
    assert shapes == {
        "worst_case": [(2, 64)],
        "no_reset": [(2, 64)],
        "short_prompt": [(2, 16)],
        "decode": [(2, 1)],
        "none": [],
    }


@pytest.mark.slow
@pytest.mark.torch
def test_logits_cache_attention_and_sampler_are_those_asked_for(kit, torch):
    spy = Spy(kit, logits="all", use_cache=True, attn="eager", sampler="argmax")
    assert spy.work.describe()["attention"] == "eager"
    spy.work.warmup()
    inner, outer = spy.seen
    assert outer[2] == (2, 64, 320)
    assert outer[3] is True
    assert inner[0] is False
    spy = Spy(kit, logits="none")
    spy.work.warmup()
    assert [whole for whole, *_ in spy.seen] == [False]
    spy = Spy(kit, sampler="random")
    spy.work.warmup()
    assert spy.seen[-1][2] == (2, 1, 320)
    assert spy.seen[-1][3] is False


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v2"])
def test_other_architectures_are_built_and_run(kit, torch, model_type):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    facts = {
        "qwen3_moe": {"moe": moe},
        "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"],
                        "sliding_window": 16},
        "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
                    "moe": moe},
        "deepseek_v2": {"num_key_value_heads": 4, "mla": latent,
                        "moe": {**moe, "shared_intermediate_size": 32,
                                "first_k_dense_replace": 1}},
    }[model_type]  # fmt: skip
    deployment = kit.make_deployment(
        kit.typed({"model_type": model_type, **facts}), dtype=DType.bf16
    )
    work = Workload(deployment, device="cpu")
    assert work.load() == parameter_bytes(work._model)
    work.warmup()
    work.verify()
    work.close()


@pytest.mark.slow
@pytest.mark.torch
def test_a_checkpoints_weights_are_loaded(kit, torch, tmp_path):
    pytest.importorskip("safetensors")
    random = Workload(kit.make_deployment(), device="cpu")
    loaded = random.load()
    random._model.save_pretrained(tmp_path)
    work = Workload(kit.make_deployment({"path": str(tmp_path)}), device="cpu")
    assert work.load() == loaded
    assert work.describe()["weights_from"] == f"safetensors of {tmp_path}"
    for mine, theirs in zip(work._model.parameters(), random._model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.torch
def test_a_config_json_alone_is_built_with_random_weights(kit, torch, tmp_path):
    config = {
        "model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    work = Workload(kit.make_deployment(vars(read_model(tmp_path))), device="cpu")
    assert work.load() > 4 * 2 * 64 * 100
    assert work.describe()["weights_from"] == "random"
    work.warmup()


@pytest.mark.parametrize("warmup", ["no_reset", "short_prompt", "decode", "none"])
def test_a_mistake_is_in_the_reason_and_in_the_notes(kit, warmup):
    deployment = kit.make_deployment()
    counters = [
        kit.counters(allocated=0, reserved=0, free=840),
        kit.counters(allocated=200, reserved=210, free=620),
        kit.counters(allocated=232, reserved=240, free=570, peak_allocated=300, peak_reserved=330),
    ]
    work = kit.FakeWorkload(deployment, counters, 199 * MIB, options=ForwardOptions(warmup=warmup))
    measurement = AllocatorMeasurement(deployment, kit.StubEngine(), work)
    measurement.start()
    measurement.load()
    (profile,) = measurement.warmup()
    assert profile.activation.reason.startswith("a mistake: ")
    (note,) = measurement.notes()
    assert note.startswith("profiler.warmup: ")
    blocks = "too few blocks" if warmup == "no_reset" else "too many blocks"
    assert blocks in note


def test_points_share_a_load_only_where_the_forward_is_the_same(kit):
    deployment, engine = kit.make_deployment(), kit.StubEngine()
    keys = {
        profiler.load_key(deployment, engine)
        for profiler in (
            TorchAllocator(),
            TorchAllocator(timeout_s=9.0),
            TorchAllocator(warmup="decode"),
            TorchAllocator(attn="eager"),
            TorchAllocator(graphs=True),
            Nvml(),
        )
    }
    assert len(keys) == 5
    assert TorchAllocator(snapshot=True).load_key(deployment, engine) is None
    assert Nvml(pid=1).load_key(deployment, engine) is None


def test_a_snapshot_needs_a_peak_of_its_own(kit):
    with pytest.raises(InvalidValue, match=r"profiler\.snapshot needs"):
        TorchAllocator(snapshot=True, warmup="none").open(kit.make_deployment(), kit.StubEngine())
    with pytest.raises(InvalidValue, match=r"profiler\.snapshot shows one GPU, got tp=2"):
        TorchAllocator(snapshot=True).open(kit.make_deployment(tp=2), kit.StubEngine())


@pytest.mark.parametrize("profiler", [TorchAllocator, Nvml])
def test_graphs_of_an_engine_that_captures_none_are_refused(kit, monkeypatch, profiler):
    monkeypatch.setattr(kit.StubEngine, "graph_sizes", ())
    with pytest.raises(InvalidValue, match=r"profiler\.graphs: stub captures no graph"):
        profiler(graphs=True).open(kit.make_deployment(), kit.StubEngine())


@pytest.mark.parametrize(
    ("engine", "options", "count", "largest"),
    [
        ("vllm", (), 51, 512),
        ("vllm", ("max_num_seqs=64",), 19, 128),
        ("vllm", ("enforce_eager=true",), 0, 0),
        ("nano_vllm", (), 36, 512),
        ("nano_vllm", ("max_num_seqs=20",), 5, 16),
        ("sglang", (), 0, 0),
    ],
)
def test_the_captured_sizes_are_the_engines(engine, options, count, largest):
    (point,) = api.compose_points(["model=llama3_8b", "gpu=h200", f"engine={engine}", *options])
    deployment = point.run.engine.resolve(point.run, engine)
    sizes = point.run.engine.graph_batch_sizes(deployment)
    assert (len(sizes), max(sizes, default=0)) == (count, largest)
