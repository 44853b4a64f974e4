import threading
from types import SimpleNamespace

import pytest

from kvexp.contract import ProfilerUnavailable, Provenance
from kvexp.workload import UnusableReading
from kvexp_nvml import Nvml, NvmlDevice, NvmlMeasurement, Sampler, Usage

MIB = 1 << 20
ERRORS = [1, 2, 3, 4, 9, 10, 12, 13, 15, 17, 18, 20, 999]


@pytest.fixture
def nvml(kit):
    return kit.FakeNvml()


@pytest.fixture
def run(kit, nvml):
    """A measurement whose stages move the device's used bytes."""
    used = {"start": 100, "load": 350, "warmup": 520, "released": 390, "allocate": 700}

    def on_call(name):
        nvml.used_mib = used.get(name, nvml.used_mib)
        if name == "start":
            nvml.list_own_process(90 * MIB)

    def make(engine=None, parameter_bytes=200 * MIB, peak_reserved=370):
        deployment = kit.make_deployment()
        counters = [
            kit.counters(allocated=0, reserved=0, free=880),
            kit.counters(allocated=200, reserved=210, free=630),
            kit.counters(allocated=232, reserved=240, free=590, peak_allocated=300,
                         peak_reserved=peak_reserved),
            kit.counters(allocated=532, reserved=540, free=280),
        ]  # fmt: skip
        workload = kit.FakeWorkload(deployment, counters, parameter_bytes, on_call=on_call)
        return NvmlMeasurement(deployment, engine or kit.StubEngine(), workload, 0.001, nvml)

    return make


def to_warmup(measurement):
    measurement.start()
    measurement.load()
    return measurement.warmup()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "kvexp-nvml"]


def test_terms_sum_to_the_peak_over_the_context(run):
    measurement = run()
    (profile,) = to_warmup(measurement)
    assert profile.weights_bytes == 250 * MIB
    assert profile.non_torch_bytes == 40 * MIB
    assert profile.activation_bytes == 130 * MIB
    assert profile.cudagraph_bytes == 0
    assert sum(part.size_bytes for part in profile.parts) == (520 - 100) * MIB
    assert {part.provenance for part in profile.parts} == {Provenance.measured}
    assert "lower bound" in profile.activation.reason
    assert "every 0.001 s" in profile.activation.reason
    measurement.close()


def test_an_engine_that_charges_the_context_gets_it_without_neighbours(run, kit):
    (profile,) = to_warmup(run(kit.ContextEngine()))
    assert profile.non_torch_bytes == (40 + 100 - 5) * MIB
    assert f"{95 * MIB} bytes of CUDA context" in profile.non_torch.reason


def test_a_peak_short_of_torchs_own_is_noted(run):
    (profile,) = to_warmup(run())
    assert "short of" not in profile.activation.reason
    (profile,) = to_warmup(run(peak_reserved=400))
    assert f"{30 * MIB} bytes short of torch's reserved peak" in profile.activation.reason


def test_readings_hold_both_views(run, kit):
    measurement = run()
    to_warmup(measurement)
    measurement.allocate(kit.make_plan(measurement.deployment, 10))
    readings = measurement.readings()
    assert readings["load"]["allocated_bytes"] == 200 * MIB
    nvml = readings["nvml"]
    assert nvml["uuid"] == "0000-1111"
    assert nvml["driver_version"] == "580.1"
    assert nvml["memory_info"] == "v2"
    assert nvml["idle"]["used_bytes"] == 5 * MIB
    assert nvml["idle"]["process_bytes"] is None
    assert nvml["start"]["process_bytes"] == 90 * MIB
    assert nvml["start"]["reserved_bytes"] == 20 * MIB
    assert nvml["warmup"]["used_bytes"] == 390 * MIB
    assert nvml["allocate"]["used_bytes"] == 700 * MIB
    assert nvml["sampler"]["peak_used_bytes"] == 520 * MIB
    assert nvml["sampler"]["peak_process_bytes"] == 90 * MIB
    assert nvml["sampler"]["num_samples"] >= 1
    assert nvml["sampler"]["interval_s"] == 0.001


