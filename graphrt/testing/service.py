"""A small serving loop over a poisoned pool, beside the float64 truth of every request.

What happens next is chosen by the caller's `pick(low, high)`: hypothesis draws it, or a random generator does. Steps
run in every way there is, over the same static tensors and mixed at will:

    replay    `DecodeStep`, one to three steps in a row without host work between them
    commit    deferred verify, then `CommitRunner.commit`
    flush     `CommitRunner.flush`, stock verify, then `CommitRunner.commit`
    now       `drain`, stock verify, then a commit without `pending`, on tensors of the step's own

Among the live rows stand padding, dummies, null slots and hostile values (`members.FAULTS`). Outputs, states,
histories and pending counts are compared with the truth; memory that belongs to nobody is NaN, and stays so.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import graphrt
from graphrt.capture import CommitRunner, DecodeStep, Sampled, StepInputs, StepRows

from ..context import KDADeferredCommitContext
from ..slots import RecordSlots
from ..steps import Staged
from .batches import verify_layers
from .comparisons import Comparisons
from .members import FAULTS, Bounds, Counts, Member, Parked, Pick, Request, draw_members, inject, zero_tokens
from .pools import Pool
from .truths import NAN, Tokens, Truths

DRIVERS = ("replay", "commit", "flush", "now")

# A recorded step gets its counts from its own sampling, to which no request index leads. Without `pending` a
# convolution verify does not know how many record rows there are.
DEAF = {("request", "replay"), ("row", "flush"), ("row", "now")}


class Service:
    """Requests that come, pause, move and leave. Every method that is called for an action checks what it can.

    Args:
        pool: from `poisoned_pool`; its pending counts are replaced by those of a ledger.
        backend: of the context and the verifies.
        max_rows: most rows of a step.
        sizes: batch sizes recorded at the start; others are added in mid-service.
        seed: of the activations.
    """

    def __init__(
        self, pool: Pool, *, backend: str = "auto", max_rows: int = 4, sizes: Sequence[int] = (1,), seed: int = 0
    ) -> None:
        self.pool, self.max_rows, self.window = pool, max_rows, pool.spec_query_len
        rows, device = pool.pending.shape[0], pool.device
        self.context = KDADeferredCommitContext.create(
            pool.layers, spec_query_len=self.window, max_num_reqs=rows, backend=backend
        )
        self.slots = RecordSlots(rows, device)
        self.inputs = StepInputs(max_rows, self.window, device, ledger=self.slots)
        self.tokens = Tokens.allocate(pool, max_rows * self.window)
        self.out, self.conv = torch.empty_like(self.tokens.v), torch.empty_like(self.tokens.x)
        # Accepted count, next length and whether it is finished, of each row: what the recorded sampling reads.
        self.sampled = torch.zeros(3, max_rows, dtype=torch.int32, device=device)
        self.finished = torch.zeros(max_rows, dtype=torch.uint8, device=device)
        parts = (self.context, self.slots.pending, self.inputs)
        self.step_graph = DecodeStep(*parts, self._verify_rows, self._sample, capture_sizes=sizes)
        self.runner = CommitRunner(*parts, sizes, eager=True)
        self.truths = Truths(pool)
        self.random = torch.Generator(device=device).manual_seed(seed)
        self.live: list[Request] = []
        self.parked: list[Parked] = []
        num_slots = pool.layers[0].kv_cache[1].shape[0]
        self.bounds = Bounds(self.window, max_rows, num_slots, rows)
        self.free = list(range(1, num_slots))
        self.names, self.counts, self.comparisons, self.sizes = 0, Counts(), Comparisons(), set[int]()
        graphrt.reset_errors(device)
        self.capture(sizes)

    # Requests.

    def admit(self, pick: Pick) -> bool:
        """A prefill puts a new request into a free slot; False where there is no room."""
        if not self._has_room():
            return False
        self.names += 1
        request = self._place(self.names, self.slots.admit, pick)
        self.pool.fill(request.slot, request.name)
        for layer, (conv_state, checkpoint) in enumerate(layer.kv_cache for layer in self.pool.layers):
            self.truths.state[request.row, layer] = checkpoint[request.slot]
            self.truths.history[request.row, layer] = conv_state[request.slot, :, : self.pool.hist]
        self.counts.note("admit")
        return True

    def finish(self, request: Request) -> None:
        """Drain, compare, and let the request go."""
        self.drain([request])
        self.abort(request, "finish")

    def abort(self, request: Request, event: str = "abort") -> None:
        """Let a request go as it is; nobody may read its slot from now on."""
        if event != "preempt":
            self.slots.release(request.name)
        for conv_state, checkpoint in (layer.kv_cache for layer in self.pool.layers):
            conv_state[request.slot] = checkpoint[request.slot] = NAN
        self.live.remove(request)
        self.free.append(request.slot)
        self.counts.note(event)

    def preempt(self, request: Request) -> None:
        """Take a request's whole state away; `resume` brings it back in another slot and row."""
        state = self.context.read_state(request.slot, request.row, self.slots.pending)
        request.pending = 0
        self._check_state(request)
        truth = self.truths.state[request.row].clone(), self.truths.history[request.row].clone()
        self.parked.append(Parked(request.name, state, truth))
        self.slots.preempt(request.name)
        self.abort(request, "preempt")

    def resume(self, pick: Pick) -> bool:
        """Bring a preempted request back; False if there is none, or no room."""
        if not self.parked or not self._has_room():
            return False
        parked = self.parked.pop(pick(0, len(self.parked) - 1))
        request = self._place(parked.name, self.slots.resume, pick)
        self.context.write_state(request.slot, parked.state, request.row, self.slots.pending)
        self.truths.state[request.row], self.truths.history[request.row] = parked.truth
        self.counts.note("resume")
        return True

    def fork(self, request: Request, pick: Pick) -> bool:
        """A second request goes on from the state of one; False where there is no room."""
        if not self._has_room():
            return False
        self.names += 1
        copy = self._place(self.names, self.slots.admit, pick)
        self.context.copy_state(request.slot, copy.slot, request.row, self.slots.pending, copy.row)
        request.pending = 0
        for truth in (self.truths.state, self.truths.history):
            truth[copy.row] = truth[request.row]
        self.counts.note("fork")
        return True

    def save_and_load(self, path: Path) -> None:
        """Write everything to a file, lose it, and read it back; what is pending stays pending."""
        graphrt.save_state(path, self.context, self.slots)
        for layer in self.pool.layers:
            for part in (*layer.kv_cache, layer.recoverssm_records.correction, layer.recoverssm_records.key_gate):
                part.fill_(NAN)
        self.slots.reset()
        graphrt.load_state(path, self.context, self.slots)
        for request in self.live:
            (request.generation,) = self.slots.generations([request.name])
        self.counts.note("save and load")

    def drain(self, requests: Sequence[Request]) -> None:
        """Fold what these requests have pending; their states can then be compared."""
        self.context.drain(
            self._int32([r.slot for r in requests]), self._int32([r.row for r in requests]), self.slots.pending
        )
        for request in requests:
            request.pending = 0
            self._check_state(request)
        self.counts.note("drain")

    def finish_all(self, pick: Pick) -> None:
        """Every request, the preempted ones too, goes on to its end; nobody is left."""
        while self.live or self.parked:
            for request in list(self.live):
                self.finish(request)
            self.resume(pick)

    def _has_room(self) -> bool:
        return bool(self.free and self.slots.num_free)

    def _place(self, name: int, take: Callable[[int], int], pick: Pick) -> Request:
        row, slot = take(name), self.free.pop(pick(0, len(self.free) - 1))
        request = Request(name, row, slot, self.slots.generations([name])[0])
        self.live.append(request)
        return request

    # Recordings.

    def capture(self, sizes: Sequence[int], *, dcp: bool = False) -> None:
        """Record these sizes; no byte of the state may change, whatever is live and pending."""
        self.step_graph.capture(progress=False, sizes=sizes, dcp=dcp)
        self.runner.capture(progress=False, sizes=sizes, dcp=dcp)
        self.counts.captures += len(set(sizes) - self.sizes)
        self.sizes |= set(sizes)
        self.counts.note("capture")

    def idle(self, pick: Pick) -> None:
        """A step of an idle rank, on padding or on the dummies of decode context parallelism."""
        self._draw(0)
        self.step_graph.replay_dummy(pick(1, self.max_rows), dcp=bool(pick(0, 1)))
        self.counts.note("idle")

    def close(self) -> None:
        """Give the recordings' memory back."""
        self.step_graph.close()
        self.runner.close()

    # Anything.

    def act(self, pick: Pick) -> None:
        """One action of any kind; two of three are steps, one step in four gets bad values."""
        kind = pick(0, 29)
        if not self.live or kind < 3:
            self.admit(pick)
            return
        request = self.live[pick(0, len(self.live) - 1)]
        if kind == 3:
            self.drain(self.live[: pick(1, len(self.live))])
        elif kind == 4:
            (self.finish, self.abort, self.preempt)[pick(0, 2)](request)
        elif kind == 5:
            self.resume(pick)
        elif kind == 6:
            self.fork(request, pick)
        elif kind == 7:
            self.idle(pick)
        elif kind == 8:
            self.capture([pick(1, self.max_rows)], dcp=bool(pick(0, 1)))
        elif kind == 9 and pick(0, 3) == 3:
            with TemporaryDirectory() as folder:
                self.save_and_load(Path(folder) / "state.safetensors")
        else:
            self.step(pick, faults=[FAULTS[pick(0, len(FAULTS) - 1)]] if pick(0, 3) == 3 else [])

    # Steps.

    def step(self, pick: Pick, *, faults: Sequence[str] = (), driver: str | None = None) -> str | None:
        """One step, or several replays in a row, of some live requests; returns how it ran, None with nobody live.

        Args:
            faults: bad values to put into it, of `FAULTS`, as far as they find a place.
            driver: of `DRIVERS`; drawn where it is not given.
        """
        if not self.live:
            return None
        driver = DRIVERS[pick(0, len(DRIVERS) - 1)] if driver is None else driver
        members = draw_members(pick, self.live, self.bounds)
        wanted = [fault for fault in faults if (fault, driver) not in DEAF]
        done = [fault for fault in wanted if inject(fault, members, self.live, pick, self.bounds)]
        self.counts.inject(done)
        repeats = pick(1, 3) if driver == "replay" and not done else 1
        if repeats > 1:
            for member in members:
                member.accepted = member.given = min(member.accepted, member.next_length)
                member.spoilt = False
        self._stage(members, repeats)
        self._run(driver, len(members), repeats)
        self._compare(members, repeats, driver)
        self.counts.steps += repeats
        self.counts.rows += repeats * len(members)
        self.counts.note(driver)
        return driver

    def _stage(self, members: Sequence[Member], repeats: int) -> None:
        lengths = [m.length for m in members]
        offsets = [sum(lengths[:b]) for b in range(len(members) + 1)]
        self._draw(max(offsets[-1], sum(m.next_length for m in members) if repeats > 1 else 0))
        for begin, m in zip(offsets, members, strict=False):
            if m.spoilt:
                for part in self.tokens.parts():
                    part[:, begin + m.accepted : begin + min(m.length, self.window)] = NAN
        count = len(members)
        # Row b is request count - 1 - b, so that a mix-up of rows and requests shows.
        requests = [count + 5 if m.stray else count - 1 - b for b, m in enumerate(members)]
        self.inputs.stage(
            num_reqs=count,
            state_indices=[m.slot for m in members],
            record_rows=[m.row for m in members],
            query_start_loc=offsets,
            num_accepted_tokens=[m.given for m in reversed(members)],
            eager=[m.eager for m in members],
            request_indices=requests,
            generation=[m.generation for m in members],
        )
        empty = [(0, 0, 0)] * (self.max_rows - count)
        values = [(m.given, m.next_length, int(m.finished)) for m in members]
        self.sampled.copy_(torch.tensor(values + empty, dtype=torch.int32, device="cpu").T)
        self.finished.copy_(self.sampled[2])

    def _draw(self, count: int) -> None:
        """Random activations of that many tokens; those behind are NaN."""
        for part in self.tokens.parts():
            part[:, :count].normal_(generator=self.random)
            part[:, count:] = NAN
        self.out.fill_(NAN)
        self.conv.fill_(NAN)

    def _run(self, driver: str, count: int, repeats: int) -> None:
        rows, pending = self.inputs.rows(count), self.slots.pending
        if driver == "replay":
            self.step_graph.replay(count, repeats)
            self.counts.replays += repeats
            return
        if driver == "now":
            self.context.drain(rows.state_indices, rows.record_rows, pending)
            self._verify(rows, None)
            self.context.commit(
                rows.num_accepted_tokens, rows.state_indices, rows.query_start_loc, record_rows=rows.record_rows
            )
            return
        if driver == "flush":
            self.runner.flush(count)
        self._verify(rows, None if driver == "flush" else pending)
        self.runner.commit(count)
        self.counts.replays += 2 if driver == "flush" else 1

    def _verify_rows(self, rows: StepRows) -> None:
        self._verify(rows, rows.pending)

    def _verify(self, rows: StepRows | Staged, pending: Tensor | None) -> None:
        verify_layers(self.pool, self.tokens, rows, pending, self.context.backend, self.out, self.conv)

    def _sample(self, rows: StepRows, outputs: None) -> Sampled:
        count = rows.state_indices.shape[0]
        return Sampled(self.sampled[0, :count], self.sampled[1, :count], self.finished[:count])

    # Comparisons.

    def _compare(self, members: Sequence[Member], repeats: int, driver: str) -> None:
        """Advance the truths by a step, and compare outputs and pending counts."""
        here: list[int] = []
        for repeat in range(repeats):
            lengths = [m.length if repeat == 0 else m.later_length for m in members]
            begins = [sum(lengths[:b]) for b in range(len(members))]
            here = [b for b, m in enumerate(members) if m.request and not (repeat and m.finished)]
            windows = [min(lengths[b], self.window) for b in here]
            accepted = [members[b].accepted for b in here]
            rows, starts = [members[b].row for b in here], [begins[b] for b in here]
            if here:
                out, conv = self.truths.step(rows, starts, windows, accepted, self.tokens)
        for m in members:
            if m.request is not None:
                m.request.pending = 0 if m.eager or driver == "now" else m.accepted
                self.counts.tokens += m.accepted
        count = len(members)
        size = min((n for n in self.sizes if n >= count), default=count) if driver == "replay" else count
        where = f"step {self.counts.steps + repeats} ({driver})"
        known = [0 if members[b].spoilt else n for b, n in zip(here, windows, strict=True)]
        if here:
            self.comparisons.near_rows(f"{where}: outputs", self.out, out, starts, known)
            self.comparisons.near_rows(f"{where}: convolutions", self.conv, conv, starts, known)
        self._zeros(members, lengths, begins, size * self.window, where)
        self._check_pending(where)

    def _zeros(self, members: Sequence[Member], lengths: list[int], begins: list[int], end: int, where: str) -> None:
        """Tokens of no live row are zero, up to the end of what the step writes; behind it nothing is written."""
        zero = zero_tokens(members, lengths, begins, end, self.window)
        mask = torch.tensor(zero, device=self.pool.device)
        for name, part in (("outputs", self.out), ("convolutions", self.conv)):
            written = torch.where(mask.view(1, -1, *[1] * (part.ndim - 2)), part[:, :end], 0).ne(0)
            self.comparisons.never(f"{where}: {name} of tokens of no row", written)
            self.comparisons.never(f"{where}: {name} behind the batch", part[:, end:].isnan().logical_not())

    def _check_pending(self, where: str) -> None:
        """Owned rows hold their count, whether they were in the step or not; free rows hold zero."""
        expected = [0] * self.pool.pending.shape[0]
        for request in self.live:
            expected[request.row] = request.pending
        self.comparisons.never(f"{where}: pending", self.slots.pending != self._int32(expected))

    def _check_state(self, request: Request) -> None:
        """A request with nothing pending: its checkpoints are the truth's, its history byte for byte."""
        where = f"request {request.name} after {self.counts.steps} steps"
        for i, (conv_state, checkpoint) in enumerate(layer.kv_cache for layer in self.pool.layers):
            state, history = self.truths.state[request.row, i], self.truths.history[request.row, i]
            self.comparisons.near(f"{where}: checkpoint of layer {i}", checkpoint[request.slot], state, range(3))
            kept = conv_state[request.slot, :, : self.pool.hist].double()
            self.comparisons.never(f"{where}: history of layer {i}", kept != history)

    def check(self) -> None:
        """All that holds at any time: nobody's memory is NaN, states that are folded are the truth's.

        Raises:
            AssertionError: what differs; also a kind of bad value that was counted and not injected, or the reverse.
        """
        for request in self.live:
            if request.pending == 0:
                self._check_state(request)
        self._check_pending(f"after {self.counts.steps} steps")
        for conv_state, checkpoint in (layer.kv_cache for layer in self.pool.layers):
            for name, part in (("convolution state", conv_state), ("checkpoint", checkpoint)):
                written = part[[0, *self.free]].isnan().logical_not()
                self.comparisons.never(f"{name} of a slot that belongs to nobody", written)
        self.comparisons.settle()
        counted = {kind for kind, n in graphrt.error_counts(self.pool.device).items() if n}
        if counted != set(self.counts.faults):
            raise AssertionError(f"bad values counted: {sorted(counted)}, injected: {sorted(self.counts.faults)}")

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.pool.device)
