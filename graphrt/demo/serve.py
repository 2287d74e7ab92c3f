"""The host side of the decode loop: requests in, replays, finished texts out.

The host works only at its looks, every LOOK_EVERY steps: it collects rows that the device has retired, releases
their record rows and admits waiting requests. Between two looks a step is one replay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from graphrt import SCRATCH_ROW, KDADeferredCommitContext, RecordSlots
from graphrt.capture import DecodeStep, StepInputs

from .model import ByteModel
from .step import SpeculativeModel, Texts, make_layers

LOOK_EVERY = 8


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens to add to it."""

    name: str
    prompt: bytes
    new_tokens: int

    @property
    def target(self) -> int:
        return len(self.prompt) + self.new_tokens


@dataclass(frozen=True)
class Completion:
    """A finished request: its whole text, and what the decode noted about it."""

    request: Request
    text: bytes
    drafted: tuple[bool, ...]
    """For each byte of the text: was it an accepted draft?"""
    gaps: tuple[float, ...]
    """For each byte of the text the model chose: how far its logit was above the next best."""
    record_row: int
    states: tuple[Tensor, ...]
    """Checkpoint and convolution history of each layer, after a drain."""

    @property
    def generated(self) -> bytes:
        return self.text[len(self.request.prompt) :]


@dataclass(frozen=True)
class Mode:
    """How a loop decodes; every mode must give the same text."""

    drafting: bool = True
    deferred: bool = True
    """False commits every row at once, and every verify finds nothing pending."""
    recorded: bool = True
    """False launches each step's work anew from Python."""


class DecodeLoop:
    """Decodes requests on `batch` rows, one window of up to `spec_query_len` tokens a row and step.

    Raises ValueError for a prompt without a token or a request without a new one.
    """

    def __init__(
        self,
        model: ByteModel,
        requests: Sequence[Request],
        *,
        batch: int,
        spec_query_len: int,
        backend: str = "auto",
        mode: Mode | None = None,
    ) -> None:
        for request in requests:
            if not request.prompt or request.new_tokens < 1:
                raise ValueError(
                    f"requests: expected a prompt and at least one new token, got {len(request.prompt)} bytes "
                    f"and {request.new_tokens} for {request.name!r}"
                )
        self.mode = mode or Mode()
        self.device = model.embedding.weight.device
        self.slots = RecordSlots(batch, self.device)
        self.layers = make_layers(model, batch + 1, batch, spec_query_len, self.device)
        self.context = KDADeferredCommitContext.create(
            self.layers, spec_query_len=spec_query_len, max_num_reqs=batch, backend=backend
        )
        columns = max(r.target for r in requests) + spec_query_len
        self.texts = Texts.allocate(batch, columns, spec_query_len, self.device)
        work = SpeculativeModel(model, self.layers, self.texts, backend, self.mode.drafting)
        self.inputs = StepInputs(batch, spec_query_len, self.device, ledger=self.slots)
        self.step = DecodeStep(
            self.context,
            self.slots.pending,
            self.inputs,
            work.verify,
            work.sample,
            choice="deferred" if self.mode.deferred else "eager",
        )
        if self.mode.recorded:
            self.step.capture(progress=False)
        self._waiting = list(reversed(requests))
        self._running: dict[int, Request] = {}
        self.completions: dict[str, Completion] = {}
        self.num_steps = 0

    def look(self) -> bool:
        """Collect what is finished, admit what waits; returns whether anything is left to decode."""
        record_rows = self.inputs.record_rows.tolist()
        for row in [row for row in self._running if record_rows[row] == SCRATCH_ROW]:
            self._collect(row)
        free = [row for row in range(len(record_rows)) if row not in self._running]
        fresh = [(row, self._waiting.pop()) for row in free[: len(self._waiting)]]
        if fresh:
            self._admit(fresh)
        return bool(self._running)

    def run(self, steps: int = 1) -> None:
        """As many replays (or, unrecorded, the same launches), and no work of the host between them."""
        batch = self.inputs.max_num_reqs
        if self.mode.recorded:
            self.step.replay(batch, steps)
        else:
            for _ in range(steps):
                self.step.run(batch)
        self.num_steps += steps

    @property
    def logits(self) -> Tensor:
        """[B*Q, 256] float32 of the step that ran last; the next replay overwrites them."""
        if self.step.outputs is None:
            raise RuntimeError("logits: expected a step before, none has run")
        logits: Tensor = self.step.outputs[0]
        return logits

    def close(self) -> None:
        """Give the recording's memory back."""
        self.step.close()

    def _admit(self, fresh: list[tuple[int, Request]]) -> None:
        """Stage requests into batch rows, next to those that run on: each a fresh record row, and a slot zeroed."""
        i = self.inputs
        record_rows, slots, computed = (t.tolist() for t in (i.record_rows, i.state_indices, i.num_computed_tokens))
        lengths = i.query_start_loc.diff().tolist()
        for row, request in fresh:
            self._running[row] = request
            self.texts.admit(row, request.prompt, request.target)
            record_rows[row] = self.slots.admit(request.name)
            slots[row] = _slot_of(record_rows[row])
            computed[row], lengths[row] = 0, min(len(request.prompt), i.spec_query_len)
            for layer in self.layers:
                for state in layer.kv_cache:
                    state[slots[row]].zero_()
        i.stage(
            num_reqs=i.max_num_reqs,
            state_indices=slots,
            record_rows=record_rows,
            query_start_loc=[0, *accumulate(lengths)],
            num_computed_tokens=computed,
            generation=[self._generation(row) for row in range(i.max_num_reqs)],
        )

    def _generation(self, row: int) -> int:
        """Of its record row; 0 for a batch row that nobody is in."""
        request = self._running.get(row)
        return self.slots.generations([request.name])[0] if request else 0

    def _collect(self, row: int) -> None:
        """Drain the finished request's state, read its text, and release its record row."""
        t, request = self.texts, self._running.pop(row)
        record_row = self.slots.row(request.name)
        slot = _slot_of(record_row)
        indices = torch.tensor([[slot], [record_row]], dtype=torch.int32, device=self.device)
        self.context.drain(indices[0], indices[1], self.slots.pending)
        end, history = request.target, self.context.conv_history_len
        states = []
        for layer in self.layers:
            conv_state, checkpoint = layer.kv_cache
            states += [checkpoint[slot].clone(), conv_state[slot, :, :history].clone()]
        self.slots.release(request.name)
        self.completions[request.name] = Completion(
            request=request,
            text=bytes(t.text[row, :end].tolist()),
            drafted=tuple(map(bool, t.drafted[row, :end].tolist())),
            gaps=tuple(t.gap[row, :end].tolist()),
            record_row=record_row,
            states=tuple(states),
        )


def _slot_of(record_row: int) -> int:
    """The demo gives each record row a state slot of its own; slot 0 is null."""
    return record_row + 1


def decode(loop: DecodeLoop, after_look: Callable[[DecodeLoop], None] = lambda loop: None) -> None:
    """Decode until every request is finished."""
    while loop.look():
        after_look(loop)
        loop.run(LOOK_EVERY)
    after_look(loop)
