"""How long is a decode step of graphrt beside those of its peers, in one run, on the same tensors?

Shape (default): L = 69 layers, H = 12, K = V = 128, bf16 activations shared by the layers (they come from L2, as
behind a projection), checkpoints, records and convolution states of distinct pages per layer, random data. A figure
is the median of CUDA graph replays timed with events, short ones several in a row; the graphs of one point take turns.

A step is the verify of every layer and one commit of `accepted` tokens a request:

- graphrt BACKEND deferred: deferred verifies that replay `accepted` records, and the commit that counts them.
- graphrt BACKEND eager: stock verifies, and the commit that folds.
- vllm: its Triton verifies and its Triton commit; with BF16 checkpoints also its CuTe commit.
- fla: fla-core's fused recurrence, one stored state per token; accepting is choosing a state.
- ..., commit alone. ... + conv: the step with the short convolution of every layer (graphrt: `conv=` of its verifies,
  inside the kernel on fp32_deferred, a launch in front on triton; vllm: a launch in front).

The commits of vllm and of an eager step compact the convolution history too; a deferred step does that in its
convolution, so compare those by their "+ conv" rows.

floor: the bytes a deferred step must move (state in and out, accepted + Q records, Q tokens) over the in-place rate of
the card, measured first; for a commit alone the state in and out. to_peer: how many times faster than vllm's step (or
commit) with checkpoints of the same dtype. bytes: of checkpoints and of records, per request.

    python tools/bench_peers.py [--vllm WHEEL] [--fla WHEEL] [--csv PATH] [--json PATH]
    python tools/bench_peers.py --read CSV --plot PNG

The table that ships with the package gets its entries of both backends, with half a window pending, from kept results:

    python tools/bench_peers.py --read tools/results/h200/peers.csv --facts tools/results/h200/peers.json \
        --choose graphrt/choice.json
"""

import argparse
import csv
import json
import statistics
import time
from itertools import product
from pathlib import Path

import torch
import triton
from arguments import device_option, output_file, plot_file
from choosing import put_choice
from peer_steps import MAIN, Model, Step, agreeing, steps_of
from peers import peers

import graphrt
from graphrt.choice import StepShape

KIB = 1024


