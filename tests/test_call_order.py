"""Checked mode knows the order of a step: nothing is committed twice, folded twice, or dropped without a word."""

import random

import pytest
import torch
from rig import Pool, Snapshot, Target, same_bytes
from steps import Batch, Row, commit, core_verify
from truth import start

from graphrt import RecordSlots, checked, load_state, save_state
from graphrt.capture import CommitRunner, DecodeStep, Sampled, StepInputs, record
from graphrt.testing import Service, poisoned_pool

CPU = Target("torch", "cpu")
ROWS = [Row(3, 0, 4), Row(4, 1, 4)]


def committed(accepted=(2, 3), deferred=True, **shape):
    """A pool whose first step is verified and committed, and the batch of that step."""
    torch.manual_seed(0)
    pool = Pool(CPU, CPU.shape(**({"layers": 2, "heads": 1} | shape)), check=True)
    start(pool, {row: row + 3 for row in range(4)})
    batch = Batch(pool, ROWS)
    verify_all(batch)
    commit(batch, list(accepted), deferred=deferred)
    return pool, batch


def verify_all(batch, layers=None, **options):
    for layer in range(batch.pool.shape.layers) if layers is None else layers:
        core_verify(batch, layer, **({"deferred": True, "check": True} | options))


def refused(row=0):
    """What the block calls raises for this record row."""
    return pytest.raises(RuntimeError, match=rf"^record row {row} was not verified since its last commit")


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "folded"])
def test_a_second_commit_of_a_step_is_a_wrong_order(deferred):
    """Folded, its records would be in the checkpoint twice; deferred, they would be noted again after a drain."""
    pool, batch = committed(deferred=deferred)
    if deferred:
        pool.context.drain(batch.state_indices, batch.record_rows, pool.pending)
    before = Snapshot(pool)
    with refused():
        commit(batch, [2, 3], deferred=deferred)
    with refused(row=1):
        commit(Batch(pool, ROWS[1:]), [1], deferred=deferred)
    assert before.changed() == []


def test_a_commit_that_would_drop_what_is_pending_is_refused_as_well():
    """Accepted 0 abandons a step; of a step that never verified it would abandon the one before."""
    pool, batch = committed()
    before = Snapshot(pool)
    with refused():
        commit(batch, [0, 0])
    assert before.changed() == []


def test_a_runner_refuses_a_second_commit_of_its_step():
    """The replay of a recorded commit passes by the context's own method."""
    pool, _ = committed()
    inputs = StepInputs(6, 4, "cpu")
    runner = CommitRunner(pool.context, pool.pending, inputs, [2])
    runner.capture(progress=False)
    inputs.stage(
        num_reqs=2,
        state_indices=[3, 4],
        record_rows=[0, 1],
        query_start_loc=[0, 4, 8],
        num_accepted_tokens=[1, 2],
    )
    before = Snapshot(pool)
    with refused():
        runner.commit(2)
    assert before.changed() == []
    verify_all(Batch(pool, ROWS))
    runner.commit(2)
    with refused():
        runner.commit(2)
    assert pool.pending.tolist() == [1, 2, 0, 0, 0, 0]


def test_rows_of_other_steps_and_rows_that_own_nothing_may_be_committed():
    """Two batches in flight, padding and null rows, rows that nobody verified in checked mode."""
    pool, _ = committed()
    other = Batch(pool, [Row(5, 2, 4), Row(0, -1, 0), Row(3, -1, 2)])
    verify_all(other)
    commit(other, [1, 0, 0])
    commit(Batch(pool, [Row(6, 3, 4), Row(3, -1, 2)]), [2, 2])


def test_an_abandoned_step_is_committed_with_accepted_0():
    """Also one that never began, where there is nothing to lose."""
    pool, batch = committed()
    verify_all(batch)
    for _ in range(2):
        commit(batch, [0, 0])
        commit(batch, [0, 0], deferred=False)
    assert pool.pending.tolist() == [0] * 6


