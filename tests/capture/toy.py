"""A toy language model on the engine: greedy decoding with random drafts, as the callables of a DecodeStep.

Token t of layer l enters as a fixed random vector; the logits are a fixed random map of all layers' outputs. With four
tokens in the vocabulary a good part of the random drafts is accepted.
"""

import torch
import torch.nn.functional as F
from engine import CONV_DIM, DIM, HEADS, WINDOW, Engine, int32

from graphrt import kda_conv_verify, kda_recoverssm_verify
from graphrt.capture import DecodeStep, Sampled, StepInputs

VOCABULARY = 4
COLUMNS = 40


class Toy:
    """Up to `batch` requests decoded together; `text` and the counts are by batch row."""

    def __init__(
        self, device, batch=3, block_size=None, width=0, sizes=None, stock=False, flush=False, choice=None, **engine
    ):
        self.engine = Engine(device, rows=5, **engine)
        self.stock, self.block_size = stock, block_size
        draw = torch.Generator().manual_seed(3)
        inputs = torch.randn(2, VOCABULARY, CONV_DIM + HEADS * DIM + HEADS, generator=draw)
        self.embedding, self.head = (
            inputs.to(device),
            torch.randn(2 * HEADS * DIM, VOCABULARY, generator=draw).to(device),
        )
        self.guesses = torch.randint(0, VOCABULARY, (batch, COLUMNS + WINDOW), generator=draw).to(device)
        self.text = torch.zeros(batch, COLUMNS + WINDOW, dtype=torch.int64, device=device)
        self.length, self.target = torch.zeros(2, batch, dtype=torch.int64, device=device)
        self.offset = torch.arange(WINDOW, device=device)
        self.inputs = StepInputs(batch, WINDOW, device, block_table_width=width)
        self.step = DecodeStep(
            self.engine.context, self.engine.pending, self.inputs, self.verify, self.sample, capture_sizes=sizes,
            mamba_block_size=block_size, flush=flush, choice=choice,
        )  # fmt: skip

    def verify(self, rows):
        """Logits [B*Q, VOCABULARY] and layer outputs [L, B*Q, H, V] of the packed windows."""
        batch = rows.state_indices.shape[0]
        index = torch.arange(batch * WINDOW, device=self.text.device)
        owner = (index >= rows.query_start_loc[1:, None]).sum(0)
        live, owner = owner < batch, owner.clamp(max=batch - 1)
        column = rows.num_computed_tokens[owner] + index - rows.query_start_loc[owner]
        tokens = torch.where(live, self.text[owner, column * live], 0)
        x = self.embedding[:, tokens]
        out = self.stock_verify(rows, x) if self.stock else self.engine.verify(rows, x, rows.pending)
        return out.transpose(0, 1).flatten(1) @ self.head, out

    def stock_verify(self, rows, x):
        """As `Engine.verify`, but nothing is replayed: the step has flushed."""
        step = (rows.query_start_loc, rows.state_indices, WINDOW)
        owned = {"record_rows": rows.record_rows, "backend": self.engine.backend}
        outputs = []
        for layer, inputs in zip(self.engine.layers, x, strict=True):
            qkv, gate, beta = inputs.split((CONV_DIM, HEADS * DIM, HEADS), dim=-1)
            mixed = kda_conv_verify(qkv.contiguous(), layer.kv_cache[0], layer.conv_weight, None, *step, **owned)
            q, k, v = mixed[None].unflatten(-1, (3, HEADS, DIM)).unbind(2)
            out = kda_recoverssm_verify(
                q, k, v, gate[None].unflatten(-1, (HEADS, DIM)), beta[None].contiguous(), layer.A_log, layer.dt_bias,
                layer.gate_lower_bound, layer.kv_cache[1], layer.recoverssm_records, *step, **owned,
            )  # fmt: skip
            outputs.append(out[0])
        return torch.stack(outputs)

    def sample(self, rows, verified):
        """Greedy acceptance; extends the texts and puts guesses behind them."""
        batch = rows.state_indices.shape[0]
        text, length, target = self.text[:batch], self.length[:batch], self.target[:batch]
        live = (rows.state_indices > 0) & (rows.record_rows >= 0)
        computed, window_len = rows.num_computed_tokens.long(), rows.query_start_loc.diff()
        packed = (rows.query_start_loc[:-1, None] + self.offset).clamp(max=batch * WINDOW - 1)
        choice = verified[0].argmax(-1)[packed]
        window = text.gather(1, (computed[:, None] + self.offset).clamp(max=text.shape[1] - 1))
        stands = (self.offset < (length - computed)[:, None]) | (window == F.pad(choice[:, :-1], (1, 0), value=-1))
        accepted = (stands & (self.offset < window_len[:, None])).long().cumprod(-1).sum(-1)
        computed = computed + accepted

        extends = live & (accepted > 0) & (computed >= length)
        chosen = choice.gather(1, (accepted - 1).clamp(min=0)[:, None])
        at = computed.clamp(max=text.shape[1] - 1)[:, None]
        text.scatter_(1, at, torch.where(extends[:, None], chosen, text.gather(1, at)))
        length.copy_(torch.where(extends, computed + 1, length))
        behind = (length[:, None] + self.offset[:-1]).clamp(max=text.shape[1] - 1)
        drafts = torch.where(live[:, None], self.guesses[:batch].gather(1, behind), text.gather(1, behind))
        text.scatter_(1, behind, drafts)

        known = length - computed
        room = (target - length - 1).clamp(0, WINDOW - 1)
        lengths = torch.where(known == 1, 1 + room, known.clamp(max=WINDOW)) * live
        return Sampled(accepted.to(torch.int32), lengths.to(torch.int32), live & (length >= target))

    def admit(self, batch_row, prompt, new_tokens):
        """Put a request's text into a batch row; `stage` makes it live."""
        self.text[batch_row].zero_()
        self.text[batch_row, : len(prompt)] = torch.tensor(prompt, device=self.text.device)
        self.length[batch_row], self.target[batch_row] = len(prompt), len(prompt) + new_tokens

    def stage(self, fresh):
        """Stage `fresh` {batch row: (record row, slot, prompt length)} next to the rows that still run."""
        i = self.inputs
        rows, slots, computed = (t.tolist() for t in (i.record_rows, i.state_indices, i.num_computed_tokens))
        lengths, table = i.query_start_loc.diff().tolist(), i.block_table.clone()
        for b, (row, slot, known) in fresh.items():
            rows[b], slots[b], computed[b], lengths[b] = row, slot, 0, min(known, WINDOW)
            if self.block_size:
                table[b] = torch.arange(table.shape[1], device=table.device) + slot
        offsets = [sum(lengths[:b]) for b in range(len(rows) + 1)]
        i.stage(
            num_reqs=len(rows), state_indices=slots, record_rows=rows, query_start_loc=offsets,
            num_computed_tokens=computed, block_table=table,
        )  # fmt: skip

    def everything(self):
        """Copies of all that a step may change."""
        own = {"text": self.text, "length": self.length, "target": self.target}
        staged = {name: getattr(self.inputs, name) for name in self.inputs.rows(1).__slots__}
        return self.engine.state() | {name: t.clone() for name, t in (own | staged).items()}

    def decode_one_by_one(self, slot, prompt, new_tokens):
        """The same text token by token, eagerly, in slot `slot`: what any decode must give. Changes that slot."""
        engine, device, text = self.engine, self.engine.device, list(prompt)

        class Rows:
            state_indices, record_rows = int32([slot], device), int32([0], device)
            query_start_loc = int32([0, 1], device)

        one, target = int32([1], device), len(prompt) + new_tokens
        for position in range(target - 1):
            x = self.embedding[:, text[position : position + 1]]
            out = engine.verify(Rows, x)
            engine.context.commit(one, Rows.state_indices, Rows.query_start_loc, record_rows=Rows.record_rows)
            if position + 1 == len(text):
                text.append(int((out.transpose(0, 1).flatten(1) @ self.head).argmax()))
        return text
