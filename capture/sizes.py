"""Functions of a batch size, recorded for several sizes into one memory pool, and the choice among them."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphrt.capture.bindings import StaticTensors
from graphrt.capture.progress import CaptureProgress
from graphrt.capture.recorder import record
from graphrt.capture.recording import Recording
from graphrt.checks import check_flag, fail, plain_int

log = logging.getLogger("graphrt")

Work = Callable[[int], Any]
"""Enqueues the work of a step of n rows, on static tensors."""


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """What the recordings take, in bytes.

    per_graph  what each graph added to the shared memory pool, by "work/rows"
    total      their sum
    forecast   what `total` was expected to be: the peak of one run of each work at its largest size. None on the CPU.
    device     how much free device memory went away during the captures, the driver's own share included. 0 on the CPU.
    """

    per_graph: dict[str, int]
    total: int
    forecast: int | None
    device: int


def power_of_two_sizes(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def check_sizes(sizes: Iterable[int] | None, most: int, name: str = "capture_sizes") -> list[int]:
    """Capture sizes in rising order, each 1..most; powers of two where none are given.

    Raises:
        ValueError: naming the argument `name`, for a size outside, for what is no int, or none at all.
    """
    if sizes is None:
        return power_of_two_sizes(most)
    listed = isinstance(sizes, Iterable) and not isinstance(sizes, (str, bytes, Mapping, Tensor))
    given = list(sizes) if listed else []
    counts = [plain_int(size) for size in given]
    found = {count for count in counts if count is not None and 1 <= count <= most}
    if not counts or any(count not in found for count in counts):
        fail(name, f"at least one int, each in 1..{most} (max_num_reqs)", repr(given or sizes))
    return sorted(found)


class SizedRecordings:
    """Recordings of some works ("commit", ...) by batch size. They share one pool and are made largest first."""

    def __init__(
        self,
        works: Mapping[str, Work],
        most: int,
        device: torch.device,
        check: bool | None = None,
        tensors: StaticTensors | None = None,
    ) -> None:
        """`check` and `tensors` as for `record`: whether a replay makes sure that its tensors are where they were."""
        self._works = dict(works)
        self._check, self._tensors = check, tensors
        self._most = most
        self._device = device
        self._recordings: dict[str, dict[int, Recording]] = {}
        self._fits: dict[str, list[Recording | None]] = {}
        self._pool: Any = None
        self._forecast: dict[str, int] = {}
        self._device_bytes = 0
        self._said: set[tuple[str, str]] = set()
        self._closed = False
        self.last_miss_reason: str | None = None

    def capture(self, names: Sequence[str], sizes: Sequence[int], prepare: Callable[[int], None], show: bool) -> None:
        """Record what is not recorded yet. `prepare(n)` stages rows that change nothing, before each recording.

        Raises:
            RuntimeError: after `close`.
        """
        self._check_open("capture")
        check_flag("progress", show)
        wanted = [(n, name) for n in sorted(sizes, reverse=True) for name in dict.fromkeys(names)]
        missing = [(n, name) for n, name in wanted if n not in self._recordings.get(name, {})]
        if self._device.type == "cuda" and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        free, begin = _free_bytes(self._device), time.perf_counter()
        with CaptureProgress(len(missing), self._device, show) as progress:
            for n, name in missing:
                progress.update(f"{name}, {n} rows")
                prepare(n)
                self._record(name, n)
                progress.advance()
            self._device_bytes += max(free - _free_bytes(self._device), 0)
            memory = self.memory()
            progress.finish(len(missing), time.perf_counter() - begin, memory.total, memory.device)

    def _record(self, name: str, n: int) -> None:
        work = self._works[name]
        if name not in self._forecast and self._device.type == "cuda":
            self._forecast[name] = _peak_bytes(lambda: work(n), self._device)
        options = {"pool": self._pool, "name": f"{name}/{n}", "check": self._check, "tensors": self._tensors}
        recording = record(lambda: work(n), device=self._device, **options)
        self._recordings.setdefault(name, {})[n] = recording
        by_size = sorted(self._recordings[name].items())
        self._fits[name] = [next((r for size, r in by_size if size >= m), None) for m in range(self._most + 1)]

    def find(self, name: str, num_reqs: int) -> Recording | None:
        """The smallest recording that fits; None where there is none.

        Raises:
            ValueError: for a batch outside 0..most.
        """
        if type(num_reqs) is not int or not 0 <= num_reqs <= self._most:
            fail("num_reqs", f"0..{self._most} (max_num_reqs)", repr(num_reqs))
        fits = self._fits.get(name)
        return None if fits is None else fits[num_reqs]

    def replay(self, name: str, num_reqs: int) -> Recording | None:
        """Replay the smallest recording that fits; None where there is none, and `last_miss_reason` says why.

        Of no rows nothing is replayed: the first rows are still those of the step before.

        Raises:
            ValueError: for a batch outside 0..most.
            RuntimeError: before the first capture, and after `close`.
        """
        recording = self.find(name, num_reqs)
        if recording is None:
            self._miss(name, num_reqs)
            return None
        if num_reqs == 0:
            return None
        recording.replay()
        return recording

    def size_of(self, name: str, num_reqs: int) -> int | None:
        """Rows of the recording that a batch replays; None where it runs eagerly."""
        return min((size for size in self._recordings.get(name, {}) if size >= num_reqs), default=None)

    def _miss(self, name: str, num_reqs: int) -> None:
        self._check_open("replay")
        if not self._recordings:
            raise RuntimeError("replay before capture: nothing is recorded yet; call capture() first")
        if name in self._recordings:
            kind, largest = "size", max(self._recordings[name])
            self.last_miss_reason = f"{name} of {num_reqs} rows ran eagerly: the largest captured size is {largest}"
        else:
            kind, captured = "work", ", ".join(sorted(self._recordings))
            self.last_miss_reason = f"{name} of {num_reqs} rows ran eagerly: it was not captured (only {captured})"
        if (name, kind) not in self._said:
            self._said.add((name, kind))
            log.warning("graphrt: %s", self.last_miss_reason)

    def memory(self) -> GraphMemory:
        """Bytes by graph and in total, next to the forecast."""
        per_graph = {
            f"{name}/{n}": recording.pool_bytes
            for name, by_size in self._recordings.items()
            for n, recording in sorted(by_size.items(), reverse=True)
        }
        # The pool serves one graph at a time: the largest peak is what all of them need.
        forecast = max(self._forecast.values(), default=0) if self._device.type == "cuda" else None
        return GraphMemory(per_graph, sum(per_graph.values()), forecast, self._device_bytes)

    def close(self) -> None:
        """Give every recording's memory back. A second call does nothing."""
        self._closed = True
        for by_size in self._recordings.values():
            for recording in by_size.values():
                recording.close()
        self._recordings, self._fits, self._pool = {}, {}, None

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise RuntimeError(f"{verb} after close: the recordings are gone; make a new runner")


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.mem_get_info(device)[0]


def _peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Most memory that one run holds at a time, which is what its graph will add to an empty pool."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad():
        run()
    return torch.cuda.max_memory_allocated(device) - before
