"""The convolution as an option of the verify: as by the convolution verify and the verify one after the other."""

from dataclasses import replace

import pytest
import torch
from rig import Pool, Target, same_bytes, whole
from steps import Batch, Row, commit, conv_verify, core_verify, drain
from test_errors import assert_refused

from graphrt import FusedConv, allocate_records, kda_conv_verify, kda_deferred_verify, kda_recoverssm_verify

LAYOUTS = pytest.mark.parametrize("engine_layout", [False, True], ids=["hist+Q", "hist+Q-1"])
FIRST = pytest.mark.parametrize("conv_dim_first", [True, False], ids=["dim first", "dim last"])
DEFERRED = pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "stock"])


def fused_pool(target, **changes):
    """One layer whose conv_dim holds q, k and v."""
    base = target.shape(layers=1)
    return Pool(target, target.shape(layers=1, conv_dim=3 * base.heads * base.head_dim, **changes))


def parts_of(pool, x):
    """q, k, v [1, T, H, K] as views of packed projections [T, 3 H K]."""
    return x[None].unflatten(-1, (3, pool.shape.heads, pool.shape.head_dim)).unbind(2)


def fused(batch, *, deferred, rows=True, conv=None, parts=None, **kw):
    """The verify with its convolution, `[T, H, V]`."""
    pool, t = batch.pool, batch.tokens[0]
    c, s = pool.params[0], pool.shape
    conv = conv or FusedConv(pool.layers[0].kv_cache[0], c.conv_weight, c.conv_bias, s.conv_dim_first)
    arguments = (
        *(parts or parts_of(pool, t.x)), t.raw_g[None], t.raw_beta[None], c.A_log, c.dt_bias, c.lower_bound,
        pool.checkpoint(0), pool.records(0), batch.query_start_loc, batch.state_indices, s.query_len,
    )  # fmt: skip
    kw = {"record_rows": batch.record_rows if rows else None, "conv": conv, "backend": pool.target.backend} | kw
    if deferred:
        return kda_deferred_verify(*arguments, pending=pool.pending, **kw)[0]
    return kda_recoverssm_verify(*arguments, **kw)[0]


def one_after_the_other(batch, *, deferred, rows=True):
    """The same in two calls."""
    t = batch.tokens[0]
    mixed = conv_verify(batch, 0, deferred=deferred, rows=rows)
    t.q, t.k, t.v = (part[0] for part in parts_of(batch.pool, mixed))
    return core_verify(batch, 0, deferred=deferred, rows=rows)


def assert_same(pool, other, outputs):
    """Equal outputs, and every byte of both pools equal but for the scratch rows."""
    assert same_bytes(*outputs)
    theirs = other.tensors()
    for name, mine in pool.tensors().items():
        a, b = whole(mine).clone(), whole(theirs[name]).clone()
        if name.startswith(("correction", "key_gate")):
            a[: mine.storage_offset()] = b[: mine.storage_offset()] = 0
        assert same_bytes(a, b), name


@LAYOUTS
@FIRST
@DEFERRED
def test_the_fused_verify_has_the_bits_of_the_two_calls(backend_device, deferred, engine_layout, conv_dim_first):
    """Ragged, empty, over-long, null and dummy rows, over three steps with other counts pending."""
    backend_device.spare(engine_layout == conv_dim_first or deferred != conv_dim_first)
    pool = fused_pool(backend_device, engine_layout=engine_layout, conv_dim_first=conv_dim_first)
    for slot in (3, 4, 5, 7, 9):
        pool.fill(slot)
    twin = pool.twin()
    for lengths, counts in (
        ([4, 4, 4, 2, 3], [1, 4, 3, 0, 0]),
        ([4, 1, 0, 1, 2], [2, 1, 0, 0, 0]),
        ([6, 3, 4, 2, 0], [4, 2, 1, 0, 0]),
    ):
        rows = zip((7, 3, 5, 0, 9), (0, 1, 2, 3, -1), lengths, strict=True)
        batch = Batch(pool, [Row(*row) for row in rows], tail=2, gap=8)
        other = Batch(twin, batch.rows, tokens=[tokens.clone() for tokens in batch.tokens])
        got = fused(batch, deferred=deferred)
        want = one_after_the_other(other, deferred=deferred)
        assert_same(pool, twin, (got, want))
        for step in (batch, other):
            commit(step, counts, deferred=deferred)
    for each in (pool, twin):
        drain(each, [7, 3, 5], [0, 1, 2])
    assert_same(pool, twin, (got, want))