def test_nvml_is_opened_by_uuid_before_the_context_exists(run, nvml):
    measurement = run()
    nvml.fail = lambda call, n: None
    measurement.start()
    assert measurement.workload.calls == ["uuid", "start"]
    assert measurement.usage["idle"].used_bytes == 5 * MIB


def test_a_slice_is_found_by_its_own_uuid(nvml):
    nvml.uuid = "MIG-0000-1111"
    assert NvmlDevice(nvml, "0000-1111").read().used_bytes == 5 * MIB


def test_an_unknown_uuid_ends_the_run_with_the_first_error(nvml):
    nvml.uuid = "GPU-other"
    with pytest.raises(ProfilerUnavailable, match="NVML answers `Not Found`"):
        NvmlDevice(nvml, "0000-1111")
    assert nvml.initialised == 0


def test_without_version_2_the_older_record_answers_throughout(nvml):
    nvml.has_version_2 = False
    device = NvmlDevice(nvml, "0000-1111")
    usage = device.read()
    assert usage.used_bytes == 25 * MIB
    assert usage.reserved_bytes is None
    assert device.describe()["memory_info"] == "v1"


def test_a_binding_without_version_2_is_served(nvml, kit):
    class OldNvml(kit.FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
            return super().nvmlDeviceGetMemoryInfo(handle)

    assert NvmlDevice(OldNvml(), "0000-1111").describe()["memory_info"] == "v1"


def test_the_two_records_never_mix(nvml):
    device = NvmlDevice(nvml, "0000-1111")
    nvml.has_version_2 = False
    usage = device.read()
    assert usage.used_bytes is None
    assert "Function Not Found" in usage.reason


@pytest.mark.parametrize("code", ERRORS)
def test_an_error_at_init_is_one_line(run, nvml, code):
    nvml.fail = lambda call, n: code if call == "init" else None
    measurement = run()
    with pytest.raises(ProfilerUnavailable, match="NVML answers") as caught:
        measurement.start()
    assert "\n" not in str(caught.value)
    measurement.close()
    assert nvml.initialised == 0


def test_a_driver_update_without_reboot_is_explained(run, nvml):
    nvml.fail = lambda call, n: 18 if call == "init" else None
    with pytest.raises(ProfilerUnavailable, match="reboot or reload"):
        run().start()


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("call", ["processes", "driver"])
def test_side_information_degrades_to_null(run, nvml, call, code):
    if code == 1:
        nvml.fail = lambda name, n: code if name == call and n == 1 else None
    else:
        nvml.fail = lambda name, n: code if name == call else None
    measurement = run()
    (profile,) = to_warmup(measurement)
    assert profile.activation_bytes == 130 * MIB
    if call == "processes" and code != 1:
        start = measurement.readings()["nvml"]["start"]
        assert start["process_bytes"] is None
        assert start["used_bytes"] == 100 * MIB
        assert start["reason"].startswith("bytes of the process: ")
    measurement.close()


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("moment", ["idle", "start", "load"])
def test_a_stage_without_used_bytes_ends_the_run_by_name(run, nvml, code, moment):
    used = {"idle": 5, "start": 100, "load": 350}[moment]
    failed = []

    def fail(call, n):
        # the first call asks for the version
        if call != "memory" or n == 1 or nvml.used_mib != used or (code == 1 and failed):
            return None
        failed.append(n)
        return code

    nvml.fail = fail
    measurement = run()
    if code == 1:
        to_warmup(measurement)  # opened again, once
        assert nvml.num_inits == 2
    else:
        with pytest.raises(UnusableReading, match=f"NVML used bytes at {moment} are unavailable"):
            to_warmup(measurement)
        assert measurement.readings()["nvml"][moment]["used_bytes"] is None
    measurement.close()
    assert not threads()


@pytest.mark.parametrize("code", ERRORS)
def test_failing_samples_are_counted_and_do_not_end_the_run(kit, nvml, code):
    device = NvmlDevice(nvml, "0000-1111")
    nvml.fail = lambda call, n: code if call in ("memory", "init") and n % 2 else None
    sampler = Sampler(device.read, 0.001)
    for _ in range(4):
        sampler.take()
    assert sampler.num_samples + sampler.num_discarded == 4
    assert sampler.num_discarded > 0
    assert sampler.reason.startswith("NVML answers")


def test_an_unknown_failure_of_a_sample_is_counted():
    def read():
        raise OSError("no such library")

    sampler = Sampler(read, 0.001)
    sampler.take()
    assert sampler.as_dict()["num_discarded"] == 1
    assert sampler.as_dict()["reason"] == "OSError: no such library"


def test_no_usable_sample_ends_the_run_with_the_reason(run, nvml):
    measurement = run()
    measurement.start()
    measurement.load()
    usable = nvml.num_reads
    nvml.fail = lambda call, n: 15 if call == "memory" and nvml.used_mib == 520 else None
    measurement._interval_s = 100.0
    with pytest.raises(UnusableReading, match=r"no usable sample in \d+ .*GPU is lost"):
        measurement.warmup()
    assert nvml.num_reads > usable
    assert not threads()


@pytest.mark.parametrize(
    "record",
    [
        {"used": 17 << 40, "free": 3 << 30, "total": 24 << 30},
        {"used": 1 << 30, "free": 99 << 30, "total": 24 << 30},
        {"used": 1 << 30, "free": 1 << 30, "total": 24 << 30},
        {"used": (1 << 64) - 1, "free": (1 << 64) - 1, "total": (1 << 64) - 1},
        {"used": -1, "free": 1 << 30, "total": 1 << 30},
        {"used": None, "free": None, "total": 24 << 30},
        {"used": 0, "free": 0, "total": 0},
    ],
)
def test_records_that_cannot_be_true_are_discarded(nvml, record):
    device = NvmlDevice(nvml, "0000-1111")
    nvml.record = SimpleNamespace(**record)
    usage = device.read()
    assert usage.used_bytes is None
    assert usage.reason
    sampler = Sampler(device.read, 1.0)
    sampler.take()
    assert (sampler.num_samples, sampler.num_discarded, sampler.peak_used_bytes) == (0, 1, None)


@pytest.mark.parametrize("size", [None, (1 << 64) - 1, -1])
def test_the_drivers_blank_is_null_and_not_0(nvml, size):
    nvml.list_own_process(size)
    usage = NvmlDevice(nvml, "0000-1111").read()
    assert usage.process_bytes is None
    assert usage.used_bytes == 5 * MIB
    assert "does not tell" in usage.reason


def test_hidden_process_ids_are_explained(nvml):
    nvml.processes = [SimpleNamespace(pid=1, usedGpuMemory=7)]
    usage = NvmlDevice(nvml, "0000-1111").read()
    assert usage.process_bytes is None
    assert "pid namespace" in usage.reason


def test_weights_that_the_device_does_not_show_are_an_error(run):
    with pytest.raises(UnusableReading, match="NVML used bytes grew by"):
        to_warmup(run(parameter_bytes=251 * MIB))


def test_a_neighbour_that_leaves_is_said(run, nvml):
    measurement = run()
    measurement.start()
    measurement.load()
    measurement.usage["load"] = Usage(used_bytes=400 * MIB)
    (profile,) = measurement.warmup()
    assert profile.non_torch_bytes == -10 * MIB
    assert "negative" in profile.non_torch.reason


@pytest.mark.parametrize("fails_at", ["start", "load", "warmup", "allocate"])
def test_the_thread_ends_and_the_library_is_left_whatever_fails(run, nvml, kit, fails_at):
    measurement = run()
    inner = measurement.workload._on_call

    def on_call(name):
        inner(name)
        if name == fails_at:
            raise RuntimeError("CUDA out of memory")

    measurement.workload._on_call = on_call
    with pytest.raises(RuntimeError, match="out of memory"):
        to_warmup(measurement)
        measurement.allocate(kit.make_plan(measurement.deployment, 1))
    measurement.close()
    measurement.close()
    assert not threads()
    assert nvml.initialised == 0
    assert "nvml" in measurement.readings()


def test_close_without_start_is_quiet(run):
    run().close()


def test_the_sampler_samples_in_the_background():
    enough = threading.Event()
    peak = iter(range(10**9))

    def read():
        size = next(peak)
        if size >= 5:
            enough.set()
        return Usage(used_bytes=size)

    sampler = Sampler(read, 0.001)
    sampler.start()
    assert enough.wait(10)
    sampler.stop()
    sampler.stop()
    assert sampler.num_samples >= 5
    assert sampler.peak_used_bytes >= 5
    assert sampler.peak_process_bytes is None
    assert not threads()


def test_the_option_reaches_the_sampler(kit):
    measurement = Nvml(interval_s=0.5).open(kit.make_deployment(), kit.StubEngine())
    assert measurement._interval_s == 0.5
    assert Nvml.isolated


def test_the_real_binding_fits(nvml):
    pynvml = pytest.importorskip("pynvml")
    for name in vars(type(nvml)):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(pynvml, name), name
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(ProfilerUnavailable, match="NVML answers"):
            NvmlDevice(pynvml, "0000")
    else:
        pynvml.nvmlShutdown()


def unified(nvml, monkeypatch, tmp_path, meminfo):
    nvml.fail = lambda call, n: 3 if call in ("memory", "memory_v1") else None
    path = tmp_path / "meminfo"
    path.write_text(meminfo)
    monkeypatch.setattr("kvexp.nvml._MEMINFO", path)
    return NvmlDevice(nvml, "0000-1111")


def test_unified_memory_is_the_hosts_without_its_file_cache(nvml, monkeypatch, tmp_path):
    meminfo = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  700 kB\nCached:  600 kB\n"
    device = unified(nvml, monkeypatch, tmp_path, meminfo)
    assert device.describe()["memory_model"] == "unified"
    assert device.describe()["memory_info"] == "host"
    usage = device.read()
    assert (usage.used_bytes, usage.free_bytes, usage.total_bytes) == (
        300 * 1024,
        700 * 1024,
        1000 * 1024,
    )
    assert usage.reason.startswith("CPU and GPU share memory")


def test_unified_memory_that_the_host_does_not_tell_is_null(nvml, monkeypatch, tmp_path):
    usage = unified(nvml, monkeypatch, tmp_path, "MemTotal:  1000 kB\n").read()
    assert usage.used_bytes is None
    assert "share memory" in usage.reason


def test_a_dedicated_card_is_not_taken_for_unified(nvml):
    assert NvmlDevice(nvml, "0000-1111").describe()["memory_model"] == "dedicated"
    nvml.has_version_2 = False
    assert NvmlDevice(nvml, "0000-1111").describe()["memory_model"] == "dedicated"


def test_every_stage_has_its_own_peak(run, kit):
    measurement = run()
    to_warmup(measurement)
    measurement.allocate(kit.make_plan(measurement.deployment, 10))
    measurement.verify()
    stages = measurement.readings()["nvml"]["sampler"]["stages"]
    assert set(stages) == {"load", "warmup", "allocate", "verify"}
    assert stages["load"]["peak_used_bytes"] == 350 * MIB
    assert stages["warmup"]["peak_used_bytes"] == 520 * MIB
    assert stages["allocate"]["peak_used_bytes"] == 700 * MIB
    assert all(stage["interval_s"] == 0.001 for stage in stages.values())
    measurement.close()
    assert not threads()


@pytest.mark.parametrize("spelled", ["0000-1111", "GPU-0000-1111"])
def test_a_uuid_with_or_without_prefix_is_the_same_device(nvml, spelled):
    assert NvmlDevice(nvml, spelled).read().used_bytes == 5 * MIB


def test_another_process_can_be_watched(nvml):
    nvml.processes = [SimpleNamespace(pid=77, usedGpuMemory=3 * MIB)]
    device = NvmlDevice(nvml, "0000-1111", 77)
    assert device.process_ids() == (77,)
    usage = device.read()
    assert usage.process_bytes == 3 * MIB
    assert usage.others_bytes == 2 * MIB
