"""How long does a recorded decode step take, committed late or at once, whatever the backend?

Question: what does a user of `DecodeStep` get here? Shape: that of Kimi K3 on one of eight GPUs, or a small one on the
CPU; every layer's convolution and verify, staging, commit and advance (`graphrt.workload`). Method: median of single
replays, each timed alone, on CUDA by events. No floor is drawn: tools/bench_step.py has the kernels against theirs.

    python tools/bench_replay.py --batch 1 16 64 --json replay.json --plot replay.png
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from arguments import device_option, output_file, plot_file
from rich.console import Console
from rich.progress import track
from rich.table import Table

from graphrt.choice import device_name
from graphrt.workload import Sizes, Workload

SMALL = {"layers": 2, "heads": 2, "head_dim": 32}
KIMI_K3 = {"layers": 69, "heads": 12, "head_dim": 128}


def replay_us(workload: Workload, repeats: int) -> float:
    """Median microseconds of a replay."""
    times = []
    for _ in range(repeats + 3):
        if workload.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            workload.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        else:
            start = perf_counter()
            workload.replay()
            times.append(1e6 * (perf_counter() - start))
    return median(times[3:])


def measure(sizes: Sizes, device: torch.device, backend: str, repeats: int) -> dict[str, object]:
    """One batch size, both ways to commit."""
    row: dict[str, object] = {"batch": sizes.batch}
    for commit in ("deferred", "eager"):
        workload = Workload(sizes, device, backend=backend, commit=commit)
        workload.capture()
        row[commit] = replay_us(workload, repeats)
        row["backend"] = workload.context.backend
        workload.close()
        del workload
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return row


def plot(results: dict, path: Path) -> None:
    """Both lines over the batch, log-log."""
    import matplotlib.pyplot as plt

    batches = [row["batch"] for row in results["rows"]]
    for commit, style in (("deferred", "o-"), ("eager", "s-")):
        plt.loglog(batches, [row[commit] for row in results["rows"]], style, label=f"{commit} commit")
    plt.xlabel("requests")
    plt.ylabel("us a recorded step")
    plt.title(f"{results['rows'][0]['backend']} on {results['device']}")
    plt.legend()
    plt.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=device_option, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--query-len", type=int, default=8)
    parser.add_argument("--accepted", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--plot", type=plot_file)
    args = parser.parse_args()
    device = torch.device(args.device)
    shape = SMALL if device.type == "cpu" else KIMI_K3
    rows = []
    for batch in track(args.batch, "replay", console=Console(stderr=True), transient=True):
        sizes = Sizes(**shape, spec_query_len=args.query_len, batch=batch, accepted=args.accepted)
        rows.append(measure(sizes, device, args.backend, args.repeats))
    results = {"tool": "bench_replay", "device": device_name(device), "shape": shape, "rows": rows}
    table = Table("rows", "deferred us", "eager us", title=f"{rows[0]['backend']} on {results['device']}")
    for row in rows:
        table.add_row(str(row["batch"]), f"{row['deferred']:.1f}", f"{row['eager']:.1f}")
    Console(width=100).print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
