"""Records of real runs, taken through the profilers again: same readings, same profile.

A record is the result.json of a measured point. To add one, run on a machine with a GPU

    python -m kvexp model=llama3_8b gpu=h200 profiler=torch_allocator

and copy its result.json to data/<card>_<model>_<profiler>.json.
"""

import json
from pathlib import Path

import pytest

from kvexp import record
from kvexp.contract import Counters, ForwardOptions, KvDtype, Profile, Stage
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
    case = readings.get("forward")  # older records ran the engine's worst case
    kept = ("logits", "sampler", "attn", "use_cache", "warmup")
    options = ForwardOptions(**{name: case[name] for name in kept}) if case else None
    workload = kit.FakeWorkload(
        deployment,
        list(counters.values()),
        readings["parameter_bytes"],
        {"allocator": readings["allocator"]},
        options=options,
    )
    graphs = Stage.graphs.value in readings
    if "nvml" not in readings:
        measurement = AllocatorMeasurement(deployment, engine, workload, graphs=graphs)
        measurement.start()
        measurement.load()
        return measurement.warmup()[0]
    nvml = readings["nvml"]
    measurement = NvmlMeasurement(
        deployment, engine, workload, nvml["sampler"]["interval_s"], graphs=graphs
    )
    measurement.counters = counters
    measurement.parameter_bytes = readings["parameter_bytes"]
    measurement.usage = {
        moment: Usage(**nvml[moment]) for moment in ("idle", "start", "load", "warmup")
    }
    sampler = measurement.samplers[Stage.warmup] = Sampler(lambda: Usage(used_bytes=None), 1.0)
    for name, value in nvml["sampler"].items():
        setattr(sampler, name, value)
    return measurement.profile()


def rank_readings(result):
    """The readings of each rank, and the rank's part of the result."""
    return zip(result.readings.get("ranks", [result.readings]), result.ranks, strict=True)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_a_real_run_gives_the_same_profile(kit, path):
    result, _ = record.read(path)
    assert result.ok
    for readings, rank in rank_readings(result):
        assert replay(kit, readings, result.effective) == rank.profile


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_a_real_run_allocated_what_it_planned(path):
    result, _ = record.read(path)
    assert result.allocated_bytes == result.num_blocks * result.block_bytes
    for readings, rank in rank_readings(result):
        grown = readings["allocate"]["allocated_bytes"] - readings["warmup"]["allocated_bytes"]
        assert result.num_blocks * rank.block_bytes <= grown
    assert result.effective["kv_dtype"] in KvDtype.__members__


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_a_real_run_accounts_for_all_that_the_driver_has(path):
    result, _ = record.read(path)
    for readings, _ in rank_readings(result):
        if accounts := readings.get("accounting"):  # older records have none
            assert accounts["closes"], accounts
            assert readings["neighbours"]["contaminated"] is False


def test_graphs_of_a_real_run_stand_on_top_of_the_cache_that_was_verified():
    """qwen3_0_6b on an H200: what capture took of the driver, private pools and the rest."""
    (path,) = [path for path in RECORDS if path.stem.endswith("_graphs")]
    result, _ = record.read(path)
    verify, graphs = (result.readings[stage] for stage in ("verify", "graphs"))

    assert result.verified
    assert result.readings["graphs_bytes"] == 448 << 20
    assert verify["free_bytes"] - graphs["free_bytes"] == 448 << 20
    assert graphs["reserved_bytes"] - verify["reserved_bytes"] == 64 << 20  # the graphs' pool
    assert result.readings["accounting"]["terms"]["graphs"] == 448 << 20


BLAS = 33554432
KNOWN_FORWARDS = {
    # (model, tokens): allocated by the weights; the first forward's peak over them, of an H200 with
    # torch 2.11 and transformers 5.17, without the inputs. Where the forward was not the first of
    # its process the library's workspaces are added.
    ("llama3_8b", 2048): (16060524032, 16338429440 - 16060540416),
    ("llama3_8b", 8192): (16060524032, 17071482368 - 16094144000 + BLAS),
    ("qwen3_8b", 2048): (16383587840, 16636327424 - 16383604224),
    ("qwen3_8b", 8192): (16383587840, 17293882880 - 16417207808 + BLAS),
    ("qwen3_0_6b", 8192): (1192115712, 1449147904 - 1225735680 + BLAS),
    ("gemma3_12b", 2048): (23632734720, 23927417344 - 23666305536 + BLAS),
    ("gemma3_12b", 8192): (23632734720, 24756939264 - 23666354688 + BLAS),
    ("qwen3_30b_a3b", 2048): (61065319936, 61403142656 - 61065336320),
    ("qwen3_30b_a3b", 8192): (61065319936, 62315944448 - 61098939904 + BLAS),
    ("deepseek_v2_lite", 2048): (31494758912, 31865492992 - 31494775296),
    ("deepseek_v2_lite", 8192): (31494758912, 32877028864 - 31528378880 + BLAS),
    ("gpt_oss_20b", 2048): (41831529984, 43586092544 - 41831546368),
    ("gpt_oss_20b", 8192): (41831529984, 68271504896 - 41866198528 + BLAS + (1 << 20)),
}


def known_forwards():
    for path in RECORDS:
        result, _ = record.read(path)
        values = {**result.requested, **result.effective}
        named = [name for name, _ in KNOWN_FORWARDS if path.stem.startswith(f"h200_{name}_")]
        key = (values.get("model", *named[:1]), values["max_num_batched_tokens"])
        if "nvml" not in result.readings and values["tp"] == 1 and key in KNOWN_FORWARDS:
            yield pytest.param(result, *key, *KNOWN_FORWARDS[key], id=path.stem)


@pytest.mark.parametrize(("result", "model", "tokens", "weights", "peak"), list(known_forwards()))
def test_the_allocators_terms_are_those_of_an_independent_run(result, model, tokens, weights, peak):
    assert result.profile.weights_bytes == weights
    assert result.profile.activation_bytes == peak + 8 * tokens


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
