"""The convolution verify: outputs, both layouts of its state, and the compaction of what is pending."""

import pytest
import torch
from rig import Pool, Snapshot, same_bytes, whole
from steps import Batch, Row, commit, conv_verify, drain
from truth import FLOOR, assert_near, assert_rounded, start

LAYOUTS = pytest.mark.parametrize("engine_layout", [False, True], ids=["hist+Q", "hist+Q-1"])
FIRST = pytest.mark.parametrize("conv_dim_first", [True, False], ids=["dim first", "dim last"])


def conv_pool(target, **changes):
    """A pool whose convolution is of interest: one layer, one head."""
    return Pool(target, target.shape(**({"layers": 1, "heads": 1} | changes)))


def check(batch, b, truth, got, accepted):
    """Row b's outputs are the oracle's; then the truth advances."""
    [(exact, plain)] = truth.step(batch.windows(b), accepted)
    got = got[batch.span(b)]
    if got.dtype in (torch.bfloat16, torch.float16):
        assert_rounded(got, exact.conv, f"row {b}", batch.pool.target)
    else:
        assert_near(got, exact.conv, plain.conv, FLOOR[got.dtype], f"row {b}")


@LAYOUTS
@FIRST
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_match_the_oracle_over_steps(backend_device, engine_layout, conv_dim_first, act):
    """Windows behind every pending count continue the accepted sequence, silu included."""
    backend_device.spare((act == torch.float32) == (engine_layout != conv_dim_first))
    pool = conv_pool(backend_device, engine_layout=engine_layout, conv_dim_first=conv_dim_first, act=act)
    truths = start(pool, {0: 7, 1: 3, 2: 5})
    for lengths, counts in (([4, 4, 4], [1, 4, 3]), ([4, 1, 0], [2, 1, 0]), ([2, 3, 4], [2, 1, 4])):
        rows = zip((0, 1, 2), (7, 3, 5), lengths, strict=True)
        batch = Batch(pool, [Row(slot, row, n) for row, slot, n in rows])
        got = conv_verify(batch, 0, deferred=True)
        for b in range(3):
            check(batch, b, truths[b], got, counts[b])
        commit(batch, counts)
    drain(pool, [7, 3, 5], [0, 1, 2])
    for row, slot in ((0, 7), (1, 3), (2, 5)):
        assert same_bytes(pool.state(slot, 0)[1], truths[row].exact[0].history)
    assert pool.errors() == {}


@FIRST
def test_our_layout_keeps_the_history_in_front_of_the_window(backend_device, conv_dim_first):
    """After a verify columns [0, hist) are the history and the window's inputs follow; the rest is as it was."""
    pool = conv_pool(backend_device, conv_dim_first=conv_dim_first)
    start(pool, {0: 7})
    history = pool.state(7, 0)[1].clone()
    batch = Batch(pool, [Row(7, 0, 3)])
    conv_verify(batch, 0, deferred=True)
    want = torch.cat([history, batch.tokens[0].x.T], dim=1)
    assert same_bytes(pool.conv(0)[7][:, : want.shape[1]], want)


@FIRST
def test_the_engines_layout_shifts_the_history_by_one(backend_device, conv_dim_first):
    """After a verify the columns are the newest hist - 1 inputs of the history, then the window's inputs."""
    pool = conv_pool(backend_device, conv_dim_first=conv_dim_first, engine_layout=True)
    start(pool, {0: 7})
    history = pool.state(7, 0)[1].clone()
    batch = Batch(pool, [Row(7, 0, 3)])
    conv_verify(batch, 0, deferred=True)
    want = torch.cat([history[:, 1:], batch.tokens[0].x.T], dim=1)
    assert same_bytes(pool.conv(0)[7][:, : want.shape[1]], want)


@LAYOUTS
@pytest.mark.parametrize("fold", ["verify without tokens", "drain", "flush", "commit now"])
def test_every_accepted_count_compacts_to_the_last_inputs(backend_device, engine_layout, fold):
    """The history is byte-equal to the last inputs of the accepted tokens for every count, whoever compacts
    it.
    """
    pool = conv_pool(backend_device, engine_layout=engine_layout)
    counts = range(int(engine_layout), 5)
    rows = {count: 11 - count for count in counts}
    truths = start(pool, rows)
    batch = Batch(pool, [Row(rows[count], count, 4) for count in counts])
    conv_verify(batch, 0, deferred=True)
    for b, count in enumerate(counts):
        truths[count].step(batch.windows(b), count)
    commit(batch, list(counts), deferred=fold != "commit now")
    slots, record_rows = pool.int32(rows.values()), pool.int32(rows)
    if fold == "verify without tokens":
        conv_verify(Batch(pool, [Row(rows[count], count, 0) for count in counts]), 0, deferred=True)
    elif fold != "commit now":
        getattr(pool.context, fold)(slots, record_rows, pool.pending)
    for count in counts:
        assert same_bytes(pool.state(rows[count], 0)[1], truths[count].exact[0].history), count
    assert pool.errors() == {}


@pytest.mark.parametrize("width", [2, 3, 4, 6])
@pytest.mark.parametrize("query_len", [1, 4])
@LAYOUTS
def test_other_widths_match_the_oracle(backend_device, width, query_len, engine_layout):
    """Any width works, with windows shorter and longer than the history."""
    backend_device.spare(engine_layout == (width % 2 == 0))
    pool = conv_pool(backend_device, width=width, query_len=query_len, engine_layout=engine_layout)
    truths = start(pool, {2: 3})
    for tokens, count in ((query_len, 1), (query_len, query_len), (1, 1), (query_len, 1)):
        batch = Batch(pool, [Row(3, 2, tokens)])
        check(batch, 0, truths[2], conv_verify(batch, 0, deferred=True), count)
        commit(batch, [count])
    drain(pool, [3], [2])
    assert same_bytes(pool.state(3, 0)[1], truths[2].exact[0].history)


