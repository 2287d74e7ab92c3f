"""The CPU launch tape: a recording without a graph, with the rules of one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphrt import launch
from graphrt.capture.bindings import Bindings
from graphrt.capture.errors import CaptureError
from graphrt.capture.nodes import Node, Tape
from graphrt.capture.ops import CallHook, OperatorHook
from graphrt.capture.recording import Recording
from graphrt.capture.shadow import storage_key
from graphrt.capture.threads import one_thread
from graphrt.capture.topology import Edge, GraphNode, Topology


def record_tape(fn: Callable[[], Any], warmup: int, name: str, bindings: Bindings | None) -> Recording:
    """Run `fn` for real, then put its launches on a tape. See `graphrt.capture.record`."""
    for _ in range(warmup):
        fn()
    tape = Tape(name)
    random_state = torch.get_rng_state()
    try:
        with launch.record_into(tape), one_thread(tape), OperatorHook(tape), CallHook(tape):
            outputs = fn()
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"recording {name!r}: the function failed while it was recorded "
            f"({type(error).__name__}: {error}). Of the recording nothing has run; make it run eagerly first"
        ) from error
    finally:
        reseeded = not torch.equal(torch.get_rng_state(), random_state)
        torch.set_rng_state(random_state)
    if tape.refusal is not None:
        raise tape.refusal
    if reseeded:
        raise CaptureError(
            f"recording {name!r}: the function sets the state of the random generator, which a recording "
            "cannot hold; call torch.manual_seed before replay()"
        )
    if not tape.nodes:
        raise CaptureError(
            f"recording {name!r} is empty: the function launched nothing on the CPU; "
            "check that it works on the tensors it should, and calls graphrt through its public entry points"
        )
    if bindings is not None:
        for i, node in enumerate(tape.nodes):
            for t in (*node.inputs, *node.outputs):
                bindings.add(f"a tensor of launch {i}, {node.name},", t)
    return TapeRecording(tape, outputs, fn)


class TapeRecording(Recording):
    """Launches with their tensors, called again in order.

    A replay reads and writes the memory that each tensor had when it was recorded, as a CUDA graph does: a
    tensor whose `.data` is swapped later is still read at its old place.
    """

    def __init__(self, tape: Tape, outputs: Any, fn: Callable[[], Any]) -> None:
        super().__init__(tape.name, outputs, len(tape.nodes), tape.pool_bytes)
        self.nodes: tuple[Node, ...] = tuple(tape.nodes)
        self._calls = [node.call for node in self.nodes]
        # What the function closes over is what the tape reads.
        self._fn: Callable[[], Any] | None = fn

    @torch.no_grad()
    def _replay(self) -> None:
        for call in self._calls:
            call()

    def _release(self) -> None:
        self.nodes, self._calls, self._fn = (), [], None

    def _topology(self) -> Topology:
        memory: dict[int, int] = {}
        nodes = tuple(
            GraphNode(
                "launch",
                node.name,
                facts={
                    "inputs": [_describe_tensor(t, memory) for t in node.inputs],
                    "outputs": [_describe_tensor(t, memory) for t in node.outputs],
                },
            )
            for node in self.nodes
        )
        # A tape is one stream.
        edges = tuple(Edge(i, i + 1) for i in range(len(nodes) - 1))
        return Topology(self.name, "cpu", nodes, edges)


def _describe_tensor(t: Tensor, memory: dict[int, int]) -> dict[str, Any]:
    """Shape, dtype and a number for the memory: the same program gives the same numbers."""
    return {
        "shape": list(t.shape),
        "stride": list(t.stride()),
        "offset": t.storage_offset(),
        "dtype": str(t.dtype).removeprefix("torch."),
        "memory": memory.setdefault(storage_key(t), len(memory)),
    }
