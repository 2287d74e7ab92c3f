"""What the tests stand on: pools in poisoned memory, batches of windows, and calls of the public API on both.

Everything that may not be read starts as NaN: unused slots, the null slot 0, columns behind a history, the
gaps between slots, records nobody wrote, the scratch row, tokens past the last row. Everything that may not
be written is compared byte by byte with a `Snapshot`.

Letters: B rows of a step, H heads, D head_dim (K = V = D), Q query_len, R record rows, L layers, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import LayerParams, Window
from torch import Tensor

import graphrt
from graphrt import (
    FP32_DEFERRED,
    KDADeferredCommitContext,
    KDALayer,
    allocate_records,
    kda_conv_verify,
    kda_deferred_verify,
    kda_recoverssm_verify,
)

NAN = float("nan")
GUARD = 64


@dataclass(frozen=True)
class Shape:
    """Sizes and dtypes of a pool; small enough for Triton's interpreter unless a test says otherwise."""

    heads: int = 2
    head_dim: int = 16
    query_len: int = 4
    rows: int = 6
    slots: int = 12
    layers: int = 2
    width: int = 4
    conv_dim: int = 20
    lower_bound: float | None = -5.0
    act: torch.dtype = torch.float32
    pool: torch.dtype = torch.float32
    param: torch.dtype = torch.float32
    engine_layout: bool = False
    conv_dim_first: bool = True
    conv_bias: bool = True

    @property
    def history(self) -> int:
        """Convolution inputs a request keeps."""
        return self.width - 1

    @property
    def columns(self) -> int:
        """Columns of a convolution state: `hist + Q`, or one fewer in the engine's layout."""
        return self.history + self.query_len - int(self.engine_layout)

    @property
    def takes_zero(self) -> bool:
        """Whether a row with tokens may accept none of them."""
        return not self.engine_layout


@dataclass(frozen=True)
class Target:
    """One backend on one device."""

    backend: str
    device: str

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter, which is slow."""
        return self.backend == "triton" and self.device == "cpu"

    def shape(self, **changes: Any) -> Shape:
        """The default shape, or the nearest one this backend can run, with `changes`."""
        base = Shape(head_dim=128, act=torch.bfloat16) if self.backend == FP32_DEFERRED else Shape()
        if self.backend == FP32_DEFERRED:
            changes.pop("head_dim", None)
        return replace(base, **changes)


def nan(*size: int, dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of NaN."""
    return torch.full(size, NAN, dtype=dtype, device=device)


