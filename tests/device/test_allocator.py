import pytest

from kvexp.contract import InvalidValue, Provenance, Quantization
from kvexp.workload import UnusableReading
from kvexp_torch_allocator import AllocatorMeasurement, TorchAllocator

MIB = 1 << 20


@pytest.fixture
def stages(kit):
    """Counters after start, load, warmup, allocate of a card with a 60 MiB neighbour."""
    return [
        kit.counters(allocated=0, reserved=0, free=840),
        kit.counters(allocated=200, reserved=210, free=620, peak_allocated=230, peak_reserved=240),
        kit.counters(allocated=232, reserved=240, free=570, peak_allocated=300, peak_reserved=330),
        kit.counters(allocated=532, reserved=540, free=270),
    ]


@pytest.fixture
def measurement(kit, stages):
    def make(engine=None, deployment=None, parameter_bytes=199 * MIB, **workload):
        deployment = deployment or kit.make_deployment()
        fake = kit.FakeWorkload(deployment, stages, parameter_bytes, **workload)
        return AllocatorMeasurement(deployment, engine or kit.StubEngine(), fake)

    return make


def to_warmup(measurement):
    measurement.start()
    measurement.load()
    return measurement.warmup()


def test_terms_are_differences_of_counters(measurement):
    (profile,) = to_warmup(measurement())
    assert profile.weights_bytes == 200 * MIB
    assert profile.activation_bytes == 100 * MIB
    # outside the allocator: 160 after the context, 190 at the end
    assert profile.non_torch_bytes == 30 * MIB
    assert profile.cudagraph_bytes == 0
    assert {part.provenance for part in profile.parts} == {Provenance.measured}
    assert "allocated_bytes" in profile.weights.reason
    assert "peak_allocated_bytes" in profile.activation.reason
    assert "2 x 64 tokens" in profile.activation.reason
    assert "reserved_bytes" in profile.non_torch.reason
    assert "no CUDA graph" in profile.cudagraph.reason


def test_the_load_peak_is_no_activation(measurement, kit, stages):
    stages[1] = kit.counters(allocated=200, reserved=210, free=620, peak_allocated=800,
                             peak_reserved=800)  # fmt: skip
    (profile,) = to_warmup(measurement())
    assert profile.activation_bytes == 100 * MIB


def test_an_engine_that_charges_the_context_gets_all_of_it(measurement, kit):
    (profile,) = to_warmup(measurement(kit.ContextEngine()))
    # 430 in use, 232 of them allocated: the 8 that the allocator holds unused are charged too
    assert profile.non_torch_bytes == 198 * MIB
    assert "total - free - torch allocated_bytes" in profile.non_torch.reason


def test_its_terms_sum_to_the_engines_own_formula(measurement, kit, stages):
    (profile,) = to_warmup(measurement(kit.ContextEngine()))
    after = stages[2]
    used_less_current = after.total_bytes - after.free_bytes - after.allocated_bytes
    charged = sum(part.size_bytes for part in profile.parts)
    assert charged == used_less_current + after.peak_allocated_bytes


def test_what_others_use_is_not_charged_twice(measurement, kit):
    deployment = kit.make_deployment(used_by_others_bytes=60 * MIB)
    (profile,) = to_warmup(measurement(kit.ContextEngine(), deployment))
    assert profile.non_torch_bytes == 138 * MIB
    assert str(60 * MIB) in profile.non_torch.reason


def test_negative_non_torch_keeps_its_sign_and_says_so(measurement, kit, stages):
    stages[2] = kit.counters(allocated=232, reserved=240, free=700, peak_allocated=300,
                             peak_reserved=330)  # fmt: skip
    (profile,) = to_warmup(measurement())
    assert profile.non_torch_bytes == -100 * MIB
    assert "negative" in profile.non_torch.reason
    deployment = kit.make_deployment(used_by_others_bytes=500 * MIB)
    (profile,) = to_warmup(measurement(kit.ContextEngine(), deployment))
    assert profile.non_torch_bytes == -432 * MIB
    assert "negative" in profile.non_torch.reason


def test_the_cache_is_allocated_as_planned(measurement, kit):
    run = measurement()
    to_warmup(run)
    plan = kit.make_plan(run.deployment, 10)
    assert run.allocate(plan) == 10 * plan.block_bytes_per_rank[0]


