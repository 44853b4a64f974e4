import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvexp.contract import InvalidValue, ProfilerUnavailable
from kvexp.workload import machine as driver
from kvexp_nvml import Nvml
from kvexp_torch_allocator import TorchAllocator


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which everything is there, as far as can be told without importing it."""
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    state = SimpleNamespace(
        installed={"torch", "transformers", "pynvml"},
        version=tmp_path / "version.py",
        answer=SimpleNamespace(stdout="0 1\n", returncode=0),
        library=True,
    )

    def find_spec(name, package=None):
        if name not in state.installed:
            return None
        return SimpleNamespace(origin=str(tmp_path / "__init__.py"))

    def run(command, **options):
        if isinstance(state.answer, Exception):
            raise state.answer
        return state.answer

    def load(name):
        if not state.library:
            raise OSError(name)

    monkeypatch.setattr(driver.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(driver.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(driver.subprocess, "run", run)
    monkeypatch.setattr("kvexp_nvml.ctypes.CDLL", load)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return state


@pytest.mark.parametrize("profiler", [TorchAllocator(), Nvml()])
def test_a_complete_machine_passes(machine, profiler):
    profiler.check()


@pytest.mark.parametrize(
    ("profiler", "module"),
    [
        (TorchAllocator(), "torch"),
        (TorchAllocator(), "transformers"),
        (Nvml(), "pynvml"),
        (Nvml(), "torch"),
    ],
)
def test_a_missing_package_is_named_with_the_command(machine, profiler, module):
    machine.installed.remove(module)
    with pytest.raises(ProfilerUnavailable) as caught:
        profiler.check()
    assert module in str(caught.value)
    assert "pip install 'kvexp[torch]'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_torch_without_cuda_is_refused_unimported(machine):
    machine.version.write_text("cuda: Optional[str] = None\n")
    with pytest.raises(ProfilerUnavailable, match=r"torch 2\.13\.0\+cpu is built without CUDA"):
        TorchAllocator().check()
    machine.version.unlink()
    TorchAllocator().check()


@pytest.mark.parametrize(
    ("stdout", "message"),
    [
        ("no library\n", "no driver is installed"),
        ("100 0\n", "no device is visible"),
        ("0 0\n", "no device is visible"),
        ("803 0\n", "reboot or reload"),
        ("999 0\n", "error 999"),
        ("", "exit status -11"),
    ],
)
def test_the_drivers_answer_is_explained(machine, stdout, message):
    machine.answer = SimpleNamespace(stdout=stdout, returncode=-11)
    with pytest.raises(ProfilerUnavailable, match=message):
        TorchAllocator().check()


def test_hidden_devices_are_mentioned(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.answer = SimpleNamespace(stdout="100 0\n", returncode=0)
    with pytest.raises(ProfilerUnavailable, match="CUDA_VISIBLE_DEVICES=''"):
        TorchAllocator().check()


def test_a_driver_that_hangs_is_given_up(machine):
    machine.answer = subprocess.TimeoutExpired("python", 60)
    with pytest.raises(ProfilerUnavailable, match="within 60 s"):
        TorchAllocator().check()


def test_a_missing_nvml_library_is_named(machine):
    machine.library = False
    TorchAllocator().check()
    with pytest.raises(ProfilerUnavailable, match=r"libnvidia-ml\.so\.1"):
        Nvml().check()


def test_the_real_probe_answers_here():
    problem = driver._driver_problem()
    assert problem is None or "driver" in problem or "device" in problem


def test_importing_the_plugins_imports_no_device_library():
    program = (
        "import sys, kvexp_nvml, kvexp_torch_allocator;"
        "print([n for n in ('torch', 'transformers', 'pynvml') if n in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("interval_s", [0, 0.0, -0.01, float("nan"), float("inf")])
def test_the_interval_must_be_positive(interval_s):
    with pytest.raises(InvalidValue, match=r"profiler\.interval_s must be more than 0"):
        Nvml(interval_s=interval_s)


def test_check_needs_no_import_here():
    if importlib.util.find_spec("torch") is None:
        with pytest.raises(ProfilerUnavailable, match="torch"):
            TorchAllocator().check()
