"""A recording on CUDA: one captured graph, its memory pool, and a clean stream if the capture fails."""

import contextlib
import functools
import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from graphrt.capture import driver
from graphrt.capture.errors import CaptureError
from graphrt.capture.recording import Recording

_one_capture_at_a_time = threading.Lock()


@functools.cache
def capture_stream(device_index: int) -> torch.cuda.Stream:
    """The side stream of every warm-up and capture on a device: libraries key their work space by stream."""
    return torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]


def record_graph(fn: Callable[[], Any], device: torch.device, pool: Any, warmup: int, name: str) -> Recording:
    """Warm `fn` up on the capture stream, then capture it there. See `graphrt.capture.record`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index), _one_capture_at_a_time:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"recording {name!r}: the current stream is already capturing; end that capture first, "
                "or call the function itself there"
            )
        stream, caller = capture_stream(index), torch.cuda.current_stream()
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                fn()
        stream.synchronize()
        try:
            return _capture(fn, index, stream, pool, name)
        finally:
            caller.wait_stream(stream)


def _capture(fn: Callable[[], Any], index: int, stream: torch.cuda.Stream, pool: Any, name: str) -> Recording:
    shared = pool is not None
    pool = pool if shared else torch.cuda.graph_pool_handle()
    before_bytes = _pool_bytes(pool) if shared else 0
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with _collector_paused(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = fn()
        except Exception as error:
            # The frames of the error would keep the tensors of the broken capture alive.
            traceback.clear_frames(error.__traceback__)
            _break_off(graph, stream)
            if isinstance(error, CaptureError):
                raise
            raise _failed(name, error) from error
        except BaseException:
            _break_off(graph, stream)
            raise
        try:
            _end(graph)
        except RuntimeError as error:
            _clean_up(graph, stream)
            raise _failed(name, error) from error
    num_nodes = len(driver.node_types(graph.raw_cuda_graph()))
    if num_nodes == 0:
        graph.reset()
        raise CaptureError(
            f"recording {name!r} is empty: the function launched nothing on the capture stream; "
            "launch on torch.cuda.current_stream(), never on a stream remembered from an earlier call"
        )
    graph.instantiate()
    return GraphRecording(name, outputs, num_nodes, _pool_bytes(pool) - before_bytes, graph, fn)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    # An empty graph makes torch warn; here it becomes an error with a name.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _failed(name: str, error: Exception) -> CaptureError:
    return CaptureError(
        f"recording {name!r}: the function failed while it was captured ({type(error).__name__}: {error}). "
        "Inside a recording nothing may wait for the device (.item(), .cpu(), printing a tensor), have a "
        "shape that depends on values, compile a kernel, or leave a forked stream unjoined. Stream and pool "
        "are usable again"
    )


def _break_off(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """End a capture whose function raised, whether or not CUDA has already invalidated it."""
    try:
        _end(graph)
    except RuntimeError:
        _clean_up(graph, stream)
    else:
        graph.reset()


def _clean_up(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Undo what a failed end of capture leaves in torch's allocators, so that the pool takes the next graph.

    The failed end took the stream out of capture, but torch ends its own bookkeeping (device pool, pinned pool, random
    generators) only behind an end that succeeds. So it gets one: of an empty capture begun by hand.
    """
    driver.begin_capture(stream.cuda_stream)
    _end(graph)
    graph.reset()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Collect before a capture and not during one: destroying an old graph or module would spoil it."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _segments(pool: Any) -> list[dict[str, Any]]:
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return [s for s in segments if tuple(s["segment_pool_id"]) == tuple(pool)]


def _pool_bytes(pool: Any) -> int:
    return sum(int(s["total_size"]) for s in _segments(pool))


class GraphRecording(Recording):
    """A CUDA graph. `replay` launches it on the current stream and waits for nothing."""

    def __init__(
        self,
        name: str,
        outputs: Any,
        num_nodes: int,
        pool_bytes: int,
        graph: torch.cuda.CUDAGraph,
        fn: Callable[[], Any],
    ) -> None:
        super().__init__(name, outputs, num_nodes, pool_bytes)
        self._graph: Any = graph
        # The graph holds addresses only; what the function closes over keeps the tensors and kernels alive.
        self._fn: Callable[[], Any] | None = fn

    def _replay(self) -> None:
        self._graph.replay()

    def _release(self) -> None:
        # A launch may still be running.
        torch.cuda.synchronize()
        self._graph.reset()
        self._graph, self._fn = None, None

    def _describe(self) -> dict[str, Any]:
        types = driver.node_types(self._graph.raw_cuda_graph())
        return {
            "name": self.name,
            "device": "cuda",
            "num_nodes": self.num_nodes,
            "pool_bytes": self.pool_bytes,
            "nodes": [{"index": i, "type": node_type} for i, node_type in enumerate(types)],
        }

    def _write_dot(self, target: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._graph.debug_dump(str(target))
        if not target.exists():
            raise RuntimeError(f"dump: CUDA wrote no graph to {str(target)!r}; does its folder exist?")