def record(run, device: torch.device):
    """Something to replay; on a CPU, where nothing is measured, the calls themselves."""
    run()
    if device.type == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(run, device: torch.device, in_a_row: int) -> float:
    """Seconds of one of several replays in a row: the host's launch of one hides behind the one before."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(in_a_row):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / in_a_row


def medians(runs: dict, device: torch.device, repeats: int) -> dict:
    """Microseconds of each, replayed in turn; the slower ones fewer times."""
    first = {name: min(timed(run, device, 1) for _ in range(2 if repeats > 1 else 1)) for name, run in runs.items()}
    times = {name: [] for name in runs}
    for turn in range(repeats):
        for name, run in runs.items():
            if turn < 5 or first[name] < 4e-3:
                in_a_row = min(20, max(1, round(2e-3 / first[name])))
                times[name].append(timed(run, device, in_a_row) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(model: Model, steps: list[Step], batch: int, accepted: int, rate: float, repeats: int) -> list[dict]:
    """The rows of one point."""
    model.accept(accepted)
    part, runs, known = model.part(batch), {}, {}
    main = (model.window, accepted) == MAIN
    for step in steps:
        extra = getattr(step, "conv", False) or len(step.layers) < model.layers_count
        if extra and not main:
            continue
        key = (step.state, step.name)
        runs[key], known[key] = record(lambda step=step: step.run(part), model.device), step
        if not extra and not step.per_token:
            key = (step.state, f"{step.name}, commit alone")
            runs[key], known[key] = record(lambda step=step: step.commit(part), model.device), step
    found = medians(runs, model.device, repeats)
    del runs
    return [row(model, known[key], key, found, batch, accepted, rate) for key in found]


def row(model: Model, step: Step, key: tuple, found: dict, batch: int, accepted: int, rate: float) -> dict:
    """One line of the table."""
    state, name = key
    tail = ", commit alone" if name.endswith(", commit alone") else ""
    element, window = model.pools[state].element_size(), model.window
    kib = model.dim * model.dim * element * 2 / KIB
    if not tail:
        # A record is u in FP32, key and gate in 16 bits; a token is q, k, v, gate and output in 16 bits.
        kib += (accepted + window) * model.dim * 8 / KIB + window * model.dim * 10 / KIB
    floor = batch * model.heads * len(step.layers) * kib * KIB / rate * 1e6
    commit = "cute" if state == "bfloat16" and model.device.type == "cuda" else "triton"
    conv = " + conv" if getattr(step, "conv", False) else ""
    peer = found.get((state, f"vllm {commit} commit{conv}{tail}"))
    deferred_commit = tail and getattr(step, "deferred", False)
    whole = len(step.layers) == model.layers_count
    states, records = model.bytes_per_request(state, window if step.per_token else 1, not step.per_token)
    return {
        "batch": batch, "window": window, "accepted": accepted, "state": state, "layers": len(step.layers),
        "what": name, "us": round(found[key], 2), "floor_us": round(floor, 2),
        # The commit of a deferred step folds nothing, so it has no floor and is no match for a fold.
        "to_floor": "" if deferred_commit else round(found[key] / floor, 3),
        "to_peer": round(peer / found[key], 3) if whole and peer and not deferred_commit else "",
        "state_bytes": states if whole else "", "record_bytes": records if whole else "",
    }  # fmt: skip


def in_place_rate(device: torch.device) -> float:
    """Bytes a second, read plus written, of an in-place update of 4 GiB."""
    if device.type == "cpu":
        return 1e9
    x = torch.randn(1 << 30, device=device)
    replay = record(lambda: x.mul_(1.0000001), device)
    return 2 * x.numel() * 4 / (medians({"": replay}, device, 20)[""] * 1e-6)


def show(rows: list[dict]) -> None:
    head = rows[0]
    print(f"\nB = {head['batch']}, Q = {head['window']}, accepted {head['accepted']}")
    for one in rows:
        columns = f"{one['us']:11.1f} us  {one['to_floor']!s:>7} x floor  {one['to_peer']!s:>7} x vllm"
        print(f"  {one['state']:9}{one['what']:54}{columns}", flush=True)


def plot(rows: list[dict], path: Path) -> None:
    """Time over batch, and how many times faster than the peer, at the main point; then by accepted count."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(17, 5))

    def series(what, window, accepted, column):
        picked = [one for one in rows if (one["what"], one["window"], one["accepted"], one["state"]) == (
            what, window, accepted, "float32") and one[column] != ""]  # fmt: skip
        picked.sort(key=lambda one: int(one["batch"]))
        return [int(one["batch"]) for one in picked], [float(one[column]) for one in picked]

    names = ["vllm triton commit", "fla state per token", "graphrt triton eager", "graphrt triton deferred"]
    names += ["graphrt fp32_deferred eager", "graphrt fp32_deferred deferred"]
    for name, style in zip(names, ("s-", "d-", "^--", "v--", "x-", "o-"), strict=True):
        axes[0].loglog(*series(name, "8", "4", "us"), style, label=name)
        axes[1].semilogx(*series(name, "8", "4", "to_peer"), style, label=name)
    axes[0].loglog(*series(names[-1], "8", "4", "floor_us"), "k:", label="floor")
    for window in ("4", "8"):
        for accepted in sorted({one["accepted"] for one in rows if one["window"] == window}, key=int):
            label = f"deferred, Q = {window}, accepted {accepted}"
            axes[2].semilogx(*series(names[-1], window, accepted, "to_peer"), "o-", label=label)
    titles = ("µs a step, Q = 8, 4 accepted", "times faster than vllm's step", "the same by window and accepted")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.set_xlabel("requests")
        ticks = sorted({int(one["batch"]) for one in rows})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def choose(rows: list[dict], facts: dict, path: Path) -> None:
    """Put every backend and window with FP32 checkpoints into the table of eager or deferred commits."""
    a = facts["args"]
    for backend, window in product(a["backend"], a["window"]):
        steps = {
            (one["what"], int(one["batch"])): float(one["us"])
            for one in rows
            if (int(one["window"]), int(one["accepted"]), one["state"]) == (window, window // 2, "float32")
        }
        deferred, eager = f"graphrt {backend} deferred", f"graphrt {backend} eager"
        if not all((what, batch) in steps for what, batch in product((deferred, eager), a["batch"])):
            print(f"no entry for {backend}, window {window}: not every batch was measured")
            continue
        measured = [(batch, steps[deferred, batch], steps[eager, batch]) for batch in a["batch"]]
        shape = StepShape(facts["device"], backend, a["layers"], a["heads"], a["head_dim"], window)
        put_choice(path, shape, window // 2, measured)


def write_csv(rows: list[dict], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def points(args) -> list[tuple[int, int, int]]:
    """(window, accepted, batch), the main ones first: time may run out."""
    found = []
    for window in args.window:
        counts = sorted({1, window // 2, window})
        found += [(window, accepted, batch) for accepted in counts for batch in args.batch]
    return sorted(found, key=lambda point: (point[0] != MAIN[0], (point[0], point[1]) != MAIN))


def bench(args, device: torch.device, vllm, fla) -> tuple[list[dict], dict]:
    """All points that the time allows; and facts of the run."""
    begin, rate, model = time.monotonic(), in_place_rate(device), None
    rows, missed, left_out = [], [], []
    for window, accepted, batch in points(args):
        if time.monotonic() - begin > args.seconds:
            missed.append((window, accepted, batch))
            continue
        if model is None or model.window != window:
            model = steps = None  # free the old pools before the new ones
            model = Model(args, window, device)
            steps, reasons = agreeing(steps_of(model, vllm, fla, args), model)
            left_out += reasons
            print("".join(f"\nleft out: {reason}" for reason in reasons))
        found = measure(model, steps, batch, accepted, rate, args.repeats)
        rows += found
        show(found)
        if args.csv:
            write_csv(rows, args.csv)
    if missed:
        print(f"\nnot measured for want of time (window, accepted, batch): {missed}")
    wrong = {kind: count for kind, count in graphrt.error_counts(device).items() if count}
    if wrong:
        raise RuntimeError(f"device errors were counted: {wrong}")
    return rows, {"rate": rate, "missed": missed, "left_out": left_out, "seconds": round(time.monotonic() - begin, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="wheel; downloaded without it")
    parser.add_argument("--fla", type=Path, help="wheel; downloaded without it")
    parser.add_argument("--device", type=device_option, help="cuda unless told")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--window", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--backend", nargs="+", default=["fp32_deferred", "triton"], help="of graphrt, FP32")
    parser.add_argument("--layers", type=int, default=69)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no point after so long")
    parser.add_argument("--csv", type=output_file)
    parser.add_argument("--json", type=output_file, help="facts of the run: card, versions, rate")
    parser.add_argument("--commit", default="", help="of graphrt, for the facts")
    parser.add_argument("--read", type=Path, help="rows of an earlier run instead of measuring")
    parser.add_argument("--facts", type=Path, help="with --read: what --json kept of that run, for --choose")
    parser.add_argument("--plot", type=plot_file)
    parser.add_argument(
        "--choose", type=output_file, help="table in which the shapes get their entries (graphrt.choice)"
    )
    args = parser.parse_args()
    if not (args.read or args.device or torch.cuda.is_available()):
        parser.error("it needs a CUDA device, and torch finds none")
    if args.read and args.choose and not args.facts:
        parser.error("--choose with --read needs the device and shape of that run: give its --json file as --facts")
    if args.read:
        with args.read.open() as file:
            rows = list(csv.DictReader(file))
        facts = json.loads(args.facts.read_text(encoding="utf-8")) if args.facts else {}
    else:
        device = torch.device(args.device or "cuda")
        with peers(device, args.vllm, args.fla) as (vllm, fla):
            versions = {"vllm": vllm.version, "fla-core": fla.version, "graphrt": graphrt.__version__}
            rows, facts = bench(args, device, vllm, fla)
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        facts |= {"device": name, "torch": torch.__version__, "triton": triton.__version__, **versions}
        sizes = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
        facts |= {"commit": args.commit, "args": sizes}
        print("\n" + json.dumps(facts))
        if args.json:
            args.json.write_text(json.dumps(facts, indent=1) + "\n")
    if args.choose:
        choose(rows, facts, args.choose)
    if args.plot:
        plot([{key: str(value) for key, value in one.items()} for one in rows], args.plot)


if __name__ == "__main__":
    main()
