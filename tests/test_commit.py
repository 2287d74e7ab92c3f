"""The commit: what it folds, what it only counts, and whose counts it reads."""

from dataclasses import replace

import pytest
import torch
from rig import Pool, Snapshot, same_bytes
from steps import Batch, Row, commit, drain, verify
from truth import check_step, run_step, start

LAYOUTS = pytest.mark.parametrize("engine_layout", [False, True], ids=["hist+Q", "hist+Q-1"])


def six_counts(pool):
    """Rows 0..4 with windows of four tokens in scattered slots, and row 5 without tokens."""
    slots = {0: 9, 1: 2, 2: 11, 3: 5, 4: 7, 5: 4}
    rows = [Row(slots[row], row, 4 if row < 5 else 0) for row in (3, 0, 5, 4, 1, 2)]
    return slots, rows


@LAYOUTS
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "unbounded"])
def test_a_commit_without_pending_folds_every_accepted_count(backend_device, engine_layout, lower_bound):
    """State and history are the oracle's after 0..Q accepted tokens; no pending entry and no stranger
    changes.
    """
    backend_device.spare(engine_layout and lower_bound is None)
    pool = Pool(backend_device, backend_device.shape(engine_layout=engine_layout, lower_bound=lower_bound))
    slots, rows = six_counts(pool)
    truths = start(pool, slots)
    batch = Batch(pool, rows)
    least = int(engine_layout)
    counts = [max(r.row, least) if r.tokens else 0 for r in rows]
    before = Snapshot(pool)
    check_step(batch, verify(batch, deferred=False), {b: truths[r.row] for b, r in enumerate(rows)}, counts)
    commit(batch, counts, deferred=False)
    for row, slot in slots.items():
        truths[row].assert_state(pool, slot)
    assert before.changed(slots=slots.values(), rows=range(5)) == []
    assert pool.errors() == {}


def test_a_deferred_commit_only_counts(backend_device):
    """Pending of every live row of the step becomes its accepted count, zero included; no other byte changes."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    slots, rows = six_counts(pool)
    start(pool, slots)
    batch = Batch(pool, rows)
    verify(batch)
    pool.pending.copy_(pool.int32([1, 2, 3, 4, 1, 2]))
    before = Snapshot(pool)
    commit(batch, [r.row if r.tokens else 0 for r in rows])
    assert pool.pending.tolist() == [0, 1, 2, 3, 4, 0]
    assert before.changed(pending=True) == []


def test_pending_of_absent_null_and_scratch_rows_stays(backend_device):
    """A commit touches no pending entry of a row that is absent, has a null slot, or is the scratch row."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    start(pool, {2: 3, 4: 5})
    pool.pending.copy_(pool.int32([1, 2, 3, 4, 1, 2]))
    batch = Batch(pool, [Row(0, 1, 2), Row(3, 2, 4), Row(5, -1, 4), Row(-1, 3, 1)])
    verify(batch, deferred=False)
    before = Snapshot(pool)
    commit(batch, [1, 4, 3, 1], eager=torch.tensor([1, 0, 1, 1], dtype=torch.uint8, device=pool.device))
    assert pool.pending.tolist() == [1, 2, 4, 4, 1, 2]
    pool.pending[2] = 3
    assert before.changed() == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
def test_eager_rows_are_folded_at_once_and_the_others_counted(backend_device, dtype):
    """In one commit some rows reach the oracle's state and pending zero, the others keep state and get a
    count.
    """
    pool = Pool(backend_device, backend_device.shape())
    slots, rows = six_counts(pool)
    truths = start(pool, slots)
    batch = Batch(pool, rows)
    eager = [True, False, True, False, True, False]
    counts = [r.row if r.tokens else 0 for r in rows]
    before = Snapshot(pool)
    mask = torch.tensor(eager, device=pool.device).to(dtype)
    run_step(batch, truths, counts, eager=mask)
    for r, count, now in zip(rows, counts, eager, strict=True):
        assert pool.pending[r.row] == (0 if now else count)
        if now or count == 0:
            truths[r.row].assert_state(pool, r.slot)
    folded = [r.slot for r, now in zip(rows, eager, strict=True) if now]
    changed = before.changed(slots=folded, rows=range(5), pending=True)
    assert [name for name in changed if name.startswith("checkpoint")] == []
    drain(pool, list(slots.values()), list(slots))
    for row, slot in slots.items():
        truths[row].assert_state(pool, slot)


