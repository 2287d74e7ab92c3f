"""Align mode: a checkpoint lives in blocks of `mamba_block_size` tokens; block p ends with state (p + 1) * size."""

import torch
from torch import Tensor

from . import backends, checked
from .checks import check_count, check_entries_apart, check_index, check_is_tensor, check_tensor
from .errors import error_counter
from .launch import launch


def align_eager_mask(
    num_computed_tokens: Tensor,
    query_start_loc: Tensor,
    mamba_block_size: int,
    out: Tensor | None = None,
    request_indices: Tensor | None = None,
) -> Tensor:
    """Rows that a deferred commit must fold now: their window can reach a block boundary, or starts on one.

        c % size + query length >= size,   or   c > 0 and c % size == 0        c = num_computed_tokens[request]

    Args:
        num_computed_tokens: [requests] int32. query_start_loc: [B + 1] int32.
        mamba_block_size: tokens a block.
        out: [B] bool or uint8, else a bool mask is made.
        request_indices: [>= B] int32; row b is request b without it. Out of range gives False.

    Bad values are counted by the commit of the row, not here.

    Returns:
        out.
    """
    check_is_tensor("query_start_loc", query_start_loc)
    device = query_start_loc.device
    check_index("query_start_loc", query_start_loc, 1, device)
    batch = query_start_loc.shape[0] - 1
    mamba_block_size = check_count("mamba_block_size", mamba_block_size, 1)
    requests = batch if request_indices is None else 0
    check_index("num_computed_tokens", num_computed_tokens, requests, device)
    if request_indices is not None:
        check_index("request_indices", request_indices, batch, device)
    if out is None:
        out = torch.empty(batch, dtype=torch.bool, device=device)
    check_tensor("out", out, (batch,), (torch.bool, torch.uint8), device)
    check_entries_apart("out", out)
    if batch:
        mask = out.view(torch.uint8)
        run = backends.by_device(device).align_eager_mask
        launch(
            "graphrt.align_eager_mask",
            run,
            num_computed_tokens,
            query_start_loc,
            mamba_block_size,
            request_indices,
            mask,
        )
    return out


def align_state_indices(
    block_table: Tensor, num_computed_tokens: Tensor, mamba_block_size: int, out: Tensor | None = None
) -> Tensor:
    """The source slot of each request's next step: column `max(c - 1, 0) // size` of its block-table row.

    Args:
        block_table: [requests, width] int32. num_computed_tokens: [requests] int32. mamba_block_size: tokens a block.
        out: [requests] int32, else made. Null where the column is past the table. That is counted, and so is a
            negative number of tokens, which is taken as none.

    Returns:
        out.

    Raises:
        ValueError: naming the argument; with GRAPHRT_CHECK=1 also for what would be counted.
    """
    check_is_tensor("block_table", block_table)
    device = block_table.device
    mamba_block_size = check_count("mamba_block_size", mamba_block_size, 1)
    check_tensor("block_table", block_table, (None, None), (torch.int32,), device)
    requests = block_table.shape[0]
    check_index("num_computed_tokens", num_computed_tokens, requests, device, exactly=True)
    if out is None:
        out = torch.empty(requests, dtype=torch.int32, device=device)
    check_index("out", out, requests, device, exactly=True)
    check_entries_apart("out", out)
    if requests:
        if checked.enabled(None):
            checked.state_columns(num_computed_tokens, mamba_block_size, block_table.shape[1])
        run, errors = backends.by_device(device).align_state_indices, error_counter(device)
        launch("graphrt.align_state_indices", run, block_table, num_computed_tokens, mamba_block_size, out, errors)
    return out
