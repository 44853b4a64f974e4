"""Both measuring profilers on a real GPU, each in a process of its own as the product runs them.

This file run as a program measures once and prints what it found as JSON.
"""

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
QWEN3_0_6B = {
    "name": "qwen3_0_6b",
    "architecture": "Qwen3ForCausalLM",
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
}
NUM_BLOCKS = 1000


def why_not():
    """Why no GPU can be used here, None where one can."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 cannot be loaded"
    return None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=f"no NVIDIA GPU: {why_not()}"),
]


def measure(profiler_name):
    """One point: its terms, its readings, and the bytes of the cache it allocated."""
    import conftest as kit
    from kvexp.contract import DType, KvDtype
    from kvexp_nvml import Nvml
    from kvexp_torch_allocator import TorchAllocator

    profiler = {"torch_allocator": TorchAllocator, "nvml": Nvml}[profiler_name]()
    profiler.check()
    deployment = kit.make_deployment(
        QWEN3_0_6B,
        dtype=DType.bf16,
        kv_dtype=KvDtype.bf16,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
    )
    plan = kit.make_plan(deployment, NUM_BLOCKS)
    measurement = profiler.open(deployment, kit.StubEngine())
    try:
        facts = measurement.start()
        measurement.load()
        (profile,) = measurement.warmup()
        allocated = measurement.allocate(plan)
        return {
            "device": facts.name,
            **{part.name: part.size_bytes for part in profile.parts},
            "reasons": {part.name: part.reason for part in profile.parts},
            "allocated_bytes": allocated,
            "planned_bytes": NUM_BLOCKS * plan.block_bytes_per_rank[0],
            "readings": measurement.readings(),
        }
    finally:
        measurement.close()


@pytest.fixture(scope="module")
def measured():
    known = {}

    def run(profiler_name):
        if profiler_name not in known:
            answer = subprocess.run(
                [sys.executable, __file__, profiler_name],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert answer.returncode == 0, answer.stderr
            known[profiler_name] = json.loads(answer.stdout.splitlines()[-1])
        return known[profiler_name]

    return run


@pytest.mark.parametrize("profiler_name", ["torch_allocator", "nvml"])
def test_a_point_runs_to_its_end(measured, profiler_name):
    point = measured(profiler_name)
    readings = point["readings"]
    assert point["allocated_bytes"] == point["planned_bytes"]
    assert point["weights"] >= readings["parameter_bytes"] > 1190000000
    assert point["activation"] > 100 * MIB
    assert 0 < point["non_torch"] < 2048 * MIB
    assert point["cudagraph"] == 0
    assert set(readings) >= {"start", "load", "warmup", "allocate", "device", "versions", "shape"}
    assert readings["shape"] == {"num_seqs": 1, "seq_len": 8192}
    assert readings["device"]["uuid"]


def test_the_allocators_terms_are_those_known_for_an_h200(measured):
    point = measured("torch_allocator")
    if point["device"] != "NVIDIA H200":
        pytest.skip(f"no figures known for {point['device']}")
    assert point["readings"]["parameter_bytes"] == 1192099840 + 512
    assert abs(point["weights"] - 1192115712) <= 512
    # transformers' forward 213.0625 MiB, 32 MiB of BLAS workspace, 64 KiB of token ids
    assert abs(point["activation"] - 257032192) <= MIB
    assert abs(point["non_torch"] - 168 * MIB) <= 32 * MIB


def test_nvml_agrees_with_the_allocator(measured):
    point = measured("nvml")
    readings = point["readings"]
    nvml = readings["nvml"]
    assert nvml["uuid"] == readings["device"]["uuid"]
    assert nvml["sampler"]["num_samples"] >= 1
    assert nvml["sampler"]["num_discarded"] == 0
    for before, after in (("start", "load"), ("load", "warmup"), ("warmup", "allocate")):
        seen = nvml[after]["used_bytes"] - nvml[before]["used_bytes"]
        told = readings[before]["free_bytes"] - readings[after]["free_bytes"]
        assert abs(seen - told) <= 8 * MIB
    held = readings["warmup"]["peak_reserved_bytes"] - readings["warmup"]["reserved_bytes"]
    assert abs(point["activation"] - held) <= 8 * MIB
    assert nvml["start"]["used_bytes"] > nvml["idle"]["used_bytes"]
    assert nvml["start"]["process_bytes"] or nvml["start"]["reason"]


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "plugins")]
    print(json.dumps(measure(sys.argv[1])))