@pytest.mark.parametrize("off", [-1, 1])
def test_a_byte_more_or_less_than_planned_is_an_error(measurement, kit, off):
    run = measurement()
    to_warmup(run)
    take = run.workload.allocate
    run.workload.allocate = lambda sizes: take(sizes) + off
    with pytest.raises(UnusableReading, match="were planned"):
        run.allocate(kit.make_plan(run.deployment, 10))


def test_a_cache_that_no_counter_sees_is_an_error(measurement, kit, stages):
    stages[3] = stages[2]
    run = measurement()
    to_warmup(run)
    with pytest.raises(UnusableReading, match="allocated_bytes grew by 0"):
        run.allocate(kit.make_plan(run.deployment, 10))


def test_weights_on_another_device_are_an_error(measurement):
    with pytest.raises(UnusableReading, match="allocated_bytes grew by"):
        to_warmup(measurement(parameter_bytes=201 * MIB))


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"allocated": 1, "reserved": 2, "free": 1001}, "free_bytes .* exceeds total_bytes"),
        ({"allocated": 3, "reserved": 2, "free": 500}, "allocated_bytes .* exceeds reserved_bytes"),
        ({"allocated": 1, "reserved": 600, "free": 500}, "reserved_bytes .* exceeds used_bytes"),
        (
            {"allocated": 2, "reserved": 2, "free": 5, "peak_allocated": 1},
            "exceeds peak_allocated_bytes",
        ),
        (
            {"allocated": 2, "reserved": 2, "free": 5, "peak_reserved": 1},
            "exceeds peak_reserved_bytes",
        ),
        ({"allocated": -1, "reserved": 2, "free": 5}, "allocated_bytes is negative"),
        ({"allocated": 1, "reserved": 2, "free": -5}, "free_bytes is negative"),
    ],
)
def test_counters_that_cannot_be_true_are_named(kit, sizes, named):
    with pytest.raises(UnusableReading, match=named):
        kit.counters(**sizes)


def test_readings_hold_every_counter_of_every_stage(measurement, kit):
    described = {
        "attention": "sdpa",
        "shape": {"num_seqs": 2, "seq_len": 64},
        "allocator": {"backend": "native"},
    }
    run = measurement(described=described)
    assert set(run.readings()) == {
        *("parameter_bytes", "charges_context", "accounting", "neighbours", "timings"),
    }
    to_warmup(run)
    run.allocate(kit.make_plan(run.deployment, 10))
    readings = run.readings()
    for stage in ("start", "load", "warmup", "allocate"):
        before = set() if stage == "start" else {"free_before_bytes"}
        assert set(readings[stage]) == before | {
            "allocated_bytes",
            "reserved_bytes",
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "free_bytes",
            "total_bytes",
            "non_torch_bytes",
        }
        used = readings[stage]["total_bytes"] - readings[stage]["free_bytes"]
        assert used == readings[stage]["reserved_bytes"] + readings[stage]["non_torch_bytes"]
    assert described.items() <= readings.items()


def test_another_allocator_backend_is_named_in_every_term(measurement):
    (profile,) = to_warmup(measurement(described={"allocator": {"backend": "cudaMallocAsync"}}))
    assert all("cudaMallocAsync" in part.reason for part in profile.parts)


def test_readings_survive_a_failing_stage(measurement):
    def fail(name):
        if name == "load":
            raise RuntimeError("CUDA out of memory")

    run = measurement(on_call=fail)
    run.start()
    with pytest.raises(RuntimeError, match="out of memory"):
        run.load()
    run.close()
    assert "start" in run.readings()
    assert run.workload.calls == ["uuid", "start", "load", "close"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pp": 4}, "torch_allocator measures tensor-parallel ranks, got pp=4"),
        ({"quantization": Quantization.fp8}, "unquantised weights, got quantization=fp8"),
        ({"model": {"model_type": "mamba2"}}, "llama, mistral.*got .*mamba2"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(kit, values, message):
    with pytest.raises(InvalidValue, match=message):
        TorchAllocator().open(kit.make_deployment(**values), kit.StubEngine())


def test_opening_touches_nothing(kit):
    run = TorchAllocator().open(kit.make_deployment(), kit.StubEngine())
    assert isinstance(run, AllocatorMeasurement)
    assert TorchAllocator.isolated
    run.close()
