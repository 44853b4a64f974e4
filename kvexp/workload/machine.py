"""Can this machine measure? Told without a CUDA context."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kvexp.errors import ProfilerUnavailable

# Run in a process of its own: cuInit leaves state behind that a fork would inherit, and this
# process shall hold nothing of CUDA. It obeys CUDA_VISIBLE_DEVICES and costs no import of torch.
_PROBE = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("no library")
else:
    count = ctypes.c_int()
    print(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""
_UUIDS = """
import ctypes, uuid
cuda = ctypes.CDLL("libcuda.so.1")
count, device, told = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    raise SystemExit(1)
ask = getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)  # a slice of a card has its own
for index in range(count.value):
    if cuda.cuDeviceGet(ctypes.byref(device), index) or ask(told, device):
        raise SystemExit(1)
    print(uuid.UUID(bytes=told.raw))
"""
_DRIVER_ERRORS = {
    100: "no device is visible",
    803: "driver and library versions differ: reboot or reload the driver module",
}


def check_device(modules: tuple[str, ...] = ("torch", "transformers")) -> None:
    """Do nothing where `modules` and a visible NVIDIA GPU are there.

    Nothing is imported and no CUDA context is made: installed packages are looked up, and a short
    process of its own asks the driver.

    Raises:
        ProfilerUnavailable: something is missing; the message says what, and how to get it.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ProfilerUnavailable(f"{module} is not installed: pip install 'kvexp[torch]'")
    if "torch" in modules and not _torch_has_cuda():
        raise ProfilerUnavailable(
            f"torch {importlib.metadata.version('torch')} is built without CUDA:"
            " pip install --force-reinstall 'kvexp[torch]'"
        )
    if problem := _driver_problem():
        raise ProfilerUnavailable(f"{problem}; profiler=analytic needs no GPU")


def visible_uuids() -> tuple[str, ...]:
    """The UUIDs of the devices that CUDA sees, in its order, without prefix; no context is made.

    The driver itself reads CUDA_VISIBLE_DEVICES, so every spelling means what it means there.

    Raises:
        ProfilerUnavailable: the driver offers no device.
    """
    answer = _ask(_UUIDS)
    found = answer.stdout.split() if answer is not None and answer.returncode == 0 else []
    if not found:
        raise ProfilerUnavailable(_driver_problem() or "the driver does not name its devices")
    return tuple(found)


def _torch_has_cuda() -> bool:
    """Read off the installed files; True where they do not tell."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    version = Path(spec.origin).with_name("version.py")
    if not version.is_file():
        return True
    return re.search(r"^cuda\b.*= *None\b", version.read_text(), re.MULTILINE) is None


def _ask(program: str) -> subprocess.CompletedProcess[str] | None:
    """A short program's answer, from a process of its own; None where there is none in time."""
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    return None


def _driver_problem() -> str | None:
    """Why the driver offers no device, None when it offers one."""
    answer = _ask(_PROBE)
    if answer is None:
        return "the driver did not answer within 60 s"
    if answer.stdout.strip() == "no library":
        return "no driver is installed (libcuda.so.1 cannot be loaded)"
    code, _, count = answer.stdout.strip().partition(" ")
    if not code.isdigit() or not count.isdigit():
        return f"asking the driver failed with exit status {answer.returncode}"
    if int(code) == 0 and int(count) > 0:
        return None
    reason = _DRIVER_ERRORS.get(int(code) or 100, f"the driver answers error {code}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return reason if visible is None else f"{reason} (CUDA_VISIBLE_DEVICES={visible!r})"


def may_spill() -> bool:
    """Whether the driver may put device memory into the host's when the card is full (WSL)."""
    with suppress(OSError):
        return "microsoft" in _KERNEL.read_text().lower()
    return False


_KERNEL = Path("/proc/version")


def import_libraries() -> None:
    """Import torch and transformers, where they are installed; it takes seconds."""
    with suppress(ImportError):
        from transformers import AutoModelForCausalLM  # noqa: F401, PLC0415


def driver_version() -> str | None:
    """The NVIDIA driver's version as the kernel module states it, None where it does not."""
    for path in (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")):
        with suppress(OSError):
            if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", path.read_text()):
                return found[0]
    return None
