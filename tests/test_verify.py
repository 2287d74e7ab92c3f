"""The stock and the deferred verify of the KDA recurrence, against the oracle."""

import pytest
import torch
from rig import Pool, Snapshot, same_bytes
from steps import Batch, Row, commit, core_verify, drain, verify
from truth import check_records, check_step, run_step, start

BOTH = pytest.mark.parametrize("deferred", [False, True], ids=["stock", "deferred"])


def truths_of(batch, truths):
    return {b: truths[r.row] for b, r in enumerate(batch.rows) if r.slot > 0 and r.row in truths}


@BOTH
@pytest.mark.parametrize(
    ("lower_bound", "act"),
    [(-5.0, torch.float32), (-5.0, torch.bfloat16), (None, torch.float32), (None, torch.float16)],
    ids=str,
)
def test_a_verify_matches_the_oracle(backend_device, deferred, lower_bound, act):
    """Outputs and records of ragged windows are the oracle's, for tokens with gaps between them and a tail
    behind.
    """
    pool = Pool(backend_device, backend_device.shape(lower_bound=lower_bound, act=act, layers=1))
    truths = start(pool, {4: 7, 0: 3, 2: 5})
    batch = Batch(pool, [Row(7, 4, 4), Row(3, 0, 1), Row(5, 2, 3)], tail=3, gap=16)
    pairs = check_step(batch, verify(batch, deferred=deferred), truths_of(batch, truths), [0, 0, 0])
    for b in pairs:
        check_records(batch, b, pairs[b])
    assert pool.errors() == {}


@BOTH
def test_a_verify_writes_the_records_of_its_rows_and_nothing_else(backend_device, deferred):
    """With nothing pending no checkpoint changes; records of absent rows and of tokens past the window stay."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    start(pool, {4: 7, 0: 3})
    before = Snapshot(pool)
    core_verify(Batch(pool, [Row(7, 4, 2), Row(3, 0, 3)]), 0, deferred=deferred)
    assert before.changed(rows=[0, 4]) == []
    records = pool.records(0)
    for row, tokens in ((4, 2), (0, 3)):
        for tensor in (records.correction, records.key_gate):
            assert bool(tensor[row, :, :tokens].isfinite().all())
            assert bool(tensor[row, :, tokens:].isnan().all())


def test_a_deferred_verify_replays_any_count_before_any_window(backend_device):
    """Counts below, at and above the next window's length fold exactly the accepted records, then they are
    overwritten.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    truths = start(pool, {row: 11 - row for row in range(6)})
    counts, lengths = [0, 1, 4, 4, 2, 3], [4, 4, 1, 4, 3, 0]
    run_step(Batch(pool, [Row(11 - r, r, 4) for r in range(6)]), truths, counts)
    second = Batch(pool, [Row(11 - r, r, lengths[r]) for r in (3, 1, 5, 0, 4, 2)])
    pairs = check_step(second, verify(second), truths_of(second, truths), [0] * 6)
    for b, row in enumerate(second.rows):
        check_records(second, b, pairs[b])
        truths[row.row].assert_state(pool, row.slot)
    assert pool.pending.tolist() == counts


def test_a_deferred_verify_leaves_the_checkpoint_of_a_row_without_pending(backend_device):
    """Where nothing is pending the checkpoint keeps its bytes, also with records of an earlier window in the
    row.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {1: 2, 3: 4})
    run_step(Batch(pool, [Row(2, 1, 4), Row(4, 3, 4)]), truths, [0, 0])
    before = Snapshot(pool)
    run_step(Batch(pool, [Row(2, 1, 3), Row(4, 3, 0)]), truths, [0, 0])
    assert [name for name in before.changed(rows=[1]) if not name.startswith("conv")] == []


def test_an_absent_request_keeps_pending_records_and_checkpoint(backend_device):
    """A request skips steps in which others fill its batch row, and returns to the oracle's outputs."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {0: 1, 1: 2, 2: 3})
    run_step(Batch(pool, [Row(1, 0, 4), Row(2, 1, 4), Row(3, 2, 4)]), truths, [3, 2, 1])
    before = Snapshot(pool)
    for accepted in ([1, 2], [0, 4], [3, 1]):
        run_step(Batch(pool, [Row(1, 0, 4), Row(3, 2, 4)]), truths, accepted)
    assert before.changed(slots=[1, 3], rows=[0, 2], pending=True) == []
    assert pool.pending.tolist()[1] == 2
    run_step(Batch(pool, [Row(2, 1, 4), Row(1, 0, 2)]), truths, [1, 1])


