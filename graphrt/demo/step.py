"""One decode step over static buffers: draft, verify all layers, accept, commit, and the next step's inputs.

`DecodeStep.run` enqueues the whole step and reads nothing on the host, so it can be recorded once and replayed: k
steps are k replays. The window of a row is its known tokens whose state is still to be computed (a prompt, Q at a
time, or the one token that was just chosen), and behind a single such token the drafts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphrt import (
    NULL_BLOCK_ID,
    SCRATCH_ROW,
    KDADeferredCommitContext,
    KDALayer,
    allocate_records,
    kda_conv_verify,
    kda_deferred_verify,
)

from .draft import accept_greedily, propose
from .model import VOCABULARY, Block, ByteModel, ModelConfig


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Every tensor a step reads or writes besides the layers' own. Allocated once, filled in place, never rebound.

    B batch rows, M text columns (the longest finished text and one window), Q tokens in a window, R record rows.
    """

    text: Tensor
    """[B, M] uint8: prompt and generated tokens in columns below `length`, drafts of the step behind them."""
    length: Tensor
    """[B] int64: known tokens."""
    computed: Tensor
    """[B] int64: tokens that are accepted into the state, below `length` for a live row."""
    target: Tensor
    """[B] int64: length at which the row is finished."""
    state_indices: Tensor
    """[B] int32: state slot; NULL_BLOCK_ID makes the row padding."""
    record_rows: Tensor
    """[B] int32: record row; SCRATCH_ROW for padding."""
    query_start_loc: Tensor
    """[B + 1] int32: the windows' places in the padded token matrix [B*Q]."""
    pending: Tensor
    """[R] int32: the ledger's counts, or zeros that stay zero when commits are eager."""
    drafted: Tensor
    """[B, M] uint8: 1 for a token that was an accepted draft."""
    gap: Tensor
    """[B, M] float32: logit of the chosen token above the next best, where the model chose."""
    accepted_drafts: Tensor
    """[Q] int64: how many windows accepted 0, 1, ... Q - 1 drafts (prompt windows do not count)."""
    logits: Tensor
    """[B*Q, 256] float32 of the last step."""

    @classmethod
    def allocate(cls, batch: int, columns: int, spec_query_len: int, pending: Tensor) -> "DecodeBuffers":
        """Zeroed buffers on the device of `pending`; every row starts as padding."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=pending.device)

        return cls(
            text=zeros(batch, columns, dtype=torch.uint8),
            length=zeros(batch, dtype=torch.int64),
            computed=zeros(batch, dtype=torch.int64),
            target=zeros(batch, dtype=torch.int64),
            state_indices=zeros(batch, dtype=torch.int32).fill_(NULL_BLOCK_ID),
            record_rows=zeros(batch, dtype=torch.int32).fill_(SCRATCH_ROW),
            query_start_loc=zeros(batch + 1, dtype=torch.int32),
            pending=pending,
            drafted=zeros(batch, columns, dtype=torch.uint8),
            gap=zeros(batch, columns, dtype=torch.float32),
            accepted_drafts=zeros(spec_query_len, dtype=torch.int64),
            logits=zeros(batch * spec_query_len, VOCABULARY, dtype=torch.float32),
        )


def make_layers(
    model: ByteModel, num_slots: int, max_num_reqs: int, spec_query_len: int, device: torch.device
) -> list[KDALayer]:
    """The model's KDA layers with zeroed states [num_slots, ...] and records of `max_num_reqs` rows, all FP32."""
    return [_make_layer(block, model.config, num_slots, max_num_reqs, spec_query_len, device) for block in model.blocks]


def _make_layer(
    block: Block, c: ModelConfig, num_slots: int, max_num_reqs: int, spec_query_len: int, device: torch.device
) -> KDALayer:
    columns = c.conv_width - 1 + spec_query_len
    conv_state = torch.zeros(num_slots, c.conv_dim, columns, device=device)
    checkpoint = torch.zeros(num_slots, c.num_heads, c.head_dim, c.head_dim, device=device)
    return KDALayer(
        kv_cache=(conv_state, checkpoint),
        recoverssm_records=allocate_records(
            max_num_reqs, c.num_heads, spec_query_len, c.head_dim, torch.float32, device
        ),
        A_log=block.A_log,
        dt_bias=block.dt_bias,
        local_num_heads=c.num_heads,
        head_dim=c.head_dim,
        gate_lower_bound=c.gate_lower_bound,
        conv_weight=block.conv_weight,
    )


