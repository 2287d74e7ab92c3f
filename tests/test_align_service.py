"""Align mode over many steps, as an engine with a prefix cache runs it: what is published, and what stays so."""

import random

import pytest
import torch
from rig import Pool, Snapshot, Target, same_bytes
from steps import Batch, Row, commit, core_verify, drain, verify
from test_align import Decoded, align_step, begin, metadata
from truth import Truth, check_step

from graphrt import SCRATCH_ROW, BoundaryBlock, align_eager_mask, align_state_indices, reset_errors
from graphrt.capture import CommitRunner, DecodeStep, StepInputs

CPU = Target("torch", "cpu")


def published(pool, requests, starts, size):
    """What the last commit wrote at a boundary, checked: each block is the oracle's at exactly its end (B42)."""
    found = {}
    for block in pool.context.boundary_blocks(len(requests)):
        request, position = requests[block.row], starts[block.row] + block.num_accepted
        assert position % size == 0
        assert block.slot == request.table[position // size - 1]
        request.truth.assert_state(pool, block.slot, position=position)
        found[block.slot] = (request, position)
    return found


@pytest.mark.parametrize("engine_layout", [False, True], ids=["ours", "engine"])
def test_published_blocks_are_the_oracle_and_stay_as_published(backend_device, engine_layout):
    """Random windows over four requests: a block is reported exactly when its end is passed, and never changes again.

    In the engine's convolution layout a later step shifts the history of the block it starts from, if that is
    published: there only the checkpoint stays (B41, B42, B90).
    """
    backend_device.spare(engine_layout)
    size, steps = 8, 4 if backend_device.interpreted else 16
    pool = Pool(
        backend_device, backend_device.shape(layers=1, heads=1, slots=24, engine_layout=engine_layout, query_len=4)
    )
    tables = [[5, 9, 2, 11, 3], [7, 23, 12, 1, 4], [8, 6, 10, 13, 14], [15, 16, 17, 18, 19]]
    positions = (6, 15, 5, 13)
    requests = [begin(pool, b, tables[b], positions[b], size) for b in range(4)]
    rng, bytes_of = random.Random(4), {}
    for _ in range(steps):
        live = [r for r in requests if r.truth.position + 4 <= 5 * size]
        if not live:
            break
        tokens = [rng.randint(1, 4) for _ in live]
        accepted = [rng.randint(int(engine_layout), n) for n in tokens]
        starts = align_step(pool, live, tokens, accepted, size)
        new = published(pool, live, starts, size)
        passed = [
            (r, (start // size + 1) * size)
            for r, start, a in zip(live, starts, accepted, strict=True)
            if start + a >= (start // size + 1) * size
        ]
        assert sorted(map(id, (r for r, _ in new.values()))) == sorted(map(id, (r for r, _ in passed)))
        assert not set(new) & set(bytes_of), "a block was published twice"
        for slot in new:
            bytes_of[slot] = [t.clone() for t in pool.state(slot, 0)]
        for slot, (state, history) in bytes_of.items():
            now = pool.state(slot, 0)
            assert same_bytes(now[0], state), f"checkpoint of published block {slot}"
            assert engine_layout or same_bytes(now[1], history), f"history of published block {slot}"
    assert len(bytes_of) >= (2 if backend_device.interpreted else 8)
    assert pool.errors() == {}
    drain(pool, [r.source(size) for r in requests], [r.row for r in requests])
    for request in requests:
        request.truth.assert_state(pool, request.source(size))


@pytest.mark.parametrize("ids", [(7, 9), (9, 7)], ids=["ascending", "descending"])
def test_the_step_after_an_exact_landing_leaves_the_landing_alone(backend_device, ids):
    """14 tokens and two accepted end on the boundary; block and running state are state 16, then the step after it
    goes to the next block and the published one keeps its bytes (B41).
    """
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    request = begin(pool, 2, [*ids, 3], 14, 16)
    starts = align_step(pool, [request], [4], [2], 16)
    assert list(published(pool, [request], starts, 16)) == [ids[0]]
    request.truth.assert_state(pool, ids[0], position=16)
    kept = [t.clone() for t in pool.state(ids[0], 0)]
    for tokens, accepted in (([4], [0]), ([4], [3]), ([2], [1])):
        starts = align_step(pool, [request], tokens, accepted, 16)
        assert pool.context.boundary_blocks(1) == []
    drain(pool, [ids[1]], [2])
    request.truth.assert_state(pool, ids[1])
    for then, now in zip(kept, pool.state(ids[0], 0), strict=True):
        assert same_bytes(then, now)
    assert pool.errors() == {}


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "together"])
def test_requests_that_share_a_prefix_leave_its_block_alone(backend_device, together):
    """Two requests resume from one published block and go to blocks of their own; it keeps its bytes (B42).

    A verify keeps its window's inputs in the slot it starts from, so in one step only one row may start from it: the
    other starts from a copy.
    """
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    requests = [begin(pool, 0, [5, 6], 16, 16)]
    requests.append(Decoded(3, [5, 8], Truth(pool, 5, 16)))
    kept = [t.clone() for t in pool.state(5, 0)]
    if together:
        pool.context.copy_state(5, 9, SCRATCH_ROW, pool.pending)
        requests[1].table[0] = 9
        align_step(pool, requests, [4, 3], [2, 3], 16)
    else:
        align_step(pool, requests[:1], [4], [2], 16)
        align_step(pool, requests[1:], [3], [3], 16)
    for request, slot in zip(requests, (6, 8), strict=True):
        request.truth.assert_state(pool, slot)
    for then, now in zip(kept, pool.state(5, 0), strict=True):
        assert same_bytes(then, now)
    assert pool.pending.tolist() == [0] * 6 and pool.context.boundary_blocks(2) == []


def test_columns_are_counted_in_state_blocks(backend_device):
    """The scheduler has blocks of 16 tokens, the state blocks of 64: 65 tokens lie in column 1, and column 4 of the
    narrow table would be an error that is counted (B43).
    """
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    table = torch.full((1, 8), 11, dtype=torch.int32, device=pool.device)[:, 3:5]
    table.copy_(pool.int32([5, 6])[None])
    computed = pool.int32([65])
    assert align_state_indices(table, computed, 64).tolist() == [6]
    assert align_state_indices(table, computed, 16).tolist() == [0] and pool.errors() == {"column": 1}
    reset_errors(pool.device)
    request = begin(pool, 2, [5, 6], 65, 64)
    assert request.source(64) == 6
    align_step(pool, [request], [4], [3], 64)
    drain(pool, [6], [2])
    request.truth.assert_state(pool, 6)
    assert pool.errors() == {}
    batch = Batch(pool, [Row(6, 2, 4)])
    verify(batch)
    before = Snapshot(pool)
    wrong = {"block_table": table, "num_computed_tokens": computed, "mamba_block_size": 16}
    commit(batch, [1], deferred=False, **wrong)
    assert before.changed() == []
    assert set(pool.errors()) == {"column", "eager_null"}


def test_the_end_of_the_table_is_an_error_in_checked_mode_only():
    """63 of 64 tokens, two accepted: checked mode raises; unchecked the neighbour's step is right even so (B44)."""
    pool = Pool(CPU, CPU.shape(layers=1, heads=1))
    runs, inner = begin(pool, 1, [0, 0, 0, 6], 63, 16), begin(pool, 3, [8, 0, 0, 0], 4, 16)
    batch = Batch(pool, [Row(r.source(16), r.row, 2) for r in (runs, inner)])
    check_step(batch, verify(batch), {1: inner.truth}, [0, 2])
    align = metadata(pool, [runs, runs], 16) | {"num_computed_tokens": pool.int32([63, 4])}
    align["block_table"][1] = pool.int32([8, 0, 0, 0])
    object.__setattr__(pool.context, "check", True)
    with pytest.raises(ValueError, match=r"^block_table, row 0: expected a column below 4 .*, got 4"):
        commit(batch, [2, 2], deferred=False, **align)
    object.__setattr__(pool.context, "check", False)
    commit(batch, [2, 2], deferred=False, **align)
    inner.truth.assert_state(pool, 8)
    assert pool.context.boundary_blocks(2) == []


def test_a_boundary_that_is_not_reached_is_not_reported(backend_device):
    """From token 24 a window of four stays inside its block: no boundary, no other byte, no claim (B45)."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    request = begin(pool, 2, [4, 5, 6], 24, 16)
    before = Snapshot(pool)
    align_step(pool, [request], [4], [4], 16, deferred=False)
    request.truth.assert_state(pool, 5)
    assert before.changed(slots=[5], rows=[2]) == []
    assert pool.context.boundary_blocks(1) == []
    assert pool.context.boundary_state_indices.tolist()[0] == pool.context.boundary_recovery_lens.tolist()[0] == 0


def test_a_boundary_whose_block_is_unallocated_is_not_reported(backend_device):
    """The running state goes on; nobody claims that the boundary was kept (B45)."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    pool.fill(9)
    request = begin(pool, 2, [9, 5], 14, 16)
    batch = Batch(pool, [Row(9, 2, 4)])
    check_step(batch, verify(batch), {0: request.truth}, [4])
    align = {"block_table": pool.int32([0, 5])[None], "num_computed_tokens": pool.int32([14]), "mamba_block_size": 16}
    commit(batch, [4], deferred=False, **align)
    request.truth.assert_state(pool, 5)
    assert pool.context.boundary_blocks(1) == []


def test_the_list_covers_the_rows_of_the_last_commit_alone(backend_device):
    """A smaller commit after a larger one: its own rows are asked for, and padding rows publish nothing (B42)."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    requests = [begin(pool, 0, [5, 6], 14, 16), begin(pool, 1, [7, 8], 13, 16), begin(pool, 2, [9, 10], 2, 16)]
    align_step(pool, requests, [4, 4, 4], [2, 4, 1], 16)
    assert pool.context.boundary_blocks(3) == [BoundaryBlock(0, 5, 2), BoundaryBlock(1, 7, 3)]
    align_step(pool, requests[2:], [4], [2], 16)
    assert pool.context.boundary_blocks(1) == []


def test_a_block_as_small_as_the_window_goes_from_boundary_to_boundary(backend_device):
    """Size equals Q: every step is eager, and each block is published in its turn (B47)."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    request = begin(pool, 2, [5, 6, 7], 4, 4)
    for tokens, accepted, slot in (([4], [4], 6), ([4], [4], 7)):
        starts = align_step(pool, [request], tokens, accepted, 4)
        assert list(published(pool, [request], starts, 4)) == [slot]
    assert pool.pending[2] == 0 and pool.errors() == {}


def test_a_block_below_one_window_is_refused_when_the_runner_is_made():
    """Not only at the first commit: the error of the constructors names both numbers (B47)."""
    pool = Pool(CPU, CPU.shape(layers=1, heads=1))
    inputs = StepInputs(2, 4, "cpu", block_table_width=2)
    parts = (pool.context, pool.pending, inputs)
    words = r"^mamba_block_size: expected at least one window, spec_query_len 4, got 3"
    with pytest.raises(ValueError, match=words):
        CommitRunner(*parts, mamba_block_size=3)
    with pytest.raises(ValueError, match=words):
        DecodeStep(*parts, lambda rows: None, lambda rows, out: None, mamba_block_size=3)
    batch = Batch(pool, [Row(3, 0, 4)])
    align = {"block_table": pool.int32([3])[None], "num_computed_tokens": pool.int32([0])}
    with pytest.raises(ValueError, match=words):
        commit(batch, [1], mamba_block_size=3, **align)
    CommitRunner(*parts, mamba_block_size=4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "fp32_deferred"])
def test_coinciding_blocks_agree_over_many_repeats(backend):
    """Source, boundary and final block in one, with many value tiles a head: 200 repeats give the same bytes (B46)."""
    target = Target(backend, "cuda")
    pool = Pool(target, target.shape(layers=1, head_dim=128, heads=4))
    pool.fill(7)
    batch, first = Batch(pool, [Row(7, 2, 4)]), None
    align = {"block_table": pool.int32([7, 9])[None], "num_computed_tokens": pool.int32([14]), "mamba_block_size": 16}
    verify(batch)
    start = [t.clone() for t in (pool.checkpoint(0)[7], pool.conv(0)[7])]
    for _ in range(200):
        pool.checkpoint(0)[7].copy_(start[0])
        pool.conv(0)[7].copy_(start[1])
        commit(batch, [4], deferred=False, **align)
        now = [t.clone() for slot in (7, 9) for t in pool.state(slot, 0)]
        first = first or now
        assert all(same_bytes(a, b) for a, b in zip(first, now, strict=True))


def test_a_boundary_block_is_ready_right_after_the_commit(backend_device):
    """Nothing has to be flushed before a published block may be read; deferring such a row is refused (B90)."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    request = begin(pool, 2, [5, 6], 15, 16)
    pool.poison(6)
    starts = align_step(pool, [request], [4], [3], 16)
    published(pool, [request], starts, 16)
    request.truth.assert_state(pool, 6)
    if backend_device == CPU:
        object.__setattr__(pool.context, "check", True)
        batch = Batch(pool, [Row(5, 1, 4)])
        core_verify(batch, 0, deferred=True)
        align = {"block_table": pool.int32([5, 6])[None], "num_computed_tokens": pool.int32([15])}
        with pytest.raises(ValueError, match=r"^eager, row 0: expected set"):
            commit(batch, [3], mamba_block_size=16, **align)
        mask = align_eager_mask(align["num_computed_tokens"], batch.query_start_loc, 16)
        assert mask.tolist() == [True]
