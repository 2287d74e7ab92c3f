"""Verify: replay the pending records, then compute a window's outputs and its new records (Triton).

Per row b with record row r and state slot s, for every head:

    n = pending[r]; S = fold(checkpoint[s], records[r, :n]); checkpoint[s] = S if n > 0
    for each token t of the window:  S <- S * exp(g_t);  u_t = beta_t (v_t - S k_t);  S <- S + u_t k_t^T;  o_t = S q_t
    records[r, t] = (u_t, raw k_t, raw g_t)

Grid (V / BLOCK_V, H, B + 1): a program owns S[v-block, :] of one row and head; the last row of programs clears the
tokens that belong to nobody. Checkpoint traffic: 8 H K V bytes a row with pending records, half of that without.

Order of records. Every value block of a head reads all old keys and gates but only its own slice of the old
corrections. So the corrections are overwritten in this kernel, behind a block barrier, and the keys and gates by
`graphrt_verify_key_gate_kernel`, a second launch: the stream orders it after the last read, whatever the split.

Stock and deferred verify are one binary (`has_pending` is a run-time flag), hence bit-equal.

Not checked on the device: live slots and live record rows are unique within the step.
"""

import inspect
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..errors import ErrorKind
from ..records import KDARecoverSSMRecords
from ..steps import Rows
from .recurrence import NO_CONTRACTION, count_error, decay, fold_records, inverse_norms, pick, wide

_QUERY_LEN = tl.constexpr(int(ErrorKind.QUERY_LEN))
_SLOT = tl.constexpr(int(ErrorKind.SLOT))
_ROW = tl.constexpr(int(ErrorKind.ROW))
_PENDING = tl.constexpr(int(ErrorKind.PENDING))

# Run-time values that change from step to step, or with the view an index tensor happens to be: specialising on
# them would compile a second variant inside a capture.
_VOLATILE = [
    "num_tokens", "batch", "num_slots", "num_rows", "spec_query_len", "has_rows", "has_pending",
    "qsl_stride", "slot_stride", "row_stride", "pending_stride",
]  # fmt: skip
_INDEX_POINTERS = ["qsl_ptr", "state_indices_ptr", "record_rows_ptr", "pending_ptr", "errors_ptr"]


def unaligned(kernel: Any) -> Any:
    """The one variant of a kernel for tensors that do not all start, token by token, on 16 bytes.

    Specialised on each of them, a kernel would have as many variants as there are ways to be unaligned, and `create`
    could not compile them before anybody needs one (graphrt/warmup.py).
    """
    names = inspect.signature(kernel.fn).parameters
    strides, pointers = ([name for name in names if name.endswith(end)] for end in ("_stride", "_ptr"))
    return triton.jit(kernel.fn, do_not_specialize=[*_VOLATILE, *strides], do_not_specialize_on_alignment=pointers)


@triton.jit(do_not_specialize=_VOLATILE)
def query_range(qsl_ptr, i_b, qsl_stride, num_tokens):
    """Tokens begin..end of row i_b, clamped to 0..T, and whether they were as they should be."""
    begin = tl.load(qsl_ptr + i_b * qsl_stride)
    end = tl.load(qsl_ptr + (i_b + 1) * qsl_stride)
    valid = (begin >= 0) & (begin <= end) & (end <= num_tokens)
    begin = tl.minimum(tl.maximum(begin, 0), num_tokens)
    return begin, tl.maximum(tl.minimum(end, num_tokens), begin), valid


@triton.jit
def clear_tokens(out_ptr, begin, end, token_stride, o_d, mask_d, TOKENS: tl.constexpr):
    """Zero channels o_d of tokens begin..end-1."""
    for first in range(begin, end, TOKENS):
        o_t = (first + tl.arange(0, TOKENS)).to(tl.int64)
        zeros = tl.zeros((TOKENS, o_d.shape[0]), dtype=out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + o_t[:, None] * token_stride + o_d[None, :], zeros, mask=(o_t[:, None] < end) & mask_d[None, :]
        )


