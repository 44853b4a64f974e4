import sys
from types import SimpleNamespace

import pytest

from kvexp.contract import DType, Gpu, InvalidValue, KvDtype
from kvexp.workload import WarmupShape, Workload, driver_version, transformers_config

FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False},
    "phi3": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
}


@pytest.mark.parametrize(
    ("tokens", "length", "seqs", "expected"),
    [
        (8192, 8192, 1024, (1, 8192)),
        (16384, 4096, 512, (4, 4096)),
        (8192, 40960, 1024, (1, 8192)),
        (16384, 4096, 2, (2, 4096)),
        (10000, 4096, 512, (2, 4096)),
        (1, 4096, 512, (1, 1)),
    ],
)
def test_the_warmup_is_the_largest_prefill(kit, tokens, length, seqs, expected):
    deployment = kit.make_deployment(
        max_num_batched_tokens=tokens, max_model_len=length, max_num_seqs=seqs
    )
    shape = WarmupShape.of(deployment)
    assert (shape.num_seqs, shape.seq_len) == expected


def count_parameters(model, family):
    """Counted by hand, from the architecture."""
    heads, kv_heads, size = model.num_attention_heads, model.kv_heads, model.head_size
    hidden, inner = model.hidden_size, model.intermediate_size
    layer = 2 * hidden * heads * size + 2 * hidden * kv_heads * size + 3 * hidden * inner
    layer += 2 * hidden
    if family == "qwen2":
        layer += heads * size + 2 * kv_heads * size
    if family == "qwen3":
        layer += 2 * size
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return model.num_hidden_layers * layer + embeddings + hidden


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_model_on_the_cpu(kit, family):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    deployment = kit.make_deployment(
        dict(model_type=family, **FAMILIES[family]), dtype=DType.bf16, kv_dtype=KvDtype.bf16
    )
    work = Workload(deployment, device="cpu")
    loaded = work.load()
    model = work._model
    parameters = list(model.parameters())
    expected = count_parameters(deployment.model, family)
    assert sum(each.numel() for each in parameters) == expected
    assert loaded >= 2 * expected
    assert loaded - 2 * expected < 1024  # rotary buffers, in fp32
    assert {each.dtype for each in parameters} == {torch.bfloat16}
    assert not any(each.requires_grad for each in parameters)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert getattr(model.config, "sliding_window", None) is None

    seen = []
    inner = model.forward

    def forward(**arguments):
        output = inner(**arguments)
        seen.append((arguments, output, torch.is_inference_mode_enabled()))
        return output

    model.forward = forward
    order = []
    work.warmup(lambda: order.append("peak"))
    ((arguments, output, inference),) = seen
    assert inference
    assert tuple(arguments["input_ids"].shape) == (2, 64)
    assert arguments["use_cache"] is False
    assert tuple(output.logits.shape) == (2, 1, deployment.model.vocab_size)
    assert order == ["peak"]

    work.allocate([64])
    work.close()
    assert work._model is None
    assert work._cache == []


def test_the_cache_takes_what_its_tensors_take(kit):
    pytest.importorskip("torch")
    work = Workload(kit.make_deployment(), device="cpu")
    assert work.allocate([100, 100, 7]) == 207
    assert not any(tensor.any() for tensor in work._cache)
    work.drop_cache()
    assert work._cache == []


@pytest.mark.slow
def test_rotary_buffers_hold_their_true_values(kit):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    work = Workload(kit.make_deployment({"rope_theta": 500000.0}), device="cpu")
    work.load()
    dims = torch.arange(0, 16, 2, dtype=torch.float32) / 16
    assert torch.equal(work._model.model.rotary_emb.inv_freq, 1.0 / 500000.0**dims)
    work.close()


@pytest.mark.slow
def test_scaled_rotary_embeddings_are_built(kit):
    pytest.importorskip("transformers")
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 128,
        "rope_type": "llama3",
    }
    model = kit.make_deployment({"rope_scaling": scaling, "rope_theta": 500000.0}).model
    config = transformers_config(model)
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else config.rope_scaling
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == 8.0


def test_facts_that_transformers_refuses_are_invalid(kit, monkeypatch):
    transformers = pytest.importorskip("transformers")

    def refuse(model_type, **facts):
        assert model_type == "llama"
        raise ValueError("Validation of `hidden_size` failed:\n    not a multiple of")

    monkeypatch.setattr(transformers.AutoConfig, "for_model", refuse)
    with pytest.raises(InvalidValue, match="transformers refuses model=tiny: ") as caught:
        transformers_config(kit.make_deployment().model)
    assert "\n" not in str(caught.value)


