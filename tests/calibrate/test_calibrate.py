"""Measuring a card: a card that is simulated by a profile gives that profile back."""

import importlib.util
import os
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvexp.calibrate.__main__ import main
from kvexp.calibrate.card import SETTINGS, Card, Recording, open_card
from kvexp.calibrate.probes import PROBES, measure
from kvexp.calibrate.writing import as_yaml, compared, profile_of
from kvexp.errors import InvalidValue, ProfilerUnavailable
from kvexp.simulate import device as devices

H200 = devices.load("h200")
OTHER = replace(
    H200,
    name="Another Card",
    capability=(8, 0),
    blas_workspace=8519680,
    blas_lt_workspace=2097152,
    construction_residue=8,
    attention=("flash", "efficient", "cudnn", "math"),
    fused_head_limit=128,
    cudnn_scalars=1,
    cudnn_scratch=1024,
    efficient_accumulator_over=64,
    split_index_scratch=24,
    scan_tile=1024,
    sort_small=2048,
    sort_tile=3072,
    sort_tile_state=2048,
    sort_counts=8192,
    grouped_mm_per_expert=72,
    grouped_mm_constant=4096,
    context=300 << 20,
    libraries=400 << 20,
    addresses="upward",
)


def simulated_card(device, **changes):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from simulated_card import SimulatedCard

    card = SimulatedCard(torch, device)
    for name, value in changes.items():
        setattr(card, name, value)
    return card


def failing(message):
    def fail(*_):
        raise RuntimeError(message)

    return fail


@pytest.fixture
def written(tmp_path, capsys):
    """Run the command on a card; the file, the status and what was printed."""

    def run(card, *arguments):
        path = tmp_path / "card.yaml"
        status = main(["--out", str(path), *arguments], lambda: card)
        return path, status, capsys.readouterr()

    return run


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("device", [H200, OTHER], ids=lambda device: device.name)
def test_a_simulated_card_gives_its_own_numbers_back(device):
    base = replace(H200, capability=device.capability)
    measured = measure(simulated_card(device), base)

    assert measured.reasons == {}
    assert measured.numbers == {name: getattr(device, name) for names in PROBES for name in names}


@pytest.mark.slow
@pytest.mark.torch
def test_the_file_is_the_profile_and_says_where_each_number_is_from(written):
    path, status, out = written(simulated_card(OTHER))
    found = devices.read_device(path)
    lines = path.read_text().splitlines()

    assert status == 0
    assert found == replace(OTHER, source=found.source, versions=found.versions, measured=True)
    assert found.versions == ">=2.11,<2.12"
    for name in (name for names in PROBES for name in names):
        (line,) = [line for line in lines if line.startswith(f"{name}:")]
        assert line.endswith("# measured: one Another Card, driver 580.1, CUDA 13.0, torch 2.11.0")
    assert "scan_tile" in out.out
    assert "differs from 896" in out.out


@pytest.mark.slow
@pytest.mark.torch
def test_a_card_that_is_packaged_differs_nowhere(written):
    _, status, out = written(simulated_card(H200))

    assert status == 0
    assert "differs" not in out.out
    assert "24 of 24 measured numbers equal those of NVIDIA H200" in out.out


@pytest.mark.slow
@pytest.mark.torch
def test_a_probe_that_fails_costs_its_own_numbers_and_is_said(written):
    card = simulated_card(OTHER, is_shared=True)
    card.load_model = failing("transformers is not installed")
    card.attend = failing("No available\nkernel.")
    path, status, out = written(card)
    found = devices.read_device(path)

    assert status == 0
    assert not found.measured
    assert found.cudnn_scratch == devices.load("sm80").cudnn_scratch
    assert found.blas_workspace == 8519680  # by a product of its own
    assert (
        "cudnn_scratch                not measured: RuntimeError: No available kernel." in out.out
    )
    assert "libraries" in found.source


class Output:
    """A tensor at address 4096; its end is noted as any free."""

    def __init__(self, entries):
        self.entries = entries

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: 4096)

    def __del__(self):
        self.entries.append({"action": "free_completed", "addr": 4096, "size": 50})


class Cuda:
    """torch.cuda of a card whose allocator is told what to do."""

    def __init__(self, entries=(), reserved=0):
        self.entries = [{"action": "alloc", "addr": 1, "size": 1}]  # of an earlier recording
        self.coming = list(entries)
        self.reserved = reserved
        self.recording = []
        self.memory = SimpleNamespace(
            _record_memory_history=lambda enabled, **_: self.recording.append(enabled),
            _snapshot=lambda: {"device_traces": [list(self.entries)]},
        )

    def run(self):
        self.entries += self.coming
        return [Output(self.entries)]

    def set_device(self, _):
        return None

    synchronize = empty_cache = staticmethod(lambda: None)

    def mem_get_info(self, _):
        return 700, 1000

    def memory_reserved(self, _):
        return self.reserved

    def get_device_name(self, _):
        return "Made Up"

    def get_device_capability(self, _):
        return (9, 0)