@triton.jit
def live_row(
    state_indices_ptr, record_rows_ptr, i_b, slot_stride, row_stride, num_slots, num_rows, has_rows, errors_ptr, first
):
    """Slot (0 for null) and record row (-1 for none) of row i_b; the first program counts what is out of range."""
    slot = tl.load(state_indices_ptr + i_b * slot_stride)
    count_error(errors_ptr, _SLOT, first & (slot >= num_slots), i_b)
    slot = tl.where((slot > 0) & (slot < num_slots), slot, 0)
    row = i_b
    if has_rows != 0:
        row = tl.load(record_rows_ptr + i_b * row_stride)
    in_range = (row >= -1) & (row < num_rows)
    count_error(errors_ptr, _ROW, first & (slot > 0) & (in_range == 0), i_b)
    return slot, tl.where(in_range, row, -1)


@triton.jit
def pending_of(pending_ptr, row, pending_stride, spec_query_len, has_pending, errors_ptr, first, i_b):
    """Records of `row` to replay, clamped to 0..Q; the address of row -1 is never formed."""
    n = 0
    if (has_pending != 0) & (row >= 0):
        n = tl.load(pending_ptr + row.to(tl.int64) * pending_stride)
    count_error(errors_ptr, _PENDING, first & ((n < 0) | (n > spec_query_len)), i_b)
    return tl.minimum(tl.maximum(n, 0), spec_query_len)


