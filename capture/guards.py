"""What a CUDA capture refuses at the call that asks for it: compiling, launching elsewhere, memory outside the pool.

The CUDA driver itself refuses waits; `offending_call` finds the user's line in its error.
"""

import linecache
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import triton

from graphrt.capture.bindings import Bindings, launch_tensors
from graphrt.capture.errors import CaptureError
from graphrt.capture.pool import Memory
from graphrt.profiling import KernelMarks

# Files whose lines are not the user's.
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, triton.__file__, __file__)
)

# What the driver's errors mean here; the first that occurs in the message.
_HINTS = (
    (
        "not permitted when stream is capturing",
        "this call waits for the device, or takes memory from the driver: keep the value in a tensor, or do it before "
        "record()",
    ),
    (
        "legacy stream",
        "work went to the default stream: use torch.cuda.current_stream(), never a stream of an earlier time",
    ),
    (
        "uncaptured work",
        "it waits for work that was enqueued before the recording: order that before record(), not inside",
    ),
    (
        "generator not in capture mode",
        "this torch captures the default random generator only: draw from that, and seed it by torch.manual_seed",
    ),
    ("unjoined", "a forked stream was not joined: let the recording stream wait for it before the function returns"),
)


class CaptureWatch:
    """Sees every launch of graphrt's own during a capture, and runs it (a `graphrt.launch.Recorder`).

    stages   (name of the launch, first node, end of its nodes) in order
    refusal  what was refused; raised again at the end, should the function swallow it
    """

    def __init__(
        self,
        recording: str,
        *,
        is_capturing: Callable[[], bool],
        num_nodes: Callable[[], int | None],
        memory: Memory | None = None,
        bindings: Bindings | None = None,
    ) -> None:
        self.recording = recording
        self.stages: list[tuple[str, int, int]] = []
        self.refusal: CaptureError | None = None
        self._is_capturing, self._num_nodes = is_capturing, num_nodes
        self._memory, self._bindings = memory, bindings
        self.marks = KernelMarks(recording)

    def launch(self, name: str, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Check one launch, run it, and note which nodes of the graph it made."""
        if not self._is_capturing():
            self.refuse(
                f"{name} was called on a stream that is not capturing; it would run now and be missing from the "
                "replay. Call it on the stream that record() made current, or on one that waits for that stream"
            )
        tensors = launch_tensors(run, args)
        self._check_memory(name, tensors)
        first = self._num_nodes()
        with self.marks.mark(name):
            run(*args)
        end = self._num_nodes()
        if first is not None and end is not None:
            if end == first:
                self.refuse(
                    f"{name} left nothing in the graph; its kernels went to another stream. A launcher must ask for "
                    "torch.cuda.current_stream() at each call, never keep a stream"
                )
            self.stages.append((name, first, end))
        if self._bindings is not None:
            for path, t in tensors:
                self._bindings.add(f"{name} {path}", t)

    def compiling(self, kernel: str, variant: str) -> NoReturn:
        """A kernel would compile, or be loaded to the device, now."""
        self.refuse(
            f"kernel {kernel} is not ready: {variant} would be made now. Run the function once before with the same "
            "dtypes and sizes (record(warmup=1) does); arguments that become 1 or a multiple of 16 make a new variant"
        )

    def check_results(self, results: list[torch.Tensor]) -> None:
        """What the function returns must live as long as the graph."""
        self._check_memory("the function", [(f"result {i}", t) for i, t in enumerate(results)])

    def refuse(self, text: str) -> NoReturn:
        """Raise a CaptureError, and keep it."""
        self.refusal = CaptureError(f"recording {self.recording!r}: {text}")
        raise self.refusal

    def _check_memory(self, name: str, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self._memory is None:
            return
        for path, t in tensors:
            if self._memory.is_stray(t):
                self.refuse(
                    f"{path} of {name} ({list(t.shape)} {t.dtype}) was allocated during the recording, but outside of "
                    "its memory pool, and will be freed under the graph. Make it before record(), or on the stream "
                    "that record() made current"
                )


@contextmanager
def no_compiling(watch: CaptureWatch) -> Iterator[None]:
    """Let every Triton kernel of this thread that would compile, or load, raise through `watch.compiling`."""
    runtime, thread = triton.knobs.runtime, threading.get_ident()
    earlier = runtime.jit_cache_hook

    def on_compile(**info: Any) -> bool | None:
        # The hook is one for the process; other threads may compile what they like.
        if threading.get_ident() == thread:
            watch.compiling(str(info["fn"].name), str(info["repr"]))
        return bool(earlier(**info)) if earlier is not None else None

    def on_load(module: object, function: object, name: str, metadata_group: object, hash: str) -> None:
        if threading.get_ident() == thread:
            watch.compiling(name, "its machine code")

    loads = runtime.kernel_load_start_hook
    runtime.jit_cache_hook = on_compile
    loads.add(on_load)
    try:
        yield
    finally:
        runtime.jit_cache_hook = earlier
        loads.remove(on_load)


def offending_call(error: BaseException) -> str:
    """The user's innermost call on the way to the error, with its place; empty if no frame is the user's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    if not frames:
        return ""
    frame = frames[-1]
    return f" at `{_source(frame)}` ({os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name})"


def _source(frame: traceback.FrameSummary) -> str:
    """The text of the call alone where Python knows it, else its line."""
    line = linecache.getline(frame.filename, frame.lineno or 0)
    if frame.colno is None or frame.end_colno is None or frame.lineno != frame.end_lineno:
        return line.strip()
    # Columns count bytes.
    return line.encode()[frame.colno : frame.end_colno].decode(errors="replace")


def tuned_kernel(error: BaseException) -> str:
    """The name of the kernel whose automatic tuning led to the error, or an empty text."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        tuner = frame.f_locals.get("self")
        if isinstance(tuner, triton.runtime.Autotuner):
            return str(getattr(tuner.base_fn, "__name__", tuner.base_fn))
    return ""


def explain(error: Exception) -> str:
    """What failed while a graph was captured: the error, the call, and the way out."""
    kernel = tuned_kernel(error)
    if kernel:
        way_out = f"kernel {kernel} tunes itself at its first call with these sizes: call it before record()"
    else:
        text = str(error).lower()
        way_out = next((hint for pattern, hint in _HINTS if pattern in text), "")
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}{offending_call(error)}" + (f"; {way_out}" if way_out else "")
