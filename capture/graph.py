"""A recording on CUDA: one captured graph, its memory pool, and a clean stream if the capture fails."""

import contextlib
import functools
import gc
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphrt import launch
from graphrt.capture import driver
from graphrt.capture.bindings import Bindings
from graphrt.capture.errors import CaptureError
from graphrt.capture.guards import CaptureWatch, explain, no_compiling
from graphrt.capture.pool import Memory, pool_bytes, pool_ranges
from graphrt.capture.recording import Recording
from graphrt.capture.shadow import tensors_in
from graphrt.capture.topology import Edge, GraphNode, Topology
from graphrt.capturing import is_capturing

_one_capture_at_a_time = threading.Lock()
# Open recordings in each shared pool that has had one. At zero torch retires the pool and will not take it again.
_users: dict[tuple[int, ...], int] = {}
# Broken-off graphs that keep a shared pool alive until a recording in it succeeds, by pool.
_keepers: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}


@functools.cache
def capture_stream(device_index: int) -> torch.cuda.Stream:
    """The side stream of every warm-up and capture on a device: libraries key their work space by stream."""
    return torch.cuda.Stream(device_index)


def record_graph(
    fn: Callable[[], Any], device: torch.device, pool: Any, warmup: int, name: str, bindings: Bindings | None
) -> Recording:
    """Warm `fn` up on the capture stream, then capture it there. See `graphrt.capture.record`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index), _one_capture_at_a_time:
        if is_capturing():
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
            return _capture(fn, stream, pool, name, bindings)
        finally:
            caller.wait_stream(stream)


def _capture(
    fn: Callable[[], Any], stream: torch.cuda.Stream, pool: Any, name: str, bindings: Bindings | None
) -> Recording:
    shared_pool = pool
    if shared_pool is not None and _users.get(tuple(shared_pool)) == 0:
        raise CaptureError(
            f"recording {name!r}: torch has retired this pool, for the last recording in it was closed; "
            "keep one open, or take a new torch.cuda.graph_pool_handle()"
        )
    pool = pool or torch.cuda.graph_pool_handle()
    before_bytes = pool_bytes(pool) if shared_pool else 0
    watch = CaptureWatch(
        name,
        is_capturing=is_capturing,
        num_nodes=functools.partial(_nodes_so_far, stream.cuda_stream),
        memory=Memory(pool),
        bindings=bindings,
    )
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with _collector_paused(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = _watched(fn, watch)
        except Exception as error:
            what = explain(error)
            # The frames of the error would keep the tensors of the broken capture alive.
            traceback.clear_frames(error.__traceback__)
            _break_off(graph, stream, shared_pool)
            if isinstance(error, CaptureError):
                raise
            raise _failed(name, what) from error
        except BaseException:
            _break_off(graph, stream, shared_pool)
            raise
        try:
            _end(graph)
        except RuntimeError as error:
            _clean_up(graph, stream, shared_pool)
            raise _failed(name, explain(error)) from error
    num_nodes = driver.num_nodes(graph.raw_cuda_graph())
    if num_nodes == 0:
        _discard(graph, shared_pool)
        raise CaptureError(
            f"recording {name!r} is empty: the function launched nothing on the capture stream; "
            "launch on torch.cuda.current_stream(), never on a stream remembered from an earlier call"
        )
    graph.instantiate()
    watch.marks.follow(graph)
    _let_go(shared_pool)
    if bindings is not None:
        bindings.drop(pool_ranges(pool))
    recording = GraphRecording(
        name, outputs, num_nodes, pool_bytes(pool) - before_bytes, graph, fn, tuple(watch.stages)
    )
    if shared_pool is not None:
        recording.count_as_user(tuple(shared_pool))
    return recording


def _watched(fn: Callable[[], Any], watch: CaptureWatch) -> Any:
    """What `fn` returns, with every guard on for its length."""
    try:
        with no_compiling(watch), launch.record_into(watch):
            outputs = fn()
    finally:
        watch.marks.resolve()
    # A refusal counts even where the function swallowed it.
    if watch.refusal is not None:
        raise watch.refusal
    watch.check_results(tensors_in(outputs))
    return outputs


def _nodes_so_far(stream: int) -> int | None:
    """How many nodes the capture on a stream has, or None where the driver does not tell."""
    try:
        graph = driver.capturing_graph(stream)
        return None if graph is None else driver.num_nodes(graph)
    except (RuntimeError, AttributeError):
        return None


def _end(graph: torch.cuda.CUDAGraph) -> None:
    # An empty graph makes torch warn; here it becomes an error with a name.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _failed(name: str, what: str) -> CaptureError:
    return CaptureError(
        f"recording {name!r}: the function failed while it was captured. {what}. "
        "Inside a recording nothing may wait for the device (.item(), .cpu(), printing a tensor), have a "
        "shape that depends on values, compile a kernel, or leave a forked stream unjoined. Stream and pool "
        "are usable again"
    )


def _break_off(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, shared_pool: Any) -> None:
    """End a capture whose function raised, whether or not CUDA has already invalidated it."""
    try:
        _end(graph)
    except RuntimeError:
        _clean_up(graph, stream, shared_pool)
    else:
        _discard(graph, shared_pool)


def _clean_up(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, shared_pool: Any) -> None:
    """Undo what a failed end of capture leaves in torch's allocators, so that the pool takes the next graph.

    The failed end took the stream out of capture, but torch ends its own bookkeeping (device pool, pinned pool, random
    generators) only behind an end that succeeds. So it gets one: of an empty capture begun by hand.
    """
    driver.begin_capture(stream.cuda_stream)
    _end(graph)
    _discard(graph, shared_pool)
    torch.cuda.empty_cache()


def _discard(graph: torch.cuda.CUDAGraph, shared_pool: Any) -> None:
    """Drop a graph that is of no use, but keep a caller's pool usable: torch retires one when its last graph goes."""
    if shared_pool is None:
        graph.reset()
        return
    _let_go(shared_pool)  # only now: the pool always has one user
    _keepers[tuple(shared_pool)] = graph


