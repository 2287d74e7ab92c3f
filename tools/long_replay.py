"""Thousands of replays of random steps against the float64 oracle: does the recorded step ever leave it?

One `DecodeStep` is recorded for two sizes and replayed in chains of one to six steps without host work between them.
The host decides everything at random beforehand: who is in the step and where, who is absent, windows of 0 to Q tokens,
accepted counts, eager rows, rows that finish inside a chain, padding, null slots with tokens and dummy rows that look
live; between chains requests are admitted, drained, released or forgotten, and idle ranks' dummy steps run. What the
recording wrote is kept in a log on the device. About every 100 steps the oracle (`graphrt.testing`'s, batched, on the
same device) does the same steps in float64 and compares: every output token, checkpoints and histories of all that
live, of drained requests and of finished blocks, pending counts, and that memory which belongs to nobody is untouched.

    python tools/long_replay.py [--steps 10000] [--backend fp32_deferred] [--block-size 16] [--flush] [--json PATH]
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import graphrt
from graphrt import KDADeferredCommitContext, RecordSlots
from graphrt.capture import DecodeStep, Sampled, StepInputs, StepRows, bits
from graphrt.testing import poisoned_pool
from graphrt.testing.batches import verify_layers
from graphrt.testing.truths import Tokens, Truths

SETTLE_EVERY = 100  # steps
LONGEST_CHAIN = 6
LOG = SETTLE_EVERY + LONGEST_CHAIN
# Relative norm of a checkpoint after any number of windows (design section 2), and an output's rounding to 16 bits.
STATE_TOLERANCE = 1e-5
BANK = 4096  # different tokens
STRIDE = 101  # a step's first token in the bank moves by so many


@dataclass
class Request:
    """A request that is being decoded: where its state is, and what of it is pending."""

    name: int
    row: int
    table: list[int]
    position: int
    pending: int = 0
    published: list[int] = field(default_factory=list)
    """Columns of blocks that end at a boundary it has passed."""

    def column(self, block_size: int | None) -> int:
        return 0 if block_size is None else max(self.position - 1, 0) // block_size


@dataclass
class Report:
    """What was driven, and the largest deviation from the oracle."""

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
    """Relative norm of a checkpoint."""
    worst_output_error: float = 0.0
    """Beyond rounding, relative to the root mean square of the step's outputs."""
    seconds: float = 0.0


