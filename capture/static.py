"""Allocation of the static rows of a step, and their cuts to a batch size."""

import torch
from torch import Tensor

from graphrt.steps import Staged

_LINE = 16  # int32 entries: every buffer starts on a cache line of its own


def allocate_rows(max_num_reqs: int, width: int, device: torch.device) -> tuple[Tensor, Staged]:
    """One int32 block, and the padding rows that are views of it."""
    sizes = {
        "state_indices": max_num_reqs,
        "record_rows": max_num_reqs,
        "query_start_loc": max_num_reqs + 1,
        "num_accepted_tokens": max_num_reqs,
        "eager": -(-max_num_reqs // 4),
        "num_computed_tokens": max_num_reqs,
        "block_table": max_num_reqs * width,
        "generation": max_num_reqs,
    }
    room = [-(-size // _LINE) * _LINE for size in sizes.values()]
    with torch.inference_mode(False):  # static rows outlive the caller's mode
        block = torch.zeros(sum(room), dtype=torch.int32, device=device)
        views = {name: part[:size] for (name, size), part in zip(sizes.items(), torch.split(block, room), strict=True)}
        views["eager"] = views["eager"].view(torch.uint8)[:max_num_reqs]
        views["block_table"] = views["block_table"].view(max_num_reqs, width)
        views["record_rows"].fill_(-1)
    return block, Staged(**views)


def cut_rows(staged: Staged, num_reqs: int) -> Staged:
    """The first rows of each tensor, as views."""
    return Staged(
        state_indices=staged.state_indices[:num_reqs],
        record_rows=staged.record_rows[:num_reqs],
        query_start_loc=staged.query_start_loc[: num_reqs + 1],
        num_accepted_tokens=staged.num_accepted_tokens[:num_reqs],
        eager=staged.eager[:num_reqs],
        num_computed_tokens=staged.num_computed_tokens[:num_reqs],
        block_table=staged.block_table[:num_reqs],
        generation=staged.generation[:num_reqs],
    )
