"""Shared by all tests: readable conformance failures, and a command line in its own folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

pytest.register_assert_rewrite("kvexp.testing")

ROOT = Path(__file__).parents[1]


def pytest_collection_modifyitems(items):
    if shutil.which("nvidia-smi") is not None:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU (no nvidia-smi here)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def kvexp_command(tmp_path):
    """`python -m kvexp ARGUMENTS` in an empty folder; returns the completed process."""

    def run(*arguments, cwd=tmp_path, module="kvexp", **options):
        environment = {**os.environ, **options.pop("env", {})}
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            **options,
        )

    return run


@pytest.fixture
def command_line(tmp_path, monkeypatch, capfd):
    """The command line in this process: call with arguments, get (status, stdout, stderr)."""
    import signal
    import warnings

    from kvexp import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvexp"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments):
        capfd.readouterr()
        try:
            status = cli.run(list(arguments))
        except SystemExit as ended:
            status = ended.code
        os.environ["HYDRA_FULL_ERROR"] = "0"
        out, err = capfd.readouterr()
        return status, out, err

    yield run
    signal.signal(signal.SIGTERM, before)
