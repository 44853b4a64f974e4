"""nano-vLLM's own rules (model_runner.py and config.py at bb823b3)."""

import pytest

import kvexp
from kvexp.results import Provenance, Status

NANO = ["model=qwen3_0_6b", "gpu=h200", "engine=nano_vllm"]


def test_defaults_are_its_own():
    effective = kvexp.run(NANO).effective

    assert (effective["block_size"], effective["util"]) == (256, 0.9)
    assert (effective["max_num_batched_tokens"], effective["max_num_seqs"]) == (16384, 512)
    assert effective["max_model_len"] == 4096


def test_everything_in_use_is_charged_and_labelled_unverified():
    result = kvexp.run([*NANO, "gpu.used_by_others_bytes=7GiB"])
    names = [part.name for part in result.budget.parts]

    assert names == [
        "used_by_others",
        "non_torch",
        "weights",
        "activation",
        "cudagraph",
        "kv_cache",
        "unused",
    ]
    assert result.budget.part("used_by_others").size_bytes == 7 * 2**30
    assert result.profile.activation.provenance is Provenance.assumed
    assert "not verified" in result.profile.activation.reason
    # total x util - used - peak + current
    total = 150109880320
    used = 7 * 2**30 + result.profile.non_torch_bytes + result.profile.weights_bytes
    assert result.budget.available_bytes == int(
        total * 0.9 - used - result.profile.activation_bytes
    )


def test_a_neighbour_that_fills_the_quota_is_infeasible_with_the_arithmetic():
    result = kvexp.run([*NANO, "util=0.1", "gpu.used_by_others_bytes=20GiB"])

    assert result.status is Status.infeasible
    assert result.refusal.kind == "no_memory"
    assert result.budget.part("shortfall").size_bytes < 0
    assert sum(p.size_bytes for p in result.budget.parts) == result.budget.requested_bytes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tp=16", "tp must be one of 1, 2, 4, 8"),
        ("pp=2", "pp must be 1"),
        ("block_size=16", "multiple of 256"),
        ("kv_dtype=fp8", "kv_dtype must be auto or bf16"),
        ("quantization=fp8", "quantization must be null"),
    ],
)
def test_what_it_cannot_do_is_invalid(override, message):
    result = kvexp.run([*NANO, override])

    assert result.status is Status.invalid
    assert message in result.reason
