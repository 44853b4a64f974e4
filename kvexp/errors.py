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

    The shortest that begins with it is nearer than one that only looks like it.
    """
    by_folded = {each.casefold(): each for each in known}
    longer = [each for each in by_folded if word and each.startswith(word.casefold())]
    found = sorted(longer, key=len) or difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f"; did you mean {prefix}{by_folded[found[0]]}?" if found else ""
