"""Late calls: a step that was staged for an earlier owner of a record row changes nothing of the present owner."""

import pytest
import torch
from rig import Pool, Snapshot, Target
from steps import Batch, Row, commit, drain, verify
from truth import run_step, start

from graphrt import KDARecoverSSMDeferred, Owners, RecordSlots
from graphrt.capture import CommitRunner, DecodeStep, Sampled, StepInputs, record


def ledger_of(pool, names):
    """A ledger whose pending is the pool's, with these requests."""
    ledger = RecordSlots(pool.shape.rows, torch.device(pool.device))
    pool.pending = ledger.pending
    for name in names:
        ledger.admit(name)
    return ledger


def reused_row(target):
    """A verified a window and was released; B owns its row, with two records pending; C is a neighbour.

    Returns the pool, the ledger, A's late batch (slots 5 and 3), its owners, and the truths by record row.
    """
    pool = Pool(target, target.shape(layers=1, heads=1))
    ledger = ledger_of(pool, ["C", "A"])
    row_c, row_a = ledger.rows(["C", "A"])
    truths = start(pool, {row_a: 5, row_c: 3})
    late = Batch(pool, [Row(5, row_a, 3), Row(3, row_c, 2)])
    owners = Owners(pool.int32(ledger.generations(["A", "C"])), ledger.generation)
    verify(late)
    ledger.release("A")
    assert ledger.admit("B") == row_a
    truths[row_c].step(late.windows(1), 2)
    truths |= start(pool, {row_a: 8})
    run_step(Batch(pool, [Row(8, row_a, 4)]), truths, [2])
    return pool, ledger, late, owners, truths


@pytest.mark.parametrize("how", ["deferred", "eager row", "folded"])
def test_a_late_commit_changes_nothing_of_the_new_owner(backend_device, how):
    """B keeps its pending count and its records, A's old slot its bytes; the neighbour in the batch is committed."""
    pool, ledger, late, owners, truths = reused_row(backend_device)
    before = Snapshot(pool)
    eager = torch.tensor([1, 0], dtype=torch.uint8, device=pool.device) if how == "eager row" else None
    commit(late, [3, 2], deferred=how != "folded", eager=eager, owners=owners)
    row_b, row_c = ledger.rows(["B", "C"])
    assert pool.errors() == {"stale_generation": 1}
    assert before.changed(slots=[3] if how == "folded" else [], pending=True) == []
    assert pool.pending[row_b] == 2
    if how != "folded":
        drain(pool, [3], [row_c])
    drain(pool, [8], [row_b])
    truths[row_c].assert_state(pool, 3)
    truths[row_b].assert_state(pool, 8)


@pytest.mark.parametrize("method", ["flush", "drain", "flush of a step object"])
def test_a_late_flush_or_drain_folds_nothing_of_the_new_owner(backend_device, method):
    """B's records stay out of A's old slot, and stay pending."""
    pool, ledger, late, owners, truths = reused_row(backend_device)
    before, row_b = Snapshot(pool), ledger.row("B")
    if method == "flush of a step object":
        who = (late.record_rows, pool.pending, None, pool.context, late.state_indices)
        KDARecoverSSMDeferred(*who, owners=owners).flush()
    else:
        getattr(pool.context, method)(late.state_indices, late.record_rows, pool.pending, owners)
    assert pool.errors() == {"stale_generation": 1}
    assert before.changed() == []
    drain(pool, [8], [row_b])
    truths[row_b].assert_state(pool, 8)


