"""Which verify may start reading before its predecessor has ended (programmatic dependent launch).

Every verify is launched with the attribute (in a capture, unless several nodes or none lead to it) and lets its
successors start after its own wait, so what it reads before that wait must be complete by then. Reading early is right
in one case only, and known for certain only while a graph is captured: the one launch this verify depends on is another
verify of ours, which touches nothing that this one reads or writes early. That predecessor has waited for everything
before it before it let anybody start, so whatever this verify reads early was written at least two launches ago. In all
other cases (a user's kernel, staging, a commit, a flush or a copy just before, the same layer twice, eager launches,
whose predecessor nobody knows) the kernel waits before its first read, and only its launch overlaps.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import NamedTuple

from graphrt.cuda_types import EdgeData, library
from graphrt.overlap import Span


class Touched(NamedTuple):
    """Memory of one verify, by when and how."""

    early: tuple[Span, ...]
    """Read before its wait; the first, the checkpoint, is written then as well."""
    late: tuple[Span, ...]
    """Read after it."""
    written: tuple[Span, ...]

    def conflicts(self, before: "Touched") -> bool:
        """Whether this verify may not start early behind `before`."""
        return _meet(self.early, before.written) or _meet(self.early[:1], before.early + before.late)


def _meet(some: Iterable[Span], others: Iterable[Span]) -> bool:
    return any(a.meets(b) for a in some for b in others)


class Position(NamedTuple):
    """Where a capturing stream stands: its capture, and the one node that the next launch depends on."""

    capture: int
    node: int


_last: tuple[Position, Touched] | None = None


def has_one_predecessor(stream: int) -> bool:
    """Whether the next launch on the capturing `stream` may have the attribute: not behind a join of streams."""
    return position(stream) is not None


def may_start_early(stream: int, touched: Touched) -> bool:
    """Whether a verify launched next on the capturing `stream` may read before its wait."""
    last = _last  # once: another thread may capture as well
    return last is not None and position(stream) == last[0] and not touched.conflicts(last[1])


def launched(stream: int, touched: Touched) -> None:
    """Note that a verify is now the last launch of the capturing `stream`."""
    global _last
    here = position(stream)
    _last = None if here is None else (here, touched)


@functools.cache
def _query() -> "ctypes._NamedFuncPointer | None":
    """The driver's question with the kinds of edges in its answer, which drivers before CUDA 12.3 do not have."""
    return getattr(library(), "cuStreamGetCaptureInfo_v3", None)


def position(stream: int) -> Position | None:
    """Where `stream` stands in its capture; None outside of one, and where not exactly one plain edge leads on."""
    query = _query()
    if query is None:
        return None
    status, capture, count = ctypes.c_int(0), ctypes.c_uint64(0), ctypes.c_size_t(0)
    nodes, edges = ctypes.POINTER(ctypes.c_void_p)(), ctypes.POINTER(EdgeData)()
    answer = (ctypes.byref(x) for x in (status, capture, ctypes.c_void_p(), nodes, edges, count))
    failed = query(ctypes.c_void_p(stream), *answer)
    if failed or status.value != 1 or count.value != 1 or (edges and edges[0].type):
        return None
    return Position(capture.value, nodes[0] or 0)
