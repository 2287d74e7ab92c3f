"""The model's part of a decode step on the device: what `graphrt.capture.DecodeStep` calls between staging and commit.

`verify` runs the model over the windows of all rows, `sample` accepts drafts greedily and leaves each row's next
window. Neither reads anything on the host, so a step can be recorded once and replayed: k steps are k replays. The
window of a row is its known tokens whose state is still to be computed (a prompt, Q at a time, or the one token that
was just chosen), and behind a single such token the drafts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from graphrt import FusedConv, KDALayer, allocate_records, kda_deferred_verify
from graphrt.capture import Sampled, StepRows

from .draft import accept_greedily, propose
from .model import Block, ByteModel, ModelConfig

ACTIVATIONS = torch.bfloat16
"""What enters the KDA layers, and their convolutions' weights. Checkpoints and the rest of the model are FP32."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The requests' tokens, and what the decode notes about them. Allocated once, filled in place, never rebound.

    B batch rows, M text columns (the longest finished text and one window), Q tokens in a window.
    """

    text: Tensor
    """[B, M] uint8: prompt and generated tokens in columns below `length`, drafts of the next window behind them."""
    length: Tensor
    """[B] int64: known tokens."""
    target: Tensor
    """[B] int64: length at which the row is finished."""
    drafted: Tensor
    """[B, M] uint8: 1 for a token that was an accepted draft."""
    gap: Tensor
    """[B, M] float32: logit of the chosen token above the next best, where the model chose."""
    accepted_drafts: Tensor
    """[Q] int64: how many windows accepted 0, 1, ... Q - 1 drafts (prompt windows do not count)."""

    @classmethod
    def allocate(cls, batch: int, columns: int, spec_query_len: int, device: torch.device) -> "Texts":
        """Zeroed buffers."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            text=zeros(batch, columns, dtype=torch.uint8),
            length=zeros(batch, dtype=torch.int64),
            target=zeros(batch, dtype=torch.int64),
            drafted=zeros(batch, columns, dtype=torch.uint8),
            gap=zeros(batch, columns, dtype=torch.float32),
            accepted_drafts=zeros(spec_query_len, dtype=torch.int64),
        )

    def admit(self, row: int, prompt: bytes, target: int) -> None:
        """Put a request's prompt into a batch row."""
        for field in (self.text, self.drafted, self.gap):
            field[row].zero_()
        self.text[row, : len(prompt)].copy_(torch.frombuffer(bytearray(prompt), dtype=torch.uint8))
        self.length[row] = len(prompt)
        self.target[row] = target


def make_layers(
    model: ByteModel, num_slots: int, max_num_reqs: int, spec_query_len: int, device: torch.device
) -> list[KDALayer]:
    """The model's KDA layers with zeroed states [num_slots, ...] and records of `max_num_reqs` rows."""
    blocks = cast(Iterable[Block], model.blocks)
    return [_make_layer(block, model.config, num_slots, max_num_reqs, spec_query_len, device) for block in blocks]


def _make_layer(
    block: Block, c: ModelConfig, num_slots: int, max_num_reqs: int, spec_query_len: int, device: torch.device
) -> KDALayer:
    columns = c.conv_width - 1 + spec_query_len
    conv_state = torch.zeros(num_slots, c.conv_dim, columns, dtype=ACTIVATIONS, device=device)
    checkpoint = torch.zeros(num_slots, c.num_heads, c.head_dim, c.head_dim, device=device)
    return KDALayer(
        kv_cache=(conv_state, checkpoint),
        recoverssm_records=allocate_records(max_num_reqs, c.num_heads, spec_query_len, c.head_dim, ACTIVATIONS, device),
        A_log=block.A_log,
        dt_bias=block.dt_bias,
        local_num_heads=c.num_heads,
        head_dim=c.head_dim,
        gate_lower_bound=c.gate_lower_bound,
        # The trained weights are BF16 numbers: nothing is rounded.
        conv_weight=block.conv_weight.to(ACTIVATIONS),
    )


