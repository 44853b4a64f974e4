"""What people see: figures that are whole, a budget that adds up, pictures that can be drawn."""

import csv
import io
from dataclasses import replace
from itertools import pairwise

import pytest

from kvexp import report
from kvexp.results import Budget, Part, Profile, Provenance, Refusal, Result, Stage, Status

GIB = 1 << 30
BLOCK = 2 << 20


def part(name, size_bytes, reason="a rule"):
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.given, reason=reason)


def result(requested_bytes=79_027_398_246, **changes):
    """Llama-3-8B on a card of 80 GiB at 0.92: 15 GiB of weights, 2 GiB of activation."""
    terms = {"non_torch": 0, "weights": 15 * GIB, "activation": 2 * GIB, "cudagraph": 0}
    profile = Profile(**{name: part(name, size) for name, size in terms.items()})
    available = requested_bytes - 17 * GIB
    blocks = max(0, available // BLOCK)
    rest = available - blocks * BLOCK
    last = part("unused" if rest >= 0 else "shortfall", rest)
    budget = Budget(
        base="total",
        total_bytes=80 * GIB,
        free_bytes=80 * GIB,
        requested_bytes=requested_bytes,
        available_bytes=available,
        parts=(*profile.parts, part("kv_cache", blocks * BLOCK, f"{blocks:,} blocks"), last),
    )
    values = {
        "status": Status.ok,
        "stage": Stage.done,
        "reason": "",
        "num_blocks": blocks,
        "block_size": 16,
        "block_bytes": BLOCK,
        "kv_tokens": blocks * 16,
        "max_concurrency": blocks * 16 / 8192,
        "budget": budget,
        "profile": profile,
        "log_lines": ("GPU KV cache size: 463,664 tokens",),
        "notes": ("the total is exact",),
        "effective": {"max_model_len": 8192},
        **changes,
    }
    return Result(**values)


REFUSED = result(
    17 * GIB - 1024,
    status=Status.infeasible,
    stage=Stage.budget,
    reason="No available memory for the cache blocks.",
    refusal=Refusal(
        kind="no_memory",
        message="No available memory for the cache blocks.",
        rank=0,
        needed_bytes=GIB,
        available_bytes=-1024,
        estimated_max_model_len=3664,
    ),
    log_lines=(),
)
INVALID = Result(status=Status.invalid, stage=Stage.resolve, reason="util must be at most 1")
BOUNDS = {"num_blocks_low": 28_970, "num_blocks_high": 28_991}


def printed(rows):
    stream = io.StringIO()
    report.print_table(rows, stream)
    return stream.getvalue()


def explained(point):
    stream = io.StringIO()
    report.print_point(point, stream)
    return stream.getvalue()


def test_the_table_to_the_letter():
    text = printed([("util=0.92", result(**BOUNDS)), ("util=0.2", REFUSED), ("util=92", INVALID)])
    assert [line.rstrip() for line in text.splitlines()] == [
        "1 of 3 points ok; sizes in GiB, of the tightest rank",
        "                                 block      KV concur-                 non-           KV",
        "point     status          blocks  size  tokens   rency weights activ. torch graphs cache",
        "--------- ---------- ----------- ----- ------- ------- ------- ------ ----- ------ -----",
        "util=0.92 ok         28,979 +-12    16 463,664  56.60x   15.00   2.00  0.00   0.00 56.60",
        "util=0.2  infeasible           0    16       0   0.00x   15.00   2.00  0.00   0.00  0.00",
        "util=92   invalid              -     -       -       -       -      -     -      -     -",
        "util=0.2: infeasible at budget: No available memory for the cache blocks.",
        "util=92: invalid at resolve: util must be at most 1",
        "util=0.92; util=0.2: the total is exact",
    ]


def test_no_figure_is_ever_cut():
    huge = result(
        num_blocks=123_456_789_012, kv_tokens=1_234_567_890_123, max_concurrency=987_654_321.5
    )
    text = printed([("a very long name of a point, with=values,and=more " * 3, huge)])
    for figure in ("123,456,789,012", "1,234,567,890,123", "987654321.50x", "56.60"):
        assert figure in text
    assert "…" not in text
    assert text.isascii()


def test_names_are_text_not_markup():
    name = "model=[bold]x[/bold],y=:smile:"
    assert name in printed([(name, INVALID)]).replace("\n", "")


def test_an_empty_table():
    assert printed([]).startswith("0 of 0 points ok")


def test_a_point_explained():
    text = explained(result(**BOUNDS))
    for line in (
        "blocks           28,979 +-12",
        "block size       16 tokens of 2,097,152 bytes",
        "KV cache size    463,664 tokens",
        "max concurrency  56.60x at 8,192 tokens a request",
        "  weights          15.00 GiB    16,106,127,360 B  given: a rule",
        "  kv_cache         56.60 GiB    60,773,367,808 B  given: 28,979 blocks",
        "  = requested      73.60 GiB    79,027,398,246 B",
        "the total is exact",
    ):
        assert line in text.splitlines()
    assert text.endswith("the engine prints:\nGPU KV cache size: 463,664 tokens\n")


def test_the_parts_that_are_shown_add_up():
    lines = [line for line in explained(REFUSED).splitlines() if line.startswith("  ")]
    sizes = [int(line.split(" B")[0].split()[-1].replace(",", "")) for line in lines[:7]]
    assert sum(sizes[:-1]) == sizes[-1] == REFUSED.budget.requested_bytes


def test_a_refusal_explained():
    text = explained(REFUSED)
    assert "infeasible at budget: No available memory" in text
    assert "shortfall" in text
    assert "  gap               1.00 GiB     1,073,742,848 B" in text
    assert "longest request that fits, estimated: 3,664 tokens" in text


def test_a_reason_is_said_once():
    text = explained(replace(REFUSED, reason=REFUSED.refusal.message))
    assert text.count(REFUSED.refusal.message) == 1
    assert "refused (" in text


def test_an_interval_is_shown_where_its_ends_read_differently():
    def explained_with(below):
        parts = [
            replace(part, low_bytes=part.size_bytes - below, high_bytes=part.size_bytes)
            if part.name == "weights"
            else part
            for part in result().budget.parts
        ]
        return explained(result(budget=replace(result().budget, parts=tuple(parts))))

    assert " to 15.00 GiB]" not in explained_with(below=1000)
    assert "[14.00 to 15.00 GiB]" in explained_with(below=GIB)


def test_a_picture_counts_in_tokens_where_blocks_have_several_sizes(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    written = []
    monkeypatch.setattr(Axes, "annotate", lambda _, text, *more, **options: written.append(text))
    pages = result(num_blocks=10, block_size=16, kv_tokens=160)
    single = result(num_blocks=170, block_size=1, kv_tokens=170)
    report.memory_picture([("a", pages), ("b", single)], tmp_path / "a.png")
    report.memory_picture([("a", pages), ("b", pages)], tmp_path / "b.png")

    assert written == ["160", "170", "10", "10"]


@pytest.mark.parametrize("count", [2, 5, 8, 9])
def test_the_counts_of_a_picture_do_not_touch(tmp_path, monkeypatch, count):
    from matplotlib.axes import Axes

    written, annotate = [], Axes.annotate

    def kept(*words, **options):
        written.append(annotate(*words, **options))
        return written[-1]

    monkeypatch.setattr(Axes, "annotate", kept)
    right = result()
    mistaken = replace(right, profile=replace(right.profile, missing_activation_bytes=3 * GIB))
    rows = [(f"profiler.warmup=short_prompt_{index}", mistaken) for index in range(count)]
    report.memory_picture(rows, tmp_path / "memory.png")

    counts = [each.get_window_extent() for each in written if "GiB" not in each.get_text()]
    assert len(counts) == count
    assert all(left.x1 + 2 < right.x0 for left, right in pairwise(counts))


def test_a_point_that_never_had_figures():
    assert explained(INVALID) == "invalid at resolve: util must be at most 1\n"


def test_long_lines_are_not_broken():
    line = "x" * 300 + " " + "y" * 300
    assert line in explained(result(log_lines=(line,)))


def test_csv():
    rows = [("util=0.92", result()), ("a,b", INVALID)]
    first, second = csv.DictReader(io.StringIO(report.csv_text(rows)))
    assert tuple(first) == report.CSV_COLUMNS
    assert first["num_blocks"] == "28979"
    assert first["weights_bytes"] == str(15 * GIB)
    assert first["kv_cache_bytes"] == "60773367808"
    assert (second["point"], second["status"], second["num_blocks"]) == ("a,b", "invalid", "")
    assert report.csv_rows(rows)[1]["kv_tokens"] is None


@pytest.mark.parametrize(
    "rows",
    [
        [("one", result())],
        [("ok", result()), ("refused", REFUSED), ("invalid", INVALID)],
        [("invalid", INVALID)],
        [],
        [(f"util=0.{index},block_size=16", result((18 + index // 2) * GIB)) for index in range(70)],
    ],
)
def test_a_picture_is_drawn(tmp_path, rows):
    path = report.memory_picture(rows, tmp_path / "memory.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in tmp_path.iterdir()] == ["memory.png"]


def test_what_a_wrong_warm_up_lacks_stands_above_the_request():
    right = result()
    wrong, wasted = (
        replace(right, profile=replace(right.profile, missing_activation_bytes=size))
        for size in (3 * GIB, -3 * GIB)
    )
    stack = report._stack([("right", right), ("wrong", wrong), ("wasted", wasted)])

    assert stack["shortfall"] == [(1, right.budget.requested_bytes / GIB, 3.0)]
    assert [report._flag(each) for each in (right, wrong, wasted)] == [
        "",
        "3.00 GiB missing",
        "3.00 GiB reserved too much",
    ]


def test_the_stack_of_a_column():
    stack = report._stack([("ok", result()), ("refused", REFUSED)])
    assert list(stack) == ["weights", "activation", "kv_cache", "unused", "shortfall"]
    assert stack["weights"] == [(0, 0.0, 15.0), (1, 0.0, 15.0)]
    assert stack["activation"] == [(0, 15.0, 2.0), (1, 15.0, 2.0)]
    (place, bottom, height), *more = stack["shortfall"]
    assert more == []
    assert place == 1
    assert bottom + height == 17.0