@DEFERRED
@pytest.mark.parametrize("width, bias", [(2, False), (3, True), (6, False)])
def test_other_widths_and_no_bias_fuse_as_well(backend_device, deferred, width, bias):
    """Where a kernel cannot take the width in, two launches do it."""
    backend_device.spare(not deferred or width != 3)
    pool = fused_pool(backend_device, width=width, conv_bias=bias)
    for slot in (3, 5):
        pool.fill(slot)
    twin = pool.twin()
    for counts in ([2, 4], [3, 1]):
        batch = Batch(pool, [Row(3, 1, 4), Row(5, 0, 4)])
        other = Batch(twin, batch.rows, tokens=[tokens.clone() for tokens in batch.tokens])
        outputs = fused(batch, deferred=deferred), one_after_the_other(other, deferred=deferred)
        assert_same(pool, twin, outputs)
        for step in (batch, other):
            commit(step, counts, deferred=deferred)


@DEFERRED
@pytest.mark.parametrize("width", [4, 6], ids=["one launch", "two launches"])
def test_a_bad_value_is_counted_once_by_the_fused_verify(backend_device, deferred, width):
    """Convolution and verify meet the same rows: one event of each, however many launches it takes."""
    backend_device.spare(deferred or width != 4)
    pool = fused_pool(backend_device, width=width)
    for slot in (3, 5, 7, 9):
        pool.fill(slot)
    pool.pending[2] = 77
    rows = [Row(3, 0, 4), Row(1 << 30, 1, 2), Row(5, 99, 1), Row(7, 2, 3), Row(9, 3, 6), Row(0, -1, 5)]
    fused(Batch(pool, rows), deferred=deferred)
    assert pool.errors() == {"slot": 1, "row": 1, "query_len": 2} | ({"pending": 1} if deferred else {})


def test_projections_may_lie_apart(backend_device):
    """q, k and v in memory of their own give the bits of one packed projection."""
    pool = fused_pool(backend_device)
    pool.fill(3)
    twin = pool.twin()
    batch = Batch(pool, [Row(3, 1, 4)])
    packed = fused(batch, deferred=True)
    apart = [part.contiguous() for part in parts_of(twin, batch.tokens[0].x)]
    got = fused(batch.on(twin), deferred=True, parts=apart)
    assert_same(twin, pool, (got, packed))


def test_without_record_rows_every_live_slot_is_written(backend_device):
    """The stock verify without `record_rows` keeps row b's records in row b, and its window in the slot."""
    pool = fused_pool(backend_device)
    for slot in (3, 5):
        pool.fill(slot)
    twin = pool.twin()
    batch = Batch(pool, [Row(5, 0, 2), Row(3, 1, 3)])
    other = Batch(twin, batch.rows, tokens=[tokens.clone() for tokens in batch.tokens])
    got = fused(batch, deferred=False, rows=False)
    assert_same(pool, twin, (got, one_after_the_other(other, deferred=False, rows=False)))