@pytest.mark.parametrize("accepted", [0, 1])
def test_a_step_given_up_between_two_layers_is_not_committed_before_the_others_are_verified(accepted):
    """Each verify folds what its layer has pending: the others would lose it. Rows without tokens make up for it."""
    pool, batch = committed()
    verify_all(batch, layers=[0])
    before = Snapshot(pool)
    with pytest.raises(RuntimeError, match=r"^record row 0 was not verified since its last commit, in layer 1: "):
        commit(batch, [accepted, accepted])
    assert before.changed() == []
    verify_all(Batch(pool, [Row(3, 0, 0), Row(4, 1, 0)]), layers=[1])
    commit(batch, [0, 0])
    want, twin = committed()
    verify_all(twin)
    commit(twin, [0, 0])
    assert pool.pending.tolist() == want.pending.tolist()
    for layer in range(2):
        assert same_bytes(pool.checkpoint(layer), want.checkpoint(layer)), layer


def test_a_layer_that_a_step_leaves_out_is_named():
    """Also in the first step of a row: its records of that layer are zeros, or a stranger's."""
    pool, _ = committed()
    batch = Batch(pool, [Row(5, 2, 4), Row(6, 3, 4)])
    verify_all(batch, layers=[0])
    before = Snapshot(pool)
    with pytest.raises(RuntimeError, match=r"^record row 2 was not verified since its last commit, in layer 1"):
        commit(batch, [1, 0])
    assert before.changed() == []
    verify_all(batch, layers=[1])
    commit(batch, [1, 0])


def test_a_flushed_row_may_be_committed_without_a_verify_if_it_accepts_nothing():
    """Flush leaves pending for the commit of the same step; the row has no tokens, or the step is given up."""
    pool, batch = committed()
    pool.context.flush(batch.state_indices, batch.record_rows, pool.pending)
    with refused():
        commit(batch, [1, 0])
    commit(Batch(pool, [Row(3, 0, 0), Row(4, 1, 4)]), [0, 0])
    assert pool.pending.tolist() == [0] * 6


@pytest.mark.parametrize("how", ["unchecked verify", "recorded verify", "new owner", "loaded"])
def test_what_checked_mode_cannot_know_is_not_refused(how, tmp_path):
    """A verify that it did not see may have made new records; a new owner or a loaded run has others."""
    pool = Pool(CPU, CPU.shape(layers=2, heads=1), check=True)
    ledger = RecordSlots(pool.shape.rows, "cpu")
    pool.pending = ledger.pending
    ledger.admit("a")
    start(pool, {0: 3})
    batch = Batch(pool, ROWS[:1])
    verify_all(batch)
    if how == "recorded verify":
        recording = record(lambda: verify_all(batch), device="cpu", warmup=0)
    commit(batch, [2])
    if how == "unchecked verify":
        verify_all(batch, check=False)
    elif how == "recorded verify":
        recording.replay()
    elif how == "new owner":
        ledger.release("a")
        ledger.admit("b")
    else:
        save_state(tmp_path / "run", pool.context, ledger)
        other = RecordSlots(pool.shape.rows, "cpu")
        load_state(tmp_path / "run", pool.context, other)
        pool.pending = other.pending
    commit(batch, [1])
    assert pool.pending[0].item() == 1


def test_a_loaded_run_has_no_step_open(tmp_path):
    """What the context had verified and not committed is overwritten; the next verify is the first of its rows."""
    pool, batch = committed()
    ledger = RecordSlots(pool.shape.rows, "cpu")
    save_state(tmp_path / "run", pool.context, ledger)
    verify_all(batch)
    load_state(tmp_path / "run", pool.context, ledger)
    verify_all(batch)


def test_a_commit_without_checks_ends_a_step_all_the_same():
    """Verifies with `check=True` beside a context without it: each of them follows a commit."""
    pool = Pool(CPU, CPU.shape(layers=1, heads=1), check=False)
    start(pool, {0: 3, 1: 4})
    batch = Batch(pool, ROWS)
    for _ in range(2):
        verify_all(batch)
        commit(batch, [1, 1])


