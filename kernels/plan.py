"""Plan: what a commit or a flush folds, row by row, and what it leaves pending (Triton).

One launch writes the four plan vectors for rows 0..B-1 and, in a deferred commit, `pending` as well. A thread has
one row, so that a launch takes as long as one row does.

With a = clamp(accepted, 0, min(query length, Q)) of a live row (slot not null, row not -1):

    deferred, not eager    pending[row] = a; nothing is folded
    otherwise              commit_len = a and pending[row] = 0

    align mode, c tokens computed, block size s:
    final block            table[request, (c + a - 1) // s], the block of the last committed token
    boundary block         table[request, c // s] with boundary_len = s - c % s, if the window gets that far
    must be eager          c % s + query length >= s, or c > 0 and c % s == 0

A row whose staged generation is not the current one of its record row belongs to an earlier owner: it changes nothing
(design section 3.6; generation 0 is not compared).

Bad values are clamped and counted (design section 3.6): asked for once, behind the stores. A row whose destination is
null folds nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..errors import ErrorKind
from ..steps import Commit, Geometry, Owners, Plan
from .recurrence import _NUM_KINDS, NO_CONTRACTION

BLOCK = 128

_SLOT = tl.constexpr(int(ErrorKind.SLOT))
_ROW = tl.constexpr(int(ErrorKind.ROW))
_REQUEST = tl.constexpr(int(ErrorKind.REQUEST))
_ACCEPTED = tl.constexpr(int(ErrorKind.ACCEPTED))
_PENDING = tl.constexpr(int(ErrorKind.PENDING))
_QUERY_LEN = tl.constexpr(int(ErrorKind.QUERY_LEN))
_COLUMN = tl.constexpr(int(ErrorKind.COLUMN))
_EAGER_MISSED = tl.constexpr(int(ErrorKind.EAGER_MISSED))
_EAGER_NULL = tl.constexpr(int(ErrorKind.EAGER_NULL))
_CONV_ZERO_ACCEPT = tl.constexpr(int(ErrorKind.CONV_ZERO_ACCEPT))
_STALE = tl.constexpr(int(ErrorKind.STALE_GENERATION))


@triton.jit
def bad(KIND: tl.constexpr, mask):
    """The rows of `mask` as bit KIND of what a row met."""
    return mask.to(tl.int32) << KIND


@triton.jit
def count(errors_ptr, met, o_b):
    """Add what rows o_b met, a bit a kind, to the device error counter; whoever is first notes its lowest row."""
    # One question while all is well. The counter lies in host memory: nothing goes there.
    if tl.max(met, axis=0) > 0:
        for kind in range(_NUM_KINDS):
            mask = (met >> kind) & 1
            total = tl.sum(mask, axis=0)
            if total > 0:
                before = tl.atomic_add(errors_ptr + kind, total, sem="relaxed", scope="gpu")
                if before == 0:
                    tl.store(errors_ptr + _NUM_KINDS + kind, tl.min(tl.where(mask != 0, o_b, 2147483647), axis=0))


@triton.jit
def live_rows(
    state_indices_ptr, record_rows_ptr, staged_ptr, current_ptr, o_b, slot_stride, row_stride, staged_stride,
    current_stride, batch, num_slots, num_rows, has_rows, has_owners,
):  # fmt: skip
    """Slot, record row, liveness and bad values of rows o_b. A row staged for an earlier owner is not live."""
    mask, given, owned = o_b < batch, o_b < batch * has_rows, o_b < batch * has_owners
    slot = tl.load(state_indices_ptr + o_b * slot_stride, mask=mask, other=0)
    row = tl.load(record_rows_ptr + o_b * row_stride, mask=given, other=-1)
    staged = tl.load(staged_ptr + o_b * staged_stride, mask=owned, other=0)
    row = tl.where(given, row, o_b)
    has_row = (row >= 0) & (row < num_rows)
    current = tl.load(current_ptr + row.to(tl.int64) * current_stride, mask=owned & has_row, other=0)
    live = (slot > 0) & (slot < num_slots)
    met = bad(_SLOT, slot >= num_slots) | bad(_ROW, live & (row != -1) & (has_row == 0))
    live = live & has_row
    stale = live & (staged != 0) & (current != staged)
    return slot, row, live & (stale == 0), met | bad(_STALE, stale)


@triton.jit
def block_of(p_table, column, column_stride, width, num_slots, mask):
    """Entry of the block table, null where the column or the block is out of range, and what was met."""
    block = tl.load(p_table + column.to(tl.int64) * column_stride, mask=mask & (column < width), other=0)
    met = bad(_COLUMN, mask & (column >= width)) | bad(_SLOT, block >= num_slots)
    return tl.where((block > 0) & (block < num_slots), block, 0), met


@triton.jit(
    do_not_specialize=[
        "batch", "num_requests", "num_slots", "num_rows", "width", "block_size", "has_requests", "has_rows",
        "has_pending", "has_align", "has_owners", "accepted_stride", "request_stride",
        "slot_stride", "qsl_stride", "row_stride", "pending_stride", "eager_stride", "table_stride",
        "table_column_stride", "computed_stride", "staged_stride", "current_stride",
    ],
    do_not_specialize_on_alignment=[
        "accepted_ptr", "request_ptr", "state_indices_ptr", "qsl_ptr", "record_rows_ptr", "pending_ptr", "eager_ptr",
        "table_ptr", "computed_ptr", "staged_ptr", "current_ptr",
    ],
)  # fmt: skip
def graphrt_commit_plan_kernel(
    accepted_ptr,       # [>= requests] int32
    request_ptr,        # [>= B] int32
    state_indices_ptr,  # [B] int32
    qsl_ptr,            # [B + 1] int32
    record_rows_ptr,    # [>= B] int32
    pending_ptr,        # [R] int32
    eager_ptr,          # [B] uint8 or None
    table_ptr,          # [requests, width] int32
    computed_ptr,       # [requests] int32
    staged_ptr,         # [>= B] int32
    current_ptr,        # [R] int32
    commit_lens_ptr, final_ptr, boundary_ptr, boundary_lens_ptr,  # [R] int32
    errors_ptr,
    batch, num_requests, num_slots, num_rows, width, block_size, has_requests, has_rows, has_pending, has_align,
    has_owners, accepted_stride, request_stride, slot_stride, qsl_stride, row_stride, pending_stride, eager_stride,
    table_stride, table_column_stride, computed_stride, staged_stride, current_stride,
    Q: tl.constexpr, KEEPS_HISTORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Every load that waits for no other comes first.
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, given, deferred = o_b < batch, o_b < batch * has_requests, o_b < batch * has_pending
    request = tl.load(request_ptr + o_b * request_stride, mask=given, other=0)
    begin = tl.load(qsl_ptr + o_b * qsl_stride, mask=mask, other=0).to(tl.int64)
    end = tl.load(qsl_ptr + (o_b + 1) * qsl_stride, mask=mask, other=0).to(tl.int64)
    eager = mask & (mask == 0)
    if eager_ptr is not None:
        eager = tl.load(eager_ptr + o_b * eager_stride, mask=deferred, other=0) != 0
    slot, row, live, met = live_rows(
        state_indices_ptr, record_rows_ptr, staged_ptr, current_ptr, o_b, slot_stride, row_stride, staged_stride,
        current_stride, batch, num_slots, num_rows, has_rows, has_owners,
    )  # fmt: skip
    request = tl.where(given, request, o_b)
    known = mask & (request >= 0) & (request < num_requests)
    accepted = tl.load(accepted_ptr + request.to(tl.int64) * accepted_stride, mask=known, other=0)
    computed = tl.load(
        computed_ptr + request.to(tl.int64) * computed_stride, mask=known & (o_b < batch * has_align), other=0
    )

    length = tl.minimum(tl.maximum(end - begin, 0), Q)
    a = tl.minimum(tl.maximum(accepted, 0), length.to(tl.int32))
    met |= bad(_QUERY_LEN, live & (length != end - begin)) | bad(_REQUEST, live & (known == 0))
    met |= bad(_ACCEPTED, live & (a != accepted))
    if not KEEPS_HISTORY:
        met |= bad(_CONV_ZERO_ACCEPT, live & (length > 0) & (a == 0))
    deferred = deferred & live
    fold = live & (a > 0) & ((deferred == 0) | eager)
    final, boundary, to_boundary = slot, tl.zeros_like(slot), tl.zeros_like(slot)
    if has_align > 0:
        # A window is no longer than a block, so it ends in this block or the next: one division, in 32 bits.
        met |= bad(_COLUMN, live & (computed < 0))
        computed = tl.maximum(computed, 0)
        column = (computed.to(tl.uint32) // tl.cast(block_size, tl.uint32)).to(tl.int32)
        offset = computed - column * block_size
        to_boundary = block_size - offset
        must = live & known & ((length >= to_boundary) | ((computed > 0) & (offset == 0)))
        met |= bad(_EAGER_MISSED, deferred & must & (eager == 0))
        fold = (fold | must) & (a > 0)
        p_table = table_ptr + request.to(tl.int64) * table_stride
        final, met_final = block_of(
            p_table, column + (a > to_boundary).to(tl.int32), table_column_stride, width, num_slots, fold
        )
        boundary, met_boundary = block_of(
            p_table, column, table_column_stride, width, num_slots, fold & (to_boundary <= a)
        )
        met |= met_final | bad(_EAGER_NULL, fold & (final == 0))
        fold = fold & (final > 0)
        met |= tl.where(fold, met_boundary, 0)
        boundary = tl.where(fold, boundary, 0)

    tl.store(pending_ptr + row.to(tl.int64) * pending_stride, tl.where(fold, 0, a), mask=deferred)
    tl.store(commit_lens_ptr + o_b, tl.where(fold, a, 0), mask=mask)
    tl.store(final_ptr + o_b, tl.where(fold, final, 0), mask=mask)
    tl.store(boundary_ptr + o_b, boundary, mask=mask)
    tl.store(boundary_lens_ptr + o_b, tl.where(boundary > 0, to_boundary, 0), mask=mask)
    count(errors_ptr, met, o_b)


@triton.jit(
    do_not_specialize=[
        "batch", "num_slots", "num_rows", "zero", "has_owners", "slot_stride", "row_stride", "pending_stride",
        "staged_stride", "current_stride",
    ],
    do_not_specialize_on_alignment=["state_indices_ptr", "record_rows_ptr", "pending_ptr", "staged_ptr", "current_ptr"],
)  # fmt: skip
def graphrt_flush_plan_kernel(
    state_indices_ptr, record_rows_ptr, pending_ptr, staged_ptr, current_ptr,
    commit_lens_ptr, final_ptr, boundary_ptr, boundary_lens_ptr,  # [R] int32
    errors_ptr,
    batch, num_slots, num_rows, zero, has_owners,
    slot_stride, row_stride, pending_stride, staged_stride, current_stride,
    Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold every pending record of the rows in place; `zero` (drain) takes them off `pending` as well."""
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_b < batch
    slot, row, live, met = live_rows(
        state_indices_ptr, record_rows_ptr, staged_ptr, current_ptr, o_b, slot_stride, row_stride, staged_stride,
        current_stride, batch, num_slots, num_rows, 1, has_owners,
    )  # fmt: skip
    p_pending = pending_ptr + row.to(tl.int64) * pending_stride
    pending = tl.load(p_pending, mask=mask & live, other=0)
    n = tl.minimum(tl.maximum(pending, 0), Q)
    tl.store(p_pending, tl.zeros_like(n), mask=live & (o_b < batch * zero))
    tl.store(commit_lens_ptr + o_b, n, mask=mask)
    tl.store(final_ptr + o_b, tl.where(n > 0, slot, 0), mask=mask)
    tl.store(boundary_ptr + o_b, tl.zeros_like(n), mask=mask)
    tl.store(boundary_lens_ptr + o_b, tl.zeros_like(n), mask=mask)
    count(errors_ptr, met | bad(_PENDING, live & (n != pending)), o_b)


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_requests",
        "block_size",
        "computed_stride",
        "qsl_stride",
        "request_stride",
        "out_stride",
    ],
    do_not_specialize_on_alignment=["computed_ptr", "qsl_ptr", "request_ptr", "out_ptr"],
)
def graphrt_stage_align_eager_kernel(
    computed_ptr, qsl_ptr, request_ptr, out_ptr,
    batch, num_requests, block_size, computed_stride, qsl_stride, request_stride, out_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[b] = 1 where the window of row b can reach a block boundary or starts on one."""
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_b < batch
    begin = tl.load(qsl_ptr + o_b * qsl_stride, mask=mask, other=0).to(tl.int64)
    end = tl.load(qsl_ptr + (o_b + 1) * qsl_stride, mask=mask, other=0).to(tl.int64)
    request = tl.load(request_ptr + o_b * request_stride, mask=mask, other=0) if request_ptr is not None else o_b
    known = (request >= 0) & (request < num_requests)
    computed = tl.load(computed_ptr + request.to(tl.int64) * computed_stride, mask=mask & known, other=0)
    computed = tl.maximum(computed, 0).to(tl.int64)
    offset = computed % block_size
    near = (offset + tl.maximum(end - begin, 0) >= block_size) | ((computed > 0) & (offset == 0))
    tl.store(out_ptr + o_b * out_stride, (near & known).to(tl.uint8), mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "width",
        "block_size",
        "table_stride",
        "column_stride",
        "computed_stride",
        "out_stride",
    ],
    do_not_specialize_on_alignment=["table_ptr", "computed_ptr", "out_ptr"],
)
def graphrt_stage_align_slots_kernel(
    table_ptr, computed_ptr, out_ptr, errors_ptr,
    num_requests, width, block_size, table_stride, column_stride, computed_stride, out_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r] = the block that holds the state after computed[r] tokens; null past the end of the table."""
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_r < num_requests
    computed = tl.load(computed_ptr + o_r * computed_stride, mask=mask, other=0)
    column = (tl.maximum(computed, 1) - 1) // block_size
    inside = mask & (column < width)
    count(errors_ptr, bad(_COLUMN, mask & ((inside == 0) | (computed < 0))), o_r)
    block = tl.load(table_ptr + o_r.to(tl.int64) * table_stride + column * column_stride, mask=inside, other=0)
    tl.store(out_ptr + o_r * out_stride, block, mask=mask)


def _stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def plan_commit(plan: Plan, commit: Commit, geometry: Geometry, errors: Tensor) -> None:
    """Write the plan of a checked commit, and `pending` where it is deferred: one launch."""
    c = commit
    # An absent tensor is a flag, not a variant: any int32 pointer stands in for what is then not read.
    absent = c.state_indices
    requests, rows, pending, computed = (
        absent if t is None else t for t in (c.request_indices, c.record_rows, c.pending, c.num_computed_tokens)
    )
    table = absent[:, None] if c.block_table is None else c.block_table
    staged, current = (absent, absent) if c.owners is None else (c.owners.staged, c.owners.current)
    graphrt_commit_plan_kernel[(triton.cdiv(c.batch, BLOCK),)](
        c.num_accepted_tokens, requests, c.state_indices, c.query_start_loc, rows, pending, c.eager, table, computed,
        staged, current, plan.commit_lens, plan.final_state_indices, plan.boundary_state_indices,
        plan.boundary_recovery_lens, errors,
        batch=c.batch, num_requests=c.num_requests, num_slots=geometry.num_slots, num_rows=geometry.num_rows,
        width=table.shape[1], block_size=c.mamba_block_size or 1, has_requests=int(c.request_indices is not None),
        has_rows=int(c.record_rows is not None), has_pending=int(c.pending is not None), has_align=int(c.align),
        has_owners=int(c.owners is not None),
        accepted_stride=c.num_accepted_tokens.stride(0), request_stride=requests.stride(0),
        slot_stride=c.state_indices.stride(0), qsl_stride=c.query_start_loc.stride(0), row_stride=rows.stride(0),
        pending_stride=pending.stride(0), eager_stride=_stride(c.eager), table_stride=table.stride(0),
        table_column_stride=table.stride(1), computed_stride=computed.stride(0),
        staged_stride=staged.stride(0), current_stride=current.stride(0),
        Q=geometry.spec_query_len, KEEPS_HISTORY=geometry.conv_keeps_history, BLOCK=BLOCK, num_warps=4,
        **NO_CONTRACTION,
    )  # fmt: skip


def plan_flush(
    plan: Plan,
    state_indices: Tensor,
    record_rows: Tensor,
    pending: Tensor,
    zero: bool,
    owners: Owners | None,
    geometry: Geometry,
    errors: Tensor,
) -> None:
    """Write the plan of a flush (`zero` false) or a drain (`zero` true): one launch."""
    batch = state_indices.shape[0]
    staged, current = (state_indices, state_indices) if owners is None else (owners.staged, owners.current)
    graphrt_flush_plan_kernel[(triton.cdiv(batch, BLOCK),)](
        state_indices, record_rows, pending, staged, current,
        plan.commit_lens, plan.final_state_indices, plan.boundary_state_indices, plan.boundary_recovery_lens, errors,
        batch=batch, num_slots=geometry.num_slots, num_rows=geometry.num_rows, zero=int(zero),
        has_owners=int(owners is not None), slot_stride=state_indices.stride(0), row_stride=record_rows.stride(0),
        pending_stride=pending.stride(0), staged_stride=staged.stride(0), current_stride=current.stride(0),
        Q=geometry.spec_query_len, BLOCK=BLOCK, num_warps=4, **NO_CONTRACTION,
    )  # fmt: skip


def align_eager_mask(
    num_computed_tokens: Tensor, query_start_loc: Tensor, block_size: int, request_indices: Tensor | None, out: Tensor
) -> None:
    """Write the [B] uint8 mask of rows that must commit eagerly: one launch."""
    batch = out.shape[0]
    graphrt_stage_align_eager_kernel[(triton.cdiv(batch, BLOCK),)](
        num_computed_tokens, query_start_loc, request_indices, out,
        batch=batch, num_requests=num_computed_tokens.shape[0], block_size=block_size,
        computed_stride=num_computed_tokens.stride(0), qsl_stride=query_start_loc.stride(0),
        request_stride=_stride(request_indices), out_stride=out.stride(0), BLOCK=BLOCK, num_warps=4, **NO_CONTRACTION,
    )  # fmt: skip


def align_state_indices(
    block_table: Tensor, num_computed_tokens: Tensor, block_size: int, out: Tensor, errors: Tensor
) -> None:
    """Write the [requests] int32 source slots: one launch."""
    num_requests, width = block_table.shape
    graphrt_stage_align_slots_kernel[(triton.cdiv(num_requests, BLOCK),)](
        block_table, num_computed_tokens, out, errors,
        num_requests=num_requests, width=width, block_size=block_size, table_stride=block_table.stride(0),
        column_stride=block_table.stride(1), computed_stride=num_computed_tokens.stride(0), out_stride=out.stride(0),
        BLOCK=BLOCK, num_warps=4, **NO_CONTRACTION,
    )  # fmt: skip