@pytest.mark.parametrize(
    "change, name, words",
    [
        (lambda c: "conv", "conv", ("FusedConv",)),
        (lambda c: FusedConv(c.conv_state[:, :20], c.weight[:20], None), "conv.conv_state", ("96",)),
        (lambda c: FusedConv(c.conv_state[:2], c.weight, c.bias), "conv.conv_state", ("slots",)),
        (lambda c: FusedConv(c.conv_state.double(), c.weight, c.bias), "conv.conv_state", ("float32", "float64")),
        (lambda c: FusedConv(c.conv_state.to("meta"), c.weight, c.bias), "conv.conv_state", ("cpu", "meta")),
        (lambda c: FusedConv(c.conv_state.transpose(1, 2), c.weight, c.bias), "conv.conv_state", ("96", "dim_first")),
        (lambda c: FusedConv(overlapping(c.conv_state), c.weight, c.bias), "conv.conv_state", ("(671, 7, 1)",)),
        (lambda c: FusedConv(c.conv_state, c.weight[:, :2], c.bias), "conv.conv_state", ("columns",)),
        (lambda c: FusedConv(c.conv_state, c.weight[:3], c.bias), "conv.weight", ("96",)),
        (lambda c: FusedConv(c.conv_state, c.weight, c.bias[:3]), "conv.bias", ("96",)),
        (lambda c: FusedConv(c.conv_state, c.weight, c.bias, dim_first=False), "conv.conv_state", ("dim_first",)),
    ],
)
def test_a_convolution_that_does_not_fit_is_refused_by_name(change, name, words):
    """Every field is checked before anything is launched."""
    from rig import Target

    pool = fused_pool(Target("torch", "cpu"))
    c = pool.params[0]
    conv = change(FusedConv(pool.layers[0].kv_cache[0], c.conv_weight, c.conv_bias))
    batch = Batch(pool, [Row(3, 1, 4)])
    assert_refused(lambda: fused(batch, deferred=True, conv=conv), f"{name}: expected", words)


def overlapping(state):
    """Slots of which the last element is the first of the next one."""
    return state.as_strided(state.shape, (state[0].numel() - 1, *state.stride()[1:]))


def test_a_fused_verify_is_one_launch_of_a_recording():
    """The tape holds the verify alone, and its replay gives the eager bits."""
    from rig import Target

    from graphrt.capture import record

    pool = fused_pool(Target("torch", "cpu"))
    pool.fill(3)
    twin = pool.twin()
    batch = Batch(pool, [Row(3, 1, 4)])
    out = torch.empty_like(batch.tokens[0].v)
    recording = record(lambda: fused(batch, deferred=True, out=out[None]), device="cpu", warmup=0)
    recording.replay()
    assert [node.name for node in recording.topology().nodes] == ["graphrt.deferred_verify"]
    assert_same(pool, twin, (out, fused(batch.on(twin), deferred=True)))


def test_a_convolution_state_over_the_other_pools_is_refused():
    """The verify would write a window's inputs into states or records; slots may interleave in one allocation."""
    rows, width = (torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), 4), (48, 4)
    block = torch.zeros(9_000)
    checkpoint = block.as_strided((4, 1, 16, 16), (600, 256, 16, 1))
    records = allocate_records(64, 1, 4, 16, torch.float32, "cpu")
    gate = (torch.zeros(1), torch.zeros(16), -5.0)

    def verify(state):
        q, k, v = (torch.zeros(1, 2, 1, 16) for _ in range(3))
        conv, owned = FusedConv(state, torch.zeros(width)), torch.zeros(1, dtype=torch.int32)
        kda_recoverssm_verify(
            q, k, v, k, q[..., 0], *gate, checkpoint, records, *rows, record_rows=owned, conv=conv, backend="torch"
        )

    verify(block.as_strided((4, 48, 7), (600, 7, 1), 256))
    verify(torch.zeros(4, 48, 7))
    for home, offset, step, name in (
        (block, 250, 600, "checkpoint_state"),
        (block, 300, 336, "checkpoint_state"),
        (records.correction, 0, 336, "records"),
        (records.key_gate, 128, 336, "records.key_gate"),
    ):
        over = torch.empty(0).set_(home.untyped_storage(), offset, (4, 48, 7), (step, 7, 1))
        assert_refused(lambda over=over: verify(over), "conv.conv_state", ("memory of its own", f"that of {name} "))


READ = ("q", "k", "v", "raw_g", "raw_beta", "conv.weight", "conv.bias", "A_log", "dt_bias")


