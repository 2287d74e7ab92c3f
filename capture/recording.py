"""What every recording offers, whatever device it was made on."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from os import PathLike
from pathlib import Path
from typing import Any

from graphrt import profiling
from graphrt.capture.bindings import Bindings
from graphrt.capture.errors import CaptureError
from graphrt.capture.topology import Topology
from graphrt.checks import check_path, fail
from graphrt.fixed import Fixed

_under_way: ContextVar[str | None] = ContextVar("graphrt_recording_under_way", default=None)


@contextmanager
def under_way(name: str) -> Iterator[None]:
    """Mark this thread as recording `name`; a second recording inside it is refused."""
    outer = _under_way.get()
    if outer is not None:
        raise CaptureError(
            f"recording {name!r} was started inside recording {outer!r}: recordings do not nest; "
            "record the inner function first, or call it directly"
        )
    token = _under_way.set(name)
    try:
        yield
    finally:
        _under_way.reset(token)


def is_under_way() -> bool:
    """Whether this thread is inside `record`: in a warm-up run, or in the recording itself."""
    return _under_way.get() is not None


class Recording(Fixed, ABC):
    """A recorded function: `replay` runs it again on the tensors it was recorded with.

    name        the caller's name for it, used in every error
    outputs     what the function returned while it was recorded; its tensors get their values at each replay
    num_nodes   launches that a replay makes (views and mere allocations are not launches)
    pool_bytes  bytes of results that the recording owns; on CUDA, the bytes that it added to its memory pool
    """

    def __init__(self, name: str, outputs: Any, num_nodes: int, pool_bytes: int) -> None:
        self.name = name
        self.outputs = outputs
        self.num_nodes = num_nodes
        self.pool_bytes = pool_bytes
        # In check mode: the memory that every replay expects.
        self.bindings: Bindings | None = None
        self._closed = False

    def replay(self) -> None:
        """Run every recorded launch once, in order, on the live contents of the recorded tensors.

        RuntimeError after `close`, and inside another recording; in check mode also if a tensor has moved.
        """
        if self._closed:
            self._check_open("replay")
        outer = _under_way.get()
        if outer is not None:
            raise CaptureError(
                f"replay of {self.name!r} inside recording {outer!r}: a recording holds launches, not "
                "replays; call the recorded function itself there"
            )
        if self.bindings is not None:
            self.bindings.check(self.name)
        if profiling.ranges is None:
            self._replay()
            return
        with profiling.annotated("replay", self.name):
            self._replay()

    def launcher(self) -> Callable[[], None]:
        """A replay that asks nothing, for an owner who replays between `record` and `close` only; checks stay on."""
        return self._replay if self.bindings is None and profiling.ranges is None else self.replay

    def close(self) -> None:
        """Give back the memory of the recording and forget its tensors. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.outputs, self.bindings = None, None
        self._release()

    def topology(self) -> Topology:
        """Nodes, kernels and edges without addresses: the same program has the same topology in every process.

        RuntimeError after `close`.
        """
        self._check_open("topology")
        return self._topology()

    def dump(self, path: str | PathLike[str]) -> None:
        """Write the recording as JSON (`.json`) or as a Graphviz graph (`.dot`), by the suffix of `path`.

        Both hold the topology; programmatic edges are dashed in the graph. The JSON has `pool_bytes` besides.
        ValueError for another suffix, RuntimeError after `close`.
        """
        self._check_open("dump")
        target = Path(check_path("path", path, "a name that ends in .json or .dot"))
        if target.suffix == ".json":
            facts = {**self._topology().as_dict(), "pool_bytes": self.pool_bytes}
            target.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        elif target.suffix == ".dot":
            target.write_text(self._topology().dot(), encoding="utf-8")
        else:
            fail("path", "a name that ends in .json or .dot", repr(str(path)))

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise RuntimeError(f"{verb} after close: recording {self.name!r} is closed; record the function again")

    @abstractmethod
    def _replay(self) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...

    @abstractmethod
    def _topology(self) -> Topology: ...
