"""The error that carries an engine's refusal inside the planner."""

from __future__ import annotations


class EngineError(Exception):
    """The engine would refuse this case.

    Attributes:
        code: Short code, e.g. ``page_not_divisible``, or the class name of the engine's own
            exception where it has no message of its own.
        message: What is wrong, for a person.
    """

    def __init__(self, code: str, message: str) -> None:
        """Keep the code beside the message."""
        super().__init__(message)
        self.code = code
        self.message = message
