"""The accounting of a measured point, and its neighbours."""

import pytest

from kvexp.contract import Stage
from kvexp.workload.accounting import Known, accounting, neighbours
from kvexp_torch_allocator import AllocatorMeasurement

MIB = 1 << 20


@pytest.fixture
def counters(kit):
    """A card of 1000 MiB: 60 with others, a context of 100, 30 of kernels."""
    return {
        Stage.start: kit.counters(allocated=0, reserved=0, free=840),
        Stage.load: kit.counters(allocated=200, reserved=210, free=620),
        Stage.warmup: kit.counters(allocated=232, reserved=240, free=570, peak_allocated=300,
                                   peak_reserved=330),
        Stage.allocate: kit.counters(allocated=532, reserved=544, free=266),
        Stage.verify: kit.counters(allocated=532, reserved=544, free=264, peak_allocated=600,
                                   peak_reserved=620),
    }  # fmt: skip


KNOWN = Known(
    others_bytes=60 * MIB, parameter_bytes=199 * MIB, kv_cache_bytes=300 * MIB, graphs_bytes=0
)


def test_terms_known_before_the_cache_explain_the_driver_after_it(counters):
    found = accounting(counters, KNOWN)
    assert {name: size // MIB for name, size in found["terms"].items()} == {
        "others": 60,
        "context": 100,
        "libraries": 30,
        "weights": 199,
        "rounding": 1,
        "workspaces": 32,
        "allocator_cached": 8,
        "kv_cache": 300,
        "kv_cache_rounding": 4,
        "graphs": 0,
    }
    assert found["driver_used_bytes"] == 736 * MIB
    assert found["sum_bytes"] == 734 * MIB
    assert found["residual_bytes"] == 2 * MIB  # a kernel that loaded late
    assert found["stage"] == "verify"
    assert found["closes"] is True


def test_what_nobody_counted_does_not_close(counters, kit):
    counters[Stage.verify] = kit.counters(allocated=532, reserved=544, free=164)
    found = accounting(counters, KNOWN)
    assert found["residual_bytes"] == 102 * MIB
    assert found["closes"] is False


def test_there_is_none_before_the_warmup(counters):
    assert accounting({Stage.start: counters[Stage.start]}, KNOWN) is None


@pytest.mark.parametrize(
    ("others", "drift", "contaminated"),
    [
        ({"start": 5, "load": 5, "warmup": 5}, 0, False),
        ({"start": 5, "load": 5, "warmup": 60}, 55, False),
        ({"start": 5, "load": 105, "warmup": 5}, 100, True),
        ({"start": 500, "load": 5}, -495, True),
        ({"start": 5, "load": None, "warmup": 200}, 195, True),
        ({"start": None, "load": None}, None, None),
    ],
)
def test_a_neighbour_that_moves_contaminates(others, drift, contaminated):
    sizes = {name: None if size is None else size * MIB for name, size in others.items()}
    found = neighbours(sizes, "hidden")
    assert found["drift_bytes"] == (None if drift is None else drift * MIB)
    assert found["contaminated"] is contaminated
    assert found["reason"] == "hidden"


@pytest.fixture
def measured(kit, counters):
    """A measurement beside a neighbour, whose bytes at each stage are given."""

    def run(neighbour, listed=True):
        nvml = kit.FakeNvml()
        own = {"start": 100, "load": 320, "released": 370, "allocate": 674, "verify": 676}

        def on_call(name):
            if name in own:
                size = own[name]
                nvml.used_mib = size + neighbour.get(name, 60)
                nvml.list_own_process(size * MIB if listed else None)

        nvml.used_mib = 60
        work = kit.FakeWorkload(
            kit.make_deployment(), list(counters.values()), 199 * MIB, on_call=on_call
        )
        measurement = AllocatorMeasurement(work.deployment, kit.StubEngine(), work, nvml=nvml)
        measurement.start()
        measurement.load()
        measurement.warmup()
        return measurement

    return run


def test_neighbours_are_told_apart_from_this_process(measured):
    measurement = measured({})
    seen = measurement.readings()["neighbours"]
    assert seen["others_bytes"] == {"start": 60 * MIB, "load": 60 * MIB, "warmup": 60 * MIB}
    assert seen["contaminated"] is False
    assert measurement.notes() == ()
    assert measurement.readings()["accounting"]["terms"]["others"] == 60 * MIB


def test_a_neighbour_that_grows_is_flagged(measured):
    measurement = measured({"released": 260})
    assert measurement.readings()["neighbours"]["drift_bytes"] == 200 * MIB
    (note,) = measurement.notes()
    assert note.startswith("contaminated: memory of other processes moved by 0.20 GiB")


def test_a_driver_that_may_spill_is_said(measured, monkeypatch, tmp_path):
    (tmp_path / "version").write_text("Linux version 6.6.87.2-microsoft-standard-WSL2")
    monkeypatch.setattr("kvexp.workload.machine._KERNEL", tmp_path / "version")
    (note,) = measured({}).notes()
    assert "may spill into host memory" in note


def test_where_the_driver_tells_nothing_nothing_is_claimed(measured):
    seen = measured({"released": 260}, listed=False).readings()["neighbours"]
    assert seen["contaminated"] is None
    assert "does not tell" in seen["reason"]


def test_without_nvml_the_measurement_runs_and_says_so(kit, counters):
    nvml = kit.FakeNvml()
    nvml.fail = lambda call, n: 12
    work = kit.FakeWorkload(kit.make_deployment(), list(counters.values()), 199 * MIB)
    measurement = AllocatorMeasurement(work.deployment, kit.StubEngine(), work, nvml=nvml)
    measurement.start()
    measurement.load()
    measurement.warmup()
    seen = measurement.readings()["neighbours"]
    assert seen["others_bytes"] == {}
    assert "NVML Shared Library Not Found" in seen["reason"]
    assert measurement.readings()["accounting"]["others_known"] is False


def test_the_cache_is_released_and_measured_anew_for_the_next_point(measured, kit):
    measurement = measured({})
    plan = kit.make_plan(measurement.deployment, 10)
    measurement.allocate(plan)
    measurement.verify()
    assert measurement.readings()["accounting"]["stage"] == "verify"
    measurement.release()
    assert measurement.readings()["accounting"]["stage"] == "warmup"
    assert "allocate" not in measurement.readings()


def test_graphs_are_captured_where_they_are_asked_for(kit, counters):
    counters[Stage.graphs] = kit.counters(allocated=550, reserved=564, free=230)
    work = kit.FakeWorkload(kit.make_deployment(), list(counters.values()), 199 * MIB)
    measurement = AllocatorMeasurement(
        work.deployment, kit.StubEngine(), work, graphs=True, nvml=kit.FakeNvml()
    )
    assert measurement.captures
    measurement.start()
    measurement.load()
    measurement.warmup()
    measurement.allocate(kit.make_plan(work.deployment, 10))
    measurement.verify()
    measurement.capture()
    assert "capture [1, 2, 4]" in work.calls
    assert measurement.readings()["graphs_bytes"] == 34 * MIB
