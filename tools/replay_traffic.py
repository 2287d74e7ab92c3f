"""The traffic of `long_replay.py`: requests that come and go, and chains of replays decided at random beforehand."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from replay_step import LONGEST_CHAIN, SETTLE_EVERY, RecordedStep
from replay_truths import Comparison, Crossing, Request, Step
from torch import Tensor

import graphrt
from graphrt.capture import bits


@dataclass
class Report:
    """What was driven, and the largest deviation from the oracle (`Comparison` has the units)."""

    device: str
    backend: str
    block_size: int | None
    steps: int = 0
    rows: int = 0
    windows: int = 0
    tokens: int = 0
    admitted: int = 0
    released: int = 0
    drained: int = 0
    finished_in_chain: int = 0
    eager_rows: int = 0
    dummy_rows: int = 0
    idle_steps: int = 0
    states_compared: int = 0
    boundaries_compared: int = 0
    worst_state_error: float = 0.0
    worst_output_error: float = 0.0
    seconds: float = 0.0


class LongReplay:
    """Random traffic over a recorded step; `run` drives and checks it.

    Args:
        device, backend: where, and which kernels.
        batch: most rows of a step. sizes: what is recorded; half a batch and a whole one by default.
        lazy: record any other size at its first step, between staging and replay.
        block_size: align mode, with tables of `width` blocks.
        flush: the step drains a random half of its rows before its verify.
        seed: of everything.
        shape: of the pool, as `poisoned_pool` takes it.
    """

    def __init__(
        self,
        device: str,
        backend: str = "auto",
        *,
        batch: int = 16,
        sizes: Sequence[int] | None = None,
        lazy: bool = False,
        block_size: int | None = None,
        width: int = 6,
        flush: bool = False,
        seed: int = 0,
        **shape: int,
    ) -> None:
        requests, self.width = batch + max(batch // 2, 2), width if block_size else 1
        self.recorded = RecordedStep(
            device, backend, requests=requests, batch=batch, sizes=sizes or [-(-batch // 2), batch],
            block_size=block_size, width=self.width, flush=flush, seed=seed, **shape,
        )  # fmt: skip
        self.batch, self.block_size, self.lazy = batch, block_size, lazy
        self.comparison, self.rng = Comparison(self.recorded, block_size), random.Random(seed)
        self.live: list[Request] = []
        self.free = list(range(1, self.recorded.num_slots))
        self.names = self.replays = 0
        self.last_tokens: list[int] = []
        """Tokens of live rows in the last step, where its outputs are defined."""
        self.report = Report(str(self.recorded.device), self.recorded.context.backend, block_size)
        graphrt.reset_errors(self.recorded.device)
        self.recorded.decode.capture(progress=False)

    def run(self, steps: int) -> Report:
        """Replay at least so many steps.

        Raises:
            AssertionError: naming what left the oracle, and by how much.
        """
        begin = time.perf_counter()
        since = 0
        while self.report.steps < steps:
            self.traffic()
            since += self.chain()
            if since >= SETTLE_EVERY or self.report.steps >= steps:
                self.settle()
                since = 0
        missed = self.recorded.decode.last_miss_reason
        assert missed is None, missed
        for request in list(self.live):
            self._release(request, drained=True)
        self.settle()
        counts = {kind: n for kind, n in graphrt.error_counts(self.recorded.device).items() if n}
        assert not counts, f"bad values met on the device: {counts}"
        self.report.seconds = time.perf_counter() - begin
        return self.report

    def close(self) -> None:
        self.recorded.decode.close()

    def settle(self) -> None:
        """Compare all that lives and all that was noted since the last time.

        Raises:
            AssertionError: naming what left the oracle, and by how much.
        """
        if self.live:
            self._check_live()
        self.comparison.settle(self.live)
        r, c = self.report, self.comparison
        r.states_compared, r.boundaries_compared = c.states_compared, c.boundaries_compared
        r.worst_state_error, r.worst_output_error = c.worst_state_error, c.worst_output_error

    def last_outputs(self) -> tuple[Tensor, Tensor]:
        """What the last step wrote for its live rows' tokens: verify's [L, T, H, V], convolution's [L, T, conv_dim]."""
        out, conv = self.recorded.logged(self.replays - 1)
        return out[:, self.last_tokens], conv[:, self.last_tokens]

    # Steps.

    def chain(self, live: list[Request] | None = None, count: int | None = None, steps: int | None = None) -> int:
        """A chain of replays; returns how many.

        Args:
            live: who is in it; otherwise some of the living.
            count: rows of the step; those of nobody are padding, dummies and null slots.
            steps: replays at most; fewer if all its rows finish.
        """
        rng, recorded = self.rng, self.recorded
        if count is None:
            count = rng.randint(1, self.batch)
        chosen = rng.sample(self.live, min(rng.randint(1, count), len(self.live))) if live is None else live
        absent = [one.row for one in self.live if one not in chosen]
        members = [*chosen, *[None] * (count - len(chosen))]
        rng.shuffle(members)
        slots, rows, lengths = [], [], []
        for one in members:
            slot, row = self._filler(absent) if one is None else (one.slot(self.block_size), one.row)
            slots.append(slot)
            rows.append(row)
            lengths.append(rng.randint(0, recorded.window if one is None else self._room(one)))
        eager = [rng.random() < 0.2 for _ in members]
        if recorded.decode.flush_rows is not None:
            recorded.decode.flush_rows.copy_(torch.tensor([rng.randint(0, 1) for _ in range(self.batch)]))
        recorded.inputs.stage(
            num_reqs=count,
            state_indices=slots,
            record_rows=rows,
            query_start_loc=_offsets(lengths),
            eager=eager,
            num_computed_tokens=[one.position if one else 0 for one in members],
            block_table=[one.table if one else [0] * self.width for one in members] if self.block_size else None,
            generation=[recorded.slots.generations([one.name])[0] if one else 0 for one in members],
        )
        if self.lazy:
            recorded.decode.capture(progress=False, sizes=[count], dcp=True)
        wanted = rng.randint(1, LONGEST_CHAIN) if steps is None else steps
        replays = self._decide(members, slots, lengths, eager, wanted)
        recorded.decode.replay(count, replays)
        self.report.steps += replays
        return replays

    def _filler(self, absent: list[int]) -> tuple[int, int]:
        """Slot and record row of a row that must change nothing: a dummy that looks live, or a null slot."""
        if self.rng.random() < 0.5:
            self.report.dummy_rows += 1
            return self.rng.randint(1, self.recorded.num_slots - 1), -1
        return 0, absent.pop() if absent and self.rng.random() < 0.5 else -1

    def _room(self, one: Request) -> int:
        """Most tokens of its next window."""
        window = self.recorded.window
        left = window if self.block_size is None else self.width * self.block_size - one.position
        return min(window, left)

    def _decide(
        self, members: list[Request | None], slots: list[int], lengths: list[int], eager: list[bool], wanted: int
    ) -> int:
        """Decide a chain, write it where the recording reads it, and note it for the oracle; returns its length."""
        rng = self.rng
        size = self.recorded.padded(len(members))
        here, script = [b for b, one in enumerate(members) if one], []
        owned = [b for b, slot in enumerate(slots) if slot > 0]
        while len(script) < wanted and here:
            accepted = [rng.randint(0, n) for n in lengths]
            self._note_step([(b, one) for b in here if (one := members[b])], lengths, accepted, eager, owned, size)
            finished = [int(rng.random() < 0.1) for _ in members]
            going = [b for b in here if not finished[b]]
            self.report.finished_in_chain += len(here) - len(going)
            here = owned = going
            lengths = [
                rng.randint(0, self._room(one)) if (one := members[b]) and b in here else 0 for b in range(len(members))
            ]
            script.append([accepted, lengths, finished])
        self.recorded.write_script(script)
        return len(script)

    def _note_step(
        self, live: list[tuple[int, Request]], lengths: list[int], accepted: list[int], eager: list[bool],
        owned: list[int], size: int,
    ) -> None:  # fmt: skip
        """Advance the requests by one step, and note it for the oracle."""
        begins, crossings = _offsets(lengths), []
        for b, one in live:
            now = eager[b] or self._near_boundary(one.position, lengths[b])
            start, one.position = one.position, one.position + accepted[b]
            one.pending = 0 if now else accepted[b]
            self.report.eager_rows += now
            blocks = self.block_size
            if blocks and start // blocks < one.position // blocks:
                one.published.append(start // blocks)
                crossings.append(Crossing(one.name, one.row, start // blocks, begins[b], blocks - start % blocks))
        firsts, windows, taken = ([values[b] for b, _ in live] for values in (begins, lengths, accepted))
        tokens = [i for b in owned for i in range(begins[b], begins[b] + lengths[b])]
        rows = [one.row for _, one in live]
        count = size * self.recorded.window
        step = Step(self.replays, count, rows, firsts, windows, taken, tokens, crossings)
        self.comparison.stepped(step)
        self.replays += 1
        self.last_tokens = step.tokens
        self.report.rows += len(live)
        self.report.windows += sum(n > 0 for n in windows)
        self.report.tokens += sum(taken)

    def _near_boundary(self, position: int, length: int) -> bool:
        size = self.block_size
        return size is not None and (position % size + length >= size or (position > 0 and position % size == 0))

    # Requests.

    def traffic(self) -> None:
        """What happens between two chains: requests come, go and are drained, an idle rank's steps run."""
        rng = self.rng
        for one in [one for one in self.live if rng.random() < 0.05 or not self._room(one)]:
            self._release(one, drained=not self._room(one) or rng.random() < 0.5)
        while len(self.live) < 2 or (self.recorded.slots.num_free and rng.random() < 0.5):
            self.admit()
        if rng.random() < 0.1:
            self._drain(rng.sample(self.live, rng.randint(1, len(self.live))))
        if rng.random() < 0.1:
            count = min(rng.randint(1, self.batch), max(self.recorded.decode.capture_sizes))
            self.recorded.decode.replay_dummy(count, dcp=rng.random() < 0.5)
            self.report.idle_steps += 1

    def admit(self) -> Request:
        """A prefill puts a new request into a slot."""
        size = self.block_size
        position = 0
        if size is not None:
            position = self.rng.choice([n for n in (0, 1, size - 1, size, size + 1) if n <= self.width * size])
        self.rng.shuffle(self.free)
        table = [self.free.pop() for _ in range(self.width)]
        self.names += 1
        one = Request(self.names, self.recorded.slots.admit(self.names), table, position)
        self.comparison.admitted(one.row, *self.recorded.prefill(one.slot(size)))
        self.live.append(one)
        self.report.admitted += 1
        return one

    def _drain(self, requests: list[Request]) -> None:
        self._fold(requests)
        for one in requests:
            one.pending = 0
        self.report.drained += len(requests)

    def _fold(self, requests: list[Request]) -> None:
        """Drain their slots, and have the states there compared."""
        slots, rows = (
            torch.tensor(values, dtype=torch.int32, device=self.recorded.device)
            for values in ([one.slot(self.block_size) for one in requests], [one.row for one in requests])
        )
        self.recorded.context.drain(slots, rows, self.recorded.slots.pending)
        for one in requests:
            self.comparison.folded(one, f"after step {self.report.steps}")

    def _release(self, one: Request, *, drained: bool) -> None:
        """Check what it leaves behind, and make its memory unreadable."""
        if drained:
            self._drain([one])
        self.recorded.slots.release(one.name)
        self.recorded.poison(one.table)
        self.live.remove(one)
        self.free += one.table
        self.report.released += 1

    def _check_live(self) -> None:
        """Compare all that lives as it would be after a drain, and put everything back as it was."""
        pool, pending, when = self.recorded.pool, self.recorded.slots.pending, f"step {self.report.steps}"
        want = torch.zeros_like(pending)
        for one in self.live:
            want[one.row] = one.pending
        self.comparison.never(f"pending after {when}", pending != want)
        owned = {slot for one in self.live for slot in one.table[: one.column(self.block_size) + 1]}
        others = [slot for slot in range(self.recorded.num_slots) if slot not in owned]
        for layer in pool.layers:
            for state in layer.kv_cache:
                self.comparison.never(f"nobody's slots at {when}", ~state[others].isnan())
        group = bits.named(pool.tensors() | {"pending": pending})
        saved = bits.snapshot(group)
        self._fold(self.live)
        bits.restore(group, saved)


def _offsets(lengths: list[int]) -> list[int]:
    """[B + 1]: where each row's tokens begin."""
    return [sum(lengths[:b]) for b in range(len(lengths) + 1)]
