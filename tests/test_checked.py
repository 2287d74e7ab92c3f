"""Checked mode: the values are read before the launch, and the first bad one is named with its row."""

import pytest
import torch
from rig import Pool, Snapshot, Target
from steps import Batch, Row, commit, conv_verify, core_verify, verify
from truth import run_step, start

from graphrt import RecordSlots, allocate_records

CPU = Target("torch", "cpu")
HUGE = 1 << 30


@pytest.fixture(params=["keyword", "environment"])
def checked(request, monkeypatch):
    """Keyword arguments of `create` and the verify functions that switch checks on."""
    if request.param == "environment":
        monkeypatch.setenv("GRAPHRT_CHECK", "1")
        return {}
    return {"check": True}


def checked_pool(checked, **changes):
    pool = Pool(CPU, CPU.shape(layers=1, **changes), **checked)
    truths = start(pool, {0: 3, 1: 4})
    batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)])
    for call in (core_verify, conv_verify):
        call(batch, 0, deferred=True, **checked)
    commit(batch, [2, 3])
    return pool, truths


def assert_named(call, *words):
    """The call raises a ValueError with these words in its message."""
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


VERIFY_FAULTS = [
    pytest.param([Row(3, 0, 4), Row(HUGE, 1, 4)], ("state_indices", "1", str(HUGE)), id="slot"),
    pytest.param([Row(3, 0, 4), Row(4, 6, 4)], ("record_rows", "1", "6"), id="row past the records"),
    pytest.param([Row(3, 0, 4), Row(4, -2, 4)], ("record_rows", "1", "-2"), id="row below scratch"),
    pytest.param([Row(3, 1, 4), Row(4, 1, 4)], ("record_rows", "1"), id="one record row twice"),
    pytest.param([Row(3, 0, 4), Row(3, 1, 4)], ("state_indices", "1", "3"), id="one slot twice"),
    pytest.param([Row(3, 0, 4), Row(0, 1, 4)], ("state_indices", "1", "0"), id="record row on the null slot"),
    pytest.param([Row(3, 0, 4), Row(4, 1, 5)], ("query_start_loc", "1", "5"), id="window over Q"),
]


@pytest.mark.parametrize(("rows", "words"), VERIFY_FAULTS)
@pytest.mark.parametrize("deferred", [False, True], ids=["stock", "deferred"])
@pytest.mark.parametrize("which", [core_verify, conv_verify], ids=["kda", "conv"])
def test_a_checked_verify_names_row_and_value(checked, rows, words, deferred, which):
    """Nothing is launched: every byte stays. One record row or slot twice is such a fault (B26)."""
    if which is conv_verify and not deferred and rows[1].row == 6:
        pytest.skip("without pending a convolution verify does not know the number of record rows")
    pool, _ = checked_pool(checked)
    before = Snapshot(pool)
    assert_named(lambda: which(Batch(pool, rows), 0, deferred=deferred, **checked), *words)
    assert before.changed() == []
    assert pool.errors() == {}


OFFSET_FAULTS = [
    pytest.param([1, 4, 8], ("query_start_loc, row 0", "expected 0", "got 1"), id="begin above 0"),
    pytest.param([-1, 3, 7], ("query_start_loc, row 0", "expected 0", "got -1"), id="begin below 0"),
    pytest.param([0, 4, 2], ("query_start_loc, row 1", "got -2"), id="decrease"),
    pytest.param([0, 4, HUGE], ("query_start_loc, row 1", str(HUGE - 4)), id="span over Q"),
]


@pytest.mark.parametrize(("offsets", "words"), OFFSET_FAULTS)
@pytest.mark.parametrize("call", ["verify", "conv", "commit"])
def test_checked_mode_names_offsets_that_are_none(checked, offsets, words, call):
    """Nothing is launched: every byte stays."""
    pool, _ = checked_pool(checked)
    batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)])
    batch.query_start_loc = pool.int32(offsets)
    before = Snapshot(pool)
    calls = {
        "verify": lambda: core_verify(batch, 0, deferred=True, **checked),
        "conv": lambda: conv_verify(batch, 0, deferred=True, **checked),
        "commit": lambda: commit(batch, [1, 1]),
    }
    assert_named(calls[call], *words)
    assert before.changed() == [] and pool.errors() == {}


