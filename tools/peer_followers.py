"""Implementations that follow one trace: the engine's, graphrt's and fla-core's, each over layers of its own.

The trace is of ragged steps over a paged state pool, with or without align mode. A follower has `verify(step)`, which
gives outputs and convolutions by layer, `commit(step)`, and views of what it holds.
"""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

import graphrt
from graphrt.testing import Oracle

BOUND = -5.0


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


def oracle_of(shape: Shape, layer: SimpleNamespace, slot: int) -> Oracle:
    """The truth that starts from a slot of a layer."""
    conv_state = layer.kv_cache[0] if shape.conv_dim_first else layer.kv_cache[0].transpose(1, 2)
    known = SimpleNamespace(**vars(layer), conv_weight=layer.weight, conv_bias=None)
    return Oracle(known, layer.kv_cache[1][slot], conv_state[slot, :, : shape.width - 1])
