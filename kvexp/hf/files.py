"""Small files read whole, as JSON and nothing else."""

import json
from pathlib import Path
from typing import Any

from kvexp.errors import InvalidValue

LARGEST_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InvalidValue: the file cannot be read or holds something else; one line says what.
    """
    try:
        if path.stat().st_size > LARGEST_JSON_BYTES:
            raise InvalidValue(f"{path} is larger than {LARGEST_JSON_BYTES >> 20} MiB: no config")
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValue(f"{path} is not JSON: {reason}") from None
    if not isinstance(data, dict):
        raise InvalidValue(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data
