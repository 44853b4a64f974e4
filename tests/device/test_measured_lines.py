"""What a person reads of a measured point."""

from kvexp import measured

ACCOUNTS = {
    "closes": True,
    "stage": "verify",
    "residual_bytes": 2097152,
    "tolerance_bytes": 33554432,
    "driver_used_bytes": 138 << 30,
}


def test_the_accounts_are_one_line_a_rank():
    (line,) = measured.lines({"accounting": ACCOUNTS})
    assert line == (
        "accounts         closed at verify: 2,097,152 B of the driver's 138.00 GiB unexplained"
        " (tolerance 33,554,432 B)"
    )
    ranks = [{"accounting": ACCOUNTS}, {"accounting": {**ACCOUNTS, "closes": False}}]
    first, second = measured.lines({"ranks": ranks})
    assert first.endswith("rank 0")
    assert "NOT closed" in second and second.endswith("rank 1")


def test_a_point_that_was_not_measured_has_none():
    assert list(measured.lines({})) == []
    assert list(measured.lines({"accounting": None})) == []


def test_graphs_and_the_largest_places_of_the_peak_are_shown():
    place = {"module": "model.layers.3.mlp", "line": "modeling_llama.py:140 forward", "blocks": 2,
             "size_bytes": 3 << 30, "stays": False}  # fmt: skip
    workspace = {**place, "module": "model.rotary_emb", "stays": True, "size_bytes": 32 << 20}
    at_peak = {"growth_bytes": 4 << 30, "places": [place, workspace, *[place] * 9]}
    lines = list(measured.lines({"graphs_bytes": 1 << 30, "at_peak": at_peak}))
    assert lines[0] == "graphs           1.00 GiB beyond the cache"
    assert lines[1] == "at the peak      4.00 GiB over the weights, of which"
    assert lines[2] == (
        "  3.00 GiB in model.layers.3.mlp (modeling_llama.py:140 forward, 2 blocks)"
    )
    assert lines[3].endswith("2 blocks, stays)")
    assert len(lines) == 2 + measured.SHOWN
