"""Bits that must not depend on when a fold happens, on the company in the batch, or on rejected drafts."""

import pytest
import torch
from rig import Pool, same_bytes
from steps import Batch, Row, Tokens, commit, drain, verify
from traces import POLICIES, Trace
from truth import run_step, start

STORED = pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
BOUNDS = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "unbounded"])


@pytest.mark.parametrize(
    ("pool_dtype", "lower_bound"),
    [(torch.float32, -5.0), (torch.float32, None), (torch.bfloat16, None), (torch.float16, -5.0)],
    ids=str,
)
def test_commit_flush_drain_and_replay_give_one_checkpoint(backend_device, pool_dtype, lower_bound):
    """The same records folded by whatever kernel leave the same bytes in checkpoint and history, for every
    count.
    """
    shape = backend_device.shape(layers=1, heads=1, pool=pool_dtype, lower_bound=lower_bound)
    pool = Pool(backend_device, shape)
    slots = {row: row + 4 for row in range(5)}
    truths = start(pool, slots)
    first = Batch(pool, [Row(slot, row, 4) for row, slot in slots.items()])
    run_step(first, truths, [3, 1, 2, 4, 4])
    batch, counts = Batch(pool, first.rows), list(range(5))
    verify(batch)
    twins = {name: pool.twin() for name in ("commit", "flush", "drain", "eager", "replay", "replay before nothing")}
    for name, twin in twins.items():
        step = batch.on(twin)
        eager = torch.ones(5, dtype=torch.bool, device=twin.device) if name == "eager" else None
        commit(step, counts, deferred=name != "commit", eager=eager)
        if name in ("flush", "drain"):
            getattr(twin.context, name)(step.state_indices, step.record_rows, twin.pending)
        if name.startswith("replay"):
            length = 4 if name == "replay" else 0
            verify(Batch(twin, [Row(slot, row, length) for row, slot in slots.items()]))
    want = twins.pop("commit")
    for name, twin in twins.items():
        for slot in slots.values():
            for mine, theirs in zip(want.state(slot, 0), twin.state(slot, 0), strict=True):
                assert same_bytes(mine, theirs), f"{name}, slot {slot}"


def record_tensors(pool):
    return pool.records(0).correction, pool.records(0).key_gate


def assert_one_log(target, shape, seed, steps, **options):
    """All policies leave the same outputs and states."""
    params, logs = None, {}
    for policy in POLICIES:
        pool = Pool(target, shape, params=params)
        params = pool.params
        logs[policy] = Trace(pool, seed, policy=policy, **options).run(steps)
    want = logs.pop("eager")
    for policy, log in logs.items():
        assert len(log) == len(want)
        for i, (mine, theirs) in enumerate(zip(log, want, strict=True)):
            assert same_bytes(mine, theirs), f"{policy} and eager differ in entry {i}"


@STORED
@pytest.mark.parametrize("engine_layout", [False, True], ids=["hist+Q", "hist+Q-1"])
def test_a_deferred_trace_has_the_bits_of_an_eager_one(backend_device, pool_dtype, engine_layout):
    """Deferred, flushed, drained and eagerly committed runs of one trace give the same bytes at every step."""
    backend_device.spare(engine_layout != (pool_dtype == torch.bfloat16))
    shape = backend_device.shape(layers=1, heads=1, pool=pool_dtype, engine_layout=engine_layout)
    assert_one_log(backend_device, shape, 3, 4 if backend_device.interpreted else 12, dummies=False)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_deferred_align_trace_has_the_bits_of_an_eager_one(backend_device, pool_dtype):
    """The same with a block table."""
    shape = backend_device.shape(layers=1, heads=1, pool=pool_dtype, slots=24)
    steps = 4 if backend_device.interpreted else 12
    assert_one_log(backend_device, shape, 4, steps, dummies=False, block_size=8, width=4)


@BOUNDS
@pytest.mark.parametrize("conv_dim", [20, 3])
def test_a_request_has_the_same_bits_in_any_company(backend_device, lower_bound, conv_dim):
    """Alone or among others, in the first or the last row, with or without a tail: same outputs, records and
    state, also where the channels of a row fill no whole vector (B85).
    """
    shape = backend_device.shape(layers=1, heads=1, rows=8, slots=10, lower_bound=lower_bound, conv_dim=conv_dim)
    pool = Pool(backend_device, shape)
    start(pool, {row: row + 1 for row in range(8)})
    alone = Batch(pool, [Row(4, 3, 4)])
    pool.pending[3] = 2
    for tensor in (*record_tensors(pool), pool.conv(0)):
        tensor[:] = torch.randn_like(tensor)
    reference = pool.twin()
    want = verify(alone.on(reference))[0]
    for place, tail in ((0, 0), (7, 5), (3, 100)):
        others = [Row(row + 1, row, 1 + row % 4) for row in range(8) if row != 3]
        rows = [*others[:place], Row(4, 3, 4), *others[place:]]
        twin = pool.twin()
        batch = Batch(twin, rows, tail=tail)
        span = batch.span(place)
        for mine, theirs in zip(vars(batch.tokens[0]).values(), vars(alone.tokens[0]).values(), strict=True):
            mine[span] = theirs
        got = verify(batch)[0]
        assert same_bytes(got.out[span], want.out) and same_bytes(got.conv[span], want.conv)
        assert same_bytes(twin.checkpoint(0)[4], reference.checkpoint(0)[4])
        for mine, theirs in zip(record_tensors(twin), record_tensors(reference), strict=True):
            assert same_bytes(mine[3], theirs[3])


