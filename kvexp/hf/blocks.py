"""Layers that a search pruned one by one (Nemotron-NAS): what each of them kept.

vLLM 0.26 `models/nemotron_nas.py`: a block states its attention and its MLP, either of which may be
missing (`no_op`); an MLP's width is given, or follows from a multiple of the hidden size.
"""

from kvexp.hf.section import Section

MULTIPLE = 256
"""Of an MLP's width."""


def _blocks(section: Section, part: str) -> list[Section]:
    """The attention or the MLP of each block, none where the config has no blocks.

    Raises:
        InvalidValue: a block does not have the part.
    """
    found = []
    for index, block in enumerate(section.items("block_configs") or ()):
        place = section.name_of("block_configs")
        if not isinstance(block, dict) or not isinstance(block.get(part), dict):
            raise section.wrong(("block_configs",), f"blocks with {part} each", block)
        own = Section(block[part], f"{place}.{index}.{part}", section.outer, section.notes)
        if own.flag("replace_with_linear"):
            raise own.wrong(("replace_with_linear",), "false: such a layer is not known", True)
        found.append(own)
    return found


def layer_types(section: Section, count: int) -> list[str]:
    """Layers with full attention, or with an MLP alone.

    Raises:
        InvalidValue: there are fewer blocks than layers, or one keeps a window.
    """
    blocks = _blocks(section, "attention")
    if len(blocks) != count:
        raise section.wrong(("block_configs",), f"{count} blocks", len(blocks))
    for block in blocks:
        if block.has("window_length", "num_sink_tokens"):
            raise block.wrong(("window_length",), "null: such a window is not known", block.values)
    return ["mlp" if block.flag("no_op") else "full_attention" for block in blocks]


def kv_heads(section: Section, heads: int) -> int | None:
    """KV heads of the layers that attend, None where the config has no blocks.

    Raises:
        InvalidValue: the layers differ.
    """
    blocks = [own for own in _blocks(section, "attention") if not own.flag("no_op")]
    groups = {own.required("n_heads_in_group") for own in blocks}
    if len(groups) > 1:
        names = ("block_configs",)
        raise section.wrong(names, "blocks with one n_heads_in_group", sorted(groups))
    return heads // groups.pop() if groups else None


def mlp_widths(section: Section, hidden: int) -> list[int] | None:
    """The width of each layer's MLP, 0 for none; None where the config has no blocks."""
    return [_width(block, hidden) for block in _blocks(section, "ffn")] or None


def _width(block: Section, hidden: int) -> int:
    if block.flag("no_op"):
        return 0
    stated = block.integer("intermediate_size")
    if stated is not None:
        return stated
    multiple = block.number("ffn_mult")
    if multiple is None:
        raise block.missing("ffn_mult", "intermediate_size")
    width = int(2 * multiple * hidden / 3)
    return -(-width // MULTIPLE) * MULTIPLE
