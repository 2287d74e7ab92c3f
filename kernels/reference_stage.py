"""The two ends of a recorded step in plain torch: staging, and the advance to the next step. See `stage.py`.

Nothing here reads a value on the host. Counting of bad values is part of the contract (design section 3.6).
"""

import torch
from torch import Tensor

from ..errors import ErrorKind
from ..steps import Advance, Staged, StageSources, StepBegin
from .reference import add_errors
from .reference_plan import near_boundary, state_blocks


def stage(
    staged: Staged, sources: StageSources, begin: StepBegin | None, errors: Tensor, current: Tensor | None = None
) -> None:
    """Copy a step's metadata into the static buffers and pad the rows behind it.

    Args:
        current: [record rows] int32 generations now; without it none is compared.
    """
    s, rows = sources, staged.state_indices.shape[0]
    o_b = torch.arange(rows, device=staged.state_indices.device)
    slot = _padded(s.state_indices, s.num_reqs, o_b, 0)
    row = _padded(s.record_rows, s.num_reqs, o_b, -1)
    generation = _padded(s.generation, s.num_reqs, o_b, 0)
    if current is not None:
        inside = (row >= 0) & (row < current.shape[0])
        stale = (generation != 0) & inside & (current[torch.where(inside, row, 0)] != generation)
        add_errors(errors, ErrorKind.STALE_GENERATION, stale)
        slot, row = torch.where(stale, 0, slot), torch.where(stale, -1, row)
    owned = (o_b < s.num_reqs) & ((slot > 0) | (row >= 0))
    request = o_b if s.request_indices is None else _padded(s.request_indices, s.num_reqs, o_b, 0).long()
    known = owned & (request >= 0) & (request < s.num_requests)
    add_errors(errors, ErrorKind.REQUEST, owned & ~known)
    request = torch.where(known, request, 0)

    offsets = torch.zeros(rows + 1, dtype=torch.int32, device=o_b.device)
    if s.query_start_loc is not None:
        offsets = s.query_start_loc[torch.arange(rows + 1, device=o_b.device).clamp(max=s.num_reqs)]
    computed = _gathered(s.num_computed_tokens, request, known)
    eager = torch.where(owned, _padded(s.eager, s.num_reqs, o_b, 0), 0)
    if begin is not None and begin.eager:
        eager = torch.where(owned, 1, eager)
    if begin is not None and begin.mamba_block_size is not None:
        length = offsets[1:].long() - offsets[:-1].long()
        near = near_boundary(computed.long().clamp(min=0), length.clamp(min=0), begin.mamba_block_size)
        eager = torch.where(owned & near, 1, eager)

    staged.state_indices.copy_(slot)
    staged.record_rows.copy_(row)
    staged.generation.copy_(generation)
    staged.query_start_loc.copy_(offsets)
    staged.num_accepted_tokens.copy_(_gathered(s.num_accepted_tokens, request, known))
    staged.num_computed_tokens.copy_(computed)
    staged.eager.copy_(eager)
    _stage_blocks(staged.block_table, s.block_table, request, known)
    if begin is not None:
        _move_pending(begin, slot, row)


def _stage_blocks(target: Tensor, source: Tensor | None, request: Tensor, known: Tensor) -> None:
    width = 0 if source is None or not source.shape[0] else min(target.shape[1], source.shape[1])
    if source is not None and width:
        target[:, :width].copy_(torch.where(known[:, None], source[request, :width], 0))
    target[:, width:].zero_()


def _move_pending(begin: StepBegin, slot: Tensor, row: Tensor) -> None:
    """replay[row] = pending[row] and pending[row] = 0 for live rows, without a place for idle rows to write to."""
    num_rows = begin.pending.shape[0]
    live = (slot > 0) & (slot < begin.num_slots) & (row >= 0)
    moved = (live[:, None] & (row[:, None] == torch.arange(num_rows, device=row.device))).any(0)  # [R]
    begin.replay.copy_(torch.where(moved, begin.pending, begin.replay))
    begin.pending.masked_fill_(moved, 0)


def _padded(source: Tensor | None, num_reqs: int, o_b: Tensor, fill: int) -> Tensor:
    """[rows] int32: the first `num_reqs` entries of `source`, then `fill`."""
    padded = torch.full_like(o_b, fill, dtype=torch.int32)
    if source is not None:
        padded[:num_reqs] = source[:num_reqs]
    return padded


def _gathered(source: Tensor | None, request: Tensor, known: Tensor) -> Tensor:
    """[rows] int32: the value of each row's request, 0 where there is none."""
    if source is None or not source.shape[0]:
        return torch.zeros_like(request, dtype=torch.int32)
    return torch.where(known, source[request], 0)


def advance(a: Advance, errors: Tensor) -> None:
    """Write the rows of the next step."""
    rows, batch = a.rows, a.rows.state_indices.shape[0]
    live = (rows.state_indices > 0) & (rows.record_rows >= 0)
    span = rows.query_start_loc[1:].long() - rows.query_start_loc[:-1].long()
    accepted = torch.minimum(a.num_accepted_tokens.long().clamp(min=0), span.clamp(0, a.spec_query_len))
    computed = rows.num_computed_tokens.long() + accepted
    keep = live if a.finished is None else live & (a.finished == 0)

    slot = rows.state_indices
    if a.mamba_block_size is not None:
        slot = state_blocks(rows.block_table, computed, a.mamba_block_size)
        missing = keep & ((slot <= 0) | (slot >= a.num_slots))
        add_errors(errors, ErrorKind.COLUMN, missing)
        keep = keep & ~missing
    length = a.query_lens.long().clamp(0, a.spec_query_len)
    add_errors(errors, ErrorKind.QUERY_LEN, keep & (length != a.query_lens))

    n = a.next_rows
    for target, value, fill in (
        (n.state_indices, slot, 0),
        (n.record_rows, rows.record_rows, -1),
        (n.num_computed_tokens, computed, 0),
        (n.eager, n.eager[:batch].clone(), 0),
    ):
        target[:batch].copy_(torch.where(keep, value, fill))
        target[batch:].fill_(fill)
    n.num_accepted_tokens.zero_()
    ends = torch.where(keep, length, 0).cumsum(0)
    n.query_start_loc[0].zero_()
    n.query_start_loc[1 : batch + 1].copy_(ends)
    n.query_start_loc[batch + 1 :].copy_(ends[-1:].expand(n.query_start_loc.shape[0] - batch - 1))
