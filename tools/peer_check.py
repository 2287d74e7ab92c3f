"""Do graphrt and its peers compute the same, step by step, from the same inputs and layer objects?

One random trace of ragged steps (default 50) is followed by several implementations, each over its own copy of the
engine's layer objects, which every context takes as they are:

    peer      the engine's convolution, Triton verify and commit (with --state bfloat16: its CuTe commit)
    eager     graphrt's convolution, stock verify and commit, over the engine's layers and records
    crossed   turn by turn the verify of one and the commit of the other, on the same tensors
    deferred  graphrt's deferred verify and commit, drained at the end
    fla       fla-core's fused recurrence with one stored state per token (FP32 checkpoints only)

Everything is compared with the peer: outputs, records and convolutions at every step, checkpoints and convolution
histories wherever a commit has put them, the whole pools at the end. Checkpoints and corrections are compared with a
float64 oracle too. Limits are those of the promised numerics: 1e-5 relative norm after a trace of FP32 checkpoints,
16-bit outputs within one rounding, keys, gates and histories bit for bit; with 16-bit checkpoints, which are rounded
once a window, 1e-2 in norm. Exit status 1 where one is passed.

    python tools/peer_check.py [--vllm WHEEL] [--fla WHEEL] [--align] [--state bfloat16] [--json PATH]
    TRITON_INTERPRET=1 python tools/peer_check.py --device cpu --backend torch --head-dim 16 --heads 2 --steps 4
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from arguments import device_option, output_file
from peer_followers import (
    Crossed,
    Deferred,
    Eager,
    Peer,
    PerToken,
    Shape,
    Step,
    copy_of,
    make_layers,
    oracle_of,
    slot_of,
)
from peers import peers
from torch import Tensor

import graphrt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Verdicts:
    """The worst figure of every comparison and its limit. Figures stay on the device until they are read."""

    def __init__(self):
        self.worst: dict[str, Tensor] = {}
        self.limits: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, name: str, figure: Tensor, limit: float) -> None:
        self.worst[name] = torch.maximum(self.worst.get(name, figure), figure)
        self.limits[name] = limit
        self.counts[name] = self.counts.get(name, 0) + 1

    def norms(self, name: str, got: Tensor, want: Tensor, limit: float) -> None:
        """Relative norm over the last two dimensions (or the last of a vector each), worst of all."""
        dims = (-2, -1) if got.ndim == 4 and got.shape[-1] == got.shape[-2] else (-1,)
        got, want = got.double(), want.double()
        error = (got - want).norm(dim=dims) / want.norm(dim=dims).clamp(min=1e-30)
        # NaN must not pass as small.
        self.add(name, error.nan_to_num(nan=float("inf")).max(), limit)

    def roundings(self, name: str, got: Tensor, want: Tensor) -> None:
        """Distance in units of the last place of a 16-bit dtype; rounding apart from near values is one."""
        unit, got, want = torch.finfo(got.dtype).eps, got.double(), want.double()
        scale = torch.maximum(got.abs(), want.abs()) + want.square().mean(-1, keepdim=True).sqrt() * 1e-3
        error = (got - want).abs() / (scale * unit)
        self.add(name, error.nan_to_num(nan=float("inf")).max(), 1.0)

    def same(self, name: str, got: Tensor, want: Tensor) -> None:
        """Number of differing elements, by bits."""
        bits = torch.int16 if got.element_size() == 2 else torch.int32
        self.add(name, got.contiguous().view(bits).ne(want.contiguous().view(bits)).sum().double(), 0.0)

    def table(self) -> list[dict]:
        """One row a comparison."""
        return [
            {"what": name, "worst": float(self.worst[name]), "limit": limit, "compared": self.counts[name],
             "ok": float(self.worst[name]) <= limit}
            for name, limit in self.limits.items()
        ]  # fmt: skip


def run(shape: Shape, vllm, fla, backend: str, seed: int = 0) -> list[dict]:
    """Follow one trace with everybody; the table of comparisons."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    computed = [rng.randint(1, shape.block or 1) for _ in range(shape.requests)]
    layers, rows = make_layers(shape), shape.requests + 1
    sizes = (rows, shape.heads, shape.window, shape.dim, shape.act, shape.device)
    engine = [copy_of(layers, lambda: vllm.records.allocate(*sizes)) for _ in range(3)]
    fp32 = shape.state == torch.float32
    peer_backend = "triton" if fp32 or shape.device.type == "cpu" else "cute"
    if peer_backend == "cute":
        vllm.cute_commit()
    peer = Peer(shape, engine[0], vllm, peer_backend)
    followers = {
        "eager": Eager(shape, engine[1], backend),
        "crossed": Crossed(shape, engine[2], backend, Peer(shape, engine[2], vllm, peer_backend)),
        "deferred": Deferred(shape, copy_of(layers, lambda: graphrt.allocate_records(*sizes)), backend),
    }
    if fp32 and fla:
        followers["fla"] = PerToken(shape, copy_of(layers, lambda: None), fla, computed)
    starts = [slot_of(shape, r, n) for r, n in enumerate(computed)]
    oracles = [[oracle_of(shape, one, slot) for slot in starts] for one in layers]
    verdicts = Verdicts()
    print(f"graphrt runs {followers['deferred'].context.backend} ({followers['deferred'].context.backend_reason})")
    for _ in range(shape.steps):
        step = Step(shape, computed, rng)
        follow(step, peer, followers, oracles, verdicts, fp32)
    conclude(step, peer, followers, oracles, verdicts, fp32, computed)
    return verdicts.table()


