"""Layers with a state of fixed size: Mamba and linear attention, by each family's key names."""

from kvexp.dtypes import DType
from kvexp.hf.dtype import dtype_named
from kvexp.hf.section import Section
from kvexp.request import LinearAttention, Mamba

_MAMBA1 = ("jamba", "mamba", "falcon_mamba")
_WITHOUT_MLP = ("mamba", "falcon_mamba")
"""Types whose `intermediate_size` is the state's, whatever `expand` says (Falcon-Mamba: 16)."""


def mamba(section: Section, model_type: str, hidden: int) -> Mamba:
    """The Mamba layers of a config.

    Raises:
        InvalidValue: a size is missing or does not divide.
    """
    conv = section.assumed(
        "mamba_d_conv", "conv_kernel", "d_conv", default=4, why="every family's default"
    )
    bias = section.flag("mamba_conv_bias", "use_conv_bias")
    state = section.required("mamba_d_state", "ssm_state_size", "state_size")
    inner = _inner(section, model_type, hidden)
    if model_type in _MAMBA1:
        return Mamba(
            mamba_n_heads=inner,
            mamba_d_head=1,
            mamba_d_state=state,
            mamba_d_conv=conv,
            mamba_conv_bias=bias is not False,
            mamba_dt_rank=_dt_rank(section, hidden),
        )
    heads = section.required("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    names: tuple[str, ...] = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if model_type == "mamba2":
        names = ("head_dim", *names)  # there is no other head
    size = None if section.get(*names) == "auto" else section.integer(*names)
    if size is None and inner % heads:
        raise section.missing(*names)
    if size is None:
        section.assume(
            f"none of {', '.join(names)} is given: inner size / heads = {inner // heads}"
        )
    groups = section.assumed(
        "mamba_n_groups", "mamba_ngroups", "n_groups", default=1, why="one group"
    )
    return Mamba(
        mamba_n_heads=heads,
        mamba_d_head=inner // heads if size is None else size,
        mamba_d_state=state,
        mamba_n_groups=groups,
        mamba_d_conv=conv,
        mamba_conv_bias=bias is not False,
        state_dtype=_state_dtype(section, DType.fp32 if model_type == "nemotron_h" else None),
        mamba_chunk_size=_chunk_size(section, model_type),
        mamba_rms_norm=model_type != "falcon_h1" or section.flag("mamba_rms_norm") is True,
    )


def linear_attention(section: Section, model_type: str, hidden: int) -> LinearAttention:
    """The linear-attention layers of a config.

    Raises:
        InvalidValue: a size is missing, or the family's state is not known.
    """
    if model_type == "kimi_linear":
        inner = section.inner("linear_attn_config") or section
        heads = inner.required("num_heads", "linear_num_heads")
        size = inner.required("head_dim" if inner is not section else "linear_head_dim")
        kernel = inner.integer("short_conv_kernel_size", "linear_conv_kernel_dim") or 4
        return LinearAttention(
            kind="kda",
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=size,
            linear_value_head_dim=size,
            linear_conv_kernel_dim=kernel,
            state_dtype=DType.fp32,
        )
    if model_type.startswith("minimax"):
        heads = section.required("num_attention_heads")
        size = section.integer("head_dim") or hidden // heads
        return LinearAttention(
            kind="lightning",
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=size,
            linear_value_head_dim=size,
        )
    return LinearAttention(
        kind="gated_delta_net",
        linear_num_key_heads=section.required("linear_num_key_heads"),
        linear_num_value_heads=section.required("linear_num_value_heads"),
        linear_key_head_dim=section.required("linear_key_head_dim"),
        linear_value_head_dim=section.required("linear_value_head_dim"),
        linear_conv_kernel_dim=section.assumed(
            "linear_conv_kernel_dim", default=4, why="transformers' default"
        ),
        state_dtype=_state_dtype(section, None),
    )


def _inner(section: Section, model_type: str, hidden: int) -> int:
    names = ["mamba_d_ssm", "mamba_intermediate_size", "d_inner"]
    if model_type in _WITHOUT_MLP:
        names.append("intermediate_size")
    stated = section.integer(*names)
    if stated is not None:
        return stated
    expand = section.number("mamba_expand", "expand")
    if expand is None:
        section.assume("mamba_expand is not given: 2 (every family's default)")
        expand = 2.0
    if expand <= 0:
        raise section.wrong(("mamba_expand", "expand"), "above 0", expand)
    return int(expand * hidden)


def _chunk_size(section: Section, model_type: str) -> int:
    """Tokens of the kernel's chunk; transformers' default of the family where none is given."""
    stated = section.integer("mamba_chunk_size", "chunk_size")
    return stated or (128 if model_type == "nemotron_h" else 256)


def _dt_rank(section: Section, hidden: int) -> int:
    names = ("mamba_dt_rank", "time_step_rank")
    if section.get(*names) in (None, "auto"):
        return -(-hidden // 16)
    return section.required(*names)


def _state_dtype(section: Section, default: DType | None) -> DType | None:
    name = section.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if name in (None, "auto"):
        return default
    return dtype_named(section, "mamba_ssm_cache_dtype", "mamba_ssm_dtype")