@pytest.mark.parametrize("call", [core_verify, conv_verify], ids=["kda", "conv"])
def test_checked_mode_names_offsets_past_the_tokens_that_are_given(checked, call):
    """Each window is as long as it may be, and the last one ends behind T."""
    pool, _ = checked_pool(checked)
    batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 2)])
    batch.query_start_loc = pool.int32([0, 4, 8])
    assert_named(lambda: call(batch, 0, deferred=True, **checked), "query_start_loc, row 1", "at most 6", "got 8")


@pytest.mark.parametrize("value", [-1, 5, HUGE])
@pytest.mark.parametrize("call", ["verify", "conv", "flush", "drain"])
def test_checked_mode_names_a_pending_count_out_of_range(checked, value, call):
    """Pending of a row of the step outside 0..Q raises in every call that would replay it (B38)."""
    pool, _ = checked_pool(checked)
    pool.pending[1] = value
    batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)])
    calls = {
        "verify": lambda: core_verify(batch, 0, deferred=True, **checked),
        "conv": lambda: conv_verify(batch, 0, deferred=True, **checked),
        "flush": lambda: pool.context.flush(batch.state_indices, batch.record_rows, pool.pending),
        "drain": lambda: pool.context.drain(batch.state_indices, batch.record_rows, pool.pending),
    }
    assert_named(calls[call], "pending", str(value))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"backend": "no such"}, ("backend", "no such")), ({"conv": "no convolution"}, ("conv", "str"))],
    ids=["backend", "convolution"],
)
def test_a_verify_that_was_refused_leaves_no_row_without_its_commit(checked, wrong, words):
    """Nothing was launched, so the same call with the argument put right is the first verify of its rows."""
    pool, _ = checked_pool(checked)
    batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)])
    assert_named(lambda: core_verify(batch, 0, deferred=True, **(checked | wrong)), *words)
    core_verify(batch, 0, deferred=True, **checked)


COMMIT_FAULTS = [
    pytest.param({"accepted": [1, 5]}, ("num_accepted_tokens", "1", "5"), id="accepted over the window"),
    pytest.param({"accepted": [1, -1]}, ("num_accepted_tokens", "1", "-1"), id="accepted negative"),
    pytest.param({"requests": [0, 2]}, ("request_indices", "1", "2"), id="request past the counts"),
    pytest.param({"requests": [0, -1]}, ("request_indices", "1", "-1"), id="request negative"),
    pytest.param({"rows": [Row(3, 0, 4), Row(12, 1, 4)]}, ("state_indices", "1", "12"), id="slot past the pool"),
    pytest.param({"rows": [Row(3, 0, 4), Row(4, 9, 4)]}, ("record_rows", "1", "9"), id="row past the records"),
    pytest.param({"rows": [Row(3, 1, 4), Row(4, 1, 4)]}, ("record_rows", "1"), id="one record row twice"),
]


@pytest.mark.parametrize(("change", "words"), COMMIT_FAULTS)
@pytest.mark.parametrize("deferred", [False, True], ids=["folded", "deferred"])
def test_a_checked_commit_names_row_and_value(checked, change, words, deferred):
    """Nothing is launched: pending and checkpoints stay."""
    pool, _ = checked_pool(checked)
    verify(Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)]))
    before = Snapshot(pool)
    batch = Batch(pool, change.get("rows", [Row(3, 0, 4), Row(4, 1, 4)]))
    requests = pool.int32(change["requests"]) if "requests" in change else None
    accepted = change.get("accepted", [1, 2])
    assert_named(lambda: commit(batch, accepted, deferred=deferred, request_indices=requests), *words)
    assert before.changed() == []
    assert pool.errors() == {}


def test_a_checked_commit_names_a_verified_row_that_accepts_nothing_where_that_cannot_be(checked):
    """In the engine's layout the verify has shifted an input out of the history: at least one token must stand."""
    pool = Pool(CPU, CPU.shape(layers=1, engine_layout=True), **checked)
    start(pool, {0: 3, 1: 4})
    batch = Batch(pool, [Row(4, 1, 0), Row(3, 0, 4)])
    for call in (core_verify, conv_verify):
        call(batch, 0, deferred=True, **checked)
    before = Snapshot(pool)
    assert_named(lambda: commit(batch, [0, 0]), "num_accepted_tokens, row 1: expected at least 1", "got 0")
    assert before.changed() == [] and pool.errors() == {}
    commit(batch, [0, 1])
    assert pool.pending.tolist()[:2] == [1, 0]


