"""Drop-in: an engine's own layer objects in our contexts, unchanged, with its pages, its records and its layouts.

The stand-in is built as the engine builds its layers: a module with parameters, both states of a layer as pages of
one allocation, records without a scratch row, and nothing but its attributes told to `create`.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphrt import (
    KDADeferredCommitContext,
    KDARecoverSSMCommitContext,
    allocate_records,
    kda_conv_verify,
    kda_deferred_verify,
    kda_recoverssm_verify,
)
from graphrt.testing import Oracle

HEADS, DIM, WINDOW, REQUESTS, SLOTS, WIDTH, BOUND = 2, 16, 4, 3, 7, 4, -5.0
CONV_DIM = 3 * HEADS * DIM


class EngineLayer(nn.Module):
    """What the engine's attention layer has: much more than we need, under its own names."""

    def __init__(self, columns: int, dim_first: bool, records, dtype: torch.dtype):
        super().__init__()
        self.A_log = nn.Parameter(torch.randn(HEADS) * 0.3)
        self.dt_bias = nn.Parameter(torch.randn(HEADS * DIM) * 0.3)
        self.conv1d = nn.Conv1d(CONV_DIM, CONV_DIM, WIDTH, groups=CONV_DIM, bias=False, dtype=dtype)
        self.local_num_heads, self.head_dim, self.gate_lower_bound = HEADS, DIM, BOUND
        self.num_heads, self.layer_name, self.dim_first = 8 * HEADS, "model.layers.3.self_attn", dim_first
        self.recoverssm_records, self.recoverssm_backend = records, "triton"
        # One page holds a convolution state and, behind it, a checkpoint; pages are wider than both.
        page = CONV_DIM * columns * dtype.itemsize + HEADS * DIM * DIM * 4 + 256
        memory = torch.full((SLOTS * page,), 0xFF, dtype=torch.uint8)  # NaN in every floating dtype
        conv = (CONV_DIM, columns) if dim_first else (columns, CONV_DIM)
        self.kv_cache = [
            memory.view(dtype).as_strided((SLOTS, *conv), (page // dtype.itemsize, conv[1], 1)),
            memory.view(torch.float32).as_strided(
                (SLOTS, HEADS, DIM, DIM), (page // 4, DIM * DIM, DIM, 1), CONV_DIM * columns * dtype.itemsize // 4
            ),
        ]

    @property
    def conv(self):
        """[slots, conv_dim, C] whatever the layout."""
        return self.kv_cache[0] if self.dim_first else self.kv_cache[0].transpose(1, 2)

    def prefill(self, slot: int) -> Oracle:
        """Make a slot live; the truth that starts there."""
        self.conv[slot, :, : WIDTH - 1] = torch.randn(CONV_DIM, WIDTH - 1)
        self.kv_cache[1][slot] = torch.randn(HEADS, DIM, DIM) * 0.3
        known = {"A_log": self.A_log.detach(), "dt_bias": self.dt_bias.detach(), "gate_lower_bound": BOUND}
        known |= {"conv_weight": self.conv1d.weight.detach()[:, 0], "conv_bias": None}
        return Oracle(SimpleNamespace(**known), self.kv_cache[1][slot], self.conv[slot, :, : WIDTH - 1])


def engine_records(dtype):
    """The engine's own class and allocation: rows of the step's batch, no scratch row."""
    shape = (REQUESTS, HEADS, WINDOW)
    return SimpleNamespace(correction=torch.empty(*shape, DIM), key_gate=torch.empty(*shape, 2 * DIM, dtype=dtype))


def indexed_records(dtype):
    """Ours, with a scratch row, as the engine's deferred contexts allocate them."""
    return allocate_records(REQUESTS, HEADS, WINDOW, DIM, dtype, "cpu")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def run(layers, context, accepted, *, deferred, pending=None):
    """A step of three requests in slots 5, 2 and 6 with windows of 4, 1 and 3; outputs are those of the oracles."""
    loc, slots, rows = int32(0, 4, 5, 8), int32(5, 2, 6), int32(1, 2, 0)
    where = {"record_rows": rows, "pending": pending} if deferred else {}
    for layer, oracles in layers:
        x = torch.randn(8, CONV_DIM).to(layer.conv.dtype)
        q, k, v, g = (torch.randn(1, 8, HEADS, DIM).to(x.dtype) for _ in range(4))
        beta = torch.randn(1, 8, HEADS).to(x.dtype)
        weight = layer.conv1d.weight[:, 0]
        conv = kda_conv_verify(
            x, layer.kv_cache[0], weight, None, loc, slots, WINDOW, conv_dim_first=layer.dim_first,
            backend=context.backend, **where,
        )  # fmt: skip
        call = kda_deferred_verify if deferred else kda_recoverssm_verify
        out = call(
            q, k, v, g, beta, layer.A_log, layer.dt_bias, layer.gate_lower_bound, layer.kv_cache[1],
            layer.recoverssm_records, loc, slots, WINDOW, backend=context.backend, **where,
        )  # fmt: skip
        for oracle, begin, end, count in zip(oracles, (0, 4, 5), (4, 5, 8), accepted, strict=True):
            parts = (part[0, begin:end].detach() for part in (q, k, g, v, beta))
            exact = oracle.step(*parts, x[begin:end], count)
            torch.testing.assert_close(out[0, begin:end].double(), exact.out, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(conv[begin:end].double(), exact.conv, atol=2e-2, rtol=2e-2)
    context.commit(int32(*accepted), slots, loc, **where)


def assert_states(layers, tolerance):
    for layer, oracles in layers:
        for oracle, slot in zip(oracles, (5, 2, 6), strict=True):
            error = (layer.kv_cache[1][slot].double() - oracle.state).norm() / oracle.state.norm()
            assert error < tolerance
            assert torch.equal(layer.conv[slot, :, : WIDTH - 1].double(), oracle.history)


def engine(columns, dim_first, records, dtype, layers=2):
    found = [EngineLayer(columns, dim_first, records(dtype), dtype) for _ in range(layers)]
    return [(layer, [layer.prefill(slot) for slot in (5, 2, 6)]) for layer in found]


LAYOUTS = pytest.mark.parametrize("dim_first", [True, False], ids=["dim first", "dim last"])


@LAYOUTS
def test_an_engines_layers_follow_their_oracles_through_stock_steps(dim_first):
    """Its pages, parameters and records; the width of the convolution by the reference's rule."""
    layers = engine(WIDTH - 1 + WINDOW - 1, dim_first, engine_records, torch.float32)
    context = KDARecoverSSMCommitContext.create(
        [layer for layer, _ in layers], spec_query_len=WINDOW, max_num_reqs=REQUESTS,
        conv_dim_first=dim_first,
    )  # fmt: skip
    assert context.conv_history_len == WIDTH - 1
    for accepted in ([4, 1, 2], [1, 1, 3]):
        run(layers, context, accepted, deferred=False)
    assert_states(layers, 2e-6)


@LAYOUTS
@pytest.mark.parametrize("extra", [0, 1], ids=["hist+Q-1", "hist+Q"])
def test_an_engines_layers_follow_their_oracles_through_deferred_steps(dim_first, extra):
    """With records of `allocate_records`; the wider layout is told by `conv_width`, the other by its columns."""
    layers = engine(WIDTH - 1 + WINDOW - 1 + extra, dim_first, indexed_records, torch.bfloat16)
    context = KDADeferredCommitContext.create(
        [layer for layer, _ in layers], spec_query_len=WINDOW, max_num_reqs=REQUESTS, conv_dim_first=dim_first,
        conv_width=WIDTH if extra else None,
    )  # fmt: skip
    pending = torch.zeros(REQUESTS, dtype=torch.int32)
    for accepted in ([4, 1, 2], [1, 1, 3], [2, 1 - extra, 1]):
        run(layers, context, accepted, deferred=True, pending=pending)
    assert pending.tolist() == [1, 2, 1 - extra]
    context.drain(int32(5, 2, 6), int32(1, 2, 0), pending)
    assert_states(layers, 5e-6)


def test_a_page_keeps_what_lies_behind_the_states():
    """Gaps of the pages, other slots and the null slot keep every byte through a verify, a commit and a drain."""
    layers = engine(WIDTH - 1 + WINDOW - 1, True, indexed_records, torch.float32, layers=1)
    layer = layers[0][0]
    context = KDADeferredCommitContext.create([layer], spec_query_len=WINDOW, max_num_reqs=REQUESTS)
    memory = layer.kv_cache[0].untyped_storage()
    bytes_of = torch.tensor([], dtype=torch.uint8).set_(memory).view(SLOTS, -1)
    before, pending = bytes_of.clone(), torch.zeros(REQUESTS, dtype=torch.int32)
    run(layers, context, [4, 1, 2], deferred=True, pending=pending)
    context.drain(int32(5, 2, 6), int32(1, 2, 0), pending)
    same = bytes_of.eq(before)
    assert bool(same[[0, 1, 3, 4]].all()) and bool(same[:, -256:].all())
    assert not bool(same[[2, 5, 6]].all(1).any())


def test_further_tensors_of_an_engines_cache_are_left_alone():
    """Only the first two entries of `kv_cache` are ours; the engine may keep more of them there."""
    (layer, _), *_ = engine(WIDTH - 1 + WINDOW - 1, True, engine_records, torch.float32, 1)
    layer.kv_cache = (*layer.kv_cache, torch.zeros(3))
    context = KDARecoverSSMCommitContext.create([layer], spec_query_len=WINDOW, max_num_reqs=REQUESTS)
    assert context.checkpoints[0] is layer.kv_cache[1]


def test_a_deferred_verify_asks_for_records_with_a_scratch_row():
    """The engine's stock records have no row -1: the deferred verify says what it needs instead of writing there."""
    layers = engine(WIDTH - 1 + WINDOW - 1, True, engine_records, torch.float32, 1)
    context = KDADeferredCommitContext.create([layers[0][0]], spec_query_len=WINDOW, max_num_reqs=REQUESTS)
    with pytest.raises(ValueError, match=r"records.correction.*scratch row.*allocate_records"):
        run(layers, context, [1, 1, 1], deferred=True, pending=torch.zeros(REQUESTS, dtype=torch.int32))


def test_records_without_a_scratch_row_may_follow_other_memory():
    """On a device allocations touch; what lies before an engine's stock records is no row of theirs."""
    (layer, _), *_ = engine(WIDTH - 1 + WINDOW - 1, True, engine_records, torch.float32, 1)
    conv, state = layer.kv_cache[0].shape, layer.kv_cache[1]
    rows = (REQUESTS, HEADS, WINDOW, DIM)
    memory = bytearray(4 * (SLOTS * CONV_DIM * conv[2] + REQUESTS * HEADS * WINDOW * DIM))
    behind = 4 * SLOTS * CONV_DIM * conv[2]
    conv_state = torch.frombuffer(memory, dtype=torch.float32, count=behind // 4).view(conv)
    layer.kv_cache = (conv_state, state)
    layer.recoverssm_records.correction = torch.frombuffer(memory, dtype=torch.float32, offset=behind).view(rows)
    create = KDARecoverSSMCommitContext.create
    assert create([layer], spec_query_len=WINDOW, max_num_reqs=REQUESTS).checkpoints == [state]
    # With a row to spare in front it is the scratch row, which is written.
    shifted = torch.frombuffer(memory, dtype=torch.float32, offset=behind - 4 * HEADS * WINDOW * DIM)
    layer.recoverssm_records.correction = shifted[HEADS * WINDOW * DIM :].view(rows)
    with pytest.raises(ValueError, match="memory of its own"):
        create([layer], spec_query_len=WINDOW, max_num_reqs=REQUESTS)