class LongReplay:
    """Random traffic over a recorded step; `run` drives and checks it.

    Args:
        device, backend: where, and which kernels.
        batch: most rows of a step. sizes: what is recorded; half a batch and a whole one by default.
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
        block_size: int | None = None,
        width: int = 6,
        flush: bool = False,
        seed: int = 0,
        **shape: int,
    ) -> None:
        requests, self.width = batch + max(batch // 2, 2), width if block_size else 1
        shape = {"num_layers": 2, "num_heads": 2, "head_dim": 128, "spec_query_len": 8, "conv_dim": 48} | shape
        self.pool = poisoned_pool(
            num_slots=1 + requests * self.width, max_num_reqs=requests, dtype=torch.bfloat16, device=device, seed=seed,
            **shape,
        )  # fmt: skip
        self.batch, self.block_size, self.window = batch, block_size, self.pool.spec_query_len
        self.device = self.pool.device
        self.context = KDADeferredCommitContext.create(
            self.pool.layers, spec_query_len=self.window, max_num_reqs=requests, backend=backend
        )
        self.slots = RecordSlots(requests, self.device)
        self.inputs = StepInputs(batch, self.window, self.device, self.width if block_size else 0, ledger=self.slots)
        self.step = DecodeStep(
            self.context, self.slots.pending, self.inputs, self._verify, self._sample,
            capture_sizes=sizes or [-(-batch // 2), batch], mamba_block_size=block_size, flush=flush, choice="deferred",
        )  # fmt: skip
        self._allocate(seed)
        self.truths, self.rng = Truths(self.pool), random.Random(seed)
        self.live: list[Request] = []
        self.free = list(range(1, 1 + requests * self.width))
        self.names = self.replays = 0
        self.last_tokens: list[int] = []
        """Tokens of live rows in the last step, where its outputs are defined."""
        self.journal: list[Callable[[], None]] = []
        self.boundaries: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.notes: dict[str, list[tuple[str, Tensor]]] = {"state": [], "output": [], "never": []}
        self.report = Report(str(self.device), self.context.backend, block_size)
        graphrt.reset_errors(self.device)
        self.step.capture(progress=False)

    def _allocate(self, seed: int) -> None:
        """Static tensors that the recorded callables read and write."""
        device, tokens = self.device, self.batch * self.window
        draw = torch.Generator(device=device).manual_seed(seed)
        self.generator = draw
        self.bank = Tokens.allocate(self.pool, BANK)
        for part, scale, shift in zip(self.bank.parts(), (1, 1, 1, 1.5, 1, 1), (0, 0, 0, -2, 0, 0), strict=True):
            part.normal_(shift, scale, generator=draw)
        self.number, self.at = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.offset = torch.arange(tokens, device=device)
        # Accepted, next length and finished of each step of a chain.
        self.script = torch.zeros(LONGEST_CHAIN + 1, 3, self.batch, dtype=torch.int32, device=device)
        self.out_log, self.conv_log = (
            torch.zeros(LOG, len(self.pool.layers), tokens, *shape, dtype=torch.bfloat16, device=device)
            for shape in (self.bank.v.shape[2:], self.bank.x.shape[2:])
        )

    # The recorded step.

    def _verify(self, rows: StepRows) -> None:
        count = rows.state_indices.shape[0] * self.window
        index = (self.number * STRIDE + self.offset[:count]) % BANK
        tokens = Tokens(*(part[:, index] for part in self.bank.parts()))
        out, conv = torch.empty_like(tokens.v), torch.empty_like(tokens.x)
        verify_layers(self.pool, tokens, rows, rows.pending, self.context.backend, out, conv)
        for log, values in ((self.out_log, out), (self.conv_log, conv)):
            log.index_fill_(0, self.number % LOG, 0)
            log[:, :, :count].index_copy_(0, self.number % LOG, values[None])

    def _sample(self, rows: StepRows, _: None) -> Sampled:
        count = rows.state_indices.shape[0]
        accepted, lengths, finished = self.script.index_select(0, self.at)[0, :, :count].unbind()
        # Dummy steps turn no page.
        live = ((rows.state_indices > 0) & (rows.record_rows >= 0)).any().long()
        self.number.add_(live)
        self.at.add_(live)
        return Sampled(accepted, lengths, finished != 0)

    # The host's side.

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
        assert self.step.last_miss_reason is None, self.step.last_miss_reason
        for request in list(self.live):
            self._release(request, drained=True)
        self.settle()
        counts = {kind: n for kind, n in graphrt.error_counts(self.device).items() if n}
        assert not counts, f"bad values met on the device: {counts}"
        self.report.seconds = time.perf_counter() - begin
        return self.report

    def close(self) -> None:
        self.step.close()

    def traffic(self) -> None:
        """What happens between two chains: requests come, go and are drained, an idle rank's steps run."""
        rng = self.rng
        for one in [one for one in self.live if rng.random() < 0.05 or not self._room(one)]:
            self._release(one, drained=not self._room(one) or rng.random() < 0.5)
        while len(self.live) < 2 or (self.slots.num_free and rng.random() < 0.5):
            self.admit()
        if rng.random() < 0.1:
            self._drain(rng.sample(self.live, rng.randint(1, len(self.live))))
        if rng.random() < 0.1:
            self.step.replay_dummy(rng.randint(1, self.batch), dcp=rng.random() < 0.5)
            self.report.idle_steps += 1

    def chain(self, live: list[Request] | None = None, count: int | None = None, steps: int | None = None) -> int:
        """A chain of replays; returns how many.

        Args:
            live: who is in it; otherwise some of the living.
            count: rows of the step; those of nobody are padding, dummies and null slots.
            steps: replays at most; fewer if all its rows finish.
        """
        rng = self.rng
        if count is None:
            count = rng.randint(1, self.batch)
        chosen = rng.sample(self.live, min(rng.randint(1, count), len(self.live))) if live is None else live
        absent = [one.row for one in self.live if one not in chosen]
        members = [*chosen, *[None] * (count - len(chosen))]
        rng.shuffle(members)
        slots, rows, lengths = [], [], []
        for one in members:
            slot, row = self._filler(absent) if one is None else (one.table[one.column(self.block_size)], one.row)
            slots.append(slot)
            rows.append(row)
            lengths.append(rng.randint(0, self.window if one is None else self._room(one)))
        eager = [rng.random() < 0.2 for _ in members]
        if self.step.flush_rows is not None:
            self.step.flush_rows.copy_(torch.tensor([rng.randint(0, 1) for _ in range(self.batch)]))
        self.inputs.stage(
            num_reqs=count,
            state_indices=slots,
            record_rows=rows,
            query_start_loc=_offsets(lengths),
            eager=eager,
            num_computed_tokens=[one.position if one else 0 for one in members],
            block_table=[one.table if one else [0] * self.width for one in members] if self.block_size else None,
            generation=[self.slots.generations([one.name])[0] if one else 0 for one in members],
        )
        wanted = rng.randint(1, LONGEST_CHAIN) if steps is None else steps
        replays = self._script(members, slots, lengths, eager, wanted)
        self.step.replay(count, replays)
        self.report.steps += replays
        return replays

    def _filler(self, absent: list[int]) -> tuple[int, int]:
        """Slot and record row of a row that must change nothing: a dummy that looks live, or a null slot."""
        if self.rng.random() < 0.5:
            self.report.dummy_rows += 1
            return self.rng.randint(1, len(self.pool.layers[0].kv_cache[1]) - 1), -1
        return 0, absent.pop() if absent and self.rng.random() < 0.5 else -1

    def _room(self, one: Request) -> int:
        """Most tokens of its next window."""
        left = self.window if self.block_size is None else self.width * self.block_size - one.position
        return min(self.window, left)

    def _script(
        self, members: list[Request | None], slots: list[int], lengths: list[int], eager: list[bool], wanted: int
    ) -> int:
        """Decide a chain, write it where the recording reads it, and note it for the oracle; returns its length."""
        rng, r = self.rng, self.report
        size = min(n for n in self.step.capture_sizes if n >= len(members))
        here, script = [b for b, one in enumerate(members) if one], []
        owned = [b for b, slot in enumerate(slots) if slot > 0]
        while len(script) < wanted and here:
            accepted = [rng.randint(0, n) for n in lengths]
            begins = _offsets(lengths)
            kept = [(b, one) for b in here if (one := members[b])]
            crossings = []
            for b, one in kept:
                now = eager[b] or self._near_boundary(one.position, lengths[b])
                start, one.position = one.position, one.position + accepted[b]
                one.pending = 0 if now else accepted[b]
                r.eager_rows += now
                size_ = self.block_size
                if size_ and start // size_ < one.position // size_:
                    one.published.append(start // size_)
                    crossings.append((one, begins[b], size_ - start % size_))
            self._note_step(kept, begins, lengths, accepted, owned, crossings, size)
            finished = [int(rng.random() < 0.1) for _ in members]
            going = [b for b in here if not finished[b]]
            r.finished_in_chain += len(here) - len(going)
            here = owned = going
            lengths = [
                rng.randint(0, self._room(one)) if (one := members[b]) and b in here else 0 for b in range(len(members))
            ]
            script.append([accepted, lengths, finished])
        values = torch.tensor(script, dtype=torch.int32)
        self.script[: len(script), :, : len(members)].copy_(values)
        self.at.zero_()
        return len(script)

    def _near_boundary(self, position: int, length: int) -> bool:
        size = self.block_size
        return size is not None and (position % size + length >= size or (position > 0 and position % size == 0))

    # Requests.

    def admit(self) -> Request:
        """A prefill puts a new request into a slot."""
        size = self.block_size
        position = 0 if size is None else self.rng.choice([0, 1, size - 1, size, size + 1])
        self.rng.shuffle(self.free)
        table = [self.free.pop() for _ in range(self.width)]
        self.names += 1
        one = Request(self.names, self.slots.admit(self.names), table, position)
        slot = table[one.column(size)]
        for conv_state, checkpoint in (layer.kv_cache for layer in self.pool.layers):
            checkpoint[slot].normal_(0, 0.3, generator=self.generator)
            conv_state[slot, :, : self.pool.hist].normal_(generator=self.generator)
        state, history = self._copy(slot)
        self.live.append(one)
        self.report.admitted += 1

        def admit() -> None:
            self.truths.state[one.row], self.truths.history[one.row] = state.double(), history.double()

        self.journal.append(admit)
        return one

    def _drain(self, requests: list[Request]) -> None:
        size = self.block_size
        slots = torch.tensor([one.table[one.column(size)] for one in requests], dtype=torch.int32, device=self.device)
        rows = torch.tensor([one.row for one in requests], dtype=torch.int32, device=self.device)
        self.context.drain(slots, rows, self.slots.pending)
        for one in requests:
            one.pending = 0
            self._note_states(one)
        self.report.drained += len(requests)

    def _release(self, one: Request, *, drained: bool) -> None:
        """Check what it leaves behind, and make its memory unreadable."""
        if drained:
            self._drain([one])
        self.slots.release(one.name)
        for state in (state for layer in self.pool.layers for state in layer.kv_cache):
            state[one.table] = float("nan")
        self.live.remove(one)
        self.free += one.table
        self.report.released += 1

    def _check_live(self) -> None:
        """Compare all that lives as it would be after a drain, and put everything back as it was."""
        group = bits.named(self.pool.tensors() | {"pending": self.slots.pending})
        got, want = self.slots.pending.clone(), torch.zeros_like(self.slots.pending)
        for one in self.live:
            want[one.row] = one.pending
        self.notes["never"].append((f"pending after step {self.report.steps}", got != want))
        owned = {slot for one in self.live for slot in one.table[: one.column(self.block_size) + 1]}
        others = [slot for slot in range(len(self.pool.layers[0].kv_cache[1])) if slot not in owned]
        for layer in self.pool.layers:
            for state in layer.kv_cache:
                self.notes["never"].append((f"nobody's slots at step {self.report.steps}", ~state[others].isnan()))
        saved, pending, drained = bits.snapshot(group), [one.pending for one in self.live], self.report.drained
        self._drain(self.live)
        for one, count in zip(self.live, pending, strict=True):
            one.pending = count
        self.report.drained = drained
        bits.restore(group, saved)

    # The oracle's side: notes of what happened, worked off at `settle` in the same order.

    def _note_step(
        self, kept: list[tuple[int, Request]], begins: list[int], lengths: list[int], accepted: list[int],
        owned: list[int], crossings: list[tuple[Request, int, int]], size: int,
    ) -> None:  # fmt: skip
        number, count = self.replays, size * self.window
        self.replays += 1
        rows = [one.row for _, one in kept]
        firsts, windows, taken = ([values[b] for b, _ in kept] for values in (begins, lengths, accepted))
        tokens_of = [i for b in owned for i in range(begins[b], begins[b] + lengths[b])]
        self.last_tokens = [i for b, _ in kept for i in range(begins[b], begins[b] + lengths[b])]
        self.report.rows += len(kept)
        self.report.windows += sum(n > 0 for n in windows)
        self.report.tokens += sum(taken)
        ends = [(one.name, one.row, one.table, column, first, n) for one, first, n in crossings
                for column in one.published[-1:]]  # fmt: skip

        def step() -> None:
            index = (number * STRIDE + self.offset[:count]) % BANK
            tokens = Tokens(*(part[:, index] for part in self.bank.parts()))
            if ends:
                self._truths_at_boundaries(ends, tokens)
            out, conv = self.truths.step(rows, firsts, windows, taken, tokens)
            at = torch.tensor(firsts, device=self.device)[:, None] + self.offset[: self.window]
            known = self.offset[: self.window] < torch.tensor(windows, device=self.device)[:, None]
            unowned = torch.ones(count, dtype=torch.bool, device=self.device)
            unowned[torch.tensor(tokens_of, dtype=torch.int64, device=self.device)] = False
            for what, log, want in (("output", self.out_log, out), ("convolution", self.conv_log, conv)):
                got = log[number % LOG, :, :count]
                where = f"{what} of step {number}"
                self.notes["output"].append((where, _beyond_rounding(got[:, at.clamp(max=count - 1)], want, known)))
                self.notes["never"].append(
                    (f"{where} where no token is", ((got != 0).flatten(2).any(2) & unowned).any())
                )

        self.journal.append(step)

    def _truths_at_boundaries(self, ends: list[tuple[int, int, list[int], int, int, int]], tokens: Tokens) -> None:
        """The oracle's states at the block boundaries that a step reaches, kept by request and column."""
        rows = [row for _, row, *_ in ends]
        before = self.truths.state[rows].clone(), self.truths.history[rows].clone()
        counts = [n for *_, n in ends]
        self.truths.step(rows, [first for *_, first, _ in ends], counts, counts, tokens)
        for name, row, _, column, *_ in ends:
            self.boundaries[name, column] = self.truths.state[row].clone(), self.truths.history[row].clone()
        self.truths.state[rows], self.truths.history[rows] = before

    def _note_states(self, one: Request) -> None:
        """Compare its checkpoint and history, which must be folded, and those of every block it has finished."""
        row, name, where = one.row, one.name, f"request {one.name} after step {self.report.steps}"
        current = self._copy(one.table[one.column(self.block_size)])
        blocks = {column: self._copy(one.table[column]) for column in one.published}
        self.report.states_compared += len(self.pool.layers)
        self.report.boundaries_compared += len(blocks) * len(self.pool.layers)

        def compare() -> None:
            self._compare(where, current, (self.truths.state[row], self.truths.history[row]))
            for column, block in blocks.items():
                self._compare(f"block {column} of {where}", block, self.boundaries[name, column])

        self.journal.append(compare)

    def _copy(self, slot: int) -> tuple[Tensor, Tensor]:
        """Checkpoints [L, H, V, K] and histories [L, conv_dim, W - 1] of a slot."""
        caches = [layer.kv_cache for layer in self.pool.layers]
        return torch.stack([c[slot] for _, c in caches]), torch.stack([c[slot, :, : self.pool.hist] for c, _ in caches])

    def _compare(self, where: str, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
        (state, history), (true_state, true_history) = got, want
        error = (state.double() - true_state).flatten(1).norm(dim=1) / true_state.flatten(1).norm(dim=1)
        self.notes["state"].append((f"checkpoint of {where}", error.max()))
        self.notes["never"].append((f"history of {where}", history.double() != true_history))

    def settle(self) -> None:
        """Compare all that lives, let the oracle do what was noted, and read what differs.

        Raises:
            AssertionError: naming what left the oracle, and by how much.
        """
        if self.live:
            self._check_live()
        journal, self.journal = self.journal, []
        for entry in journal:
            entry()
        names = {(one.name, column) for one in self.live for column in one.published}
        self.boundaries = {key: value for key, value in self.boundaries.items() if key in names}
        r = self.report
        r.worst_state_error = max(r.worst_state_error, self._worst("state", STATE_TOLERANCE))
        r.worst_output_error = max(r.worst_output_error, self._worst("output", 1e-4))
        self._worst("never", 0.0)

    def _worst(self, kind: str, allowed: float) -> float:
        notes, self.notes[kind] = self.notes[kind], []
        if not notes:
            return 0.0
        values = torch.stack([v.any().double() if v.dtype == torch.bool else v.double() for _, v in notes]).tolist()
        for (what, _), value in zip(notes, values, strict=True):
            assert value <= allowed, f"{what}: error {value:.3g}, allowed {allowed:.3g}"
        return max(values)


def _beyond_rounding(got: Tensor, want: Tensor, known: Tensor) -> Tensor:
    """How far tokens [L, B, Q, ...] are from the oracle's, beyond half a last bit of their dtype, by their RMS."""
    mask = known.view(1, *known.shape, *[1] * (want.ndim - 3))
    excess = (got.double() - want).abs() - 0.5 * torch.finfo(got.dtype).eps * want.abs()
    square = torch.where(mask, want.square(), 0).sum() / mask.expand_as(want).sum().clamp(min=1)
    return torch.where(mask, excess, 0).max() / square.sqrt().clamp(min=1e-30)


def _offsets(lengths: list[int]) -> list[int]:
    """[B + 1]: where each row's tokens begin."""
    return [sum(lengths[:b]) for b in range(len(lengths) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--block-size", type=int, help="align mode with blocks of so many tokens")
    parser.add_argument("--flush", action="store_true", help="drain a random half of the rows inside the step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    replay = LongReplay(
        args.device, args.backend, batch=args.batch, block_size=args.block_size, flush=args.flush, seed=args.seed
    )
    report = asdict(replay.run(args.steps))
    replay.close()
    print("\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in report.items()))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
