"""Reads a device again and again."""

import threading
from collections.abc import Callable
from typing import Any

from kvexp.contract import Usage


class Sampler:
    """Reads a device in the background until stopped; keeps the peak and what went wrong."""

    def __init__(self, read: Callable[[], Usage], interval_s: float) -> None:
        self.interval_s = interval_s
        self.num_samples = 0
        self.num_discarded = 0
        self.peak_used_bytes: int | None = None
        self.peak_process_bytes: int | None = None
        self.reason: str | None = None
        self._read = read
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvexp-nvml", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def take(self) -> None:
        """Take one sample now; whatever goes wrong is counted, never raised."""
        try:
            usage = self._read()
        except Exception as error:  # a monitor must not end what it watches
            usage = Usage(used_bytes=None, reason=f"{type(error).__name__}: {error}")
        with self._lock:
            if usage.used_bytes is None:
                self.num_discarded += 1
                self.reason = self.reason or usage.reason
                return
            self.num_samples += 1
            self.peak_used_bytes = max(self.peak_used_bytes or 0, usage.used_bytes)
            if usage.process_bytes is not None:
                self.peak_process_bytes = max(self.peak_process_bytes or 0, usage.process_bytes)

    def stop(self) -> None:
        """End the thread; safe to call at any time and more than once."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def as_dict(self) -> dict[str, Any]:
        """What was seen, as plain data."""
        return {
            "interval_s": self.interval_s,
            "num_samples": self.num_samples,
            "num_discarded": self.num_discarded,
            "peak_used_bytes": self.peak_used_bytes,
            "peak_process_bytes": self.peak_process_bytes,
            "reason": self.reason,
        }

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.take()
