"""One process on one card: loading, then forwards, replayed through the allocator."""

from dataclasses import dataclass, field

from kvexp.simulate.allocator import Block, CachingAllocator, OutOfMemory
from kvexp.simulate.device import Device
from kvexp.simulate.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """What one forward added; `event` is the number of events until the allocated peak."""

    before_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    event: int

    @property
    def activation_bytes(self) -> int:
        """The allocated peak less what was allocated before."""
        return self.allocated_bytes - self.before_bytes


@dataclass(slots=True)
class Process:
    """Replays the stages in order; `with_optional` makes the allocations that are in doubt."""

    allocator: CachingAllocator
    trace: Trace
    device: Device
    with_optional: bool = True
    workspaces: dict[str, int] = field(default_factory=dict)

    def load(self, *, state_dict: bool = False) -> int:
        """Construct the model and give back what is cached; the allocated peak.

        `state_dict`: a checkpoint's tensors lie beside the model until they are copied.
        """
        blocks: list[Block] = []
        allocator = self.allocator
        for event in self.trace.load:
            if event >= 0:
                blocks.append(allocator.allocate(event))
            else:
                allocator.free(blocks[-event - 1])
        if state_dict:
            beside = [allocator.allocate(event) for event in self.trace.load if event >= 0]
            for block in beside:
                allocator.free(block)
        peak = allocator.peak_allocated_bytes
        allocator.empty_cache()
        return peak

    def hold(self, cache_bytes: int) -> None:
        """Allocate the KV cache, which stays.

        Raises:
            OutOfMemory: it does not fit.
        """
        self.allocator.allocate(cache_bytes)

    def start_libraries(self) -> None:
        """Take the workspaces now, as an earlier and smaller forward would have done."""
        for _, name in self.trace.workspaces:
            self._take_workspace(name)

    def forward(self, input_bytes: int) -> Peak:
        """Make the inputs and run once; afterwards only workspaces are left.

        Raises:
            OutOfMemory: it does not fit; `event` of the error is how far it came.
        """
        allocator = self.allocator
        inputs = allocator.allocate(input_bytes)
        allocator.reset_peaks()
        before = allocator.allocated_bytes
        blocks, event = self._events()
        peak = Peak(
            before_bytes=before,
            allocated_bytes=allocator.peak_allocated_bytes,
            reserved_bytes=allocator.peak_reserved_bytes,
            event=event,
        )
        for block in blocks:
            if block is not None:
                allocator.free(block)
        allocator.free(inputs)
        allocator.empty_cache()
        return peak

    def _events(self) -> tuple[list[Block | None], int]:
        allocator = self.allocator
        allocate, free = allocator.allocate, allocator.free
        skipped = set() if self.with_optional else set(self.trace.optional)
        due = [(at, name) for at, name in self.trace.workspaces if name not in self.workspaces]
        blocks: list[Block | None] = []
        highest, peak_event, place = -1, 0, 0
        next_workspace = due[0][0] if due else -1
        try:
            for place, event in enumerate(self.trace.events):
                while place == next_workspace:
                    self._take_workspace(due.pop(0)[1])
                    next_workspace = due[0][0] if due else -1
                if event < 0:
                    block = blocks[-event - 1]
                    if block is not None:
                        free(block)
                        blocks[-event - 1] = None
                elif skipped and len(blocks) in skipped:
                    blocks.append(None)
                else:
                    blocks.append(allocate(event))
                    if allocator.allocated_bytes > highest:
                        highest, peak_event = allocator.allocated_bytes, place + 1
            for _, name in due:
                self._take_workspace(name)
        except OutOfMemory as error:
            error.event = place
            raise
        return blocks, peak_event

    def _take_workspace(self, name: str) -> None:
        size = {
            "blas": self.device.blas_workspace,
            "blas_lt": self.device.blas_lt_workspace,
        }[name]
        self.allocator.allocate(size)
        self.workspaces[name] = size


def live_at(trace: Trace, event: int) -> list[tuple[int, int]]:
    """Allocations that are alive after so many events, as (number, bytes), the largest first."""
    live: dict[int, int] = {}
    count = 0
    for each in trace.events[:event]:
        if each >= 0:
            live[count] = each
            count += 1
        else:
            live.pop(-each - 1)
    return sorted(live.items(), key=lambda item: (-item[1], item[0]))
