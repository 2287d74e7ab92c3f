"""Recording and replay."""

from graphrt.capture.check import Difference, ReplayReport, check_replay
from graphrt.capture.errors import CaptureError
from graphrt.capture.inputs import StepInputs, dummy_inputs
from graphrt.capture.neutral import state_neutral
from graphrt.capture.recorder import record
from graphrt.capture.recording import Recording
from graphrt.capture.runner import CommitRunner
from graphrt.capture.sizes import GraphMemory
from graphrt.capture.step import DecodeStep, Sampled, StepRows
from graphrt.capture.topology import Edge, GraphDiff, GraphNode, Topology, diff

__all__ = [
    "CaptureError",
    "CommitRunner",
    "DecodeStep",
    "Difference",
    "Edge",
    "GraphDiff",
    "GraphMemory",
    "GraphNode",
    "Recording",
    "ReplayReport",
    "Sampled",
    "StepInputs",
    "StepRows",
    "Topology",
    "check_replay",
    "diff",
    "dummy_inputs",
    "record",
    "state_neutral",
]
