"""What profiling ranges cost the host, in nanoseconds, with and without a tool that listens.

Question: can the ranges stay in the code that serves? Method: replays of a recording whose one launch does nothing,
through `Recording.replay`, against the same recording with the range taken out; and a launch without a recording,
against the bare call. Least of several loops. Alone it measures the state without a tool; under one
(`nsys profile -t nvtx python tools/bench_nvtx.py`) the ranges are real.

Without a tool a range is one comparison: 27 ns on a busy cloud CPU, November 2026, where the host work of a step takes
28 us and more (tools/bench_host.py). With a tool that keeps nothing (tests/nvtx_tool.c without its printing) it is
6.5 us there.

    python tools/bench_nvtx.py --json results.jsonl
"""

import argparse
import json
import platform
from collections.abc import Callable
from timeit import repeat

import torch
from arguments import output_file

from graphrt import profiling
from graphrt.capture import record
from graphrt.launch import launch


def nanoseconds(call: Callable[[], object], loops: int) -> float:
    """Least time of a call over several loops."""
    return 1e9 * min(repeat(call, number=loops, repeat=15)) / loops


def nothing() -> None:
    """A launch that does nothing: what is left is the host's path to it."""


def measure(loops: int) -> dict[str, float]:
    """Each path with its range and as it would be without, and what the range adds."""
    recording = record(lambda: launch("graphrt.commit", nothing), device="cpu", warmup=0, name="commit/64")
    found = profiling.ranges
    paths: dict[str, Callable[[], object]] = {
        "replay": recording.replay,
        "launch": lambda: launch("graphrt.commit", nothing),
    }
    result = {}
    for name, path in paths.items():
        result[name] = nanoseconds(path, loops)
        profiling.ranges = None
        result[f"{name}, no tool"] = nanoseconds(path, loops)
        profiling.ranges = found
    check = "profiling.ranges is None"
    result["the question itself"] = 1e9 * min(repeat(check, globals=globals(), number=loops, repeat=15)) / loops
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=20_000)
    parser.add_argument("--json", type=output_file, help="append the result, one JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    attached = profiling.ranges is not None
    costs = measure(args.loops)
    print(f"tool attached: {attached}")
    for name, cost in costs.items():
        print(f"{name:20} {cost:8.0f} ns")
    if args.json:
        result = {"tool": "bench_nvtx", "attached": attached, "cpu": platform.machine(), "ns": costs}
        with args.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
