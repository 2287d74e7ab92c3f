"""Random multi-step traces: requests come, skip steps, accept prefixes and leave, while the oracle watches.

What happens is drawn from the seed alone; how the runtime is driven is the `policy`, so that one seed run
under two policies must give the same bytes:

    deferred    deferred verify, deferred commit; rows of the random or align mask folded at once
    stock       flush, stock verify, deferred commit
    eager       drain, stock verify, commit without pending
    all_eager   deferred verify, commit with every row in `eager`
    mixed       one of these, drawn anew for each step

With a `block_size` each request has a row of block ids (align mode): its state moves from block to block, and
every block that ends on a boundary must keep the state of exactly that boundary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import steps
import torch
from rig import NAN, Pool
from steps import Batch, Row, Verified
from torch import Tensor
from truth import Truth, check_step

from graphrt import KDARecoverSSMDeferred, RecordSlots, align_eager_mask, align_state_indices

POLICIES = ("deferred", "stock", "eager", "all_eager")


@dataclass
class Live:
    """A request that is being decoded."""

    name: int
    row: int
    table: list[int]
    truth: Truth
    pending: int = 0
    published: list[tuple[int, int]] = field(default_factory=list)  # (slot, position)

    def slot(self, block_size: int | None) -> int:
        """Where its checkpoint is."""
        return self.table[0 if block_size is None else max(self.truth.position - 1, 0) // block_size]


@dataclass(frozen=True)
class Member:
    """One row of a step: a live request with its fate, or a padding or dummy row (`live` is None)."""

    row: Row
    live: Live | None
    accepted: int
    request: int


class Trace:
    """A random trace over one pool; `run` drives and checks it."""

    def __init__(
        self,
        pool: Pool,
        seed: int,
        *,
        policy: str = "mixed",
        block_size: int | None = None,
        width: int = 3,
        most: int = 3,
        dummies: bool = True,
    ):
        self.pool, self.seed, self.policy = pool, seed, policy
        self.block_size, self.width, self.most, self.dummies = block_size, width, most, dummies
        self.rng, self.choice = random.Random(seed), random.Random(seed + 1)
        self.ledger = RecordSlots(pool.shape.rows, torch.device(pool.device))
        pool.pending = self.ledger.pending
        self.free = list(range(1, pool.shape.slots))
        self.live: list[Live] = []
        self.names = 0
        self.log: list[Tensor] = []

    def run(self, steps: int) -> list[Tensor]:
        """Outputs of every live row and, after the last step, every state: the same bytes under every policy."""
        for step in range(steps):
            torch.manual_seed(1000 * self.seed + step)
            self._arrive()
            self._step()
            self._maybe_drain()
            self._maybe_leave()
        for live in list(self.live):
            self._drain([live])
            self._leave(live, drained=True)
        self._assert_strangers_intact()
        assert self.pool.errors() == {}
        return self.log

    # Arrivals and departures.

    def _arrive(self) -> None:
        while len(self.live) < self.most and (not self.live or self.rng.random() < 0.6):
            self.names += 1
            row = self.ledger.admit(self.names)
            for layer in range(self.pool.shape.layers):
                records = self.pool.records(layer)
                records.correction[row] = records.key_gate[row] = NAN
            position = self._start()
            table = self._take_blocks(0 if self.block_size is None else max(position - 1, 0) // self.block_size)
            self.pool.fill(table[-1], zero=position == 0)
            self.live.append(Live(self.names, row, table, Truth(self.pool, table[-1], position)))

    def _start(self) -> int:
        """Tokens a new request has computed: on, before or behind a block boundary."""
        size = self.block_size
        return 0 if size is None else self.rng.choice([0, 1, size - 1, size, size + 1])

    def _take_blocks(self, last_column: int) -> list[int]:
        """A table up to this column; ids lie in random order."""
        self.rng.shuffle(self.free)
        return [self.free.pop() for _ in range(last_column + 1)]

    def _leave(self, live: Live, *, drained: bool) -> None:
        """Check what it left behind, then free its record row and blocks and make the blocks unreadable."""
        if live.pending == 0:
            live.truth.assert_state(self.pool, live.slot(self.block_size))
        if drained:
            self.log += [part for i in range(len(self.pool.layers)) for part in self._copies(live, i)]
        for slot, position in live.published:
            # A verify in the engine's layout shifts the history of the block it reads, also of a published
            # one.
            history = not self.pool.shape.engine_layout
            live.truth.assert_state(self.pool, slot, position=position, history=history)
        self.ledger.release(live.name)
        self.live.remove(live)
        for slot in live.table:
            self.pool.poison(slot)
        self.free += live.table

    def _copies(self, live: Live, layer: int) -> list[Tensor]:
        return [part.clone() for part in self.pool.state(live.slot(self.block_size), layer)]

    def _maybe_leave(self) -> None:
        """One request in four steps leaves, drained or forgotten with its accepted tokens."""
        if self.live and self.rng.random() < 0.25:
            live, drained = self.rng.choice(self.live), self.rng.random() < 0.5
            if drained:
                self._drain([live])
            self._leave(live, drained=drained)

    def _maybe_drain(self) -> None:
        if self.live and self.rng.random() < 0.3:
            chosen = self.rng.sample(self.live, self.rng.randint(1, len(self.live)))
            for _ in range(self.rng.randint(1, 2)):
                self._drain(chosen)

    def _drain(self, chosen: list[Live]) -> None:
        """Fold what these requests have pending; their states are the oracle's at once."""
        steps.drain(self.pool, [r.slot(self.block_size) for r in chosen], [r.row for r in chosen])
        for live in chosen:
            live.pending = 0
            live.truth.assert_state(self.pool, live.slot(self.block_size))
        self._assert_pending()

    # One step.

    def _step(self) -> None:
        members = self._members()
        pool = self.pool
        batch = Batch(
            pool, [m.row for m in members], tail=self.rng.choice([0, 1, 7]), gap=self.rng.choice([0, 16]),
            wide=self.rng.random() < 0.5,
        )  # fmt: skip
        metadata, requests = self._metadata(members)
        policy = self.choice.choice(POLICIES) if self.policy == "mixed" else self.policy
        eager = self._eager(members, batch, metadata)
        results = self._verify(policy, batch, eager)
        self._log_outputs(members, batch, results)
        start = {m.live.name: m.live.truth.position for m in members if m.live}
        truths = {b: m.live.truth for b, m in enumerate(members) if m.live}
        check_step(batch, results, truths, [m.accepted for m in members])
        if policy == "all_eager":
            eager = torch.ones(len(members), dtype=torch.uint8, device=pool.device)
        if policy == "eager":
            steps.commit(batch, requests, deferred=False, **metadata)
        else:
            steps.commit(batch, requests, eager=eager, **metadata)
        self._settle(members, start, policy, eager)

    def _members(self) -> list[Member]:
        """Some of the live requests, in random order, among padding and dummy rows."""
        chosen = self.rng.sample(self.live, self.rng.randint(1, len(self.live)))
        members = [self._member(live) for live in chosen]
        absent = [live.row for live in self.live if live not in chosen]
        members += [self._filler(absent) for _ in range(self.rng.randint(0, 2))]
        self.rng.shuffle(members)
        numbers = self.rng.sample(range(len(members)), len(members))
        return [Member(m.row, m.live, m.accepted, number) for m, number in zip(members, numbers, strict=True)]

    def _filler(self, absent: list[int]) -> Member:
        """A dummy row (no record row, any slot), or a null slot with no record row or one of an absent
        request.
        """
        tokens = self.rng.randint(0, self.pool.shape.query_len)
        accepted = self.rng.randint(0, tokens)
        if self.dummies and self.rng.random() < 0.5:
            return Member(Row(self.rng.randrange(1, self.pool.shape.slots), -1, tokens), None, accepted, 0)
        row = absent.pop() if absent and self.rng.random() < 0.5 else -1
        return Member(Row(0, row, tokens), None, accepted, 0)

    def _member(self, live: Live) -> Member:
        """A live request with a ragged window and an accepted prefix, often one that lands on a boundary."""
        shape, size, position = self.pool.shape, self.block_size, live.truth.position
        tokens = self.rng.randint(0, shape.query_len)
        if size is not None:
            tokens = min(tokens, self.width * size - position)
            while tokens and len(live.table) <= (position + tokens - 1) // size:
                live.table += self._take_blocks(0)
        least = 0 if shape.takes_zero or tokens == 0 else 1
        accepted = self.rng.randint(least, tokens)
        if size is not None and self.rng.random() < 0.6 and least <= size - position % size <= tokens:
            accepted = size - position % size
        return Member(Row(live.slot(size), live.row, tokens), live, accepted, 0)

    def _metadata(self, members: list[Member]) -> tuple[dict[str, Any], list[int]]:
        """Arguments of the commit beside the counts, and the counts by request index."""
        pool, wide = self.pool, self.rng.random() < 0.5
        by_request = sorted(members, key=lambda m: m.request)
        metadata = {"request_indices": pool.int32((m.request for m in members), wide=wide)}
        if self.block_size is not None:
            table = torch.full((len(members), self.width + 2), 1 << 30, dtype=torch.int32, device=pool.device)
            for m in by_request:
                # Columns a request has not reached hold ids of others.
                known = m.live.table if m.live else []
                row = known + [self.rng.randrange(1, pool.shape.slots) for _ in range(self.width - len(known))]
                table[m.request, 1 : self.width + 1] = pool.int32(row)
            computed = [m.live.truth.position if m.live else 1 for m in by_request]
            metadata["block_table"] = table[:, 1 : self.width + 1]
            metadata["num_computed_tokens"] = pool.int32(computed, wide=wide)
            metadata["mamba_block_size"] = self.block_size
        return metadata, [m.accepted for m in by_request]

    def _eager(self, members: list[Member], batch: Batch, metadata: dict[str, Any]) -> Tensor | None:
        """The mask of rows to fold at once: a random one, with every row in it that align mode forces."""
        random_mask = torch.tensor([self.rng.random() < 0.3 for _ in members])
        if self.block_size is None:
            mask = random_mask.to(self.rng.choice([torch.bool, torch.uint8])).to(self.pool.device)
            return mask if self.rng.random() < 0.7 else None
        computed, size = metadata["num_computed_tokens"], self.block_size
        forced = align_eager_mask(computed, batch.query_start_loc, size, request_indices=metadata["request_indices"])
        slots = align_state_indices(metadata["block_table"], computed, size).tolist()
        for b, m in enumerate(members):
            if m.live:
                at = m.live.truth.position
                assert bool(forced[b]) == (at % size + m.row.tokens >= size or (at > 0 and at % size == 0)), (
                    at,
                    m,
                )
                assert slots[m.request] == m.row.slot
        return forced.bool() | random_mask.to(self.pool.device)

    def _verify(self, policy: str, batch: Batch, eager: Tensor | None) -> list[Verified]:
        pool = self.pool
        if policy == "stock":
            step = KDARecoverSSMDeferred(batch.record_rows, pool.pending, eager, pool.context, batch.state_indices)
            step.flush()
            step.flush()
        if policy == "eager":
            pool.context.drain(batch.state_indices, batch.record_rows, pool.pending)
        return steps.verify(batch, deferred=policy in ("deferred", "all_eager"))

    def _log_outputs(self, members: list[Member], batch: Batch, results: list[Verified]) -> None:
        for b, m in enumerate(members):
            if m.live:
                for got in results:
                    self.log += [got.out[batch.span(b)].clone(), got.conv[batch.span(b)].clone()]

    def _settle(self, members: list[Member], start: dict[int, int], policy: str, eager: Tensor | None) -> None:
        """After the commit: pending is what was accepted and not folded, and what was folded can be read."""
        for b, m in enumerate(members):
            if not m.live:
                continue
            folded = policy == "eager" or (eager is not None and bool(eager[b]))
            m.live.pending = 0 if folded else m.accepted
            if m.live.pending == 0:
                m.live.truth.assert_state(self.pool, m.live.slot(self.block_size))
            self._publish(m.live, start[m.live.name])
        self._assert_pending()

    def _publish(self, live: Live, start: int) -> None:
        """A window that reached a boundary left the state of exactly that boundary in the block that ends
        there.
        """
        size = self.block_size
        if size is None or start // size == live.truth.position // size:
            return
        column = start // size
        live.published.append((live.table[column], (column + 1) * size))
        live.truth.assert_state(self.pool, live.published[-1][0], position=live.published[-1][1])

    def _assert_pending(self) -> None:
        """Every live request's record row holds its count, whether it was in the step or not."""
        counts = self.pool.pending.tolist()
        for live in self.live:
            assert counts[live.row] == live.pending, f"pending of row {live.row}: {counts}"

    def _assert_strangers_intact(self) -> None:
        for layer in range(self.pool.shape.layers):
            for tensor in self.pool.layers[layer].kv_cache:
                unread = tensor[[0, *self.free]]
                assert bool(unread.isnan().all()), "a slot that belongs to no request was written"
