"""The CUDA driver's interface, as far as kernels and recordings both use it."""

import ctypes
import functools
from typing import Any


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's library; OSError on a machine without one."""
    return ctypes.CDLL("libcuda.so.1")


def call(function: str, *args: Any) -> None:
    """RuntimeError if the driver refuses."""
    status = getattr(library(), function)(*args)
    if status != 0:
        raise RuntimeError(f"{function} failed with CUDA driver error {status}")