def test_a_row_that_was_only_released_is_late_as_well(backend_device):
    """Its slot may be somebody else's already, though nobody has its record row."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    ledger = ledger_of(pool, ["A"])
    row = ledger.row("A")
    start(pool, {row: 5})
    batch = Batch(pool, [Row(5, row, 2)])
    owners = Owners(pool.int32(ledger.generations(["A"])), ledger.generation)
    verify(batch)
    ledger.release("A")
    before = Snapshot(pool)
    commit(batch, [2], deferred=False, owners=owners)
    assert before.changed() == [] and pool.errors() == {"stale_generation": 1}


def test_generation_zero_is_not_compared(backend_device):
    """Rows staged without a generation are taken as they are."""
    pool, _, late, owners, _ = reused_row(backend_device)
    owners.staged.zero_()
    commit(late, [3, 2], owners=owners)
    assert pool.errors() == {}
    assert pool.pending[late.rows[0].row] == 3


def test_checked_mode_names_the_late_row(backend_device):
    """It raises before the launch, with the row and both generations."""
    backend_device.spare(True)
    pool, _, late, owners, _ = reused_row(backend_device)
    object.__setattr__(pool.context, "check", True)
    with pytest.raises(ValueError, match=r"^owners.staged, row 0: expected generation 3, .* record row 1, got 1$"):
        commit(late, [3, 2], owners=owners)
    with pytest.raises(ValueError, match=r"^owners.staged, row 0"):
        pool.context.drain(late.state_indices, late.record_rows, pool.pending, owners)


def test_owners_are_checked_like_every_argument():
    """Too short, of another dtype, without record rows, or no Owners at all: refused by name."""
    pool = Pool(Target("torch", "cpu"), Target("torch", "cpu").shape(layers=1, heads=1))
    batch, good = Batch(pool, [Row(3, 0, 1), Row(4, 1, 1)]), pool.int32([1] * 6)
    for owners, name in (
        (Owners(pool.int32([1]), good), "owners.staged"),
        (Owners(good, pool.int32([1, 1])), "owners.current"),
        (Owners(good.long(), good), "owners.staged"),
        ((good, good), "owners"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected"):
            commit(batch, [1, 1], owners=owners)
    with pytest.raises(ValueError, match=r"^record_rows: .*owners is given"):
        commit(batch, [1, 1], deferred=False, record_rows=None, owners=Owners(good, good))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replay"])
def test_a_row_released_between_staging_and_commit_is_skipped(backend_device, captured):
    """The runner compares what was staged with the ledger as it is when the commit runs (B24, B30)."""
    backend_device.spare(captured)
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    ledger = ledger_of(pool, "abc")
    truths = start(pool, {row: 3 + row for row in range(3)})
    inputs = StepInputs(6, pool.shape.query_len, pool.device, ledger=ledger)
    runner = CommitRunner(pool.context, ledger.pending, inputs, [6])
    if captured:
        runner.capture(progress=False)
    batch = Batch(pool, [Row(3 + row, row, 3) for row in range(3)])
    inputs.stage(
        num_reqs=3, state_indices=[3, 4, 5], record_rows=ledger.rows("abc"), query_start_loc=batch.starts,
        num_accepted_tokens=[3, 3, 2], generation=ledger.generations("abc"),
    )  # fmt: skip
    verify(batch)
    ledger.release("b")
    before = Snapshot(pool)
    if captured:
        runner.commit(3)
    else:
        runner._commit(3)
    assert pool.errors() == {"stale_generation": 1}
    assert ledger.pending.tolist() == [3, 0, 2, 0, 0, 0]
    assert before.changed(pending=True) == []
    for row, accepted in ((0, 3), (2, 2)):
        truths[row].step(batch.windows(row), accepted)
        drain(pool, [3 + row], [row])
        truths[row].assert_state(pool, 3 + row)


@pytest.mark.parametrize("mode", ["flush", "drain"])
def test_a_runner_folds_nothing_of_who_got_a_row_since_its_staging(backend_device, mode):
    """B's row went to C, which has records pending in a slot of its own; A beside it is folded."""
    backend_device.spare(mode == "flush")
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    ledger = ledger_of(pool, "AB")
    row_a, row_b = ledger.rows("AB")
    truths = start(pool, {row_a: 3, row_b: 4})
    inputs = StepInputs(6, pool.shape.query_len, pool.device, ledger=ledger)
    runner = CommitRunner(pool.context, ledger.pending, inputs, [6])
    runner.capture(progress=False, modes=[mode])
    run_step(Batch(pool, [Row(3, row_a, 4), Row(4, row_b, 4)]), truths, [3, 2])
    inputs.stage(
        num_reqs=2, state_indices=[3, 4], record_rows=[row_a, row_b], query_start_loc=[0, 0, 0],
        generation=ledger.generations("AB"),
    )  # fmt: skip
    ledger.release("B")
    assert ledger.admit("C") == row_b
    truths |= start(pool, {row_b: 8})
    run_step(Batch(pool, [Row(8, row_b, 4)]), truths, [2])
    before = Snapshot(pool)
    getattr(runner, mode)(2)
    assert pool.errors() == {"stale_generation": 1}
    assert before.changed(slots=[3], pending=True) == []
    assert (pool.pending[row_a], pool.pending[row_b]) == (3 if mode == "flush" else 0, 2)
    truths[row_a].assert_state(pool, 3)
    drain(pool, [8], [row_b])
    truths[row_b].assert_state(pool, 8)


