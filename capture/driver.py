"""The few calls of the CUDA driver that torch does not offer: what a captured graph consists of."""

import ctypes
from collections.abc import Callable
from typing import Any

from graphrt.capturing import capture_of
from graphrt.cuda_types import EdgeData, call, library

# CUgraphNodeType of the driver API, in order.
_NODE_TYPES = (
    "kernel",
    "memcpy",
    "memset",
    "host",
    "graph",
    "empty",
    "wait_event",
    "event_record",
    "semaphore_signal",
    "semaphore_wait",
    "mem_alloc",
    "mem_free",
    "batch_mem_op",
    "conditional",
)
_MEMORY = {1: "host", 2: "device", 3: "array", 4: "unified"}
_UNIFIED = 4
_POINTER_MEMORY_TYPE = 2
_PROGRAMMATIC = 1


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class _CopyEnd(ctypes.Structure):
    """One half of CUDA_MEMCPY3D_v2."""

    _fields_ = (
        ("x_bytes", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("z", ctypes.c_size_t),
        ("lod", ctypes.c_size_t),
        ("memory", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _CopyParams(ctypes.Structure):
    """CUDA_MEMCPY3D_v2."""

    _fields_ = (
        ("src", _CopyEnd),
        ("dst", _CopyEnd),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


class _FillParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS_v1."""

    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def begin_capture(stream: int) -> None:
    """Begin capturing a `cudaStream_t` handle, in thread-local mode.

    RuntimeError if the driver refuses, here and below.
    """
    thread_local = 1
    call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), thread_local)


def nodes(graph: int) -> list[int]:
    """Handles of the nodes of a `cudaGraph_t` handle, in the order in which they were captured."""
    count = num_nodes(graph)
    if count == 0:
        return []
    found, size = (ctypes.c_void_p * count)(), ctypes.c_size_t(count)
    call("cuGraphGetNodes", ctypes.c_void_p(graph), found, ctypes.byref(size))
    return [node or 0 for node in found]


def num_nodes(graph: int) -> int:
    """How many nodes a graph has; also while it is captured."""
    count = ctypes.c_size_t(0)
    call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    return count.value


def node_type(node: int) -> str:
    """kernel, memcpy, memset, ..."""
    kind = ctypes.c_int(0)
    call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    return _NODE_TYPES[kind.value] if 0 <= kind.value < len(_NODE_TYPES) else f"type {kind.value}"


def edges(graph: int) -> list[tuple[int, int, bool]]:
    """(source, target, programmatic) for every edge, source and target as node handles."""
    # Before CUDA 12.3 there are no programmatic edges, and no place to read them from.
    with_data = hasattr(library(), "cuGraphGetEdges_v2")
    capacity = 64 + 4 * num_nodes(graph)
    while True:
        # Asking for the number alone could fail as a query that loses the edges' data.
        sources, targets = (ctypes.c_void_p * capacity)(), (ctypes.c_void_p * capacity)()
        data, count = (EdgeData * capacity)(), ctypes.c_size_t(capacity)
        arrays = [sources, targets, data] if with_data else [sources, targets]
        function = "cuGraphGetEdges_v2" if with_data else "cuGraphGetEdges"
        call(function, ctypes.c_void_p(graph), *arrays, ctypes.byref(count))
        if count.value < capacity:
            found = zip(sources, targets, data, strict=True)
            return [(s, t, d.type == _PROGRAMMATIC) for s, t, d in found if s and t]
        capacity *= 4


def kernel(node: int) -> tuple[str, dict[str, Any]]:
    """Name and launch shape of a kernel node."""
    p = _KernelParams()
    call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(p))
    facts = {"grid": list(p.grid), "block": list(p.block), "shared_bytes": p.shared_bytes}
    name = ctypes.c_char_p()
    if p.func:
        call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(p.func))
    else:
        call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(p.kern))
    return demangled((name.value or b"unnamed kernel").decode(errors="replace")), facts


def copy(node: int) -> tuple[str, dict[str, Any]]:
    """Direction and bytes of a memcpy node."""
    p = _CopyParams()
    call("cuGraphMemcpyNodeGetParams", ctypes.c_void_p(node), ctypes.byref(p))
    num_bytes = p.width_bytes * max(p.height, 1) * max(p.depth, 1)
    return f"{_memory(p.src)} to {_memory(p.dst)}", {"bytes": num_bytes}


def fill(node: int) -> tuple[str, dict[str, Any]]:
    """Value and bytes of a memset node."""
    p = _FillParams()
    call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(p))
    return f"fill {p.value}", {"bytes": p.element_bytes * p.width * max(p.height, 1)}


def capturing_graph(stream: int) -> int | None:
    """Handle of the graph that a stream is capturing into, or None. The driver owns it."""
    found = capture_of(stream)
    return None if found is None else found.graph


DETAILS: dict[str, Callable[[int], tuple[str, dict[str, Any]]]] = {"kernel": kernel, "memcpy": copy, "memset": fill}
"""By node type: the node's name and facts."""


def _memory(end: _CopyEnd) -> str:
    """Where one end of a copy is."""
    kind = ctypes.c_uint(end.memory)
    if kind.value == _UNIFIED:
        # Unregistered host memory is unknown to the driver, which leaves the value or an error.
        status = library().cuPointerGetAttribute(ctypes.byref(kind), _POINTER_MEMORY_TYPE, ctypes.c_uint64(end.device))
        if status != 0:
            return "host"
    return _MEMORY.get(kind.value, f"memory {kind.value}")


def demangled(name: str) -> str:
    """A mangled C++ name as one reads it; other names as they are."""
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError:
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int(0)
    address = ctypes.c_void_p(demangle(name.encode(), None, None, ctypes.byref(status)))
    if not address or status.value != 0:
        return name
    text = ctypes.string_at(address.value or 0).decode(errors="replace")
    ctypes.CDLL(None).free(address)
    return text
