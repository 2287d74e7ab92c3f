"""One step over a pool: batches of windows, and the calls of the public API that verify, commit and drain them.

Letters: B rows of a step, H heads, K and V key and value dimension, Q window, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from oracle import Window
from rig import GUARD, Pool, Shape, nan, whole
from torch import Tensor

from graphrt import kda_conv_verify, kda_deferred_verify, kda_recoverssm_verify


@dataclass(frozen=True)
class Row:
    """One row of a step."""

    slot: int
    row: int
    tokens: int


def strided(*size: int, dtype: torch.dtype, device: str, gap: int) -> Tensor:
    """`[T, ...]` of NaN whose tokens lie `gap` elements further apart than their payload."""
    payload = math.prod(size[1:])
    inner = [math.prod(size[i + 1 :]) for i in range(1, len(size))]
    memory = nan(size[0] * (payload + gap) + GUARD, dtype=dtype, device=device)
    return memory.as_strided(size, (payload + gap, *inner))


@dataclass
class Tokens:
    """Inputs of one layer in one step, `[T, ...]`."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, V]
    raw_g: Tensor  # [T, H, K]
    raw_beta: Tensor  # [T, H]
    x: Tensor  # [T, conv_dim]

    @classmethod
    def random(cls, shape: Shape, live: int, tail: int, device: str, *, gap: int = 0, kind: str = "random") -> Tokens:
        """Random inputs for `live` tokens with `tail` NaN tokens behind them.

        `kind="strong_then_weak"`: similar keys; the gate closes almost fully on even tokens and hardly at all on odd.
        """
        h, d = shape.heads, shape.head_dim

        def make(*size: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
            full = strided(live + tail, *size, dtype=shape.act, device=device, gap=gap)
            full[:live] = (torch.randn(live, *size, dtype=torch.float64) * scale + shift).to(shape.act).to(device)
            return full

        tokens = cls(
            q=make(h, d), k=make(h, d), v=make(h, d), raw_g=make(h, d, scale=1.5, shift=-2.0),
            raw_beta=make(h), x=make(shape.conv_dim),
        )  # fmt: skip
        if kind == "strong_then_weak":
            base = torch.randn(h, d, dtype=torch.float64, device=device)
            tokens.k[:live] = (base + 0.05 * tokens.k[:live].double()).to(shape.act)
            tokens.raw_g[:live:2] = 8.0
            tokens.raw_g[1:live:2] = -9.0
            tokens.raw_beta[:live] = 2.0
        return tokens

    def window(self, start: int, end: int) -> Window:
        """The tokens of one row, for the oracle."""
        parts = (self.q, self.k, self.v, self.raw_g, self.raw_beta, self.x)
        return Window(*(part[start:end].cpu() for part in parts))

    def clone(self) -> Tokens:
        """A copy with the same strides."""
        copies = []
        for part in (self.q, self.k, self.v, self.raw_g, self.raw_beta, self.x):
            copies.append(whole(part).clone().as_strided(part.shape, part.stride(), part.storage_offset()))
        return Tokens(*copies)


class Batch:
    """The rows of one step with their index tensors and, per layer, their tokens."""

    def __init__(
        self,
        pool: Pool,
        rows: Sequence[Row],
        *,
        tail: int = 0,
        gap: int = 0,
        wide: bool = False,
        kind: str = "random",
        tokens: list[Tokens] | None = None,
    ):
        self.pool, self.rows = pool, list(rows)
        self.starts = [sum(r.tokens for r in self.rows[:b]) for b in range(len(self.rows) + 1)]
        self.tokens = tokens or [
            Tokens.random(pool.shape, self.starts[-1], tail, pool.device, gap=gap, kind=kind)
            for _ in range(pool.shape.layers)
        ]
        self.query_start_loc = pool.int32(self.starts, wide=wide)
        self.state_indices = pool.int32((r.slot for r in self.rows), wide=wide)
        self.record_rows = pool.int32((r.row for r in self.rows), wide=wide)

    def on(self, pool: Pool) -> Batch:
        """The same step for another pool."""
        return Batch(pool, self.rows, tokens=self.tokens)

    def windows(self, b: int) -> list[Window]:
        """Row b's tokens in every layer."""
        return [tokens.window(self.starts[b], self.starts[b + 1]) for tokens in self.tokens]

    def span(self, b: int) -> slice:
        """Where row b's tokens lie."""
        return slice(self.starts[b], self.starts[b + 1])


@dataclass(frozen=True)
class Verified:
    """Outputs of one layer."""

    out: Tensor  # [T, H, V]
    conv: Tensor  # [T, conv_dim]


def core_verify(
    batch: Batch, layer: int, *, deferred: bool, rows: bool = True, out: Tensor | None = None, **kw: Any
) -> Tensor:
    """The KDA verify of one layer; `[T, H, V]`."""
    pool = batch.pool
    t, params = batch.tokens[layer], pool.params[layer]
    inputs = [part[None] for part in (t.q, t.k, t.v, t.raw_g, t.raw_beta)]
    constants = (
        params.A_log,
        params.dt_bias,
        params.lower_bound,
        pool.checkpoint(layer),
        pool.records(layer),
    )
    steps = (batch.query_start_loc, batch.state_indices, pool.shape.query_len, out)
    kw = {"backend": pool.target.backend, "record_rows": batch.record_rows if rows else None} | kw
    if deferred:
        return kda_deferred_verify(*inputs, *constants, *steps, **({"pending": pool.pending} | kw))[0]
    return kda_recoverssm_verify(*inputs, *constants, *steps, **kw)[0]


def conv_verify(
    batch: Batch, layer: int, *, deferred: bool, rows: bool = True, out: Tensor | None = None, **kw: Any
) -> Tensor:
    """The convolution verify of one layer; `[T, conv_dim]`."""
    pool, s = batch.pool, batch.pool.shape
    params = pool.params[layer]
    kw = {
        "record_rows": batch.record_rows if rows else None,
        "pending": pool.pending if deferred else None,
        "conv_dim_first": s.conv_dim_first,
        "backend": pool.target.backend,
    } | kw
    steps = (batch.query_start_loc, batch.state_indices, s.query_len, out)
    state = pool.layers[layer].kv_cache[0]
    return kda_conv_verify(batch.tokens[layer].x, state, params.conv_weight, params.conv_bias, *steps, **kw)


def verify(batch: Batch, *, deferred: bool = True) -> list[Verified]:
    """Both verifies of every layer, as an engine's forward pass runs them, into buffers of NaN."""
    results = []
    for layer in range(batch.pool.shape.layers):
        out, conv = (torch.full_like(t, torch.nan) for t in (batch.tokens[layer].v[None], batch.tokens[layer].x))
        conv_verify(batch, layer, deferred=deferred, out=conv)
        core_verify(batch, layer, deferred=deferred, out=out)
        results.append(Verified(out[0], conv))
    return results


def commit(batch: Batch, accepted: Sequence[int], *, deferred: bool = True, **kw: Any) -> None:
    """The commit of the step: `accepted[b]` tokens of row b, deferred or folded now."""
    pool = batch.pool
    kw = {"record_rows": batch.record_rows, "pending": pool.pending if deferred else None} | kw
    pool.context.commit(pool.int32(accepted), batch.state_indices, batch.query_start_loc, **kw)


def drain(pool: Pool, slots: Sequence[int], rows: Sequence[int]) -> None:
    """Fold what is pending of these rows."""
    pool.context.drain(pool.int32(slots), pool.int32(rows), pool.pending)
