"""Prefix caching of recurrent states: what a release takes, makes of it, and refuses.

`MambaModelConfig`, `_align_hybrid_block_size` and `MambaSpec` of vLLM's wheels from 0.10 to 0.33.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvexp.contract import (
    Deployment,
    DType,
    InvalidValue,
    Knobs,
    Model,
    Speculation,
    StateCaching,
    cache,
)
from kvexp_vllm.rules import is_v0, patch_release_of

KIND = "mamba"
"""The kind of a group of layers that keep recurrent states."""

Mode = Literal["none", "align", "all"]
NONE: Mode = "none"
ALIGN: Mode = "align"
ALL: Mode = "all"
MODES = (NONE, ALIGN, ALL)

EVERY_BLOCK = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "Zamba2ForCausalLM",
)
"""Architectures whose kernels keep a state at every block (`SupportsMambaPrefixCaching`)."""

DRAFTED_ALIGNED = ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
"""Architectures of Mamba2 whose `get_mamba_state_shape_from_config` counts what is drafted."""

MAMBA1_CHUNK, MAMBA2_CHUNK = 2048, 256
"""Tokens of a chunk where a config states none: of a kernel without (`get_mamba_chunk_size`), and
of most families with one."""

BLACKWELL_HEAD, BLACKWELL_UNIT = 256, 32
GDN_CHECKPOINT_TOKENS = 64
DTYPES = {"auto": None, "float32": DType.fp32, "bfloat16": DType.bf16, "float16": DType.fp16}
"""`MambaDType`; auto is what the model's configuration says, else the compute dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRules:
    """Facts of one column of releases.

    `modes` that it knows beside none. `by_default`: states beside attention are cached where
    nothing is asked. `prefers_all`: mode all is the default of architectures that have it,
    `drafts_align`: but not beside drafts. `align_refuses_drafts`: mode align beside drafts is
    refused; `align_within_step`: its block is at most the tokens of a step. Blocks are multiples of
    `unit` tokens (null: of the block size), of `latent_unit` with latent attention, and on
    Blackwell of 32 with heads of 256 (`widens_blackwell`). A state more for a boundary inside a
    prefill: `mamba2_checkpoint`, `gdn_checkpoint` (FlashInfer's kernel).
    """

    first: tuple[int, int, int]
    modes: tuple[Mode, ...] = ()
    by_default: bool = False
    prefers_all: bool = True
    drafts_align: bool = False
    align_refuses_drafts: bool = False
    align_within_step: bool = True
    unit: int | None = 16
    latent_unit: int | None = 64
    widens_blackwell: bool = False
    mamba2_checkpoint: bool = False
    gdn_checkpoint: bool = False


def _columns() -> tuple[StateRules, ...]:
    never = StateRules(first=(0, 5, 0), latent_unit=16)
    v0_11_1 = StateRules(first=(0, 11, 1), modes=(ALL,), widens_blackwell=True)
    v0_15 = replace(v0_11_1, first=(0, 15, 0), modes=(ALIGN, ALL), align_refuses_drafts=True)
    v0_17 = replace(v0_15, first=(0, 17, 0), align_refuses_drafts=False)
    v0_18 = replace(v0_17, first=(0, 18, 0), widens_blackwell=False)
    v0_20 = replace(v0_18, first=(0, 20, 0), unit=None, latent_unit=None, drafts_align=True)
    v0_22 = replace(v0_20, first=(0, 22, 0), drafts_align=False)
    v0_27 = replace(v0_22, first=(0, 27, 0), latent_unit=128, align_within_step=False)
    v0_28 = replace(v0_27, first=(0, 28, 0), by_default=True, prefers_all=False)
    v0_32 = replace(v0_28, first=(0, 32, 0), modes=(ALIGN,), mamba2_checkpoint=True)
    v0_33 = replace(v0_32, first=(0, 33, 0), gdn_checkpoint=True)
    older = (never, v0_11_1, v0_15, v0_17, v0_18, v0_20)
    return (*older, v0_22, v0_27, v0_28, v0_32, v0_33)


