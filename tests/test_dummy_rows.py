"""Dummy rows: record row -1 on a slot that looks alive reads the checkpoint and writes nothing but scratch."""

import pytest
import torch
from rig import Pool, Snapshot, same_bytes
from steps import Batch, Row, commit, conv_verify, verify
from truth import check_step, run_step, start

BOTH = pytest.mark.parametrize("deferred", [False, True], ids=["stock", "deferred"])
LAYOUTS = pytest.mark.parametrize("engine_layout", [False, True], ids=["hist+Q", "hist+Q-1"])


@BOTH
@LAYOUTS
def test_a_dummy_row_writes_only_the_scratch_row(backend_device, deferred, engine_layout):
    """On live slots, with and without tokens, nothing changes but scratch; finite checkpoints give finite
    outputs.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1, engine_layout=engine_layout))
    truths = start(pool, {0: 1, 1: 2, 2: 3})
    run_step(Batch(pool, [Row(1, 0, 4), Row(2, 1, 4), Row(3, 2, 4)]), truths, [3, 2, 1])
    before = Snapshot(pool)
    batch = Batch(pool, [Row(1, -1, 4), Row(2, -1, 0), Row(3, -1, 1)], tail=2)
    got = verify(batch, deferred=deferred)
    assert before.changed() == []
    assert bool(got[0].out.isfinite().all())
    assert pool.errors() == {}


def test_a_whole_dummy_step_changes_nothing(backend_device):
    """Flush, verify, commit with and without pending, and drain of dummy rows leave every byte but scratch."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {0: 1, 1: 2})
    run_step(Batch(pool, [Row(1, 0, 4), Row(2, 1, 4)]), truths, [3, 2])
    before = Snapshot(pool)
    batch = Batch(pool, [Row(1, -1, 4), Row(2, -1, 3), Row(7, -1, 4)])
    eager = torch.ones(3, dtype=torch.bool, device=pool.device)
    pool.context.flush(batch.state_indices, batch.record_rows, pool.pending)
    for deferred in (True, False):
        verify(batch, deferred=deferred)
        commit(batch, [4, 3, 2], deferred=deferred)
        commit(batch, [4, 3, 2], eager=eager)
    pool.context.drain(batch.state_indices, batch.record_rows, pool.pending)
    assert before.changed() == []
    assert pool.errors() == {}


def test_idle_dummy_steps_between_real_ones_change_no_bit(backend_device):
    """A trace with a dummy step after every real one gives the bytes of the trace without."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    start(pool, {0: 1, 1: 2})
    steps = [Batch(pool, [Row(1, 0, 4), Row(2, 1, n)]) for n in (4, 2, 3)]
    twin = pool.twin()
    for batch in steps:
        want = verify(batch)[0]
        commit(batch, [2, 1])
        got = verify(batch.on(twin))[0]
        commit(batch.on(twin), [2, 1])
        assert same_bytes(want.out, got.out) and same_bytes(want.conv, got.conv)
        idle = Batch(twin, [Row(1, -1, 1), Row(2, -1, 1), Row(0, -1, 1)])
        verify(idle)
        commit(idle, [1, 1, 1])
    for name, mine in pool.tensors().items():
        assert same_bytes(mine, twin.tensors()[name]), name


@BOTH
def test_dummy_and_padding_rows_change_no_bit_of_live_rows(backend_device, deferred):
    """A live request among dummies on its own slot, on free slots and on the null slot gets the bytes it gets
    alone.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    start(pool, {0: 1, 1: 2})
    alone = Batch(pool, [Row(2, 1, 4)])
    crowd = Batch(pool, [Row(9, -1, 2), Row(0, -1, 1), Row(2, 1, 4), Row(1, -1, 4), Row(0, -1, 0)], tail=3)
    for mine, theirs in zip(vars(crowd.tokens[0]).values(), vars(alone.tokens[0]).values(), strict=True):
        mine[crowd.span(2)] = theirs
    twin = pool.twin()
    want, got = verify(alone, deferred=deferred)[0], verify(crowd.on(twin), deferred=deferred)[0]
    assert same_bytes(got.out[crowd.span(2)], want.out) and same_bytes(got.conv[crowd.span(2)], want.conv)
    for name, mine in pool.tensors().items():
        assert same_bytes(mine, twin.tensors()[name]), name


def test_a_row_freed_between_verify_and_commit_is_skipped(backend_device):
    """Masked with -1 at the commit, its records, pending and blocks stay; its neighbours are the oracle's."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {0: 1, 1: 2, 2: 3})
    batch = Batch(pool, [Row(1, 0, 4), Row(2, 1, 4), Row(3, 2, 4)])
    check_step(batch, verify(batch), {b: truths[b] for b in (0, 2)}, [2, 3, 1])
    before = Snapshot(pool)
    batch.record_rows = pool.int32([0, -1, 2])
    commit(batch, [2, 3, 1])
    assert pool.pending.tolist() == [2, 0, 1, 0, 0, 0]
    assert before.changed(pending=True) == []
    commit(batch, [2, 3, 1], deferred=False)
    truths[0].assert_state(pool, 1)
    truths[2].assert_state(pool, 3)
    assert before.changed(slots=[1, 3], pending=True) == []


@LAYOUTS
def test_conv_verify_alone_respects_the_scratch_row(backend_device, engine_layout):
    """With record rows given, a stock convolution verify of a dummy row writes no convolution state."""
    pool = Pool(backend_device, backend_device.shape(layers=1, engine_layout=engine_layout))
    start(pool, {0: 1})
    before = Snapshot(pool)
    conv_verify(Batch(pool, [Row(1, -1, 4)]), 0, deferred=False)
    assert before.changed() == []


@BOTH
@pytest.mark.parametrize("dummy_first", [False, True], ids=["live first", "dummy first"])
def test_a_dummy_on_the_slot_of_a_row_that_replays_leaves_its_fold(backend_device, deferred, dummy_first):
    """Dummies of a context-parallel capture stand on slots of live rows: the live row's replay, records and count are
    those that it has alone (B18).
    """
    backend_device.spare(dummy_first and not deferred)
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {1: 2})
    run_step(Batch(pool, [Row(2, 1, 4)]), truths, [3])
    twin = pool.twin()
    alone, dummies = Batch(pool, [Row(2, 1, 3)]), [Row(2, -1, 2), Row(2, -1, 0)]
    rows = [*dummies, Row(2, 1, 3)] if dummy_first else [Row(2, 1, 3), *dummies]
    crowd = Batch(twin, rows)
    for mine, theirs in zip(vars(crowd.tokens[0]).values(), vars(alone.tokens[0]).values(), strict=True):
        mine[crowd.span(2 if dummy_first else 0)] = theirs
    for batch in (alone, crowd):
        verify(batch, deferred=deferred)
        commit(batch, [2 if row.row == 1 else 0 for row in batch.rows])
    for name, mine in pool.tensors().items():
        assert same_bytes(mine, twin.tensors()[name]), name