class FakeCuda:
    """`torch.cuda` as far as a workload calls it; every statistics call must name the device."""

    def __init__(self):
        self.calls = []
        self.free, self.total = 900, 1000

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return {
                "mem_get_info": (self.free, self.total),
                "get_device_name": "NVIDIA Fake",
                "memory_allocated": 10,
                "memory_reserved": 20,
                "max_memory_allocated": 30,
                "max_memory_reserved": 40,
                "get_allocator_backend": "native",
                "get_device_properties": SimpleNamespace(
                    name="NVIDIA Fake", uuid="0000-1111", major=9, minor=0
                ),
            }.get(name)

        return call


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    fake.memory = SimpleNamespace(
        _snapshot=lambda: {"allocator_settings": {"expandable_segments": True, "other": object()}}
    )
    torch = SimpleNamespace(
        cuda=fake, __version__="2.11.0+cu130", version=SimpleNamespace(cuda="13.0")
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.17.0")
    return fake


def test_the_device_is_named_in_every_call(kit, cuda):
    work = Workload(kit.make_deployment(), device=3)
    facts = work.start()
    assert (facts.name, facts.total_bytes, facts.free_bytes) == ("NVIDIA Fake", 1000, 900)
    assert ("set_device", "cuda:3") in cuda.calls
    for call in cuda.calls:
        assert call[0] == "empty_cache" or call[1] == "cuda:3"
    assert cuda.calls.index(("empty_cache",)) < cuda.calls.index(("mem_get_info", "cuda:3"))
    counters = work.read()
    assert counters.as_dict() == {
        "allocated_bytes": 10,
        "reserved_bytes": 20,
        "peak_allocated_bytes": 30,
        "peak_reserved_bytes": 40,
        "free_bytes": 900,
        "total_bytes": 1000,
        "non_torch_bytes": 80,
    }


def test_what_runs_on_what_is_recorded(kit, cuda, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    described = Workload(kit.make_deployment()).describe()
    assert described["attention"] == "auto"  # what that is shows once the model is built
    assert described["weights_from"] == "random"
    assert described["shape"] == {"num_seqs": 2, "seq_len": 64}
    assert described["versions"] == {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "transformers": "5.17.0",
    }
    assert described["device"]["uuid"] == "0000-1111"
    assert described["device"]["capability"] == "9.0"
    assert described["allocator"] == {
        "backend": "native",
        "settings": {"expandable_segments": True},
        "allowed_bytes": None,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": None,
    }
    del cuda.memory
    assert Workload(kit.make_deployment()).describe()["allocator"]["settings"] is None


def test_an_emulated_card_caps_what_torch_may_take(kit, cuda):
    card = Gpu(name="Small", source="here", total_bytes=500, context_bytes=0, emulate=True)
    work = Workload(kit.make_deployment(gpu=card, total_bytes=500), device=1)
    work.start()
    # 100 of 1000 are in use, 20 of them torch's own
    assert ("set_per_process_memory_fraction", 0.42, "cuda:1") in cuda.calls
    assert work.describe()["allocator"]["allowed_bytes"] == 420


def test_an_emulated_card_without_room_is_refused(kit, cuda):
    card = Gpu(name="Small", source="here", total_bytes=50, context_bytes=0, emulate=True)
    with pytest.raises(InvalidValue, match=r"gpu\.emulate: .* are in use already, gpu=Small has"):
        Workload(kit.make_deployment(gpu=card, total_bytes=50)).start()


def test_a_card_that_is_not_emulated_is_not_capped(kit, cuda):
    Workload(kit.make_deployment()).start()
    assert all(call[0] != "set_per_process_memory_fraction" for call in cuda.calls)


def test_unified_memory_is_free_without_the_file_cache(kit, cuda, monkeypatch):
    facts = SimpleNamespace(name="GB10", uuid="0", major=12, minor=1, is_integrated=1)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: facts, raising=False)
    monkeypatch.setattr("kvexp.workload.running.host_memory", lambda: (1000, 950))
    assert Workload(kit.make_deployment()).read().free_bytes == 950


def test_a_device_that_no_longer_answers_does_not_stop_close(kit, cuda):
    def fail(*arguments):
        raise RuntimeError("CUDA error: device-side assert triggered")

    work = Workload(kit.make_deployment())
    work.close()
    assert cuda.calls == []
    work._model = object()
    cuda.synchronize = fail
    work.close()
    assert work._model is None


def test_the_drivers_version_is_a_version_or_null():
    version = driver_version()
    assert version is None or version.split(".")[0].isdigit()
