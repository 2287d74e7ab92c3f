"""Host cost of a step: how long Python is busy with `stage` and with a replay of the commit, in microseconds.

Question: does staging from the host plus a replay stay under 25 us? Shapes: two small layers (the host does not see
the sizes), B rows, and the forms in which an engine may hold its metadata. Method: median over many steps, each
started on an idle device, so that nothing of the device's time is in it; `launch` is the same staging launched by
value from Python, which a recording may hold and which the ring of pinned blocks replaces.

    python tools/bench_host.py --rows 1 64 256 --json results.jsonl
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from outputs import output_file
from rich.console import Console
from rich.table import Table

from graphrt import KDADeferredCommitContext, KDALayer, allocate_records, backends
from graphrt.capture import CommitRunner, StepInputs
from graphrt.errors import error_counter
from graphrt.steps import StageSources

WINDOW, HEADS, DIM, WIDTH = 8, 2, 128, 4
FORMS = ("lists", "host tensors", "device tensors", "lists, counts on the device")


def make_runner(rows: int) -> CommitRunner:
    """A recorded runner over two layers with `rows` record rows."""
    layers = [
        KDALayer(
            kv_cache=(
                torch.zeros(rows + 1, 3 * HEADS * DIM, WIDTH - 1 + WINDOW, dtype=torch.bfloat16, device="cuda"),
                torch.zeros(rows + 1, HEADS, DIM, DIM, device="cuda"),
            ),
            recoverssm_records=allocate_records(rows, HEADS, WINDOW, DIM, torch.bfloat16, "cuda"),
            A_log=torch.zeros(HEADS, device="cuda"),
            dt_bias=torch.zeros(HEADS * DIM, device="cuda"),
            local_num_heads=HEADS,
            head_dim=DIM,
            gate_lower_bound=-5.0,
        )
        for _ in range(2)
    ]
    context = KDADeferredCommitContext.create(layers, spec_query_len=WINDOW, max_num_reqs=rows, conv_width=WIDTH)
    pending = torch.zeros(rows, dtype=torch.int32, device="cuda")
    runner = CommitRunner(context, pending, StepInputs(rows, WINDOW, torch.device("cuda")), [rows])
    runner.capture(progress=False)
    return runner


def arguments(form: str, rows: int) -> dict[str, Any]:
    """A step's metadata in one of FORMS."""
    values: dict[str, Any] = {
        "state_indices": list(range(1, rows + 1)),
        "record_rows": list(range(rows)),
        "query_start_loc": [b * WINDOW for b in range(rows + 1)],
        "num_accepted_tokens": [3] * rows,
    }
    device = "cuda" if form == "device tensors" else "cpu"
    if "tensors" in form:
        return {name: torch.tensor(v, dtype=torch.int32, device=device) for name, v in values.items()}
    if "device" in form:
        values["num_accepted_tokens"] = torch.tensor(values["num_accepted_tokens"], dtype=torch.int32, device="cuda")
    return values


def median_us(calls: list[Callable[[], None]], steps: int) -> list[float]:
    """Median microseconds of each call, made in order in each step."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(steps):
        torch.cuda.synchronize()
        for times, call in zip(taken, calls, strict=True):
            begin = perf_counter()
            call()
            times.append(1e6 * (perf_counter() - begin))
    return [median(times[steps // 10 :]) for times in taken]


def measure(rows: int, steps: int) -> list[dict[str, Any]]:
    """One result for each form."""
    runner, results = make_runner(rows), []
    inputs = runner.inputs
    for form in FORMS:
        given = arguments(form, rows)
        stage = partial(inputs.stage, num_reqs=rows, **given)
        stage()
        runner.commit(rows)
        # The shipped path must have staged what was given, or its time means nothing.
        if inputs.num_accepted_tokens.tolist() != [3] * rows or inputs.state_indices.tolist() != [*range(1, rows + 1)]:
            raise RuntimeError(f"staging from {form} gave other values")
        stage_us, replay_us = median_us([stage, partial(runner.commit, rows)], steps)
        result = {"form": form, "rows": rows, "stage_us": stage_us, "replay_us": replay_us, "launch_us": None}
        if form == "device tensors":
            sources = StageSources(num_reqs=rows, **given)
            launch = partial(backends.by_device(inputs.device).stage, inputs.rows(rows), sources, None)
            [result["launch_us"]] = median_us([partial(launch, error_counter(inputs.device))], steps)
        results.append(result)
    memory = runner.memory()
    results.append({"rows": rows, "pool_bytes": memory.total, "device_bytes": memory.device, "graphs": 3})
    runner.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=output_file, help="append the results, one JSON object a line")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_host: needs a CUDA device", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name()
    table = Table("rows", "metadata as", "stage us", "replay us", "sum us", "launch us", title=f"Host cost, {name}")
    for rows in args.rows:
        for result in measure(rows, args.steps):
            if args.json:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"tool": "bench_host", "device": name, **result}) + "\n")
            if "form" in result:
                stage_us, replay_us, launch_us = (result[key] for key in ("stage_us", "replay_us", "launch_us"))
                cells = (stage_us, replay_us, stage_us + replay_us, launch_us)
                table.add_row(str(rows), result["form"], *("" if v is None else f"{v:.1f}" for v in cells))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
