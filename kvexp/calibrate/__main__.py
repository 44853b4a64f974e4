"""The command line of `kvexp.calibrate`."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from kvexp.arguments import ArgumentParser
from kvexp.calibrate import writing
from kvexp.calibrate.card import Card, open_card
from kvexp.calibrate.probes import measure
from kvexp.errors import InvalidValue, ProfilerUnavailable, RequestError
from kvexp.simulate import device as devices
from kvexp.simulate.device import Device
from kvexp.simulate.errors import Untraceable

OK, FAILED, WRONG_REQUEST = 0, 1, 2


def main(arguments: Sequence[str] | None = None, open_card: Callable[[], Card] = open_card) -> int:
    """Measure the first visible GPU and write its profile; returns the exit status.

    0: a profile is written. 1: the GPU or torch failed. 2: the request was wrong, or there is no
    GPU.
    """
    parser = ArgumentParser(
        prog="python -m kvexp.calibrate",
        description="Measure the first visible GPU and write its device profile, which"
        " profiler=simulated reads: profiler.device=FILE.",
    )
    parser.add_argument("--out", type=Path, help="the file; by default named after the card")
    options = parser.parse_args(arguments)
    try:
        if options.out is not None:
            writing.check_writable(options.out)
        with closing(open_card()) as card:
            return _run(card, options.out)
    except (RequestError, InvalidValue, ProfilerUnavailable) as error:
        return _say(str(error), WRONG_REQUEST)
    except RuntimeError as error:  # torch's, of a card that fails or is full
        return _say(str(error), FAILED)


def _run(card: Card, out: Path | None) -> int:
    path = out or Path(f"{re.sub('[^a-z0-9]+', '_', card.name.lower())}.yaml")
    writing.check_writable(path)
    start = time.monotonic()
    base = _base(card)
    measured = measure(card, base, _progress)
    profile = writing.profile_of(card, measured, base)
    writing.write(path, writing.as_yaml(profile, measured, base))
    print(f"{card.name}, {card.software}, {time.monotonic() - start:.1f} s")
    print("\n".join(writing.compared(profile, measured, base)))
    print(f"{path}: use it with profiler=simulated profiler.device={path}")
    return OK


def _base(card: Card) -> Device:
    """The packaged profile of this card, or of its architecture, or of one like it."""
    major, minor = card.capability
    try:
        return devices.find(card.name, f"{major}.{minor}")
    except Untraceable:
        return replace(devices.load("h200"), capability=card.capability)


def _progress(step: str) -> None:
    _say(f"measuring {step}", OK)


def _say(message: str, status: int) -> int:
    print(f"kvexp: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
