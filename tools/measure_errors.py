"""How far from exact arithmetic are checkpoints, corrections and outputs, on each backend that runs here?

    python tools/measure_errors.py --json tools/results/cpu/errors.json
    TRITON_INTERPRET=1 python tools/measure_errors.py      also the Triton kernels, interpreted, without a GPU

Four requests of one layer with two heads of 128, FP32 checkpoints, BF16 activations, windows of 8, bounded gate. One
window: corrections u and the folded checkpoint after all 8 tokens, from the same state. 64 windows of 1 to 8 accepted
tokens: the checkpoint at the end. The error is the norm of the difference over the norm of the float64 oracle's value,
the largest of the four requests. Outputs are BF16: their error is told in that of the exact outputs rounded to BF16, so
that 1 is rounding and nothing else. `torch` is the FP32 token-by-token form.

Data: "random", and "strong then weak": similar keys, a gate that closes almost fully on even tokens and hardly at all
on odd ones, and strong writes, which is where a decay from a difference of sums loses digits.
"""

import argparse
import json

import torch
from arguments import device_option, output_file
from rich.console import Console
from rich.table import Table
from torch import Tensor

from graphrt import KDADeferredCommitContext, kda_deferred_verify
from graphrt.backends import BACKENDS
from graphrt.testing import Batch, Oracle, Pool, Row, make_batch, poisoned_pool

WINDOW, REQUESTS, WINDOWS = 8, 4, 64
KINDS = ("random", "strong then weak")


def make_step(pool: Pool, kind: str, seed: int) -> Batch:
    """A full window of every request, in the slot behind its record row."""
    batch = make_batch(pool, [Row(i, i + 1, i, WINDOW, 1 + (3 * seed + i) % WINDOW) for i in range(REQUESTS)],
                       size=REQUESTS, seed=seed)  # fmt: skip
    if kind == "strong then weak":
        base = torch.randn(pool.layers[0].head_dim, generator=torch.Generator().manual_seed(seed)).to(pool.device)
        batch.k.copy_(base + 0.05 * batch.k)
        batch.raw_g[:, ::2], batch.raw_g[:, 1::2] = 8.0, -9.0
        batch.raw_beta.fill_(2.0)
    return batch


def verify(pool: Pool, batch: Batch, backend: str) -> Tensor:
    """Outputs [T, H, V]."""
    layer = pool.layers[0]
    out = kda_deferred_verify(
        *(part[:1] for part in (batch.q, batch.k, batch.v, batch.raw_g, batch.raw_beta)),
        layer.A_log, layer.dt_bias, layer.gate_lower_bound, layer.kv_cache[1], layer.recoverssm_records,
        batch.query_start_loc, batch.state_indices, WINDOW,
        record_rows=batch.record_rows, pending=pool.pending, backend=backend,
    )  # fmt: skip
    return out[0]


def error(got: Tensor, want: Tensor) -> float:
    """Relative norm of the difference."""
    return float((got.double() - want).norm() / want.norm())


def measure(backend: str, kind: str, device: str) -> dict[str, float]:
    """The largest relative errors of the four requests."""
    pool = poisoned_pool(
        num_layers=1, head_dim=128, spec_query_len=WINDOW, max_num_reqs=REQUESTS, dtype=torch.bfloat16, device=device
    )
    layer = pool.layers[0]
    context = KDADeferredCommitContext.create([layer], spec_query_len=WINDOW, max_num_reqs=REQUESTS, backend=backend)
    if context.backend != backend:
        raise ValueError(context.backend_reason)
    for i in range(REQUESTS):
        pool.fill(i + 1, i)
    oracles = [Oracle(layer, layer.kv_cache[1][i + 1]) for i in range(REQUESTS)]
    found = dict.fromkeys(("u", "out", "checkpoint", "checkpoint_64"), 0.0)
    for number in range(WINDOWS):
        batch = make_step(pool, kind, number)
        if number == 0:
            batch.num_accepted_tokens.fill_(WINDOW)
        out = verify(pool, batch, backend)
        rows = (batch.state_indices, batch.record_rows, pool.pending)
        context.commit(
            batch.num_accepted_tokens, batch.state_indices, batch.query_start_loc,
            record_rows=batch.record_rows, pending=pool.pending,
        )  # fmt: skip
        for i, accepted in enumerate(batch.num_accepted_tokens.tolist()):
            span = slice(i * WINDOW, (i + 1) * WINDOW)
            want = oracles[i].step(*batch.tokens(0, span.start, span.stop)[:5], None, accepted)
            if number == 0:
                u = layer.recoverssm_records.correction[i].transpose(0, 1)
                found["u"] = max(found["u"], error(u, want.correction))
                found["out"] = max(found["out"], error(out[span], want.out) / error(want.out.to(out.dtype), want.out))
        if number in (0, WINDOWS - 1):
            context.drain(*rows)
            key = "checkpoint" if number == 0 else "checkpoint_64"
            found[key] = max(error(layer.kv_cache[1][i + 1], oracles[i].state) for i in range(REQUESTS))
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=device_option, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=output_file, help="write the table here")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    table = Table(
        "backend", "data", "u", "outputs, roundings", "checkpoint", f"checkpoint, {WINDOWS} windows", title=name
    )
    rows = []
    for backend in BACKENDS:
        for kind in KINDS:
            try:
                found = measure(backend, kind, args.device)
            except ValueError as reason:
                Console(stderr=True).print(f"{backend}: {reason}", highlight=False)
                break
            rows.append({"backend": backend, "data": kind, **found})
            table.add_row(
                backend, kind, *(f"{value:.1e}" if name != "out" else f"{value:.3f}" for name, value in found.items())
            )
    Console().print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
