"""Checked mode's memory of the order of calls: verify, commit, flush and drain of each record row, by layer.

It remembers what it saw; what it cannot have seen, it does not refuse. Calls without checks, replays of recordings and
new owners make it forget.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .checks import fail
from .launch import runs_at_once
from .steps import Commit, Rows


@dataclass(slots=True)
class _Layer:
    """Of the records of one layer: where its rows stand, and whose they are. A row that nobody saw is in no set."""

    open: set[int] = field(default_factory=set)
    """Rows whose last verify was not committed."""
    committed: set[int] = field(default_factory=set)
    """Rows whose last verify was."""
    flushed: set[int] = field(default_factory=set)
    """Rows that were flushed, and not committed since: what is pending is in their state."""
    blind: bool = False
    """Whether verifies ran without checks, so that a row in no set may have been verified."""
    recorded: set[str] = field(default_factory=set)
    """What of "verify", "flush" and "commit" is in some recording, whose replays nobody sees."""
    pending: int | None = None
    """Address of the pending counts that go with these records; None as long as no call has named both."""
    counts: weakref.ref[Tensor] | None = None
    """Those that the last commit wrote."""


# By the corrections tensor of each layer.
_layers: Any = WeakIdKeyDictionary()
# Whether any row was noted in this process: without checked mode nothing is looked up.
_in_use = False
# Corrections tensors whose recorded calls are noted by whoever replays them.
_followed: ContextVar[frozenset[int]] = ContextVar("graphrt_followed", default=frozenset())
# Address of the pending counts of the step whose callables run; 0 for none.
_taken: ContextVar[int] = ContextVar("graphrt_pending_taken", default=0)


def check_committed(rows: Iterable[int], corrections: list[Tensor]) -> None:
    """What a row has pending belongs to records that its last verify overwrote, until the commit of that step.

    Raises:
        RuntimeError: for a row that was verified and not committed.
    """
    for layer in _known(corrections, "commit"):
        for row in rows:
            if row in layer.open:
                raise RuntimeError(
                    f"record row {row} was verified and not committed: its state is between two steps; commit the step "
                    "first (accepted 0 abandons it)"
                )


def check_unflushed(rows: Iterable[int], pending: list[int], corrections: list[Tensor]) -> None:
    """What a row has pending is in its state already, from a flush to the commit of that step.

    Raises:
        RuntimeError: for a row that was flushed and not committed, and has something pending.
    """
    for layer in _known(corrections, "commit"):
        for row in rows:
            if row in layer.flushed and pending[row] > 0:
                raise RuntimeError(
                    f"record row {row} was flushed and not committed: what it has pending would be folded twice; a "
                    "flush is followed by a stock verify and the commit of the same step"
                )


def note_fold(rows: list[int], corrections: list[Tensor], zero: bool) -> None:
    """A flush of these rows, or a drain (`zero`), which leaves nothing pending."""
    global _in_use
    _in_use = True
    for layer in map(_layer, corrections):
        if zero:
            layer.flushed.difference_update(rows)
        else:
            layer.flushed.update(rows)


def open_step(correction: Tensor, rows: Rows) -> None:
    """Note that the rows of a verify hold uncommitted records.

    Raises:
        RuntimeError: if one of them already did, would replay what a flush has folded, or replays nothing and would
            overwrite what is pending.
    """
    global _in_use
    _in_use = True
    layer = _layer(correction)
    if layer.pending is None and rows.pending is not None:
        layer.pending = rows.pending.data_ptr()
    record_rows = list(range(rows.batch)) if rows.record_rows is None else read(rows.record_rows, rows.batch)
    live = live_rows(record_rows, read(rows.state_indices))
    for row in live:
        if row in layer.open and "commit" not in layer.recorded:
            raise RuntimeError(
                f"record row {row} was verified and not committed: commit the step first (accepted 0 abandons it)"
            )
    if rows.pending is None:
        _check_nothing_waits(live, layer)
    elif layer.flushed:
        check_unflushed(live, read(rows.pending), [correction])
    layer.open.update(live)
    layer.committed.difference_update(live)


def _check_nothing_waits(rows: list[int], layer: _Layer) -> None:
    counts = None if layer.counts is None else layer.counts()
    waiting = layer.committed.intersection(rows) - layer.flushed
    if counts is None or not waiting or layer.recorded:
        return
    pending = read(counts)
    for row in waiting:
        if pending[row] > 0:
            raise RuntimeError(
                f"record row {row} has {pending[row]} records pending: a stock verify replays none of them, and "
                "overwrites them; flush or drain first"
            )


def check_verified(corrections: list[Tensor], c: Commit) -> None:
    """Whether the rows of a commit have records that were not committed before, in every layer.

    By layer, where the last verify of the row was seen, or that of another layer, and nothing since that may have been
    another one. A commit that changes nothing passes: accepted 0, with nothing pending, or what is pending folded by a
    flush.

    Raises:
        RuntimeError: for a row that was not verified since its last commit, or has something pending that this commit
            leaves there.
    """
    layers = [(i, layer) for i, layer in enumerate(map(_layer, corrections)) if "verify" not in layer.recorded]
    if not any(layer.committed or layer.open for _, layer in layers):
        return
    record_rows = range(c.batch) if c.record_rows is None else read(c.record_rows, c.batch)
    requests = range(c.batch) if c.request_indices is None else read(c.request_indices, c.batch)
    slots, accepted = read(c.state_indices), read(c.num_accepted_tokens)
    pending = None if c.pending is None else read(c.pending)
    if c.pending is None:
        _check_none_stay(record_rows, slots, [layer for _, layer in layers])
    for row, slot, request in zip(record_rows, slots, requests, strict=True):
        under_way = any(row in layer.open for _, layer in layers)
        for i, layer in layers if slot > 0 else []:
            unknown = layer.blind or not under_way
            if row in layer.open or (unknown and row not in layer.committed):
                continue
            flushed = row in layer.flushed or "flush" in layer.recorded
            if accepted[request] > 0 or (pending is not None and pending[row] > 0 and not flushed):
                raise RuntimeError(
                    f"record row {row} was not verified since its last commit, in layer {i}: old records would be "
                    "committed again, or what it has pending lost; a step is the verify of all layers, then one commit"
                )


def _check_none_stay(record_rows: Iterable[int], slots: list[int], layers: list[_Layer]) -> None:
    """A commit without `pending` leaves the counts of earlier commits as they are, for records that are gone."""
    for layer in layers:
        counts = None if layer.counts is None else layer.counts()
        if counts is None or layer.recorded:
            continue
        pending = read(counts)
        for row, slot in zip(record_rows, slots, strict=True):
            if slot > 0 and row in layer.open | layer.committed and pending[row] > 0:
                raise RuntimeError(
                    f"record row {row} has {pending[row]} records pending, which a commit without pending leaves to be "
                    "folded again: drain before the verify, or give pending"
                )


def close_step(corrections: list[Tensor], c: Commit) -> None:
    """The rows of a commit are committed, in every layer."""
    record_rows = range(c.batch) if c.record_rows is None else read(c.record_rows, c.batch)
    if c.pending is not None:
        keep_together(corrections, c.pending)
    slots = read(c.state_indices)
    live = [row for row, slot in zip(record_rows, slots, strict=True) if slot > 0]
    for layer in map(_layer, corrections):
        layer.committed.update(row for row in live if row in layer.open)
        layer.open.difference_update(record_rows)
        layer.flushed.difference_update(live)


def note_step(corrections: list[Tensor], rows: list[int]) -> None:
    """A recorded step has verified and committed these rows."""
    global _in_use
    _in_use = True
    for layer in map(_layer, corrections):
        layer.open.difference_update(rows)
        layer.flushed.difference_update(rows)
        layer.committed.update(rows)


def unseen(what: str, corrections: list[Tensor]) -> None:
    """Note a "verify", "flush" or "commit" whose values nobody reads: what was known of the rows holds no longer."""
    if runs_at_once():
        lose_track(what, corrections)
        return
    followed = _followed.get()
    for correction in corrections:
        if id(correction) not in followed:
            _layer(correction).recorded.add(what)


def lose_track(what: str, corrections: list[Tensor]) -> None:
    """As `unseen`, of what runs now."""
    for layer in map(_layer, corrections) if _in_use else ():
        layer.committed.clear()
        layer.blind |= what == "verify"
        if what == "commit":
            layer.open.clear()
            layer.flushed.clear()


@contextmanager
def followed(corrections: list[Tensor]) -> Iterator[None]:
    """Recordings made inside the block are replayed by an owner who notes what they do with these records."""
    token = _followed.set(_followed.get() | {id(correction) for correction in corrections})
    try:
        yield
    finally:
        _followed.reset(token)


@contextmanager
def taken_over(pending: Tensor) -> Iterator[None]:
    """Inside the block these counts belong to a step that has moved them elsewhere (`DecodeStep`)."""
    token = _taken.set(pending.data_ptr())
    try:
        yield
    finally:
        _taken.reset(token)


def check_not_taken(pending: Tensor | None) -> None:
    """ValueError for counts that a step has taken over: nothing is pending there, and the step itself writes them.

    In every mode: it costs nothing where no such step calls.
    """
    taken = _taken.get()
    if taken and pending is not None and pending.data_ptr() == taken:
        hint = "the step has zeroed the others, and commits by itself"
        fail("pending", "the counts of the step, StepRows.pending", "those that the step was made with", hint)


def forget(corrections: list[Tensor]) -> None:
    """All records were replaced: no row is between two steps."""
    for layer in map(_layer, corrections):
        for rows in (layer.open, layer.committed, layer.flushed):
            rows.clear()
        layer.counts = None


def keep_together(corrections: list[Tensor], pending: Tensor) -> None:
    """Note whose records these are, where verifies are given other pending counts than commits (`DecodeStep`)."""
    for layer in map(_layer, corrections):
        layer.pending, layer.counts = pending.data_ptr(), weakref.ref(pending)


def forget_row(row: int, pending: Tensor) -> None:
    """A record row of this ledger has a new owner: what the old one left uncommitted does not matter.

    Args:
        pending: [R] int32, the ledger's. Records that no call has yet named together with any counts may be its own.
    """
    for layer in _layers.values() if _in_use else ():
        if layer.pending in (None, pending.data_ptr()):
            for rows in (layer.open, layer.committed, layer.flushed):
                rows.discard(row)


def live_rows(record_rows: list[int], slots: list[int]) -> list[int]:
    """The record rows of those rows of a step that have a state and records."""
    return [row for row, slot in zip(record_rows, slots, strict=True) if slot > 0 and row >= 0]


def read(t: Tensor, length: int | None = None) -> list[int]:
    """The first values of a tensor."""
    values: list[int] = t[:length].tolist()
    return values


def _layer(correction: Tensor) -> _Layer:
    found: _Layer = _layers.setdefault(correction, _Layer())
    return found


def _known(corrections: list[Tensor], unless_recorded: str) -> list[_Layer]:
    return [layer for layer in map(_layer, corrections) if unless_recorded not in layer.recorded]