def paged(slots: int, payload: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """`[slots, *payload]` of NaN: inner dimensions contiguous, NaN gaps between slots and at both ends."""
    size = math.prod(payload)
    stride = (size // GUARD + 2) * GUARD
    memory = nan(GUARD + slots * stride, dtype=dtype, device=device)
    inner = [math.prod(payload[i + 1 :]) for i in range(len(payload))]
    return memory.as_strided((slots, *payload), (stride, *inner), GUARD)


def whole(view: Tensor) -> Tensor:
    """All elements of the memory behind `view`, guards included."""
    elements = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((elements,), (1,), 0)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN included."""
    a, b = a.detach().contiguous().cpu(), b.detach().contiguous().cpu()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def make_params(shape: Shape, device: str) -> LayerParams:
    """Random constants of one layer, on `device`."""

    def normal(*size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, dtype=torch.float64) * scale).to(dtype).to(device)

    return LayerParams(
        A_log=normal(shape.heads, dtype=shape.param, scale=0.3),
        dt_bias=normal(shape.heads * shape.head_dim, dtype=shape.param, scale=0.3),
        lower_bound=shape.lower_bound,
        conv_weight=normal(shape.conv_dim, shape.width, dtype=shape.act, scale=0.5),
        conv_bias=normal(shape.conv_dim, dtype=shape.act) if shape.conv_bias else None,
    )


def loose(layer: Any, *, conv: bool = True) -> SimpleNamespace:
    """An engine's own layer: an object that only has the attributes a context needs."""
    names = [
        "kv_cache",
        "recoverssm_records",
        "A_log",
        "dt_bias",
        "local_num_heads",
        "head_dim",
        "gate_lower_bound",
    ]
    return SimpleNamespace(**{n: getattr(layer, n) for n in names + ["conv_weight", "conv_bias"] * conv})


def on_cpu(params: LayerParams) -> LayerParams:
    """The same constants for the oracle."""
    bias = None if params.conv_bias is None else params.conv_bias.cpu()
    return LayerParams(params.A_log.cpu(), params.dt_bias.cpu(), params.lower_bound, params.conv_weight.cpu(), bias)


class Pool:
    """Layers with checkpoints, convolution states and records in poisoned memory, their context and
    `pending`.
    """

    def __init__(
        self,
        target: Target,
        shape: Shape,
        *,
        params: list[LayerParams] | None = None,
        kind: type = KDADeferredCommitContext,
        **create: Any,
    ):
        self.target, self.shape, self.device = target, shape, target.device
        self.params = params or [make_params(shape, target.device) for _ in range(shape.layers)]
        self.layers = [self._layer(constants) for constants in self.params]
        guarded = torch.zeros(shape.rows + 2, dtype=torch.int32, device=target.device)
        # Whoever reads pending[-1] or pending[R] folds records that are NaN.
        guarded[0] = guarded[-1] = shape.query_len
        self.pending = guarded[1:-1]
        options = {"spec_query_len": shape.query_len, "max_num_reqs": shape.rows}
        options |= {"conv_dim_first": shape.conv_dim_first, "backend": target.backend}
        self.context = kind.create(self.layers, **(options | create))
        if target.backend == FP32_DEFERRED and self.context.backend != FP32_DEFERRED:
            pytest.skip(f"fp32_deferred: {self.context.backend_reason}")
        graphrt.reset_errors(torch.device(target.device))

    def _layer(self, params: LayerParams) -> KDALayer:
        s = self.shape
        conv = (s.conv_dim, s.columns) if s.conv_dim_first else (s.columns, s.conv_dim)
        records = allocate_records(s.rows, s.heads, s.query_len, s.head_dim, s.act, torch.device(self.device))
        for tensor in (records.correction, records.key_gate):
            whole(tensor).fill_(NAN)
        return KDALayer(
            kv_cache=(
                paged(s.slots, conv, s.act, self.device),
                paged(s.slots, (s.heads, s.head_dim, s.head_dim), s.pool, self.device),
            ),
            recoverssm_records=records,
            A_log=params.A_log,
            dt_bias=params.dt_bias,
            local_num_heads=s.heads,
            head_dim=s.head_dim,
            gate_lower_bound=s.lower_bound,
            conv_weight=params.conv_weight,
            conv_bias=params.conv_bias,
        )

    def twin(self, **create: Any) -> Pool:
        """Another pool with the same constants and, byte for byte, the same content."""
        other = Pool(self.target, self.shape, params=self.params, **create)
        for mine, theirs in zip(self.tensors().values(), other.tensors().values(), strict=True):
            whole(theirs).copy_(whole(mine))
        return other

    def conv(self, layer: int) -> Tensor:
        """Convolution states of a layer as `[slots, conv_dim, C]`, whatever the layout."""
        state = self.layers[layer].kv_cache[0]
        return state if self.shape.conv_dim_first else state.transpose(1, 2)

    def checkpoint(self, layer: int) -> Tensor:
        """Checkpoints of a layer, `[slots, H, V, K]`."""
        return self.layers[layer].kv_cache[1]

    def records(self, layer: int) -> Any:
        """Records of a layer."""
        return self.layers[layer].recoverssm_records

    def put(self, slot: int, layer: int, state: Tensor, history: Tensor) -> None:
        """Give a slot a state and a history; the columns behind the history become NaN."""
        self.checkpoint(layer)[slot] = state.to(self.shape.pool).to(self.device)
        conv = self.conv(layer)[slot]
        conv.fill_(NAN)
        conv[:, : self.shape.history] = history.to(self.device)

    def fill(self, slot: int, *, zero: bool = False) -> None:
        """Give a slot a random (or the zero) state and history in every layer."""
        s = self.shape
        scale = 0.0 if zero else 1.0
        for layer in range(s.layers):
            state = torch.randn(s.heads, s.head_dim, s.head_dim, dtype=torch.float64) * 0.3 * scale
            self.put(slot, layer, state, (torch.randn(s.conv_dim, s.history) * scale).to(s.act))

    def poison(self, slot: int) -> None:
        """Make a slot unreadable."""
        for layer in range(self.shape.layers):
            self.checkpoint(layer)[slot] = NAN
            self.conv(layer)[slot] = NAN

    def state(self, slot: int, layer: int) -> tuple[Tensor, Tensor]:
        """Checkpoint and history of a slot, where the history is compacted."""
        return self.checkpoint(layer)[slot], self.conv(layer)[slot][:, : self.shape.history]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that outlives a step."""
        named = {"pending": self.pending}
        for i in range(self.shape.layers):
            named[f"conv {i}"], named[f"checkpoint {i}"] = self.layers[i].kv_cache
            named[f"correction {i}"] = self.records(i).correction
            named[f"key_gate {i}"] = self.records(i).key_gate
        return named

    def errors(self) -> dict[str, int]:
        """The kinds of device errors met since the last reset, with their counts."""
        return {kind: n for kind, n in graphrt.error_counts(torch.device(self.device)).items() if n}

    def int32(self, values: Iterable[int], *, wide: bool = False) -> Tensor:
        """An index tensor; `wide`: column 0 of a table whose other columns are absurd."""
        column = torch.tensor(list(values), dtype=torch.int32, device=self.device)
        if not wide:
            return column
        table = torch.full((len(column), 9), 1 << 30, dtype=torch.int32, device=self.device)
        table[:, 0] = column
        return table[:, 0]


class Snapshot:
    """Every byte of a pool at one moment."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.memory = {name: whole(tensor).clone() for name, tensor in pool.tensors().items()}

    def changed(self, *, slots: Iterable[int] = (), rows: Iterable[int] = (), pending: bool = False) -> list[str]:
        """Tensors with a changed byte outside these slots and record rows (and the scratch row)."""
        slots, rows, names = list(slots), list(rows), []
        for name, tensor in self.pool.tensors().items():
            if name == "pending" and pending:
                continue
            now, then = whole(tensor).clone(), self.memory[name].clone()
            for memory in (now, then):
                view = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                if name.startswith(("conv", "checkpoint")):
                    view[slots] = 0
                if name.startswith(("correction", "key_gate")):
                    view[rows] = 0
                    memory[: tensor.storage_offset()] = 0
            if not same_bytes(now, then):
                names.append(name)
        return names


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
    """Both verifies of every layer, as an engine's forward pass runs them."""
    results = []
    for layer in range(batch.pool.shape.layers):
        conv = conv_verify(batch, layer, deferred=deferred)
        results.append(Verified(core_verify(batch, layer, deferred=deferred), conv))
    return results


def commit(batch: Batch, accepted: Sequence[int], *, deferred: bool = True, **kw: Any) -> None:
    """The commit of the step: `accepted[b]` tokens of row b, deferred or folded now."""
    pool = batch.pool
    kw = {"record_rows": batch.record_rows, "pending": pool.pending if deferred else None} | kw
    pool.context.commit(pool.int32(accepted), batch.state_indices, batch.query_start_loc, **kw)


def drain(pool: Pool, slots: Sequence[int], rows: Sequence[int]) -> None:
    """Fold what is pending of these rows."""
    pool.context.drain(pool.int32(slots), pool.int32(rows), pool.pending)
