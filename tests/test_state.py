"""Whole states: whoever reads a checkpoint gets what is pending too; persistent tensors apart from work space."""

import pytest
import torch
from rig import Pool, Snapshot, Target, same_bytes
from steps import Batch, Row, core_verify, drain, verify
from truth import Truth, check_step, run_step, start

from graphrt import SCRATCH_ROW, BoundaryBlock, KDARecoverSSMDeferred, RequestState


def decoding(target, counts=(3,), **shape):
    """A request in row 1 and slot 4 with the last count pending, and its truth."""
    pool = Pool(target, target.shape(**({"layers": 2, "heads": 1} | shape)))
    truths = start(pool, {1: 4})
    for count in counts:
        run_step(Batch(pool, [Row(4, 1, 4)]), truths, [count])
    return pool, truths[1]


def assert_is(state, truth):
    """A state that was read is the truth's."""
    for layer, exact in enumerate(truth.exact):
        want, history = exact.at[truth.position]
        error = (state.checkpoints[layer].double().cpu() - want.double()).norm() / want.double().norm()
        assert error < 4e-6 and same_bytes(state.histories[layer], history)


def test_reading_a_state_folds_what_is_pending(backend_device):
    """The copy holds the accepted tokens; the slot goes on as if nothing had happened; no other byte changes (B87)."""
    pool, truth = decoding(backend_device)
    before = Snapshot(pool)
    state = pool.context.read_state(4, 1, pool.pending, truth.position)
    assert_is(state, truth)
    assert state.num_computed_tokens == truth.position and pool.pending[1] == 0
    assert before.changed(slots=[4], pending=True) == []
    run_step(Batch(pool, [Row(4, 1, 2)]), {1: truth}, [2])
    assert_is(pool.context.read_state(4, 1, pool.pending), truth)
    ours, unowned = (pool.context.read_state(4, row, pool.pending).checkpoints for row in (1, SCRATCH_ROW))
    assert all(same_bytes(a, b) for a, b in zip(ours, unowned, strict=True))


@pytest.mark.parametrize("engine_layout", [False, True], ids=["ours", "engine"])
def test_a_fork_goes_two_ways_from_one_state(backend_device, engine_layout):
    """Copied with two records pending, both branches decode other tokens and are the oracle's (B89)."""
    backend_device.spare(engine_layout)
    pool, truth = decoding(backend_device, counts=(2,), engine_layout=engine_layout, layers=1)
    pool.pending[3] = 4
    before = Snapshot(pool)
    pool.context.copy_state(4, 8, 1, pool.pending, target_row=3)
    assert pool.pending.tolist() == [0] * 6
    assert before.changed(slots=[4, 8], pending=True) == []
    fork = Truth(pool, 8, truth.position)
    run_step(Batch(pool, [Row(8, 3, 4), Row(4, 1, 3)]), {3: fork, 1: truth}, [3, 2])
    drain(pool, [4, 8], [1, 3])
    truth.assert_state(pool, 4)
    fork.assert_state(pool, 8)


def test_a_copy_takes_the_persistent_tensors_and_no_work_space(backend_device):
    """The runtime lists both; a copied slot's window columns and every record keep their bytes (B29)."""
    pool, _ = decoding(backend_device, layers=1)
    context, hist = pool.context, pool.shape.history
    assert set(context.persistent) == {"checkpoint", "conv_history"}
    assert set(context.workspace) == {"correction", "key_gate", "conv_window", "plan"}
    assert context.persistent["checkpoint"][0].data_ptr() == pool.checkpoint(0).data_ptr()
    assert context.persistent["conv_history"][0].shape[2] == hist
    assert same_bytes(context.workspace["correction"][0], pool.records(0).correction)
    window = pool.conv(0)[8][:, hist:].clone()
    records = [t.clone() for t in (pool.records(0).correction, pool.records(0).key_gate)]
    context.copy_state(4, 8, 1, pool.pending)
    for mine, theirs in zip(pool.state(8, 0), pool.state(4, 0), strict=True):
        assert same_bytes(mine, theirs)
    assert same_bytes(pool.conv(0)[8][:, hist:], window)
    for then, now in zip(records, (pool.records(0).correction, pool.records(0).key_gate), strict=True):
        assert same_bytes(then, now)


def test_an_exported_request_goes_on_in_another_runtime(backend_device):
    """State, history and token count are the whole of it (B91)."""
    pool, truth = decoding(backend_device, counts=(4, 1), layers=1)
    state = pool.context.read_state(4, 1, pool.pending, truth.position)
    other = Pool(backend_device, pool.shape, params=pool.params)
    other.pending[5] = 3
    other.context.write_state(9, state, 5, other.pending)
    assert other.pending.tolist() == [0] * 6
    assert state.num_computed_tokens == truth.position
    run_step(Batch(other, [Row(9, 5, 4)]), {5: truth}, [2])
    drain(other, [9], [5])
    truth.assert_state(other, 9)


