"""`record`: the one way to make a recording, on any device."""

from collections.abc import Callable
from typing import Any

import torch

from graphrt import profiling
from graphrt.capture.bindings import Bindings, StaticTensors, check_named, wanted
from graphrt.capture.graph import record_graph
from graphrt.capture.recording import Recording, under_way
from graphrt.capture.tape import record_tape
from graphrt.checks import check_callable, check_count, check_flag, check_kind, check_step_device, fail


def record(
    fn: Callable[[], Any],
    *,
    device: str | torch.device,
    pool: Any = None,
    warmup: int = 1,
    name: str = "",
    check: bool | None = None,
    tensors: StaticTensors | None = None,
) -> Recording:
    """Record the launches of `fn()` on `device`, after running it `warmup` times for real.

    device  "cuda": a CUDA graph, captured on the side stream that the warm-up ran on. "cpu": a launch tape
    pool    a CUDA memory pool to share (`torch.cuda.graph_pool_handle()`, or another graph's `pool()`); the
            tape has no pool and ignores it
    warmup  real runs before the recording; 0 is for a function whose kernels are all compiled already
    name    for errors, dumps and profiles; the function's own name by default
    check   True: every replay first makes sure that the tensors of the launches are where they were recorded, and
            raises CaptureError if one was freed, reallocated, or had its `.data` swapped; a microsecond a tensor.
            None: as GRAPHRT_CHECK=1 says. On CUDA these are the tensors of graphrt's own launches (the layers' too)
    tensors for the check: static tensors by name, or a function that gives them as they are now, which also shows
            that their owner has replaced one: `tensors=lambda: {"hidden": model.hidden}`

    The recording itself executes nothing and changes nothing: no tensor, no random state; a replay draws
    fresh random numbers. On the CPU fresh results start as poison: NaN, the smallest integer, the largest one
    if unsigned, True for bool. Gradients are off in the warm-up and in the recording. What `fn` returns is
    `Recording.outputs`.

    Raises CaptureError if `fn` waits for a value on the host, needs a shape that depends on values, launches
    nothing, fails, or records or replays in turn; on CUDA also if a Triton kernel would compile or load, if a launch
    of graphrt's own goes to another stream, or takes or returns memory allocated meanwhile outside the pool. The error
    names the call or kernel; the stream, the pool and all tensors are then as before. An error of the warm-up comes
    through unchanged. ValueError for a bad argument.

    Not seen on CUDA: work of other libraries on a stream that does not capture, and memory outside the pool that
    only such work uses.

    Not seen by the CPU tape: host data that enters through torch.frombuffer or torch.from_dlpack, values read through
    a storage or `data_ptr()`, launches of a thread that ran before (starting one, or a thread pool's `submit`, is
    refused), and draws from a generator of the function's own, which older versions of torch cannot capture on CUDA.
    """
    place = check_step_device("device", device)
    check_callable("fn", fn)
    warmup = check_count("warmup", warmup, 0)
    check_kind("name", name, str)
    if check is not None:
        check_flag("check", check)
    if tensors is not None and not callable(tensors):
        check_named(tensors)
    if pool is not None and (not isinstance(pool, tuple) or len(pool) != 2):
        fail("pool", "a memory pool, such as torch.cuda.graph_pool_handle()", repr(pool))
    label = name or str(getattr(fn, "__name__", type(fn).__name__))
    bindings = Bindings(tensors) if wanted(check) else None
    with profiling.annotated("capture", label), under_way(label), torch.no_grad():
        if place.type == "cpu":
            recording = record_tape(fn, warmup, label, bindings)
        else:
            recording = record_graph(fn, place, pool, warmup, label, bindings)
    recording.bindings = bindings
    return recording
