"""The dtype of a checkpoint: two keys, the newer one first, with or without torch's prefix."""

from kvexp.dtypes import DType
from kvexp.hf.section import Section

NAMES = {
    "bfloat16": DType.bf16,
    "float16": DType.fp16,
    "half": DType.fp16,
    "float32": DType.fp32,
    "float": DType.fp32,
}


def dtype_named(section: Section, *names: str) -> DType | None:
    """The dtype that one of the keys names, None where none has a value.

    Raises:
        InvalidValue: the name is no dtype of a model.
    """
    text = section.text(*names)
    if text is None:
        return None
    found = NAMES.get(text.removeprefix("torch."))
    if found is None:
        raise section.wrong(names, f"one of {', '.join(NAMES)}", text)
    return found


def checkpoint_dtype(section: Section) -> DType:
    """The dtype of a section, else of the file; bf16 where neither says, which is noted."""
    for where in (section, section.around()):
        for name in ("dtype", "torch_dtype"):
            found = dtype_named(where, name)
            if found is not None:
                if found is DType.fp32:
                    section.assume(f"{where.name_of(name)} is 32 bits wide: vLLM serves it in 16")
                return found
    section.assume(
        "dtype is not given (nor torch_dtype): bfloat16, in which vLLM serves a checkpoint of"
        " unknown or 32-bit dtype"
    )
    return DType.bf16
