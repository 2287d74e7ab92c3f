"""A request's life: admit, absence, preemption, resumption, release, and what a row or a slot takes along."""

import random

import pytest
import torch
from rig import Pool, Snapshot, Target, same_bytes
from steps import Batch, Row, Tokens, commit, conv_verify, core_verify, drain, verify
from truth import Truth, check_step, run_step, start

from graphrt import RecordSlots

CPU = torch.device("cpu")


def served(target, names="", **shape):
    """A pool with a ledger whose pending counts it uses, and these requests admitted."""
    pool = Pool(target, target.shape(**({"layers": 1, "heads": 1} | shape)))
    ledger = RecordSlots(pool.shape.rows, torch.device(pool.device))
    pool.pending = ledger.pending
    for name in names:
        ledger.admit(name)
    return pool, ledger


@pytest.mark.parametrize("moved", [False, True], ids=["same slot", "another slot"])
def test_a_preempted_request_goes_on_where_it_was(backend_device, moved):
    """Drained to its slot, its row lent to another meanwhile, resumed in a new row, it is the oracle's."""
    pool, ledger = served(backend_device, "A")
    truths = start(pool, {ledger.row("A"): 5})
    truth = truths[ledger.row("A")]
    run_step(Batch(pool, [Row(5, ledger.row("A"), 4)]), truths, [3])
    lent = ledger.row("A")
    ledger.preempt("A", pool.context, 5)
    truth.assert_state(pool, 5)
    for name in range(pool.shape.rows):
        ledger.admit(name)
    with pytest.raises(RuntimeError, match="no record row is free"):
        ledger.resume("A")
    run_step(Batch(pool, [Row(7, lent, 4)]), start(pool, {lent: 7}), [4])
    for name in range(pool.shape.rows):
        ledger.release(name)
    ledger.admit("another")
    row, slot = ledger.resume("A"), 9 if moved else 5
    assert row != ledger.row("another") and pool.pending[row] == 0
    if moved:
        pool.context.copy_state(5, 9, row, pool.pending)
        pool.poison(5)
    run_step(Batch(pool, [Row(slot, row, 3)]), {row: truth}, [2])
    drain(pool, [slot], [row])
    truth.assert_state(pool, slot)


def test_a_preemption_without_a_slot_drops_what_is_pending(backend_device):
    """Nothing is folded anywhere, and the row is clean for the next request."""
    pool, ledger = served(backend_device, "A")
    row = ledger.row("A")
    run_step(Batch(pool, [Row(5, row, 4)]), start(pool, {row: 5}), [3])
    before = Snapshot(pool)
    ledger.preempt("A")
    assert before.changed(pending=True) == [] and pool.pending.tolist() == [0] * 6


def test_a_preemption_into_a_slot_that_there_is_not_loses_nothing(backend_device):
    """What is pending has nowhere to go: refused before the count is dropped, and the request keeps its row."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    ledger = RecordSlots(pool.shape.rows, torch.device(pool.device))
    ledger.admit("A")
    ledger.pending.fill_(2)
    for slot in (pool.shape.slots, 0, -1, True, 2.0):
        with pytest.raises(ValueError, match=rf"^slot: expected a live state slot, 1..{pool.shape.slots - 1}, got"):
            ledger.preempt("A", pool.context, slot)
    with pytest.raises(ValueError, match=r"^context: expected a StateAccess, got int"):
        ledger.preempt("A", 3, 1)
    assert ledger.row("A") >= 0 and ledger.pending.tolist() == [2] * pool.shape.rows


def test_an_absent_request_keeps_row_records_and_count(backend_device):
    """B is away for steps in which others use every other row, and is the oracle's when it returns (B20)."""
    pool, ledger = served(backend_device, "AB")
    a, b = ledger.rows("AB")
    truths = start(pool, {a: 5, b: 6})
    run_step(Batch(pool, [Row(5, a, 3), Row(6, b, 4)]), truths, [3, 2])
    for _ in range(3):
        run_step(Batch(pool, [Row(5, a, 4)]), truths, [1])
    assert pool.pending[b] == 2
    run_step(Batch(pool, [Row(6, b, 2), Row(5, a, 1)]), truths, [1, 1])
    drain(pool, [5, 6], [a, b])
    truths[a].assert_state(pool, 5)
    truths[b].assert_state(pool, 6)


