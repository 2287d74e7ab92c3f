"""Values only the device can see: each is clamped to something harmless, and counted by kind.

Every case runs a step with a hostile value on one pool and the harmless step it must equal on a twin, and
compares every byte of memory and every output.
"""

import pytest
import torch
from rig import Pool, Snapshot, Target, same_bytes
from steps import Batch, Row, commit, conv_verify, core_verify, drain, verify
from truth import check_step, run_step, start

HUGE = 1 << 30
LOW = -(1 << 31)


def pending_pool(target, **changes):
    """Requests in rows 0, 1, 2 and slots 3, 4, 5 with all four tokens pending; row 3 and slot 6 are a
    stranger's.
    """
    pool = Pool(target, target.shape(**({"layers": 1, "heads": 1} | changes)))
    truths = start(pool, {0: 3, 1: 4, 2: 5, 3: 6})
    run_step(Batch(pool, [Row(slot, row, 4) for row, slot in ((0, 3), (1, 4), (2, 5), (3, 6))]), truths, [4] * 4)
    return pool


def assert_twins(pool, twin):
    """Two pools hold the same bytes, the scratch row of the records aside."""
    for name, mine in pool.tensors().items():
        assert same_bytes(mine, twin.tensors()[name]), name


def step_rows(slot=4, row=1):
    """The three requests; the middle one with a slot and record row of the test's choice."""
    return [Row(3, 0, 4), Row(slot, row, 2), Row(5, 2, 3)]


CASES = [
    pytest.param({"slot": HUGE}, {"slot": 0}, "slot", id="slot far out"),
    pytest.param({"slot": 12}, {"slot": 0}, "slot", id="slot one past the pool"),
    pytest.param({"row": 6}, {"row": -1}, "row", id="row one past the records"),
    pytest.param({"row": -2}, {"row": -1}, "row", id="row below scratch"),
    pytest.param({"row": HUGE}, {"row": -1}, "row", id="row far out"),
    pytest.param({"row": LOW}, {"row": -1}, "row", id="row far below scratch"),
]


@pytest.mark.parametrize(("hostile", "harmless", "kind"), CASES)
def test_a_slot_or_row_out_of_range_is_null_or_scratch_in_a_deferred_step(backend_device, hostile, harmless, kind):
    """Verify and commit treat it so; strangers and neighbours keep the bytes of the harmless step."""
    backend_device.spare(LOW in hostile.values())
    pool = pending_pool(backend_device)
    twin = pool.twin()
    batch = Batch(pool, step_rows(**hostile))
    same = Batch(twin, step_rows(**harmless), tokens=batch.tokens)
    got, want = verify(batch)[0], verify(same)[0]
    for span in (batch.span(0), batch.span(2)):
        assert same_bytes(got.out[span], want.out[span]) and same_bytes(got.conv[span], want.conv[span])
    if kind == "slot":
        assert not bool(got.out[batch.span(1)].ne(0).any() | got.conv[batch.span(1)].ne(0).any())
    assert set(pool.errors()) == {kind}
    commit(batch, [1, 2, 3], eager=torch.tensor([0, 1, 1], dtype=torch.uint8, device=pool.device))
    commit(same, [1, 2, 3], eager=torch.tensor([0, 1, 1], dtype=torch.uint8, device=pool.device))
    assert_twins(pool, twin)
    assert set(pool.errors()) == {kind}


@pytest.mark.parametrize(("hostile", "harmless", "kind"), CASES)
@pytest.mark.parametrize("method", ["flush", "drain", "commit", "stock verify"])
def test_a_slot_or_row_out_of_range_is_null_or_scratch_in_every_call(backend_device, hostile, harmless, kind, method):
    """Flush, drain, an eager commit and the stock verify change what the harmless call changes."""
    backend_device.spare(HUGE in hostile.values() or LOW in hostile.values())
    pool = pending_pool(backend_device)
    twin = pool.twin()
    for which, change in ((pool, hostile), (twin, harmless)):
        batch = Batch(which, step_rows(**change))
        if method == "commit":
            commit(batch, [1, 2, 3], deferred=False)
        elif method == "stock verify":
            core_verify(batch, 0, deferred=False)
            conv_verify(batch, 0, deferred=False)
        else:
            getattr(which.context, method)(batch.state_indices, batch.record_rows, which.pending)
    assert set(pool.errors()) == {kind}
    if method != "stock verify":
        assert_twins(pool, twin)
    else:
        assert same_bytes(pool.checkpoint(0), twin.checkpoint(0))


@pytest.mark.parametrize(("value", "meant"), [(5, 4), (HUGE, 4), (-1, 0), (LOW, 0)])
@pytest.mark.parametrize("method", ["verify", "flush", "drain"])
def test_a_pending_count_out_of_range_is_clamped(backend_device, value, meant, method):
    """Counts above Q replay Q records, negative ones none (B38)."""
    backend_device.spare(value in (HUGE, LOW) and method != "verify")
    pool = pending_pool(backend_device)
    twin = pool.twin()
    batch, got = Batch(pool, step_rows()), []
    for which, count in ((pool, value), (twin, meant)):
        which.pending[1] = count
        if method == "verify":
            got.append(verify(batch.on(which))[0])
            commit(batch.on(which), [1, 1, 1])
        else:
            getattr(which.context, method)(batch.state_indices, batch.record_rows, which.pending)
        if method == "flush":
            which.pending[1] = 0
    if method == "verify":
        assert same_bytes(got[0].out, got[1].out) and same_bytes(got[0].conv, got[1].conv)
    assert_twins(pool, twin)
    assert set(pool.errors()) == {"pending"}


