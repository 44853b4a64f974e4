"""Records of real runs, taken through the profilers again: same readings, same profile.

A record is the result.json of a measured point. To add one, run on a machine with a GPU

    python -m kvexp model=llama3_8b gpu=h200 profiler=torch_allocator

and copy its result.json to data/<card>_<model>_<profiler>.json.
"""

import json
from pathlib import Path

import pytest

from kvexp import record
from kvexp.contract import Counters, KvDtype, Profile, Stage
from kvexp_nvml import NvmlMeasurement, Sampler, Usage
from kvexp_torch_allocator import AllocatorMeasurement

RECORDS = sorted(Path(__file__).with_name("data").glob("*.json"))


def replay(kit, readings, effective) -> Profile:
    """The profile that the profiler of these readings makes of them."""
    deployment = kit.make_deployment(
        max_model_len=effective["max_model_len"],
        max_num_batched_tokens=effective["max_num_batched_tokens"],
        max_num_seqs=effective["max_num_seqs"],
        used_by_others_bytes=effective["used_by_others_bytes"],
    )
    engine = kit.ContextEngine() if readings["charges_context"] else kit.StubEngine()
    counters = {
        stage: Counters(**{name: readings[stage.value][name] for name in Counters.__slots__})
        for stage in (Stage.start, Stage.load, Stage.warmup)
    }
    workload = kit.FakeWorkload(
        deployment,
        list(counters.values()),
        readings["parameter_bytes"],
        {"allocator": readings["allocator"]},
    )
    if "nvml" not in readings:
        measurement = AllocatorMeasurement(deployment, engine, workload)
        measurement.start()
        measurement.load()
        return measurement.warmup()[0]
    nvml = readings["nvml"]
    measurement = NvmlMeasurement(deployment, engine, workload, nvml["sampler"]["interval_s"])
    measurement.counters = counters
    measurement.parameter_bytes = readings["parameter_bytes"]
    measurement.usage = {
        moment: Usage(**nvml[moment]) for moment in ("idle", "start", "load", "warmup")
    }
    sampler = measurement.samplers[Stage.warmup] = Sampler(lambda: Usage(used_bytes=None), 1.0)
    for name, value in nvml["sampler"].items():
        setattr(sampler, name, value)
    return measurement.profile()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_a_real_run_gives_the_same_profile(kit, path):
    result, _ = record.read(path)
    assert result.ok
    assert replay(kit, result.readings, result.effective) == result.profile


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_a_real_run_allocated_what_it_planned(path):
    result, _ = record.read(path)
    assert result.allocated_bytes == result.num_blocks * result.block_bytes
    grown = (
        result.readings["allocate"]["allocated_bytes"]
        - result.readings["warmup"]["allocated_bytes"]
    )
    assert result.allocated_bytes <= grown
    assert result.effective["kv_dtype"] in KvDtype.__members__


EFFECTIVE = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 1024,
    "used_by_others_bytes": 0,
}


def llama3_8b(charges_context):
    """Counters seen on an H200: llama3-8b in bf16, a first prefill of 1 x 8192 tokens."""
    total = 150109880320

    def stage(allocated, reserved, peak_allocated, peak_reserved, free):
        return {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "peak_allocated_bytes": peak_allocated,
            "peak_reserved_bytes": peak_reserved,
            "free_bytes": free,
            "total_bytes": total,
            "non_torch_bytes": total - free - reserved,
        }

    return {
        "start": stage(0, 0, 0, 0, 149557477376),
        "load": stage(16060524032, 16196304896, 16060526592, 16196304896, 133264703488),
        "warmup": stage(16094078464, 16229859328, 17071482368, 17404264448, 133151457280),
        "parameter_bytes": 16060523012,
        "charges_context": charges_context,
        "allocator": {"backend": "native"},
    }


def test_the_terms_of_a_known_card_and_model(kit):
    profile = replay(kit, llama3_8b(False), EFFECTIVE)
    assert profile.weights_bytes == 16060524032
    # the forward, 32 MiB of BLAS workspace, and the 8192 token ids
    assert profile.activation_bytes == 1010958336
    assert profile.non_torch_bytes == 176160768  # 168 MiB
    profile = replay(kit, llama3_8b(True), EFFECTIVE)
    assert profile.non_torch_bytes == 864344576


def test_nvml_readings_replay_too(kit):
    readings = llama3_8b(False)
    moments = {"idle": 0, "start": 552402944, "load": 16845176832, "warmup": 16958423040}
    readings["nvml"] = {
        name: {"used_bytes": used, "reason": None} for name, used in moments.items()
    } | {
        "sampler": {
            "interval_s": 0.01,
            "num_samples": 90,
            "num_discarded": 0,
            "peak_used_bytes": 18132828160,
            "peak_process_bytes": None,
            "reason": None,
        }
    }
    profile = replay(kit, json.loads(json.dumps(readings)), EFFECTIVE)
    assert profile.weights_bytes == 16292773888
    assert profile.activation_bytes == 1174405120
    assert profile.non_torch_bytes == 113246208
    assert "short of" not in profile.activation.reason