def test_a_checked_commit_names_a_missed_eager_row(checked):
    """In align mode a row that must be eager and is not in the mask raises."""
    pool, _ = checked_pool(checked)
    batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)])
    for call in (core_verify, conv_verify):
        call(batch, 0, deferred=True, **checked)
    align = {"block_table": torch.tensor([[3, 5], [4, 6]], dtype=torch.int32), "mamba_block_size": 16}
    align["num_computed_tokens"] = pool.int32([3, 15])
    assert_named(lambda: commit(batch, [1, 1], **align), "eager", "1")


@pytest.mark.parametrize(
    ("table", "computed", "words"),
    [
        ([3, 5, 4, 6], [3, 31], "block_table"),
        ([3, 5, 4, 0], [3, 15], "block_table"),
        ([3, 5, 4, 6], [3, -1], "computed"),
    ],
    ids=["column past the table", "no block", "negative position"],
)
def test_a_checked_commit_names_a_destination_that_does_not_exist(checked, table, computed, words):
    """Columns past the table, null blocks and negative positions raise with their row."""
    pool, _ = checked_pool(checked)
    batch = Batch(pool, [Row(3, 0, 4), Row(4, 1, 4)])
    align = {"block_table": pool.int32(table).view(2, 2), "num_computed_tokens": pool.int32(computed)}
    eager = torch.tensor([False, True])
    before = Snapshot(pool)
    assert_named(lambda: commit(batch, [1, 2], eager=eager, mamba_block_size=16, **align), words, "row 1")
    assert before.changed() == []


def test_a_checked_step_with_good_values_runs(checked):
    """Padding, dummy and null rows raise nothing, and the results are the oracle's."""
    pool, _ = checked_pool(checked)
    pool.context.drain(pool.int32([3, 4]), pool.int32([0, 1]), pool.pending)
    truths = start(pool, {0: 3, 1: 4})
    for accepted in ([2, 0, 1, 0], [4, 0, 0, 0]):
        run_step(Batch(pool, [Row(3, 0, 4), Row(0, -1, 2), Row(4, 1, 1), Row(3, -1, 2)]), truths, accepted)


def test_unchecked_calls_read_no_values(monkeypatch):
    """Without the switch, and with `GRAPHRT_CHECK=0`, a bad value is clamped and counted."""
    for setting in (None, "0"):
        if setting is None:
            monkeypatch.delenv("GRAPHRT_CHECK", raising=False)
        else:
            monkeypatch.setenv("GRAPHRT_CHECK", setting)
        pool, _ = checked_pool({})
        core_verify(Batch(pool, [Row(3, 0, 4), Row(HUGE, 1, 4)]), 0, deferred=True)
        assert set(pool.errors()) == {"slot"}


def test_the_environment_is_read_at_every_call(monkeypatch):
    """A context made without checks raises while `GRAPHRT_CHECK` is 1, and clamps before and after."""
    pool, _ = checked_pool({})
    batch = Batch(pool, [Row(3, 0, 4), Row(HUGE, 1, 4)])
    verify(batch)
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    assert_named(lambda: commit(batch, [1, 1]), "state_indices", str(HUGE))
    assert_named(lambda: verify(batch), "state_indices", str(HUGE))
    monkeypatch.delenv("GRAPHRT_CHECK")
    commit(batch, [1, 1])
    assert pool.pending.tolist() == [1, 3, 0, 0, 0, 0]


def test_a_second_verify_of_the_same_records_without_a_commit_is_a_wrong_order(checked):
    """Checked mode tells a step that was never committed, but allows two batches in flight."""
    pool, _ = checked_pool(checked)
    core_verify(Batch(pool, [Row(3, 0, 4)]), 0, deferred=True, **checked)
    core_verify(Batch(pool, [Row(4, 1, 4)]), 0, deferred=True, **checked)
    with pytest.raises(RuntimeError):
        core_verify(Batch(pool, [Row(3, 0, 4)]), 0, deferred=True, **checked)


