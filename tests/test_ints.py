"""Sizes are ints of any kind: what comes from a configuration or an array is NumPy's."""

from dataclasses import asdict

import numpy
import pytest
import torch
from rig import Pool, Target, loose
from steps import Batch, Row, commit, conv_verify, core_verify

from graphrt import (
    KDADeferredCommitContext,
    RecordSlots,
    align_eager_mask,
    align_state_indices,
    allocate_records,
    kda_conv_verify,
    kda_deferred_verify,
    load_state,
    save_state,
)
from graphrt.capture import CommitRunner, DecodeStep, Sampled, StepInputs, dummy_inputs, record
from graphrt.choice import StepShape, choose_commit

CPU = Target("torch", "cpu")


class Index:
    """Somebody else's int."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


KINDS = pytest.mark.parametrize("kind", [numpy.int64, numpy.uint8, Index])


@KINDS
def test_contexts_records_and_ledgers_take_sizes_of_any_kind(kind):
    """And keep ints of Python's own, which a log, a file or a kernel's argument can hold."""
    records = allocate_records(kind(6), kind(1), kind(4), kind(16), torch.float32, "cpu")
    layer = loose(Pool(CPU, CPU.shape(layers=1, heads=1)).layers[0], conv=False)
    layer.recoverssm_records, layer.local_num_heads, layer.head_dim = records, kind(1), kind(16)
    sizes = {"spec_query_len": kind(4), "max_num_reqs": kind(6), "conv_width": kind(4)}
    context = KDADeferredCommitContext.create([layer], **sizes)
    ledger = RecordSlots(kind(6), "cpu")
    assert [type(n) for n in (context.spec_query_len, context.conv_history_len, ledger.admit("a"))] == [int] * 3
    assert context.boundary_blocks(kind(6)) == []


@KINDS
def test_verifies_and_commits_take_sizes_of_any_kind(kind):
    """The same outputs and counts as with one of Python's."""
    pool = Pool(CPU, CPU.shape(layers=1))
    pool.fill(3)
    batch, twin = Batch(pool, [Row(3, 0, 4)]), pool.twin()
    other, tokens, c = batch.on(twin), batch.tokens[0], pool.params[0]
    steps = (batch.query_start_loc, batch.state_indices, kind(4))
    owned = {"record_rows": batch.record_rows, "pending": twin.pending}
    parts = (part[None] for part in (tokens.q, tokens.k, tokens.v, tokens.raw_g, tokens.raw_beta))
    got = kda_deferred_verify(
        *parts, c.A_log, c.dt_bias, c.lower_bound, twin.checkpoint(0), twin.records(0), *steps, **owned
    )
    assert torch.equal(got[0], core_verify(batch, 0, deferred=True))
    conv = kda_conv_verify(tokens.x, twin.conv(0), c.conv_weight, c.conv_bias, *steps, **owned)
    assert torch.equal(conv, conv_verify(batch, 0, deferred=True))
    ones = pool.int32([1])
    commit(other, [2], block_table=ones[:, None], num_computed_tokens=ones, mamba_block_size=kind(16))
    assert twin.pending.tolist() == [2, 0, 0, 0, 0, 0]
    assert align_state_indices(ones[:, None], ones, kind(16)).tolist() == [1]
    assert align_eager_mask(ones, batch.query_start_loc, kind(4)).tolist() == [True]


@KINDS
def test_static_inputs_and_recordings_take_sizes_of_any_kind(kind):
    """Rows of a step, recorded sizes, numbers of steps and warm-ups."""
    pool = Pool(CPU, CPU.shape(layers=1))
    inputs = StepInputs(kind(6), kind(4), "cpu", kind(1))
    parts, sizes = (pool.context, pool.pending, inputs), [kind(2), kind(2), 1]
    runner = CommitRunner(*parts, sizes, kind(16))
    counts = pool.int32([1] * 6)
    taken = lambda rows, outputs: Sampled(counts[: len(rows.eager)], counts[: len(rows.eager)])  # noqa: E731
    step = DecodeStep(*parts, lambda rows: None, taken, capture_sizes=sizes, mamba_block_size=kind(16))
    for made in (runner, step):
        kept = [*made.capture_sizes, made.mamba_block_size]
        assert kept == [1, 2, 16] and {type(size) for size in kept} == {int}
        made.capture(progress=False)
    inputs.stage(num_reqs=kind(1), state_indices=[3])
    assert inputs.rows(kind(2)) is inputs.rows(2)
    for call in (runner.flush, runner.commit, runner.drain):
        call(kind(2))
    dummy_inputs(inputs, kind(2), dcp=True)
    step.replay(kind(2), kind(2))
    step.replay_dummy(kind(2))
    step.run(kind(2))
    assert step.recording(kind(2)) is step.recording(2)
    record(lambda: counts.add_(1), device="cpu", warmup=kind(2))
    assert counts.tolist() == [3] * 6


@KINDS
def test_slots_and_record_rows_are_of_any_kind(kind, tmp_path):
    """Engines keep their blocks in arrays: what names a slot or a row there names it here."""
    pool, ledger = Pool(CPU, CPU.shape(layers=1)), RecordSlots(6, "cpu")
    pool.fill(3)
    context, pending, checkpoint = pool.context, ledger.pending, pool.checkpoint(0)
    assert ledger.admit("a") == 0
    state = context.read_state(kind(3), kind(0), pending)
    context.write_state(kind(4), state, kind(1), pending)
    context.copy_state(kind(3), kind(5), kind(0), pending, kind(2))
    assert torch.equal(checkpoint[4], checkpoint[3]) and torch.equal(checkpoint[5], checkpoint[3])
    context.zero_state(kind(4))
    assert not checkpoint[4].any() and checkpoint[3].any()
    save_state(tmp_path / "run", context, ledger, slots=[kind(3), kind(5)])
    twin, loaded = pool.twin(), RecordSlots(6, "cpu")
    load_state(tmp_path / "run", twin.context, loaded)
    assert loaded.row("a") == 0 and torch.equal(twin.checkpoint(0)[5], checkpoint[3])
    ledger.preempt("a", context, kind(3))
    assert ledger.num_preempted == 1


@KINDS
def test_a_table_of_choices_may_hold_ints_of_any_kind(kind):
    """What is chosen keeps one of Python's."""
    shape = StepShape("cpu", "torch", 1, 1, 16, 4)
    choice = choose_commit(shape, [asdict(shape) | {"deferred_from": kind(2)}])
    assert type(choice.deferred_from) is int
    assert (choice.eager(1), choice.eager(2)) == (True, False)


@pytest.mark.parametrize("wrong", [True, numpy.True_, torch.tensor(3), 3.0, numpy.float64(3), numpy.array([3]), "3"])
def test_what_is_no_int_is_refused(wrong):
    """A flag, a tensor that would be read from the device, and numbers with a fraction are no sizes."""
    pool, inputs = Pool(CPU, CPU.shape(layers=1)), StepInputs(6, 4, "cpu")
    with pytest.raises(ValueError, match=r"^max_num_reqs: expected an int of at least 1, got "):
        RecordSlots(wrong, "cpu")
    with pytest.raises(ValueError, match=r"^num_reqs: expected 0\.\.6 \(max_num_reqs\), got "):
        inputs.stage(num_reqs=wrong)
    with pytest.raises(ValueError, match=r"^capture_sizes: expected at least one int, each in 1\.\.6"):
        CommitRunner(pool.context, pool.pending, inputs, [1, wrong])