@dataclass(frozen=True)
class SpeculativeModel:
    """The callables of a `DecodeStep`, `verify` and `sample`: the same launches every time.

    Padding rows have no tokens; whatever is worked out for them is written back as it was.
    """

    model: ByteModel
    layers: list[KDALayer]
    texts: Texts
    backend: str
    """As asked for, "auto" included; the verify functions choose like the context."""
    drafting: bool
    """False decodes one token a step; prompts still go by windows."""

    def verify(self, rows: StepRows) -> Tensor:
        """Logits [B*Q, 256] float32 of the windows, one after the other; those behind the last are of no token."""

        def mix(layer: int, block: Block, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor) -> Tensor:
            return self._mix(rows, layer, block, qkv.to(ACTIVATIONS), raw_g.to(ACTIVATIONS), raw_beta.to(ACTIVATIONS))

        logits: Tensor = self.model(self._packed_tokens(rows), mix)
        return logits

    def sample(self, rows: StepRows, logits: Tensor) -> Sampled:
        """Accept drafts, extend the texts by the model's choices, and draft the next windows."""
        t = self.texts
        live = (rows.state_indices > 0) & (rows.record_rows >= 0)
        computed = rows.num_computed_tokens.long()
        known = (t.length - computed) * live
        accepted, choice = self._accept(rows, logits, computed, known)
        computed = computed + accepted
        self._extend_texts(live, computed, accepted, choice)
        window_len = self._next_windows(live, (t.length - computed) * live)
        return Sampled(accepted.to(torch.int32), window_len.to(torch.int32), live & (t.length >= t.target))

    def _packed_tokens(self, rows: StepRows) -> Tensor:
        """[B*Q] int64: the windows one after the other, then zeros."""
        batch = rows.state_indices.shape[0]
        index = torch.arange(batch * rows.spec_query_len, device=self.texts.text.device)
        row = (index >= rows.query_start_loc[1:, None]).sum(0)
        owned = row < batch
        row = row.clamp(max=batch - 1)
        column = (rows.num_computed_tokens[row] + index - rows.query_start_loc[row]).long() * owned
        return self.texts.text[row, column].long() * owned

    def _mix(self, rows: StepRows, layer: int, block: Block, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor) -> Tensor:
        """The windows [B*Q, ...] through convolution and KDA, from the checkpoints and what is pending; float32."""
        c, state = block.config, self.layers[layer]
        heads = (c.num_heads, c.head_dim)
        step = (rows.query_start_loc, rows.state_indices, rows.spec_query_len)
        owned: dict[str, Any] = {"record_rows": rows.record_rows, "pending": rows.pending, "backend": self.backend}
        conv_state, checkpoint = state.kv_cache
        q, k, v = qkv[None].unflatten(-1, (3, *heads)).unbind(2)
        out = kda_deferred_verify(
            q, k, v, raw_g[None].unflatten(-1, heads), raw_beta[None], block.A_log, block.dt_bias,
            c.gate_lower_bound, checkpoint, state.recoverssm_records, *step,
            conv=FusedConv(conv_state, cast(Tensor, state.conv_weight)), **owned,
        )  # fmt: skip
        return out[0].flatten(-2).float()

    def _accept(self, rows: StepRows, logits: Tensor, computed: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Accepted tokens [B] and the model's choices [B, Q], both int64; notes gaps, drafts and the histogram."""
        t, offset = self.texts, torch.arange(rows.spec_query_len, device=logits.device)
        packed = (rows.query_start_loc[:-1, None] + offset).clamp(max=logits.shape[0] - 1)
        best_two = logits.topk(2, dim=-1)
        choice = best_two.indices[:, 0][packed]
        gap = (best_two.values[:, 0] - best_two.values[:, 1])[packed]
        column = computed[:, None] + offset
        window_len = rows.query_start_loc.diff().long()
        accepted = accept_greedily(t.text.gather(1, column), choice, known, window_len)
        stands = offset < accepted[:, None]
        is_draft = stands & (offset > 0) & (known[:, None] == 1)
        t.gap.scatter_(1, column + 1, torch.where(stands, gap, t.gap.gather(1, column + 1)))
        t.drafted.scatter_(1, column, t.drafted.gather(1, column) | is_draft)
        t.accepted_drafts.index_add_(0, (accepted - 1).clamp(min=0), (known == 1).long())
        return accepted, choice

    def _extend_texts(self, live: Tensor, computed: Tensor, accepted: Tensor, choice: Tensor) -> None:
        """A row whose known tokens are all computed gets the model's next token."""
        t = self.texts
        chosen = choice.gather(1, (accepted - 1).clamp(min=0)[:, None])
        extends = live & (computed >= t.length)
        end = computed[:, None]
        t.text.scatter_(1, end, torch.where(extends[:, None], chosen.to(torch.uint8), t.text.gather(1, end)))
        t.length.copy_(torch.where(extends, computed + 1, t.length))

    def _next_windows(self, live: Tensor, known: Tensor) -> Tensor:
        """[B] int64 tokens of the next windows, `known` of them no drafts; writes the drafts behind each text."""
        t, window = self.texts, self.texts.accepted_drafts.shape[0]
        prompt_part = known.clamp(max=window)
        if not self.drafting or window == 1:
            return prompt_part
        drafts, found = propose(t.text, t.length, window - 1)
        behind = t.length[:, None] + torch.arange(window - 1, device=known.device)
        t.text.scatter_(1, behind, torch.where(live[:, None], drafts, t.text.gather(1, behind)))
        # The token chosen after the last draft must not pass the target.
        room = (t.target - t.length - 1).clamp(0, window - 1)
        return torch.where((known == 1) & found, 1 + room, prompt_part)