COLUMNS = _columns()
"""Oldest first; 0.21 is taken as 0.20."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The engine's options: prefix caching, the mode and block of states, chunked prefill."""

    version: str
    enabled: bool | None
    mode: str | None
    block_size: int | None
    chunked: bool | None
    conv_dtype: DType | None = None
    state_dtype: DType | None = None


def asked(options: Mapping[str, Any]) -> Asked:
    """What the engine's options ask for.

    Raises:
        InvalidValue: one is not among those that its release knows.
    """
    found = Asked(
        version=options["version"],
        enabled=options["enable_prefix_caching"],
        mode=options["mamba_cache_mode"],
        block_size=options["mamba_block_size"],
        chunked=options["enable_chunked_prefill"],
        conv_dtype=_dtype("mamba_cache_dtype", options),
        state_dtype=_dtype("mamba_ssm_cache_dtype", options),
    )
    known = [NONE, *(mode for mode in MODES if mode in rules_of(found.version).modes)]
    if found.mode is not None and found.mode not in known:
        raise InvalidValue(
            f"engine.mamba_cache_mode must be one of {', '.join(known)} in vLLM {found.version},"
            f" got {found.mode!r}"
        )
    if found.block_size is not None and found.block_size < 1:
        raise InvalidValue(f"engine.mamba_block_size must be at least 1, got {found.block_size}")
    return found


def _dtype(name: str, options: Mapping[str, Any]) -> DType | None:
    asked = "auto" if options[name] is None else options[name]
    if asked not in DTYPES:
        raise InvalidValue(f"engine.{name} must be one of {', '.join(DTYPES)}, got {asked!r}")
    return DTYPES[asked]


def rules_of(version: str) -> StateRules:
    """The newest column that is not younger than a version."""
    release = (0, 5, 0) if is_v0(version) else patch_release_of(version)
    return max((c for c in COLUMNS if c.first <= release), key=lambda c: c.first)


def caching(
    knobs: Knobs, options: Asked, drafts: Speculation | None, block_size: int, max_model_len: int
) -> StateCaching:
    """How states are kept; `block_size` are the tokens of a block before they enlarge it.

    Raises:
        InvalidValue: an option needs prefix caching, or the mode does not go with another.
    """
    model, rules = knobs.model, rules_of(options.version)
    enabled = _is_enabled(model, rules, options)
    if options.block_size not in (None, max_model_len) and not enabled:
        raise InvalidValue(
            "engine.mamba_block_size needs engine.enable_prefix_caching=true,"
            f" got {options.block_size}"
        )
    if not model.is_hybrid:
        return StateCaching()
    unit = _unit(knobs, rules, block_size)
    mode = _mode(model, rules, options, drafts) if enabled else NONE
    checkpoints = _num_checkpoints(knobs, rules) if mode == ALIGN else 0
    if mode == ALIGN:
        _check_align(options, drafts)
    if checkpoints and model.linear is not None:
        unit = math.lcm(unit, GDN_CHECKPOINT_TOKENS)
    return StateCaching(
        mode=mode,
        unit=unit,
        chunk_size=_chunk_size(model, options.block_size) if mode != NONE else None,
        num_checkpoints=checkpoints,
        aligns_drafts=model.mamba is None or model.architecture in DRAFTED_ALIGNED,
        conv_dtype=options.conv_dtype,
        state_dtype=options.state_dtype,
    )


def check(deployment: Deployment) -> None:
    """A block holds a state, and up to vLLM 0.26 one of mode align is filled in one step.

    Raises:
        InvalidValue: it does not, or a step has fewer tokens.
    """
    model, rules = deployment.model, rules_of(deployment.engine_version)
    size, tokens = cache.attention_block_size(deployment), deployment.max_num_batched_tokens
    if not cache.holds_states(deployment):
        raise InvalidValue(
            f"block_size must be larger for {model.name} with speculative: vLLM makes its blocks of"
            f" {size} tokens without what is drafted, got {deployment.block_size}"
        )
    if deployment.states.mode == ALIGN and rules.align_within_step and size > tokens:
        raise InvalidValue(
            f"max_num_batched_tokens must be at least the block of {size} tokens with"
            f" mamba_cache_mode=align, got {tokens}"
        )


