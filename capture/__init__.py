"""Recording and replay."""

from graphrt.capture.check import Difference, ReplayReport, check_replay
from graphrt.capture.errors import CaptureError
from graphrt.capture.neutral import state_neutral
from graphrt.capture.recorder import record
from graphrt.capture.recording import Recording
from graphrt.capture.topology import Edge, GraphDiff, GraphNode, Topology, diff

__all__ = [
    "CaptureError",
    "Difference",
    "Edge",
    "GraphDiff",
    "GraphNode",
    "Recording",
    "ReplayReport",
    "Topology",
    "check_replay",
    "diff",
    "record",
    "state_neutral",
]
