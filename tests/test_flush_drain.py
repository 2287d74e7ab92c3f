"""Flush, drain and the step object: when pending is folded outside a verify, and how often."""

import pytest
from rig import Pool, Snapshot, same_bytes
from steps import Batch, Row, commit, drain, verify
from truth import Truth, run_step, start

from graphrt import KDARecoverSSMDeferred

SLOTS = {0: 9, 1: 2, 3: 5, 4: 7}


def pending_pool(target, **changes):
    """A pool with counts 1, 4, 2 and 3 pending, and its truths."""
    pool = Pool(target, target.shape(**changes))
    truths = start(pool, SLOTS)
    run_step(Batch(pool, [Row(slot, row, 4) for row, slot in SLOTS.items()]), truths, [1, 4, 2, 3])
    return pool, truths


@pytest.mark.parametrize("engine_layout", [False, True], ids=["hist+Q", "hist+Q-1"])
@pytest.mark.parametrize("fold", ["flush", "drain"])
def test_a_fold_brings_states_and_histories_up_to_date(backend_device, fold, engine_layout):
    """Rows of the call are the oracle's; rows outside it, padding, null and dummy rows change nothing."""
    pool, truths = pending_pool(backend_device, engine_layout=engine_layout)
    before = Snapshot(pool)
    slots, rows = pool.int32([5, 0, 9, 2, 7], wide=True), pool.int32([3, -1, 0, -1, -1], wide=True)
    getattr(pool.context, fold)(slots, rows, pool.pending)
    for row in (3, 0):
        truths[row].assert_state(pool, SLOTS[row])
    assert before.changed(slots=[5, 9], pending=True) == []
    assert pool.pending.tolist() == ([0, 4, 0, 0, 3, 0] if fold == "drain" else [1, 4, 0, 2, 3, 0])
    assert pool.errors() == {}


def test_a_null_slot_keeps_its_pending_in_a_drain(backend_device):
    """A row whose slot is null is neither folded nor zeroed."""
    pool, _ = pending_pool(backend_device, layers=1)
    before = Snapshot(pool)
    drain(pool, [0, -3], [0, 1])
    assert before.changed() == []


def test_draining_again_changes_nothing(backend_device):
    """Drain any number of times is drain once, byte for byte."""
    pool, _ = pending_pool(backend_device)
    for fold in range(3):
        drain(pool, list(SLOTS.values()), list(SLOTS))
        if fold == 0:
            before = Snapshot(pool)
    assert before.changed() == []


def test_flushing_twice_folds_twice(backend_device):
    """A bare flush leaves pending, so a second one advances the checkpoint by the same records again."""
    pool, _ = pending_pool(backend_device, layers=1)
    slots, rows = pool.int32([9]), pool.int32([0])
    pool.context.flush(slots, rows, pool.pending)
    once = pool.checkpoint(0)[9].clone()
    pool.context.flush(slots, rows, pool.pending)
    assert not same_bytes(once, pool.checkpoint(0)[9])


def test_a_step_object_flushes_once(backend_device):
    """`KDARecoverSSMDeferred.flush` folds the rows of its step in the first call only, also in every layer's
    call.
    """
    pool, truths = pending_pool(backend_device)
    slots, rows = pool.int32([5, 9]), pool.int32([3, 0, 1, 4])
    step = KDARecoverSSMDeferred(rows, pool.pending, None, pool.context, slots)
    before = Snapshot(pool)
    for _ in range(3):
        step.flush()
    for row in (3, 0):
        truths[row].assert_state(pool, SLOTS[row])
    assert before.changed(slots=[5, 9]) == []


def test_a_flush_prepares_a_stock_verify(backend_device):
    """Flush, stock verify and a commit that rewrites pending are one step, and a deferred verify may follow
    it.
    """
    pool, truths = pending_pool(backend_device)
    for deferred in (False, True, False, True):
        batch = Batch(pool, [Row(5, 3, 4), Row(9, 0, 2), Row(2, 1, 0)])
        if not deferred:
            KDARecoverSSMDeferred(batch.record_rows, pool.pending, None, pool.context, batch.state_indices).flush()
        run_step(batch, truths, [2, 1, 0], deferred=deferred)
        assert pool.pending.tolist() == [1, 0, 0, 2, 3, 0]
    drain(pool, list(SLOTS.values()), list(SLOTS))
    for row, slot in SLOTS.items():
        truths[row].assert_state(pool, slot)


def test_a_plain_decode_reads_the_drained_checkpoint(backend_device):
    """After a drain a one-token stock verify continues the accepted sequence, and a fork of the slot does so
    too.
    """
    pool, truths = pending_pool(backend_device, layers=1)
    drain(pool, [9], [0])
    pool.checkpoint(0)[4] = pool.checkpoint(0)[9]
    pool.conv(0)[4] = pool.conv(0)[9]
    forks = {0: truths[0], 5: Truth(pool, 4)}
    batch = Batch(pool, [Row(9, 0, 1), Row(4, 5, 1)])
    run_step(batch, forks, [1, 1], deferred=False)
    drain(pool, [9, 4], [0, 5])
    forks[0].assert_state(pool, 9)
    forks[5].assert_state(pool, 4)


def test_an_abandoned_step_is_committed_with_nothing(backend_device):
    """A verify whose tokens nobody wants, committed with zero, leaves the folded state and no pending."""
    pool, truths = pending_pool(backend_device, layers=1)
    batch = Batch(pool, [Row(9, 0, 4), Row(2, 1, 3)])
    verify(batch)
    commit(batch, [0, 0])
    truths[0].assert_state(pool, 9)
    truths[1].assert_state(pool, 2)
    assert pool.pending.tolist() == [0, 0, 0, 2, 3, 0]
