"""`gpu=auto` takes the card at hand."""

import pytest

import kvexp
from kvexp import at_hand
from kvexp.errors import RequestError

H200 = {
    "name": "NVIDIA H200",
    "source": "the driver of this machine",
    "total_bytes": 150109880320,
    "compute_capability": "9.0",
    "num_sms": 132,
}


def test_a_card_of_the_catalogue_is_the_same_as_by_name(monkeypatch):
    monkeypatch.setattr(at_hand, "_ask_driver", lambda: dict(H200))
    auto, named = kvexp.run(["gpu=auto"]), kvexp.run(["gpu=h200"])

    assert auto.ok
    assert auto.num_blocks == named.num_blocks
    assert auto.budget == named.budget


def test_a_card_that_only_prints_its_total_in_logs_is_exact_at_hand(monkeypatch):
    total = 85_017_493_504
    monkeypatch.setattr(
        at_hand,
        "_ask_driver",
        lambda: {**H200, "name": "NVIDIA H100 80GB HBM3", "total_bytes": total},
    )
    result = kvexp.run(["gpu=auto", "profiler.non_torch_bytes=230MiB"])

    assert result.effective["total_bytes"] == total
    assert (result.num_blocks_low, result.num_blocks_high) == (None, None)


def test_an_unknown_card_is_answered_and_given_values_stay(monkeypatch):
    monkeypatch.setattr(at_hand, "_ask_driver", lambda: {**H200, "name": "NVIDIA X1"})
    result = kvexp.run(["gpu=auto", "gpu.total_bytes=100GiB"])

    assert result.ok
    assert result.effective["total_bytes"] == 100 * 2**30


def test_without_a_card_it_says_so(monkeypatch):
    def refuse():
        raise RequestError("gpu=auto needs an NVIDIA GPU")

    monkeypatch.setattr(at_hand, "_ask_driver", refuse)
    with pytest.raises(RequestError, match="gpu=auto needs an NVIDIA GPU"):
        kvexp.run(["gpu=auto"])


@pytest.mark.gpu
def test_the_driver_of_this_machine_names_a_card():
    told = at_hand._ask_driver()

    assert told["total_bytes"] > 2**30
    assert told["name"]
