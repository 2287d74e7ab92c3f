"""A long service at random against the float64 oracle: does anything leak, drift, or get lost?

Requests come, pause, are preempted, move to another slot, fork and leave; steps run in every way there is, most by
replay, with ragged windows, eager rows, dummies and hostile values (`graphrt.testing.Service`). Compared: outputs of
every step, every state and history as soon as it is folded, all pending counts, and that nobody's memory was written.
The run also fails if the device holds more memory at its end than after its first part, or the process grew by more
than `--rss-mib`.

    python tools/soak.py --steps 300                          on the CPU (torch), a minute
    python tools/soak.py --steps 20000 --backend triton       on a GPU
    python tools/soak.py --seconds 300 --json soak.json       on a GPU, the default backend there

The same seed makes the same run; a failure names its step. Exit status 0 if everything held.
"""

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from arguments import device_option, output_file
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from graphrt import FP32_DEFERRED
from graphrt.testing import Service, poisoned_pool

# Device state is checked, and the host waits, once in so many actions.
CHECK_EVERY = 16
MIB = 1 << 20


def memory(device: torch.device) -> dict[str, int]:
    """Bytes that live tensors take on the device, and pages of this process that are in memory."""
    gc.collect()
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    if device.type != "cuda":
        return {"device": 0, "rss": rss}
    torch.cuda.synchronize(device)
    return {"device": torch.cuda.memory_allocated(device), "rss": rss}


def make_service(args: argparse.Namespace, device: torch.device) -> Service:
    """The widest shape that the backend promises where there is a GPU, a small one elsewhere."""
    sizes: dict[str, Any] = {"num_slots": 2 * args.rows + 2, "max_num_reqs": args.rows + 2, "num_layers": args.layers}
    if device.type == "cuda":
        sizes |= {"head_dim": 128, "num_heads": 4, "spec_query_len": 8, "dtype": torch.bfloat16, "conv_dim": 512}
    elif args.backend == "torch":
        # An error of one token, slot or count shows at 1e-10.
        sizes |= {"dtype": torch.float64, "pool_dtype": torch.float64}
    pool = poisoned_pool(device=device, seed=args.seed, **sizes)
    return Service(pool, backend=args.backend, max_rows=args.rows, seed=args.seed)


def drive(service: Service, pick: Any, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Act until the steps or the seconds are over. Memory is measured with nobody live, at a tenth and at the end."""
    device, begin = service.pool.device, time.monotonic()

    def share() -> float:
        if args.seconds is not None:
            return (time.monotonic() - begin) / args.seconds
        return service.counts.steps / args.steps

    measured = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("soak", total=1.0)
        for end in (0.1, 1.0):
            actions = 0
            while share() < end:
                service.act(pick)
                actions += 1
                if actions % CHECK_EVERY == 0:
                    service.check()
                    progress.update(task, completed=min(share(), 1.0))
            if not measured:
                # What is recorded from here on is recorded already.
                service.capture(range(1, args.rows + 1))
            service.finish_all(pick)
            service.check()
            measured.append(memory(device))
    seconds = time.monotonic() - begin
    return {"seconds": seconds, "after a tenth": measured[0], "at the end": measured[1]}


def report(service: Service, run: dict[str, Any], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print what was done, and return it."""
    counts = asdict(service.counts)
    device = service.pool.device
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": service.context.backend,
        "seed": args.seed,
        "layers": args.layers,
        "most rows": args.rows,
        **{name: n for name, n in counts.items() if isinstance(n, int)},
        "comparisons": service.comparisons.done,
        "faults injected": sum(counts["faults"].values()),
        **run,
    }
    table = Table("what", "how much", title=f"soak: {facts['backend']} on {facts['device']}")
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {n / MIB:.1f} MiB" for key, n in value.items())
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if name == "seconds" else value)
    for title in ("events", "faults"):
        table.add_row(title, ", ".join(f"{name} {n:,}" for name, n in sorted(counts[title].items())))
    console.print(table)
    return facts | {"events": counts["events"], "faults": counts["faults"]}


def growth(run: dict[str, Any], rss_mib: float) -> list[str]:
    """What grew that should not have."""
    first, last = run["after a tenth"], run["at the end"]
    found = []
    if last["device"] > first["device"]:
        found.append(f"device memory grew by {last['device'] - first['device']:,} bytes")
    if last["rss"] - first["rss"] > rss_mib * MIB:
        found.append(f"the process grew by {(last['rss'] - first['rss']) / MIB:.1f} MiB, allowed {rss_mib}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps to run, unless --seconds is given")
    parser.add_argument("--seconds", type=float, help="run for so long instead")
    parser.add_argument("--device", type=device_option, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=["auto", FP32_DEFERRED, "triton", "torch"], default="auto")
    parser.add_argument("--rows", type=int, default=6, help="most rows of a step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rss-mib", type=float, default=64, help="how much the process may grow after a tenth")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    args = parser.parse_args()
    console = Console()
    device = torch.device(args.device)
    if device.type == "cpu" and args.backend == "auto":
        args.backend = "torch"
    service = make_service(args, device)
    try:
        run = drive(service, random.Random(args.seed).randint, args, console)
    except AssertionError as error:
        print(f"after {service.counts.steps} steps, seed {args.seed}: {error}", file=sys.stderr)
        return 1
    facts = report(service, run, args, console)
    grown = growth(run, args.rss_mib)
    if args.json is not None:
        args.json.write_text(json.dumps(facts | {"grown": grown}, indent=1) + "\n", encoding="utf-8")
    for line in grown:
        print(line, file=sys.stderr)
    service.close()
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