@pytest.mark.parametrize("over", READ)
def test_a_convolution_state_over_what_the_verify_reads_is_refused(over):
    """Writing the window's inputs would change projections, weights or gates while they are read, or for good."""
    pool = fused_pool(Target("torch", "cpu"))
    params, batch = pool.params[0], Batch(pool, [Row(3, 1, 4)])
    state, dim_first = pool.layers[0].kv_cache[0], pool.shape.conv_dim_first
    inside = state[5].flatten()
    q, k, v = parts_of(pool, batch.tokens[0].x)
    inputs = {"q": q, "k": k, "v": v, "conv.weight": params.conv_weight, "conv.bias": params.conv_bias}
    inputs |= {"A_log": params.A_log, "dt_bias": params.dt_bias}
    inputs |= {name: getattr(batch.tokens[0], name) for name in ("raw_g", "raw_beta")}
    wanted = inputs[over]
    inputs[over] = inside[: wanted.numel()].view(wanted.shape)
    pool.params[0] = replace(params, A_log=inputs["A_log"], dt_bias=inputs["dt_bias"])
    batch.tokens[0].raw_g, batch.tokens[0].raw_beta = inputs["raw_g"], inputs["raw_beta"]
    conv = FusedConv(state, inputs["conv.weight"], inputs["conv.bias"], dim_first)
    call = lambda: fused(batch, deferred=True, conv=conv, parts=[inputs[name] for name in "qkv"])  # noqa: E731
    assert_refused(call, "conv.conv_state: expected memory of its own", (f"got that of {over} ",))


@pytest.mark.parametrize("over", ["x", "conv_weight", "conv_bias"])
def test_a_convolution_verify_refuses_a_state_over_what_it_reads(over):
    """The same in the convolution verify by itself."""
    pool = fused_pool(Target("torch", "cpu"))
    params, batch = pool.params[0], Batch(pool, [Row(3, 1, 4)])
    state = pool.layers[0].kv_cache[0]
    inputs = {"x": batch.tokens[0].x, "conv_weight": params.conv_weight, "conv_bias": params.conv_bias}
    inputs[over] = state[5].flatten()[: inputs[over].numel()].view(inputs[over].shape)
    rows = (batch.query_start_loc, batch.state_indices, pool.shape.query_len)
    call = lambda: kda_conv_verify(inputs["x"], state, inputs["conv_weight"], inputs["conv_bias"], *rows)  # noqa: E731
    assert_refused(call, "conv_state: expected memory of its own", (f"got that of {over} ",))


def test_projections_and_weights_may_lie_beside_the_convolution_state():
    """One block of memory for all of them, as engines with an arena have it, is no overlap."""
    pool = fused_pool(Target("torch", "cpu"))
    pool.fill(3)
    params, batch = pool.params[0], Batch(pool, [Row(3, 1, 4)])
    x, weight, bias = batch.tokens[0].x, params.conv_weight, params.conv_bias
    state = pool.layers[0].kv_cache[0]
    arena = torch.empty(sum(t.numel() for t in (x, weight, bias)) + 12 * state[0].numel())
    placed, begin = [], 0
    for t in (x, state, weight, bias):
        part = arena[begin : begin + t.numel()].view(t.shape)
        placed.append(part.copy_(t))
        begin += t.numel()
    beside = FusedConv(placed[1], placed[2], placed[3], pool.shape.conv_dim_first)
    got = fused(batch, deferred=False, conv=beside, parts=parts_of(pool, placed[0]))
    assert same_bytes(got, fused(batch, deferred=False))


def test_checked_mode_tells_the_convolution_state_of_another_layer():
    """Of equal sizes nothing else tells them apart; the history of the other layer would be lost."""
    shape = {"layers": 2, "heads": 1, "conv_dim": 48}
    pool = Pool(Target("torch", "cpu"), Target("torch", "cpu").shape(**shape))
    batch = Batch(pool, [Row(1, 0, 2)])
    for t in pool.tensors().values():
        t.zero_()
    stranger = FusedConv(pool.layers[1].kv_cache[0], pool.params[0].conv_weight)
    assert_refused(
        lambda: fused(batch, deferred=False, conv=stranger, check=True), "conv.conv_state", ("another layer",)
    )
    fused(batch, deferred=False, conv=stranger)
    fused(batch, deferred=False, check=True)
