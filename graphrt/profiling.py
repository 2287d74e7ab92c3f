"""What a profiler sees of graphrt: NVTX ranges on the host, and phases in the names of kernels.

Ranges are in the domain `graphrt`, one category a phase. They enclose what the host does: `stage`, a `replay`, a
`commit` of a runner, and launches made without a recording. Captured code has none, for a range inside a capture
would fire once, at the capture, and never in a replay; the capture itself has one around it. In a replay the kernels'
names tell the phases (`phase_of`).

What a range is about travels as its payload, never as a formatted text: an `nvtx` payload with the fields of `Work`,
or without numpy the batch alone. Whether a tool listens is settled when this module is imported. Without one the paths
that a step takes ask only whether `ranges` is None: tools/bench_nvtx.py has the figures.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import nvtx
import torch

from .capturing import is_capturing
from .environment import ANNOTATE
from .steps import Advance, Commit, Rows, StageSources

DOMAIN = "graphrt"
COLORS = {
    "capture": 0xFF9AA0A6,
    "stage": 0xFF4285F4,
    "replay": 0xFF673AB7,
    "verify": 0xFF34A853,
    "commit": 0xFFFBBC04,
    "flush": 0xFFEA8600,
    "fold": 0xFFEA4335,
}
CATEGORIES = tuple(COLORS)

LAUNCH_CATEGORIES = {
    "graphrt.stage": "stage",
    "graphrt.advance": "stage",
    "graphrt.align_eager_mask": "stage",
    "graphrt.align_state_indices": "stage",
    "graphrt.verify": "verify",
    "graphrt.deferred_verify": "verify",
    "graphrt.conv_verify": "verify",
    "graphrt.commit": "commit",
    "graphrt.flush": "flush",
    "graphrt.drain": "fold",
}
"""Category of each launch of graphrt's own (`graphrt.launch`)."""

UNKNOWN = -1
"""In a payload: only the device knows."""


class Work(NamedTuple):
    """The payload of a range."""

    batch: int = UNKNOWN
    """Rows of the step."""
    deferred: int = UNKNOWN
    """Rows whose commit is deferred; in a verify, a flush or a drain, rows whose pending records are folded."""
    eager: int = UNKNOWN
    """Rows that are folded at once."""


NO_WORK = Work()


class Ranges:
    """The ranges of one NVTX domain that a tool listens to."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._payload = _payload_maker(domain)
        self._attributes = lru_cache(maxsize=4096)(self._make_attributes)

    @contextmanager
    def range(self, category: str, message: str, work: Work) -> Iterator[None]:
        """One range, closed even if the block raises."""
        self._domain.push_range(self._attributes(category, message, work))
        try:
            yield
        finally:
            self._domain.pop_range()

    def _make_attributes(self, category: str, message: str, work: Work) -> Any:
        payload = None if work == NO_WORK else self._payload(work)
        return self._domain.get_event_attributes(
            message=message, color=COLORS[category], category=category, payload=payload
        )


def _payload_maker(domain: Any) -> Callable[[Work], Any]:
    """How to give nvtx the numbers: by field where it can, else the batch."""
    try:
        import numpy as np
    except ImportError:
        return lambda work: work.batch
    layout = np.dtype([(name, np.int32) for name in Work._fields])
    return lambda work: np.array(tuple(work), dtype=layout)


def _find_ranges() -> Ranges | None:
    domain = nvtx.get_domain(DOMAIN)
    # The stand-in that nvtx gives while no tool is attached makes no attributes.
    return Ranges(domain) if domain.get_event_attributes(message=DOMAIN) is not None else None


ranges: Ranges | None = _find_ranges()
"""None as long as no tool listens, as it was when graphrt was imported."""

_OFF = nullcontext()


def annotated(category: str, message: str, work: Work = NO_WORK) -> AbstractContextManager[None]:
    """A range on the host; nothing without a tool, and nothing while the current stream captures.

    Args:
        category: one of CATEGORIES. message: the same few texts for ever, for each is registered once.
        work: the payload.
    """
    if ranges is None or is_capturing():
        return _OFF
    return ranges.range(category, message, work)


def annotated_launch(name: str, args: tuple[Any, ...]) -> AbstractContextManager[None]:
    """The range of a launch of graphrt's own that no recording gets."""
    return annotated(LAUNCH_CATEGORIES.get(name, "stage"), name, work_of(name, args))


