"""The two ends of a recorded step: staging, and the advance to the next step (Triton). One launch each.

Stage copies a step's metadata into static buffers, one row per batch row:

    row b < num_reqs      slot, record row, eager flag and query offset of b; accepted and computed counts and the
                          block-table row of request request_indices[b] (or b)
    row b >= num_reqs     padding: slot 0, record row -1, no tokens, nothing accepted, null blocks

whatever a larger batch left behind. Grid (rows / BLOCK, 1 + columns / COLUMNS): the first column of programs writes
the vectors, the others the block table. A row with a null slot and no record row is padding wherever it stands. So is
a row whose generation is not the current one of its record row (0 is not compared): it belongs to an earlier owner,
and is counted. A request out of range has accepted and computed nothing and has no blocks; it is counted.

Where the sources are comes by value (`graphrt_stage_kernel`, which a recording may hold), or from a header in memory
(`graphrt_stage_header_kernel`, recorded once and replayed with a new header each time; `graphrt.steps` has its words,
`graphrt.capture.pinned` writes it).

Advance derives the rows of the next step from what was accepted, in one program:

    computed += a;  align mode: slot = table[max(computed - 1, 0) // block size];  offsets = running sum of lengths
    finished, or no block      padding
"""

import triton
import triton.language as tl
from torch import Tensor

from ..errors import ErrorKind
from ..steps import SOURCES, Advance, Staged, StageSources, StepBegin
from .plan import bad, count
from .recurrence import NO_CONTRACTION

BLOCK = 32
COLUMNS = 8

_REQUEST = tl.constexpr(int(ErrorKind.REQUEST))
_QUERY_LEN = tl.constexpr(int(ErrorKind.QUERY_LEN))
_COLUMN = tl.constexpr(int(ErrorKind.COLUMN))
_STALE = tl.constexpr(int(ErrorKind.STALE_GENERATION))

_VOLATILE = [
    "num_reqs", "num_requests", "columns", "column_stride", "max_num_reqs", "width", "num_rows", "num_slots",
    "begins", "all_eager", "block_size", "slot_stride", "row_stride", "offset_stride", "accepted_stride",
    "eager_stride", "request_stride", "computed_stride", "table_stride", "slot_count", "row_count", "offset_count",
    "accepted_count", "eager_count", "request_count", "computed_count", "table_count",
    "generation_stride", "generation_count", "num_current",
]  # fmt: skip
_POINTERS = [
    "slot_src", "row_src", "offset_src", "accepted_src", "eager_src", "request_src", "computed_src", "table_src",
    "pending_ptr", "replay_ptr", "generation_src", "current_ptr",
]  # fmt: skip


@triton.jit
def _entries(source, o, stride, entries, mask, DEFAULT: tl.constexpr):
    """source[o] where o is below the number of entries, else the default."""
    return tl.load(source + o.to(tl.int64) * stride, mask=mask & (o < entries), other=DEFAULT)


