"""A third party's engine in its own distribution joins without an edit here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "kvexp_toy_engine"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example, built and installed as a wheel into a folder of its own."""
    work = tmp_path_factory.mktemp("toy_engine")
    shutil.copytree(EXAMPLE, work / "source")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--target", str(work / "site"), str(work / "source")),
        ],
        check=True,
        capture_output=True,
    )
    return work


def python(installed, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed / "site")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_is_compared_with_ours(installed):
    text = python(
        installed,
        *("kvexp", "-m", "engine=toy,sglang", "model=llama3_8b", "gpu=h200", "tracking=off"),
        cwd=installed,
    )

    assert "engine=sglang against engine=toy: cache " in text
    assert "engine=toy: to paste: toy meta-llama/Meta-Llama-3-8B --share 0.5" in text


@pytest.mark.slow
def test_it_passes_the_suite_for_engines(installed):
    arguments = ("pytest", "-q", "-p", "no:cacheprovider", "tests")

    assert " passed" in python(installed, *arguments, cwd=installed / "source")
