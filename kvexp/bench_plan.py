"""``python -m kvexp.bench_plan``: how many cases a second the planner answers.

Each layout is timed through the JSON interface, from a line of text to a line of text. Growth is
shown as ratios of times taken side by side in one run, so a slow machine does not change them.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvexp.plan import answer_line, run

Layer = dict[str, Any]

_GIB = 2**30
_SECONDS_EACH = 0.3
_ROUNDS = 5
_GROWTH_CASES = 50


def _full(heads: int = 8, head_size: int = 128, **more: Any) -> Layer:
    return {"type": "full", "num_kv_heads": heads, "head_size": head_size, **more}


def _sliding(window: int, heads: int = 8, head_size: int = 128) -> Layer:
    return {**_full(heads, head_size), "type": "sliding", "sliding_window": window}


def _pattern(local: Layer, other: Layer, num_layers: int, every: int) -> list[Layer]:
    """Name each layer, as an engine lists them; every n-th is `other`."""
    return [
        {**(other if (index + 1) % every == 0 else local), "name": f"layers.{index}"}
        for index in range(num_layers)
    ]


def _case(layers: list[Layer], length: int = 131_072, **more: Any) -> str:
    case = {"layers": layers, "max_model_len": length, "available_bytes": 60 * _GIB, **more}
    return json.dumps(case)


def _v4_layers() -> list[Layer]:
    v4 = {"kv_cache_dtype": "fp8_ds_mla", "model_version": "deepseek_v4"}
    base = {"num_kv_heads": 1, "alignment": 576}
    window = {"type": "sliding_mla", "sliding_window": 128, "head_size": 512, "block_size": 64}
    c4 = [
        {**base, **window, **v4},
        {**base, **v4, "type": "mla", "head_size": 512, "block_size": 256, "compress_ratio": 4},
        {
            **base,
            "type": "sliding_mla",
            "sliding_window": 8,
            "head_size": 2048,
            "block_size": 4,
            "dtype": "float32",
        },
    ]
    return c4 * 21


def layouts() -> dict[str, str]:
    """Return a case as text for each layout, named for people."""
    state = {
        "type": "mamba",
        "shapes": [[3, 4096], [16, 128, 128]],
        "dtypes": ["bfloat16", "bfloat16"],
        "page_size_padded": 557_056,
    }
    v32 = [
        {"type": "mla", "num_kv_heads": 1, "head_size": 576, "kv_cache_dtype": "fp8_ds_mla"},
        {"type": "mla", "num_kv_heads": 1, "head_size": 132, "storage_dtype": "uint8"},
    ]
    wide = [{**_full(), "name": f"layers.{index}"} for index in range(126)]
    return {
        "full, 32 layers in one entry": _case([{**_full(), "repeat": 32}]),
        "sliding, 32 layers in one entry": _case([{**_sliding(4096), "repeat": 32}]),
        "MLA, 61 layers in one entry": _case(
            [{"type": "mla", "num_kv_heads": 1, "head_size": 576, "repeat": 61}], block_size=64
        ),
        "full, too long (length estimated)": _case(
            [{**_full(), "repeat": 32}], available_bytes=6 * _GIB
        ),
        "gpt-oss-20b, 24 named layers": _case(
            _pattern(_sliding(128, 8, 64), _full(8, 64), 24, every=2)
        ),
        "gemma-3-27b, 62 named layers": _case(_pattern(_sliding(1024, 16), _full(16), 62, every=6)),
        "gemma-3-27b, hybrid manager off": _case(
            _pattern(_sliding(1024, 16), _full(16), 62, every=6), 8192, hybrid=False
        ),
        "DeepSeek-V3.2, 122 layers": _case(v32 * 61, block_size=64),
        "DeepSeek-V4-like, 63 layers": _case(_v4_layers(), block_size=256),
        "Qwen3-Next, 48 layers": _case(_pattern(state, _full(1, 256, block_size=544), 48, every=4)),
        "126 named layers x 4 workers": _case(wide, available_bytes=[60 * _GIB] * 4),
        "126 named layers over 4 stages": _case(
            wide,
            available_bytes=[60 * _GIB] * 4,
            workers=[[[0, 31]], [[31, 63]], [[63, 95]], [[95, 126]]],
            pp=4,
        ),
    }


def seconds_per_case(line: str) -> float:
    """Return the best time of one case over a few rounds, from text to text."""
    number = 1
    while _timed(line, number) < _SECONDS_EACH / _ROUNDS:
        number *= 2
    return min(_timed(line, number) for _ in range(_ROUNDS)) / number


def growth(lines: Sequence[str]) -> list[float]:
    """Return each case's time as a multiple of the first one's, measured in turns."""
    best = [float("inf")] * len(lines)
    for _ in range(_ROUNDS):
        for index, line in enumerate(lines):
            best[index] = min(best[index], _timed(line, _GROWTH_CASES))
    return [taken / best[0] for taken in best]


def main() -> int:
    """Print the rates and the growth; returns the exit status."""
    print(f"{'layout':36}{'cases/s':>10}{'blocks':>10}")
    for name, line in layouts().items():
        answer = answer_line(line)
        blocks = answer.get("num_blocks", "refused")
        print(f"{name:36}{1 / seconds_per_case(line):>10,.0f}{blocks!s:>10}")
    sizes = (32, 64, 128, 256)
    by_layers = growth([_case(_pattern(_sliding(1024), _full(), size, every=4)) for size in sizes])
    _print_growth("named layers", sizes, by_layers)
    counts = (1, 2, 4, 8)
    by_workers = growth(
        [
            _case(_pattern(_sliding(1024), _full(), 64, 4), available_bytes=[60 * _GIB] * count)
            for count in counts
        ]
    )
    _print_growth("workers", counts, by_workers)
    return 0


def _print_growth(what: str, sizes: Sequence[int], ratios: Sequence[float]) -> None:
    steps = ", ".join(f"{size}: {ratio:.2f}x" for size, ratio in zip(sizes, ratios, strict=True))
    print(f"time by {what}: {steps}")


def _timed(line: str, number: int) -> float:
    lines = [line.encode()] * number
    start = time.perf_counter()
    run(lines, io.StringIO())
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
