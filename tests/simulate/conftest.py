"""A folder of its own for traces, and a reason to skip where torch is missing."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


@pytest.fixture(autouse=True)
def needs_torch(request):
    missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if "torch" in request.keywords and missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install 'kvexp[torch]'")