@pytest.mark.parametrize("deferred", [False, True], ids=["folded", "deferred"])
def test_counts_are_read_by_request_index(backend_device, deferred):
    """Row b takes the count of request `request_indices[b]`; counts of requests outside the step are not
    read.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {1: 3, 4: 8, 0: 5})
    batch = Batch(pool, [Row(8, 4, 4), Row(3, 1, 4), Row(5, 0, 4)])
    by_request, requests, counts = [1 << 30, 3, -5, 1, 2], [3, 1, 4], [1, 3, 2]
    check_step(batch, verify(batch), {0: truths[4], 1: truths[1], 2: truths[0]}, counts)
    commit(batch, by_request, deferred=deferred, request_indices=pool.int32([*requests, 1 << 30], wide=True))
    if deferred:
        assert [pool.pending[row].item() for row in (4, 1, 0)] == counts
        drain(pool, [8, 3, 5], [4, 1, 0])
    for row, slot in ((4, 8), (1, 3), (0, 5)):
        truths[row].assert_state(pool, slot)
    assert pool.errors() == {}


def test_a_fold_takes_records_from_the_record_row_not_the_batch_row(backend_device):
    """Two steps that permute the batch fold each request's own records of the preceding verify."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {0: 5, 1: 6, 2: 7})
    run_step(Batch(pool, [Row(5, 0, 4), Row(6, 1, 4), Row(7, 2, 4)]), truths, [4, 4, 4])
    batch = Batch(pool, [Row(7, 2, 1), Row(5, 0, 3), Row(6, 1, 2)])
    run_step(batch, truths, [1, 1, 2], eager=torch.ones(3, dtype=torch.bool, device=pool.device))
    for row, slot in ((0, 5), (1, 6), (2, 7)):
        truths[row].assert_state(pool, slot)
    assert pool.pending.tolist() == [0] * 6


def test_two_batches_may_be_in_flight(backend_device):
    """Verify A, verify B, commit A, verify A again, commit B: each commit uses its own step; a freed row is
    masked.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {0: 1, 1: 2, 2: 3, 3: 4})
    a, b = Batch(pool, [Row(1, 0, 4), Row(2, 1, 4)]), Batch(pool, [Row(3, 2, 3), Row(4, 3, 4)])
    check_step(a, verify(a), {0: truths[0], 1: truths[1]}, [2, 0])
    check_step(b, verify(b), {0: truths[2], 1: truths[3]}, [3, 1])
    before = Snapshot(pool)
    freed = Batch(pool, [Row(1, 0, 4), Row(2, -1, 4)], tokens=a.tokens)
    commit(freed, [2, 3])
    assert pool.pending.tolist() == [2, 0, 0, 0, 0, 0]
    assert before.changed(pending=True) == []
    again = Batch(pool, [Row(1, 0, 4)])
    run_step(again, truths, [1])
    commit(b, [3, 1])
    drain(pool, [1, 3, 4], [0, 2, 3])
    for row, slot in ((0, 1), (2, 3), (3, 4)):
        truths[row].assert_state(pool, slot)


def test_a_step_that_accepts_nothing_leaves_no_trace(backend_device):
    """Six accepted tokens, a window of which none is accepted, then two more: the state is that of eight
    tokens.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {2: 3})
    for tokens, accepted in ((4, 4), (2, 2), (4, 0), (4, 0), (4, 2)):
        run_step(Batch(pool, [Row(3, 2, tokens)]), truths, [accepted])
    assert truths[2].position == 8
    drain(pool, [3], [2])
    truths[2].assert_state(pool, 3)