def follow(step, peer, followers, oracles, verdicts, fp32):
    """One step of everybody, and what can be compared after it."""
    state_limit = 1e-5 if fp32 else 1e-2
    outs, convs = peer.verify(step)
    records = [(u.clone(), kg.clone()) for u, kg in peer.records(step)]
    lens = torch.tensor(step.lens, device=outs[0].device)
    held = (torch.arange(peer.shape.window, device=lens.device)[None] < lens[:, None])[:, None].expand(
        -1, peer.shape.heads, -1
    )  # [rows, H, Q]: records that this step wrote
    peer.commit(step)
    made = {}
    for name, one in followers.items():
        got, got_convs = one.verify(step)
        for i, out in enumerate(outs):
            if fp32:
                verdicts.roundings(f"{name}: outputs, roundings", got[i], out)
            else:
                verdicts.norms(f"{name}: outputs, norm", got[i], out, state_limit)
            if got_convs is not None:
                # The engine's kernel rounds each product to 16 bits, ours only the result.
                eps = torch.finfo(out.dtype).eps
                verdicts.norms(f"{name}: convolutions, norm", got_convs[i], convs[i], eps)
                made[name] = got_convs
        if not isinstance(one, PerToken):
            for (u, kg), (want_u, want_kg) in zip(one.records(step), records, strict=True):
                verdicts.norms(f"{name}: corrections", u[held], want_u[held], state_limit)
                verdicts.same(f"{name}: keys and gates, differing", kg[held], want_kg[held])
        one.commit(step)
        if isinstance(one, PerToken):
            finals = peer.checkpoints(step.finals)
            for got_state, want in zip(one.accepted_states(step), finals, strict=True):
                verdicts.norms(f"{name}: checkpoints", got_state, want, state_limit)
        elif not isinstance(one, Deferred):
            compare_states(name, one, peer, step.written, verdicts, state_limit)
    for i, by_request in enumerate(oracles):
        q, k, v = step.qkv[i]
        parts = (q[0], k[0], step.raw_g[i][0], v[0], step.raw_beta[i][0])
        for b, (r, a) in enumerate(zip(step.requests, step.accepted, strict=True)):
            begin, end = step.starts[b], step.starts[b + 1]
            window = by_request[r].step(*(part[begin:end] for part in (*parts, step.x[i])), a)
            want = window.correction.transpose(0, 1)
            verdicts.norms(
                "peer to the oracle: convolutions, norm", convs[i][begin:end], window.conv, torch.finfo(q.dtype).eps
            )
            verdicts.roundings(
                "deferred to the oracle: convolutions, roundings", made["deferred"][i][begin:end], window.conv
            )
            verdicts.norms("peer to the oracle: corrections", records[i][0][b][:, : end - begin], want, state_limit)
            if not fp32:
                continue
            for name in ("eager", "deferred"):
                got_u = followers[name].records(step)[i][0][b][:, : end - begin]
                verdicts.norms(f"{name} to the oracle: corrections", got_u, want, state_limit)


