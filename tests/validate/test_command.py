"""`python -m kvexp.validate` as a user runs it."""

import json
import signal
from pathlib import Path

import pytest

from kvexp.validate import command
from kvexp.validate.prediction import Prediction
from thinned import thinned

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"

LINES = (DATA / "engine_logs.jsonl").read_text().splitlines()
FEW = [
    line
    for line in LINES
    if '"id": "v19-microsoft-phi-4-tp1-8192"' in line
    or '"id": "nemotron-puzzle75b-4x3090-oom"' in line
]
LOG = """\
INFO 04-24 16:32:50 [core.py:58] Initializing a V1 LLM engine (v0.8.5) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=32768, \
tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
INFO 04-24 16:33:13 [kv_cache_utils.py:634] GPU KV cache size: 158,656 tokens
"""


@pytest.fixture
def few(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(FEW) + "\n")
    return str(path)


@pytest.mark.slow
def test_the_kept_records_stay_within_their_limits(tmp_path, capsys):
    out = tmp_path / "out.json"
    status = command.run(
        [
            str(DATA / "engine_logs.jsonl"),
            "--quiet",
            f"--check={DATA / 'engine_logs_limits.yaml'}",
            f"--json={out}",
        ]
    )

    assert status == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert len(found["cases"]) == found["summary"]["all"]["cases"] == len(LINES)
    assert [each["id"] for each in found["cases"] if "Error: " in each["reason"]] == []


