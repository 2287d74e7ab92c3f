"""A step's tensors on static memory: live rows, padding rows, dummy rows, and the step that graphrt runs on them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from ..context import KDARecoverSSMCommitContext
from ..layers import KDALayer
from ..verify import kda_conv_verify, kda_deferred_verify, kda_recoverssm_verify
from .pools import Pool, normal
from .traces import Row
from .truths import Tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one step; B rows, T tokens, L layers. `copy_` stages another step of the same size.

    state_indices        [B] int32, 0 in padding rows
    record_rows          [B] int32, -1 in padding and dummy rows
    query_start_loc      [B + 1] int32
    num_accepted_tokens  [B] int32
    q, k, raw_g          [L, T, H, K]; tokens of no row are NaN, here and below
    v                    [L, T, H, V]
    raw_beta             [L, T, H]
    x                    [L, T, conv_dim]
    """

    state_indices: Tensor
    record_rows: Tensor
    query_start_loc: Tensor
    num_accepted_tokens: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    raw_g: Tensor
    raw_beta: Tensor
    x: Tensor

    def copy_(self, other: "Batch") -> None:
        """Take over the values of another batch of the same shapes, in place."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))

    def tokens(self, layer: int, begin: int, end: int) -> tuple[Tensor, ...]:
        """q, k, raw_g, v, raw_beta and x of some tokens, in the order of `Oracle.step`."""
        parts = (self.q, self.k, self.raw_g, self.v, self.raw_beta, self.x)
        return tuple(part[layer, begin:end] for part in parts)


def make_batch(pool: Pool, rows: Sequence[Row], *, size: int, seed: int = 0, dcp: bool = False) -> Batch:
    """A step of `rows` in a batch of `size` rows and size * Q tokens, with random activations.

    Rows behind the live ones are padding: slot 0, record row -1, no tokens. With `dcp` they are the dummy rows of a
    decode-context-parallel capture instead: slots 0, 1, ..., record row -1, and a full window each.
    """
    if len(rows) > size:
        raise ValueError(f"rows: expected at most {size}, the size of the batch, got {len(rows)}")
    window, missing = pool.spec_query_len, size - len(rows)
    num_slots = pool.layers[0].kv_cache[1].shape[0]
    dummies = [slot % num_slots for slot in range(missing)] if dcp else [0] * missing
    lengths = [row.length for row in rows] + [window if dcp else 0] * missing
    offsets = [sum(lengths[:i]) for i in range(size + 1)]

    def indices(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pool.device)

    random = torch.Generator().manual_seed(seed)
    first = pool.layers[0]
    heads, dim, dtype = first.local_num_heads, first.head_dim, first.recoverssm_records.key_gate.dtype

    def tokens(*shape: int) -> Tensor:
        values = normal(random, len(pool.layers), size * window, *shape)
        values[:, offsets[-1] :] = float("nan")
        return values.to(device=pool.device, dtype=dtype)

    return Batch(
        indices([row.slot for row in rows] + dummies),
        indices([row.row for row in rows] + [-1] * missing),
        indices(offsets),
        indices([row.accepted for row in rows] + [0] * missing),
        tokens(heads, dim), tokens(heads, dim), tokens(heads, dim), tokens(heads, dim), tokens(heads),
        tokens(pool.conv_dim),
    )  # fmt: skip


def dummy_batch(pool: Pool, *, size: int, dcp: bool = False) -> Batch:
    """A batch without a live row: what is staged for a warm-up, a capture, or an idle rank."""
    return make_batch(pool, [], size=size, dcp=dcp)


def deferred_step(
    context: KDARecoverSSMCommitContext, pool: Pool, batch: Batch, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Deferred verify of all layers, then the commit: outputs [L, T, H, V] and of the convolutions [L, T, conv_dim].

    An engine puts its own verify in this place, and compares.
    """
    outs, convs = [], []
    for i, layer in enumerate(pool.layers):
        conv, out = _verify_layer(pool, layer, batch, i, backend)
        convs.append(conv)
        outs.append(out)
    b = batch
    context.commit(
        b.num_accepted_tokens, b.state_indices, b.query_start_loc, record_rows=b.record_rows, pending=pool.pending
    )
    return torch.stack(outs), torch.stack(convs)


def _verify_layer(pool: Pool, layer: KDALayer, b: Batch, i: int, backend: str) -> tuple[Tensor, Tensor]:
    conv_state, checkpoint = layer.kv_cache
    if layer.conv_weight is None:
        raise ValueError(f"layers[{i}].conv_weight: expected the weights of the convolution, got None")
    rows = (b.query_start_loc, b.state_indices, pool.spec_query_len)
    conv = kda_conv_verify(
        b.x[i], conv_state, layer.conv_weight, layer.conv_bias, *rows,
        record_rows=b.record_rows, pending=pool.pending, backend=backend,
    )  # fmt: skip
    q, k, raw_g, v, raw_beta = (part[i][None] for part in (b.q, b.k, b.raw_g, b.v, b.raw_beta))
    out = kda_deferred_verify(
        q, k, v, raw_g, raw_beta, layer.A_log, layer.dt_bias, layer.gate_lower_bound,
        checkpoint, layer.recoverssm_records, *rows,
        record_rows=b.record_rows, pending=pool.pending, backend=backend,
    )  # fmt: skip
    return conv, out[0]


class RowsOfStep(Protocol):
    """Whatever has the index tensors of a step: `StepRows`, the rows of `StepInputs`, a `Batch`."""

    @property
    def state_indices(self) -> Tensor: ...
    @property
    def record_rows(self) -> Tensor: ...
    @property
    def query_start_loc(self) -> Tensor: ...


def verify_layers(
    pool: Pool, t: Tokens, rows: RowsOfStep, pending: Tensor | None, backend: str, out: Tensor, conv: Tensor
) -> None:
    """Both verifies of every layer, stock ones without `pending`; B * Q tokens of `t` go in.

    Args:
        out: [L, >= B * Q, H, V], and conv: [L, >= B * Q, conv_dim] receive the outputs.
    """
    window, count = pool.spec_query_len, rows.state_indices.shape[0] * pool.spec_query_len
    step = (rows.query_start_loc, rows.state_indices, window)
    for i, layer in enumerate(pool.layers):
        conv_state, checkpoint = layer.kv_cache
        if layer.conv_weight is not None:
            kda_conv_verify(
                t.x[i, :count], conv_state, layer.conv_weight, layer.conv_bias, *step, conv[i, :count],
                record_rows=rows.record_rows, pending=pending, backend=backend,
            )  # fmt: skip
        q, k, v, raw_g, raw_beta = (part[i, None, :count] for part in (t.q, t.k, t.v, t.raw_g, t.raw_beta))
        inputs = (
            q, k, v, raw_g, raw_beta, layer.A_log, layer.dt_bias, layer.gate_lower_bound, checkpoint,
            layer.recoverssm_records, *step, out[i, None, :count],
        )  # fmt: skip
        if pending is None:
            kda_recoverssm_verify(*inputs, record_rows=rows.record_rows, backend=backend)
        else:
            kda_deferred_verify(*inputs, record_rows=rows.record_rows, pending=pending, backend=backend)
