"""How long is a decode step of the FP32 backend, eager and deferred, against what the memory allows?

Shape (default): L = 69 layers, H = 12, K = V = 128, Q = 8, n = 4 records pending, bf16 activations shared by the
layers; checkpoints, records and convolution states in distinct pages per layer. Every figure is the median of CUDA
graph replays, timed with events, with programmatic launches as they are by default.

Columns, µs for all layers:
- deferred: a deferred step, the verifies of all layers and the commit, which folds nothing.
- eager: stock verifies, then a commit that folds n records now.
- verify: stock verifies alone. commit: the deferred commit alone (plan and defer). fold: the fold of n records alone.
- flush: plan, compaction of the convolution histories, and fold.
- plain: the deferred step without programmatic launches.
- conv inside, conv apart: a deferred step whose verifies run the short convolution, and one with a launch for it.
- host: of one eager launch of the verify, host time.
- floor: bytes of the deferred step (state in and out, n KiB + Q KiB of records, 1.25 Q KiB of activations per
  request, head and layer) over the card's in-place read-and-write rate, measured first; two_pass: the state alone,
  what a fold needs.

    python tools/bench_step.py [--batch 1 4 16 64] [--pending 4] [--json PATH] [--plot PATH] [--choose PATH]

`--choose` writes the table that `CommitRunner` and `DecodeStep` read to decide between eager and deferred.
"""

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch

from graphrt import KDADeferredCommitContext, KDALayer, KDARecoverSSMRecords
from graphrt.kernels.conv import conv_verify
from graphrt.kernels.cute import commit, deferred
from graphrt.steps import Convolution, Rows

K = 128
KIB = 1024
WIDTH = 4  # of the short convolution


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
    """Static tensors of L layers for up to `batch` requests, and the kinds of step over them."""

    def __init__(self, layers, heads, q, batch, n, dtype=torch.bfloat16):
        self.q, self.batch, self.n, self.heads = q, batch, n, heads
        device, dim, columns = "cuda", 3 * heads * K, WIDTH - 1 + q

        def scratch(*shape, kind):
            return torch.randn(batch + 1, *shape, device=device, dtype=kind)[1:]

        self.a_log = torch.rand(heads, device=device)
        self.dt_bias = torch.randn(heads * K, device=device)
        self.weight = torch.randn(dim, WIDTH, device=device, dtype=dtype)
        self.layers = [
            KDALayer(
                kv_cache=(
                    torch.randn(batch + 1, dim, columns, device=device, dtype=dtype),
                    torch.randn(batch + 1, heads, K, K, device=device),
                ),
                recoverssm_records=KDARecoverSSMRecords(
                    scratch(heads, q, K, kind=torch.float32), scratch(heads, q, 2 * K, kind=dtype)
                ),
                A_log=self.a_log,
                dt_bias=self.dt_bias,
                local_num_heads=heads,
                head_dim=K,
                gate_lower_bound=-5.0,
                conv_weight=self.weight,
            )
            for _ in range(layers)
        ]
        self.context = KDADeferredCommitContext.create(self.layers, spec_query_len=q, max_num_reqs=batch)
        if self.context.backend != "fp32_deferred":
            raise SystemExit(self.context.backend_reason)
        self.x = torch.randn(batch * q, dim, device=device, dtype=dtype)
        self.mixed = torch.empty_like(self.x)
        self.gates = torch.randn(1, batch * q, heads, K, device=device, dtype=dtype)
        self.beta = torch.randn(1, batch * q, heads, device=device, dtype=dtype)
        self.out = torch.empty_like(self.gates)
        self.loc = torch.arange(batch + 1, device=device, dtype=torch.int32) * q
        self.slots = torch.arange(1, batch + 1, device=device, dtype=torch.int32)
        self.rows = torch.arange(batch, device=device, dtype=torch.int32)
        self.accepted = torch.full((batch,), n, device=device, dtype=torch.int32)
        self.pending = self.accepted.clone()
        self.errors = torch.zeros(16, device=device, dtype=torch.int32)
        zeros = torch.zeros_like(self.slots)
        self.plan = SimpleNamespace(
            commit_lens=self.accepted,
            final_state_indices=self.slots,
            boundary_state_indices=zeros,
            boundary_recovery_lens=zeros,
        )

    def verifies(self, deferred_step: bool, conv: str = "", split: int | None = None):
        """The verifies of all layers; `conv` "inside" or "apart": with their convolutions."""
        pending = self.pending if deferred_step else None
        rows = Rows(self.loc, self.slots, self.rows, pending, self.q)
        source = self.mixed if conv == "apart" else self.x
        q, k, v = source[None].unflatten(-1, (3, self.heads, K)).unbind(2)
        for layer in self.layers:
            state, checkpoint = layer.kv_cache
            if conv == "apart":
                conv_verify(self.x, state, self.weight, None, rows, True, self.batch, self.mixed, self.errors)
            deferred.deferred_verify_f32(
                q, k, v, self.gates, self.beta, self.a_log, self.dt_bias, -5.0, checkpoint, layer.recoverssm_records,
                self.loc, self.slots, self.q, self.out, self.errors, record_rows=self.rows, pending=pending,
                conv=Convolution(state, self.weight, None, True) if conv == "inside" else None, split=split,
            )  # fmt: skip

    def fold(self, align: bool = False):
        commit.fold(self.context.stack, self.plan, self.slots, self.rows, align)

    def flush(self):
        self.context.flush(self.slots, self.rows, self.pending)

    def commit(self, deferred_step: bool = True):
        pending = self.pending if deferred_step else None
        self.context.commit(self.accepted, self.slots, self.loc, record_rows=self.rows, pending=pending)

    def step(self, deferred_step: bool, conv: str = "", split: int | None = None):
        self.verifies(deferred_step, conv, split)
        self.commit(deferred_step)

    def plain_step(self):
        with deferred.programmatic_launches(False):
            self.step(True)


