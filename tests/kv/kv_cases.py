"""Reading the planner's test data, and short ways to build cases."""

import json
from pathlib import Path

from kvexp.kv import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    PlanRequest,
    SlidingWindowSpec,
    plan_cache,
    rules_for,
)
from kvexp.plan import answer_case

DATA = Path(__file__).parent / "data"
GIB = 2**30
V026 = rules_for("0.26.0")


def read(name):
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def expand(case):
    """Turn the stored table of layer kinds and their order back into a list of layers."""
    case = dict(case)
    kinds = case.pop("kinds")
    order = [item if isinstance(item, list) else [item, 1] for item in case.pop("order")]
    return {**case, "layers": [{**kinds[kind], "repeat": number} for kind, number in order]}


def by_version(case, version):
    """Answer a JSON case by another version's rules."""
    from kvexp.plan import read_case

    return plan_cache(read_case(case), rules_for(version))


def full(block_size=16, heads=8, head_size=128, **more):
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=more.pop("dtype", "bfloat16"),
        indexes_kv_by_block_stride=more.pop("strided", True),
        **more,
    )


def sliding(window, block_size=16, heads=8, head_size=128, **more):
    return SlidingWindowSpec(
        sliding_window=window,
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=more.pop("dtype", "bfloat16"),
        indexes_kv_by_block_stride=more.pop("strided", True),
        **more,
    )


def mla(block_size=64, head_size=576, **more):
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=head_size,
        dtype=more.pop("dtype", "bfloat16"),
        indexes_kv_by_block_stride=more.pop("strided", True),
        **more,
    )


def mamba(block_size, shapes, dtype="bfloat16", **more):
    return MambaSpec(block_size=block_size, shapes=shapes, dtypes=(dtype,) * len(shapes), **more)


def named(*specs):
    """Number the layers; a pair (spec, n) stands for n equal layers."""
    flat = []
    for item in specs:
        spec, number = item if isinstance(item, tuple) else (item, 1)
        flat += [spec] * number
    return {f"layers.{index}": spec for index, spec in enumerate(flat)}


def pattern(local, other, num_layers, every):
    """Every n-th layer is `other`, the rest are `local`."""
    return named(*(other if (index + 1) % every == 0 else local for index in range(num_layers)))


def plan(layers, available, length, batched=8192, rules=V026, **more):
    amounts = available if isinstance(available, list) else [available]
    workers = more.pop("workers", [layers] * len(amounts))
    return plan_cache(
        PlanRequest(
            workers=workers,
            available_bytes=amounts,
            max_model_len=length,
            max_num_batched_tokens=batched,
            **more,
        ),
        rules,
    )


def answer(**case):
    return answer_case(case)