@triton.jit
def _stage(
    slot_ptr, row_ptr, offset_ptr, accepted_ptr, eager_ptr, computed_ptr, table_ptr, generation_ptr,
    current_ptr, errors_ptr, num_current, max_num_reqs, width,
    num_reqs, num_requests, columns, column_stride,
    slot_src, slot_stride, slot_count, row_src, row_stride, row_count, offset_src, offset_stride, offset_count,
    accepted_src, accepted_stride, accepted_count, eager_src, eager_stride, eager_count,
    request_src, request_stride, request_count, computed_src, computed_stride, computed_count,
    table_src, table_stride, table_count, generation_src, generation_stride, generation_count,
    pending_ptr, replay_ptr, num_rows, num_slots, begins, all_eager, block_size,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program of a staging, wherever its arguments came from."""
    i_c = tl.program_id(1)
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, live = o_b < max_num_reqs, o_b < num_reqs
    # Every load that waits for no other comes first.
    slot = _entries(slot_src, o_b, slot_stride, slot_count, live, 0)
    row = _entries(row_src, o_b, row_stride, row_count, live, -1)
    generation = _entries(generation_src, o_b, generation_stride, generation_count, live, 0)
    request = _entries(request_src, o_b, request_stride, request_count, live, 0)
    request = tl.where(o_b < request_count, request, o_b)
    compared = live & (generation != 0) & (row >= 0) & (row < num_current)
    current = tl.load(current_ptr + row.to(tl.int64), mask=compared, other=0)
    stale = compared & (current != generation)
    slot, row = tl.where(stale, 0, slot), tl.where(stale, -1, row)
    owned = live & ((slot > 0) | (row >= 0))
    known = owned & (request >= 0) & (request < num_requests)

    if i_c > 0:
        o_c = (i_c - 1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (known & (request < table_count))[:, None] & (o_c < columns)[None, :]
        p = table_src + request[:, None].to(tl.int64) * table_stride + o_c[None, :].to(tl.int64) * column_stride
        blocks = tl.load(p, mask=inside, other=0)
        p_out = table_ptr + o_b[:, None].to(tl.int64) * width + o_c[None, :]
        tl.store(p_out, blocks, mask=mask[:, None] & (o_c < width)[None, :])
        return

    accepted = _entries(accepted_src, request, accepted_stride, accepted_count, known, 0)
    computed = _entries(computed_src, request, computed_stride, computed_count, known, 0)
    moved = (o_b < num_reqs * begins) & (slot > 0) & (slot < num_slots) & (row >= 0) & (row < num_rows)
    o_r = row.to(tl.int64)
    pending = tl.load(pending_ptr + o_r, mask=moved, other=0)
    eager = _entries(eager_src, o_b, eager_stride, eager_count, owned, 0)
    with_end = o_b <= max_num_reqs
    offset = _entries(offset_src, tl.minimum(o_b, num_reqs), offset_stride, offset_count, with_end, 0)
    end = _entries(offset_src, tl.minimum(o_b + 1, num_reqs), offset_stride, offset_count, mask, 0)
    size = tl.maximum(block_size, 1)
    into_block = (tl.maximum(computed, 0).to(tl.uint32) % tl.cast(size, tl.uint32)).to(tl.int64)
    near = (into_block + tl.maximum(end.to(tl.int64) - offset, 0) >= size) | ((computed > 0) & (into_block == 0))
    eager = tl.where(owned & ((near & (block_size > 0)) | (all_eager > 0)), 1, eager.to(tl.int32))
    tl.store(slot_ptr + o_b, slot, mask=mask)
    tl.store(row_ptr + o_b, row, mask=mask)
    tl.store(generation_ptr + o_b, generation, mask=mask)
    tl.store(accepted_ptr + o_b, accepted, mask=mask)
    tl.store(computed_ptr + o_b, computed, mask=mask)
    tl.store(eager_ptr + o_b, eager.to(tl.uint8), mask=mask)
    tl.store(offset_ptr + o_b, offset, mask=with_end)
    tl.store(replay_ptr + o_r, pending, mask=moved)
    tl.store(pending_ptr + o_r, tl.zeros_like(pending), mask=moved)
    count(errors_ptr, bad(_STALE, stale) | bad(_REQUEST, owned & (known == 0)), o_b)


@triton.jit(do_not_specialize=_VOLATILE, do_not_specialize_on_alignment=_POINTERS)
def graphrt_stage_kernel(
    slot_ptr, row_ptr, offset_ptr, accepted_ptr, eager_ptr, computed_ptr, table_ptr, generation_ptr,  # static
    current_ptr,  # [num_current] int32
    errors_ptr, num_current, max_num_reqs, width,
    num_reqs, num_requests, columns, column_stride,
    slot_src, slot_stride, slot_count, row_src, row_stride, row_count, offset_src, offset_stride, offset_count,
    accepted_src, accepted_stride, accepted_count, eager_src, eager_stride, eager_count,
    request_src, request_stride, request_count, computed_src, computed_stride, computed_count,
    table_src, table_stride, table_count, generation_src, generation_stride, generation_count,
    pending_ptr, replay_ptr,  # [num_rows] int32
    num_rows, num_slots, begins, all_eager, block_size,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    _stage(
        slot_ptr, row_ptr, offset_ptr, accepted_ptr, eager_ptr, computed_ptr, table_ptr, generation_ptr, current_ptr,
        errors_ptr, num_current, max_num_reqs, width, num_reqs, num_requests, columns, column_stride,
        slot_src, slot_stride, slot_count, row_src, row_stride, row_count, offset_src, offset_stride, offset_count,
        accepted_src, accepted_stride, accepted_count, eager_src, eager_stride, eager_count,
        request_src, request_stride, request_count, computed_src, computed_stride, computed_count,
        table_src, table_stride, table_count, generation_src, generation_stride, generation_count,
        pending_ptr, replay_ptr, num_rows, num_slots, begins, all_eager, block_size, BLOCK, COLUMNS,
    )  # fmt: skip


@triton.jit
def _source(header_ptr, INDEX: tl.constexpr, like_ptr):
    """Address, stride and number of entries of one source."""
    p = header_ptr + 4 + 3 * INDEX
    return tl.load(p).to(like_ptr.dtype), tl.load(p + 1), tl.load(p + 2)


@triton.jit(do_not_specialize=_VOLATILE)
def graphrt_stage_header_kernel(
    slot_ptr, row_ptr, offset_ptr, accepted_ptr, eager_ptr, computed_ptr, table_ptr, generation_ptr,  # static
    current_ptr,  # [num_current] int32
    errors_ptr,
    header_ptr,  # [HEADER_WORDS] int64
    num_current, max_num_reqs, width,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    num_reqs, num_requests = tl.load(header_ptr).to(tl.int32), tl.load(header_ptr + 1)
    columns, column_stride = tl.load(header_ptr + 2), tl.load(header_ptr + 3)
    slot_src, slot_stride, slot_count = _source(header_ptr, 0, slot_ptr)
    row_src, row_stride, row_count = _source(header_ptr, 1, slot_ptr)
    offset_src, offset_stride, offset_count = _source(header_ptr, 2, slot_ptr)
    accepted_src, accepted_stride, accepted_count = _source(header_ptr, 3, slot_ptr)
    eager_src, eager_stride, eager_count = _source(header_ptr, 4, eager_ptr)
    request_src, request_stride, request_count = _source(header_ptr, 5, slot_ptr)
    computed_src, computed_stride, computed_count = _source(header_ptr, 6, slot_ptr)
    table_src, table_stride, table_count = _source(header_ptr, 7, slot_ptr)
    generation_src, generation_stride, generation_count = _source(header_ptr, 8, slot_ptr)
    _stage(
        slot_ptr, row_ptr, offset_ptr, accepted_ptr, eager_ptr, computed_ptr, table_ptr, generation_ptr, current_ptr,
        errors_ptr, num_current, max_num_reqs, width, num_reqs, num_requests, columns, column_stride,
        slot_src, slot_stride, slot_count, row_src, row_stride, row_count, offset_src, offset_stride, offset_count,
        accepted_src, accepted_stride, accepted_count, eager_src, eager_stride, eager_count,
        request_src, request_stride, request_count, computed_src, computed_stride, computed_count,
        table_src, table_stride, table_count, generation_src, generation_stride, generation_count,
        slot_ptr, slot_ptr, 0, 0, 0, 0, 0, BLOCK, COLUMNS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "batch", "max_num_reqs", "width", "block_size", "num_slots", "has_finished", "accepted_stride",
        "length_stride", "finished_stride",
    ],
    do_not_specialize_on_alignment=["accepted_ptr", "length_ptr", "finished_ptr"],
)  # fmt: skip
def graphrt_stage_advance_kernel(
    slot_ptr, row_ptr, offset_ptr, computed_ptr, table_ptr,                         # the step that ran, static
    next_slot_ptr, next_row_ptr, next_offset_ptr, next_accepted_ptr, next_eager_ptr, next_computed_ptr,
    accepted_ptr,  # [B] int32
    length_ptr,    # [B] int32
    finished_ptr,  # [B] uint8
    errors_ptr,
    batch, max_num_reqs, width, block_size, num_slots, has_finished, accepted_stride, length_stride, finished_stride,
    Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_b = tl.arange(0, BLOCK)
    mask, ran = o_b < max_num_reqs, o_b < batch
    slot = tl.load(slot_ptr + o_b, mask=ran, other=0)
    row = tl.load(row_ptr + o_b, mask=ran, other=-1)
    begin = tl.load(offset_ptr + o_b, mask=ran, other=0)
    end = tl.load(offset_ptr + o_b + 1, mask=ran, other=0)
    accepted = tl.load(accepted_ptr + o_b * accepted_stride, mask=ran, other=0)
    span = tl.minimum(tl.maximum(end.to(tl.int64) - begin, 0), Q).to(tl.int32)
    accepted = tl.minimum(tl.maximum(accepted, 0), span)
    # In 64 bits, where a count past the end of 32 leads past the table and not in front of it.
    computed = tl.load(computed_ptr + o_b, mask=ran, other=0).to(tl.int64) + accepted
    finished = tl.load(finished_ptr + o_b * finished_stride, mask=o_b < batch * has_finished, other=0) != 0
    keep = (slot > 0) & (row >= 0) & (finished == 0)

    column = (tl.maximum(computed, 1) - 1) // tl.maximum(block_size, 1)
    # As a vector: the interpreter takes no scalar in a mask.
    aligned = keep & (o_b < batch * tl.minimum(block_size, 1))
    block = tl.load(table_ptr + o_b.to(tl.int64) * width + column, mask=aligned & (column < width), other=0)
    missing = aligned & ((block <= 0) | (block >= num_slots))
    keep = keep & (missing == 0)
    slot = tl.where(aligned, block, slot)
    asked = tl.load(length_ptr + o_b * length_stride, mask=ran, other=0)
    length = tl.minimum(tl.maximum(asked, 0), Q)
    met = bad(_COLUMN, missing) | bad(_QUERY_LEN, keep & (length != asked))
    length = tl.where(keep, length, 0)

    eager = tl.load(next_eager_ptr + o_b, mask=keep, other=0)
    tl.store(next_slot_ptr + o_b, tl.where(keep, slot, 0), mask=mask)
    tl.store(next_row_ptr + o_b, tl.where(keep, row, -1), mask=mask)
    tl.store(next_accepted_ptr + o_b, tl.zeros_like(length), mask=mask)
    tl.store(next_eager_ptr + o_b, eager, mask=mask)
    tl.store(next_computed_ptr + o_b, tl.where(keep, computed, 0), mask=mask)
    tl.store(next_offset_ptr + o_b, tl.cumsum(length, 0) - length, mask=o_b <= max_num_reqs)
    count(errors_ptr, met, o_b)


def stage(
    staged: Staged, sources: StageSources, begin: StepBegin | None, errors: Tensor, current: Tensor | None = None
) -> None:
    """Launch a checked staging, its sources by value, on the current stream.

    Args:
        current: [record rows] int32 generations now, contiguous; without it none is compared.
    """
    s = sources
    # An absent tensor has no entries: any pointer of the right type stands in for what is not read.
    absent: dict[str, Tensor] = {"eager": staged.eager, "block_table": staged.state_indices[:, None]}
    placed = []
    for name in SOURCES:
        source = getattr(s, name)
        stand_in = absent.get(name, staged.state_indices) if source is None else source
        placed += [stand_in, stand_in.stride(0), entries(name, source, s)]
    columns, column_stride = (0, 0) if s.block_table is None else (s.block_table.shape[1], s.block_table.stride(1))
    pending, replay, num_slots, block_size, eager = staged.state_indices, staged.state_indices, 0, 0, False
    if begin is not None:
        pending, replay, num_slots, eager = begin.pending, begin.replay, begin.num_slots, begin.eager
        block_size = begin.mamba_block_size or 0
    graphrt_stage_kernel[_grid(staged)](
        *_static(staged, current), errors, *_sizes(staged, current),
        s.num_reqs, s.num_requests, columns, column_stride, *placed,
        pending, replay, pending.shape[0], num_slots, int(begin is not None), int(eager), block_size,
        BLOCK=BLOCK, COLUMNS=COLUMNS, num_warps=1, **NO_CONTRACTION,
    )  # fmt: skip


def stage_header(staged: Staged, header: Tensor, errors: Tensor, current: Tensor | None = None) -> None:
    """Launch a staging that finds its sources in `header` [HEADER_WORDS] int64, which the device reads when it runs."""
    graphrt_stage_header_kernel[_grid(staged)](
        *_static(staged, current), errors, header, *_sizes(staged, current),
        BLOCK=BLOCK, COLUMNS=COLUMNS, num_warps=1, **NO_CONTRACTION,
    )  # fmt: skip


def entries(name: str, source: Tensor | None, sources: StageSources) -> int:
    """How many entries of a source a staging may read."""
    if source is None:
        return 0
    if name in ("num_accepted_tokens", "num_computed_tokens", "block_table"):
        return source.shape[0]
    return sources.num_reqs + (name == "query_start_loc")


def _static(staged: Staged, current: Tensor | None) -> tuple[Tensor, ...]:
    s = staged
    return (
        s.state_indices, s.record_rows, s.query_start_loc, s.num_accepted_tokens, s.eager, s.num_computed_tokens,
        s.block_table, s.generation, s.generation if current is None else current,
    )  # fmt: skip


def _sizes(staged: Staged, current: Tensor | None) -> tuple[int, ...]:
    """Record rows with a generation, rows, columns."""
    return 0 if current is None else current.shape[0], *staged.block_table.shape


def _grid(staged: Staged) -> tuple[int, int]:
    max_num_reqs, width = staged.block_table.shape
    return triton.cdiv(max_num_reqs + 1, BLOCK), 1 + triton.cdiv(width, COLUMNS)


def advance(a: Advance, errors: Tensor) -> None:
    """Launch the advance of a recorded step on the current stream."""
    rows, n = a.rows, a.next_rows
    max_num_reqs, width = n.block_table.shape
    finished = rows.eager if a.finished is None else a.finished
    graphrt_stage_advance_kernel[(1,)](
        rows.state_indices, rows.record_rows, rows.query_start_loc, rows.num_computed_tokens, rows.block_table,
        n.state_indices, n.record_rows, n.query_start_loc, n.num_accepted_tokens, n.eager, n.num_computed_tokens,
        a.num_accepted_tokens, a.query_lens, finished, errors,
        batch=rows.state_indices.shape[0], max_num_reqs=max_num_reqs, width=width,
        block_size=a.mamba_block_size or 0, num_slots=a.num_slots, has_finished=int(a.finished is not None),
        accepted_stride=a.num_accepted_tokens.stride(0), length_stride=a.query_lens.stride(0),
        finished_stride=finished.stride(0), Q=a.spec_query_len, BLOCK=triton.next_power_of_2(max_num_reqs + 1),
        num_warps=4, **NO_CONTRACTION,
    )  # fmt: skip