def test_a_recorded_step_closes_what_it_opened():
    """The verifies of a recording are seen once, by its warm-up; replays and commits at will follow."""
    pool, batch = committed()
    accepted = torch.tensor([1, 1], dtype=torch.int32)

    def step():
        verify_all(batch)
        pool.context.commit(
            accepted, batch.state_indices, batch.query_start_loc, record_rows=batch.record_rows, pending=pool.pending
        )

    recording = record(step, device="cpu")
    for _ in range(2):
        recording.replay()
    verify_all(batch)
    commit(batch, [1, 1])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_recorded_step_waits_for_the_commit_of_the_last_one(layers):
    """Its verifies would replay what is pending from records that the open step has overwritten."""
    pool, batch = committed()
    inputs = StepInputs(6, 4, "cpu")
    step = DecodeStep(pool.context, pool.pending, inputs, lambda rows: None, lambda rows, _: None)
    inputs.stage(num_reqs=2, state_indices=[3, 4], record_rows=[0, 1], query_start_loc=[0, 4, 8])
    verify_all(batch, range(layers))
    with pytest.raises(RuntimeError, match="record row 0 was verified and not committed"):
        step.replay(2)


def after_flush(pool, batch, tmp_path):
    """Every call that would fold what the flush has folded."""
    inputs = StepInputs(6, 4, "cpu")
    runner = CommitRunner(pool.context, pool.pending, inputs, [2])
    step = DecodeStep(pool.context, pool.pending, inputs, lambda rows: None, lambda rows, _: None)
    inputs.stage(num_reqs=2, state_indices=[3, 4], record_rows=[0, 1], query_start_loc=[0, 4, 8])
    ledger = RecordSlots(pool.shape.rows, "cpu")
    ledger.pending.copy_(pool.pending)
    return {
        "flush": lambda: pool.context.flush(batch.state_indices, batch.record_rows, pool.pending),
        "drain": lambda: pool.context.drain(batch.state_indices, batch.record_rows, pool.pending),
        "verify": lambda: verify_all(batch),
        "read": lambda: pool.context.read_state(3, 0, pool.pending),
        "save": lambda: save_state(tmp_path / "run", pool.context, ledger),
        "runner.flush": lambda: runner.flush(2),
        "runner.drain": lambda: runner.drain(2),
        "step.replay": lambda: step.replay(2),
    }


def test_between_a_flush_and_its_commit_nothing_folds_again(tmp_path):
    """Flush leaves pending as it is: a fold, a replay or a file would bring the same records into the state twice."""
    pool, batch = committed()
    pool.context.flush(batch.state_indices, batch.record_rows, pool.pending)
    calls, before = after_flush(pool, batch, tmp_path), Snapshot(pool)
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=r"^record row 0 was flushed and not committed: "):
            call()
        assert before.changed() == [], name
    verify_all(batch, deferred=False)
    commit(batch, [2, 0])
    for _ in range(2):
        pool.context.flush(batch.state_indices, batch.record_rows, pool.pending)
        verify_all(batch, deferred=False)
        commit(batch, [1, 4])
    pool.context.drain(batch.state_indices, batch.record_rows, pool.pending)
    verify_all(batch)


def test_a_stock_verify_of_a_row_with_something_pending_is_refused():
    """It starts from a state that lacks the accepted tokens, and overwrites the records they wait in (B87)."""
    pool, batch = committed()
    before = Snapshot(pool)
    with pytest.raises(RuntimeError, match=r"^record row 0 has 2 records pending: a stock verify replays none of them"):
        verify_all(batch, deferred=False)
    assert before.changed() == []
    verify_all(batch)
    commit(batch, [0, 1])
    verify_all(Batch(pool, ROWS[:1]), deferred=False)
    with pytest.raises(RuntimeError, match=r"^record row 1 has 1 records pending"):
        verify_all(Batch(pool, ROWS[1:]), deferred=False)
    commit(Batch(pool, ROWS[:1]), [1], deferred=False)
    pool.context.drain(pool.int32([4]), pool.int32([1]), pool.pending)
    verify_all(Batch(pool, ROWS[1:]), deferred=False)