def test_idle_replays_of_one_step_change_nothing_after_the_first(backend_device):
    """Repeating a step that accepts nothing changes checkpoint and pending once, by the fold of what was
    pending.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {2: 3, 0: 4})
    run_step(Batch(pool, [Row(3, 2, 4), Row(4, 0, 4)]), truths, [3, 1])
    batch = Batch(pool, [Row(3, 2, 4), Row(4, 0, 2)])
    run_step(batch, truths, [0, 0])
    before = Snapshot(pool)
    for _ in range(3):
        verify(batch)
        commit(batch, [0, 0])
    assert before.changed() == []


def test_the_plan_is_static_and_says_what_was_folded(backend_device):
    """The four plan tensors keep their addresses over commits and hold counts and destinations of the last
    one.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    context, names = pool.context, ("commit_lens", "final_state_indices", "boundary_state_indices")
    plan = [getattr(context, name) for name in (*names, "boundary_recovery_lens")]
    addresses = [tensor.data_ptr() for tensor in plan]
    assert all(t.shape == (pool.shape.rows,) and t.dtype == torch.int32 for t in plan)
    truths = start(pool, {2: 3, 0: 4})
    for counts in ([3, 1], [2, 4]):
        batch = Batch(pool, [Row(3, 2, 4), Row(4, 0, 4)])
        check_step(batch, verify(batch), {0: truths[2], 1: truths[0]}, counts)
        commit(batch, counts, deferred=False)
        assert context.commit_lens[:2].tolist() == counts
        assert context.final_state_indices[:2].tolist() == [3, 4]
    now = [getattr(context, name) for name in (*names, "boundary_recovery_lens")]
    assert [tensor.data_ptr() for tensor in now] == addresses


def test_the_callers_counts_may_be_overwritten_after_the_commit(backend_device):
    """A commit has taken its counts when it returns, in stream order: overwriting them changes nothing."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    start(pool, {2: 3})
    batch = Batch(pool, [Row(3, 2, 4)])
    verify(batch)
    counts = pool.int32([3])
    pool.context.commit(
        counts,
        batch.state_indices,
        batch.query_start_loc,
        record_rows=batch.record_rows,
        pending=pool.pending,
    )
    counts.fill_(1)
    assert pool.pending[2] == 3


def test_a_commit_of_no_rows_is_legal(backend_device):
    """An empty step commits, flushes and drains without a change."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    before = Snapshot(pool)
    batch = Batch(pool, [])
    commit(batch, [])
    commit(batch, [], deferred=False)
    for fold in (pool.context.flush, pool.context.drain):
        fold(batch.state_indices, batch.record_rows, pool.pending)
    assert before.changed() == []


def test_placeholder_drafts_do_not_enter_the_state(backend_device):
    """With one accepted token the state has the same bits whatever finite placeholders follow, and NaN spoils
    nothing.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {1: 4})
    batch = Batch(pool, [Row(4, 1, 4)])
    states = []
    for filler in (0.0, 3.0, float("nan"), float("inf")):
        twin = pool.twin()
        tokens = batch.tokens[0].clone()
        for part in vars(tokens).values():
            part[1:] = filler
        step = Batch(twin, batch.rows, tokens=[tokens])
        verify(step)
        commit(step, [1])
        drain(twin, [4], [1])
        states.append(twin.state(4, 0))
    truths[1].step(batch.windows(0), 1)
    for state, history in states:
        assert same_bytes(state, states[0][0]) and same_bytes(history, states[0][1])
    truths[1].assert_state(twin, 4)


def test_a_deferred_commit_without_eager_rows_is_one_launch(backend_device):
    """It notes counts and nothing else: neither the fold nor the compaction is launched, over however many layers."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    start(pool, {0: 3})
    verify(batch := Batch(pool, [Row(3, 0, 4)]))

    def refuse(*args):
        raise AssertionError("a deferred commit launched a fold")

    choice = pool.context.choice
    backend = replace(choice.backend, fold=refuse, compact_conv=refuse)
    pool.context = replace(pool.context, choice=replace(choice, backend=backend))
    commit(batch, [2])
    assert pool.pending[0] == 2
    with pytest.raises(AssertionError, match="launched a fold"):
        commit(batch, [2], eager=torch.ones(1, dtype=torch.bool, device=pool.device))