def test_misuse_of_the_ledger_says_the_way_out():
    """Each wrong order raises a sentence that names the request and what to do; nothing changes."""
    ledger = RecordSlots(2, CPU)
    ledger.admit("a")
    ledger.admit("waits")
    ledger.preempt("waits")
    for call, error, words in (
        (lambda: ledger.admit("a"), ValueError, r"'a' owns record row 0 already; release it first"),
        (lambda: ledger.admit("waits"), ValueError, r"'waits' was preempted; resume it, or release it first"),
        (lambda: ledger.resume("a"), ValueError, r"'a' owns a row, and needs none"),
        (lambda: ledger.resume("b"), ValueError, r"'b' was never preempted; admit it"),
        (lambda: ledger.preempt("b"), KeyError, r"'b' owns no record row: admit it first"),
        (lambda: ledger.row("waits"), KeyError, r"'waits' owns no record row: it was preempted, resume it first"),
        (lambda: ledger.release("b"), KeyError, r"'b' is not in the ledger: it was released already, or never"),
        (lambda: ledger.preempt("a", slot=3), ValueError, r"^context: expected context and slot together"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert (ledger.row("a"), len(ledger), ledger.num_preempted, ledger.num_free) == (0, 1, 1, 1)
    ledger.release("waits")
    assert ledger.num_preempted == 0
    with pytest.raises(ValueError, match="'waits' was never preempted"):
        ledger.resume("waits")


def test_every_way_out_gives_the_row_back():
    """A thousand requests that finish, abort, are preempted, resumed or swept by a reset leak no row (B26)."""
    ledger, rng, live, waiting = RecordSlots(7, CPU), random.Random(5), set(), set()
    for name in range(1000):
        if ledger.num_free:
            ledger.admit(name)
            live.add(name)
        act = rng.choice(("finish", "preempt", "resume", "drop", "reset", "stay"))
        if act == "finish" and live:
            ledger.release(live.pop())
        elif act == "preempt" and live:
            waiting.add(gone := live.pop())
            ledger.preempt(gone)
        elif act == "resume" and waiting and ledger.num_free:
            live.add(back := waiting.pop())
            ledger.resume(back)
        elif act == "drop" and waiting:
            ledger.release(waiting.pop())
        elif act == "reset" and rng.random() < 0.1:
            ledger.reset()
            live, waiting = set(), set()
        assert len(set(ledger.rows(live))) == len(live) == 7 - ledger.num_free
        assert ledger.num_preempted == len(waiting)
        assert ledger.generation.tolist() == ledger.contents()["generations"]
    ledger.reset()
    assert sorted(ledger.admit(f"again {i}") for i in range(7)) == list(range(7))


def test_a_slot_that_nobody_wrote_is_named_in_checked_mode(backend_device):
    """A request on a poisoned block raises before its verify; once zeroed, it is the oracle's from nothing (B28).

    Unchecked, a verify cannot tell a state that nobody wrote from any other: slots are the engine's.
    """
    backend_device.spare(True)
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1), check=True)
    pool.fill(4)
    batch = Batch(pool, [Row(4, 1, 2), Row(5, 0, 2)])
    with pytest.raises(ValueError, match=r"^checkpoint_state, row 1: expected .* in slot 5.*zero_state"):
        core_verify(batch, 0, deferred=True, check=True)
    pool.context.zero_state(5)
    core_verify(batch, 0, deferred=True, check=True)
    pool.context.commit(
        pool.int32([0, 0]), batch.state_indices, batch.query_start_loc, record_rows=batch.record_rows,
        pending=pool.pending,
    )  # fmt: skip
    truths = {1: Truth(pool, 4), 0: Truth(pool, 5)}
    assert not any(bool(part.ne(0).any()) for part in pool.state(5, 0))
    run_step(Batch(pool, [Row(4, 1, 2), Row(5, 0, 2)]), truths, [1, 2])
    drain(pool, [5], [0])
    truths[0].assert_state(pool, 5)


def test_a_count_of_a_wider_step_commits_the_window_of_its_own(backend_device):
    """Four tokens, then two with a count of three: two are committed, the older records behind them never (B32)."""
    pool, _ = served(backend_device)
    truths = start(pool, {0: 3})
    run_step(Batch(pool, [Row(3, 0, 4)]), truths, [4])
    batch = Batch(pool, [Row(3, 0, 2)])
    check_step(batch, verify(batch), truths, [2])
    commit(batch, [3])
    assert pool.pending[0] == 2 and pool.errors() == {"accepted": 1}
    drain(pool, [3], [0])
    truths[0].assert_state(pool, 3)
    object.__setattr__(pool.context, "check", True)
    with pytest.raises(ValueError, match=r"^num_accepted_tokens, row 0: expected 0..2, its query length, got 3"):
        commit(batch, [3])


