"""Short causal convolution of a window, and the compaction of its history (Triton).

    y_t[d] = silu(bias[d] + sum_w weight[d, w] * x_{t - hist + w}[d])        hist = W - 1

Inputs before the window are the committed history of the row's slot, hist columns from column `start`. Layouts of a
slot's C columns (design section 3.2), after a window of `length` tokens:

    C = hist + Q      [0, hist) history   [hist + t] = x_t         after n accepted the history starts at n
    C = hist + Q - 1  [0, hist - 1) history without its oldest, [hist - 1 + t] = x_t         ... at max(n - 1, 0)

Programs own blocks of channels of one row (and layer): nobody else touches those columns, and a block barrier keeps
the last read before the first write.

Compaction is a launch of its own, in front of the fold. What it has to move is set by the storage order. With columns
innermost a channel is 22 bytes long (W = 4, Q = 8, 16 bits), so every sector of 32 holds some history to read and some
to write: the whole slot, in and out, 13 % of what a fold moves. With channels innermost it is three columns in and
three out, 4 %. For 69 layers of 64 requests, 4608 channels, on an H200 (µs by graph replay, about 10 of them the
replay's own; tools/results/h200/compaction.txt):

    columns innermost                                    channels innermost
    223   an in-place update of the same bytes           58   in and out at 4.2 TB/s, a bound
    408   a tile of channels and columns, 2 bytes each   83
    249   only what moves, a program for each block; but to start them takes 39 where nothing folds, others 4 to 7
    306   only what moves, fewer programs                87
    253   whole channels, written back 16 bytes wide     71   16 bytes wide

So whole channels it is, where states are packed and stay where they are (`LayerStack.conv_packed`): a store that fills
its sectors. Beside the fold it costs what it costs alone: fold 1762, compaction 321, both 2081 in either order, 2072
with a fork of the graph. Gap and tail of a launch, all that one launch for both could save, are less than that.

Not checked on the device: live slots are unique within the step.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..errors import ErrorKind
from ..layers import LayerStack
from ..steps import Plan, Rows
from .fold import table_pointer, table_stride
from .recurrence import NO_CONTRACTION, count_error, wide
from .verify import clear_tokens, live_row, pending_of, query_range, unaligned

VERIFY_BLOCK_D = 64
MAX_BLOCK_T = 8
# Programs of a compaction, if rows and layers are not more. Where nothing folds, as in most deferred steps, its time is
# that of starting them.
FOLD_PROGRAMS = 8192
_QUERY_LEN = tl.constexpr(int(ErrorKind.QUERY_LEN))

_VOLATILE = [
    "num_tokens", "batch", "num_slots", "num_rows", "spec_query_len", "has_rows", "has_pending",
    "qsl_stride", "slot_stride", "row_stride", "pending_stride",
]  # fmt: skip
_INDEX_POINTERS = ["qsl_ptr", "state_indices_ptr", "record_rows_ptr", "pending_ptr", "errors_ptr"]


@triton.jit
def history_start(n, KEEPS_HISTORY: tl.constexpr):
    """Column at which the committed history starts after n accepted tokens."""
    if KEEPS_HISTORY:
        return n
    else:
        return tl.maximum(n - 1, 0)


@triton.jit(do_not_specialize=_VOLATILE, do_not_specialize_on_alignment=_INDEX_POINTERS)
def graphrt_verify_conv_kernel(
    x_ptr,              # [T, D]
    conv_ptr,           # [slots, D, C], any strides
    weight_ptr,         # [D, W]
    bias_ptr,           # [D] or None
    out_ptr,            # [T, D]
    qsl_ptr, state_indices_ptr, record_rows_ptr, pending_ptr, errors_ptr,
    num_tokens, batch, num_slots, num_rows, spec_query_len, has_rows, has_pending,
    qsl_stride, slot_stride, row_stride, pending_stride,
    x_stride, out_stride, conv_stride, dim_stride, column_stride, weight_dim_stride, weight_stride,
    D, W: tl.constexpr, BLOCK_H: tl.constexpr, KEEPS_HISTORY: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_d, i_b = tl.program_id(0), tl.program_id(1)
    hist: tl.constexpr = W - 1
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = o_d < D
    if i_b == batch:
        end = tl.load(qsl_ptr + batch * qsl_stride)
        end = tl.minimum(tl.maximum(end, 0), num_tokens)
        clear_tokens(out_ptr, end, num_tokens, out_stride, o_d, mask_d, 16)
        begin = tl.minimum(tl.maximum(tl.load(qsl_ptr), 0), num_tokens)
        clear_tokens(out_ptr, 0, begin, out_stride, o_d, mask_d, 16)
        return

    begin, end, valid = query_range(qsl_ptr, i_b, qsl_stride, num_tokens)
    first = i_d == 0
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
        clear_tokens(out_ptr, begin, end, out_stride, o_d, mask_d, 16)
        return

    length = tl.minimum(end - begin, spec_query_len)
    clear_tokens(out_ptr, begin + length, end, out_stride, o_d, mask_d, 16)
    n = pending_of(pending_ptr, row, pending_stride, spec_query_len, has_pending, errors_ptr, first, i_b)
    if (n == 0) & (length == 0):
        return

    start = history_start(n, KEEPS_HISTORY)
    x_stride, out_stride, column_stride = wide(x_stride), wide(out_stride), wide(column_stride)
    p_state = conv_ptr + slot.to(tl.int64) * conv_stride + o_d.to(tl.int64) * dim_stride
    p_x = x_ptr + begin.to(tl.int64) * x_stride + o_d
    p_out = out_ptr + begin.to(tl.int64) * out_stride + o_d
    p_history = p_state + start * column_stride
    o_h = tl.arange(0, BLOCK_H)
    mask_h = mask_d[:, None] & (o_h[None, :] < hist)
    b_history = tl.load(p_history[:, None] + o_h[None, :] * column_stride, mask=mask_h)  # [BLOCK_D, BLOCK_H]
    # All tokens of a tile at once: one after the other, a window would take as many trips to memory as it has tokens.
    for first_t in range(0, length, BLOCK_T):
        o_t = first_t + tl.arange(0, BLOCK_T)
        mask_t = (o_t < length)[:, None] & mask_d[None, :]
        b_y = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
        if bias_ptr is not None:
            b_y += tl.load(bias_ptr + o_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        for w in tl.static_range(W):
            o_x = (o_t - hist + w)[:, None]  # which input; below zero one of the history
            # Chosen by address, not by value: half the loads, in one layout, and fewer registers.
            p_in = tl.where(o_x < 0, p_history[None, :] + (o_x + hist) * column_stride, p_x[None, :] + o_x * x_stride)
            b_x = tl.load(p_in, mask=mask_t, other=0.0)
            b_w = tl.load(weight_ptr + o_d * weight_dim_stride + w * weight_stride, mask=mask_d, other=0.0)
            b_y += b_w.to(tl.float32)[None, :] * b_x.to(tl.float32)
        b_y = b_y / (1.0 + tl.exp(-b_y))
        tl.store(p_out[None, :] + o_t[:, None] * out_stride, b_y.to(out_ptr.dtype.element_ty), mask=mask_t)

    # A dummy row (record row -1) reads a live-looking slot but never writes it.
    if (has_rows != 0) & (row < 0):
        return
    tl.debug_barrier()
    shift = 0
    if not KEEPS_HISTORY:
        shift = tl.where(length > 0, 1, 0)
    keep = mask_h & (o_h[None, :] >= shift)
    tl.store(p_state[:, None] + (o_h - shift)[None, :] * column_stride, b_history, mask=keep)
    for first_t in range(0, length, BLOCK_T):
        o_t = first_t + tl.arange(0, BLOCK_T)
        mask_t = (o_t < length)[:, None] & mask_d[None, :]
        b_x = tl.load(p_x[None, :] + o_t[:, None] * x_stride, mask=mask_t)
        tl.store(p_state[None, :] + (hist - shift + o_t)[:, None] * column_stride, b_x, mask=mask_t)


@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["state_indices_ptr"])
def graphrt_fold_conv_kernel(
    conv_like,           # element type only
    conv_addrs, conv_strides, dim_strides, column_strides,  # [L] int64
    commit_lens_ptr, final_ptr, boundary_ptr, boundary_lens_ptr,  # [R] int32
    state_indices_ptr,   # [B] int32
    slot_stride,
    D, C: tl.constexpr, HIST: tl.constexpr, KEEPS_HISTORY: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr,
    DIM_LAST: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the history after the accepted tokens to columns [0, hist) of the destination. Grid (parts, B, L)."""
    i_b, i_layer = tl.program_id(1), tl.program_id(2)
    n = tl.load(commit_lens_ptr + i_b)
    # In the layout without room for the history a single token leaves it in its place.
    least: tl.constexpr = 1 if KEEPS_HISTORY or ALIGN else 2
    if n < least:
        return
    source = tl.load(state_indices_ptr + i_b * slot_stride).to(tl.int64)
    final = tl.load(final_ptr + i_b).to(tl.int64)
    boundary, at = final, 0
    if ALIGN:
        boundary = tl.load(boundary_ptr + i_b).to(tl.int64)
        # Without a boundary its length is 0: a read of the source, not used.
        at = history_start(tl.load(boundary_lens_ptr + i_b), KEEPS_HISTORY)
    stride = table_stride(conv_strides, i_layer, PACKED)
    p_layer = table_pointer(conv_addrs, i_layer, conv_like, PACKED)
    dim, column = table_stride(dim_strides, i_layer, False), table_stride(column_strides, i_layer, False)
    # Lanes in the order of the memory.
    o = tl.arange(0, BLOCK)
    if DIM_LAST:
        o_d, o_h = o % CHANNELS, o // CHANNELS
        if PACKED:
            dim, column = 1, D
    else:
        o_d, o_h = o // LANES, o % LANES
        if PACKED:
            dim, column = C, 1
    start = history_start(n, KEEPS_HISTORY)
    skip = start * column
    o_to = o_d.to(tl.int64) * dim + o_h * column
    o_from = o_to
    if LANES > HIST:
        # Whole channels: what does not move is written as it was.
        skip, o_to = 0, o
        o_from = o + tl.where(o_h < HIST, start, 0)
    for part in range(tl.program_id(0), tl.cdiv(D, CHANNELS), tl.num_programs(0)):
        first = part * CHANNELS
        mask = o < CHANNELS * LANES
        mask &= o_d < D - first if DIM_LAST else o < (D - first) * LANES
        b_final = tl.load(p_layer + (source * stride + skip + first * dim) + o_from, mask=mask)
        if ALIGN:
            b_boundary = tl.load(p_layer + (source * stride + at * column + first * dim) + o_from, mask=mask)
            tl.debug_barrier()
            if boundary > 0:
                tl.store(p_layer + (boundary * stride + first * dim) + o_to, b_boundary, mask=mask)
        tl.debug_barrier()
        tl.store(p_layer + (final * stride + first * dim) + o_to, b_final, mask=mask)


