"""Devices held by the parent, and what a process leaves on them."""

import ctypes
import subprocess
from types import SimpleNamespace

import pytest

from kvexp import residual
from kvexp.contract import NvmlDevice, ProfilerUnavailable, visible_uuids
from kvexp.gpu_lock import GpuLock
from kvexp.residual import Held
from kvexp.workload import machine

MIB = 1 << 20


@pytest.fixture
def nvml(kit, monkeypatch, tmp_path):
    fake = kit.FakeNvml()
    monkeypatch.setattr(residual, "open_device", lambda uuid: NvmlDevice(fake, uuid))
    monkeypatch.setattr(residual, "GpuLock", lambda uuid: GpuLock(uuid, tmp_path))
    return fake


def test_a_device_that_is_back_where_it_was_has_no_residual(nvml):
    held = Held(1, lambda: ["0000-1111", "never-asked"])
    nvml.used_mib = 5
    (ending,) = held.give_back()
    assert ending == {
        "uuid": "0000-1111",
        "before_bytes": 5 * MIB,
        "after_bytes": 5 * MIB,
        "neighbours_moved_bytes": 0,
        "residual_bytes": 0,
        "reason": None,
    }
    assert nvml.initialised == 0


def test_what_is_left_is_waited_for_and_then_recorded(nvml):
    held = Held(1, lambda: ["0000-1111"])
    nvml.used_mib = 530
    (ending,) = held.give_back(wait_s=0.2)
    assert ending["residual_bytes"] == 525 * MIB
    assert residual.is_left(ending)
    assert nvml.num_reads > 2


def test_neighbours_that_grew_or_left_are_counted_out(nvml):
    def process(pid, mib):
        return SimpleNamespace(pid=pid, usedGpuMemory=mib * MIB)

    nvml.used_mib, nvml.processes = 105, [process(7, 60), process(8, 40)]
    held = Held(1, lambda: ["0000-1111"])
    nvml.used_mib, nvml.processes = 305, [process(7, 260), process(9, 40)]
    (ending,) = held.give_back(wait_s=0.2)
    assert ending["neighbours_moved_bytes"] == 160 * MIB
    assert ending["residual_bytes"] == 40 * MIB  # a process that was not there before


def test_a_driver_that_does_not_answer_leaves_null_and_a_reason(nvml):
    held = Held(1, lambda: ["0000-1111"])
    nvml.fail = lambda call, n: 15
    (ending,) = held.give_back(wait_s=0.2)
    assert ending["residual_bytes"] is None
    assert "GPU is lost" in ending["reason"]
    assert not residual.is_left(ending)


def test_without_a_driver_there_is_nothing_to_hold(nvml):
    def none():
        raise ProfilerUnavailable("no driver is installed")

    held = Held(1, none)
    assert held.give_back() == [{"residual_bytes": None, "reason": "no driver is installed"}]


def test_two_measurements_do_not_hold_the_same_device(nvml, tmp_path):
    import fcntl

    held = Held(1, lambda: ["0000-1111"])
    with (tmp_path / "kvexp-gpu-0000-1111.lock").open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.give_back()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def answering(monkeypatch, stdout, returncode=0):
    answer = SimpleNamespace(stdout=stdout, returncode=returncode)
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: answer)


def test_the_driver_names_its_visible_devices_in_its_order(monkeypatch):
    answering(monkeypatch, "bbbb\naaaa\n")
    assert visible_uuids() == ("bbbb", "aaaa")


def test_a_driver_without_devices_is_said(monkeypatch):
    answering(monkeypatch, "no library")
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: SimpleNamespace(
        stdout="no library\n", returncode=1))  # fmt: skip
    with pytest.raises(ProfilerUnavailable, match="no driver is installed"):
        visible_uuids()


STAND_IN = r"""
#include <string.h>
int cuInit(int flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0xa0 + device, 16); return 0; }
int cuDeviceGetUuid(char *uuid, int device) { return 1; }
"""


def test_the_program_that_asks_the_driver_reads_whole_uuids(tmp_path):
    """Against a driver library compiled here, with the signatures of CUDA's header."""
    import shutil

    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "cuda.c").write_text(STAND_IN)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "cuda.c")], check=True
    )
    ctypes.CDLL(str(library))
    program = machine._UUIDS.replace('"libcuda.so.1"', repr(str(library)))
    import sys

    told = subprocess.check_output([sys.executable, "-I", "-S", "-c", program], text=True)
    assert told.split() == [
        "a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0",
        "a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1",
    ]
