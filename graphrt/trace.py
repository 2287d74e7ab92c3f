"""Reading of torch profiler traces: the launches of recorded steps by phase, and lanes that Perfetto shows by phase.

A trace is the JSON that `torch.profiler` exports. What ran on the GPU are its `kernel`, `gpu_memcpy` and `gpu_memset`
events; a kernel's name carries its phase. On a machine without a GPU the launches of a tape are there as
`user_annotation` events, named like the launch.
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .profiling import CATEGORIES, LAUNCH_CATEGORIES, phase_of

OTHER = "other"
PHASES = (*(name for name in CATEGORIES if name not in ("capture", "replay")), OTHER)
"""Lanes from top to bottom: what a step's kernels belong to, then everything that is not graphrt's."""

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP_BEGINS = ("graphrt_stage_kernel", "graphrt.stage")
# A process of its own, under a number that no system gives.
_PROCESS = 1 << 30


@dataclass(frozen=True, slots=True)
class Slice:
    """One launch as it ran."""

    name: str
    phase: str
    start: float
    """Microseconds, from any origin."""
    length: float
    """Microseconds."""

    @property
    def end(self) -> float:
        return self.start + self.length


def load_trace(path: Path) -> dict[str, Any]:
    """A trace, also a compressed one.

    Raises:
        ValueError: if the file is no trace. OSError: if it cannot be read.
    """
    data = path.read_bytes()
    try:
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        return {"traceEvents": trace} if isinstance(trace, list) else dict(trace, traceEvents=trace["traceEvents"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"trace: expected a torch profiler trace in {path}, got no traceEvents ({error})") from error


def slices_of(trace: dict[str, Any]) -> list[Slice]:
    """The launches of a trace in the order of their start: those of the GPU, or of a tape where there are none."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    work = [event for event in events if event.get("cat") in _GPU_WORK]
    if work:
        found = [(event, phase_of(event["name"])) for event in work]
    else:
        tape = [event for event in events if event.get("cat") == "user_annotation"]
        found = [(event, LAUNCH_CATEGORIES.get(event["name"])) for event in tape]
    slices = [Slice(e["name"], phase or OTHER, float(e["ts"]), float(e.get("dur", 0))) for e, phase in found]
    return sorted(slices, key=lambda s: (s.start, -s.length))


def steps_of(slices: Iterable[Slice]) -> list[list[Slice]]:
    """The slices step by step; a step begins with its staging launch. What runs before the first step is left out."""
    steps: list[list[Slice]] = []
    for one in slices:
        if one.name.startswith(_STEP_BEGINS):
            steps.append([])
        if steps:
            steps[-1].append(one)
    return steps


def rows_of(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Slices in as few rows as it takes that none overlaps the one before it: programmatic launches do overlap."""
    rows: list[list[Slice]] = []
    for one in slices:
        free = next((row for row in rows if row[-1].end <= one.start), None)
        if free is None:
            rows.append([one])
        else:
            free.append(one)
    return rows


def with_lanes(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace and one process more, `graphrt by phase`, whose threads are the phases.

    A second row of a phase holds what overlaps the first: a viewer would hide it in one row.
    """
    slices = slices_of(trace)
    events: list[dict[str, Any]] = [_meta("process_name", 0, name="graphrt by phase")]
    lane = 0
    for phase in PHASES:
        for row in rows_of([one for one in slices if one.phase == phase]):
            first = all(event["args"].get("name") != phase for event in events)
            events.append(_meta("thread_name", lane, name=phase if first else f"{phase} (overlapping)"))
            events.append(_meta("thread_sort_index", lane, sort_index=lane))
            events += [_event(one, lane) for one in row]
            lane += 1
    return {**trace, "traceEvents": [*trace["traceEvents"], *events]}


def _meta(kind: str, lane: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": lane, "ts": 0, "args": args}


def _event(one: Slice, lane: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "graphrt",
        "name": one.name,
        "pid": _PROCESS,
        "tid": lane,
        "ts": one.start,
        "dur": one.length,
        "args": {"phase": one.phase},
    }
