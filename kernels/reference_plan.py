"""Plans and align mode in plain torch. See `plan.py`.

Nothing here reads a value on the host. Counting of bad values is part of the contract (design section 3.6).
"""

import torch
from torch import Tensor

from ..errors import ErrorKind
from ..steps import Commit, Geometry, Owners, Plan, Rows
from .reference import add_errors, live_rows, pending_of


def plan_commit(plan: Plan, commit: Commit, geometry: Geometry, errors: Tensor) -> None:
    """Write the plan of a commit, and `pending` where it is deferred (design sections 3.3 and 3.5)."""
    c, batch, window = commit, commit.batch, geometry.spec_query_len
    rows = Rows(c.query_start_loc, c.state_indices, c.record_rows, c.pending, window)
    slot, row = live_rows(rows, geometry.num_slots, geometry.num_rows, errors)
    row = torch.where(stale_rows(c.owners, slot, row, errors), -1, row)
    live = (slot > 0) & (row >= 0)
    span = c.query_start_loc[1:].long() - c.query_start_loc[:-1].long()
    length = span.clamp(0, window)
    add_errors(errors, ErrorKind.QUERY_LEN, live & (length != span))

    requests = (
        torch.arange(batch, device=slot.device) if c.request_indices is None else c.request_indices[:batch].long()
    )
    known = (requests >= 0) & (requests < c.num_requests)
    add_errors(errors, ErrorKind.REQUEST, live & ~known)
    requests = torch.where(known, requests, 0)
    accepted = torch.where(known, c.num_accepted_tokens[requests].long(), 0)
    a = torch.minimum(accepted.clamp(min=0), length)
    add_errors(errors, ErrorKind.ACCEPTED, live & (a != accepted))
    if not geometry.conv_keeps_history:
        add_errors(errors, ErrorKind.CONV_ZERO_ACCEPT, live & (length > 0) & (a == 0))

    folds, final = live & (a > 0), slot
    boundary, boundary_len = torch.zeros_like(slot), torch.zeros_like(slot)
    must, negative = torch.zeros_like(live), torch.zeros_like(live)
    if c.block_table is not None and c.num_computed_tokens is not None and c.mamba_block_size is not None:
        computed = torch.where(known, c.num_computed_tokens[requests].long(), 0)
        negative = live & (computed < 0)
        computed = computed.clamp(min=0)
        must = live & known & near_boundary(computed, length, c.mamba_block_size)
    if c.pending is not None:
        eager = torch.zeros_like(live) if c.eager is None else live & (c.eager != 0)
        add_errors(errors, ErrorKind.EAGER_MISSED, must & ~eager)
        folds = folds & (eager | must)
    if c.block_table is not None and c.mamba_block_size is not None:
        size = c.mamba_block_size
        column = (computed + a - 1) // size
        add_errors(errors, ErrorKind.COLUMN, negative | (folds & (column >= c.block_table.shape[1])))
        final = _blocks_of(c.block_table, requests, column, folds, geometry.num_slots, errors)
        add_errors(errors, ErrorKind.EAGER_NULL, folds & (final == 0))
        folds = folds & (final > 0)
        to_boundary = size - computed % size
        reaches = folds & (to_boundary <= a)
        boundary = _blocks_of(c.block_table, requests, computed // size, reaches, geometry.num_slots, errors)
        boundary_len = torch.where(boundary > 0, to_boundary, 0)

    if c.pending is not None:
        _set_pending(c.pending, row, live, torch.where(folds, 0, a))
    plan.commit_lens[:batch] = torch.where(folds, a, 0)
    plan.final_state_indices[:batch] = torch.where(folds, final, 0)
    plan.boundary_state_indices[:batch] = boundary
    plan.boundary_recovery_lens[:batch] = boundary_len


def stale_rows(owners: Owners | None, slot: Tensor, row: Tensor, errors: Tensor) -> Tensor:
    """Mask [B] of live rows that were staged for an earlier owner of their record row."""
    live = (slot > 0) & (row >= 0)
    if owners is None:
        return torch.zeros_like(live)
    staged = owners.staged[: row.shape[0]]
    stale = live & (staged != 0) & (owners.current[row.clamp(min=0)] != staged)
    add_errors(errors, ErrorKind.STALE_GENERATION, stale)
    return stale


def _set_pending(pending: Tensor, row: Tensor, live: Tensor, value: Tensor) -> None:
    """pending[row] = value for live rows. Row by row in one maximum, so that idle rows need no place to write to."""
    hit = live[:, None] & (row[:, None] == torch.arange(pending.shape[0], device=row.device))  # [B, R]
    new = torch.where(hit, value[:, None], -1).amax(0)
    pending.copy_(torch.where(new >= 0, new, pending))


def _blocks_of(table: Tensor, requests: Tensor, column: Tensor, mask: Tensor, num_slots: int, errors: Tensor) -> Tensor:
    """Block-table entries [B] where `mask` holds, null where the column or the block is out of range."""
    width = table.shape[1]
    inside = mask & (column >= 0) & (column < width)
    if width == 0:
        return torch.zeros_like(requests)
    block = torch.where(inside, table[requests, column.clamp(0, width - 1)].long(), 0)
    add_errors(errors, ErrorKind.SLOT, block >= num_slots)
    return torch.where((block > 0) & (block < num_slots), block, 0)


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
    """Write a plan that folds all pending records in place; `zero` (drain) takes them off `pending` too."""
    batch = state_indices.shape[0]
    rows = Rows(state_indices, state_indices, record_rows, pending, geometry.spec_query_len)
    slot, row = live_rows(rows, geometry.num_slots, geometry.num_rows, errors)
    row = torch.where(stale_rows(owners, slot, row, errors), -1, row)
    n = pending_of(rows, torch.where(slot > 0, row, -1), errors)
    if zero:
        _set_pending(pending, row, (slot > 0) & (row >= 0), torch.zeros_like(n))
    plan.commit_lens[:batch] = n
    plan.final_state_indices[:batch] = torch.where(n > 0, slot, 0)
    plan.boundary_state_indices[:batch] = 0
    plan.boundary_recovery_lens[:batch] = 0


def near_boundary(computed: Tensor, length: Tensor, block_size: int) -> Tensor:
    """Whether a window of `length` tokens can reach a block boundary, or starts on one."""
    offset = computed % block_size
    return (offset + length >= block_size) | ((computed > 0) & (offset == 0))


def align_eager_mask(
    num_computed_tokens: Tensor, query_start_loc: Tensor, block_size: int, request_indices: Tensor | None, out: Tensor
) -> None:
    """Write the [B] uint8 mask of rows that must commit eagerly."""
    batch, num_requests = out.shape[0], num_computed_tokens.shape[0]
    length = (query_start_loc[1:].long() - query_start_loc[:-1].long()).clamp(min=0)
    request = torch.arange(batch, device=out.device) if request_indices is None else request_indices[:batch].long()
    known = (request >= 0) & (request < num_requests)
    if num_requests == 0:
        out.zero_()
        return
    computed = num_computed_tokens[torch.where(known, request, 0)].long().clamp(min=0)
    out.copy_(known & near_boundary(computed, length, block_size))


def align_state_indices(
    block_table: Tensor, num_computed_tokens: Tensor, block_size: int, out: Tensor, errors: Tensor
) -> None:
    """Write the block that holds each request's state."""
    past = _state_column(num_computed_tokens, block_size) >= block_table.shape[1]
    add_errors(errors, ErrorKind.COLUMN, past | (num_computed_tokens < 0))
    out.copy_(state_blocks(block_table, num_computed_tokens, block_size))


def state_blocks(block_table: Tensor, num_computed_tokens: Tensor, block_size: int) -> Tensor:
    """The block that holds each request's state, null past the end of the table; nothing is counted."""
    column, width = _state_column(num_computed_tokens, block_size), block_table.shape[1]
    if width == 0:
        return torch.zeros_like(num_computed_tokens)
    block = block_table.gather(1, column.clamp(max=width - 1)[:, None])[:, 0]
    return torch.where(column < width, block, 0)


def _state_column(num_computed_tokens: Tensor, block_size: int) -> Tensor:
    return (num_computed_tokens.long() - 1).clamp(min=0) // block_size
