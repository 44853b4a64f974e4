"""Text files as engines, editors and shells write them."""

import codecs
from pathlib import Path


def read_text(path: Path, errors: str = "replace") -> str:
    """A file in UTF-8, or in UTF-16 where it begins so, as PowerShell writes one.

    `errors` is what becomes of bytes that are no text, as `bytes.decode` has it.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_wide else "utf-8-sig", errors)
