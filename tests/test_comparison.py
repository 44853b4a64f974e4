"""`profiler=compare`: what is put side by side, and what is said of those that did not run."""

import io
import json
import pickle
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

import kvexp
from kvexp import comparison, record, report, tracking
from kvexp.api import compose_points
from kvexp.comparison import Compare
from kvexp.contract import ProfilerUnavailable
from kvexp.isolate import Worker
from kvexp.point import execute
from kvexp.results import Status
from kvexp_analytic import Analytic

POINT = ["model=llama3_8b", "gpu=h200", "enforce_eager=true"]
ACTIVATION = 939540992  # vLLM 0.26.0 on an H200


@dataclass
class Other(Analytic):
    """Another profiler; `missing`, `failing` and `readings` are what happens to it."""

    missing: ClassVar[str] = ""
    failing: ClassVar[str] = ""
    found: ClassVar[dict] = {}

    def check(self):
        if self.missing:
            raise ProfilerUnavailable(self.missing)

    def open(self, deployment, engine):
        measurement = super().open(deployment, engine)
        if self.failing:

            def warmup():
                raise RuntimeError(self.failing)

            measurement.warmup = warmup
        measurement.readings = lambda: self.found
        return measurement


def other(**happens):
    return type("Other", (Other,), happens)


@dataclass
class Recording(Other):
    """One that can record its blocks."""

    snapshot: bool = False

    def open(self, deployment, engine):
        measurement = super().open(deployment, engine)
        if not self.snapshot:
            measurement.readings = dict
        return measurement


def compare(*of, **classes):
    """The result of the point by these profilers; analytic is always known."""
    (point,) = compose_points(POINT)
    made = Compare.among({"analytic": Analytic, **classes})(of=list(of))
    for name in classes:
        getattr(made.options, name).activation_bytes = 2 * ACTIVATION
    with Worker() as worker:
        return comparison.execute(replace(point.run, profiler=made), "vllm", made, worker)


def test_the_component_that_differs_most_is_named_with_bytes_and_ratio():
    result = compare("analytic", "doubled", doubled=other())

    assert result.status is Status.ok
    assert result.notes[-1] == (
        "largest difference: activation, 1.75 GiB by doubled against 0.88 GiB by analytic:"
        " +939,540,992 bytes, x2.0000"
    )
    assert [each.profiler for each in result.compared] == ["analytic", "doubled"]
    assert [each.num_blocks for each in result.compared] == [57629, 57181]
    assert result.num_blocks == 57629


def test_profilers_that_agree_are_said_to():
    made = compare("analytic", "same", same=Analytic)
    same = replace(made.compared[1], profile=made.compared[0].profile)

    (line,) = comparison.side_by_side.largest_difference((made.compared[0], same))

    assert line == "no component differs from analytic's"


def test_the_table_has_ratios_to_the_first():
    result = compare("analytic", "doubled", doubled=other())

    lines = list(report.point_lines(result))

    (row,) = [line for line in lines if line.startswith("activation ")]
    assert row.split() == ["activation", "0.875", "1.750", "x2.0000"]
    (row,) = [line for line in lines if line.startswith("blocks  ") and "x" in line]
    assert row.split() == ["blocks", "57,629", "57,181", "x0.9922"]


def test_a_sweep_shows_the_table_of_every_point():
    result = compare("analytic", "doubled", doubled=other())
    stream = io.StringIO()

    report.print_table([("util=0.92", result), ("again", result)], file=stream)

    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert lines.count(["GiB", "analytic", "doubled"]) == 2
    assert lines[lines.index(["again"]) + 1] == ["GiB", "analytic", "doubled"]


def test_each_full_profile_is_kept_and_read_back():
    result = compare("analytic", "doubled", doubled=other(found={"counter": 7}))

    data = json.loads(json.dumps(record.to_dict(result)))

    assert record.from_dict(data) == result
    first, second = data["compared"]
    assert first["profile"]["activation_bytes"] == ACTIVATION
    assert second["profile"]["activation_bytes"] == 2 * ACTIVATION
    assert second["profile"]["parts"][1]["reason"]
    assert second["readings"] == {"counter": 7}


def test_figures_and_ratios_are_metrics():
    data = record.to_dict(compare("analytic", "doubled", doubled=other()))

    found = tracking.metrics_of(data)

    assert found["compared.analytic.activation_bytes"] == ACTIVATION
    assert found["compared.doubled.activation_bytes"] == 2 * ACTIVATION
    assert found["compared.doubled.activation_bytes_ratio"] == 2
    assert found["compared.doubled.num_blocks"] == 57181
    assert found["num_blocks"] == 57629
    assert "compared.doubled.cudagraph_bytes_ratio" not in found  # nothing is divided by 0


def test_one_that_cannot_run_here_is_said_and_the_others_compared():
    result = compare(
        "analytic", "absent", "doubled", absent=other(missing="no card"), doubled=other()
    )

    assert result.status is Status.ok
    assert result.notes[-1] == "absent: skipped at start: no card"
    assert result.notes[-2].startswith("largest difference: activation")
    assert [each.status for each in result.compared] == ["ok", "skipped", "ok"]


def test_one_that_ends_early_is_said_with_its_stage():
    result = compare(
        "analytic", "ends", "doubled", ends=other(failing="CUDA out of memory"), doubled=other()
    )

    assert result.status is Status.ok
    assert result.notes[-1] == "ends: oom at warmup: CUDA out of memory"


def test_one_alone_is_no_comparison():
    result = compare("analytic", "ends", ends=other(failing="CUDA out of memory"))

    assert result.status is Status.oom
    assert result.reason == (
        "2 profilers must have terms, analytic has: ends: oom at warmup: CUDA out of memory"
    )
    assert [each.profiler for each in result.compared] == ["analytic", "ends"]
    assert result.compared[0].profile.activation_bytes == ACTIVATION


