"""A whole decode step as one recording: k steps are k replays, with no host work between them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphrt import backends
from graphrt.capture.inputs import StepInputs, dummy_inputs
from graphrt.capture.runner import check_parts
from graphrt.capture.sizes import GraphMemory, SizedRecordings, check_sizes
from graphrt.checks import check_index, check_tensor, fail
from graphrt.context import KDARecoverSSMCommitContext
from graphrt.errors import error_counter
from graphrt.launch import launch
from graphrt.steps import Advance, Staged, StageSources, StepBegin


@dataclass(frozen=True, slots=True)
class StepRows:
    """What the callables of a step receive: static tensors, the same objects in every replay. B rows, R record rows.

    A padding row has slot 0, record row -1 and no tokens; whatever a callable derives from its row must not reach
    anybody's memory.
    """

    state_indices: Tensor
    """[B] int32: state slot."""
    record_rows: Tensor
    """[B] int32: record row, -1 in padding rows."""
    query_start_loc: Tensor
    """[B + 1] int32: row b owns tokens `query_start_loc[b] .. [b + 1]`, 0 to Q of them."""
    pending: Tensor
    """[R] int32: what the verifies of this step replay first; pass it as their `pending`."""
    num_computed_tokens: Tensor
    """[B] int32: tokens in the state before this step, as staged and advanced by each step."""
    eager: Tensor
    """[B] uint8: rows that this step commits at once."""
    block_table: Tensor
    """[B, width] int32: state blocks of each row."""
    spec_query_len: int
    """Q"""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampling of a step decides. [B] each."""

    num_accepted_tokens: Tensor
    """int32: tokens of the row's window that stand."""
    query_lens: Tensor
    """int32: tokens of the row's next window, 0..Q; the callable has put the tokens themselves where verify reads."""
    finished: Tensor | None = None
    """bool or uint8: rows that are done. They are padding from the next step on; their accepted tokens are committed."""


Verify = Callable[[StepRows], Any]
"""Drafts, if they are made here, then the model with its verifies of all layers. Returns what `Sample` needs."""
Sample = Callable[[StepRows, Any], Sampled]
"""Chooses tokens, accepts drafts, stages the next windows' tokens."""


class DecodeStep:
    """One decode step on the device: from staged rows to the staged rows of the next step.

    The launches of a step, in order:

    1. stage: `inputs` are copied to the step's own rows, and `pending` of every live row moves into `rows.pending`
       and becomes zero. A step whose commit never comes has thereby accepted nothing. In align mode rows near a block
       boundary become eager.
    2. with `flush`: rows whose entry in `flush_rows` is set are drained from `rows.pending` into their checkpoints.
       This is the flush for verifies that replay nothing. Which rows it reaches is a value on the device, so one
       recording serves steps that flush and steps that replay.
    3. `verify(rows)` of the user.
    4. `sample(rows, what verify returned)` of the user.
    5. commit, with the real `pending`.
    6. advance: `inputs` become the next step. Finished rows turn into padding; `num_computed_tokens` grows by what
       was accepted; in align mode the slot is the block that now holds the state (as `align_state_indices`), and a row
       without such a block is retired and counted.

    Everything the callables touch must be static or made by them inside the step, and they must leave what belongs
    to no live row alone: warm-up runs them on padding rows. The host joins in by `inputs.stage(...)` between two
    replays; reading `inputs` tells it which rows are still there.

    Args:
        context, pending, inputs, capture_sizes, mamba_block_size: as for `CommitRunner`; one size, all rows, by
            default.
        verify, sample: the user's part of the step.
        flush: whether the step has part 2.
    """

    def __init__(
        self,
        context: KDARecoverSSMCommitContext,
        pending: Tensor,
        inputs: StepInputs,
        verify: Verify,
        sample: Sample,
        *,
        capture_sizes: Iterable[int] | None = None,
        mamba_block_size: int | None = None,
        flush: bool = False,
    ) -> None:
        check_parts(context, pending, inputs, mamba_block_size)
        self.context, self.pending, self.inputs = context, pending, inputs
        self.verify, self.sample = verify, sample
        self.mamba_block_size = mamba_block_size
        most, device = inputs.max_num_reqs, inputs.device
        self.capture_sizes = check_sizes([most] if capture_sizes is None else capture_sizes, most)
        self.replayed = torch.zeros_like(pending, memory_format=torch.contiguous_format)
        """[R] int32: pending counts of the rows of the step that runs, `StepRows.pending`."""
        self.flush_rows = torch.ones(most, dtype=torch.int32, device=device) if flush else None
        """[max_num_reqs] int32, 1 where the step drains a row before its verify; write into it at any time."""
        self._drained = torch.zeros(most, dtype=torch.int32, device=device)
        self._step = StepInputs(most, inputs.spec_query_len, device, inputs.block_table_width)
        self._recordings = SizedRecordings({"step": self._run}, most, device)
        self.outputs: tuple[Any, Sampled] | None = None
        """What `verify` and `sample` returned in the step that ran last: static tensors of its recording."""
