"""Blocks at the peak and whose they are, from a record of allocations."""

import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvexp.workload.snapshot import OUTSIDE, Attribution, Recorder, at_peak
from kvexp_torch_allocator import AllocatorMeasurement

MIB = 1 << 20


def alloc(address, size, line="model.py"):
    frames = [
        {"filename": "/x/site-packages/torch/nn/functional.py", "line": 1, "name": "linear"},
        {"filename": f"/opt/torch/lib/site-packages/x/{line}", "line": 7, "name": "forward"},
    ]
    return {"action": "alloc", "addr": address, "size": size, "frames": frames}


def free(address):
    return [
        {"action": "free_requested", "addr": address, "size": 1},
        {"action": "free_completed", "addr": address, "size": 1},
    ]


TRACE = [
    alloc(1, 1000),  # inputs
    alloc(2, 2000),  # the first layer's, dies after the peak
    alloc(3, 512),  # a workspace, stays
    *free(1),
    alloc(1, 4096),  # at the place of the inputs: the peak
    *free(2),
    *free(1),
    alloc(5, 100),
]
MARKS = [(11, "a"), (12, "a.b"), (13, "a"), (14, OUTSIDE)]


def test_the_blocks_alive_at_the_peak_belong_to_the_modules_that_made_them():
    blocks = at_peak(TRACE, MARKS, first=10)
    assert [(b.size_bytes, b.module, b.stays) for b in blocks] == [
        (2048, "a", False),
        (512, "a.b", True),
        (4096, "a", False),
    ]
    assert blocks[0].line == "model.py:7 forward"


def test_what_was_made_before_any_module_is_outside():
    (block,) = at_peak(TRACE[:1], MARKS, first=10)
    assert (block.module, block.size_bytes, block.stays) == (OUTSIDE, 1024, True)


def test_a_block_that_was_there_before_the_record_may_be_freed():
    assert [b.size_bytes for b in at_peak([*free(99), alloc(1, 512)], [], 0)] == [512]


def test_blocks_and_the_unsplit_rest_sum_to_the_peak():
    found = Attribution(blocks=at_peak(TRACE, MARKS, 10), growth_bytes=7000)
    assert found.unsplit_bytes == 7000 - 2048 - 512 - 4096
    shown = found.as_dict()
    assert shown["stays_bytes"] == 512
    assert [place["size_bytes"] for place in shown["places"]] == [6144, 512]
    assert shown["further_bytes"] == 0


class Allocator:
    """torch.cuda as far as a recorder asks it."""

    def __init__(self):
        self.now = 100 * MIB
        self.peak = self.now
        self.count = 50
        self.trace = []
        self.recording = None
        self.memory = SimpleNamespace(
            _record_memory_history=self.record, _snapshot=lambda: self.snapshot
        )

    def record(self, enabled="all", **options):
        self.recording = enabled

    @property
    def snapshot(self):
        return {"device_traces": [list(self.trace)], "segments": [], "allocator_settings": {}}

    def take(self, size):
        self.count += 1
        self.now += size
        self.peak = max(self.peak, self.now)
        self.trace.append(alloc(self.count, size))

    def memory_allocated(self, device):
        return self.now

    def max_memory_allocated(self, device):
        return self.peak

    def memory_stats(self, device):
        return {"allocation.all.allocated": self.count}


@pytest.fixture
def cuda(monkeypatch):
    fake = Allocator()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


class Module:
    """A module of torch, as far as hooks go."""

    def __init__(self, name, cuda, size, inner=()):
        self.name, self.cuda, self.size, self.inner = name, cuda, size, inner
        self.hooks = []

    def register_forward_pre_hook(self, hook):
        return self._add(("pre", hook))

    def register_forward_hook(self, hook, always_call):
        assert always_call
        return self._add(("post", hook))

    def _add(self, entry):
        self.hooks.append(entry)
        return SimpleNamespace(remove=lambda: self.hooks.remove(entry))

    def __call__(self):
        for kind, hook in self.hooks:
            if kind == "pre":
                hook(self, ())
        self.cuda.take(self.size)
        for each in self.inner:
            each()
        self.cuda.take(self.size)
        for kind, hook in self.hooks:
            if kind == "post":
                hook(self, (), None)

    def named_modules(self):
        yield self.name, self
        for each in self.inner:
            yield from each.named_modules()


def test_a_recorder_knows_the_module_of_every_allocation(cuda, tmp_path):
    inner = Module("layer.mlp", cuda, 2 * MIB)
    layer = Module("layer", cuda, MIB, [inner])
    model = Module("", cuda, 4 * MIB, [layer])
    recorder = Recorder("cuda:0")
    with recorder.recording(model):
        assert cuda.recording == "all"
        model()
    assert cuda.recording is None
    assert layer.hooks == [] and inner.hooks == []
    found = recorder.attribution()
    assert [(b.module, b.size_bytes // MIB) for b in found.blocks] == [
        (OUTSIDE, 4), ("layer", 1), ("layer.mlp", 2), ("layer.mlp", 2), ("layer", 1), (OUTSIDE, 4),
    ]  # fmt: skip
    assert found.growth_bytes == 14 * MIB
    assert found.unsplit_bytes == 0
    recorder.write(tmp_path / "snapshot.pickle")
    opened = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert len(opened["device_traces"][0]) == 6


def test_hooks_and_recording_end_with_an_error_too(cuda):
    layer = Module("layer", cuda, MIB)
    with pytest.raises(RuntimeError), Recorder("cuda:0").recording(Module("", cuda, 1, [layer])):
        raise RuntimeError("CUDA out of memory")
    assert cuda.recording is None
    assert layer.hooks == []


def test_the_measurement_keeps_the_file_and_the_places(kit, cuda, tmp_path):
    deployment = kit.make_deployment()
    counters = [
        kit.counters(allocated=0, reserved=0, free=840),
        kit.counters(allocated=100, reserved=110, free=720),
        kit.counters(allocated=110, reserved=140, free=670, peak_allocated=114, peak_reserved=140),
    ]
    work = kit.FakeWorkload(deployment, counters, 99 * MIB)
    model = Module("", cuda, 4 * MIB, [Module("layer", cuda, 3 * MIB)])

    def warmup(at_peak, recorder):
        with recorder.recording(model):
            model()

    work.warmup = warmup
    measurement = AllocatorMeasurement(deployment, kit.StubEngine(), work, snapshot=True)
    measurement.start()
    measurement.load()
    measurement.warmup()
    readings = measurement.readings()
    assert {place["module"] for place in readings["at_peak"]["places"]} == {OUTSIDE, "layer"}
    (path,) = readings["files"]
    assert path.endswith("memory_snapshot.pickle")
    assert pickle.loads(Path(path).read_bytes())["device_traces"]
    shutil.rmtree(Path(path).parent)
