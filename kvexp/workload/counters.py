"""What torch's allocator and the driver report."""

from dataclasses import asdict, dataclass


class UnusableReading(RuntimeError):
    """A counter is missing or cannot be true; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What torch's allocator and the driver report of one device at one moment."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    free_bytes: int
    total_bytes: int

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 0:
                raise UnusableReading(f"counter {name} is negative: {size}")
        for low, high in (
            ("free_bytes", "total_bytes"),
            ("allocated_bytes", "reserved_bytes"),
            ("allocated_bytes", "peak_allocated_bytes"),
            ("reserved_bytes", "peak_reserved_bytes"),
            ("reserved_bytes", "used_bytes"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise UnusableReading(
                    f"counter {low} ({getattr(self, low)}) exceeds {high} ({getattr(self, high)})"
                )

    @property
    def used_bytes(self) -> int:
        """In use on the whole device: of every process, contexts included."""
        return self.total_bytes - self.free_bytes

    @property
    def non_torch_bytes(self) -> int:
        """In use outside torch's allocator: `used = reserved + non_torch` holds by definition."""
        return self.used_bytes - self.reserved_bytes

    def as_dict(self) -> dict[str, int]:
        """The counters and what follows from them, as plain data."""
        return {**asdict(self), "non_torch_bytes": self.non_torch_bytes}
