"""Offsets beyond 32 bits: memory of gigabytes that is never touched but for a few pages."""

import pytest
import torch
from rig import Pool, same_bytes, whole
from steps import Batch, Row, Tokens, commit, drain, verify
from truth import start

from graphrt import FP32_DEFERRED

# Elements between two slots: slot 2 lies at 2^31 and its 32-bit offset would be negative.
FAR = 1 << 30


def far_apart(view, stride=FAR):
    """The same slots, `stride` elements apart, in memory that exists only where it is written."""
    size = (view.shape[0] - 1) * stride + view[0].numel()
    memory = torch.empty(size, dtype=view.dtype, device=view.device)
    far = memory.as_strided(view.shape, (stride, *view.stride()[1:]))
    far.copy_(view)
    return far


def far_pool(target):
    """A pool of three slots, the last of them past 2^31 elements, and its near twin; 16-bit where the backend can."""
    half = torch.bfloat16
    kind = torch.float32 if target.backend == FP32_DEFERRED else half
    shape = target.shape(layers=1, heads=1, slots=3, rows=3, act=half, pool=kind)
    near = Pool(target, shape)
    far = Pool(target, shape, params=near.params)
    for slot in (1, 2):
        near.fill(slot)
    far.layers[0].kv_cache = tuple(far_apart(part) for part in near.layers[0].kv_cache)
    far.context = type(far.context).create(
        far.layers, spec_query_len=4, max_num_reqs=3, backend=target.backend, conv_dim_first=True
    )
    assert far.context.backend == near.context.backend
    return near, far


def assert_same_states(near, far):
    for mine, theirs in zip(near.layers[0].kv_cache, far.layers[0].kv_cache, strict=True):
        assert same_bytes(mine, theirs)


FOLDS = ["replay", "flush", "drain", "commit", "align"]


def fold_far_and_near(near, far, fold):
    """One step of both slots on both pools, folded in one way."""
    batch = Batch(near, [Row(2, 2, 4), Row(1, 0, 4)])
    for pool in (near, far):
        step = batch.on(pool)
        verify(step)
        align = {}
        if fold == "align":
            align = {"block_table": pool.int32([2, 1]).view(2, 1), "num_computed_tokens": pool.int32([4, 7])}
            align["mamba_block_size"] = 16
        commit(step, [3, 4], deferred=fold not in ("commit", "align"), **align)
        if fold in ("flush", "drain"):
            getattr(pool.context, fold)(step.state_indices, step.record_rows, pool.pending)
        if fold == "replay":
            verify(step)
    assert_same_states(near, far)


@pytest.mark.parametrize("fold", FOLDS)
def test_slots_beyond_2_31_elements_work(backend_device, fold):
    """Every operation on the far pool gives the bytes of the near one, also in the slot whose offset wraps (B78)."""
    if backend_device.device != "cpu":
        pytest.skip("memory on a GPU is real: see the next test")
    fold_far_and_near(*far_pool(backend_device), fold)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.xdist_group("device memory")
def test_slots_beyond_2_31_elements_of_device_memory_work(backend_device):
    """Checkpoints and convolution states whose last slot lies past 2^31 elements: every operation gives the bytes of
    the near pool (B78). 9 GB, for `fp32_deferred` 13 GB.
    """
    if backend_device.device != "cuda":
        pytest.skip("memory of a CPU: see the test before")
    for fold in FOLDS:
        near, far = far_pool(backend_device)
        assert all(whole(part).numel() > 1 << 31 for part in far.layers[0].kv_cache)
        fold_far_and_near(near, far, fold)
        del near, far
    torch.cuda.empty_cache()


def test_tokens_beyond_2_31_elements_work(backend_device):
    """A token stride whose product with the token index leaves 32 bits reads and writes the right tokens."""
    if backend_device.device != "cpu":
        pytest.skip("memory on a GPU is real")
    half = torch.bfloat16
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1, act=half))
    start(pool, {0: 1, 1: 2})
    twin = pool.twin()
    batch = Batch(pool, [Row(1, 0, 3), Row(0, -1, 1), Row(2, 1, 1)])
    parts = [far_apart(part) for part in vars(batch.tokens[0]).values()]
    want = verify(batch)[0]
    got = verify(Batch(twin, batch.rows, tokens=[Tokens(*parts)]))[0]
    assert same_bytes(want.out, got.out) and same_bytes(want.conv, got.conv)
    for name, mine in pool.tensors().items():
        assert same_bytes(mine, twin.tensors()[name]), name


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.xdist_group("device memory")
def test_the_last_slot_and_row_of_a_full_pool_work(backend_device):
    """Slot 11,000 of a pool of 12 x 128 x 128 FP32 states is the oracle's; the slots at wrapped offsets stay
    (B78).
    """
    if backend_device.device != "cuda":
        pytest.skip("needs 9 GB of device memory")
    shape = backend_device.shape(layers=1, heads=12, head_dim=128, slots=11_001, rows=64)
    pool = Pool(backend_device, shape)
    truths = start(pool, {63: 11_000})
    for count in (3, 2):
        batch = Batch(pool, [Row(11_000, 63, 4)])
        verify(batch)
        truths[63].step(batch.windows(0), count)
        commit(batch, [count])
    drain(pool, [11_000], [63])
    truths[63].assert_state(pool, 11_000)
    assert bool(pool.checkpoint(0)[:11_000].isnan().all())
    assert whole(pool.checkpoint(0)).numel() > 1 << 31