def work_of(name: str, args: tuple[Any, ...]) -> Work:
    """What a launch works on, read from its arguments without asking the device."""
    for value in args:
        if isinstance(value, Commit):
            return commit_work(value.batch, value.pending is not None, value.eager is not None or value.align)
        if isinstance(value, Rows):
            return Work(value.batch, value.batch if value.pending is not None else 0)
        if isinstance(value, StageSources):
            return Work(value.num_reqs)
        if isinstance(value, Advance):
            return Work(value.rows.state_indices.shape[0])
    if name in ("graphrt.flush", "graphrt.drain"):
        batch = args[0].shape[0]
        return Work(batch, batch, 0)
    return NO_WORK


def stage_work(num_reqs: int, eager: Any) -> Work:
    """The payload of a staging; an eager mask is counted where the host has it."""
    if eager is None:
        return Work(num_reqs, num_reqs, 0)
    if isinstance(eager, torch.Tensor) and eager.device.type != "cpu":
        return Work(num_reqs)
    count = sum(bool(row) for row in eager[:num_reqs])
    return Work(num_reqs, num_reqs - count, count)


def commit_work(batch: int, deferred: bool, chosen_on_device: bool) -> Work:
    """The payload of a commit: with an eager mask or in align mode only the device knows which rows it folds."""
    if not deferred:
        return Work(batch, 0, batch)
    return Work(batch) if chosen_on_device else Work(batch, batch, 0)


_KERNEL = re.compile(r"graphrt_(stage|verify|commit|flush|fold)(?:_|$)")


def phase_of(kernel: str) -> str | None:
    """Phase of a kernel by its name: the word after `graphrt_`. None for kernels that are not graphrt's."""
    found = _KERNEL.search(kernel)
    return found.group(1) if found else None


def _annotator() -> ModuleType | None:
    """Torch's annotations of captured kernels (2.12 and later, CUDA driver 13.1 and later), if they are wanted."""
    if not ANNOTATE.is_on():
        return None
    try:
        return import_module("torch.cuda._graph_annotations")
    except ImportError:
        _say_that_torch_has_none()
        return None


@cache
def _say_that_torch_has_none() -> None:
    had = f"torch {torch.__version__} has no annotations of captured kernels; 2.12 and later have"
    logging.getLogger("graphrt").warning("GRAPHRT_ANNOTATE=1: %s", had)


class KernelMarks:
    """Names in torch's profiler traces for the kernels of one capture; off unless `GRAPHRT_ANNOTATE=1`.

    A kernel node then carries `{"name": "graphrt.verify", "recording": ...}`, also a kernel of a library. The registry
    is torch's and one for the process: export with `torch.cuda.graph_annotations`, or
    `python -m torch.cuda._annotate_cuda_graph_trace`.
    """

    def __init__(self, recording: str) -> None:
        self._recording = recording
        self._torch = _annotator()
        if self._torch is not None:
            self._torch.enable_annotations()

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Around the launches that `name` makes on the capturing stream."""
        if self._torch is None:
            return _OFF
        marks: AbstractContextManager[Any] = self._torch.mark_kernels({"name": name, "recording": self._recording})
        return marks

    def resolve(self) -> None:
        """Before the capture ends."""
        if self._torch is not None:
            self._torch.resolve_pending_annotations()

    def follow(self, graph: torch.cuda.CUDAGraph) -> None:
        """After the graph is instantiated, whose numbers a trace has. Later versions of torch do it themselves."""
        remap = getattr(self._torch, "remap_to_exec_graph", None)
        if remap is not None:
            remap(graph)
