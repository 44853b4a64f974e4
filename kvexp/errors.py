"""What goes wrong on purpose: every message is one line that a user can act on."""

import difflib
from collections.abc import Iterable


class RequestError(ValueError):
    """The request as a whole is wrong: nothing can run (exit status 2)."""


class InvalidValue(ValueError):
    """One value of a point is not allowed; the message says what is (status `invalid`)."""


class ProfilerUnavailable(RuntimeError):
    """This machine cannot run this profiler; the message says what is missing (exit status 2)."""


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?` of the known word that is nearest whatever its case, or nothing.

    The shortest that begins with it is nearer than one that has it as a part (4090: rtx_4090) or
    that it begins with (h100_80gb: h100), and these than one that only looks like it.
    """
    by_folded, folded = {each.casefold(): each for each in known}, word.casefold()
    longer = [each for each in by_folded if word and each.startswith(folded)]
    parts = [e for e in by_folded if folded in _parts(e) or folded.startswith(f"{e}_")]
    found = (
        sorted(longer, key=len)
        or sorted(parts, key=len)
        or difflib.get_close_matches(folded, by_folded, n=1)
    )
    return f"; did you mean {prefix}{by_folded[found[0]]}?" if found else ""


def _parts(name: str) -> list[str]:
    """The words of a name that say something alone: not the 8b of a model."""
    return [word for word in name.split("_") if len(word) > 2]
