"""Whether a CUDA stream captures a graph, and which capture that is, whoever began it."""

import ctypes
from typing import NamedTuple

import torch

from .cuda_types import call, library


class Capture(NamedTuple):
    """A capture that is under way."""

    number: int
    """The driver's, of its own for each capture of the process and never 0."""
    graph: int
    """Handle of the graph that comes out of it. The driver owns it."""


def is_capturing() -> bool:
    """True while the current stream captures, whoever began it."""
    # The legacy default stream never captures, and must not be asked while a stream that waits for it does.
    if not torch.cuda.is_initialized() or torch.cuda.current_stream().cuda_stream == 0:
        return False
    return torch.cuda.is_current_stream_capturing()


def capture_of(stream: int) -> Capture | None:
    """What a `cudaStream_t` handle captures into, or None. The streams of one capture have the same answer.

    RuntimeError if the driver refuses.
    """
    status, number, graph = ctypes.c_int(0), ctypes.c_uint64(0), ctypes.c_void_p()
    function, unused = "cuStreamGetCaptureInfo_v2", [None, None]
    if hasattr(library(), "cuStreamGetCaptureInfo_v3"):
        function, unused = "cuStreamGetCaptureInfo_v3", [None, None, None]
    answer = (ctypes.byref(x) for x in (status, number, graph))
    call(function, ctypes.c_void_p(stream), *answer, *unused)
    return Capture(number.value, graph.value or 0) if status.value == 1 else None


def current_capture() -> int:
    """Number of the capture of the current stream, 0 where it does not capture.

    It asks the driver: to compare with an earlier capture. Whether there is one at all, `is_capturing` answers.
    """
    if not is_capturing():
        return 0
    found = capture_of(torch.cuda.current_stream().cuda_stream)
    return 0 if found is None else found.number
