"""The one error of a recording."""


class CaptureError(RuntimeError):
    """A recording met something that a graph cannot hold, or is not what it should be.

    Raised while recording: nothing was changed, nothing is left open. Raised by a check: the text says what differs.
    """
