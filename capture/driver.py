"""The few calls of the CUDA driver that torch does not offer: what a captured graph consists of."""

import ctypes
import functools

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


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status != 0:
        raise RuntimeError(f"{call} failed with CUDA driver error {status}")


def begin_capture(stream: int) -> None:
    """Begin capturing a `cudaStream_t` handle, in thread-local mode.

    RuntimeError if the driver refuses.
    """
    thread_local = 1
    _check(_library().cuStreamBeginCapture_v2(ctypes.c_void_p(stream), thread_local), "cuStreamBeginCapture")


def node_types(graph: int) -> list[str]:
    """The type of each node of a `cudaGraph_t` handle, in the order in which they were captured.

    RuntimeError if the driver refuses the handle.
    """
    library, handle, count = _library(), ctypes.c_void_p(graph), ctypes.c_size_t(0)
    _check(library.cuGraphGetNodes(handle, None, ctypes.byref(count)), "cuGraphGetNodes")
    if count.value == 0:
        return []
    nodes = (ctypes.c_void_p * count.value)()
    _check(library.cuGraphGetNodes(handle, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    types = []
    for node in nodes:
        kind = ctypes.c_int(0)
        _check(library.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), "cuGraphNodeGetType")
        types.append(_NODE_TYPES[kind.value] if 0 <= kind.value < len(_NODE_TYPES) else f"type {kind.value}")
    return types
