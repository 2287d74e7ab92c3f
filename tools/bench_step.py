"""How long is a decode step of the FP32 backend, eager and deferred, against what the memory allows?

Shape (default): L = 69 layers, H = 12, K = V = 128, Q = 8, n = 4 records pending, bf16 activations shared by the
layers, checkpoints and records of distinct pages per layer. Every figure is the median of CUDA graph replays, timed
with events.

Columns, µs for all layers:
- deferred: the deferred verifies, programmatic but for the first. The commit of such a step folds nothing.
- eager: stock verifies, then the fold of n records.
- verify: stock verifies alone. fold: the fold alone (a commit or a flush).
- host: of one eager launch of the verify, host time.
- floor: bytes of the deferred step (state in and out, n KiB + Q KiB of records, 1.25 Q KiB of activations per
  request, head and layer) over the card's in-place read-and-write rate, measured first; two_pass: the state alone,
  what a fold needs.

    python tools/bench_step.py [--batch 1 4 16 64] [--pending 4] [--json PATH] [--plot PATH] [--choose PATH]

The table that ships with the package, from kept results, without a GPU:

    python tools/bench_step.py --from tools/results/h200/step.json --choose graphrt/choice.json
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch

from graphrt.choice import StepShape, first_deferred, load_table

K = 128
KIB = 1024


def graph_us(run, repeats: int = 20) -> float:
    """Median time of a replay of `run`, microseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def in_place_rate() -> float:
    """Bytes a second, read plus written, of an in-place update of 4 GiB."""
    x = torch.randn(1 << 30, device="cuda")
    return 2 * x.numel() * 4 / (graph_us(lambda: x.mul_(1.0000001), 10) * 1e-6)