def served_pool(checked, names, **changes):
    """A pool with a ledger of its own, its requests verified and not committed."""
    pool = Pool(CPU, CPU.shape(layers=1, **changes), **checked)
    ledger = RecordSlots(pool.shape.rows, pool.device)
    pool.pending = ledger.pending
    rows = [ledger.admit(name) for name in names]
    start(pool, {row: 3 + row for row in rows})
    core_verify(open_batch(pool, rows), 0, deferred=True, **checked)
    return pool, ledger


def open_batch(pool, rows):
    """Four tokens for each of these record rows."""
    return Batch(pool, [Row(3 + row, row, 4) for row in rows])


@pytest.mark.parametrize("event", ["release", "admit", "preempt", "reset", "load"])
def test_what_one_ledger_does_is_nothing_to_the_rows_of_another(checked, event):
    """Target and draft model in one process: the draft's rows change owners, the target's steps stay open (B91)."""
    target, _ = served_pool(checked, ["a", "b"])
    draft, ledger = served_pool(checked, ["a", "b"], heads=1)
    if event == "release":
        ledger.release("a")
    elif event == "admit":
        ledger.release("a")
        assert ledger.admit("c") == 0
    elif event == "preempt":
        ledger.preempt("a")
    elif event == "reset":
        ledger.reset()
    else:
        other = RecordSlots(draft.shape.rows, draft.device)
        ledger.restore(other.contents())
    for call in (
        lambda: core_verify(open_batch(target, [0]), 0, deferred=True, **checked),
        lambda: target.context.drain(target.int32([3]), target.int32([0]), target.pending),
    ):
        with pytest.raises(RuntimeError, match=r"^record row 0 was verified and not committed"):
            call()
    core_verify(open_batch(draft, [0]), 0, deferred=True, **checked)
    if event in ("release", "admit", "preempt"):
        with pytest.raises(RuntimeError, match=r"^record row 1 was verified"):
            core_verify(open_batch(draft, [1]), 0, deferred=True, **checked)


def test_a_stock_verify_names_no_ledger_until_its_commit_does(checked):
    """Its rows have no pending counts: any ledger may be theirs, and a row that has a new owner never raises."""
    pool, ledger = served_pool(checked, ["a"])
    other, others = served_pool(checked, ["a"], heads=1)
    ledger.reset()
    row = ledger.admit("b")
    stock = open_batch(pool, [row])
    core_verify(stock, 0, deferred=False, **checked)
    ledger.release("b")
    core_verify(stock, 0, deferred=False, **checked)
    commit(stock, [0])
    core_verify(stock, 0, deferred=False, **checked)
    others.reset()
    with pytest.raises(RuntimeError, match=r"^record row 0 was verified"):
        core_verify(stock, 0, deferred=False, **checked)
    commit(stock, [0])
    core_verify(open_batch(other, [0]), 0, deferred=True, **checked)


REBOUND = {
    "kv_cache[0]": lambda layer: setattr(layer, "kv_cache", (layer.kv_cache[0].clone(), layer.kv_cache[1])),
    "kv_cache[1]": lambda layer: setattr(layer.kv_cache[1], "data", layer.kv_cache[1].clone()),
    "recoverssm_records.key_gate": lambda layer: setattr(
        layer, "recoverssm_records", allocate_records(6, 1, 4, 16, torch.float32, "cpu")
    ),
    "A_log": lambda layer: setattr(layer, "A_log", layer.A_log.clone()),
    "dt_bias": lambda layer: setattr(layer.dt_bias, "data", layer.dt_bias.clone()),
}


@pytest.mark.parametrize("field", REBOUND)
def test_checked_mode_finds_a_layer_that_got_other_tensors(checked, field):
    """Folds go to the memory of `create`, verifies to what the layer has now: states and weights would part."""
    pool = Pool(CPU, CPU.shape(layers=2, heads=1), **checked)
    start(pool, {0: 3})
    batch = Batch(pool, [Row(3, 0, 4)])
    commit(batch, [0])
    REBOUND[field](pool.layers[1])
    name = f"layers[1].{field.replace('key_gate', 'correction')}"
    for call in (
        lambda: commit(batch, [0]),
        lambda: pool.context.flush(batch.state_indices, batch.record_rows, pool.pending),
        lambda: pool.context.drain(batch.state_indices, batch.record_rows, pool.pending),
        lambda: pool.context.read_state(3, 0, pool.pending),
    ):
        assert_named(call, name, "create the context again")
