"""Two measurements never share a GPU."""

import subprocess
import sys
import time

from kvexp.gpu_lock import GpuLock

OTHER = """
import sys
from pathlib import Path
from kvexp.gpu_lock import GpuLock
lock = GpuLock("some-uuid", Path(sys.argv[1]))
lock.acquire()
print("got it", flush=True)
sys.stdin.read()
"""


def other_process(folder):
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_second_waits_says_so_and_follows_the_first(tmp_path):
    lock = GpuLock("some-uuid", tmp_path)
    lock.acquire()
    other = other_process(tmp_path)

    assert "waiting for the GPU" in other.stderr.readline()
    lock.release()
    assert other.stdout.readline() == "got it\n"
    other.communicate("")


def test_a_lock_ends_with_its_process(tmp_path):
    other = other_process(tmp_path)
    assert other.stdout.readline() == "got it\n"
    other.kill()
    other.communicate()

    started = time.monotonic()
    lock = GpuLock("some-uuid", tmp_path)
    lock.acquire()
    lock.release()
    assert time.monotonic() - started < 5


def test_devices_do_not_wait_for_each_other(tmp_path, capsys):
    one, two = GpuLock("one", tmp_path), GpuLock("two", tmp_path)
    one.acquire()
    two.acquire()

    assert capsys.readouterr().err == ""
    one.release()
    two.release()
