"""Verify entry points of one layer: outputs for a window of draft tokens, and the records to commit it from later.

The functions hold no state. A step is atomic: the verify of every layer, then one commit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backends, call_order, checked
from .checks import (
    FLOATS,
    INT32_MAX,
    check_apart,
    check_count,
    check_entries_apart,
    check_head_dim,
    check_index,
    check_inner,
    check_is_tensor,
    check_lower_bound,
    check_own_memory,
    check_scratch_row,
    check_tensor,
    fail,
)
from .errors import error_counter
from .fused import ARGUMENTS, FusedConv, check_conv, check_fused, conv_facts
from .launch import launch
from .overlap import check_pool_apart
from .records import KDARecoverSSMRecords
from .steps import Rows


def kda_recoverssm_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    checkpoint_state: Tensor,
    records: KDARecoverSSMRecords,
    query_start_loc: Tensor,
    state_indices: Tensor,
    spec_query_len: int,
    out: Tensor | None = None,
    *,
    record_rows: Tensor | None = None,
    conv: FusedConv | None = None,
    backend: str = "auto",
    check: bool | None = None,
) -> Tensor:
    """Stock verify: outputs of each row's window from its checkpoint, which is only read, and the window's records.

    For head h and token t, with k, q scaled to unit length (and q by K ** -0.5), beta = sigmoid(raw_beta):

        S <- S * exp(g_t);  u_t = beta_t (v_t - S k_t);  S <- S + u_t k_t^T;  o_t = S q_t

    Args:
        q, k, raw_g: [1, T, H, K]; k and raw_g in the dtype of `records.key_gate`.
        v: [1, T, H, V]. raw_beta: [1, T, H]. Any token stride, last two dimensions contiguous. These, q and the
            parameters have any floating dtype of 16 bits or more; all is computed in FP32.
        A_log: [H]. dt_bias: [H * K]. lower_bound: of the gate, None for the softplus gate.
        checkpoint_state: [slots, H, V, K] FP32, BF16 or FP16 (float64 on torch), contiguous within a slot.
        records: row `record_rows[b]` (or b) receives (u_t, k_t, raw_g_t); row -1 is the scratch row.
        query_start_loc: [B + 1] int32; row b owns tokens `query_start_loc[b] .. [b + 1]`, 0 to Q of them. Offsets that
            decrease are counted; which outputs the step then has is not said, its states and records are in order.
        state_indices: [B] int32; a null slot gives zero outputs and touches nothing.
        spec_query_len: Q.
        out: [1, T, H, V], not over q, k, v or raw_g, else made in the dtype of v. Tokens of no live row are zero in it.
        record_rows: [>= B] int32.
        conv: q, k and v are raw projections, in the dtype of the convolution state, and go through this short
            convolution first (`FusedConv`).
        backend: "auto", "fp32_deferred", "triton" or "torch", as in `KDARecoverSSMCommitContext.create`.
        check: True reads and checks all values first; None leaves it to GRAPHRT_CHECK.

    Returns:
        out.

    Raises:
        ValueError: naming the argument, before anything is launched.
    """
    rows = Rows(query_start_loc, state_indices, record_rows, None, check_count("spec_query_len", spec_query_len, 1))
    inputs = (q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint_state, records)
    return _verify("graphrt.verify", *inputs, rows, conv, out, backend, check)


def kda_deferred_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    checkpoint_state: Tensor,
    records: KDARecoverSSMRecords,
    query_start_loc: Tensor,
    state_indices: Tensor,
    spec_query_len: int,
    out: Tensor | None = None,
    *,
    record_rows: Tensor,
    pending: Tensor,
    conv: FusedConv | None = None,
    backend: str = "auto",
    check: bool | None = None,
) -> Tensor:
    """Deferred verify: replay `pending[row]` records into the checkpoint, then the stock verify, in one pass.

    The folded state is written back in place where there was something to fold, and the row's records are overwritten
    by those of this window. A live row without tokens is folded all the same. Row -1 with a live-looking slot reads
    the checkpoint and writes only the scratch row.

    Args and errors as `kda_recoverssm_verify`, and
        record_rows: [>= B] int32. pending: [R] int32, by record row; only read (the commit rewrites it).
    """
    if record_rows is None or pending is None:
        missing = "record_rows" if record_rows is None else "pending"
        fail(
            missing,
            "a tensor: a deferred verify replays pending[record_rows[b]]",
            None,
            "kda_recoverssm_verify replays nothing",
        )
    rows = Rows(query_start_loc, state_indices, record_rows, pending, check_count("spec_query_len", spec_query_len, 1))
    inputs = (q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint_state, records)
    return _verify("graphrt.deferred_verify", *inputs, rows, conv, out, backend, check)


def kda_conv_verify(
    x: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    query_start_loc: Tensor,
    state_indices: Tensor,
    spec_query_len: int,
    out: Tensor | None = None,
    *,
    record_rows: Tensor | None = None,
    pending: Tensor | None = None,
    conv_dim_first: bool = True,
    backend: str = "auto",
    check: bool | None = None,
) -> Tensor:
    """Short causal convolution and silu over each row's window; keeps the window's inputs behind the history.

        y_t[d] = silu(bias[d] + sum_w weight[d, w] * x_{t - W + 1 + w}[d])

    With n = pending[row] the committed history starts n columns on (max(n - 1, 0) in the layout C = W - 1 + Q - 1);
    it is compacted to columns [0, W - 1) first, also for a live row without tokens.

    Args:
        x: [T, conv_dim], any token stride. conv_weight: [conv_dim, W]. conv_bias: [conv_dim] or None.
        conv_state: [slots, conv_dim, C] (or [slots, C, conv_dim]) in the dtype of x, C = W - 1 + Q or one less.
        query_start_loc, state_indices, spec_query_len, record_rows, pending: as in the verifies. Without
            `record_rows` every live slot is written; with it, row -1 writes nothing. How many record rows there are
            is known from `pending` alone: without it a row past the records counts as live.
        out: [T, conv_dim], not over x; tokens of no live row are zero in it.

    Returns:
        out.

    Raises:
        ValueError: naming the argument, before anything is launched.
    """
    rows = Rows(query_start_loc, state_indices, record_rows, pending, check_count("spec_query_len", spec_query_len, 1))
    conv = FusedConv(conv_state, conv_weight, conv_bias, conv_dim_first)
    channels, device = conv_facts(x, conv)
    convolution = check_conv(conv, channels, device, rows.spec_query_len, ARGUMENTS)
    state = convolution.state
    check_tensor("x", x, (None, channels), FLOATS, device)
    if x.dtype != state.dtype:
        fail("x", f"{state.dtype}, as conv_state", x.dtype)
    check_inner("x", x, 1)
    _check_rows(rows, device, None)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_tensor("out", out, tuple(x.shape), FLOATS, device)
    check_inner("out", out, 1)
    check_own_memory("out", out, {"x": x}, 0)
    check_apart("out", out, 0, {"conv_state": state})
    read: dict[str, tuple[Tensor, int]] = {"x": (x, 0), "conv_weight": (conv_weight, 0)}
    if conv_bias is not None:
        read["conv_bias"] = (conv_bias, 0)
    check_pool_apart("conv_state", state, read)
    num_rows = INT32_MAX if pending is None else pending.shape[0]
    if checked.enabled(check):
        checked.row_values(rows, x.shape[0], state.shape[0], num_rows)
    inputs = (x, state, conv_weight, conv_bias, rows, convolution.keeps_history, num_rows, out)
    launch("graphrt.conv_verify", _run_counted, backends.choose_conv(backend, x).conv_verify, *inputs)
    return out


def _verify(
    name: str, q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, checkpoint: Tensor, records: KDARecoverSSMRecords, rows: Rows,
    conv: FusedConv | None, out: Tensor | None, backend: str, check: bool | None,
) -> Tensor:  # fmt: skip
    _check_activations(q, k, v, raw_g, raw_beta, checkpoint, records)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    check_tensor("out", out, tuple(v.shape), FLOATS, checkpoint.device)
    check_inner("out", out, 2)
    check_own_memory("out", out, {"q": q, "k": k, "v": v, "raw_g": raw_g, "raw_beta": raw_beta}, 1)
    _check_parameters(A_log, dt_bias, lower_bound, checkpoint)
    _check_records(records, checkpoint, rows)
    pools = {"checkpoint_state": checkpoint, "records": records.correction, "records.key_gate": records.key_gate}
    check_apart("out", out, 1, pools)
    _check_rows(rows, checkpoint.device, records.correction.shape[0])
    facts = backends.Facts.of(checkpoint, lower_bound, rows.spec_query_len, records.key_gate.dtype)
    chosen = backends.choose(backend, facts).backend
    inputs = (q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint, records, rows)
    call: tuple[Any, ...] = (chosen.verify, *inputs, out)
    if conv is not None:
        convolution = check_fused(conv, q, k, v, checkpoint, rows.spec_query_len)
        check_apart("out", out, 1, {"conv.conv_state": convolution.state})
        scratch = int(rows.record_rows is not None)
        others = {name: (t, scratch * (name != "checkpoint_state")) for name, t in pools.items()}
        read: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "raw_g": raw_g, "raw_beta": raw_beta}
        read |= {"conv.weight": conv.weight, "conv.bias": conv.bias, "A_log": A_log, "dt_bias": dt_bias}
        others |= {name: (t, 0) for name, t in read.items() if t is not None}
        check_pool_apart("conv.conv_state", convolution.state, others)
        conv_verify = backends.choose_conv(backend, q).conv_verify
        call = (chosen.fused_verify, conv_verify, *inputs, convolution, out)
    if checked.enabled(check):
        checked.row_values(rows, q.shape[1], checkpoint.shape[0], records.correction.shape[0])
        checked.written_states(rows, checkpoint)
        if conv is not None:
            checked.same_layer(conv.conv_state, checkpoint)
        # Last of all checks: a verify that is refused opens no step.
        call_order.open_step(records.correction, rows)
    else:
        call_order.unseen("verify", [records.correction])
    launch(name, _run_counted, *call)
    return out


def _run_counted(run: Callable[..., None], *args: Any) -> None:
    """Run a launcher with the error counter of the device of its last argument, the output, behind the others.

    The counter is looked up here, inside the launch, so that a tape never records its allocation.
    """
    run(*args, error_counter(args[-1].device))


def _check_activations(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, checkpoint: Tensor, records: KDARecoverSSMRecords,
) -> None:  # fmt: skip
    check_is_tensor("checkpoint_state", checkpoint)
    for name in ("correction", "key_gate"):
        check_is_tensor(f"records.{name}", getattr(records, name, None))
    device = checkpoint.device
    check_tensor("checkpoint_state", checkpoint, (None, None, None, None), FLOATS, device)
    _, heads, value_dim, key_dim = checkpoint.shape
    check_head_dim("checkpoint_state head_dim", key_dim)
    if value_dim != key_dim:
        fail("checkpoint_state", "V = K in [slots, H, V, K]", list(checkpoint.shape))
    check_inner("checkpoint_state", checkpoint, 3)
    check_entries_apart("checkpoint_state", checkpoint)
    check_tensor("q", q, (1, None, heads, key_dim), FLOATS, device)
    tokens, kept = q.shape[1], (records.key_gate.dtype,)
    check_tensor("k", k, (1, tokens, heads, key_dim), kept, device)
    check_tensor("v", v, (1, tokens, heads, value_dim), FLOATS, device)
    check_tensor("raw_g", raw_g, (1, tokens, heads, key_dim), kept, device)
    check_tensor("raw_beta", raw_beta, (1, tokens, heads), FLOATS, device)
    for name, t in (("q", q), ("k", k), ("v", v), ("raw_g", raw_g)):
        check_inner(name, t, 2)
    check_inner("raw_beta", raw_beta, 1)


def _check_parameters(A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, checkpoint: Tensor) -> None:
    _, heads, _, key_dim = checkpoint.shape
    for name, t, size in (("A_log", A_log, heads), ("dt_bias", dt_bias, heads * key_dim)):
        check_is_tensor(name, t)
        if t.numel() != size or not t.is_contiguous() or t.dtype not in FLOATS:
            fail(name, f"{size} contiguous floating values", f"{list(t.shape)} {t.dtype} strides {t.stride()}")
        if t.device != checkpoint.device:
            fail(name, f"a tensor on {checkpoint.device}, like the checkpoints", f"one on {t.device}")
    check_lower_bound("lower_bound", lower_bound)


def _check_records(records: KDARecoverSSMRecords, checkpoint: Tensor, rows: Rows) -> None:
    _, heads, value_dim, key_dim = checkpoint.shape
    wide = torch.float64 if checkpoint.dtype == torch.float64 else torch.float32
    window, device = rows.spec_query_len, checkpoint.device
    check_tensor("records.correction", records.correction, (None, heads, window, value_dim), (wide,), device)
    count = records.correction.shape[0]
    check_tensor("records.key_gate", records.key_gate, (count, heads, window, 2 * key_dim), FLOATS, device)
    for name, t in (("records.correction", records.correction), ("records.key_gate", records.key_gate)):
        check_inner(name, t, 3)
        check_entries_apart(name, t)
        if rows.record_rows is not None:
            check_scratch_row(name, t)


def _check_rows(rows: Rows, device: torch.device, num_rows: int | None) -> None:
    """Index vectors of a step; `num_rows` is R where the operation has records."""
    if rows.pending is not None and rows.record_rows is None:
        fail("record_rows", "the record row of each row, since pending is given", None)
    check_index("state_indices", rows.state_indices, 0, device)
    batch = rows.batch
    check_index("query_start_loc", rows.query_start_loc, batch + 1, device, exactly=True)
    if rows.record_rows is not None:
        check_index("record_rows", rows.record_rows, batch, device)
    elif num_rows is not None and batch > num_rows:
        fail("state_indices", f"at most {num_rows} rows, the record rows", batch, "or give record_rows")
    if rows.pending is not None:
        check_index("pending", rows.pending, num_rows or 1, device, exactly=num_rows is not None)
        call_order.check_not_taken(rows.pending)
