"""Stage: copy a step's metadata into the static buffers of a recording, one row per batch row (Triton).

    row b < num_reqs      slot, record row, eager flag and query offset of b; accepted and computed counts and the
                          block-table row of request request_indices[b] (or b)
    row b >= num_reqs     padding: slot 0, record row -1, no tokens, nothing accepted, null blocks

One launch, whatever a larger batch left behind. Grid (rows / BLOCK, 1 + columns / COLUMNS): the first column of
programs writes the vectors, the others the block table. With `replay`, the pending count of every live record row
moves into `replay` and `pending` becomes zero: a step whose commit never comes has then accepted nothing.

A request out of range has accepted and computed nothing and has no blocks; it is counted.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..errors import ErrorKind
from ..steps import Staged, StageSources
from .recurrence import NO_CONTRACTION

BLOCK = 128
COLUMNS = 32

_REQUEST = tl.constexpr(int(ErrorKind.REQUEST))
_ROW = tl.constexpr(int(ErrorKind.ROW))

_VOLATILE = [
    "num_reqs", "max_num_reqs", "num_requests", "num_rows", "width", "source_width", "has_accepted", "has_eager",
    "has_requests", "has_computed", "has_table", "has_replay", "slot_stride", "row_stride", "offset_stride",
    "accepted_stride", "eager_stride", "request_stride", "computed_stride", "table_stride", "table_column_stride",
]  # fmt: skip
_SOURCES = [
    "slot_src", "row_src", "offset_src", "accepted_src", "eager_src", "request_src", "computed_src", "table_src",
    "pending_ptr", "replay_ptr",
]  # fmt: skip


@triton.jit(do_not_specialize=_VOLATILE, do_not_specialize_on_alignment=_SOURCES)
def graphrt_stage_kernel(
    slot_ptr, row_ptr, offset_ptr, accepted_ptr, eager_ptr, computed_ptr, table_ptr,  # static
    slot_src, row_src, offset_src, accepted_src, eager_src, request_src, computed_src, table_src,
    pending_ptr, replay_ptr,  # [record rows] int32
    errors_ptr,
    num_reqs, max_num_reqs, num_requests, num_rows, width, source_width,
    has_accepted, has_eager, has_requests, has_computed, has_table, has_replay,
    slot_stride, row_stride, offset_stride, accepted_stride, eager_stride, request_stride, computed_stride,
    table_stride, table_column_stride,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i_c = tl.program_id(1)
    mask = o_b < max_num_reqs
    live = o_b < num_reqs
    given = o_b < num_reqs * has_requests
    request = tl.where(given, tl.load(request_src + o_b * request_stride, mask=given, other=0), o_b)
    known = live & (request >= 0) & (request < num_requests)
    o_r = request.to(tl.int64)

    if i_c > 0:
        o_c = (i_c - 1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (known & (o_b < num_reqs * has_table))[:, None] & (o_c < source_width)[None, :]
        p = table_src + o_r[:, None] * table_stride + o_c[None, :].to(tl.int64) * table_column_stride
        blocks = tl.load(p, mask=inside, other=0)
        p_out = table_ptr + o_b[:, None].to(tl.int64) * width + o_c[None, :]
        tl.store(p_out, blocks, mask=mask[:, None] & (o_c < width)[None, :])
        return

    unknown = tl.sum((live & (known == 0)).to(tl.int32), axis=0)
    tl.atomic_add(errors_ptr + _REQUEST, unknown, mask=unknown > 0, sem="relaxed")
    slot = tl.load(slot_src + o_b * slot_stride, mask=live, other=0)
    row = tl.load(row_src + o_b * row_stride, mask=live, other=-1)
    accepted = tl.load(accepted_src + o_r * accepted_stride, mask=known & (o_b < num_reqs * has_accepted), other=0)
    computed = tl.load(computed_src + o_r * computed_stride, mask=known & (o_b < num_reqs * has_computed), other=0)
    eager = tl.load(eager_src + o_b * eager_stride, mask=o_b < num_reqs * has_eager, other=0)
    offset = tl.load(offset_src + tl.minimum(o_b, num_reqs) * offset_stride, mask=o_b <= max_num_reqs, other=0)
    tl.store(slot_ptr + o_b, slot, mask=mask)
    tl.store(row_ptr + o_b, row, mask=mask)
    tl.store(accepted_ptr + o_b, accepted, mask=mask)
    tl.store(computed_ptr + o_b, computed, mask=mask)
    tl.store(eager_ptr + o_b, eager, mask=mask)
    tl.store(offset_ptr + o_b, offset, mask=o_b <= max_num_reqs)

    owned = (o_b < num_reqs * has_replay) & (row >= 0) & (row < num_rows)
    pending = tl.load(pending_ptr + row.to(tl.int64), mask=owned, other=0)
    tl.store(replay_ptr + row.to(tl.int64), pending, mask=owned)
    tl.store(pending_ptr + row.to(tl.int64), tl.zeros_like(pending), mask=owned)


def stage(staged: Staged, sources: StageSources, errors: Tensor) -> None:
    """Launch a checked staging on the current stream."""
    s, max_num_reqs = sources, staged.state_indices.shape[0]
    # An absent tensor is a flag, not a variant: any pointer of the right type stands in for what is not read.
    absent = staged.state_indices
    accepted, requests, computed = (
        absent if t is None else t for t in (s.num_accepted_tokens, s.request_indices, s.num_computed_tokens)
    )
    eager = staged.eager if s.eager is None else s.eager
    table = absent[:, None] if s.block_table is None else s.block_table
    pending, replay = (absent, absent) if s.replay is None else (s.pending, s.replay)
    width = staged.block_table.shape[1]
    graphrt_stage_kernel[(triton.cdiv(max_num_reqs + 1, BLOCK), 1 + triton.cdiv(width, COLUMNS))](
        staged.state_indices, staged.record_rows, staged.query_start_loc, staged.num_accepted_tokens, staged.eager,
        staged.num_computed_tokens, staged.block_table,
        s.state_indices, s.record_rows, s.query_start_loc, accepted, eager, requests, computed, table,
        pending, replay, errors,
        num_reqs=s.num_reqs, max_num_reqs=max_num_reqs, num_requests=s.num_requests, num_rows=pending.shape[0],
        width=width, source_width=min(width, table.shape[1]), has_accepted=int(s.num_accepted_tokens is not None),
        has_eager=int(s.eager is not None), has_requests=int(s.request_indices is not None),
        has_computed=int(s.num_computed_tokens is not None), has_table=int(s.block_table is not None),
        has_replay=int(s.replay is not None), slot_stride=s.state_indices.stride(0),
        row_stride=s.record_rows.stride(0), offset_stride=s.query_start_loc.stride(0),
        accepted_stride=accepted.stride(0), eager_stride=eager.stride(0), request_stride=requests.stride(0),
        computed_stride=computed.stride(0), table_stride=table.stride(0), table_column_stride=table.stride(1),
        BLOCK=BLOCK, COLUMNS=COLUMNS, num_warps=4, **NO_CONTRACTION,
    )  # fmt: skip