def test_draining_thrice_and_flushing_a_step_twice_fold_once(backend_device):
    """A drain may be repeated at will, and so may the flush of one step object (B91)."""
    pool, _ = decoding(backend_device, layers=1)
    once, thrice = pool, pool.twin()
    drain(once, [4], [1])
    for _ in range(3):
        drain(thrice, [4], [1])
    for name, mine in once.tensors().items():
        assert same_bytes(mine, thrice.tensors()[name]), name
    pool, _ = decoding(backend_device, layers=1)
    twin = pool.twin()
    for which, times in ((pool, 1), (twin, 2)):
        step = KDARecoverSSMDeferred(which.int32([1]), which.pending, None, which.context, which.int32([4]))
        for _ in range(times):
            step.flush()
    for name, mine in pool.tensors().items():
        assert same_bytes(mine, twin.tensors()[name]), name


def test_an_open_step_is_not_exported(backend_device):
    """Between verify and commit checked mode refuses to read, to copy and to replace a state (B91): the commit would
    make records of the old one pending on the new one.
    """
    backend_device.spare(True)
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1), check=True)
    start(pool, {1: 4})
    context = pool.context
    state = context.read_state(4, 1, pool.pending)
    core_verify(Batch(pool, [Row(4, 1, 2)]), 0, deferred=True, check=True)
    before = Snapshot(pool)
    for call in (
        lambda: context.read_state(4, 1, pool.pending),
        lambda: context.copy_state(4, 5, 1, pool.pending),
        lambda: context.copy_state(5, 4, SCRATCH_ROW, pool.pending, target_row=1),
        lambda: context.write_state(4, state, 1, pool.pending),
    ):
        with pytest.raises(RuntimeError, match=r"^record row 1 was verified and not committed"):
            call()
    assert before.changed() == []


def test_pools_that_were_allocated_in_inference_mode_may_be_written_outside_of_it():
    """Where the pools come from is the engine's affair: a scheduler clears, copies and restores states anywhere."""
    target = Target("torch", "cpu")
    with torch.inference_mode():
        pool = Pool(target, target.shape(layers=1, heads=1))
    context, pending = pool.context, torch.zeros(pool.shape.rows, dtype=torch.int32)
    context.zero_state(4)
    state = context.read_state(4, SCRATCH_ROW, pending)
    state.checkpoints[0].fill_(3)
    context.write_state(5, state, 1, pending)
    context.copy_state(5, 6, SCRATCH_ROW, pending)
    assert not context.checkpoints[0][4].any()
    for slot in (5, 6):
        assert torch.equal(context.checkpoints[0][slot], state.checkpoints[0])


def test_bad_arguments_are_named():
    """Null and absent slots, rows that are not there, and states of another shape raise before anything changes."""
    pool, _ = decoding(Target("torch", "cpu"), layers=1)
    context, pending = pool.context, pool.pending
    state, before = context.read_state(4, SCRATCH_ROW, pending), Snapshot(pool)
    short = RequestState(state.checkpoints, [h[:, 1:] for h in state.histories], 0)
    for call, words in (
        (lambda: context.read_state(0, 1, pending), r"^slot: expected a live state slot, 1..11, got 0"),
        (lambda: context.read_state(12, 1, pending), r"^slot: "),
        (lambda: context.read_state(True, 1, pending), r"^slot: .*got True"),
        (lambda: context.read_state(4, 6, pending), r"^row: expected a record row, -1..5, got 6"),
        (lambda: context.read_state(4, 1, pending[:3]), r"^pending: expected \[6\] int32"),
        (lambda: context.copy_state(4, 0, 1, pending), r"^target: "),
        (lambda: context.copy_state(4, 5, 1, pending, target_row=1), r"^target_row: expected another row"),
        (lambda: context.write_state(4, RequestState([], [], 0), 1, pending), r"^state.checkpoints: .*1 layers, got 0"),
        (lambda: context.write_state(4, short, 1, pending), r"^state.histories\[0\]: expected \[20, 3\]"),
        (lambda: context.zero_state(-1), r"^slot: "),
        (lambda: context.boundary_blocks(7), r"^num_reqs: expected 0..6"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert before.changed() == []


def test_the_boundary_blocks_of_a_plain_commit_are_none(backend_device):
    """Without align mode no block is published, whatever an earlier commit left behind."""
    backend_device.spare(True)
    pool, truth = decoding(backend_device, layers=1)
    batch = Batch(pool, [Row(4, 1, 4)])
    check_step(batch, verify(batch), {0: truth}, [4])
    pool.context.commit(
        pool.int32([4]), batch.state_indices, batch.query_start_loc, record_rows=batch.record_rows,
        block_table=pool.int32([4, 5])[None], num_computed_tokens=pool.int32([14]), mamba_block_size=16,
    )  # fmt: skip
    assert pool.context.boundary_blocks(1) == [BoundaryBlock(row=0, slot=4, num_accepted=2)]
    pool.context.drain(pool.int32([5]), pool.int32([1]), pool.pending)
    assert pool.context.boundary_blocks(1) == []


@pytest.mark.gpu
def test_a_state_read_on_the_device_is_ordered_behind_the_steps():
    """No wait is needed between a commit and a read on the same stream."""
    pool, truth = decoding(Target("triton", "cuda"))
    torch.cuda._sleep(50_000_000)
    run_step(Batch(pool, [Row(4, 1, 4)]), {1: truth}, [4])
    state = pool.context.read_state(4, 1, pool.pending)
    assert_is(state, truth)
