"""Compiling of the CuTe DSL kernels: once per static facts and architecture, from numbers alone, before any capture.

A compiled kernel takes addresses and strides, so nothing it is compiled with keeps a tensor or a stream alive; the
stream is an argument of every launch. The objects are kept for the life of the process: unloading one during a
capture would spoil it.
"""

import threading
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream

DTYPES = {torch.float32: cutlass.Float32, torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
# No product and sum may melt into one rounding unless the kernel says `fma`: fold and verify must round alike.
_OPTIONS = "--ptxas-options '--fmad=false'"


@dataclass(frozen=True, slots=True)
class Support:
    """True or false, with the reason."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def target(device: torch.device | None) -> str:
    """Architecture to compile for: that of the device, with its specific features."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


class Kernels:
    """Compiled kernels of one kind, by (static facts, architecture), and their loaded form by device."""

    def __init__(self, make, examples):
        """`make(*facts)` is the jit object, `examples(kernel)` the arguments before the stream to compile it with."""
        self._make, self._examples = make, examples
        self._compiled, self._loaded, self._lock = {}, {}, threading.Lock()

    def compile(self, facts: tuple, arch: str, extra_options: str = ""):
        """The compiled kernel; `extra_options` are for tools that want the machine code kept (never cached)."""
        with self._lock:
            if extra_options or (facts, arch) not in self._compiled:
                kernel = self._make(*facts)
                options = f"--gpu-arch={arch} {_OPTIONS} {extra_options}"
                compiled = cute.compile(kernel, *self._examples(kernel), make_fake_stream(), options=options)
                if extra_options:
                    return compiled
                self._compiled[facts, arch] = compiled
            return self._compiled[facts, arch]

    def load(self, facts: tuple, device: torch.device) -> None:
        """Compile for `device` and load the machine code there, so that a launch in a capture does neither."""
        if self.ready(facts, device) is None:
            compiled = self.compile(facts, target(device))
            with torch.cuda.device(device):
                self._loaded[facts, device.index or 0] = compiled.to(device.index or 0)

    def ready(self, facts: tuple, device: torch.device):
        """The loaded kernel, or None."""
        return self._loaded.get((facts, device.index or 0))

    def launch(self, facts: tuple, device: torch.device, *args) -> None:
        """Run on torch's current stream of `device`.

        Raises:
            RuntimeError: when the variant is not there and a capture forbids making it.
        """
        run = self.ready(facts, device)
        if run is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"CuTe kernel {facts} is not compiled: build a context, or run it once, before capture")
            self.load(facts, device)
            run = self.ready(facts, device)
        run(*args, cuda_stream(device))


def cuda_stream(device: torch.device):
    """Handle of torch's current stream, asked for at every launch and never kept."""
    import cuda.bindings.driver as driver

    return driver.CUstream(torch.cuda.current_stream(device).cuda_stream)


_sm_counts: dict[int, int] = {}


def sm_count(device: torch.device) -> int:
    index = device.index or 0
    if index not in _sm_counts:
        _sm_counts[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return _sm_counts[index]