@pytest.mark.parametrize("how", ["deferred", "folded", "eager row"])
@pytest.mark.parametrize(("value", "meant"), [(3, 2), (HUGE, 2), (-1, 0), (LOW, 0)])
def test_an_accepted_count_out_of_range_is_clamped_to_the_window(backend_device, how, value, meant):
    """A row of two tokens commits at most these two: older records behind them are never folded."""
    backend_device.spare(value in (HUGE, LOW) and how != "folded")
    pool = pending_pool(backend_device)
    twin = pool.twin()
    batch = Batch(pool, step_rows())
    for which, count in ((pool, value), (twin, meant)):
        step = batch.on(which)
        verify(step)
        eager = torch.tensor([0, 1, 0], dtype=torch.bool, device=which.device) if how == "eager row" else None
        commit(step, [4, count, 3], deferred=how != "folded", eager=eager)
    assert_twins(pool, twin)
    assert set(pool.errors()) == {"accepted"}


@pytest.mark.parametrize("request_index", [3, HUGE, -1, LOW])
@pytest.mark.parametrize("deferred", [False, True], ids=["folded", "deferred"])
def test_a_request_out_of_range_accepts_nothing(backend_device, request_index, deferred):
    """A row whose request does not exist counts as zero accepted; its neighbours get their counts."""
    backend_device.spare(request_index in (HUGE, LOW) and not deferred)
    pool = pending_pool(backend_device)
    twin = pool.twin()
    batch = Batch(pool, step_rows())
    for which, request, counts in ((pool, request_index, [4, 4, 3]), (twin, 1, [4, 0, 3])):
        step = batch.on(which)
        verify(step)
        commit(step, counts, deferred=deferred, request_indices=which.int32([0, request, 2]))
    assert_twins(pool, twin)
    assert set(pool.errors()) == {"request"}


def test_tokens_before_the_first_row_have_zero_outputs(backend_device):
    """Offsets that start above 0 leave tokens to nobody: their outputs are zero too, not what the buffer held."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    start(pool, {0: 3})
    batch = Batch(pool, [Row(3, 0, 4)])
    batch.query_start_loc = pool.int32([2, 4])
    got = verify(batch)[0]
    for out in (got.out, got.conv):
        assert not bool(out[:2].ne(0).any()) and not bool(out[4:].ne(0).any())
        assert bool(out[2:4].isfinite().all())


def test_a_window_longer_than_q_gives_zeros_behind_q(backend_device):
    """Tokens beyond Q of a row have zero outputs; the first Q are the oracle's, and a commit takes at most Q."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {0: 3, 1: 4})
    batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 7)])
    results = verify(batch)
    for got in results:
        assert not bool(got.out[8:].ne(0).any()) and not bool(got.conv[8:].ne(0).any())
    kept = Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)], tokens=batch.tokens)
    # The row's own tail is no batch tail: compare the first eight tokens only.
    kept.starts[-1] = 8
    check_step(kept, results, truths, [1, 4])
    met = pool.errors()
    assert set(met) == {"query_len"}
    commit(batch, [1, 4])
    assert pool.pending.tolist()[:2] == [1, 4]
    assert pool.errors() == {"query_len": met["query_len"] + 1}
    drain(pool, [3, 4], [0, 1])
    truths[0].assert_state(pool, 3)
    truths[1].assert_state(pool, 4)


@pytest.mark.parametrize(
    ("offsets", "meant"),
    [
        ([0, 4, 6, HUGE], [0, 4, 6, 9]),
        ([0, 4, 6, 12], [0, 4, 6, 9]),
        ([-7, 4, 6, 9], [0, 4, 6, 9]),
        ([LOW, 4, 6, 9], [0, 4, 6, 9]),
        ([0, HUGE, HUGE, HUGE], None),
        ([0, 4, 2, 5], None),
        ([9, 6, 4, 0], None),
        ([HUGE, LOW, HUGE, LOW], None),
    ],
    ids=str,
)
def test_offsets_outside_the_tokens_are_clamped(backend_device, offsets, meant):
    """`query_start_loc` stays within [0, T]; the stranger's slot and row keep their bytes, whatever the
    offsets.
    """
    pool = pending_pool(backend_device)
    twin = pool.twin()
    before = Snapshot(pool)
    batch = Batch(pool, step_rows())
    got = []
    for which, values in ((pool, offsets), (twin, meant or offsets)):
        step = batch.on(which)
        step.query_start_loc = which.int32(values)
        got.append(verify(step)[0])
        commit(step, [0, 0, 0])
    if meant is not None:
        assert same_bytes(got[0].out, got[1].out) and same_bytes(got[0].conv, got[1].conv)
        assert_twins(pool, twin)
    assert "query_len" in pool.errors()
    assert before.changed(slots=[3, 4, 5], rows=[0, 1, 2], pending=True) == []
    assert pool.pending[3] == 4