def measure(batch, layers, heads, q, n, rate, splits):
    model = Model(layers, heads, q, batch, n)
    items = layers * heads * batch
    floor = items * (128 + n + q + 1.25 * q) * KIB / rate * 1e6
    two_pass = items * 128 * KIB / rate * 1e6
    row = {
        "batch": batch,
        "deferred": graph_us(lambda: model.step(True)),
        "eager": graph_us(lambda: model.step(False)),
        "verify": graph_us(lambda: model.verifies(False)),
        "commit": graph_us(model.commit),
        "fold": graph_us(model.fold),
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
    row["host"] = host_us(lambda: model.verifies(True), layers)
    return row | {"deferred/floor": row["deferred"] / floor, "fold/two_pass": row["fold"] / two_pass}


def choose(rows, shape, path):
    """Add this device and shape to the table of the fewest requests from which on the deferred step is the faster."""
    wins = [row["batch"] for row in rows if row["deferred"] <= row["eager"]]
    losses = [row["batch"] for row in rows if row["deferred"] > row["eager"]]
    first = min((batch for batch in wins if batch > max(losses, default=0)), default=None)
    try:
        with open(path) as f:
            table = json.load(f)
    except FileNotFoundError:
        table = []
    facts = {"device": torch.cuda.get_device_name(), **shape}
    table = [entry for entry in table if any(entry.get(key) != value for key, value in facts.items())]
    with open(path, "w") as f:
        json.dump([*table, facts | {"deferred_from": first}], f, indent=1)


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
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--choose", help="table to which the smallest batch that should be deferred is written")
    args = parser.parse_args()
    rate = in_place_rate()
    print(f"{torch.cuda.get_device_name()}: in-place rate {rate / 1e12:.2f} TB/s")
    rows = []
    for batch in args.batch:
        torch.cuda.empty_cache()
        rows.append(measure(batch, args.layers, args.heads, args.window, args.pending, rate, args.splits))
        print("  ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        with open(args.json, "w") as f:
            shape = {k: getattr(args, k) for k in ("batch", "layers", "heads", "window", "pending")}
            facts = {"device": torch.cuda.get_device_name(), "rate": rate, "args": shape, "rows": rows}
            json.dump(facts, f, indent=1)
    if args.choose:
        choose(rows, {"layers": args.layers, "heads": args.heads, "spec_query_len": args.window}, args.choose)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
