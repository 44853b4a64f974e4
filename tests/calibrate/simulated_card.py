"""A card whose kernels and allocator do what a device profile says, on tensors without data."""

import weakref

from torch._subclasses.fake_tensor import FakeTensorMode

from kvexp.calibrate.card import Recording
from kvexp.simulate import fake_cuda
from kvexp.simulate.addresses import POLICIES
from kvexp.simulate.allocator import CachingAllocator
from kvexp.simulate.attention import _RUN, Shapes, StandIn, eligible
from kvexp.simulate.device import Device
from kvexp.simulate.trace import Trace
from kvexp.simulate.tracker import Tracker


class SimulatedCard:
    """Answers as `Card` does, from the tracer and the allocator's simulation."""

    is_shared = False

    def __init__(self, torch, device: Device):
        fake_cuda.ensure_device_guard()
        self.torch = torch
        self.name, self.capability = device.name, device.capability
        self.torch_version = "2.11.0+cu130"
        self.software = "driver 580.1, CUDA 13.0, torch 2.11.0"
        self.context_bytes = device.context
        self.has_model = False
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._attention = StandIn(device=device)
        self._tracker = Tracker(Trace(), device, self._attention, self._mode)
        self._allocator = CachingAllocator(addresses=Addresses(POLICIES[device.addresses]()))
        self._seen = 0
        self._workspaces = 0

    def outside_bytes(self):
        return self._device.libraries

    def allocated_bytes(self):
        return self._allocator.allocated_bytes

    def empty(self, *shape, dtype):
        return self._new(self.torch.empty, shape, dtype)

    def zeros(self, *shape, dtype):
        return self._new(self.torch.zeros, shape, dtype)

    def give_back(self):
        self._allocator.empty_cache()

    def _new(self, make, shape, dtype):
        """Only the allocator notes it."""
        block = self._allocator.allocate(_bytes(self.torch, shape, dtype))
        with self._mode:
            tensor = make(shape, dtype=getattr(self.torch, dtype), device="cuda:0")
        storage, live = tensor.untyped_storage(), self._tracker._live
        live[storage._cdata] = block  # as what was there before: not noted as allocated
        weakref.finalize(storage, self._free, storage._cdata, block)
        return tensor

    def _free(self, key, block):
        del self._tracker._live[key]
        self._allocator.free(block)

    def record(self, run):
        trace, taken = self._tracker.trace, self._allocator.addresses.taken
        taken.clear()
        start, count = len(trace.events), sum(event >= 0 for event in trace.events)
        with self._mode, self.torch.no_grad(), self._tracker:
            outputs = list(run())
        found = _recording(trace.events[start:], count)
        for _, name in trace.workspaces[self._workspaces :]:
            found.kept.append(getattr(self._device, f"{name}_workspace"))
        self._workspaces = len(trace.workspaces)
        found.segments.extend(taken)
        del outputs
        return found

    def choose(self, shape, dtype, allowed):
        shapes = Shapes(
            dtype=f"torch.{dtype}",
            query=tuple(shape),
            key=tuple(shape),
            value=tuple(shape),
            unit_stride=True,
            has_mask=False,
            enable_gqa=False,
        )
        return next(name for name in eligible(shapes, self._device) if name in allowed)

    def attend(self, backend, q, k, v):
        self._attention.inside = True
        try:
            return _RUN[backend](q, k, v, None, True, None, False)
        finally:
            self._attention.inside = False

    def load_model(self):
        self.has_model = True
        return Recording(kept=[self._device.construction_residue])

    def forward(self):
        self._tracker._workspaces.add("blas")
        return Recording(kept=[self._device.blas_workspace])

    def drop_model(self):
        self.has_model = False

    def close(self):
        self.has_model = False


class Addresses:
    """A policy that remembers what it gave."""

    def __init__(self, policy):
        self.policy = policy
        self.taken = []

    def take(self, size):
        address = self.policy.take(size)
        self.taken.append((address, size))
        return address

    def give(self, address, size):
        self.policy.give(address, size)


def _recording(events, count):
    """What was freed before the end; outputs are all the rest, as nothing else stays."""
    sizes = [event for event in events if event >= 0]
    freed = {-event - 1 - count for event in events if event < 0}
    return Recording(scratch=[size for number, size in enumerate(sizes) if number in freed])


def _bytes(torch, shape, dtype):
    size = getattr(torch, dtype).itemsize
    for length in shape:
        size *= length
    return size
