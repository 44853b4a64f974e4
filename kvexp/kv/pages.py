"""Giving all layers one page size (vLLM 0.26 `unify_kv_cache_spec_page_size`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .errors import EngineError
from .merging import distinct
from .rules import PlannerRules
from .specs import AttentionSpec, LayerSpec, MambaSpec, MLAAttentionSpec


def unify_pages(layers: Mapping[str, LayerSpec], rules: PlannerRules) -> Mapping[str, LayerSpec]:
    """Return the layers with every page as large as the largest.

    A smaller page that divides the largest takes more tokens in a block; a Mamba state and,
    where the rules allow it, an attention page is padded.

    Raises:
        EngineError: ``page_not_divisible``, or ``AssertionError`` where the page of a layer
            does not follow its block size.
    """
    specs = distinct(layers.values())
    pages = {spec: spec.page_size_bytes for spec in specs}
    largest = max(pages.values(), default=0)
    if all(page == largest for page in pages.values()):
        return layers
    unified = {spec: _fit(spec, page, largest, rules) for spec, page in pages.items()}
    return {name: unified[spec] for name, spec in layers.items()}


def _fit(spec: LayerSpec, page_bytes: int, largest_bytes: int, rules: PlannerRules) -> LayerSpec:
    if page_bytes == largest_bytes:
        return spec
    if isinstance(spec, MambaSpec) and rules.pads_mamba_pages:
        fitted: LayerSpec = replace(spec, page_size_padded=largest_bytes)
    elif largest_bytes % page_bytes == 0:
        fitted = replace(spec, block_size=spec.block_size * (largest_bytes // page_bytes))
    elif _may_pad(spec, rules):
        fitted = replace(spec, page_size_padded=largest_bytes)
    else:
        raise EngineError(
            "page_not_divisible",
            f"a {spec.kind} page of {page_bytes} bytes neither divides the largest page of "
            f"{largest_bytes} bytes nor can be padded to it",
        )
    if fitted.page_size_bytes != largest_bytes:
        raise EngineError(
            "AssertionError",
            f"a {spec.kind} page stays at {fitted.page_size_bytes} bytes when its block grows "
            f"to fit pages of {largest_bytes} bytes",
        )
    return fitted


def _may_pad(spec: LayerSpec, rules: PlannerRules) -> bool:
    if not isinstance(spec, AttentionSpec):
        return False
    if rules.attention_padding == "stride_flag":
        return spec.indexes_kv_by_block_stride
    return rules.attention_padding == "all_but_mla" and not isinstance(spec, MLAAttentionSpec)