@pytest.mark.parametrize("computed", [32, 47, HUGE, (1 << 31) - 3])
def test_a_column_past_the_table_is_null(backend_device, computed):
    """Positions beyond the table fold nothing and read no memory beside it; the count stays pending."""
    pool = pending_pool(backend_device)
    batch = Batch(pool, step_rows())
    verify(batch)
    before = Snapshot(pool)
    memory = torch.full((3, 6), 6, dtype=torch.int32, device=pool.device)
    memory[:, 2:4] = pool.int32([3, 7, 4, 8, 5, 9]).view(3, 2)
    align = {"block_table": memory[:, 2:4], "num_computed_tokens": pool.int32([5, computed, 6])}
    eager = torch.tensor([0, 1, 0], dtype=torch.bool, device=pool.device)
    commit(batch, [1, 2, 1], eager=eager, mamba_block_size=16, **align)
    assert before.changed(pending=True) == []
    assert pool.pending.tolist() == [1, 2, 1, 4, 0, 0]
    assert pool.errors() == {"column": 1, "eager_null": 1}


def test_negative_positions_reach_no_memory_before_the_table(backend_device):
    """A negative number of computed tokens changes no stranger's block."""
    pool = pending_pool(backend_device)
    batch = Batch(pool, step_rows())
    verify(batch)
    before = Snapshot(pool)
    memory = torch.full((3, 6), 6, dtype=torch.int32, device=pool.device)
    memory[:, 2:4] = pool.int32([3, 7, 4, 8, 5, 9]).view(3, 2)
    align = {"block_table": memory[:, 2:4], "num_computed_tokens": pool.int32([5, -40, LOW])}
    eager = torch.ones(3, dtype=torch.bool, device=pool.device)
    commit(batch, [1, 2, 1], eager=eager, mamba_block_size=16, **align)
    assert before.changed(slots=[3, 4, 5, 7, 8, 9], pending=True) == []
    assert pool.errors() == {"column": 2}


def test_a_destination_out_of_range_is_null(backend_device):
    """An absurd block id in the table folds nothing into anybody's slot and keeps the count."""
    pool = pending_pool(backend_device)
    batch = Batch(pool, step_rows())
    verify(batch)
    before = Snapshot(pool)
    align = {"block_table": pool.int32([3, HUGE, 5]).view(3, 1), "num_computed_tokens": pool.int32([5, 5, 5])}
    eager = torch.tensor([0, 1, 0], dtype=torch.bool, device=pool.device)
    commit(batch, [1, 2, 1], eager=eager, mamba_block_size=16, **align)
    assert before.changed(pending=True) == []
    assert pool.pending.tolist() == [1, 2, 1, 4, 0, 0]
    assert pool.errors() == {"slot": 1, "eager_null": 1}


def test_a_boundary_block_out_of_range_spoils_nobody(backend_device):
    """With a good final block and an absurd boundary block no stranger changes."""
    pool = pending_pool(backend_device)
    batch = Batch(pool, step_rows())
    verify(batch)
    before = Snapshot(pool)
    align = {
        "block_table": pool.int32([HUGE, 7] * 3).view(3, 2),
        "num_computed_tokens": pool.int32([3, 15, 3]),
    }
    commit(batch, [1, 2, 1], mamba_block_size=16, eager=None, **align)
    assert before.changed(slots=[7], pending=True) == []
    assert pool.errors() == {"slot": 1, "eager_missed": 1}


def test_accepting_nothing_is_counted_in_the_engines_layout(backend_device):
    """A verified row that accepts zero has lost an input of its history there: counted, not silent."""
    pool = Pool(backend_device, backend_device.shape(layers=1, engine_layout=True))
    truths = start(pool, {0: 3, 1: 4})
    run_step(Batch(pool, [Row(3, 0, 2), Row(4, 1, 0)]), truths, [1, 0])
    assert pool.errors() == {}
    verify(batch := Batch(pool, [Row(3, 0, 2), Row(4, 1, 0)]))
    commit(batch, [0, 0])
    assert set(pool.errors()) == {"conv_zero_accept"}


def test_the_counter_can_be_read_by_kind_and_reset():
    """Every kind has a count from the start, and a reset brings all back to zero."""
    import graphrt

    pool = pending_pool(Target("torch", "cpu"))
    device = torch.device("cpu")
    kinds = {
        "slot",
        "row",
        "request",
        "accepted",
        "pending",
        "query_len",
        "column",
        "eager_missed",
        "eager_null",
    }
    assert set(graphrt.error_counts(device)) == kinds | {"conv_zero_accept", "stale_generation"}
    verify(Batch(pool, step_rows(slot=HUGE)))
    assert graphrt.error_counts(device)["slot"] > 0
    graphrt.reset_errors(device)
    assert set(graphrt.error_counts(device).values()) == {0}
