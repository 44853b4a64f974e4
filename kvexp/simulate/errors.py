"""Why a forward is not simulated."""


class Untraceable(RuntimeError):
    """The model cannot be built, or its forward needs what tensors without data do not have.

    The message is one line and says where and what.
    """
