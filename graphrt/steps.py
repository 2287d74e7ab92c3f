"""What a step hands to the kernels: plain records of tensors, checked before they are made.

Letters as everywhere: B rows of a step, T tokens, R record rows, Q the window (`spec_query_len`).
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a verify: which tokens, which checkpoint, which records."""

    query_start_loc: Tensor
    """[B + 1] int32: row b owns tokens `query_start_loc[b] .. query_start_loc[b + 1]`."""
    state_indices: Tensor
    """[B] int32: state slot, null at or below 0."""
    record_rows: Tensor | None
    """[>= B] int32: record row, -1 for none; without it row b has record row b."""
    pending: Tensor | None
    """[R] int32: records to replay first; without it, none."""
    spec_query_len: int

    @property
    def batch(self) -> int:
        return self.state_indices.shape[0]


@dataclass(frozen=True, slots=True)
class Owners:
    """Whom the rows of a step were staged for. A late row, whose record row has a new owner, changes nothing.

    staged   [>= B] int32: the generation each row was staged with; 0 is not compared
    current  [R] int32: the generation of each record row now (`RecordSlots.generation`)
    """

    staged: Tensor
    current: Tensor


@dataclass(frozen=True, slots=True)
class Convolution:
    """The short convolution that a verify runs on its raw q, k and v; conv_dim is q, then k, then v, head by head."""

    state: Tensor
    """[slots, conv_dim, C] view of either storage order."""
    weight: Tensor
    """[conv_dim, W]"""
    bias: Tensor | None
    """[conv_dim]"""
    keeps_history: bool
    """C = W - 1 + Q; else one column less."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The arguments of one commit, as the public method takes them."""

    num_accepted_tokens: Tensor
    state_indices: Tensor
    query_start_loc: Tensor
    request_indices: Tensor | None
    block_table: Tensor | None
    num_computed_tokens: Tensor | None
    mamba_block_size: int | None
    record_rows: Tensor | None
    pending: Tensor | None
    eager: Tensor | None
    owners: Owners | None = None

    @property
    def batch(self) -> int:
        return self.state_indices.shape[0]

    @property
    def align(self) -> bool:
        return self.block_table is not None

    @property
    def num_requests(self) -> int:
        """How many requests every request-indexed tensor covers."""
        tensors = (self.num_accepted_tokens, self.num_computed_tokens, self.block_table)
        return min(t.shape[0] for t in tensors if t is not None)


@dataclass(frozen=True, slots=True)
class Plan:
    """Static output of the plan kernels, input of the folds: one entry per batch row, [R] int32 each."""

    commit_lens: Tensor
    """Records to fold now; 0 folds nothing."""
    final_state_indices: Tensor
    """Slot that receives the folded state; may be the source."""
    boundary_state_indices: Tensor
    """Align mode: slot that receives the state at the block boundary, 0 for none."""
    boundary_recovery_lens: Tensor
    """Align mode: records up to that boundary, 0 for none."""

    @classmethod
    def allocate(cls, max_num_reqs: int, device: torch.device) -> "Plan":
        """Four zeroed [max_num_reqs] int32 vectors in one allocation."""
        with torch.inference_mode(False):  # the plan outlives the caller's mode
            return cls(*torch.zeros(4, max_num_reqs, dtype=torch.int32, device=device).unbind())


@dataclass(frozen=True, slots=True)
class Geometry:
    """The bounds a plan clamps to."""

    num_slots: int
    num_rows: int
    spec_query_len: int
    conv_keeps_history: bool
    """Whether a verify keeps the committed convolution history, so that a step may accept nothing."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The static buffers of a step, one row per batch row; what a recording reads."""

    state_indices: Tensor
    """[R] int32, 0 in padding rows."""
    record_rows: Tensor
    """[R] int32, -1 in padding rows."""
    query_start_loc: Tensor
    """[R + 1] int32, constant from the last live row on: padding rows have no tokens."""
    num_accepted_tokens: Tensor
    """[R] int32, gathered by request: row b is its own request here."""
    eager: Tensor
    """[R] uint8"""
    num_computed_tokens: Tensor
    """[R] int32, gathered by request."""
    block_table: Tensor
    """[R, width] int32, gathered by request, null past the source's width."""
    generation: Tensor
    """[R] int32: the generation of its record row that each row was staged for, 0 in padding rows."""


@dataclass(frozen=True, slots=True)
class StageSources:
    """Where one staging copies from: a step's metadata in the caller's tensors, None for what keeps its padding value.

    A row whose slot is null and whose record row is negative is padding, wherever it stands: nothing is gathered for
    it, so that no index derived from it leads anywhere. So is a row whose generation is not the current one of its
    record row (0 is not compared).
    """

    num_reqs: int
    state_indices: Tensor | None = None
    """[>= num_reqs] int32, as `record_rows` and `request_indices`."""
    record_rows: Tensor | None = None
    query_start_loc: Tensor | None = None
    """[>= num_reqs + 1] int32"""
    num_accepted_tokens: Tensor | None = None
    """[requests] int32, as `num_computed_tokens`."""
    eager: Tensor | None = None
    """[>= num_reqs] uint8"""
    request_indices: Tensor | None = None
    num_computed_tokens: Tensor | None = None
    block_table: Tensor | None = None
    """[requests, any width] int32"""
    generation: Tensor | None = None
    """[>= num_reqs] int32"""

    @property
    def num_requests(self) -> int:
        """How many requests every request-indexed source covers; all of the rows' own where there is none."""
        tensors = (self.num_accepted_tokens, self.num_computed_tokens, self.block_table)
        return min((t.shape[0] for t in tensors if t is not None), default=2**31 - 1)


SOURCES = tuple(field.name for field in fields(StageSources))[1:]
"""What a staging copies, in the order of a staging header."""
HEADER_WORDS = 4 + 3 * len(SOURCES)
"""int64: num_reqs, num_requests, columns, column stride; then address, stride and number of entries of each source."""


@dataclass(frozen=True, slots=True)
class StepBegin:
    """What the staging launch of a recorded step does besides copying (design section 4, `DecodeStep`)."""

    pending: Tensor
    """[R] int32: zeroed for every live row of the step; a step whose commit never comes has accepted nothing."""
    replay: Tensor
    """[R] int32: receives these counts; the verifies of the step read them as their `pending`."""
    num_slots: int
    """A slot past the pool is null: its row keeps what it has pending."""
    mamba_block_size: int | None
    """Align mode: rows whose window can reach a boundary, or starts on one, become eager."""
    eager: bool
    """Every live row becomes eager: at this size an eager commit is the faster (`graphrt.choice`)."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The end of a recorded step: from its rows and what was sampled to the rows of the next step."""

    rows: Staged
    """The step that ran, [B] rows."""
    next_rows: Staged
    """[max_num_reqs] rows of the next step; rows from B on become padding, the block table is left as it is."""
    num_accepted_tokens: Tensor
    """[B] int32, clamped to the row's query length."""
    query_lens: Tensor
    """[B] int32: tokens of the row's next window, clamped to 0..Q."""
    finished: Tensor | None
    """[B] uint8: rows to retire."""
    spec_query_len: int
    num_slots: int
    mamba_block_size: int | None
    """Align mode: the next slot is the block that holds the state; a row without such a block is retired."""