def host_us(run, launches: int) -> float:
    """Host time of one of the launches of `run`, microseconds."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / launches * 1e6


class Model:
    """Static tensors of L layers for up to `batch` requests, and the two kinds of step over them."""

    def __init__(self, layers, heads, q, batch, n, dtype=torch.bfloat16):
        self.q, self.batch, self.n = q, batch, n
        device = "cuda"

        def scratch(*shape, kind):
            return torch.randn(batch + 1, *shape, device=device, dtype=kind)[1:]

        self.states = [torch.randn(batch + 1, heads, K, K, device=device) for _ in range(layers)]
        self.corrections = [scratch(heads, q, K, kind=torch.float32) for _ in range(layers)]
        self.key_gates = [scratch(heads, q, 2 * K, kind=dtype) for _ in range(layers)]
        self.a_log = torch.rand(heads, device=device)
        self.dt_bias = torch.randn(heads * K, device=device)
        self.inputs = [torch.randn(1, batch * q, heads, K, device=device, dtype=dtype) for _ in range(4)]
        self.beta = torch.randn(1, batch * q, heads, device=device, dtype=dtype)
        self.out = torch.empty_like(self.inputs[0])
        self.loc = torch.arange(batch + 1, device=device, dtype=torch.int32) * q
        self.slots = torch.arange(1, batch + 1, device=device, dtype=torch.int32)
        self.rows = torch.arange(batch, device=device, dtype=torch.int32)
        self.pending = torch.full((batch,), n, device=device, dtype=torch.int32)
        self.errors = torch.zeros(16, device=device, dtype=torch.int32)
        zeros = torch.zeros_like(self.slots)
        self.plan = SimpleNamespace(
            commit_lens=self.pending,
            final_state_indices=self.slots,
            boundary_state_indices=zeros,
            boundary_recovery_lens=zeros,
        )
        self.stack = self._stack(layers)

    def _stack(self, layers):
        lists = {
            "checkpoint": self.states,
            "correction": self.corrections,
            "key_gate": self.key_gates,
            "A_log": [self.a_log] * layers,
            "dt_bias": [self.dt_bias] * layers,
        }
        tables = {}
        for name, tensors in lists.items():
            tables[f"{name}_addrs"] = torch.tensor([t.data_ptr() for t in tensors], device="cuda")
            tables[f"{name}_strides"] = torch.tensor([t.stride(0) for t in tensors], device="cuda")
        return SimpleNamespace(
            checkpoints=self.states,
            corrections=self.corrections,
            key_gates=self.key_gates,
            A_logs=lists["A_log"],
            dt_biases=lists["dt_bias"],
            lower_bound=-5.0,
            spec_query_len=self.q,
            **tables,
        )

    def verifies(self, deferred_step: bool, split: int | None = None):
        from graphrt.kernels.cute import deferred

        q, k, v, g = self.inputs
        pending = self.pending if deferred_step else None
        for l, (state, correction, key_gate) in enumerate(
            zip(self.states, self.corrections, self.key_gates, strict=True)
        ):
            records = SimpleNamespace(correction=correction, key_gate=key_gate)
            deferred.deferred_verify_f32(
                q, k, v, g, self.beta, self.a_log, self.dt_bias, -5.0, state, records, self.loc, self.slots, self.q,
                self.out, self.errors, record_rows=self.rows, pending=pending, programmatic=l > 0,
                split=split,
            )  # fmt: skip

    def fold(self):
        from graphrt.kernels.cute import commit

        commit.fold(self.stack, self.plan, self.slots, self.rows, False)

    def eager(self):
        self.verifies(False)
        self.fold()


def measure(batch, layers, heads, q, n, rate, splits):
    model = Model(layers, heads, q, batch, n)
    items = layers * heads * batch
    floor = items * (128 + n + q + 1.25 * q) * KIB / rate * 1e6
    two_pass = items * 128 * KIB / rate * 1e6
    row = {
        "batch": batch,
        "deferred": graph_us(lambda: model.verifies(True)),
        "eager": graph_us(model.eager),
        "verify": graph_us(lambda: model.verifies(False)),
        "fold": graph_us(model.fold),
        "floor": floor,
        "two_pass": two_pass,
    }
    for split in splits:
        row[f"deferred, split {split}"] = graph_us(lambda split=split: model.verifies(True, split))
    row["host"] = host_us(lambda: model.verifies(True), layers)
    return row | {"deferred/floor": row["deferred"] / floor, "fold/two_pass": row["fold"] / two_pass}


def measure_all(args):
    """Every batch in turn, printed as it comes; what --json keeps."""
    rate = in_place_rate()
    print(f"{torch.cuda.get_device_name()}: in-place rate {rate / 1e12:.2f} TB/s")
    rows = []
    for batch in args.batch:
        torch.cuda.empty_cache()
        rows.append(measure(batch, args.layers, args.heads, args.window, args.pending, rate, args.splits))
        print("  ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    shape = {k: getattr(args, k) for k in ("batch", "layers", "heads", "window", "pending")}
    return {"device": torch.cuda.get_device_name(), "rate": rate, "args": shape, "rows": rows}


def choose(results, path):
    """Put the results' device and shape into the table of the fewest requests from which on a step should defer."""
    a = results["args"]
    shape = StepShape(results["device"], "fp32_deferred", a["layers"], a["heads"], K, a["window"])
    facts = asdict(shape)
    table = load_table(path) if path.exists() else []
    table = [entry for entry in table if any(entry.get(key) != value for key, value in facts.items())]
    first = first_deferred((row["batch"], row["deferred"], row["eager"]) for row in results["rows"])
    table.append(facts | {"pending": a["pending"], "deferred_from": first})
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def plot(rows, path):
    """Log-log, the floors as lines."""
    import matplotlib.pyplot as plt

    batches = [row["batch"] for row in rows]
    for name, style in (("deferred", "o-"), ("eager", "s-"), ("fold", "^-"), ("floor", "k--"), ("two_pass", "k:")):
        plt.loglog(batches, [row[name] for row in rows], style, label=name)
    plt.xlabel("requests")
    plt.ylabel("µs a step, all layers")
    plt.legend()
    plt.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=69)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--pending", type=int, default=4)
    parser.add_argument("--splits", type=int, nargs="*", default=[], help="also with that many blocks on a head")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot")
    parser.add_argument("--choose", type=Path, help="table in which this device and shape get their entry")
    parser.add_argument("--from", dest="kept", type=Path, help="measure nothing: take these results of --json")
    args = parser.parse_args()
    results = json.loads(args.kept.read_text(encoding="utf-8")) if args.kept else measure_all(args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if args.choose:
        choose(results, args.choose)
    if args.plot:
        plot(results["rows"], args.plot)


if __name__ == "__main__":
    main()