def test_fewer_than_two_that_can_run_are_refused_with_every_reason():
    made = Compare.among({"a": other(missing="no card"), "b": other(missing="no driver")})

    with pytest.raises(
        ProfilerUnavailable, match="2 of a, b must be able to run: a: no card; b: no driver"
    ):
        made(of=["a", "b"]).check()


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        ("[analytic]", "profiler.of must name 2 or more different profilers, got [analytic]"),
        ("[analytic,analytic]", "2 or more different profilers, got [analytic, analytic]"),
        ("[analytic,nvlm]", "got 'nvlm'"),
        ("[analytic,compare]", "got 'compare'"),
    ],
)
def test_what_is_no_comparison_makes_the_point_invalid(of, problem):
    result = kvexp.run([*POINT, "profiler=compare", f"profiler.of={of}"])

    assert result.status is Status.invalid
    assert problem in result.reason


def test_each_profilers_options_are_reached_and_checked():
    options = ["profiler.options.analytic.weights_bytes=15GiB", "profiler.options.nvml.timeout_s=9"]
    (point,) = compose_points([*POINT, "profiler=compare", "profiler.of=[analytic,nvml]", *options])

    chosen = point.run.profiler.chosen()

    assert chosen["analytic"].weights_bytes == "15GiB"
    assert chosen["nvml"].timeout_s == 9
    assert set(point.config["profiler"]["options"]) == {"analytic", "nvml"}
    with pytest.raises(kvexp.RequestError, match="intervall_s"):
        compose_points([*POINT, "profiler=compare", "profiler.options.nvml.intervall_s=1"])


@pytest.mark.parametrize("given", ["nvml.interval_s=0.02", "torch_allocator.sampler=none"])
def test_options_of_a_profiler_that_is_not_asked_are_refused(given):
    of = "profiler.of=[analytic,simulated]"
    result = kvexp.run([*POINT, "profiler=compare", of, f"profiler.options.{given}"])
    name = given.partition(".")[0]

    assert result.status is Status.invalid
    assert result.reason == (
        f"profiler.options.{name} is given, but profiler.of does not name {name}:"
        " [analytic, simulated]"
    )


# --- block by block --------------------------------------------------------------------------


def alloc(address, size, line):
    frame = {"name": "forward", "filename": "/x/site-packages/model.py", "line": line}
    return {"action": "alloc", "addr": address, "size": size, "frames": [frame]}


SIMULATED = {
    "simulation": {
        "live_blocks": [
            {"size_bytes": 4096, "operator": "aten.mm", "module": "mlp", "line": "model.py:9"},
            {"size_bytes": 1024, "operator": "aten.mul", "module": "norm", "line": "model.py:5"},
        ]
    }
}


@pytest.fixture
def recorded(tmp_path):
    file = tmp_path / "memory_snapshot.pickle"
    history = [alloc(0, 8192, 9), alloc(9000, 1024, 5)]
    file.write_bytes(pickle.dumps({"device_traces": [history], "segments": []}))
    return {"files": [str(file)]}


def recording(found):
    return type("Recording", (Recording,), {"found": found})


def test_a_simulation_and_a_recorded_forward_are_compared_block_by_block(recorded):
    result = compare(
        "simulated", "measured", simulated=other(found=SIMULATED), measured=recording(recorded)
    )

    assert result.notes[-2:] == (
        "blocks at the peak: simulated 2 of 5,120 bytes, measured 2 of 9,216 bytes",
        "  aten.mm mlp model.py:9: simulated 1 of 4,096 bytes, measured 1 of 8,192 bytes (+4,096)",
    )
    (difference,) = result.readings["blocks_at_peak"]["differences"]
    assert difference["module"] == "mlp"
    assert json.loads(json.dumps(record.to_dict(result)))["readings"] == result.readings


def test_blocks_are_recorded_only_where_a_simulation_is_there_to_compare_with(recorded):
    result = compare("analytic", "measured", measured=recording(recorded))

    assert result.readings == {}
    assert result.compared[1].readings == {}


@pytest.mark.torch
def test_the_rules_and_a_simulation_are_compared_without_a_gpu(command_line):
    small = ["model=qwen3_0_6b", "gpu=h200", "enforce_eager=true", "max_num_batched_tokens=512"]
    status, out, err = command_line(
        *small, "profiler=compare", "profiler.of=[analytic,simulated,torch_allocator]"
    )

    assert (status, err) == (0, "")
    assert ["GiB", "analytic", "simulated"] in [line.split() for line in out.splitlines()]
    assert "largest difference: " in out
    assert "torch_allocator: skipped at start: " in out


@pytest.mark.gpu
@pytest.mark.torch
def test_on_a_gpu_a_simulated_forward_is_compared_with_the_real_one_block_by_block():
    (point,) = compose_points(
        [
            *("model=qwen3_0_6b", "gpu=auto", "enforce_eager=true", "max_num_batched_tokens=2048"),
            *("profiler=compare", "profiler.of=[simulated,torch_allocator]"),
            "profiler.options.torch_allocator.sampler=none",
        ]
    )
    with Worker() as worker:
        result = execute(point, worker)

    assert (result.status, result.reason) == (Status.ok, "")
    blocks = result.readings["blocks_at_peak"]
    assert blocks["simulated_count"] > 5
    assert blocks["measured_count"] > 5
    simulated, measured = (each.profile.activation_bytes for each in result.compared)
    apart = sum(each["measured_bytes"] - each["simulated_bytes"] for each in blocks["differences"])
    assert measured - simulated == pytest.approx(apart, abs=16384)  # blocks are rounded up
