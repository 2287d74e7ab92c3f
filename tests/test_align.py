"""Align mode: states that move from block to block, and blocks that keep the state of their boundary."""

from dataclasses import dataclass

import pytest
import torch
from rig import Pool, Snapshot, same_bytes
from steps import Batch, Row, commit, drain, verify
from truth import Truth, check_step

from graphrt import align_eager_mask, align_state_indices, error_report, reset_errors

LAYOUTS = pytest.mark.parametrize("engine_layout", [False, True], ids=["hist+Q", "hist+Q-1"])

# Block size, tokens computed, window, accepted. Q is 4.
CASES = [
    pytest.param(16, 14, 4, 1, id="stays inside its block"),
    pytest.param(16, 14, 4, 2, id="lands on the boundary"),
    pytest.param(16, 14, 4, 3, id="crosses the boundary"),
    pytest.param(16, 14, 2, 2, id="lands with its last token"),
    pytest.param(16, 15, 4, 4, id="crosses with its first token"),
    pytest.param(16, 13, 4, 4, id="crosses with its last token"),
    pytest.param(16, 16, 4, 1, id="starts on a boundary"),
    pytest.param(16, 32, 4, 4, id="starts on a later boundary"),
    pytest.param(16, 0, 4, 3, id="starts from nothing"),
    pytest.param(16, 31, 1, 1, id="one token onto the boundary"),
    pytest.param(4, 0, 4, 4, id="one window fills a block"),
    pytest.param(4, 4, 4, 4, id="from boundary to boundary"),
    pytest.param(4, 2, 4, 4, id="window of one block crosses"),
    pytest.param(4, 3, 4, 4, id="window of one block crosses at once"),
]