def test_a_late_row_is_padding_from_its_staging_on(backend_device):
    """A verify of the staged rows then reads nothing of the new owner's records, and folds nothing."""
    pool, ledger, late, owners, truths = reused_row(backend_device)
    inputs = StepInputs(6, pool.shape.query_len, pool.device, ledger=ledger)
    before, row_b = Snapshot(pool), ledger.row("B")
    inputs.stage(
        num_reqs=2, state_indices=[5, 3], record_rows=[row_b, 0], query_start_loc=[0, 3, 3],
        generation=owners.staged.tolist(), num_accepted_tokens=[3, 0],
    )  # fmt: skip
    assert inputs.state_indices.tolist() == [0, 3, 0, 0, 0, 0]
    assert inputs.record_rows.tolist() == [-1, 0, -1, -1, -1, -1]
    assert inputs.num_accepted_tokens.tolist() == [0] * 6
    late.state_indices, late.record_rows = inputs.rows(2).state_indices, inputs.rows(2).record_rows
    late.query_start_loc = inputs.rows(2).query_start_loc
    verify(late)
    assert pool.errors() == {"stale_generation": 1}
    assert before.changed(slots=[3], rows=[0]) == []
    drain(pool, [8], [row_b])
    truths[row_b].assert_state(pool, 8)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replay"])
def test_a_late_row_of_a_decode_step_turns_into_padding(backend_device, captured):
    """Rows stay staged over many replays: one whose record row got a new owner moves none of its pending counts."""
    backend_device.spare(True)
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    ledger = ledger_of(pool, "CA")
    row_c, row_a = ledger.rows("CA")
    inputs, nothing = StepInputs(2, pool.shape.query_len, pool.device, ledger=ledger), pool.int32([0, 0])

    def verify_nothing(rows):
        return rows.record_rows.clone()

    def accept_nothing(rows, verified):
        return Sampled(nothing, nothing)

    step = DecodeStep(pool.context, ledger.pending, inputs, verify_nothing, accept_nothing)
    if captured:
        step.capture(progress=False)
    run = step.replay if captured else step.run
    inputs.stage(
        num_reqs=2, state_indices=[5, 3], record_rows=[row_a, row_c], query_start_loc=[0, 0, 0],
        generation=ledger.generations("AC"),
    )  # fmt: skip
    run(2)
    assert step.outputs[0].tolist() == [row_a, row_c]
    ledger.release("A")
    assert ledger.admit("B") == row_a
    truths = start(pool, {row_a: 8})
    run_step(Batch(pool, [Row(8, row_a, 4)]), truths, [2])
    before = Snapshot(pool)
    run(2)
    assert step.outputs[0].tolist() == inputs.record_rows.tolist() == [-1, row_c]
    assert pool.errors() == {"stale_generation": 1}
    assert before.changed() == []
    drain(pool, [8], [row_a])
    truths[row_a].assert_state(pool, 8)


def test_admissions_do_not_disturb_a_recording():
    """Generation and pending keep their addresses, so a recorded commit sees every later owner."""
    pool = Pool(Target("torch", "cpu"), Target("torch", "cpu").shape(layers=1, heads=1))
    ledger = ledger_of(pool, ["A"])
    accepted, slots, rows, offsets = (pool.int32(v) for v in ([2], [3], [0], [0, 2]))
    staged = pool.int32(ledger.generations(["A"]))

    def late():
        pool.context.commit(
            accepted, slots, offsets, record_rows=rows, pending=ledger.pending,
            owners=Owners(staged, ledger.generation),
        )  # fmt: skip

    recording = record(late, device="cpu")
    recording.replay()
    assert ledger.pending.tolist()[0] == 2
    ledger.release("A")
    ledger.admit("B")
    recording.replay()
    assert ledger.pending.tolist()[0] == 0
    staged.copy_(pool.int32(ledger.generations(["B"])))
    recording.replay()
    assert ledger.pending.tolist()[0] == 2


