"""By which rules a vLLM version plans: one row of facts per column of versions.

Each column was read from the release it is named after; a version between two columns takes the
older one and says so in `PlannerRules.note`. Nothing else in the planner looks at a version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from .specs import MambaDemand

TokenRule = Literal["blocks", "blocks_per_group", "concurrency"]

_TOKEN_TEXT: dict[TokenRule, str] = {
    "blocks": "tokens = blocks x block size: every layer is planned as if it kept every token",
    "blocks_per_group": (
        "tokens = blocks // groups x block size: each group is given an equal share of the "
        "blocks, whether or not its window can ever fill it"
    ),
    "concurrency": (
        "tokens = concurrency x longest request: a window's group is charged only the blocks "
        "that its window and the tokens in flight can hold"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerRules:
    """The facts by which one column of vLLM versions plans its KV cache.

    Attributes:
        version: The version that was asked for.
        column: The release whose rules these are.
        note: Why these rules answer for the version; empty where they were read from it.
        engine: The V0 or the V1 engine.
        hybrid_groups: Whether layers of different kinds may form groups of their own.
        groups_per_worker: Whether each worker groups its own layers.
        bucket_factor: Groups take the size of the largest bucket of equal layers if that is
            less than this many times the smallest; None always takes the smallest.
        buckets_by_merge: Whether layers that can merge share a bucket without being equal.
        uniform_type: Whether layers with different pages may form one uniform-type group.
        equal_mamba_pages: Whether such a group of Mamba layers needs equal pages.
        shrinks_uniform_type: Whether such a group shrinks to a pipeline stage's layers.
        unifies_pages: Whether smaller pages are made as large as the largest.
        pads_mamba_pages: Whether a smaller Mamba page is padded.
        attention_padding: Which attention pages may be padded.
        promotes_in_place: Whether a layer kept as full keeps its scales and padding flag and
            takes the full layers' block size.
        promotes_on_mismatch: Whether sliding layers beside MLA are kept as full where pages
            cannot be made equal.
        hidden_apart: Whether hidden-state layers get groups of their own.
        packing: How layers of several page sizes (DeepSeek-V4) are grouped.
        packs_equal_pages: Whether they are packed even if their pages are equal.
        pads_packed_pages: Whether their pages are padded to those of the MLA group.
        packed_block: How the bytes of such a block are counted.
        need: How the bytes of one request of the longest length are counted.
        checks_whole_model: Whether the check sets the whole model against the least memory of a
            worker.
        reserves_null_block: Whether the check leaves one block for the placeholder.
        override_caps_memory: Whether ``num_gpu_blocks_override`` replaces the available memory.
        auto_fit: Whether the longest length can be fitted to the memory.
        window_tokens: Tokens that a window may hold beside its own.
        mamba_demand: States that one request holds in a Mamba layer.
        length_divisor: Ranks that a full request's tokens are divided over.
        token_rule: How the logged tokens are computed.
        concurrency: What the concurrency divides.
        latent_alignment: Bytes that each token's latent vector is rounded up to (V0 alone).
    """

    version: str
    column: str
    note: str = ""
    engine: Literal["v0", "v1"] = "v1"
    hybrid_groups: bool = True
    groups_per_worker: bool = False
    bucket_factor: float | None = 1.5
    buckets_by_merge: bool = False
    uniform_type: bool = True
    equal_mamba_pages: bool = False
    shrinks_uniform_type: bool = True
    unifies_pages: bool = True
    pads_mamba_pages: bool = True
    attention_padding: Literal["none", "stride_flag", "all_but_mla"] = "stride_flag"
    promotes_in_place: bool = False
    promotes_on_mismatch: bool = False
    hidden_apart: bool = True
    packing: Literal["none", "layer_tuples", "greedy"] = "layer_tuples"
    packs_equal_pages: bool = False
    pads_packed_pages: bool = True
    packed_block: Literal["tuples", "slots", "largest_group"] = "slots"
    need: Literal["layers", "first_group", "groups", "blocks"] = "groups"
    checks_whole_model: bool = False
    reserves_null_block: bool = False
    override_caps_memory: bool = True
    auto_fit: bool = True
    window_tokens: Literal["batched", "in_flight"] = "in_flight"
    mamba_demand: MambaDemand = "by_mode"
    length_divisor: Literal["none", "dcp", "dcp_pcp"] = "dcp"
    token_rule: TokenRule = "concurrency"
    concurrency: Literal["tokens", "first_page", "group_blocks"] = "first_page"
    latent_alignment: int = 1

    @property
    def token_text(self) -> str:
        """How the logged tokens come about, in words."""
        return _TOKEN_TEXT[self.token_rule]


def _columns() -> tuple[PlannerRules, ...]:
    v026 = PlannerRules(version="0.26.0", column="0.26.0")
    v022 = replace(
        v026,
        column="0.22.0",
        attention_padding="none",
        pads_mamba_pages=False,
        packs_equal_pages=True,
        packed_block="tuples",
        window_tokens="batched",
        length_divisor="dcp_pcp",
    )
    v021 = replace(v022, column="0.21.0", hidden_apart=False, mamba_demand="by_mode_plain_all")
    v0201 = replace(v021, column="0.20.1", override_caps_memory=False)
    v020 = replace(v0201, column="0.20.0", token_rule="blocks_per_group")
    v019 = replace(v020, column="0.19.0", packing="none")
    v018 = replace(v019, column="0.18.0", need="first_group")
    v017 = replace(v018, column="0.17.0", bucket_factor=1.25)
    v015 = replace(v017, column="0.15.0", shrinks_uniform_type=False, checks_whole_model=True)
    v014 = replace(v015, column="0.14.0", mamba_demand="by_length")
    v013 = replace(v014, column="0.13.0", need="layers", auto_fit=False, checks_whole_model=False)
    v012 = replace(v013, column="0.12.0")
    v011 = replace(
        v012,
        column="0.11.0",
        bucket_factor=None,
        unifies_pages=False,
        mamba_demand="one_state",
        length_divisor="dcp",
    )
    v010 = replace(v011, column="0.10.2", groups_per_worker=True, uniform_type=False)
    v09 = replace(v010, column="0.9.2", length_divisor="none")
    v08 = replace(
        v09, column="0.8.5", hybrid_groups=False, token_rule="blocks", concurrency="tokens"
    )
    v0 = replace(v08, column="0.6.3", engine="v0")
    v028 = replace(
        v026,
        column="0.28.0",
        buckets_by_merge=True,
        promotes_in_place=True,
        pads_packed_pages=False,
        packed_block="largest_group",
        concurrency="group_blocks",
    )
    v030 = replace(
        v028,
        column="0.30.0",
        equal_mamba_pages=True,
        attention_padding="all_but_mla",
        promotes_on_mismatch=True,
        packing="greedy",
        need="blocks",
        reserves_null_block=True,
    )
    v032 = replace(v030, column="0.32.0", mamba_demand="by_mode_without_all")
    v033 = replace(v032, column="0.33.0")
    older = (v0, v08, v09, v010, v011, v012, v013, v014, v015, v017, v018, v019)
    return (*older, v020, v0201, v021, v022, v026, v028, v030, v032, v033)


COLUMNS = _columns()
"""All columns, oldest first."""

_VERSION = re.compile(
    r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4})(?:\.\d{1,4})?)?([-.+]?[A-Za-z][A-Za-z0-9.+_-]*)?",
    re.ASCII,
)
"""A fourth number is of a release's own mend, as 0.10.1.1."""

