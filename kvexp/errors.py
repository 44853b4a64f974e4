"""What goes wrong on purpose: every message is one line that a user can act on."""


class RequestError(ValueError):
    """The request as a whole is wrong: nothing can run (exit status 2)."""


class InvalidValue(ValueError):
    """One value of a point is not allowed; the message says what is (status `invalid`)."""


class ProfilerUnavailable(RuntimeError):
    """This machine cannot run this profiler; the message says what is missing (exit status 2)."""