@triton.jit(
    do_not_specialize=[*_VOLATILE, "beta_stride"],
    do_not_specialize_on_alignment=[*_INDEX_POINTERS, "beta_ptr", "A_log_ptr"],
)
def graphrt_verify_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,  # [1, T, H, K or V], beta [1, T, H]
    A_log_ptr,          # [H]
    dt_bias_ptr,        # [H * K]
    checkpoint_ptr,     # [slots, H, V, K]
    correction_ptr,     # [R, H, Q, V] fp32
    key_gate_ptr,       # [R, H, Q, 2K]
    out_ptr,            # [1, T, H, V]
    qsl_ptr,            # [B + 1] int32
    state_indices_ptr,  # [B] int32
    record_rows_ptr,    # [>= B] int32
    pending_ptr,        # [R] int32
    errors_ptr,         # [2 * kinds] int32
    lower_bound,
    num_tokens, batch, num_slots, num_rows, spec_query_len, has_rows, has_pending,
    qsl_stride, slot_stride, row_stride, pending_stride,
    q_stride, k_stride, v_stride, g_stride, beta_stride, out_stride,  # elements from token to token
    checkpoint_stride, correction_stride, key_gate_stride,            # elements from slot to slot, row to row
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_V: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = (i_v == 0) & (i_h == 0)
    o_q, o_k = tl.arange(0, BLOCK_Q), tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_hv = i_h * V + o_v
    mask_v = o_v < V
    if i_b == batch:
        end = tl.load(qsl_ptr + batch * qsl_stride)
        end = tl.minimum(tl.maximum(end, 0), num_tokens)
        clear_tokens(out_ptr, end, num_tokens, out_stride, o_hv, mask_v, 16)
        begin = tl.minimum(tl.maximum(tl.load(qsl_ptr), 0), num_tokens)
        clear_tokens(out_ptr, 0, begin, out_stride, o_hv, mask_v, 16)
        return

    begin, end, valid = query_range(qsl_ptr, i_b, qsl_stride, num_tokens)
    slot, row = live_row(
        state_indices_ptr,
        record_rows_ptr,
        i_b,
        slot_stride,
        row_stride,
        num_slots,
        num_rows,
        has_rows,
        errors_ptr,
        first,
    )
    count_error(errors_ptr, _QUERY_LEN, first & ((valid == 0) | (end - begin > spec_query_len)), i_b)
    if slot == 0:
        clear_tokens(out_ptr, begin, end, out_stride, o_hv, mask_v, 16)
        return

    length = tl.minimum(end - begin, spec_query_len)
    clear_tokens(out_ptr, begin + length, end, out_stride, o_hv, mask_v, 16)
    n = pending_of(pending_ptr, row, pending_stride, spec_query_len, has_pending, errors_ptr, first, i_b)
    if (n == 0) & (length == 0):
        return

    a = tl.exp(tl.load(A_log_ptr + i_h).to(tl.float32))
    b_bias = tl.load(dt_bias_ptr + i_h * K + o_k).to(tl.float32)  # [K]
    p_S = checkpoint_ptr + slot.to(tl.int64) * checkpoint_stride + i_h * V * K + o_v[:, None] * K + o_k[None, :]
    b_S = tl.load(p_S).to(tl.float32)  # [BLOCK_V, K]
    p_u = correction_ptr + row.to(tl.int64) * correction_stride + i_h * Q * V

    if n > 0:
        p_kg = key_gate_ptr + row.to(tl.int64) * key_gate_stride + i_h * Q * 2 * K
        b_inv = inverse_norms(p_kg, 2 * K, n, o_q, o_k, BLOCK_Q, K)
        b_S = fold_records(b_S, p_kg, p_u, 0, n, b_inv, b_bias, a, lower_bound, o_q, o_k, o_v, K, V, BOUNDED)
        # A 16-bit pool rounds once here, and the window reads what the pool holds.
        tl.store(p_S, b_S.to(p_S.dtype.element_ty))
        b_S = b_S.to(p_S.dtype.element_ty).to(tl.float32)

    # All old corrections of this value block are in registers before the first new one is stored.
    tl.debug_barrier()
    first_token = begin.to(tl.int64)
    q_stride, k_stride, v_stride = wide(q_stride), wide(k_stride), wide(v_stride)
    g_stride, beta_stride, out_stride = wide(g_stride), wide(beta_stride), wide(out_stride)
    p_q = q_ptr + first_token * q_stride + i_h * K
    p_k = k_ptr + first_token * k_stride + i_h * K
    p_v = v_ptr + first_token * v_stride + o_hv
    p_g = g_ptr + first_token * g_stride + i_h * K + o_k
    p_beta = beta_ptr + first_token * beta_stride + i_h
    p_out = out_ptr + first_token * out_stride + o_hv
    b_inv_k = inverse_norms(p_k, k_stride, length, o_q, o_k, BLOCK_Q, K)
    b_inv_q = inverse_norms(p_q, q_stride, length, o_q, o_k, BLOCK_Q, K) * (1.0 / K**0.5)
    for t in range(length):
        b_k = tl.load(p_k + t * k_stride + o_k).to(tl.float32) * pick(b_inv_k, o_q, t)
        b_q = tl.load(p_q + t * q_stride + o_k).to(tl.float32) * pick(b_inv_q, o_q, t)
        b_raw_g = tl.load(p_g + t * g_stride).to(tl.float32)
        b_v = tl.load(p_v + t * v_stride).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(p_beta + t * beta_stride).to(tl.float32)))
        b_S = b_S * decay(b_raw_g, b_bias, a, lower_bound, BOUNDED)[None, :]
        b_u = beta * (b_v - tl.sum(b_S * b_k[None, :], axis=1))
        b_S = tl.fma(tl.broadcast_to(b_u[:, None], b_S.shape), tl.broadcast_to(b_k[None, :], b_S.shape), b_S)
        b_o = tl.sum(b_S * b_q[None, :], axis=1)
        tl.store(p_out + t * out_stride, b_o.to(out_ptr.dtype.element_ty))
        tl.store(p_u + t * V + o_v, b_u)


