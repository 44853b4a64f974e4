"""Blocks alive at a peak, simulated and out of torch's memory history, and where they differ."""

import pytest

from kvexp import simulate
from kvexp.simulate import LiveBlock, blocks_in_snapshot, differences
from kvexp.simulate import device as devices
from kvexp.simulate.snapshot import snapshot

LINE = "transformers/models/llama/modeling_llama.py"
PYTHON = "/usr/lib/python3/dist-packages/"
MLP = LiveBlock(
    size_bytes=4096, operator="aten.mm.default", module="layers.3.mlp", line=LINE + ":9"
)
NORM = LiveBlock(size_bytes=1024, operator="aten.mul.Tensor", module="norm", line=LINE + ":5")


def entry(action, address, size, *frames):
    named = [
        {"name": name, "filename": file, "line": line}
        for name, file, line in frames or [("", "", 0)]
    ]
    return {"action": action, "addr": address, "size": size, "frames": named}


def history(*entries):
    return {"device_traces": [list(entries)], "segments": []}


def test_equal_lists_differ_nowhere():
    unnamed = [LiveBlock(size_bytes=block.size_bytes) for block in (NORM, MLP)]

    assert differences([MLP, NORM], [NORM, MLP]) == ()
    assert differences([MLP, NORM], unnamed) == ()


def test_one_tensor_of_two_sizes_is_one_difference_named_by_the_simulation():
    measured = LiveBlock(size_bytes=8192, operator="aten.mm", line=LINE + ":9")
    (found,) = differences([MLP, NORM], [measured, NORM])

    assert (found.simulated_bytes, found.measured_bytes) == (4096, 8192)
    assert (found.module, found.operator) == ("layers.3.mlp", "aten.mm.default")
    assert found.line == LINE + ":9"


def test_what_one_side_holds_more_often_is_counted():
    (found,) = differences([MLP] * 2, [MLP] * 5)

    assert (found.simulated_count, found.measured_count) == (0, 3)
    assert found.measured_bytes - found.simulated_bytes == 3 * 4096


def test_the_largest_difference_comes_first():
    found = differences([NORM], [MLP])

    assert [each.module for each in found] == ["layers.3.mlp", "norm"]
    assert [each.measured_bytes for each in found] == [4096, 0]


def test_the_peak_of_a_history_and_not_its_end_is_read():
    found = blocks_in_snapshot(
        history(
            entry("segment_alloc", 0, 1 << 21),
            entry("free_completed", 7, 100),  # allocated before recording began
            entry("alloc", 0, 1000),
            entry("alloc", 1024, 3000),
            entry("free_requested", 1024, 3000),
            entry("free_completed", 1024, 3000),
            entry("alloc", 1024, 10),
        )
    )

    assert [block.size_bytes for block in found] == [3000, 1000]


def test_a_measured_block_names_operator_and_line_outside_torch():
    frames = [
        ("at::_ops::empty_memory_format::call", "", 0),
        ("at::_ops::mm::call(at::Tensor const&)", "??", 0),
        ("forward", PYTHON + "torch/nn/modules/linear.py", 134),
        ("forward", PYTHON + LINE, 9),
        ("main", "/home/someone/run.py", 1),
    ]
    (found,) = blocks_in_snapshot(history(entry("alloc", 0, 4096, *frames)))

    assert found == LiveBlock(size_bytes=4096, operator="aten.mm", line=LINE + ":9")


@pytest.mark.parametrize("snapshot", [{}, {"device_traces": []}, {"device_traces": [[]]}])
def test_a_snapshot_without_history_is_refused(snapshot):
    with pytest.raises(ValueError, match="_record_memory_history"):
        blocks_in_snapshot(snapshot)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_the_simulated_history_holds_the_simulated_blocks():
    facts = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    case = simulate.Case(batch=1, seq=512)
    h200 = devices.load("h200")
    subject = simulate.Subject(facts=facts, make_config=lambda: simulate.make_config(facts))
    traces = simulate.traces_of(subject, case, h200)
    found = simulate.simulate(traces, case, h200, simulate.AllocatorSettings(), simulate.Limits())
    outside = differences(found.live_blocks, blocks_in_snapshot(snapshot(traces[0])))

    assert {each.operator: each.simulated_bytes for each in outside} == {
        "blas workspace": 33554432,
        "token ids": 4096,
    }
    rounded = sum(simulate.AllocatorSettings().round(b.size_bytes) for b in found.live_blocks)
    assert rounded == found.first.activation_bytes + 4096
    assert {"model.layers.0.mlp", "model.layers.1.mlp"} & {b.module for b in found.live_blocks}