def card_of(cuda):
    return Card(
        SimpleNamespace(
            cuda=cuda,
            no_grad=nullcontext,
            version=SimpleNamespace(cuda="13.0"),
            backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900)),
            __version__="2.11.0+cu130",
        ),
        SimpleNamespace(acquire=lambda: None),
    )


def test_a_recording_tells_scratch_from_outputs_and_from_what_stays():
    def entry(action, address, size):
        return {"action": action, "addr": address, "size": size}

    cuda = Cuda(
        [
            entry("segment_alloc", 4096, 2 << 20),
            entry("alloc", 4096, 100),  # freed, and its address taken by the output
            entry("free_requested", 4096, 100),
            entry("free_completed", 4096, 100),
            entry("alloc", 4096, 50),
            entry("alloc", 8192, 33554432),
            entry("alloc", 512, 7),
            entry("free_requested", 512, 7),
            entry("free_completed", 512, 7),
        ]
    )
    found = card_of(cuda).record(cuda.run)

    assert found == Recording(scratch=[100, 7], kept=[33554432], segments=[(4096, 2 << 20)])
    assert cuda.recording == ["all", None]


def test_recording_ends_when_what_runs_fails():
    cuda = Cuda()
    with pytest.raises(ZeroDivisionError):
        card_of(cuda).record(lambda: 1 / 0)

    assert cuda.recording == ["all", None]


def test_what_is_outside_the_allocator_is_neither_free_nor_reserved():
    card = card_of(Cuda(reserved=100))

    assert card.context_bytes == card.outside_bytes() == 200
    assert "cuDNN 91900" in card.software


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_would_be_measured_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(ProfilerUnavailable, match=f"{name} is set"):
        open_card()


def test_a_machine_without_a_gpu_says_so_in_one_line(monkeypatch, capsys):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    assert main([]) == 2
    assert capsys.readouterr().err == (
        "kvexp: torch is not installed: pip install 'kvexp[torch]'\n"
    )


def test_a_card_that_fails_ends_in_one_line(capsys):
    failed = failing("CUDA error: out of memory\nCUDA kernel errors might be asynchronous")

    assert main([], failed) == 1
    assert capsys.readouterr().err.startswith("kvexp: CUDA error: out of memory CUDA kernel")


@pytest.mark.parametrize(
    ("out", "problem"), [("", "is a folder"), ("none/x.yaml", "there is no folder")]
)
def test_a_place_that_cannot_be_written_is_said_before_measuring(tmp_path, capsys, out, problem):
    status = main(["--out", str(tmp_path / out)], lambda: pytest.fail("measured"))

    assert status == 2
    assert problem in capsys.readouterr().err


def test_a_folder_without_permission_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)

    assert main(["--out", str(tmp_path / "x.yaml")], lambda: pytest.fail("measured")) == 2
    assert "no permission" in capsys.readouterr().err


PROFILE = "base: h200\nname: Mine\nmeasured: false\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n- b\n", "mapping"),
        ("a: [", "is not YAML"),
        ("name: x\n", "blas_workspace"),
        (PROFILE + "blas_work: 1\n", "blas_work unknown"),
        (PROFILE + "scan_tile: many\n", "scan_tile must be a whole number, got 'many'"),
        (PROFILE + "scan_tile: 0\n", "scan_tile must be at least 1, got 0"),
        (PROFILE + "context: -1\n", "context must be at least 0, got -1"),
        (PROFILE + "attention: [flash, cudnn]\n", "attention must be a list that ends with math"),
        (PROFILE + "attention: [xformers, math]\n", "attention must be a list of cudnn"),
        (PROFILE + "capability: 9.0\n", "capability must be two numbers"),
        (PROFILE + "addresses: sideways\n", "addresses must be one of ranges"),
        ("base: h900\n", "no device profile 'h900'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_line(tmp_path, text, problem):
    path = tmp_path / "card.yaml"
    path.write_text(text)
    with pytest.raises(InvalidValue) as refused:
        devices.read_device(path)

    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="cannot be read"):
        devices.read_device(tmp_path / "none.yaml")


def test_names_that_yaml_would_misread_are_quoted(tmp_path):
    from kvexp.calibrate.probes import Measured

    device = replace(H200, name="on", source='a "card": #1', versions=">=2.11,<2.12")
    path = tmp_path / "card.yaml"
    path.write_text(as_yaml(device, Measured(), H200))

    assert devices.read_device(path) == device


@pytest.mark.gpu
def test_this_card_is_measured(tmp_path):
    try:
        opened = open_card()
    except ProfilerUnavailable as reason:
        pytest.skip(str(reason))
    with closing(opened) as card:
        base = devices.find(card.name, "{}.{}".format(*card.capability))
        measured = measure(card, base)
    profile = profile_of(card, measured, base)
    path = tmp_path / "card.yaml"
    path.write_text(as_yaml(profile, measured, base))

    assert devices.read_device(path) == profile
    assert measured.reasons == {}
    if base.measured:
        different = [line for line in compared(profile, measured, base) if "differs" in line]
        of_a_process = {"context", "libraries", "addresses"}
        assert {line.split()[0] for line in different} <= of_a_process, different