@BOTH
@pytest.mark.parametrize("slot", [0, -1, -9])
def test_a_null_slot_reads_and_writes_nothing(backend_device, deferred, slot):
    """Its tokens, NaN included, give zeros; the pools, all NaN around the null slot, and its record row keep
    their bytes.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {1: 2})
    pool.pending[3] = 2
    batch = Batch(pool, [Row(slot, 3, 4), Row(2, 1, 2), Row(slot, -1, 3)])
    for part in vars(batch.tokens[0]).values():
        part[:4] = part[6:] = float("nan")
    before = Snapshot(pool)
    results = verify(batch, deferred=deferred)
    check_step(batch, results, truths_of(batch, truths), [0, 0, 0])
    assert before.changed(slots=[2], rows=[1]) == []
    assert pool.errors() == {}


@BOTH
@pytest.mark.parametrize("tail", [0, 1, 40], ids=lambda n: f"tail{n}")
def test_tokens_past_the_last_row_give_zeros_over_a_poisoned_output(backend_device, deferred, tail):
    """Every element of a given output is written: live tokens by the oracle, all others with zero, also above
    B·Q.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {1: 2, 2: 3})
    batch = Batch(pool, [Row(2, 1, 3), Row(0, -1, 2), Row(3, 2, 1)], tail=tail)
    s = pool.shape
    out = torch.full((1, 6 + tail, s.heads, s.head_dim), float("nan"), dtype=s.act, device=pool.device)
    got = core_verify(batch, 0, deferred=deferred, out=out)
    assert got.data_ptr() == out.data_ptr()
    for b, row in ((0, 1), (2, 2)):
        [(exact, plain)] = truths[row].step(batch.windows(b), 0)
        torch.testing.assert_close(got[batch.span(b)].cpu().double(), exact.out, atol=0.02, rtol=0.02)
        assert plain.out.shape == exact.out.shape
    assert not bool(got[3:5].ne(0).any()) and not bool(got[6:].ne(0).any())


@BOTH
@pytest.mark.parametrize("rows", [[], [0, 0, 0]], ids=["no rows", "rows without tokens"])
def test_a_step_without_tokens_runs(backend_device, deferred, rows):
    """A batch of no rows, or of rows without tokens, with a tail or without one, is legal."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {row: row + 1 for row in range(3)})
    for tail in (0, 5):
        batch = Batch(pool, [Row(row + 1, row, n) for row, n in enumerate(rows)], tail=tail)
        check_step(batch, verify(batch, deferred=deferred), truths_of(batch, truths), [0] * len(rows))


@BOTH
def test_index_tensors_may_be_columns_of_a_table(backend_device, deferred):
    """Strided indices give the bytes of contiguous ones."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {4: 7, 0: 3})
    rows = [Row(7, 4, 4), Row(3, 0, 2)]
    first = Batch(pool, rows)
    run_step(first, truths, [2, 1])
    twin = pool.twin()
    second, wide = Batch(pool, rows), Batch(twin, rows, wide=True)
    wide.tokens = second.tokens
    assert not wide.state_indices.is_contiguous()
    for a, b in zip(verify(second, deferred=deferred), verify(wide, deferred=deferred), strict=True):
        assert same_bytes(a.out, b.out) and same_bytes(a.conv, b.conv)
    assert same_bytes(pool.checkpoint(0)[[3, 7]], twin.checkpoint(0)[[3, 7]])


