"""One measurement at a time on a GPU, across processes and users of a machine."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class GpuLock:
    """A lock file named after the device's UUID; it ends with the process that holds it."""

    def __init__(self, uuid: str, folder: Path | None = None) -> None:
        self.path = (folder or Path(tempfile.gettempdir())) / f"kvexp-gpu-{uuid}.lock"
        self._handle: int | None = None

    def acquire(self) -> None:
        """Wait until no other measurement runs on the device; waiting is said on stderr."""
        if sys.platform == "win32" or self._handle is not None:
            return  # no file locks of this kind there
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):
            self.path.chmod(0o666)  # whoever comes next may be another user
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"kvexp: waiting for the GPU: another measurement holds {self.path}",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(handle, fcntl.LOCK_EX)
        self._handle = handle

    def release(self) -> None:
        """Let the next one in."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
