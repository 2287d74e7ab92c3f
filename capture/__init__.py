"""Recording and replay."""

from graphrt.capture.errors import CaptureError
from graphrt.capture.recorder import record
from graphrt.capture.recording import Recording

__all__ = ["CaptureError", "Recording", "record"]
