"""Calls in any order, right or wrong: what checked mode lets through leaves every request in its true state."""

import random

import pytest
import torch
from rig import Pool, Target
from steps import Batch, Row, commit, core_verify

from graphrt import RecordSlots

CPU = Target("torch", "cpu")
SHAPE = {"layers": 2, "heads": 1, "pool": torch.float64, "act": torch.float64}
WINDOW, LAYERS = 4, 2


class Caller:
    """Three requests in slots 1 to 3, and somebody who calls verify, commit, flush and drain as the dice fall."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        self.pool = Pool(CPU, CPU.shape(**SHAPE), check=True)
        self.ledger = RecordSlots(self.pool.shape.rows, "cpu")
        self.pool.pending = self.ledger.pending
        for checkpoint in self.pool.context.checkpoints:
            checkpoint.normal_()
        for conv_state, _ in (layer.kv_cache for layer in self.pool.layers):
            conv_state.zero_()
        self.first = [checkpoint.clone() for checkpoint in self.pool.context.checkpoints]
        self.rows = [self.ledger.admit(name) for name in range(3)]
        # By row: the window that was verified last, and the windows that were accepted, with their counts.
        self.window = {row: None for row in self.rows}
        self.accepted = {row: [] for row in self.rows}

    def batch(self, rows, lengths):
        return Batch(self.pool, [Row(row + 1, row, n) for row, n in zip(rows, lengths, strict=True)])

    def verify(self, rows, deferred=True):
        batch = self.batch(rows, [self.rng.randint(0, WINDOW) for _ in rows])
        for layer in range(LAYERS):
            core_verify(batch, layer, deferred=deferred, check=True)
        self.window |= {row: (batch, b) for b, row in enumerate(rows)}

    def stock(self, rows):
        self.verify(rows, deferred=False)

    def commit(self, rows, kind="deferred"):
        lengths = [self.window[row][0].rows[self.window[row][1]].tokens if self.window[row] else 0 for row in rows]
        counts = [self.rng.randint(0, n) for n in lengths]
        mask = torch.tensor([self.rng.random() < 0.5 for _ in rows])
        commit(
            self.batch(rows, lengths), counts, deferred=kind != "now", **({"eager": mask} if kind == "eager" else {})
        )
        for row, count in zip(rows, counts, strict=True):
            if count:
                self.accepted[row].append((self.window[row], count))

    def eager(self, rows):
        self.commit(rows, "eager")

    def now(self, rows):
        self.commit(rows, "now")

    def flush(self, rows):
        batch = self.batch(rows, [0] * len(rows))
        self.pool.context.flush(batch.state_indices, batch.record_rows, self.pool.pending)

    def drain(self, rows):
        batch = self.batch(rows, [0] * len(rows))
        self.pool.context.drain(batch.state_indices, batch.record_rows, self.pool.pending)

    def read(self, rows):
        self.pool.context.read_state(rows[0] + 1, rows[0], self.pool.pending)

    def copy(self, rows):
        self.pool.context.copy_state(rows[0] + 1, 9, rows[0], self.pool.pending)

    def replace(self, rows):
        """The request ends, and another one starts in its row and slot."""
        row = rows[0]
        self.ledger.release(row)
        assert self.ledger.admit(row) == row
        for checkpoint, first in zip(self.pool.context.checkpoints, self.first, strict=True):
            checkpoint[row + 1] = first[row + 1]
        self.window[row], self.accepted[row] = None, []

    CALLS = (verify, verify, commit, commit, eager, now, flush, stock, drain, read, copy, replace)

    def call(self):
        """One call at random; whether it was let through."""
        rows = self.rng.sample(self.rows, self.rng.randint(1, 3))
        try:
            self.rng.choice(self.CALLS)(self, rows)
        except RuntimeError:
            return False
        return True

    def settle(self):
        """End the step that is under way, by accepting nothing, and drain."""
        for row in self.rows:
            try:
                self.drain([row])
            except RuntimeError:
                commit(self.batch([row], [0]), [0])
                self.drain([row])

    def truth(self):
        """The checkpoints after the accepted tokens, window by window, each committed at once."""
        pool = Pool(CPU, self.pool.shape, params=self.pool.params)
        for checkpoint, first in zip(pool.context.checkpoints, self.first, strict=True):
            checkpoint.copy_(first)
        for windows in self.accepted.values():
            for (batch, b), count in windows:
                twin = batch.on(pool)
                for layer in range(LAYERS):
                    core_verify(twin, layer, deferred=False)
                commit(twin, [count if i == b else 0 for i in range(len(twin.rows))], deferred=False)
        return pool.context.checkpoints


@pytest.mark.parametrize("seed", range(15))
def test_what_checked_mode_lets_through_leaves_the_true_states(seed):
    """Twenty-five calls each; a third or so are refused, and the others amount to the accepted tokens, once."""
    caller = Caller(seed)
    passed = sum(caller.call() for _ in range(25))
    assert 5 < passed < 25
    caller.settle()
    for mine, truth in zip(caller.pool.context.checkpoints, caller.truth(), strict=True):
        torch.testing.assert_close(mine[1:4], truth[1:4], rtol=1e-9, atol=1e-12)
