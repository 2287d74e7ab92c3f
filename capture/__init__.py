"""Recording and replay."""

from graphrt.capture.errors import CaptureError
from graphrt.capture.inputs import StepInputs, dummy_inputs
from graphrt.capture.recorder import record
from graphrt.capture.recording import Recording
from graphrt.capture.runner import CommitRunner
from graphrt.capture.sizes import GraphMemory
from graphrt.capture.step import DecodeStep, Sampled, StepRows

__all__ = [
    "CaptureError",
    "CommitRunner",
    "DecodeStep",
    "GraphMemory",
    "Recording",
    "Sampled",
    "StepInputs",
    "StepRows",
    "dummy_inputs",
    "record",
]
