"""Profiles of cards: complete, sourced, and found by name or architecture."""

from dataclasses import replace

import pytest

from kvexp.simulate import device
from kvexp.simulate.errors import Untraceable


@pytest.mark.parametrize("name", device.names())
def test_a_profile_is_complete_and_says_where_it_is_from(name):
    found = device.load(name)

    assert found.source
    assert found.attention[-1] == "math"
    assert found.measured is (name == "h200")
    assert found.blas_workspace > found.blas_lt_workspace > 0


def test_sizes_that_are_not_those_of_the_simulated_allocator_are_a_doubt():
    other = replace(device.load("h200"), small_segment=1 << 20)

    assert device.load("h200").doubts == []
    assert other.doubts == [
        "small_segment of NVIDIA H200 is 1048576 bytes, 2097152 are simulated",
    ]


def test_a_card_that_was_measured_is_found_by_its_name():
    assert device.find("NVIDIA H200", "9.0") == device.load("h200")


@pytest.mark.parametrize(
    ("capability", "workspace", "first"),
    [
        ("9.0", 33554432, "cudnn"),
        ("8.0", 8519680, "flash"),
        ("8.9", 8519680, "flash"),
        ("7.5", 8519680, "efficient"),
        ("12.1", 8519680, "flash"),
        ("10.3", 33554432, "cudnn"),
    ],
)
def test_another_card_takes_the_profile_of_its_architecture(capability, workspace, first):
    found = device.find("another card", capability)

    assert (found.blas_workspace, found.attention[0]) == (workspace, first)
    assert found.capability == tuple(int(part) for part in capability.split("."))
    assert not found.measured


@pytest.mark.parametrize("capability", [None, "6.0"])
def test_a_card_without_a_profile_is_refused_by_name(capability):
    with pytest.raises(Untraceable, match="no device profile for Some Card"):
        device.find("Some Card", capability)