@pytest.mark.parametrize("conv_dim, programs", [(1, None), (7, None), (300, None), (1000, 4)])
@FIRST
def test_any_number_of_channels_works(backend_device, conv_dim, programs, conv_dim_first, monkeypatch):
    """Channels that fill no block of a kernel touch no neighbour, also where two programs share three blocks of them;
    without a bias the sum starts at zero.
    """
    if programs and backend_device.backend != "torch":
        monkeypatch.setattr("graphrt.kernels.conv.FOLD_PROGRAMS", programs)
    pool = conv_pool(backend_device, conv_dim=conv_dim, conv_dim_first=conv_dim_first, conv_bias=False)
    truths = start(pool, {2: 3, 1: 5})
    before = Snapshot(pool)
    for counts in ([3, 2], [1, 4]):
        batch = Batch(pool, [Row(3, 2, 4), Row(5, 1, 4)], gap=3)
        got = conv_verify(batch, 0, deferred=True)
        for b, row in enumerate((2, 1)):
            check(batch, b, truths[row], got, counts[b])
        commit(batch, counts)
    drain(pool, [3, 5], [2, 1])
    for row, slot in ((2, 3), (1, 5)):
        assert same_bytes(pool.state(slot, 0)[1], truths[row].exact[0].history)
    assert [name for name in before.changed(slots=[3, 5], pending=True) if name.startswith("conv")] == []


@LAYOUTS
@FIRST
def test_states_that_do_not_start_on_16_bytes_are_compacted_alike(
    backend_device, engine_layout, conv_dim_first, monkeypatch
):
    """Every byte of the convolution states, by a flush of every count and by an align commit to other slots."""
    pool = conv_pool(backend_device, conv_dim=50, engine_layout=engine_layout, conv_dim_first=conv_dim_first)
    pool.conv(0)[:] = torch.randn(pool.conv(0).shape, dtype=torch.float32).to(pool.conv(0))
    pool.pending[:5] = pool.int32([0, 1, 2, 3, 4])
    monkeypatch.setattr("graphrt.layers._is_packed", lambda states: False)
    other = pool.twin()
    assert not other.context.stack.conv_packed and pool.context.stack.conv_packed
    slots, rows, ends = pool.int32(range(1, 6)), pool.int32(range(5)), pool.int32([0, 4, 8, 12, 16, 20])
    for one in (pool, other):
        one.context.flush(slots, rows, one.pending)
        table, computed = pool.int32([6, 7, 8, 9, 10])[:, None].expand(-1, 2).contiguous(), pool.int32([3] * 5)
        one.context.commit(
            pool.int32([1, 2, 3, 4, 4]), slots, ends, block_table=table, num_computed_tokens=computed,
            mamba_block_size=5, record_rows=rows,
        )  # fmt: skip
    assert same_bytes(whole(pool.conv(0)), whole(other.conv(0)))


def test_a_stock_verify_takes_the_history_at_its_front(backend_device):
    """Without `pending` the history starts at column 0 whatever the record row has pending."""
    pool = conv_pool(backend_device)
    truths = start(pool, {2: 3})
    pool.pending[2] = 3
    batch = Batch(pool, [Row(3, 2, 4)])
    check(batch, 0, truths[2], conv_verify(batch, 0, deferred=False), 0)


@LAYOUTS
def test_without_record_rows_every_live_slot_is_live(backend_device, engine_layout):
    """Called as an engine does, without record rows, the verify writes the windows of all live slots."""
    pool = conv_pool(backend_device, engine_layout=engine_layout)
    truths = start(pool, {0: 3, 1: 5})
    batch = Batch(pool, [Row(3, -1, 4), Row(5, -1, 2), Row(0, -1, 2)], tail=1)
    got = conv_verify(batch, 0, deferred=False, rows=False)
    check(batch, 0, truths[0], got, 0)
    check(batch, 1, truths[1], got, 0)
    assert not bool(got[6:].ne(0).any())
    first = pool.shape.history - int(engine_layout)
    assert same_bytes(pool.conv(0)[5][:, first : first + 2], batch.tokens[0].x[4:6].T)


def test_a_given_output_is_written_everywhere(backend_device):
    """NaN in a given output is replaced, by zero where no live token is."""
    pool = conv_pool(backend_device)
    truths = start(pool, {0: 3})
    batch = Batch(pool, [Row(0, -1, 1), Row(3, 0, 2)], tail=30)
    out = torch.full((33, pool.shape.conv_dim), float("nan"), dtype=pool.shape.act, device=pool.device)
    got = conv_verify(batch, 0, deferred=True, out=out)
    assert got.data_ptr() == out.data_ptr()
    check(batch, 1, truths[0], got, 0)
    assert not bool(got[:1].ne(0).any()) and not bool(got[3:].ne(0).any())


def test_a_window_with_nan_behind_the_accepted_prefix_spoils_no_history(backend_device):
    """NaN and Inf inputs that are rejected are in no output of the next window."""
    pool = conv_pool(backend_device)
    truths = start(pool, {0: 3})
    batch = Batch(pool, [Row(3, 0, 4)])
    batch.tokens[0].x[2] = float("nan")
    batch.tokens[0].x[3] = float("inf")
    conv_verify(batch, 0, deferred=True)
    truths[0].step(batch.windows(0), 2)
    commit(batch, [2])
    second = Batch(pool, [Row(3, 0, 4)])
    check(second, 0, truths[0], conv_verify(second, 0, deferred=True), 1)
