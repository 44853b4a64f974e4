"""Every registered plugin keeps the contract, and a third party's joins without an edit here."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvexp.testing import EngineConformance, ProfilerConformance

EXAMPLE = Path(__file__).parents[1] / "examples" / "kvexp_rocm"
PROFILERS = sorted(entry_points(group="kvexp.profiler").names)
ENGINES = sorted(entry_points(group="kvexp.engine").names)


@pytest.mark.parametrize("name", PROFILERS)
class TestEveryProfiler(ProfilerConformance):
    pass


@pytest.mark.parametrize("name", ENGINES)
class TestEveryEngine(EngineConformance):
    pass


def distribution(site, name, files, entry):
    """Lay a distribution down as an installer would."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry)
    for file, text in files.items():
        (site / file).write_text(text)


def run(site, *arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "kvexp", *arguments, "tracking=off"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_plugin_that_does_not_import_is_skipped_with_a_warning(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    distribution(
        site,
        "kvexp-bad",
        {"kvexp_bad.py": "import a_module_that_is_missing\n"},
        "[kvexp.profiler]\nbad = kvexp_bad:Bad\n",
    )
    done = run(site, "model=llama3_8b", cwd=tmp_path)
    chosen = run(site, "profiler=bad", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "skipped profiler=bad from kvexp-bad: ModuleNotFoundError" in done.stderr
    assert chosen.returncode == 2
    assert "profiler=bad does not exist" in chosen.stderr


def test_two_plugins_with_one_name_are_refused(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    for number in ("one", "two"):
        distribution(
            site,
            f"kvexp-{number}",
            {f"kvexp_{number}.py": "from kvexp_analytic import Analytic\n"},
            f"[kvexp.profiler]\nmine = kvexp_{number}:Analytic\n",
        )
    done = run(site, "model=llama3_8b", cwd=tmp_path)

    assert done.returncode == 2
    assert "profiler=mine comes from both kvexp-one and kvexp-two" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def third_party(tmp_path_factory):
    """The example distribution, built and installed as a wheel into a folder of its own."""
    work = tmp_path_factory.mktemp("third_party")
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


def test_a_third_partys_profiler_and_card_are_used(third_party):
    done = run(
        third_party / "site",
        *("profiler=rocm_smi", "gpu=mi300x_vf", "profiler.idle_bytes=1GiB", "model=qwen3_0_6b"),
        cwd=third_party,
    )

    assert done.returncode == 0, done.stderr
    assert "rocm-smi" in done.stdout


@pytest.mark.slow
def test_a_third_partys_own_tests_pass(third_party):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=third_party / "source",
        env={**os.environ, "PYTHONPATH": str(third_party / "site")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
