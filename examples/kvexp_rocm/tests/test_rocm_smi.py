import pytest

from kvexp.testing import ProfilerConformance


@pytest.mark.parametrize("name", ["rocm_smi"])
class TestRocmSmi(ProfilerConformance):
    pass
