"""Fold: advance checkpoints by their accepted records, every layer in one launch (Triton).

For each row b with n = commit_lens[b] > 0, every layer and head:

    S = checkpoint[source];  S = fold(S, records[row, :n]);  checkpoint[final] = S
    align mode: also checkpoint[boundary] = fold(checkpoint[source], records[row, :boundary_len])

Grid (V / BLOCK_V, B, L * H): a program owns S[v-block, :] of one row, layer and head, reads it whole before it writes
anything, and nobody else touches that part of the source, boundary or final slot: the three may coincide.
Traffic: 8 H K V bytes a row and layer (12 where a boundary is stored), plus n records.

Layers are reached through tables of base addresses and strides, parameters included, so nothing is copied.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..layers import LayerStack
from ..steps import Plan
from .recurrence import NO_CONTRACTION, fold_records, inverse_norms
from .verify import block_v

_VOLATILE = ["has_rows", "slot_stride", "row_stride"]
_INDEX_POINTERS = ["state_indices_ptr", "record_rows_ptr"]


@triton.jit
def table_pointer(table_ptr, i_layer, like_ptr, ALIGNED: tl.constexpr):
    """Base pointer of a layer's tensor, typed like `like_ptr`."""
    pointer = tl.load(table_ptr + i_layer).to(like_ptr.dtype)
    # Said of the pointer: what is known of an integer is lost where it becomes one, and accesses stay narrow.
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def table_stride(table_ptr, i_layer, ALIGNED: tl.constexpr):
    """Stride, in elements, of a layer's tensor."""
    stride = tl.load(table_ptr + i_layer)
    if ALIGNED:
        stride = tl.multiple_of(stride, 16)
    return stride


@triton.jit(do_not_specialize=_VOLATILE, do_not_specialize_on_alignment=_INDEX_POINTERS)
def graphrt_fold_kernel(
    checkpoint_like, correction_like, key_gate_like, A_log_like, dt_bias_like,  # element types only
    checkpoint_addrs, checkpoint_strides,  # [L] int64
    correction_addrs, correction_strides,  # [L] int64
    key_gate_addrs, key_gate_strides,      # [L] int64
    A_log_addrs, dt_bias_addrs,            # [L] int64
    commit_lens_ptr, final_ptr, boundary_ptr, boundary_lens_ptr,  # [R] int32
    state_indices_ptr, record_rows_ptr,    # [B], [>= B] int32
    lower_bound,
    has_rows, slot_stride, row_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_V: tl.constexpr,
    BOUNDED: tl.constexpr, ALIGN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    i_v, i_b, i_lh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(commit_lens_ptr + i_b)
    if n <= 0:
        return
    i_layer, i_h = i_lh // H, i_lh % H
    row = i_b
    if has_rows != 0:
        row = tl.load(record_rows_ptr + i_b * row_stride)
    row = row.to(tl.int64)
    source = tl.load(state_indices_ptr + i_b * slot_stride).to(tl.int64)
    final = tl.load(final_ptr + i_b).to(tl.int64)

    o_q, o_k = tl.arange(0, BLOCK_Q), tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    p_S = table_pointer(checkpoint_addrs, i_layer, checkpoint_like, ALIGNED)
    p_S += i_h * V * K + o_v[:, None] * K + o_k[None, :]
    stride_S = table_stride(checkpoint_strides, i_layer, ALIGNED)
    p_u = table_pointer(correction_addrs, i_layer, correction_like, ALIGNED)
    p_u += row * table_stride(correction_strides, i_layer, ALIGNED) + i_h * Q * V
    p_kg = table_pointer(key_gate_addrs, i_layer, key_gate_like, ALIGNED)
    p_kg += row * table_stride(key_gate_strides, i_layer, ALIGNED) + i_h * Q * 2 * K
    a = tl.exp(tl.load(table_pointer(A_log_addrs, i_layer, A_log_like, False) + i_h).to(tl.float32))
    b_bias = tl.load(table_pointer(dt_bias_addrs, i_layer, dt_bias_like, False) + i_h * K + o_k).to(tl.float32)

    b_S = tl.load(p_S + source * stride_S).to(tl.float32)  # [BLOCK_V, K]
    b_inv = inverse_norms(p_kg, 2 * K, n, o_q, o_k, BLOCK_Q, K)
    done = 0
    if ALIGN:
        boundary = tl.load(boundary_ptr + i_b).to(tl.int64)
        if boundary > 0:
            done = tl.load(boundary_lens_ptr + i_b)
            b_S = fold_records(b_S, p_kg, p_u, 0, done, b_inv, b_bias, a, lower_bound, o_q, o_k, o_v, K, V, BOUNDED)
            tl.store(p_S + boundary * stride_S, b_S.to(p_S.dtype.element_ty))
    b_S = fold_records(b_S, p_kg, p_u, done, n, b_inv, b_bias, a, lower_bound, o_q, o_k, o_v, K, V, BOUNDED)
    tl.store(p_S + final * stride_S, b_S.to(p_S.dtype.element_ty))


def fold(stack: LayerStack, plan: Plan, state_indices: Tensor, record_rows: Tensor | None, align: bool) -> None:
    """Run a written plan over the checkpoints of every layer, on the current stream."""
    num_layers, batch = len(stack.checkpoints), state_indices.shape[0]
    _, num_heads, value_dim, key_dim = stack.checkpoints[0].shape
    rows = state_indices if record_rows is None else record_rows
    block = block_v(value_dim)
    graphrt_fold_kernel[(value_dim // block, batch, num_layers * num_heads)](
        stack.checkpoints[0], stack.corrections[0], stack.key_gates[0], stack.A_logs[0], stack.dt_biases[0],
        stack.checkpoint_addrs, stack.checkpoint_strides, stack.correction_addrs, stack.correction_strides,
        stack.key_gate_addrs, stack.key_gate_strides, stack.A_log_addrs, stack.dt_bias_addrs,
        plan.commit_lens, plan.final_state_indices, plan.boundary_state_indices, plan.boundary_recovery_lens,
        state_indices, rows, float(stack.lower_bound or 0.0),
        has_rows=int(record_rows is not None), slot_stride=state_indices.stride(0), row_stride=rows.stride(0),
        H=num_heads, K=key_dim, V=value_dim, Q=stack.spec_query_len,
        BLOCK_Q=triton.next_power_of_2(stack.spec_query_len), BLOCK_V=block,
        BOUNDED=stack.lower_bound is not None, ALIGN=align, ALIGNED=stack.aligned, num_warps=4, **NO_CONTRACTION,
    )  # fmt: skip
