"""Host cost of a step: how long Python is busy with `stage` and with a replay of the commit, in microseconds.

Question: does staging from the host plus a replay stay under 25 us? Shapes: two small layers (the host does not see
the sizes), B rows, and the forms in which an engine may hold its metadata. Every step brings other values: slots and
record rows in another order, ragged windows, other counts.

Method: each step starts on an idle device, so that nothing of the device's time is in it. Only one step in four
records an event, so a sample is the mean of eight steps. The forms take turns, a sample each, round after round, for
the clock of a host in a cloud wanders: in a tenth of the rounds it may be half as fast again as in the next. Reported
are the medians of the fastest tenth, and the sum's median in the slowest. The same tenth's `reference`, a bare replay
of a graph of one launch, says how fast the host was. `launch` is the staging launched by value from Python, which a
recording may hold and which the ring of pinned blocks replaces.

    python tools/bench_host.py --rows 1 64 256 --json results.jsonl
"""

import argparse
import json
import random
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from arguments import output_file
from rich.console import Console
from rich.table import Table

from graphrt import KDADeferredCommitContext, KDALayer, allocate_records, backends
from graphrt.capture import CommitRunner, StepInputs, record
from graphrt.errors import error_counter
from graphrt.steps import StageSources

WINDOW, HEADS, DIM, WIDTH = 8, 2, 128, 4
FORMS = ("lists", "arrays", "host tensors", "device tensors", "lists, counts on the device")
SAMPLE = 8
WINDOWS = 10
VARIANTS = 16


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


def random_step(rng: random.Random, rows: int) -> dict[str, list[int]]:
    """A step's metadata as lists of ints."""
    lengths = [rng.randint(1, WINDOW) for _ in range(rows)]
    return {
        "state_indices": rng.sample(range(1, rows + 1), rows),
        "record_rows": rng.sample(range(rows), rows),
        "query_start_loc": [0, *accumulate(lengths)],
        "num_accepted_tokens": [rng.randint(0, length) for length in lengths],
    }


def in_form(form: str, step: dict[str, list[int]]) -> dict[str, Any]:
    """The same in one of FORMS."""
    if form == "arrays":
        return {name: array("i", values) for name, values in step.items()}
    on_device = {name: torch.tensor(values, dtype=torch.int32, device="cuda") for name, values in step.items()}
    if form == "device tensors":
        return on_device
    if form == "host tensors":
        return {name: t.cpu() for name, t in on_device.items()}
    return step | {"num_accepted_tokens": on_device["num_accepted_tokens"]} if "device" in form else dict(step)


@dataclass(eq=False)
class Case:
    """One row of the table: a step's two calls over and over, and what they took."""

    form: str
    rows: int
    runner: CommitRunner
    stage: list[float] = field(default_factory=list)
    """Microseconds, a mean of SAMPLE steps for each round; as `replay`."""
    replay: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.form)
        steps = [random_step(rng, self.rows) for _ in range(VARIANTS)]
        self.given = [in_form(self.form, step) for step in steps]
        inputs = self.runner.inputs
        for step, given in zip(steps, self.given, strict=True):
            inputs.stage(num_reqs=self.rows, **given)
            # The shipped path must have staged what was given, or its time means nothing.
            if any(getattr(inputs, name).tolist() != values for name, values in step.items()):
                raise RuntimeError(f"staging from {self.form} gave other values")
            self.runner.commit(self.rows)
        self._next = cycle(self.given)

    def sample(self) -> None:
        """SAMPLE steps."""
        stage, commit, rows = self.runner.inputs.stage, self.runner.commit, self.rows
        staged, replayed = [], []
        for _ in range(SAMPLE):
            given = next(self._next)
            torch.cuda.synchronize()
            begin = perf_counter()
            stage(num_reqs=rows, **given)
            middle = perf_counter()
            commit(rows)
            end = perf_counter()
            staged.append(middle - begin)
            replayed.append(end - middle)
        self.stage.append(1e6 * fmean(staged))
        self.replay.append(1e6 * fmean(replayed))

    def windows(self) -> list[tuple[float, float, int]]:
        """Medians of `stage` and `replay` in each tenth of the rounds, and which tenth it is."""
        size = max(len(self.stage) // WINDOWS, 1)
        begins = range(0, len(self.stage) - size + 1, size)
        return [(median(self.stage[b : b + size]), median(self.replay[b : b + size]), b) for b in begins]


def mean_us(call: Callable[[], object]) -> float:
    """Microseconds of a call on an idle device."""
    taken = []
    for _ in range(SAMPLE):
        torch.cuda.synchronize()
        begin = perf_counter()
        call()
        taken.append(perf_counter() - begin)
    return 1e6 * fmean(taken)


def measure(cases: list[Case], steps: int) -> list[float]:
    """Let the cases take turns; the reference of each round."""
    flag = torch.zeros(1, device="cuda")
    reference = record(flag.zero_, device="cuda", name="reference").launcher()
    rounds = max(steps // SAMPLE, 1)
    warmup = rounds // WINDOWS
    times = []
    for number in range(warmup + rounds):
        times.append(mean_us(reference))
        for case in cases:
            case.sample()
            if number < warmup:
                case.stage.clear()
                case.replay.clear()
    return times[warmup:]


def by_value_us(case: Case, steps: int) -> float:
    """Median microseconds of the staging launched by value."""
    inputs = case.runner.inputs
    sources = StageSources(num_reqs=case.rows, **case.given[0])
    launch = partial(backends.by_device(inputs.device).stage, inputs.rows(case.rows), sources, None)
    return median(mean_us(partial(launch, error_counter(inputs.device))) for _ in range(max(steps // SAMPLE, 1)))


def results_of(case: Case, reference: list[float], launch_us: float | None) -> dict[str, Any]:
    """What the table and the file say of a case."""
    windows = case.windows()
    stage_us, replay_us, begin = min(windows, key=lambda window: window[0] + window[1])
    size = max(len(reference) // WINDOWS, 1)
    return {
        "form": case.form,
        "rows": case.rows,
        "stage_us": stage_us,
        "replay_us": replay_us,
        "slowest_us": max(window[0] + window[1] for window in windows),
        "reference_us": median(reference[begin : begin + size]),
        "launch_us": launch_us,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=output_file, help="append the results, one JSON object a line")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device, and torch finds none")
    name = torch.cuda.get_device_name()
    runners = {rows: make_runner(rows) for rows in args.rows}
    cases = [Case(form, rows, runner) for rows, runner in runners.items() for form in FORMS]
    reference = measure(cases, args.steps)
    results = [
        results_of(case, reference, by_value_us(case, args.steps // 10) if case.form == "device tensors" else None)
        for case in cases
    ]
    columns = ("stage us", "replay us", "sum us", "slowest us", "reference us", "launch us")
    table = Table("rows", "metadata as", *columns, title=f"Host cost, {name}")
    for result in results:
        stage_us, replay_us = result["stage_us"], result["replay_us"]
        rest = (result[key] for key in ("slowest_us", "reference_us", "launch_us"))
        cells = (stage_us, replay_us, stage_us + replay_us, *rest)
        table.add_row(str(result["rows"]), result["form"], *("" if v is None else f"{v:.1f}" for v in cells))
    for rows, runner in runners.items():
        memory = runner.memory()
        results.append({"rows": rows, "pool_bytes": memory.total, "device_bytes": memory.device, "graphs": 3})
        runner.close()
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"tool": "bench_host", "device": name, **result}) + "\n" for result in results)
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
