"""Ranks in processes of their own, in step; with transformers on the CPU, and with stand-ins."""

import textwrap
import time

import pytest

from kvexp.contract import InvalidValue, Ranks
from kvexp.workload import is_out_of_memory
from kvexp.workload.ranks import RankFailed

STAND_IN = '''
import os, signal, time
from kvexp.contract import DeviceFacts, InvalidValue, Measurement


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class Fake(Measurement):
    """A rank that does at a stage what the test asks of it."""

    def __init__(self, rank, script):
        self.rank, self.script = rank, script

    def act(self, stage):
        what = self.script.get((stage, self.rank.index))
        if what == "oom":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        if what == "invalid":
            raise InvalidValue("no such thing")
        if what == "error":
            raise KeyError("deep inside")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)

    def start(self):
        self.act("start")
        return DeviceFacts(name="fake", total_bytes=100 - self.rank.index, free_bytes=90)

    def load(self):
        self.act("load")

    def warmup(self):
        self.act("warmup")
        return (f"profile {self.rank.index} of {self.rank.size}",)

    def allocate(self, plan):
        self.act("allocate")
        return 1000 + self.rank.index

    def verify(self):
        self.act("verify")
        return True

    def readings(self):
        return {"index": self.rank.index}

    def notes(self):
        return ("said by all",)


class Opens:
    def __init__(self, script):
        self.script = script

    def __call__(self, rank):
        return Fake(rank, self.script)
'''


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Ranks of stand-ins that follow a script {(stage, rank): what}."""
    (tmp_path / "rank_stand_in.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import rank_stand_in

    made = []

    def make(script=None, size=2):
        made.append(Ranks(rank_stand_in.Opens(script or {}), size))
        return made[-1]

    monkeypatch.setattr("kvexp.workload.ranks.GRACE_S", 0.5)
    yield make
    for each in made:
        each.close()


def test_every_rank_has_its_profile_and_the_smallest_card_counts(ranks):
    both = ranks()
    assert both.start().total_bytes == 99
    both.load()
    assert both.warmup() == ("profile 0 of 2", "profile 1 of 2")
    assert both.allocate(None) == 1001
    assert both.verify() is True
    assert both.readings() == {"ranks": [{"index": 0}, {"index": 1}]}
    assert both.notes() == ("said by all",)
    both.close()
    both.close()
    assert both.readings() == {"ranks": [{"index": 0}, {"index": 1}]}


def test_out_of_memory_of_one_rank_is_out_of_memory_and_they_stay_in_step(ranks):
    both = ranks({("allocate", 1): "oom"})
    both.start()
    with pytest.raises(RuntimeError, match="rank 1: CUDA out of memory") as caught:
        both.allocate(None)
    assert is_out_of_memory(caught.value)
    assert both.verify() is True


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("invalid", InvalidValue, "rank 0: no such thing"),
        ("error", RankFailed, "rank 0: KeyError: 'deep inside'"),
        ("die", RankFailed, "rank 0 ended during load .killed by SIGKILL"),
    ],
)
def test_a_failing_rank_is_named_with_its_cause(ranks, what, kind, text):
    both = ranks({("load", 0): what})
    both.start()
    with pytest.raises(kind, match=text):
        both.load()
    both.readings()


def test_a_rank_that_waits_for_a_dead_one_is_not_waited_for(ranks):
    both = ranks({("load", 0): "die", ("load", 1): "hang"})
    both.start()
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 ended"):
        both.load()
    with pytest.raises(RankFailed, match="out of step since rank 0 ended"):
        both.warmup()
    both.close()
    assert time.monotonic() - started < 10


CPU_RANK = '''
from kvexp.contract import DType, KvDtype, Measurement, Workload


class OnCpu(Measurement):
    """transformers' share of a rank, on the CPU."""

    def __init__(self, deployment, rank):
        self.work = Workload(deployment, device="cpu", rank=rank)
        self.loaded = None

    def start(self):
        import torch
        torch.set_num_threads(1)
        return self.work.start()

    def load(self):
        self.loaded = self.work.load()

    def warmup(self):
        self.work.warmup()
        return (self.loaded,)

    def allocate(self, plan):
        return self.work.allocate([64])

    def verify(self):
        self.work.verify()
        return True

    def close(self):
        self.work.close()


class Opens:
    def __init__(self, deployment):
        self.deployment = deployment

    def __call__(self, rank):
        return OnCpu(self.deployment, rank)
'''


@pytest.mark.slow
@pytest.mark.torch
def test_two_ranks_hold_the_model_and_run_it(kit, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    (tmp_path / "cpu_rank.py").write_text(textwrap.dedent(CPU_RANK))
    monkeypatch.syspath_prepend(str(tmp_path))
    import cpu_rank

    deployment = kit.make_deployment(tp=2)
    both = Ranks(cpu_rank.Opens(deployment), 2)
    try:
        both.start()
        both.load()
        shares = both.warmup()
        assert both.verify() is True
    finally:
        both.close()
    # by hand, fp32: a layer's matrices halve (q, k, v, o: 64 x (64 + 32 + 32 + 64); mlp: 3 x 64 x
    # 160), its two norms do not; the head halves, embedding and last norm do not; rotary 8 + 8
    layer = (64 * 192 + 3 * 64 * 160) // 2 + 2 * 64
    whole = 320 * 64 + 64 + (320 * 64) // 2
    buffers = {4 * 8, 2 * 4 * 8}
    for share in shares:
        assert share - 4 * (3 * layer + whole) in buffers
