"""Compiling of the CuTe DSL kernels: once per static facts and architecture, from numbers alone, before any capture.

A compiled kernel takes addresses and strides, so nothing it is compiled with keeps a tensor or a stream alive; the
stream is an argument of every launch. The objects are kept for the life of the process: unloading one during a
capture would spoil it.
"""

import ctypes
import struct
import threading
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream

from ...capturing import is_capturing
from ...environment import cute_arch

DTYPES = {
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    # Of the parameters A_log and dt_bias only; they are rounded to FP32 where they are read.
    torch.float64: cutlass.Float64,
}
# No product and sum may melt into one rounding unless the kernel says `fma`: fold and verify must round alike.
_OPTIONS = "--ptxas-options '--fmad=false'"


def target(device: torch.device | None) -> str:
    """Architecture to compile for: that of the device, with its specific features, or what CUTE_DSL_ARCH says."""
    if chosen := cute_arch():
        return chosen
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


class Kernels:
    """Compiled kernels of one kind, by (static facts, architecture), and their loaded form by device."""

    def __init__(self, make, examples, layout: str):
        """
        Args:
            make: static facts -> the jit object; its name tells the kernel.
            examples: the arguments before the stream to compile it with.
            layout: of those arguments in order, as in `struct`: q for every integer, f4x for a float.
        """
        self._make, self._examples = make, examples
        self._layout = struct.Struct(f"={layout}q")
        self._compiled, self._loaded = {}, {}
        self._lock, self._local = threading.RLock(), threading.local()

    def compile(self, facts: tuple, arch: str, extra_options: str = ""):
        """The compiled kernel; `extra_options` are for tools that want the machine code kept (never cached)."""
        with self._lock:
            compiled = None if extra_options else self._compiled.get((facts, arch))
            if compiled is None:
                options = f"--gpu-arch={arch} {_OPTIONS} {extra_options}"
                compiled = cute.compile(self._make(*facts), *self._examples, make_fake_stream(), options=options)
                if not extra_options:
                    self._compiled[facts, arch] = compiled
            return compiled

    def count(self) -> int:
        """How many variants have been compiled."""
        return len(self._compiled)

    def shared_bytes(self, facts: tuple) -> int:
        """Dynamic shared memory of a block."""
        return self._make(*facts).shared_bytes

    def load(self, facts: tuple, device: torch.device) -> None:
        """Compile for `device` and load the machine code there, so that a launch in a capture does neither."""
        index = device.index or 0
        with self._lock:
            if (facts, index) not in self._loaded:
                compiled = self.compile(facts, target(device))
                with torch.cuda.device(device):
                    _make_counters(index)
                    self._loaded[facts, index] = compiled.to(index)

    def launch(self, facts: tuple, device: torch.device, *values: float) -> None:
        """Run on torch's current stream of `device`.

        Raises:
            RuntimeError: when the variant is not there and a capture forbids making it.
        """
        run = self._loaded.get((facts, device.index or 0))
        if run is None:
            if is_capturing():
                raise RuntimeError(
                    f"{self._make.__name__}, variant {facts}, is not compiled, and a capture cannot wait for it: "
                    "build a context of this shape first, or run the step once"
                )
            self.load(facts, device)
            run = self._loaded[facts, device.index or 0]
        run.run_compiled_program(self.pack(*values, torch.cuda.current_stream(device).cuda_stream))

    def pack(self, *values: float) -> list[ctypes.c_void_p]:
        """Pointers to the arguments, 8 bytes each.

        The DSL's own conversion takes a quarter of a millisecond for the thirty numbers of a launch. The driver
        copies them before the launch returns, so one buffer a thread is enough.
        """
        local = self._local
        if not hasattr(local, "buffer"):
            local.buffer = ctypes.create_string_buffer(self._layout.size)
            start = ctypes.addressof(local.buffer)
            local.pointers = [ctypes.c_void_p(start + at) for at in range(0, self._layout.size, 8)]
        self._layout.pack_into(local.buffer, 0, *values)
        return local.pointers


_sm_counts: dict[int, int] = {}


def sm_count(device: torch.device) -> int:
    index = device.index or 0
    if index not in _sm_counts:
        _sm_counts[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return _sm_counts[index]


# A recorded launch never runs twice at a time, so a counter of its own is nobody else's.
_COUNTERS = 8192
_counters: dict[int, tuple[torch.Tensor, Iterator[int]]] = {}
_counters_lock = threading.Lock()


def _make_counters(index: int) -> None:
    """Once a device: captured launches keep their addresses."""
    with _counters_lock:
        if index not in _counters:
            counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=torch.device("cuda", index))
            torch.cuda.current_stream(index).synchronize()
            _counters[index] = counters, iter(range(counters.data_ptr(), counters.data_ptr() + 4 * _COUNTERS, 4))


def tickets(device: torch.device) -> int:
    """Address of a counter at 0 for the launch that is about to be captured (items.py).

    0, which stands for no counter, outside of a capture and when this process has captured more than 8192 of them.
    """
    counters = _counters.get(device.index or 0)
    return next(counters[1], 0) if counters and is_capturing() else 0
