"""A process that shall not outlive the one that started it."""

import ctypes
import os
import signal
import sys


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when the parent is gone, however it went."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
