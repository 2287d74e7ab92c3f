"""What the tests stand on: backends, shapes, and pools in poisoned memory. The steps over them are in `steps.py`.

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
from oracle import LayerParams
from torch import Tensor

import graphrt
from graphrt import FP32_DEFERRED, KDADeferredCommitContext, KDALayer, allocate_records

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

    def spare(self, condition: bool) -> None:
        """Skip a combination under the interpreter: there the others must do."""
        if self.interpreted and condition:
            pytest.skip("one of the combinations that the interpreter is spared")

    def shape(self, **changes: Any) -> Shape:
        """The default shape, or the nearest one this backend can run, with `changes`."""
        base = Shape(head_dim=128, act=torch.bfloat16) if self.backend == FP32_DEFERRED else Shape()
        if self.backend == FP32_DEFERRED:
            changes.pop("head_dim", None)
        return replace(base, **changes)


def nan(*size: int, dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of NaN."""
    return torch.full(size, NAN, dtype=dtype, device=device)


def numbered_nan(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """NaN whose payloads differ from element to element, so that a copy of one over another is a changed byte."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    memory = nan(size, dtype=dtype, device=device)
    # Six bits are free in the shortest mantissa, BF16, beside the one that makes the NaN quiet.
    memory.view(bits).bitwise_or_(torch.arange(size, device=device).remainder(61).to(bits))
    return memory


def paged(slots: int, payload: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """`[slots, *payload]` of NaN: inner dimensions contiguous, NaN gaps between slots and at both ends."""
    size = math.prod(payload)
    stride = (size // GUARD + 2) * GUARD
    memory = numbered_nan(GUARD + slots * stride, dtype, device)
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