@BOTH
def test_record_rows_may_be_longer_than_the_batch(backend_device, deferred):
    """Entries of `record_rows` past the batch are not read."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {4: 7, 0: 3})
    batch = Batch(pool, [Row(7, 4, 4), Row(3, 0, 2)])
    batch.record_rows = pool.int32([4, 0, 1 << 30, -7])
    check_step(batch, verify(batch, deferred=deferred), truths_of(batch, truths), [0, 0])
    assert pool.errors() == {}


def test_without_record_rows_the_records_go_to_the_batch_rows(backend_device):
    """The stock verify and commit of an engine without record rows use row b for request b."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {0: 7, 1: 3})
    batch = Batch(pool, [Row(7, 0, 4), Row(3, 1, 2)])
    pairs = {b: truths[b].step(batch.windows(b), 2) for b in (0, 1)}
    core_verify(batch, 0, deferred=False, rows=False)
    for b in (0, 1):
        check_records(batch, b, pairs[b])
    before = Snapshot(pool)
    commit(batch, [2, 2], deferred=False, record_rows=None)
    assert [name for name in before.changed(slots=[3, 7]) if not name.startswith("conv")] == []
    for b, slot in ((0, 7), (1, 3)):
        for exact in truths[b].exact:
            torch.testing.assert_close(pool.checkpoint(0)[slot].cpu().double(), exact.state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("query_len", [1, 2, 8, 16])
def test_windows_of_other_sizes_match_the_oracle(backend_device, query_len):
    """Any Q works, one token per step included."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1, query_len=query_len))
    truths = start(pool, {0: 7, 3: 3})
    for accepted in ([query_len, 1], [1, query_len]):
        run_step(Batch(pool, [Row(7, 0, query_len), Row(3, 3, query_len)]), truths, accepted)
    pool.context.drain(pool.int32([7, 3]), pool.int32([0, 3]), pool.pending)
    for row, slot in ((0, 7), (3, 3)):
        truths[row].assert_state(pool, slot)


@pytest.mark.parametrize(("head_dim", "lower_bound"), [(32, -5.0), (64, None), (128, -5.0), (128, None)])
def test_larger_heads_match_the_oracle(backend_device, head_dim, lower_bound):
    """Several programs of one head read its records before any of them overwrites a record."""
    shape = backend_device.shape(layers=1, heads=1, head_dim=head_dim, lower_bound=lower_bound, rows=2, slots=4)
    pool = Pool(backend_device, shape)
    truths = start(pool, {0: 1, 1: 3})
    run_step(Batch(pool, [Row(1, 0, 4), Row(3, 1, 4)]), truths, [4, 2])
    run_step(Batch(pool, [Row(3, 1, 4), Row(1, 0, 2)]), truths, [3, 2])
    pool.context.drain(pool.int32([1, 3]), pool.int32([0, 1]), pool.pending)
    truths[0].assert_state(pool, 1)
    truths[1].assert_state(pool, 3)


@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gate_parameters_of_any_float_dtype_match_the_oracle(backend_device, param):
    """`A_log` and `dt_bias` are used at their own precision by verify and fold."""
    pool = Pool(backend_device, backend_device.shape(layers=1, param=param))
    truths = start(pool, {0: 1})
    for accepted in (3, 2):
        run_step(Batch(pool, [Row(1, 0, 4)]), truths, [accepted])
    pool.context.drain(pool.int32([1]), pool.int32([0]), pool.pending)
    truths[0].assert_state(pool, 1)


def test_any_lower_bound_matches_the_oracle(backend_device):
    """The lower bound is the layer's: another one than -5 changes gates as the formula says."""
    pool = Pool(backend_device, backend_device.shape(layers=1, lower_bound=-1.5))
    truths = start(pool, {0: 1})
    for accepted in (3, 2):
        run_step(Batch(pool, [Row(1, 0, 4)]), truths, [accepted])
    pool.context.drain(pool.int32([1]), pool.int32([0]), pool.pending)
    truths[0].assert_state(pool, 1)


@pytest.mark.parametrize("head_dim", [16, 128], ids=["one program a head", "several"])
def test_programs_that_share_the_records_of_a_head_read_them_in_time(backend_device, head_dim):
    """B57: windows shorter and longer than what is pending, however many programs replay the same records."""
    shape = backend_device.shape(head_dim=head_dim, heads=1, layers=1, rows=2, slots=4)
    pool = Pool(backend_device, shape)
    truths = start(pool, {1: 3})
    for tokens, accepted in ((4, 4), (2, 1), (4, 3), (1, 1)):
        run_step(Batch(pool, [Row(3, 1, tokens)]), truths, [accepted])
    drain(pool, [3], [1])
    truths[1].assert_state(pool, 3)
