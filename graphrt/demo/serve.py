"""The host side of the decode loop: requests in, replays, finished texts out.

The host works only at its looks, every LOOK_EVERY steps: it collects rows that the device has retired, releases
their record rows and admits waiting requests. Between two looks a step is one replay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrt import NULL_BLOCK_ID, KDADeferredCommitContext, RecordSlots
from graphrt.capture import record

from .model import ByteModel
from .step import DecodeBuffers, DecodeStep, make_layers

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
        pending = self.slots.pending if self.mode.deferred else torch.zeros_like(self.slots.pending)
        self.buffers = DecodeBuffers.allocate(batch, columns, spec_query_len, pending)
        work = DecodeStep(
            model, self.layers, self.context, self.buffers, backend, self.mode.drafting, self.mode.deferred
        )
        # Every row is padding still, so the warm-up inside `record` changes nothing.
        self.recording = record(work.run, device=self.device, name="decode") if self.mode.recorded else None
        self._launch: Callable[[], None] = self.recording.replay if self.recording else work.run
        self._waiting = list(reversed(requests))
        self._running: dict[int, Request] = {}
        self.completions: dict[str, Completion] = {}
        self.num_steps = 0

    def look(self) -> bool:
        """Collect what is finished, admit what waits; returns whether anything is left to decode."""
        retired = (self.buffers.state_indices == NULL_BLOCK_ID).tolist()
        for row in [row for row in self._running if retired[row]]:
            self._collect(row)
        for row in range(len(retired)):
            if row not in self._running and self._waiting:
                self._admit(row, self._waiting.pop())
        return bool(self._running)

    def step(self) -> None:
        """One replay (or, unrecorded, the same launches)."""
        self._launch()
        self.num_steps += 1

    def close(self) -> None:
        """Give the recording's memory back."""
        if self.recording:
            self.recording.close()

    def _admit(self, row: int, request: Request) -> None:
        """Stage a request into a batch row: a fresh record row, and the state slot of the same number zeroed."""
        b = self.buffers
        record_row = self.slots.admit(request.name)
        slot = record_row + 1
        for layer in self.layers:
            for state in layer.kv_cache:
                state[slot].zero_()
        prompt = torch.frombuffer(bytearray(request.prompt), dtype=torch.uint8)
        for field in (b.text, b.drafted, b.gap):
            field[row].zero_()
        b.text[row, : len(request.prompt)].copy_(prompt)
        b.computed[row] = 0
        b.length[row] = len(request.prompt)
        b.target[row] = request.target
        b.record_rows[row] = record_row
        b.state_indices[row] = slot
        self._running[row] = request

    def _collect(self, row: int) -> None:
        """Drain the finished request's state, read its text, and release its record row."""
        b, request = self.buffers, self._running.pop(row)
        record_row = self.slots.row(request.name)
        slot = record_row + 1
        indices = torch.tensor([[slot], [record_row]], dtype=torch.int32, device=self.device)
        self.context.drain(indices[0], indices[1], b.pending)
        end, history = request.target, self.layers[0].conv_weight.shape[1] - 1
        states = []
        for layer in self.layers:
            conv_state, checkpoint = layer.kv_cache
            states += [checkpoint[slot].clone(), conv_state[slot, :, :history].clone()]
        self.slots.release(request.name)
        self.completions[request.name] = Completion(
            request=request,
            text=bytes(b.text[row, :end].tolist()),
            drafted=tuple(map(bool, b.drafted[row, :end].tolist())),
            gaps=tuple(b.gap[row, :end].tolist()),
            record_row=record_row,
            states=tuple(states),
        )


def decode(loop: DecodeLoop, after_look: Callable[[DecodeLoop], None] = lambda loop: None) -> None:
    """Decode until every request is finished."""
    while loop.look():
        after_look(loop)
        for _ in range(LOOK_EVERY):
            loop.step()
    after_look(loop)