def compare_states(name, one, peer, slots, verdicts, limit):
    for got, want in zip(one.checkpoints(slots), peer.checkpoints(slots), strict=True):
        verdicts.norms(f"{name}: checkpoints", got, want, limit)
    for got, want in zip(one.histories(slots), peer.histories(slots), strict=True):
        verdicts.same(f"{name}: convolution histories, differing", got, want)


def conclude(step, peer, followers, oracles, verdicts, fp32, computed):
    """Drain what is pending, then compare whole pools, and everybody with the oracle."""
    limit = 1e-5 if fp32 else 1e-2
    live = [slot_of(peer.shape, r, n) for r, n in enumerate(computed)]
    everything = list(range(1, peer.layers[0].kv_cache[1].shape[0]))
    for name, one in followers.items():
        one.finish(step)
        if isinstance(one, PerToken):
            continue
        for got, want in zip(one.checkpoints(everything), peer.checkpoints(everything), strict=True):
            verdicts.norms(f"{name}: whole pool at the end", got, want, limit)
        for got, want in zip(one.histories(live), peer.histories(live), strict=True):
            verdicts.same(f"{name}: histories at the end, differing", got, want)
    for name, one in {"peer": peer, **{k: v for k, v in followers.items() if not isinstance(v, PerToken)}}.items():
        for got, by_request in zip(one.checkpoints(live), oracles, strict=True):
            want = torch.stack([oracle.state for oracle in by_request])
            verdicts.norms(f"{name} to the oracle: checkpoints", got, want, limit)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="wheel; downloaded without it")
    parser.add_argument("--fla", type=Path, help="wheel; downloaded without it")
    parser.add_argument("--device", type=device_option, default="cuda")
    parser.add_argument("--backend", default="auto", help="of graphrt")
    parser.add_argument("--state", choices=DTYPES, default="float32", help="dtype of the checkpoints")
    parser.add_argument("--act", choices=["bfloat16", "float16"], default="bfloat16", help="dtype of activations")
    parser.add_argument("--align", action="store_true", help="only align mode; else both modes")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--block", type=int, default=32, help="tokens of a state block in align mode")
    parser.add_argument("--commit", default="", help="of graphrt, for the facts")
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args()
    device, failed, found = torch.device(args.device), False, {}
    with peers(device, args.vllm, args.fla) as (vllm, fla):
        versions = {"vllm": vllm.version, "fla-core": fla.version, "graphrt": graphrt.__version__}
        print("  ".join(f"{name} {version}" for name, version in versions.items()))
        for block in (args.block,) if args.align else (0, args.block):
            for dim_first in (True, False):
                shape = Shape(
                    device, args.layers, args.heads, args.head_dim, args.window, args.requests, block, args.steps,
                    DTYPES[args.state], DTYPES[args.act], dim_first,
                )  # fmt: skip
                name = f"{'align' if block else 'plain'}, {'dim first' if dim_first else 'dim last'}"
                found[name] = run(shape, vllm, fla, args.backend)
                print(f"\n{args.state} checkpoints, {name}, {args.steps} steps")
                for row in found[name]:
                    failed |= not row["ok"]
                    verdict = "ok" if row["ok"] else "FAILED"
                    print(f"  {verdict:6}  {row['worst']:10.3g}  <= {row['limit']:<8.3g} {row['what']}")
    if args.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        sizes = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
        facts = {"device": name, "torch": torch.__version__, **versions, "args": sizes, "cases": found}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    print("\nFAILED" if failed else "\nall within their limits")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
