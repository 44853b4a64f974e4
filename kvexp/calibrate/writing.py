"""A measured profile as a file, and beside the one that is packaged."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvexp.calibrate.card import Card
from kvexp.calibrate.probes import Measured
from kvexp.errors import RequestError
from kvexp.simulate.device import Device


def profile_of(card: Card, measured: Measured, base: Device) -> Device:
    """What was measured, and for the rest the numbers of `base`.

    It counts as measured where nothing had to be taken over.
    """
    source = f"one {card.name}, {card.software}"
    if measured.reasons:
        source += f"; of {base.name}: {', '.join(measured.reasons)}"
    major, minor = (int(part) for part in card.torch_version.split(".")[:2])
    return replace(
        base,
        **measured.numbers,
        name=card.name,
        measured=not measured.reasons,
        source=source,
        versions=f">={major}.{minor},<{major}.{minor + 1}",
        capability=card.capability,
    )


def as_yaml(profile: Device, measured: Measured, base: Device) -> str:
    """The profile as `kvexp.simulate.read_device` reads it, each number with its source."""
    return "\n".join([*_lines(profile, measured, base), ""])


def compared(profile: Device, measured: Measured, base: Device) -> list[str]:
    """A line for each measured number beside the base's, and one that counts them."""
    lines, equal = [], 0
    for name, found in measured.numbers.items():
        held = getattr(base, name)
        equal += found == held
        mark = "" if found == held else f"  differs from {_text(held)}"
        lines.append(f"{name:28} {_text(found):>12}{mark}")
    lines += [f"{name:28} not measured: {reason}" for name, reason in measured.reasons.items()]
    count = len(measured.numbers)
    lines.append(f"{equal} of {count} measured numbers equal those of {base.name}")
    return lines


def check_writable(path: Path) -> None:
    """Do nothing where a file can be written there.

    Raises:
        RequestError: it cannot; the message says why.
    """
    if path.is_dir():
        raise RequestError(f"--out {path} is a folder; give a file")
    if not path.parent.is_dir():
        raise RequestError(f"--out {path}: there is no folder {path.parent}")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise RequestError(f"--out {path} cannot be written: no permission for {target}")


def write(path: Path, text: str) -> None:
    """Write the file whole, or not at all.

    Raises:
        RequestError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RequestError(f"--out {path} cannot be written: {error.strerror}") from None


def _lines(profile: Device, measured: Measured, base: Device) -> Iterator[str]:
    yield "# Written by python -m kvexp.calibrate; sizes are bytes."
    where = profile.source.partition(";")[0]
    for name, value in profile.as_dict().items():
        line = f"{name}: {_text(value)}"
        if name in measured.numbers:
            yield f"{line} # measured: {where}"
        elif name in measured.reasons:
            yield f"{line} # of {base.name}, not measured: {measured.reasons[name]}"
        else:
            yield line


def _text(value: Any) -> str:
    """A value of a profile as YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return json.dumps(value)