_UNALIGNED_VERIFY = unaligned(graphrt_verify_conv_kernel)


def conv_verify(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, keeps_history: bool, num_rows: int,
    out: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    """Launch a checked convolution verify; `conv_state` is the [slots, conv_dim, C] view of either storage order."""
    (num_tokens, conv_dim), width, batch = x.shape, weight.shape[1], rows.batch
    if num_tokens == 0 and batch == 0:
        return
    record_rows = rows.state_indices if rows.record_rows is None else rows.record_rows
    pending = rows.state_indices if rows.pending is None else rows.pending
    aligned = all(t.data_ptr() % 16 == 0 for t in (x, out, weight, weight if bias is None else bias))
    aligned &= all(t.stride(0) % 16 == 0 for t in (x, out)) and weight.is_contiguous()
    run = graphrt_verify_conv_kernel if aligned else _UNALIGNED_VERIFY
    run[(triton.cdiv(conv_dim, VERIFY_BLOCK_D), batch + 1)](
        x, conv_state, weight, bias, out, rows.query_start_loc, rows.state_indices, record_rows, pending, errors,
        num_tokens=num_tokens, batch=batch, num_slots=conv_state.shape[0], num_rows=num_rows,
        spec_query_len=rows.spec_query_len, has_rows=int(rows.record_rows is not None),
        has_pending=int(rows.pending is not None), qsl_stride=rows.query_start_loc.stride(0),
        slot_stride=rows.state_indices.stride(0), row_stride=record_rows.stride(0), pending_stride=pending.stride(0),
        x_stride=x.stride(0), out_stride=out.stride(0), conv_stride=conv_state.stride(0),
        dim_stride=conv_state.stride(1), column_stride=conv_state.stride(2),
        weight_dim_stride=weight.stride(0), weight_stride=weight.stride(1),
        D=conv_dim, W=width, BLOCK_H=triton.next_power_of_2(width - 1), KEEPS_HISTORY=keeps_history,
        BLOCK_T=min(MAX_BLOCK_T, triton.next_power_of_2(rows.spec_query_len)), BLOCK_D=VERIFY_BLOCK_D, num_warps=4,
        **NO_CONTRACTION,
    )  # fmt: skip


def compact_conv(stack: LayerStack, plan: Plan, state_indices: Tensor, align: bool) -> None:
    """Run a written plan over the convolution states of every layer, on the current stream."""
    conv, batch, layers = stack.conv_states[0], state_indices.shape[0], len(stack.conv_states)
    (_, conv_dim, columns), dim_last = conv.shape, conv.stride(1) < conv.stride(2)
    # In place, whole channels may be written back as they are.
    whole = stack.conv_packed and not dim_last and not align
    lanes, block, warps = (columns, 4096, 8) if whole else (stack.hist, 1024, 4)
    # Whole sectors, in either storage order.
    channels = max(16, block // lanes // 16 * 16)
    parts = max(1, min(triton.cdiv(conv_dim, channels), FOLD_PROGRAMS // max(1, batch * layers)))
    graphrt_fold_conv_kernel[(parts, batch, layers)](
        conv, stack.conv_addrs, stack.conv_strides, stack.conv_dim_strides, stack.conv_column_strides,
        plan.commit_lens, plan.final_state_indices, plan.boundary_state_indices, plan.boundary_recovery_lens,
        state_indices, slot_stride=state_indices.stride(0), D=conv_dim, C=columns, HIST=stack.hist,
        KEEPS_HISTORY=stack.conv_keeps_history, ALIGN=align, PACKED=stack.conv_packed, DIM_LAST=dim_last, LANES=lanes,
        CHANNELS=channels, BLOCK=triton.next_power_of_2(channels * lanes), num_warps=warps, **NO_CONTRACTION,
    )  # fmt: skip