@dataclass(frozen=True)
class DecodeStep:
    """The work of one step, the same launches every time."""

    model: ByteModel
    layers: list[KDALayer]
    context: KDADeferredCommitContext
    buffers: DecodeBuffers
    backend: str
    """As asked for, "auto" included; the verify functions choose like the context."""
    drafting: bool
    """False decodes one token a step; prompts still go by windows."""
    deferred: bool
    """False folds the accepted records in the commit, and every verify finds nothing pending."""

    @torch.no_grad()
    def run(self) -> None:
        """Enqueue the step. Padding rows have empty windows and change nothing."""
        b = self.buffers
        live = b.state_indices != NULL_BLOCK_ID
        known = (b.length - b.computed) * live
        window_len = self._window_lengths(known)
        b.query_start_loc[1:].copy_(window_len.cumsum(0))
        b.logits.copy_(self.model(self._packed_tokens(), self._mix))
        accepted, choice = self._accept(known, window_len)
        self._commit(accepted)
        self._extend_texts(live, accepted, choice)
        self._retire(live)

    def _window_lengths(self, known: Tensor) -> Tensor:
        """[B] int64 tokens per window; writes the drafts behind each text."""
        b, window = self.buffers, self.context.spec_query_len
        prompt_part = known.clamp(max=window)
        if not self.drafting or window == 1:
            return prompt_part
        drafts, found = propose(b.text, b.length, window - 1)
        behind = b.length[:, None] + torch.arange(window - 1, device=b.text.device)
        b.text.scatter_(1, behind, drafts)
        # The token chosen after the last draft must not pass the target.
        room = (b.target - b.length - 1).clamp(0, window - 1)
        return torch.where((known == 1) & found, 1 + room, prompt_part)

    def _packed_tokens(self) -> Tensor:
        """[B*Q] int64: the windows one after the other, then zeros."""
        b = self.buffers
        index = torch.arange(b.logits.shape[0], device=b.text.device)
        row = (index >= b.query_start_loc[1:, None]).sum(0)
        owned = row < b.length.shape[0]
        row = row.clamp(max=b.length.shape[0] - 1)
        column = (b.computed[row] + index - b.query_start_loc[row]) * owned
        return b.text[row, column].long() * owned

    def _mix(self, layer: int, block: Block, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor) -> Tensor:
        """The windows [B*Q, ...] through convolution and KDA, from the checkpoints and what is pending."""
        b, c, state = self.buffers, block.config, self.layers[layer]
        heads = (c.num_heads, c.head_dim)
        rows = (b.query_start_loc, b.state_indices, self.context.spec_query_len)
        owned = {"record_rows": b.record_rows, "pending": b.pending, "backend": self.backend}
        conv_state, checkpoint = state.kv_cache
        mixed = kda_conv_verify(qkv, conv_state, block.conv_weight, None, *rows, **owned)
        q, k, v = mixed[None].unflatten(-1, (3, *heads)).unbind(2)
        out = kda_deferred_verify(
            q, k, v, raw_g[None].unflatten(-1, heads), raw_beta[None], block.A_log, block.dt_bias,
            c.gate_lower_bound, checkpoint, state.recoverssm_records, *rows, **owned,
        )  # fmt: skip
        return out[0].flatten(-2)

    def _accept(self, known: Tensor, window_len: Tensor) -> tuple[Tensor, Tensor]:
        """Accepted tokens [B] and the model's choices [B, Q], both int64; notes gaps, drafts and the histogram."""
        b, window = self.buffers, self.context.spec_query_len
        offset = torch.arange(window, device=b.text.device)
        packed = (b.query_start_loc[:-1, None] + offset).clamp(max=b.logits.shape[0] - 1)
        best_two = b.logits.topk(2, dim=-1)
        choice = best_two.indices[:, 0][packed]
        gap = (best_two.values[:, 0] - best_two.values[:, 1])[packed]
        column = b.computed[:, None] + offset
        accepted = accept_greedily(b.text.gather(1, column), choice, known, window_len)
        stands = offset < accepted[:, None]
        is_draft = stands & (offset > 0) & (known[:, None] == 1)
        b.gap.scatter_(1, column + 1, torch.where(stands, gap, b.gap.gather(1, column + 1)))
        b.drafted.scatter_(1, column, b.drafted.gather(1, column) | is_draft)
        b.accepted_drafts.index_add_(0, (accepted - 1).clamp(min=0), (known == 1).long())
        return accepted, choice

    def _commit(self, accepted: Tensor) -> None:
        b = self.buffers
        self.context.commit(
            accepted.to(torch.int32),
            b.state_indices,
            b.query_start_loc,
            record_rows=b.record_rows,
            pending=b.pending if self.deferred else None,
        )

    def _extend_texts(self, live: Tensor, accepted: Tensor, choice: Tensor) -> None:
        """Advance the counts; a row whose known tokens are all computed gets the model's next token."""
        b = self.buffers
        b.computed.add_(accepted)
        chosen = choice.gather(1, (accepted - 1).clamp(min=0)[:, None])
        extends = live & (b.computed >= b.length)
        end = b.computed[:, None]
        b.text.scatter_(1, end, torch.where(extends[:, None], chosen.to(torch.uint8), b.text.gather(1, end)))
        b.length.copy_(torch.where(extends, b.computed + 1, b.length))

    def _retire(self, live: Tensor) -> None:
        """Turn finished rows into padding; the host finds them at its next look."""
        b = self.buffers
        finished = live & (b.length >= b.target)
        b.state_indices.masked_fill_(finished, NULL_BLOCK_ID)
        b.record_rows.masked_fill_(finished, SCRATCH_ROW)