@dataclass
class Decoded:
    """A request in align mode."""

    row: int
    table: list[int]
    truth: Truth

    def source(self, size):
        """The block that holds its state."""
        return self.table[max(self.truth.position - 1, 0) // size]


def begin(pool, row, table, position, size):
    """A request with `position` tokens computed, its state in the block of the last of them."""
    source = table[max(position - 1, 0) // size]
    pool.fill(source)
    return Decoded(row, table, Truth(pool, source, position))


def metadata(pool, requests, size, *, wide=False):
    """Align arguments of a commit whose batch row b is request b."""
    return {
        "block_table": torch.stack([pool.int32(r.table) for r in requests]),
        "num_computed_tokens": pool.int32((r.truth.position for r in requests), wide=wide),
        "mamba_block_size": size,
    }


def align_step(pool, requests, tokens, accepted, size, **kw):
    """Verify and commit one step of these requests; returns the positions it started from."""
    starts = [r.truth.position for r in requests]
    batch = Batch(pool, [Row(r.source(size), r.row, n) for r, n in zip(requests, tokens, strict=True)])
    align = metadata(pool, requests, size)
    check_step(batch, verify(batch), {b: r.truth for b, r in enumerate(requests)}, accepted)
    if kw.get("deferred", True) and "eager" not in kw:
        kw["eager"] = align_eager_mask(align["num_computed_tokens"], batch.query_start_loc, size)
    commit(batch, accepted, **(align | kw))
    return starts


@LAYOUTS
@pytest.mark.parametrize("how", ["folded", "eager row"])
@pytest.mark.parametrize(("size", "position", "tokens", "accepted"), CASES)
def test_a_step_ends_in_the_block_of_its_last_token(
    backend_device, size, position, tokens, accepted, how, engine_layout
):
    """Final and boundary blocks hold the oracle's states and histories; every other block keeps its bytes."""
    backend_device.spare(engine_layout != (how == "eager row"))
    shape = backend_device.shape(layers=1, heads=1, engine_layout=engine_layout)
    pool = Pool(backend_device, shape)
    request = begin(pool, 3, [8, 4, 10, 2], position, size)
    source = request.source(size)
    held = pool.checkpoint(0)[source].clone()
    before = Snapshot(pool)
    eager = {"eager": torch.ones(1, dtype=torch.bool, device=pool.device)}
    align_step(pool, [request], [tokens], [accepted], size, **(eager if how == "eager row" else {"deferred": False}))
    end = position + accepted
    final = request.table[(end - 1) // size]
    request.truth.assert_state(pool, final)
    written = {final}
    boundary = (position // size + 1) * size
    if end >= boundary:
        written.add(request.table[position // size])
        request.truth.assert_state(pool, request.table[position // size], position=boundary)
    changed = before.changed(slots={*written, source}, rows=[3])
    assert changed == []
    if source not in written:
        assert same_bytes(pool.checkpoint(0)[source], held)
        if not engine_layout:
            request.truth.assert_state(pool, source, position=position)
    assert pool.pending.tolist() == [0] * 6
    assert pool.errors() == {}


def test_a_row_away_from_a_boundary_is_only_counted(backend_device):
    """With pending and align metadata, rows that `align_eager_mask` leaves out change no block."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    size = 16
    requests = [
        begin(pool, 0, [5, 6], 7, size),
        begin(pool, 4, [9, 3], 11, size),
        begin(pool, 2, [8, 1], 0, size),
    ]
    before = Snapshot(pool)
    align_step(pool, requests, [4, 4, 4], [2, 0, 4], size)
    assert pool.pending.tolist() == [2, 0, 4, 0, 0, 0]
    assert [name for name in before.changed(rows=[0, 4, 2], pending=True) if not name.startswith("conv")] == []
    assert pool.errors() == {}


@LAYOUTS
def test_deferred_steps_follow_a_landing(backend_device, engine_layout):
    """Land on a boundary, start from it, defer, cross: every state and every finished block is the oracle's."""
    pool = Pool(backend_device, backend_device.shape(layers=1, engine_layout=engine_layout, slots=16))
    size = 8
    requests = [begin(pool, 1, [5, 9, 2, 11], 6, size), begin(pool, 4, [7, 3, 12, 1], 8, size)]
    for tokens, accepted in (
        ([4, 4], [2, 1]),
        ([4, 3], [1, 2]),
        ([3, 4], [2, 2]),
        ([4, 4], [4, 4]),
        ([4, 4], [4, 1]),
    ):
        align_step(pool, requests, tokens, accepted, size)
    drain(pool, [r.source(size) for r in requests], [r.row for r in requests])
    for request in requests:
        request.truth.assert_state(pool, request.source(size))
    for request, block, position in ((requests[0], 5, 8), (requests[0], 9, 16), (requests[1], 3, 16)):
        request.truth.assert_state(pool, block, position=position, history=not engine_layout)
    assert pool.errors() == {}


@pytest.mark.parametrize("given", ["no mask", "mask of zeros"])
def test_the_plan_folds_a_row_that_the_mask_missed(backend_device, given):
    """A row that must be eager but is not in `eager` is folded now and counted; its neighbour is deferred."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    requests = [begin(pool, 0, [5, 6], 14, 16), begin(pool, 4, [9, 3], 5, 16), begin(pool, 1, [8, 2], 16, 16)]
    # The last token of a full window would land exactly on the boundary.
    requests.append(begin(pool, 3, [10, 11], 12, 16))
    zeros = torch.zeros(4, dtype=torch.bool, device=pool.device)
    align_step(pool, requests, [4, 4, 4, 4], [3, 3, 1, 2], 16, eager=None if given == "no mask" else zeros)
    assert pool.pending.tolist() == [0, 0, 0, 0, 3, 0]
    requests[0].truth.assert_state(pool, 6)
    requests[0].truth.assert_state(pool, 5, position=16)
    requests[2].truth.assert_state(pool, 2)
    requests[3].truth.assert_state(pool, 10)
    assert set(pool.errors()) == {"eager_missed"}


@LAYOUTS
@pytest.mark.parametrize("deferred", [False, True], ids=["folded", "eager row"])
@pytest.mark.parametrize(
    ("source", "table", "accepted"),
    [
        pytest.param(9, [7, 9], 2, id="source is the later block, landing"),
        pytest.param(7, [9, 7], 2, id="source is the later block, landing, ids swapped"),
        pytest.param(9, [7, 9], 4, id="source is the final block"),
        pytest.param(7, [9, 7], 4, id="source is the final block, ids swapped"),
        pytest.param(7, [7, 9], 4, id="source is the boundary block"),
        pytest.param(9, [9, 7], 4, id="source is the boundary block, ids swapped"),
        pytest.param(5, [7, 9], 4, id="three different blocks"),
        pytest.param(5, [7, 7], 4, id="the final block is the boundary block"),
        pytest.param(7, [7, 7], 4, id="all three are one block"),
    ],
)
def test_source_boundary_and_final_block_may_coincide(backend_device, source, table, accepted, deferred, engine_layout):
    """Each program reads all it needs of a slot before it writes, whichever of the three blocks are one (B41, B46).

    Where a block must hold two states, the running state stays.
    """
    backend_device.spare(engine_layout != deferred)
    shape = backend_device.shape(layers=1, heads=1, head_dim=64, engine_layout=engine_layout)
    pool = Pool(backend_device, shape)
    pool.fill(source)
    truth = Truth(pool, source, 14)
    batch = Batch(pool, [Row(source, 2, 4)])
    check_step(batch, verify(batch), {0: truth}, [accepted])
    align = {
        "block_table": pool.int32(table)[None],
        "num_computed_tokens": pool.int32([14]),
        "mamba_block_size": 16,
    }
    if deferred:
        align["eager"] = torch.ones(1, dtype=torch.uint8, device=pool.device)
    commit(batch, [accepted], deferred=deferred, **align)
    if accepted == 2 or table[0] != table[1]:
        truth.assert_state(pool, table[0], position=16)
    truth.assert_state(pool, table[(14 + accepted - 1) // 16])


@pytest.mark.parametrize("deferred", [False, True], ids=["folded", "eager row"])
def test_the_last_column_is_filled_and_the_next_is_null(backend_device, deferred):
    """At the end of the table a landing works; a row that runs past it folds nothing, keeps its count, and is
    counted (B44).
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    fits, runs = begin(pool, 0, [0, 0, 0, 5], 63, 16), begin(pool, 1, [0, 0, 0, 6], 63, 16)
    inner = begin(pool, 3, [8, 0, 0, 0], 4, 16)
    requests = [fits, runs, inner]
    batch = Batch(pool, [Row(r.source(16), r.row, 2) for r in requests])
    check_step(batch, verify(batch), {b: r.truth for b, r in enumerate(requests)}, [1, 0, 2])
    memory = torch.full((3, 6), 10, dtype=torch.int32, device=pool.device)
    memory[:, 1:5] = torch.stack([pool.int32(r.table) for r in requests])
    kept = pool.state(6, 0)[0].clone()
    before = Snapshot(pool)
    positions = {"num_computed_tokens": pool.int32([63, 63, 4]), "mamba_block_size": 16}
    if deferred:
        positions["eager"] = torch.tensor([True, True, False], device=pool.device)
    commit(batch, [1, 2, 2], deferred=deferred, block_table=memory[:, 1:5], **positions)
    fits.truth.assert_state(pool, 5)
    assert same_bytes(pool.checkpoint(0)[6], kept)
    allowed = [5] if deferred else [5, 8]
    assert before.changed(slots=allowed, pending=True) == []
    assert pool.pending.tolist() == ([0, 2, 0, 2, 0, 0] if deferred else [0] * 6)
    if not deferred:
        inner.truth.assert_state(pool, 8)
    assert pool.errors() == {"column": 1, "eager_null": 1}


def test_an_eager_row_with_a_null_destination_keeps_its_count(backend_device):
    """A null id inside the table folds nothing and leaves pending at the accepted count, which a drain can
    fold.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    request = begin(pool, 2, [5, 0], 14, 16)
    before = Snapshot(pool)
    align_step(pool, [request], [4], [3], 16)
    assert pool.pending[2] == 3
    assert [n for n in before.changed(rows=[2], pending=True) if not n.startswith("conv")] == []
    assert set(pool.errors()) == {"eager_null"}
    drain(pool, [5], [2])
    request.truth.assert_state(pool, 5)


def test_a_step_whose_block_was_missing_is_committed_again(backend_device):
    """Once the block is there the same commit folds what was kept; the published block it started from stays."""
    pool = Pool(backend_device, backend_device.shape(layers=2, heads=1))
    request = begin(pool, 2, [5, 0], 16, 16)
    kept = [t.clone() for layer in range(2) for t in pool.state(5, layer)]
    batch = Batch(pool, [Row(5, 2, 4)])
    align = metadata(pool, [request], 16)
    eager = align_eager_mask(align["num_computed_tokens"], batch.query_start_loc, 16)
    check_step(batch, verify(batch), {0: request.truth}, [3])
    commit(batch, [3], eager=eager, **align)
    assert pool.pending[2] == 3 and set(pool.errors()) == {"eager_null"}
    commit(batch, [3], eager=eager, **align | {"block_table": pool.int32([5, 6])[None]})
    assert pool.pending[2] == 0
    request.truth.assert_state(pool, 6)
    for then, now in zip(kept, (t for layer in range(2) for t in pool.state(5, layer)), strict=True):
        assert same_bytes(then, now)


def test_an_exact_landing_needs_no_next_block(backend_device):
    """A window that ends on a boundary is folded where the next column is null or stale."""
    for following in (0, 1 << 30, -4):
        pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
        request = begin(pool, 2, [5, following], 14, 16)
        align_step(pool, [request], [4], [2], 16)
        request.truth.assert_state(pool, 5)
        assert pool.pending[2] == 0
        assert pool.errors() == {}


def test_accepting_nothing_moves_no_state(backend_device):
    """With zero accepted tokens no block changes, on a boundary, before one, and at position zero."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    requests = [begin(pool, 0, [5, 6], 16, 16), begin(pool, 4, [9, 3], 14, 16), begin(pool, 1, [8, 2], 0, 16)]
    before = Snapshot(pool)
    align_step(pool, requests, [4, 4, 4], [0, 0, 0], 16)
    for request, slot in zip(requests, (5, 9, 8), strict=True):
        request.truth.assert_state(pool, slot)
    assert [n for n in before.changed(rows=[0, 4, 1]) if not n.startswith("conv")] == []


def test_padding_rows_reach_no_block_of_live_tables(backend_device):
    """Columns derived from a padding or dummy row lead nowhere, although its table row and counts look alive."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    live = begin(pool, 0, [5, 6], 14, 16)
    pool.fill(9)
    batch = Batch(pool, [Row(0, -1, 4), Row(5, 0, 4), Row(9, -1, 4), Row(0, 3, 2)])
    check_step(batch, verify(batch), {1: live.truth}, [0, 3, 0, 0])
    before = Snapshot(pool)
    table = pool.int32([5, 6, 5, 6, 9, 8, 3, 4]).view(4, 2)
    align = {"block_table": table, "num_computed_tokens": pool.int32([14] * 4), "mamba_block_size": 16}
    eager = torch.ones(4, dtype=torch.bool, device=pool.device)
    commit(batch, [3, 3, 3, 2], eager=eager, **align)
    assert before.changed(slots=[5, 6]) == []
    live.truth.assert_state(pool, 6)
    live.truth.assert_state(pool, 5, position=16)
    assert pool.errors() == {}


def test_the_eager_mask_follows_its_rule(backend_device):
    """A row is eager if its window can reach a boundary or starts on one; a row at position zero starts on
    none.
    """
    size, device = 5, backend_device.device
    rows = [(computed, n) for computed in range(12) for n in range(6)]
    want = [computed % size + n >= size or (computed > 0 and computed % size == 0) for computed, n in rows]
    lengths = torch.tensor([0] + [n for _, n in rows], dtype=torch.int32, device=device)
    starts, order = lengths.cumsum(0, dtype=torch.int32), torch.randperm(len(rows))
    computed = torch.tensor([c for c, _ in rows], dtype=torch.int32, device=device)
    assert align_eager_mask(computed, starts, size).bool().tolist() == want
    shuffled = torch.empty_like(computed)
    shuffled[order.to(device)] = computed
    indices = order.to(device=device, dtype=torch.int32)
    for dtype in (torch.bool, torch.uint8):
        out = torch.zeros(len(rows), dtype=dtype, device=device)
        got = align_eager_mask(shuffled, starts, size, out=out, request_indices=indices)
        assert got.data_ptr() == out.data_ptr()
        assert out.bool().tolist() == want


def test_the_source_of_a_step_is_the_block_of_its_last_token(backend_device):
    """`align_state_indices` reads column max(computed - 1, 0) // size of a strided table; past the end it is
    null.
    """
    device, size = backend_device.device, 4
    memory = torch.full((14, 5), 77, dtype=torch.int32, device=device)
    table = memory[:, 1:4]
    table.copy_(torch.arange(42, dtype=torch.int32).view(14, 3) + 100)
    computed = torch.arange(14, dtype=torch.int32, device=device)
    want = [100 + 3 * c + (max(c - 1, 0) // size) if c <= 12 else 0 for c in range(14)]
    assert align_state_indices(table, computed, size).tolist() == want
    out = torch.full((14,), -5, dtype=torch.int32, device=device)
    assert align_state_indices(table, computed, size, out=out).data_ptr() == out.data_ptr()
    assert out.tolist() == want


def test_a_source_outside_the_table_is_counted(backend_device):
    """Past the last column, and before the first token: null and the first block, both counted, first row noted."""
    device = backend_device.device
    table = torch.arange(1, 13, dtype=torch.int32, device=device).view(4, 3)
    computed = torch.tensor([0, 12, 13, -1], dtype=torch.int32, device=device)
    reset_errors(device)
    assert align_state_indices(table[:2], computed[:2], 4).tolist() == [1, 6]
    assert not error_report(device, wait=True)
    assert align_state_indices(table[:1, :0], computed[:1], 4).tolist() == [0]
    (entry,) = error_report(device, wait=True).entries
    assert (entry.kind, entry.count, entry.first_row) == ("column", 1, 0)
    reset_errors(device)
    assert align_state_indices(table, computed, 4).tolist() == [1, 6, 0, 10]
    (entry,) = error_report(device, wait=True).entries
    assert (entry.kind, entry.count, entry.first_row) == ("column", 2, 2)
    reset_errors(device)


@pytest.mark.parametrize("bad", [13, -1])
def test_checked_mode_names_a_source_outside_the_table(backend_device, monkeypatch, bad):
    """The last column's last token is inside."""
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    table = torch.ones(2, 3, dtype=torch.int32, device=backend_device.device)
    computed = torch.tensor([12, bad], dtype=torch.int32, device=backend_device.device)
    with pytest.raises(ValueError, match=rf"num_computed_tokens, row 1: expected 0\.\.12, .* got {bad}"):
        align_state_indices(table, computed, 4)
    assert align_state_indices(table[:1], computed[:1], 4).tolist() == [1]
    with pytest.raises(ValueError, match="num_computed_tokens, row 0: expected"):
        align_state_indices(table[:1, :0], computed[:1] * 0, 4)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_boundary_and_final_state_have_the_bits_of_a_plain_commit(backend_device, pool_dtype):
    """Folding to a boundary gives the bytes of a commit of that many tokens from the same checkpoint."""
    pool = Pool(backend_device, backend_device.shape(layers=1, pool=pool_dtype))
    request = begin(pool, 2, [5, 6], 14, 16)
    batch = Batch(pool, [Row(5, 2, 4)])
    verify(batch)
    plain = {count: pool.twin() for count in (2, 4)}
    for count, twin in plain.items():
        commit(batch.on(twin), [count], deferred=False)
    commit(batch, [4], deferred=False, **metadata(pool, [request], 16))
    for block, count in ((5, 2), (6, 4)):
        for mine, theirs in zip(pool.state(block, 0), plain[count].state(5, 0), strict=True):
            assert same_bytes(mine, theirs)