def test_a_ledger_of_another_size_does_not_guard_these_records(backend_device):
    """Rows that it does not have would go uncompared: refused when the parts meet, not at the first late row."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    inputs = StepInputs(2, pool.shape.query_len, pool.device, ledger=RecordSlots(2, pool.device))
    for make in (
        lambda: CommitRunner(pool.context, pool.pending, inputs),
        lambda: DecodeStep(pool.context, pool.pending, inputs, print, print),
    ):
        with pytest.raises(ValueError, match=r"^inputs: expected a ledger of 6 rows, .*got one of 2"):
            make()


def test_checked_mode_names_what_a_staging_would_skip(monkeypatch):
    """A late row, and a request that there is not, raise before anything is staged; without it they are counted."""
    ledger = RecordSlots(3, "cpu")
    inputs = StepInputs(3, 4, "cpu", ledger=ledger)
    ledger.admit("A")
    late = ledger.generations(["A"])
    ledger.release("A")
    row = ledger.admit("B")
    good = {"num_reqs": 2, "state_indices": [0, 5], "record_rows": [-1, row], "num_accepted_tokens": [1, 1]}
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    inputs.stage(**good, generation=[1, *ledger.generations(["B"])], request_indices=[9, 1])
    with pytest.raises(ValueError, match=r"^generation, row 1: expected 3, .*record row 0, got 1$"):
        inputs.stage(**good, generation=[0, *late])
    with pytest.raises(ValueError, match=r"^request_indices, row 1: expected 0..1, got 2$"):
        inputs.stage(**good, request_indices=torch.tensor([0, 2], dtype=torch.int32))
    assert inputs.generation.tolist() == [1, 3, 0]
    monkeypatch.delenv("GRAPHRT_CHECK")
    inputs.stage(**good, generation=[0, *late])
    assert inputs.record_rows.tolist() == [-1, -1, -1]


def test_checked_mode_names_the_bad_value_before_a_step_is_replayed():
    """A late row, a row twice, a slot past the pool and offsets that span too much, of an otherwise recorded step."""
    pool = Pool(Target("torch", "cpu"), Target("torch", "cpu").shape(layers=1, heads=1))
    object.__setattr__(pool.context, "check", True)
    ledger, nothing = ledger_of(pool, "AC"), pool.int32([0, 0])
    (row_a, row_c), q = ledger.rows("AC"), pool.shape.query_len
    inputs = StepInputs(2, q, pool.device, ledger=ledger)
    step = DecodeStep(
        pool.context,
        ledger.pending,
        inputs,
        lambda rows: rows.record_rows.clone(),
        lambda r, v: Sampled(nothing, nothing),
    )
    step.capture(progress=False)
    good = {
        "num_reqs": 2, "state_indices": [5, 3], "record_rows": [row_a, row_c], "query_start_loc": [0, 0, 0],
        "generation": ledger.generations("AC"),
    }  # fmt: skip
    inputs.stage(**good)
    step.replay(2)
    before = Snapshot(pool)
    for change, words in (
        ({"record_rows": [row_a, row_a], "generation": None}, "record_rows, row 1"),
        ({"state_indices": [5, 12]}, "state_indices, row 1"),
        ({"query_start_loc": [0, q + 1, q + 1]}, "query_start_loc, row 0"),
    ):
        inputs.stage(**good | change)
        with pytest.raises(ValueError, match=f"^{words}: "):
            step.replay(2)
    inputs.stage(**good)
    ledger.release("A")
    with pytest.raises(ValueError, match=r"^owners.staged, row 0: "):
        step.replay(2)
    assert before.changed() == [] and pool.errors() == {}