_ALIGNED_V0, _LATENT_ALIGNMENT = ((0, 7, 2), (0, 8, 0)), 256
"""0.7.2 and 0.7.3 `worker/cache_engine.py: _align_cache`, for CUDA by default."""

_FIRST_V0 = (0, 5)
_FIRST_V1 = (0, 8)
_FIRST_WITHOUT_V0 = (0, 11)


def _numbers(column: PlannerRules) -> tuple[int, ...]:
    return tuple(int(part) for part in column.column.split("."))


def _first(column: PlannerRules) -> tuple[int, ...]:
    """The first release that a column plans: 0.8.0 of 0.8.5, unless 0.8 has an older column."""
    numbers = _numbers(column)
    of_release = next(c for c in COLUMNS[1:] if _numbers(c)[:2] == numbers[:2])
    return numbers if column is not of_release else (*numbers[:2], 0)


@cache
def rules_for(version: str) -> PlannerRules:
    """Return the rules that a vLLM version plans by.

    0.8 to 0.10 had both engines: ``0.8.5`` means V1, their default, and so does ``0.8.5-v1``;
    ``0.8.5-v0`` means V0. A version up to 0.7 means V0, one from 0.11 on V1.

    Args:
        version: E.g. ``0.26.0``, ``v0.11``, ``0.8.5-v0``, ``0.10.1.1``, ``0.19.0rc1``.

    Raises:
        ValueError: If the text is no version, the version is older than 0.5, or it has not the
            engine that the suffix asks for.
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise ValueError(f"{version!r} is not a vLLM version such as 0.26.0 or 0.8.5-v0")
    asked = (int(match[1]), int(match[2]), int(match[3] or 0))
    suffix = (match[4] or "").lower()
    if asked[:2] < _FIRST_V0:
        raise ValueError(f"vLLM {version.strip()} is older than 0.5, the first version planned")
    wants_v0 = asked[:2] < _FIRST_V1 if suffix not in ("-v0", "-v1") else suffix == "-v0"
    if asked[:2] >= _FIRST_WITHOUT_V0 if wants_v0 else asked[:2] < _FIRST_V1:
        raise ValueError(f"vLLM {version.strip()}: that release has no such engine")
    if wants_v0:
        column = COLUMNS[0]
        first, after = _ALIGNED_V0
        if first <= asked < after:
            column = replace(column, latent_alignment=_LATENT_ALIGNMENT)
    else:
        column = next((c for c in reversed(COLUMNS[1:]) if _first(c) <= asked), COLUMNS[1])
    name = version.strip().removeprefix("v").removesuffix("-v0").removesuffix("-v1")
    return replace(column, version=version.strip(), note=_note(name, asked, column))


def _note(name: str, asked: tuple[int, ...], column: PlannerRules) -> str:
    released = name.replace(".", "").isdigit()
    if name == column.column or (released and asked == _numbers(column)):
        return ""
    if column.engine == "v0":
        return f"{name} plans with the V0 engine's rules"
    if asked > _numbers(COLUMNS[-1]):
        return f"{name} is newer than {column.column}, the newest version whose rules are known"
    if asked[:2] == _numbers(column)[:2]:
        return f"{name} is planned like {column.column}"
    return f"no rules were read from {name}; it is planned like {column.column}, the next older"