def notes(deployment: Deployment, options: Asked) -> list[str]:
    """What prefix caching means for the states of a deployment, and options without effect."""
    found = deployment.states
    if not deployment.model.is_hybrid:
        return []
    if found.mode == NONE and options.enabled:
        return [f"vLLM {options.version} caches no prefixes of {deployment.model.name}: one state"]
    if found.mode == NONE:
        unheeded = options.mode not in (None, NONE)
        return ["mamba_cache_mode is none without prefix caching"] if unheeded else []
    size = cache.state_block_size(deployment)
    if found.mode == ALL:
        return [f"prefix caching: mamba_cache_mode=all keeps a state for every {size} tokens"]
    states = 2 + found.num_checkpoints
    drafted = " and one for each drafted token" if deployment.speculation is not None else ""
    return [
        f"prefix caching: mamba_cache_mode=align keeps {states} states a request{drafted},"
        f" blocks of {size} tokens"
    ]


def _check_align(options: Asked, drafts: Speculation | None) -> None:
    if drafts is not None and rules_of(options.version).align_refuses_drafts:
        raise InvalidValue(
            "speculative needs engine.enable_prefix_caching=false before vLLM 0.17, whose"
            f" mamba_cache_mode=align takes no drafts, got engine.version={options.version}"
        )
    if options.chunked is False:
        raise InvalidValue(
            "engine.enable_chunked_prefill must be true with mamba_cache_mode=align, got false"
        )


def _is_enabled(model: Model, rules: StateRules, options: Asked) -> bool:
    if options.enabled is not None:
        return options.enabled
    return not model.is_hybrid or (rules.by_default and not model.is_attention_free)


def _mode(model: Model, rules: StateRules, options: Asked, drafts: Speculation | None) -> Mode:
    """The mode with prefix caching; none where a release leaves the model's states out of it."""
    has_all = ALL in rules.modes and model.architecture in EVERY_BLOCK
    if ALIGN not in rules.modes:
        return ALL if has_all else NONE
    if options.mode in (ALIGN, ALL):
        return ALL if has_all and options.mode == ALL else ALIGN
    beside_drafts = rules.drafts_align and drafts is not None
    return ALL if has_all and rules.prefers_all and not beside_drafts else ALIGN


def _unit(knobs: Knobs, rules: StateRules, block_size: int) -> int:
    """Tokens that an enlarged block is a multiple of."""
    model, capability = knobs.model, knobs.gpu.compute_capability or ""
    if model.mla is not None:
        least = rules.latent_unit or block_size
        return least if rules.unit is not None else max(least, block_size)
    if (
        rules.widens_blackwell
        and capability.startswith("10.")
        and model.head_size == BLACKWELL_HEAD
    ):
        return BLACKWELL_UNIT
    return rules.unit or block_size


def _chunk_size(model: Model, asked_size: int | None) -> int | None:
    """What is asked for, or the kernel's chunk; a model without attention has its block's size."""
    if asked_size is not None or model.is_attention_free or model.mamba is None:
        return asked_size
    whole = MAMBA1_CHUNK if model.mamba.mamba_dt_rank is not None else MAMBA2_CHUNK
    return model.mamba.mamba_chunk_size or whole


def _num_checkpoints(knobs: Knobs, rules: StateRules) -> int:
    """States for boundaries inside a prefill, which some kernels export."""
    mamba, linear = knobs.model.mamba, knobs.model.linear
    if mamba is not None:
        return int(rules.mamba2_checkpoint and mamba.mamba_dt_rank is None)
    if linear is None or linear.kind != "gated_delta_net" or not rules.gdn_checkpoint:
        return 0
    major = (knobs.gpu.compute_capability or "").partition(".")[0]
    return int(major == "9" or (major in ("10", "12") and linear.linear_key_head_dim == 128))
