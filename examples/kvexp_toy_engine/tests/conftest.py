import pytest

pytest.register_assert_rewrite("kvexp.testing")