@pytest.mark.parametrize(
    ("lower_bound", "act"), [(-5.0, torch.float32), (-5.0, torch.bfloat16), (None, torch.float32)], ids=str
)
@pytest.mark.parametrize("keep", [1, 3])
def test_a_rejected_draft_changes_no_bit_before_it(backend_device, lower_bound, act, keep):
    """Outputs and records of the first tokens have the same bytes whatever finite tokens follow, or none."""
    backend_device.spare((act == torch.bfloat16) == (keep == 3))
    shape = backend_device.shape(layers=1, heads=1, lower_bound=lower_bound, act=act)
    pool = Pool(backend_device, shape)
    start(pool, {2: 5})
    batch = Batch(pool, [Row(5, 2, 4)])
    twins = []
    for scale, length in ((1.0, 4), (-30.0, 4), (0.0, 4), (1.0, keep)):
        tokens = batch.tokens[0].clone()
        for part in vars(tokens).values():
            part[keep:] *= scale
        parts = Tokens(*(part[:length] for part in vars(tokens).values()))
        twin = pool.twin()
        twins.append((twin, verify(Batch(twin, [Row(5, 2, length)], tokens=[parts]))[0]))
    (first, want), *others = twins
    for twin, got in others:
        assert same_bytes(got.out[:keep], want.out[:keep]) and same_bytes(got.conv[:keep], want.conv[:keep])
        for mine, theirs in zip(record_tensors(twin), record_tensors(first), strict=True):
            assert same_bytes(mine[2, :, :keep], theirs[2, :, :keep])


@pytest.mark.parametrize(
    ("value", "lower_bound"), [(float("nan"), -5.0), (float("inf"), None), (float("-inf"), -5.0)], ids=str
)
@pytest.mark.parametrize("part", ["q", "k", "v", "raw_g", "raw_beta"])
def test_a_draft_that_is_not_finite_spoils_only_its_own_window(backend_device, lower_bound, value, part):
    """Records of earlier tokens, the checkpoint, other rows and the next step keep the bits of a finite
    draft.
    """
    backend_device.spare(value == float("-inf") or (value == float("inf") and part not in ("k", "raw_g")))
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1, lower_bound=lower_bound))
    truths = start(pool, {2: 5, 0: 3})
    run_step(Batch(pool, [Row(3, 0, 4), Row(5, 2, 4)]), truths, [2, 3])
    batch = Batch(pool, [Row(3, 0, 3), Row(5, 2, 4)])
    twin = pool.twin()
    bad = batch.tokens[0].clone()
    getattr(bad, part)[batch.starts[1] + 2 :] = value
    spoiled = Batch(twin, batch.rows, tokens=[bad])
    want, got = verify(batch)[0], verify(spoiled)[0]
    assert same_bytes(got.out[:3], want.out[:3])
    for mine, theirs in zip(record_tensors(twin), record_tensors(pool), strict=True):
        assert same_bytes(mine[0, :, :3], theirs[0, :, :3])
        assert same_bytes(mine[2, :, :2], theirs[2, :, :2])
    following = Batch(pool, [Row(5, 2, 4), Row(3, 0, 1)])
    for which, step in ((pool, batch), (twin, spoiled)):
        commit(step, [1, 2])
        verify(following.on(which))
        commit(following.on(which), [1, 1])
        drain(which, [5, 3], [2, 0])
    for slot in (5, 3):
        assert same_bytes(pool.checkpoint(0)[slot], twin.checkpoint(0)[slot])


def test_repeating_a_step_on_a_copy_repeats_its_bits(backend_device):
    """Two runs from the same bytes give the same bytes: nothing depends on the order of programs."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    truths = start(pool, {row: row + 1 for row in range(4)})
    run_step(Batch(pool, [Row(row + 1, row, 4) for row in range(4)]), truths, [1, 2, 3, 4])
    batch = Batch(pool, [Row(row + 1, row, 4) for row in range(4)])
    twins = [pool.twin() for _ in range(2)]
    outs = [verify(batch.on(twin))[0] for twin in twins]
    assert same_bytes(outs[0].out, outs[1].out)
    for mine, theirs in zip(twins[0].tensors().values(), twins[1].tensors().values(), strict=True):
        assert same_bytes(mine, theirs)