def test_a_window_that_is_taken_back_whole_leaves_no_trace(backend_device):
    """Six tokens, four that nobody accepts, four of which two stand: state, history and outputs are those of the six
    and the two (B33).
    """
    pool, _ = served(backend_device)
    truths = start(pool, {0: 3})
    for accepted in (4, 2, 0, 2):
        run_step(Batch(pool, [Row(3, 0, 4)]), truths, [accepted])
    drain(pool, [3], [0])
    assert truths[0].position == 8
    truths[0].assert_state(pool, 3)


def test_a_fold_takes_the_records_of_the_verify_before_it(backend_device):
    """Windows of four tokens, one, three and two: older records stay behind those of each, and are never folded
    (B35).
    """
    pool, _ = served(backend_device)
    truths = start(pool, {0: 3})
    for tokens, accepted in ((4, 4), (1, 1), (3, 1), (2, 2)):
        run_step(Batch(pool, [Row(3, 0, tokens)]), truths, [accepted])
        assert pool.pending[0] == accepted
    drain(pool, [3], [0])
    assert truths[0].position == 8
    truths[0].assert_state(pool, 3)


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "folded"])
@pytest.mark.parametrize("accepted", range(5))
def test_the_history_follows_every_accepted_count(backend_device, accepted, deferred):
    """The convolution history is byte for byte the last accepted inputs, over two steps and the fold (B36)."""
    backend_device.spare(accepted in (1, 3) or not deferred)
    pool, _ = served(backend_device)
    truths = start(pool, {0: 3})
    for count in (accepted, 4 - accepted):
        batch = Batch(pool, [Row(3, 0, 4)])
        check_step(batch, verify(batch), truths, [count])
        commit(batch, [count], deferred=deferred)
    drain(pool, [3], [0])
    truths[0].assert_state(pool, 3)


@pytest.mark.parametrize("how", ["deferred", "folded"])
@pytest.mark.parametrize("placeholder", [0.0, 3e4, float("nan")])
def test_placeholders_behind_the_only_real_token_leave_no_trace(backend_device, placeholder, how):
    """A full window of which one token is real: state, history and its record are those of that token alone (B37)."""
    backend_device.spare(placeholder == 0 or how == "folded")
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    truths = start(pool, {0: 3})
    twin = pool.twin()
    batch = Batch(pool, [Row(3, 0, 4)])
    padded = [tokens.clone() for tokens in batch.tokens]
    for tokens in padded:
        for part in vars(tokens).values():
            part[1:] = placeholder
    other = Batch(twin, batch.rows, tokens=padded)
    for one in (batch, other):
        verify(one)
        commit(one, [1], deferred=how == "deferred")
        drain(one.pool, [3], [0])
    truths[0].step(batch.windows(0), 1)
    truths[0].assert_state(twin, 3)
    for mine, theirs in zip(pool.state(3, 0), twin.state(3, 0), strict=True):
        assert same_bytes(mine, theirs)
    assert same_bytes(pool.records(0).correction[0, :, 0], twin.records(0).correction[0, :, 0])


def test_all_ways_to_commit_leave_the_same_state(backend_device):
    """Deferred and drained, eager row, folded at once: one trace, the same bytes (B39, B96)."""
    backend_device.spare(True)
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    start(pool, {0: 3, 1: 4})
    others = [pool.twin(), pool.twin()]
    for counts in ([3, 0], [1, 4], [0, 2]):
        batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)])
        every = torch.ones(2, dtype=torch.bool, device=pool.device)
        verify(batch)
        commit(batch, counts)
        for which, options in zip(others, ({"eager": every}, {"deferred": False}), strict=True):
            verify(batch.on(which))
            commit(batch.on(which), counts, **options)
    drain(pool, [3, 4], [0, 1])
    for which in others:
        for slot in (3, 4):
            for mine, theirs in zip(pool.state(slot, 0), which.state(slot, 0), strict=True):
                assert same_bytes(mine, theirs)


@pytest.mark.parametrize("method", ["flush", "drain"])
def test_a_fold_between_verify_and_commit_is_a_wrong_order(backend_device, method):
    """Checked mode refuses it, for the records are those of the open step already (B39, B91)."""
    backend_device.spare(True)
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1), check=True)
    start(pool, {0: 3, 1: 4})
    batch = Batch(pool, [Row(3, 0, 2)])
    core_verify(batch, 0, deferred=True, check=True)
    call = getattr(pool.context, method)
    with pytest.raises(RuntimeError, match=r"^record row 0 was verified and not committed"):
        call(pool.int32([4, 3]), pool.int32([1, 0]), pool.pending)
    call(pool.int32([4]), pool.int32([1]), pool.pending)
    commit(batch, [0])
    call(pool.int32([3]), pool.int32([0]), pool.pending)


