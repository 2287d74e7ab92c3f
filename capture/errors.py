"""The one error of a recording."""


class CaptureError(RuntimeError):
    """A recording met something that a graph cannot hold. Nothing was changed, nothing is left open."""
