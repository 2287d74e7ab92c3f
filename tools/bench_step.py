"""How long is a decode step of the FP32 backend, eager and deferred, against what the memory allows?

Shape (default): L = 69 layers, H = 12, K = V = 128, Q = 8, n = 4 records pending, bf16 activations shared by the
layers; checkpoints, records and convolution states in distinct pages per layer. Every figure is the median of CUDA
graph replays, timed with events, with programmatic launches as they are by default.

Columns, µs for all layers:
- deferred: a deferred step, the verifies of all layers and the commit, which folds nothing.
- eager: stock verifies, then a commit that folds n records now.
- verifies: the deferred verifies alone. verify: stock verifies alone.
- commit: the deferred commit alone (plan and defer), of 20 in one graph. fold: the fold of n records alone.
- compaction: that of the convolution histories alone. flush: plan, compaction, and fold.
- fold in order, fold triton: the fold without record rows, and the Triton fold of the same plan (--folds: of fewer
  heads, layers and requests as well, 20 in one graph where they are small).
- plain: the deferred step without programmatic launches.
- conv inside, conv apart: a deferred step whose verifies run the short convolution, and one with a launch for it.
- launch: a replay of a graph with one tiny kernel; what every other figure has in it, too.
- host: of one eager launch of the verify, host time.
- floor: bytes of the deferred step (state in and out, n KiB + Q KiB of records, 1.25 Q KiB of activations per
  request, head and layer) over the card's in-place read-and-write rate, measured first; two_pass: the state alone,
  what a fold needs.

    python tools/bench_step.py [--batch 1 4 16 64] [--pending 4] [--folds] [--json PATH] [--plot PATH] [--choose PATH]

The table that ships with the package, from kept results, without a GPU:

    python tools/bench_step.py --from tools/results/h200/step.json --choose graphrt/choice.json
"""

import argparse
import json
import statistics
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch
from arguments import output_file, plot_file
from choosing import put_choice

from graphrt.choice import StepShape

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


def measure(batch, layers, heads, q, n, rate, splits):
    from step_model import Model

    model = Model(layers, heads, q, batch, n)
    items = layers * heads * batch
    floor = items * (128 + n + q + 1.25 * q) * KIB / rate * 1e6
    two_pass = items * 128 * KIB / rate * 1e6
    row = {
        "batch": batch,
        "deferred": graph_us(lambda: model.step(True)),
        "eager": graph_us(lambda: model.step(False)),
        "verifies": graph_us(lambda: model.verifies(True)),
        "verify": graph_us(lambda: model.verifies(False)),
        "commit": graph_us(lambda: [model.commit() for _ in range(20)]) / 20,
        "fold": graph_us(model.fold),
        "fold in order": graph_us(model.fold_in_order),
        "fold triton": graph_us(lambda: model.fold_in_order(triton=True)),
        "compaction": graph_us(model.compact),
        "flush": graph_us(model.flush),
        "plain": graph_us(model.plain_step),
        "conv inside": graph_us(lambda: model.step(True, "inside")),
        "conv apart": graph_us(lambda: model.step(True, "apart")),
        "floor": floor,
        "two_pass": two_pass,
    }
    for split in splits:
        row[f"deferred, split {split}"] = graph_us(lambda split=split: model.step(True, split=split))
        row[f"conv inside, split {split}"] = graph_us(lambda split=split: model.step(True, "inside", split))
    row["launch"] = graph_us(model.mark.zero_)
    row["host"] = host_us(lambda: model.verifies(True), layers)
    return row | {"deferred/floor": row["deferred"] / floor, "fold/two_pass": row["fold"] / two_pass}


def measure_folds(q, n):
    """Both folds without record rows (`use_commit_f32`), printed and returned."""
    from step_model import Model

    rows = []
    for heads in (1, 12):
        model = Model(69, heads, q, 64, n)
        for layers, batch in product((1, 8, 69), (1, 4, 16, 64)):
            launches = 20 if layers * heads * batch < 2000 else 1

            def fold(triton, model=model, part=(layers, batch), launches=launches):
                return graph_us(lambda: [model.fold_in_order(triton, *part) for _ in range(launches)]) / launches

            rows.append({"heads": heads, "layers": layers, "batch": batch, "cute": fold(False), "triton": fold(True)})
            print("  ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    return rows


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
    versions = {name: version(name) for name in ("torch", "triton", "nvidia-cutlass-dsl")}
    facts = {"device": torch.cuda.get_device_name(), "versions": versions, "commit": args.commit, "rate": rate}
    return facts | {
        "args": shape,
        "rows": rows,
        "folds": measure_folds(args.window, args.pending) if args.folds else [],
    }


def choose(results, path):
    """Put the results' device and shape into the table of the fewest requests from which on a step should defer."""
    a = results["args"]
    shape = StepShape(results["device"], "fp32_deferred", a["layers"], a["heads"], K, a["window"])
    put_choice(path, shape, a["pending"], ((row["batch"], row["deferred"], row["eager"]) for row in results["rows"]))


def plot(rows, path):
    """Log-log, the floors as lines."""
    import matplotlib.pyplot as plt

    rows = sorted(rows, key=lambda row: row["batch"])
    batches = [row["batch"] for row in rows]
    lines = {"deferred": "o-", "conv inside": "d-", "eager": "s-", "fold": "^-", "flush": "v-", "commit": "x-"}
    for name, style in (lines | {"floor": "k--", "two_pass": "k:"}).items():
        plt.loglog(batches, [row[name] for row in rows], style, label=name)
    plt.xlabel("requests")
    plt.ylabel("µs a step, all layers")
    plt.legend(loc="lower right", bbox_to_anchor=(1, 0.1), fontsize="small")
    plt.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=69)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--pending", type=int, default=4)
    parser.add_argument("--splits", type=int, nargs="*", default=[], help="also with that many blocks on a head")
    parser.add_argument("--folds", action="store_true", help="also both folds of fewer heads, layers and requests")
    parser.add_argument("--commit", default="", help="of this tree, kept with the results")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--plot", type=plot_file)
    parser.add_argument("--choose", type=output_file, help="table in which this device and shape get their entry")
    parser.add_argument("--from", dest="kept", type=Path, help="measure nothing: take these results of --json")
    args = parser.parse_args()
    if not args.kept and not torch.cuda.is_available():
        parser.error("it needs a CUDA device, and torch finds none")
    results = json.loads(args.kept.read_text(encoding="utf-8")) if args.kept else measure_all(args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if args.choose:
        choose(results, args.choose)
    if args.plot:
        plot(results["rows"], args.plot)


if __name__ == "__main__":
    main()