def test_rows_of_every_kind_share_a_batch(backend_device):
    """Two windows, one token with records pending, and a prefill of seven tokens in two windows (B50).

    A row that does not verify has a count that is not read.
    """
    backend_device.spare(True)
    pool, _ = served(backend_device)
    truths = start(pool, {0: 3, 1: 4, 2: 5})
    run_step(Batch(pool, [Row(5, 2, 3)]), truths, [2])
    prefill = start(pool, {3: 6}, zero=True)[3]
    truths[3] = prefill
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        rows = {0: (Row(3, 0, 4), 3), 1: (Row(4, 1, 4), 0), 2: (Row(5, 2, 1), 1), 3: (Row(6, 3, 4), 4)}
        if order[0] == 3:
            rows[3] = (Row(6, 3, 3), 3)
        run_step(Batch(pool, [rows[i][0] for i in order]), truths, [rows[i][1] for i in order])
    batch = Batch(pool, [Row(3, 0, 1), Row(0, -1, 0), Row(4, 1, 0)])
    check_step(batch, verify(batch), {0: truths[0], 2: truths[1]}, [1, 0, 0])
    commit(batch, [1, -7, 0])
    assert pool.errors() == {}
    drain(pool, [3, 4, 5, 6], [0, 1, 2, 3])
    for row, slot in ((0, 3), (1, 4), (2, 5), (3, 6)):
        truths[row].assert_state(pool, slot)


def test_state_slots_may_be_a_column_of_a_wide_table(backend_device):
    """Slots, rows, offsets, requests and pending as column 0 of tables full of absurd ids give the same bytes (B51)."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    start(pool, {0: 3, 1: 4})
    twin = pool.twin()
    tokens = [Tokens.random(pool.shape, 6, 0, pool.device)]
    pool.pending = pool.int32(pool.pending.tolist(), wide=True)
    for which, wide in ((pool, True), (twin, False)):
        batch = Batch(which, [Row(3, 0, 4), Row(4, 1, 2)], wide=wide, tokens=tokens)
        for _ in range(2):
            core_verify(batch, 0, deferred=True)
            conv_verify(batch, 0, deferred=True)
            commit(batch, [2, 1], request_indices=which.int32([1, 0], wide=wide))
        which.context.drain(batch.state_indices, batch.record_rows, which.pending)
    for name, mine in pool.tensors().items():
        assert same_bytes(mine, twin.tensors()[name]), name


def test_two_batches_in_flight_commit_their_own_counts(backend_device):
    """verify A, verify B, commit A, verify A again, commit B; a row of A freed before its commit is untouched (B30)."""
    backend_device.spare(True)
    pool, ledger = served(backend_device, "abcd")
    truths = start(pool, {row: 3 + row for row in range(4)})
    first = Batch(pool, [Row(3, 0, 3), Row(4, 1, 3)])
    second = Batch(pool, [Row(5, 2, 4), Row(6, 3, 2)])
    check_step(first, verify(first), {0: truths[0]}, [2, 0])
    check_step(second, verify(second), {0: truths[2], 1: truths[3]}, [4, 1])
    ledger.release("b")
    freed = [t.clone() for t in (pool.checkpoint(0)[4], pool.records(0).correction[1])]
    late = Batch(pool, [Row(3, 0, 3), Row(4, -1, 3)], tokens=first.tokens)
    commit(late, [2, 3])
    again = Batch(pool, [Row(3, 0, 4)])
    check_step(again, verify(again), {0: truths[0]}, [1])
    commit(second, [4, 1])
    commit(again, [1])
    assert pool.pending.tolist() == [1, 0, 4, 1, 0, 0]
    for before, now in zip(freed, (pool.checkpoint(0)[4], pool.records(0).correction[1]), strict=True):
        assert same_bytes(before, now)
    drain(pool, [3, 5, 6], [0, 2, 3])
    for row in (0, 2, 3):
        truths[row].assert_state(pool, 3 + row)


def test_a_verify_without_commit_is_named_by_row():
    """Checked mode raises at the second verify, and at once when the row has a new owner it does not (B39)."""
    pool, ledger = served(Target("torch", "cpu"), "ab")
    start(pool, {0: 3, 1: 4})
    batch = Batch(pool, [Row(3, 0, 2), Row(4, 1, 2)])
    core_verify(batch, 0, deferred=True, check=True)
    with pytest.raises(RuntimeError, match=r"^record row 0 was verified and not committed: commit the step first"):
        core_verify(batch, 0, deferred=True, check=True)
    ledger.release("a")
    ledger.admit("c")
    core_verify(Batch(pool, [Row(3, ledger.row("c"), 2)]), 0, deferred=True, check=True)