@pytest.mark.slow
def test_logs_of_public_repositories_stay_within_their_limits(capsys):
    records, limits = DATA / "fresh_logs.jsonl", DATA / "fresh_logs_limits.yaml"

    status = command.run([str(records), "--quiet", f"--check={limits}"])

    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("id", "kv_tokens"),
    [
        ("faradawn-meta-llama-3-8b-instruct", 900_800),
        ("kolyangg-qwen3-30b-a3b-instruct-2507", 94_784),
        ("sostrowsk-qwen3.6-35b-a3b-nvfp4", 3_366_051),
        ("djangodevren-qwen3.6-35b-a3b", 623_040),
    ],
)
def test_a_log_of_a_public_repository_is_predicted(id, kv_tokens, tmp_path):
    lines = (DATA / "fresh_logs.jsonl").read_text().splitlines()
    path, out = tmp_path / "one.jsonl", tmp_path / "out.json"
    path.write_text(next(line for line in lines if f'"id": "{id}"' in line))

    assert command.run([str(path), "--quiet", f"--json={out}"]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["logged"]["kv_tokens"] == kv_tokens
    assert case["predicted"]["kv_tokens"] == pytest.approx(kv_tokens, rel=0.015)
    assert case["inside_interval"]


@pytest.mark.parametrize("id", ["v0-phi4-bnb-a100", "v0-qwen25vl7b-awq-jetson-novideo"])
def test_adapters_and_limits_that_a_record_states_are_asked_for(id, tmp_path):
    path, out = tmp_path / "one.jsonl", tmp_path / "out.json"
    path.write_text(next(line for line in LINES if f'"id": "{id}"' in line))

    assert command.run([str(path), "--quiet", f"--json={out}"]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["answered"], case["reason"]


def test_cases_and_summary_are_printed_and_kept(few, capsys):
    assert command.run([few, "--json", "out.json", "--page", "page.md", "--picture", "p.png"]) == 0

    printed = capsys.readouterr().out
    assert "v19-microsoft-phi-4-tp1-8192" in printed
    assert "nemotron-puzzle75b-4x3090-oom: not answered: model 'nvidia/NVIDIA-Nemotron" in printed
    assert len(json.loads(Path("out.json").read_text())["cases"]) == 2
    assert Path("page.md").read_text().startswith("# Accuracy\n")
    assert Path("p.png").exists()


def test_a_raw_log_is_a_case(few, capsys):
    Path("start.log").write_text(LOG)

    assert command.run(["--log", "start.log", "--json", "out.json"]) == 0
    (case,) = json.loads(Path("out.json").read_text())["cases"]
    assert (case["id"], case["answered"]) == ("start", True)
    assert "start: gpu: not known, rtx_3060, t4" in capsys.readouterr().out
    assert case["logged"]["kv_tokens"] == 158656


def test_the_card_of_a_log_that_names_none_is_given(few, tmp_path, capsys):
    (tmp_path / "start.log").write_text(LOG)
    (tmp_path / "told.log").write_text(f"GPU 0: NVIDIA H200\n{LOG}")
    logs = ["--log=start.log", "--log=told.log", "--json=out.json"]

    assert command.run([*logs, "--gpu=RTX 3090"]) == 0
    given, told = json.loads(Path("out.json").read_text())["cases"]
    assert "gpu: rtx_3090's total of the catalogue" in given["assumptions"]
    assert "gpu: h200's total of the catalogue" in told["assumptions"]

    assert command.run([*logs, "--gpu=nothing"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "kvexp: --gpu nothing names no card; see python -m kvexp.list gpus"


def test_flags_of_a_raw_log_are_part_of_the_prediction(few):
    given = (
        "INFO 04-24 16:32:00 [utils.py:253] non-default args: {'model': 'x', 'enable_lora': True,"
        " 'max_loras': 4, 'max_lora_rank': 64, 'cpu_offload_gb': 2.0, 'offload_group_size': 8,"
        " 'api_key': ['sk-1']}\n"
    )
    Path("plain.log").write_text(LOG)
    Path("lora.log").write_text(given + LOG)

    logs = ["--log=plain.log", "--log=lora.log"]
    assert command.run([*logs, "--json", "out.json", "--quiet"]) == 0
    plain, lora = json.loads(Path("out.json").read_text())["cases"]
    moved = lora["predicted"]["weights_bytes"] - plain["predicted"]["weights_bytes"]
    assert (1 << 30) < moved + (2 << 30) < (2 << 30)  # adapters less two GiB in the host
    noted = [each for each in lora["assumptions"] if each.startswith("other_flags")]
    assert noted == [
        "other_flags: no rule for 'offload_group_size=8': weights offloaded by groups of layers,"
        " and their buffers"
    ]
    assert "sk-1" not in Path("out.json").read_text()


def test_logs_of_one_name_in_two_folders_stay_apart(few):
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "start.log").write_text(LOG)

    logs = [f"--log={folder}/start.log" for folder in ("a", "b")]
    assert command.run([*logs, "--json", "out.json", "--quiet"]) == 0
    cases = json.loads(Path("out.json").read_text())["cases"]
    assert [case["id"] for case in cases] == ["a/start.log", "b/start.log"]


def test_a_text_that_is_no_log_is_one_line_and_the_rest_is_answered(few, capsys):
    Path("other.txt").write_text("hello\n")

    assert command.run([few, "--log", "other.txt", "--json", "out.json", "--quiet"]) == 2
    assert len(json.loads(Path("out.json").read_text())["cases"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvexp: other.txt: no line about memory or capacity of vllm")
    assert error.count("\n") == 1


def test_a_file_without_records_is_one_line_and_an_empty_list(few, capsys):
    Path("empty.jsonl").write_text("\n")

    assert command.run(["empty.jsonl", "--json", "out.json"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("no record in empty.jsonl\n", "")
    assert json.loads(Path("out.json").read_text())["cases"] == []


def test_a_text_that_is_no_log_is_its_error_alone(few, capsys):
    Path("other.txt").write_text("hello\n")

    assert command.run(["--log", "other.txt", "--json", "out.json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert json.loads(Path("out.json").read_text())["cases"] == []


def test_a_broken_record_is_one_line_and_the_rest_is_answered(few, capsys):
    with Path(few).open("a") as stream:
        stream.write('{"id": "bad", "engine": "vllm", "tp": "two"}\n')

    assert command.run([few, "--json", "out.json", "--quiet"]) == 2
    assert len(json.loads(Path("out.json").read_text())["cases"]) == 2
    assert capsys.readouterr().err == (f"kvexp: {few}:3: tp must be int or null, got 'two'\n")


def test_a_missed_limit_is_status_1(few, capsys):
    Path("limits.yaml").write_text("all:\n  answered_share: 0.9\n")

    assert command.run([few, "--check", "limits.yaml", "--quiet"]) == 1
    assert capsys.readouterr().err == "kvexp: all.answered_share is 0.5, below 0.9\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl cannot be read"),
        (["FEW", "--check", "missing.yaml"], "--check missing.yaml cannot be read"),
        (["FEW", "--check", "list.yaml"], "--check list.yaml must hold keys of the summary"),
        (["FEW", "--check", "broken.yaml"], "--check broken.yaml cannot be read"),
        (["FEW", "--check", "unknown.yaml"], "--check: everything is no key of the summary"),
        (["FEW", "--check", "nan.yaml"], "--check: all.answered_share must be a number, got nan"),
        (["FEW", "--json", "."], "cannot write to ."),
        (["FEW", "--json", "no/such/folder/out.json"], "cannot write to no/such/folder/out.json"),
        (["FEW", "--picture", "out.nothing"], "cannot write to out.nothing"),
        (["FEW", "--mlflow", "nonsense://x"], "nonsense"),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(few, capsys, arguments, message):
    Path("list.yaml").write_text("- 1\n")
    Path("broken.yaml").write_text("a: [\n")
    Path("nan.yaml").write_text("all: {answered_share: .nan}\n")
    Path("unknown.yaml").write_text("everything: 1\n")

    assert command.run([few if each == "FEW" else each for each in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("encoding", thinned(["utf-16", "utf-8", "utf-8-sig"]))
def test_records_and_logs_are_read_as_editors_and_shells_write_them(few, encoding):
    Path("few.jsonl").write_text("\r\n".join(FEW), encoding=encoding)
    Path("start.log").write_text(LOG, encoding=encoding)

    assert command.run(["few.jsonl", "--log=start.log", "--json=out.json", "--quiet"]) == 0
    cases = json.loads(Path("out.json").read_text())["cases"]
    assert [each["logged"]["kv_tokens"] for each in cases].count(158656) == 1
    assert len(cases) == 3


@pytest.mark.parametrize("data", [b'{"id": "\xff", "engine": "vllm"}', b'{"id": "\\ud800"}'])
def test_bytes_that_are_no_text_are_one_line_and_the_rest_is_answered(few, capsys, data):
    Path("odd.jsonl").write_bytes(data + b"\n" + FEW[0].encode())

    assert command.run(["odd.jsonl", "--json", "out.json", "--quiet"]) == 2
    assert len(json.loads(Path("out.json").read_text())["cases"]) == 1
    expected = "kvexp: odd.jsonl:1: holds bytes that are no text in UTF-8\n"
    assert capsys.readouterr().err == expected


def test_a_file_that_is_missing_or_a_folder_leaves_the_others_answered(few, capsys):
    Path("folder").mkdir()

    assert command.run(["no.jsonl", "folder", few, "--json", "out.json", "--quiet"]) == 2
    assert len(json.loads(Path("out.json").read_text())["cases"]) == 2
    assert capsys.readouterr().err == (
        "kvexp: no.jsonl cannot be read: No such file or directory\n"
        "kvexp: folder cannot be read: Is a directory\n"
    )


def test_many_lines_that_are_no_records_are_not_all_named(few, capsys):
    Path("array.json").write_text("[\n" * 50)

    assert command.run(["array.json"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == command.MOST_PROBLEMS + 1
    assert lines[-1] == "kvexp: array.json: 40 more lines are no records"


def test_an_interruption_keeps_what_is_answered(few, capsys, monkeypatch):
    def interrupted(inputs):
        if inputs.id == "nemotron-puzzle75b-4x3090-oom":
            signal.raise_signal(signal.SIGINT)
        return Prediction.unanswered("as a test has it")

    monkeypatch.setattr(command, "predict", interrupted)

    assert command.run([few, "--json", "out.json", "--quiet"]) == 130
    assert len(json.loads(Path("out.json").read_text())["cases"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "kvexp: interrupted after 1 of 2 records\n"
    assert "all cases" in printed.out


def test_a_fault_of_one_case_does_not_lose_the_others(few, monkeypatch):
    def faulty(*_, **__):
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr("kvexp.validate.predict.widened", faulty)

    assert command.run([few, "--json", "out.json", "--quiet"]) == 0
    cases = json.loads(Path("out.json").read_text())["cases"]
    reasons = [each["reason"] for each in cases]
    assert sorted(reasons)[0] == "ZeroDivisionError: of a test"
    assert len(reasons) == 2


def test_a_picture_that_cannot_be_drawn_leaves_the_rest(few, capsys):
    assert command.run([few, "--picture=out.nothing", "--json=out.json", "--quiet"]) == 2
    assert len(json.loads(Path("out.json").read_text())["cases"]) == 2
    assert "all cases" in capsys.readouterr().out


def test_without_a_file_the_use_is_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        command.run([])

    assert ended.value.code == 2
    assert "give a FILE.jsonl or --log FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_one_run_in_mlflow_holds_metrics_and_files(few, capsys):
    from mlflow.tracking import MlflowClient

    assert command.run([few, "--quiet", "--mlflow"]) == 0
    assert "mlflow ui --backend-store-uri" in capsys.readouterr().out
    client = MlflowClient(tracking_uri=f"sqlite:///{Path('outputs/mlflow.db').resolve()}")
    (experiment,) = client.search_experiments(filter_string="name = 'kvexp-validate'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["all.answered_share"] == 0.5
    assert 0 < run.data.metrics["all.terms.num_blocks.median_error"] < 0.1
    files = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert files == {"scatter.png", "summary.txt", "validation.json", "worst.txt"}


@pytest.mark.slow
def test_the_accuracy_page_is_the_one_that_the_command_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(DATA.parents[1])
    made = tmp_path / "accuracy.md"
    arguments = ["--group=v19-", "--group=vsweep-", "--quiet", f"--page={made}"]

    assert command.run(["tests/data/engine_logs.jsonl", *arguments]) == 0
    assert made.read_text() == PAGE.read_text()
