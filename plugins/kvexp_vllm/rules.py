"""What vLLM's versions do differently outside the cache planner.

One row a column of releases, read from the wheels of 0.5.4, 0.6.3, 0.8.5, 0.11.0, 0.13.0, 0.18.0,
0.21.0, 0.22.0, 0.26.0 and 0.33.0; 0.12 and 0.15 from vLLM's pull requests 28545 (adapters without a
vocabulary of their own), 21229 (adapters of experts) and 32757 (towers left out); what the sampler
and the experts keep was read from start-up logs. A version between two rows takes the nearest older
row.
"""

import re
from dataclasses import dataclass, replace

from kvexp.contract import InvalidValue


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRules:
    """Facts of one column.

    `requested_is_whole`: the request is ceil(total x util) rather than a float.
    `checks_free_memory`: start is refused when less than the request is free.
    `estimates_graphs`: whether a CUDA-graph estimate is subtracted: never, for the V1 model
    runner only, or always.
    `v2_runner`: what runs on the V2 model runner by default: none, dense models, or all.
    `charges_whole_device`: all that is in use on the device is charged, the CUDA context,
    communicators and other processes included.
    `load_split_limit`: loading runs with the allocator's split limit at 20 MiB.
    `sampler_bytes`: of a vocabulary entry and row, beside the logits; `sampler_keeps_rows`: the
    top-k kernel keeps an fp32 row a multiprocessor; `rejection_bytes`: more of them where the
    profile rejects drafts. `keeps_experts_workspace`: the fused experts'
    buffers outlive the forward. `v2_profiles_images`: the V2 runner's profile has images too.
    `log_shape`: how capacity is printed: v0, two_lines or one_line.
    `lora_extra_vocab`: tokens that an adapter may add. `lora_experts`: adapters cover experts.
    `skips_towers`: a tower is not built when all its modalities are limited to none.
    `mm_limit`: items of a modality in a request where no limit is given.
    `very_large_server_tokens`: the API server's tokens of a step on cards from 160 GiB up.
    """

    first: tuple[int, int]
    util: float
    requested_is_whole: bool
    checks_free_memory: bool
    estimates_graphs: str
    v2_runner: str
    seqs_by_memory: bool
    charges_whole_device: bool = False
    load_split_limit: bool = False
    sampler_bytes: int = 36
    sampler_keeps_rows: bool = False
    rejection_bytes: int = 4
    keeps_experts_workspace: bool = False
    v2_profiles_images: bool = False
    log_shape: str = "two_lines"
    very_large_server_tokens: int = 8192
    lora_extra_vocab: int = 256
    lora_experts: bool = False
    skips_towers: bool = False
    mm_limit: int = 1


_V0 = VersionRules(
    first=(0, 5),
    util=0.9,
    requested_is_whole=False,
    checks_free_memory=False,
    estimates_graphs="never",
    v2_runner="none",
    seqs_by_memory=False,
    log_shape="v0",
)
_V1 = replace(
    _V0, first=(0, 8), seqs_by_memory=True, charges_whole_device=True, log_shape="two_lines"
)
_0_9 = replace(_V1, first=(0, 9), charges_whole_device=False, checks_free_memory=True)
_0_11 = replace(_0_9, first=(0, 11), mm_limit=999)
_0_12 = replace(
    _0_11,
    first=(0, 12),
    lora_extra_vocab=0,
    lora_experts=True,
    keeps_experts_workspace=True,
    rejection_bytes=16,
)
_0_15 = replace(_0_12, first=(0, 15), skips_towers=True)
_0_17 = replace(_0_15, first=(0, 17), sampler_bytes=12, sampler_keeps_rows=True)
_0_18 = replace(_0_17, first=(0, 18), requested_is_whole=True)
_0_21 = replace(
    _0_18, first=(0, 21), util=0.92, estimates_graphs="v1_runner", load_split_limit=True
)
_0_26 = replace(_0_21, first=(0, 26), v2_runner="dense")
_0_27 = replace(
    _0_26,
    first=(0, 27),
    estimates_graphs="always",
    v2_runner="all",
    log_shape="one_line",
    very_large_server_tokens=16384,
    v2_profiles_images=True,
)
COLUMNS = (_V0, _V1, _0_9, _0_11, _0_12, _0_15, _0_17, _0_18, _0_21, _0_26, _0_27)
MEASURED = (0, 26)
"""The release whose memory terms were measured."""


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number of a version.

    Raises:
        InvalidValue: it is no version, or older than every column.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:[.\-+a-z]|$)", version)
    release = (int(match[1]), int(match[2])) if match else (-1, -1)
    if release < COLUMNS[0].first:
        raise InvalidValue(
            f"engine.version must be a vLLM version from 0.5 on, such as 0.26.0, got {version!r}"
            " (in YAML write it in quotes: a bare 0.20 is read as 0.2)"
        )
    return release


def version_rules(version: str) -> VersionRules:
    """The column of a version: the newest one that is not younger than it.

    0.8 to 0.10 had two engines: `0.8.5` means V1, `0.8.5-v0` the older one.
    """
    release = release_of(version)
    if version.lower().endswith("-v0"):
        return COLUMNS[0]
    return max((c for c in COLUMNS if c.first <= release), key=lambda c: c.first)