@pytest.mark.parametrize("deferred", [True, False], ids=["replayed", "flushed"])
def test_a_commit_without_pending_of_a_row_that_has_some_is_refused(deferred):
    """It would leave the count of the step before, and the next fold takes that many of the new records."""
    pool, batch = committed()
    if not deferred:
        pool.context.flush(batch.state_indices, batch.record_rows, pool.pending)
    verify_all(batch, deferred=deferred)
    before = Snapshot(pool)
    with pytest.raises(RuntimeError, match=r"^record row 0 has 2 records pending, which a commit without pending"):
        commit(batch, [1, 1], deferred=False)
    assert before.changed() == []
    commit(batch, [1, 1])
    pool.context.drain(batch.state_indices, batch.record_rows, pool.pending)
    verify_all(batch)
    commit(batch, [1, 1], deferred=False)


def test_a_commit_that_is_part_of_a_recording_ends_steps_that_nobody_saw_end():
    """Of a plain recording no replay is seen: the verify behind it follows a commit all the same."""
    pool, batch = committed()
    accepted = torch.tensor([1, 1], dtype=torch.int32)

    def end():
        pool.context.commit(
            accepted, batch.state_indices, batch.query_start_loc, record_rows=batch.record_rows, pending=pool.pending
        )

    recording = record(end, device="cpu", warmup=0)
    for _ in range(2):
        verify_all(batch)
        recording.replay()
    pool.context.drain(batch.state_indices, batch.record_rows, pool.pending)


@pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
def test_the_replay_of_a_recorded_step_verifies_and_commits_its_rows(checks):
    """In checked mode its owner notes it: a commit behind it is a second one. Without checks nobody knows."""
    pool, batch = committed()
    inputs, own = StepInputs(6, 4, "cpu"), Batch(pool, ROWS)

    def verify(rows):
        own.query_start_loc, own.state_indices, own.record_rows = (
            rows.query_start_loc,
            rows.state_indices,
            rows.record_rows,
        )
        verify_all(own, pending=rows.pending)

    def sample(rows, _):
        return Sampled(rows.query_start_loc.diff(), rows.query_start_loc.diff())

    step = DecodeStep(pool.context, pool.pending, inputs, verify, sample, capture_sizes=[2])
    step.capture(progress=False)
    inputs.stage(num_reqs=2, state_indices=[3, 4], record_rows=[0, 1], query_start_loc=[0, 4, 8])
    with refused():
        commit(batch, [1, 1])
    object.__setattr__(pool.context, "check", checks)
    step.replay(2)
    assert pool.pending.tolist() == [4, 4, 0, 0, 0, 0]
    object.__setattr__(pool.context, "check", True)
    if checks:
        with refused():
            commit(batch, [1, 1])
        verify_all(batch)
    commit(batch, [1, 1])


def test_a_service_that_mixes_all_calls_is_in_order(monkeypatch):
    """Replays of whole steps, deferred, flushed and eager steps, captures, files and new owners: nothing is refused."""
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    # Its null rows have record rows, which checked mode refuses by value.
    monkeypatch.setattr(checked, "_slots_and_rows", lambda *_: None)
    pool = poisoned_pool(num_layers=1, num_heads=1, lower_bound=-5.0, conv_dim=6, seed=3)
    service, pick = Service(pool, backend="torch"), random.Random(3).randint
    step = service.step
    service.step = lambda pick, **_: step(pick)
    for _ in range(100):
        service.act(pick)
    assert {"replay", "commit", "flush", "now", "drain"} <= service.counts.events.keys()
