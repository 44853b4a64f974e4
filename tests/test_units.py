"""Sizes as people read them: none reads 0.00 but zero itself."""

import pytest

from kvexp.units import gib


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0.00 GiB"),
        (60_773_862_605, "56.60 GiB"),
        (5 << 20, "5.00 MiB"),
        (6 << 20, "0.01 GiB"),
        (642_560, "0.61 MiB"),
        (-3 << 20, "-3.00 MiB"),
        (512, "512 B"),
        (1 << 40, "1,024.00 GiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_that_shows_it(size_bytes, text):
    assert gib(size_bytes) == text
