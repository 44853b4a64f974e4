"""What README shows is what the program does."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_table_is_the_real_one(command_line):
    shown = next(block for block in blocks("") if block.startswith("$ "))
    command, _, table = shown.partition("\n")
    arguments = command.removeprefix("$ python -m kvexp ").split()
    status, out, err = command_line(*arguments, "tracking=off")

    assert status == 0, err
    printed = [line.rstrip() for line in out.splitlines() if not line.startswith("results: ")]
    assert printed == [line.rstrip() for line in table.splitlines()]


def test_the_folder_of_ones_own_works(command_line, tmp_path):
    (block,) = blocks("yaml")
    for part in block.split("---\n"):
        named = next(line for line in part.splitlines() if line.startswith("# lab/"))
        path = tmp_path / named.removeprefix("# ").partition(":")[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(part)
    status, out, err = command_line("--config-dir", "lab", "sweep=mine", "tracking=off")

    assert status == 0, err
    assert "4 of 4 points ok" in out


def test_the_point_that_runs_out_of_memory_says_what_is_shown(command_line):
    (shown,) = re.findall(r"^python -m kvexp (.*)\n# (oom .*)$", README, flags=re.MULTILINE)
    status, out, err = command_line(*shown[0].split(), "tracking=off")

    assert status == 1, err
    assert all(words in out for words in shown[1].split(" ... "))


def test_python_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})

    assert "weights" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", ["profiler", "engine"])
def test_every_plugin_has_a_row(group):
    for name in entry_points(group=f"kvexp.{group}").names:
        assert f"| `{name}` |" in README, name


def test_ci_runs_the_command_that_readme_shows():
    assert "<!-- tests -->\n```sh\npython3 -m venv .venv" in README
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_links_lead_somewhere():
    for text in (README, *((p.read_text()) for p in (ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (ROOT / target).exists() or (ROOT / "docs" / target).exists(), target
