"""Rotary embedding and context length, in every spelling of them."""

from typing import Any

from kvexp.errors import InvalidValue
from kvexp.hf.section import Section
from kvexp.request import OLD_ROPE_TYPES, ROPE_TYPES, SCALED_BY_FACTOR

LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Keys of the context length; the smallest counts, as in vLLM."""

UNKNOWN_LENGTH = 2048  # what vLLM assumes


def context_length(section: Section) -> int:
    """Positions that the config states, before any scaling."""
    override = section.integer("model_max_length")
    if override is not None:
        return override
    given = [length for key in LENGTH_KEYS if (length := section.integer(key)) is not None]
    if given:
        return min(given)
    section.assume(
        f"none of model_max_length, {', '.join(LENGTH_KEYS)} is given: {UNKNOWN_LENGTH}, as vLLM"
        " assumes"
    )
    return UNKNOWN_LENGTH


def rope(
    section: Section, *, head_dim: int | None = None, used: bool
) -> tuple[float, dict[str, Any] | None]:
    """Theta and the scaling as one dictionary with `rope_type`; None where nothing scales.

    `used`: whether the model rotates at all, so that an absent theta is worth a note. `head_dim`:
    of which a stated `rotary_dim` is a share.

    Raises:
        InvalidValue: the kind is not known or its factor is missing.
    """
    inner = section.inner("rope_parameters", "rope_scaling")
    theta = section.number("rope_theta", "rotary_emb_base")
    if inner is None:
        return _theta(section, theta, used=used), _partial(section, section, {}, head_dim)
    for layers in ("full_attention", "global"):  # one dictionary for each kind of layer
        own = inner.inner(layers)
        if own is not None:
            inner = own
    stated = inner.number("rope_theta")
    theta = _theta(section, theta if stated is None else stated, used=used)
    kind = inner.text("rope_type", "type")
    if kind is None:
        if inner.has("factor"):
            raise inner.missing("rope_type", "type")
        kind = "default"
    if kind not in ROPE_TYPES:
        raise InvalidValue(
            f"config.json: {inner.name_of('rope_type', 'type')} must be one of"
            f" {', '.join(ROPE_TYPES)}, got {kind!r}"
        )
    if kind in ("default", "mrope", "proportional", "xdrope"):
        return theta, _partial(section, inner, {}, head_dim)
    scaling: dict[str, Any] = {"rope_type": OLD_ROPE_TYPES.get(kind, kind)}
    factor = inner.number("factor")
    if factor is None and kind in SCALED_BY_FACTOR:
        raise inner.missing("factor")
    if factor is not None:
        if factor <= 0:
            raise inner.wrong(("factor",), "above 0", factor)
        scaling["factor"] = factor
    original = inner.integer("original_max_position_embeddings")
    if original is None:
        original = section.integer("original_max_position_embeddings")
    if original is None and kind in ("yarn", "deepseek_yarn"):
        original = context_length(section)
        inner.assume(
            f"{inner.name_of('original_max_position_embeddings')} is not given: {original}, the"
            " context length"
        )
    if original is None and kind == "llama3":
        raise inner.missing("original_max_position_embeddings")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for name in ("low_freq_factor", "high_freq_factor"):
        if kind == "llama3" and not inner.has(name):
            raise inner.missing(name)
        if (value := inner.number(name)) is not None:
            scaling[name] = value
    return theta, _partial(section, inner, scaling, head_dim)


def _theta(section: Section, stated: float | None, *, used: bool) -> float:
    if stated is not None:
        return stated
    if used:
        section.assume(
            "rope_theta is not given (nor rope_parameters or rope_scaling with it): 10000"
        )
    return 10000.0


def _partial(
    section: Section, inner: Section, scaling: dict[str, Any], head_dim: int | None
) -> dict[str, Any] | None:
    """The share of a head that is rotated, where the config states it."""
    names: tuple[str, ...] = (
        "partial_rotary_factor",
        "partial_rotary_factors",
        "rope_pct",
        "rotary_pct",
    )
    share = inner.number(*names)
    if share is None:
        share = section.number(*names)
    rotated = section.integer("rotary_dim")
    if share is None and rotated is not None and head_dim is not None:
        share = rotated / head_dim
        names = ("rotary_dim",)
    if share is not None:
        if not 0 <= share <= 1:
            raise section.wrong(names, "between 0 and 1", share)
        scaling["partial_rotary_factor"] = share
    return scaling or None
