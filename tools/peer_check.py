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
16-bit outputs within one rounding, keys, gates and histories bit for bit. Exit status 1 where one is passed.

    python tools/peer_check.py [--vllm WHEEL] [--fla WHEEL] [--align] [--state bfloat16] [--json PATH]
    TRITON_INTERPRET=1 python tools/peer_check.py --device cpu --backend torch --head-dim 16 --heads 2 --steps 4
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from peers import peers
from torch import Tensor

import graphrt
from graphrt.testing import Oracle

BOUND = -5.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """Sizes of the layers and of the trace."""

    device: torch.device
    layers: int
    heads: int
    dim: int
    window: int
    requests: int
    block: int
    """Tokens of a state block in align mode, 0 without it."""
    steps: int
    state: torch.dtype
    act: torch.dtype
    conv_dim_first: bool
    width: int = 4

    @property
    def blocks(self) -> int:
        """State slots of a request."""
        return 2 + self.steps * self.window // self.block if self.block else 1

    @property
    def conv_dim(self) -> int:
        return 3 * self.heads * self.dim


class Step:
    """One step's rows, in random order, behind them a padding row; and its inputs in every layer."""

    def __init__(self, shape: Shape, computed: list[int], rng: random.Random):
        requests = rng.sample(range(shape.requests), rng.randint(1, shape.requests))
        self.requests, self.lens = requests, [rng.randint(1, shape.window) for _ in requests]
        self.accepted = [rng.randint(1, n) for n in self.lens]
        self.starts = [sum(self.lens[:b]) for b in range(len(requests) + 1)]
        before = [computed[r] for r in requests]
        after = [n + a for n, a in zip(before, self.accepted, strict=True)]
        self.before = list(computed)
        for r, n in zip(requests, after, strict=True):
            computed[r] = n
        slots = [slot_of(shape, r, n) for r, n in zip(requests, before, strict=True)]
        self.finals = [slot_of(shape, r, n) for r, n in zip(requests, after, strict=True)]
        ends = [(n // shape.block + 1) * shape.block if shape.block else n + 1 << 40 for n in before]
        crossing = zip(requests, ends, after, strict=True)
        self.written = self.finals + [slot_of(shape, r, end) for r, end, n in crossing if n >= end]

        def indices(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=shape.device)

        counts = [0] * shape.requests
        for r, a in zip(requests, self.accepted, strict=True):
            counts[r] = a
        self.counts, self.computed = indices(counts), indices(self.before)
        self.query_start_loc, self.slots = indices([*self.starts, self.starts[-1]]), indices([*slots, 0])
        self.request_indices = indices([*requests, 0])
        # Record rows that are neither batch rows nor requests.
        self.record_rows = indices([*(shape.requests - 1 - r for r in requests), -1])
        tokens, h, d = self.starts[-1], shape.heads, shape.dim

        def values(*size: int, scale: float = 1.0, shift: float = 0.0) -> list[Tensor]:
            made = [torch.randn(size, device=shape.device) * scale + shift for _ in range(shape.layers)]
            return [one.to(shape.act) for one in made]

        self.x, self.raw_beta = values(tokens, shape.conv_dim), values(1, tokens, h)
        self.raw_g = values(1, tokens, h, d, scale=1.5, shift=-2.0)
        self.qkv: list[tuple[Tensor, Tensor, Tensor]] = []

    def live(self, row_wise: Tensor) -> Tensor:
        """The live rows of something by batch row."""
        return row_wise[: len(self.requests)]


def slot_of(shape: Shape, request: int, computed: int) -> int:
    """The slot that holds a request's state after so many tokens."""
    column = max(computed - 1, 0) // shape.block if shape.block else 0
    return 1 + request * shape.blocks + column


def align_arguments(shape: Shape, step: Step) -> dict:
    if not shape.block:
        return {}
    table = torch.arange(shape.requests * shape.blocks, dtype=torch.int32, device=shape.device) + 1
    table = table.view(shape.requests, shape.blocks)
    return {"block_table": table, "num_computed_tokens": step.computed, "mamba_block_size": shape.block}


def make_layers(shape: Shape) -> list[SimpleNamespace]:
    """The engine's layer objects, without records: pages of one buffer a layer, parameters of a module."""
    layers, d = [], shape.device
    slots, columns = 1 + shape.requests * shape.blocks, shape.width - 1 + shape.window - 1
    for _ in range(shape.layers):
        conv = torch.randn(slots, shape.conv_dim, columns, device=d).to(shape.act)
        if not shape.conv_dim_first:
            conv = conv.transpose(1, 2).contiguous()
        layers.append(
            SimpleNamespace(
                kv_cache=[conv, (torch.randn(slots, shape.heads, shape.dim, shape.dim, device=d)).to(shape.state)],
                recoverssm_records=None,
                A_log=torch.nn.Parameter(torch.randn(shape.heads, device=d) * 0.3, requires_grad=False),
                dt_bias=torch.nn.Parameter(torch.randn(shape.heads * shape.dim, device=d) * 0.3, requires_grad=False),
                local_num_heads=shape.heads,
                head_dim=shape.dim,
                gate_lower_bound=BOUND,
                weight=torch.randn(shape.conv_dim, shape.width, device=d).to(shape.act) * 0.5,
            )
        )
    return layers


def copy_of(layers: list[SimpleNamespace], records) -> list[SimpleNamespace]:
    """The same parameters over pools of their own."""
    return [
        SimpleNamespace(
            **(vars(one) | {"kv_cache": [t.clone() for t in one.kv_cache], "recoverssm_records": records()})
        )
        for one in layers
    ]


class Follower:
    """One implementation along the trace. `verify` gives outputs [T, H, V] and convolutions [T, conv_dim] by layer."""

    def __init__(self, shape: Shape, layers: list[SimpleNamespace]):
        self.shape, self.layers = shape, layers

    def histories(self, slots: list[int]) -> list[Tensor]:
        """[n, conv_dim, W - 1] by layer."""
        states = [one.kv_cache[0] for one in self.layers]
        if not self.shape.conv_dim_first:
            states = [state.transpose(1, 2) for state in states]
        return [state[slots, :, : self.shape.width - 1] for state in states]

    def checkpoints(self, slots: list[int]) -> list[Tensor]:
        """[n, H, V, K] by layer."""
        return [one.kv_cache[1][slots] for one in self.layers]

    def records(self, step: Step) -> list[tuple[Tensor, Tensor]]:
        """Correction and key_gate of the live rows, by layer; records are by batch row."""
        records = [one.recoverssm_records for one in self.layers]
        return [(step.live(one.correction), step.live(one.key_gate)) for one in records]

    def gate(self, step: Step, i: int) -> tuple:
        one = self.layers[i]
        q, k, v = step.qkv[i]
        rest = (one.A_log, one.dt_bias, BOUND, one.kv_cache[1], one.recoverssm_records)
        return (q, k, v, step.raw_g[i], step.raw_beta[i], *rest, step.query_start_loc, step.slots, self.shape.window)

    def finish(self, step: Step) -> None:
        """After the last step."""


def convolve(one: Follower, step: Step, backend: str, **rows: Tensor) -> list[Tensor]:
    """graphrt's convolution of every layer, [T, conv_dim] each."""
    rows |= {"conv_dim_first": one.shape.conv_dim_first, "backend": backend}
    where = (step.query_start_loc, step.slots, one.shape.window)
    pairs = zip(one.layers, step.x, strict=True)
    return [graphrt.kda_conv_verify(x, layer.kv_cache[0], layer.weight, None, *where, **rows) for layer, x in pairs]


class Peer(Follower):
    def __init__(self, shape: Shape, layers: list[SimpleNamespace], vllm, backend: str):
        super().__init__(shape, layers)
        self.vllm = vllm
        vllm.conv_dim_first(shape.conv_dim_first)
        options = {"spec_query_len": shape.window, "max_num_reqs": shape.requests + 1}
        self.context = vllm.context.create(layers, **options, backend=backend)
        self.ones = torch.ones(shape.requests + 1, dtype=torch.int32, device=shape.device)

    def convolve(self, step: Step) -> list[Tensor]:
        """The engine's convolution; its q, k and v are those that every follower gets."""
        outs = []
        for one, x in zip(self.layers, step.x, strict=True):
            state = one.kv_cache[0] if self.shape.conv_dim_first else one.kv_cache[0].transpose(1, 2)
            outs.append(
                self.vllm.conv_update(
                    x, state, one.weight, None, activation="silu", conv_state_indices=step.slots,
                    num_accepted_tokens=self.ones[: step.slots.shape[0]], query_start_loc=step.query_start_loc,
                    max_query_len=self.shape.window, out=torch.empty_like(x),
                )
            )  # fmt: skip
        return outs

    def verify(self, step: Step) -> tuple[list[Tensor], list[Tensor]]:
        convs, size = self.convolve(step), (1, -1, self.shape.heads, self.shape.dim)
        if not step.qkv:
            step.qkv = [tuple(part.view(size) for part in conv.chunk(3, dim=-1)) for conv in convs]
        return [self.vllm.verify(*self.gate(step, i))[0] for i in range(len(self.layers))], convs

    def commit(self, step: Step) -> None:
        align = align_arguments(self.shape, step)
        self.context.commit(step.counts, step.slots, step.query_start_loc, step.request_indices, **align)


class Eager(Follower):
    def __init__(self, shape: Shape, layers: list[SimpleNamespace], backend: str):
        super().__init__(shape, layers)
        sizes = {"spec_query_len": shape.window, "max_num_reqs": shape.requests + 1}
        kind = graphrt.KDARecoverSSMCommitContext
        self.context = kind.create(layers, **sizes, backend=backend, conv_dim_first=shape.conv_dim_first)
        self.backend = self.context.backend

    def verify(self, step: Step) -> tuple[list[Tensor], list[Tensor]]:
        convs = convolve(self, step, self.backend)
        call = graphrt.kda_recoverssm_verify
        return [call(*self.gate(step, i), backend=self.backend)[0] for i in range(len(self.layers))], convs

    def commit(self, step: Step) -> None:
        align = align_arguments(self.shape, step)
        self.context.commit(step.counts, step.slots, step.query_start_loc, step.request_indices, **align)


class Crossed(Eager):
    """On even steps our verify and the peer's commit, on odd steps the reverse, over one set of layers."""

    def __init__(self, shape: Shape, layers: list[SimpleNamespace], backend: str, peer: Peer):
        super().__init__(shape, layers, backend)
        self.peer, self.turn = peer, 0

    def verify(self, step: Step) -> tuple[list[Tensor], list[Tensor]]:
        self.turn += 1
        return super().verify(step) if self.turn % 2 else self.peer.verify(step)

    def commit(self, step: Step) -> None:
        return self.peer.commit(step) if self.turn % 2 else super().commit(step)


class Deferred(Eager):
    def __init__(self, shape: Shape, layers: list[SimpleNamespace], backend: str):
        super().__init__(shape, layers, backend)
        self.pending = torch.zeros(shape.requests + 1, dtype=torch.int32, device=shape.device)

    def verify(self, step: Step) -> tuple[list[Tensor], list[Tensor]]:
        rows = {"record_rows": step.record_rows, "pending": self.pending}
        convs, call = convolve(self, step, self.backend, **rows), graphrt.kda_deferred_verify
        return [call(*self.gate(step, i), **rows, backend=self.backend)[0] for i in range(len(self.layers))], convs

    def records(self, step: Step) -> list[tuple[Tensor, Tensor]]:
        rows = step.live(step.record_rows).long()
        records = [one.recoverssm_records for one in self.layers]
        return [(one.correction[rows], one.key_gate[rows]) for one in records]

    def commit(self, step: Step) -> None:
        align = align_arguments(self.shape, step)
        rows = {"record_rows": step.record_rows, "pending": self.pending}
        if align:
            block = self.shape.block
            where = (step.query_start_loc, block)
            rows["eager"] = graphrt.align_eager_mask(step.computed, *where, request_indices=step.request_indices)
        self.context.commit(step.counts, step.slots, step.query_start_loc, step.request_indices, **align, **rows)

    def finish(self, step: Step) -> None:
        shape, after = self.shape, list(step.before)
        for r, a in zip(step.requests, step.accepted, strict=True):
            after[r] += a
        slots = [slot_of(shape, r, n) for r, n in enumerate(after)]
        made = [torch.tensor(v, dtype=torch.int32, device=shape.device) for v in (slots, range(shape.requests))]
        self.context.drain(made[0], made[1].flip(0).contiguous(), self.pending)


class PerToken(Follower):
    """fla-core's recurrence as its engines use it: every token of a window stores a state of its own."""

    def __init__(self, shape: Shape, layers: list[SimpleNamespace], fla, computed: list[int]):
        super().__init__(shape, layers)
        self.fla, self.window = fla, shape.window
        starts = [slot_of(shape, r, n) for r, n in enumerate(computed)]
        self.pools = [one.kv_cache[1][starts].repeat_interleave(self.window, 0).contiguous() for one in layers]
        self.last = torch.ones(shape.requests, dtype=torch.int32, device=shape.device)

    def verify(self, step: Step) -> tuple[list[Tensor], None]:
        rows = step.live(step.request_indices).long()
        slots = rows[:, None] * self.window + torch.arange(self.window, device=rows.device)
        outs = []
        for i, (one, pool) in enumerate(zip(self.layers, self.pools, strict=True)):
            q, k, v = (part.contiguous() for part in step.qkv[i])
            out, _ = self.fla.recurrent(
                q, k, v, step.raw_g[i], step.raw_beta[i], one.A_log, one.dt_bias, pool, state_v_first=True,
                cu_seqlens=step.live(step.query_start_loc[1:]).new_tensor(step.starts),
                ssm_state_indices=slots.int(), num_accepted_tokens=self.last[rows], lower_bound=BOUND,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            )  # fmt: skip
            outs.append(out[0])
        return outs, None

    def commit(self, step: Step) -> None:
        rows = step.live(step.request_indices).long()
        self.last[rows] = step.counts[rows]

    def accepted_states(self, step: Step) -> list[Tensor]:
        """[n, H, V, K] of the live rows, after a commit."""
        rows = step.live(step.request_indices).long()
        return [pool[rows * self.window + self.last[rows] - 1] for pool in self.pools]


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


def oracle_of(shape: Shape, layer: SimpleNamespace, slot: int) -> Oracle:
    """The truth that starts from a slot of a layer."""
    conv_state = layer.kv_cache[0] if shape.conv_dim_first else layer.kv_cache[0].transpose(1, 2)
    known = SimpleNamespace(**vars(layer), conv_weight=layer.weight, conv_bias=None)
    return Oracle(known, layer.kv_cache[1][slot], conv_state[slot, :, : shape.width - 1])


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
            verdicts.norms(f"{name}: outputs, norm", got[i], out, 2e-3 if fp32 else 1e-2)
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
    parser.add_argument("--device", default="cuda")
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
    parser.add_argument("--json", type=Path)
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
        facts = {"device": name, "torch": torch.__version__, **versions, "args": vars(args), "cases": found}
        args.json.write_text(json.dumps(facts, indent=1, default=str) + "\n")
    print("\nFAILED" if failed else "\nall within their limits")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
