"""Weights that `cpu_offload_gb` keeps in the host's memory: worked figures and public logs."""

import pytest

import kvexp
from kvexp.results import Status

GIB = 1 << 30
OPT = ("model=opt_6_7b", "gpu=v100_16gb")
LAYER = 2 * 12 * 4096**2 + 2 * (3 + 1 + 2 + 4 + 1 + 2) * 4096  # matrices; biases and norms


def profile(*overrides):
    return kvexp.run(list(overrides)).profile


def test_whole_parameters_leave_in_order_until_the_size_is_reached():
    sizes = [
        profile(*OPT, "engine.version=0.7.3", f"engine.cpu_offload_gb={gib}").weights_bytes
        for gib in (0, 1, 2)
    ]

    qkv, bias, out, first = (2 * each for each in (3 * 4096**2, 3 * 4096, 4096**2, 16384 * 4096))
    assert sizes[0] - sizes[2] == 5 * LAYER + qkv + bias + out  # 2,148,040,704 >= 2 GiB
    up_to_fc1 = 2 * LAYER + qkv + bias + out + 2 * 4096 + first  # a norm stands between
    assert sizes[0] - sizes[1] == pytest.approx(up_to_fc1, abs=4 * 4096)


@pytest.mark.parametrize(
    ("gib", "weights", "activation"), [(0, 12.40, 0.38), (1, 11.41, 0.76), (2, 10.43, 0.85)]
)
def test_a_v100s_log_with_opt_67b(gib, weights, activation):
    """The log's script also lengthens the table of positions: up to 0.03 GiB of weights."""
    found = profile(*OPT, "engine.version=0.7.3", f"engine.cpu_offload_gb={gib}")

    assert -0.005 <= weights - found.weights_bytes / GIB <= 0.035
    part = found.activation
    if gib:
        low, high = part.size_bytes - part.below_bytes, part.size_bytes + part.above_bytes
        assert low <= activation * GIB <= high


def test_a_layer_is_back_on_the_card_while_v0_runs_it_and_stays_away_in_v1():
    opt = (*OPT, "max_num_seqs=16")
    for version, returned in (("0.7.3", LAYER), ("0.10.0", 0), ("0.19.0", 0)):
        without, offloaded = (
            profile(*opt, f"engine.version={version}", f"engine.cpu_offload_gb={gib}")
            for gib in (0, 4)
        )
        assert offloaded.activation_bytes - without.activation_bytes == returned
        assert without.weights_bytes - offloaded.weights_bytes >= 4 * GIB


def test_what_v1_keeps_of_llama_is_what_an_h200_showed():
    """vLLM 0.26.0, 4 GiB of it in the host's memory (tests/data/h200_vllm_worker.json)."""
    found = profile(
        *["model=llama3_8b", "gpu=h200", "engine.version=0.26.0", "engine.v2_model_runner=false"],
        *["enforce_eager=true", "engine.cpu_offload_gb=4"],
    )

    assert (found.weights_bytes, found.activation_bytes) == (11_700_461_568, 2_027_034_624)


LLAMA = ("model=llama31_8b", "gpu=h100", "engine.cpu_offload_gb=4")


@pytest.mark.parametrize(
    ("overrides", "moved"),
    [
        (["engine.version=0.26.0"], False),  # the V2 runner makes no offloader before 0.28
        (["engine.version=0.27.0"], False),
        (["engine.version=0.28.0"], True),
        (["engine.version=0.26.0", "engine.v2_model_runner=false"], True),
        (["engine.version=0.16.0", "quantization=awq"], False),  # made anew on the card
        (["engine.version=0.17.0", "quantization=awq"], True),
        (["engine.version=0.16.0", "quantization=fp8"], True),
        (["engine.version=0.9.2-v0", "quantization=awq"], True),
    ],
)
def test_what_is_moved_by_release_runner_and_format(overrides, moved):
    result = kvexp.run([*LLAMA, *overrides])
    without = kvexp.run([*LLAMA, *overrides, "engine.cpu_offload_gb=0"])

    difference = without.profile.weights_bytes - result.profile.weights_bytes
    assert (difference >= 3 * GIB) is moved
    assert any("cpu_offload_gb moves nothing" in note for note in result.notes) is not moved
    assert "--cpu-offload-gb 4" in result.effective["flags"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.cpu_offload_gb=-1"], "must be from 0 to 1048576 GiB, got -1"),
        (["engine.version=0.5.1"], "needs vLLM 0.5.3 or newer"),
        (["engine.version=0.8.2"], "use engine.version=0.8.2-v0"),
        (["engine.version=0.7.3", "lora.max_loras=1", "lora.max_rank=8"], "must be 0 with lora"),
    ],
)
def test_what_a_release_refuses_is_said(overrides, words):
    result = kvexp.run([*LLAMA, *overrides])

    assert result.status is Status.invalid
    assert words in result.reason