@triton.jit(do_not_specialize=_VOLATILE, do_not_specialize_on_alignment=_INDEX_POINTERS)
def graphrt_verify_key_gate_kernel(
    k_ptr, g_ptr,       # [1, T, H, K]
    key_gate_ptr,       # [R, H, Q, 2K]
    qsl_ptr, state_indices_ptr, record_rows_ptr, errors_ptr,
    num_tokens, batch, num_slots, num_rows, spec_query_len, has_rows,
    qsl_stride, slot_stride, row_stride,
    k_stride, g_stride, key_gate_stride,
    K: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Keep the window's raw keys and gates in the records of each live row. Grid (B, H)."""
    i_b, i_h = tl.program_id(0), tl.program_id(1)
    begin, end, _ = query_range(qsl_ptr, i_b, qsl_stride, num_tokens)
    slot, row = live_row(
        state_indices_ptr, record_rows_ptr, i_b, slot_stride, row_stride, num_slots, num_rows, has_rows, errors_ptr,
        i_h < 0,  # the verify counted already
    )  # fmt: skip
    length = tl.minimum(end - begin, spec_query_len)
    if (slot == 0) | (length == 0):
        return
    o_q, o_k = tl.arange(0, BLOCK_Q), tl.arange(0, K)
    o_t = (begin + o_q).to(tl.int64)
    mask = o_q[:, None] < length
    p_kg = key_gate_ptr + row.to(tl.int64) * key_gate_stride + i_h * Q * 2 * K + o_q[:, None] * 2 * K + o_k[None, :]
    tl.store(p_kg, tl.load(k_ptr + o_t[:, None] * k_stride + i_h * K + o_k[None, :], mask=mask), mask=mask)
    tl.store(p_kg + K, tl.load(g_ptr + o_t[:, None] * g_stride + i_h * K + o_k[None, :], mask=mask), mask=mask)


_UNALIGNED_VERIFY, _UNALIGNED_KEY_GATE = unaligned(graphrt_verify_kernel), unaligned(graphrt_verify_key_gate_kernel)


def block_v(head_dim: int) -> int:
    """Value rows of a program: a [BLOCK_V, K] tile of at most 32 registers a thread at four warps."""
    return max(1, min(head_dim, 4096 // head_dim))


def verify(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, checkpoint: Tensor, records: KDARecoverSSMRecords, rows: Rows, out: Tensor,
    errors: Tensor,
) -> None:  # fmt: skip
    """Launch both kernels of a checked verify on the current stream."""
    num_tokens, num_heads, key_dim = q.shape[1:]
    value_dim = v.shape[-1]
    batch, window = rows.batch, records.correction.shape[2]
    if num_tokens == 0 and batch == 0:
        return
    record_rows = rows.state_indices if rows.record_rows is None else rows.record_rows
    pending = rows.state_indices if rows.pending is None else rows.pending
    sizes = {
        "num_tokens": num_tokens, "batch": batch, "num_slots": checkpoint.shape[0],
        "num_rows": records.correction.shape[0], "spec_query_len": rows.spec_query_len,
        "has_rows": int(rows.record_rows is not None), "qsl_stride": rows.query_start_loc.stride(0),
        "slot_stride": rows.state_indices.stride(0), "row_stride": record_rows.stride(0),
    }  # fmt: skip
    static = {"K": key_dim, "Q": window, "BLOCK_Q": triton.next_power_of_2(window)}
    block = block_v(value_dim)
    tokens, slots = (q, k, v, raw_g, out), (checkpoint, records.correction, records.key_gate)
    aligned = all(t.data_ptr() % 16 == 0 for t in (*tokens, *slots, dt_bias))
    aligned &= all(t.stride(1) % 16 == 0 for t in tokens) and all(t.stride(0) % 16 == 0 for t in slots)
    run = graphrt_verify_kernel if aligned else _UNALIGNED_VERIFY
    run[(triton.cdiv(value_dim, block), num_heads, batch + 1)](
        q, k, v, raw_g, raw_beta, A_log, dt_bias, checkpoint, records.correction, records.key_gate, out,
        rows.query_start_loc, rows.state_indices, record_rows, pending, errors,
        float(lower_bound or 0.0), **sizes, has_pending=int(rows.pending is not None), pending_stride=pending.stride(0),
        q_stride=q.stride(1), k_stride=k.stride(1), v_stride=v.stride(1), g_stride=raw_g.stride(1),
        beta_stride=raw_beta.stride(1), out_stride=out.stride(1), checkpoint_stride=checkpoint.stride(0),
        correction_stride=records.correction.stride(0), key_gate_stride=records.key_gate.stride(0),
        H=num_heads, V=value_dim, BLOCK_V=block, BOUNDED=lower_bound is not None, **static,
        num_warps=4, **NO_CONTRACTION,
    )  # fmt: skip
    if batch and num_tokens:
        run = graphrt_verify_key_gate_kernel if aligned else _UNALIGNED_KEY_GATE
        run[(batch, num_heads)](
            k, raw_g, records.key_gate, rows.query_start_loc, rows.state_indices, record_rows, errors, **sizes,
            k_stride=k.stride(1), g_stride=raw_g.stride(1), key_gate_stride=records.key_gate.stride(0), **static,
            num_warps=4, **NO_CONTRACTION,
        )  # fmt: skip