def _let_go(shared_pool: Any) -> None:
    """Drop the graph that keeps the pool in use: it has one of its own again, or gets another such graph."""
    if shared_pool is not None and (keeper := _keepers.pop(tuple(shared_pool), None)) is not None:
        keeper.reset()


def _leave(pool: tuple[int, ...]) -> None:
    _users[pool] -= 1


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
        stages: tuple[tuple[str, int, int], ...] = (),
    ) -> None:
        super().__init__(name, outputs, num_nodes, pool_bytes)
        self._graph: Any = graph
        # The graph holds addresses only; what the function closes over keeps the tensors and kernels alive.
        self._fn: Callable[[], Any] | None = fn
        self._stages = stages
        self._leave_pool: weakref.finalize[..., Any] | None = None

    def count_as_user(self, pool: tuple[int, ...]) -> None:
        """This recording keeps a shared pool alive, until it is closed or collected."""
        _users[pool] = _users.get(pool, 0) + 1
        self._leave_pool = weakref.finalize(self, _leave, pool)

    def _replay(self) -> None:
        self._graph.replay()

    def _release(self) -> None:
        # A launch may still be running.
        torch.cuda.synchronize()
        self._graph.reset()
        if self._leave_pool is not None:
            self._leave_pool()
        self._graph, self._fn = None, None

    def _topology(self) -> Topology:
        graph = self._graph.raw_cuda_graph()
        handles = driver.nodes(graph)
        position = {handle: i for i, handle in enumerate(handles)}
        nodes = tuple(self._node(i, handle) for i, handle in enumerate(handles))
        edges = tuple(Edge(position[s], position[t], programmatic) for s, t, programmatic in driver.edges(graph))
        return Topology(self.name, "cuda", nodes, tuple(sorted(edges)))

    def _node(self, i: int, handle: int) -> GraphNode:
        node_type = driver.node_type(handle)
        stage = next((name for name, first, end in self._stages if first <= i < end), "")
        name, facts = driver.DETAILS[node_type](handle) if node_type in driver.DETAILS else (node_type, {})
        return GraphNode(node_type, name, stage, facts)
