"""No kernel compiles after `create`: what it warms up is all that later calls on these layers can need."""

import inspect
import logging
import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from rig import Pool, Snapshot, Target
from steps import Batch, Row, conv_verify, core_verify

from graphrt import (
    FP32_DEFERRED,
    FusedConv,
    KDARecoverSSMDeferred,
    align_eager_mask,
    align_state_indices,
    backends,
    kda_deferred_verify,
    warmup,
)
from graphrt.capture import CommitRunner, DecodeStep, Sampled, StepInputs
from graphrt.layers import LayerStack
from graphrt.steps import Owners

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here: see below")
SIZES = (1, 16, 17)
LAYOUTS = [
    {},
    {"engine_layout": True, "conv_dim_first": False, "lower_bound": None},
    {"act": torch.bfloat16, "pool": torch.bfloat16, "param": torch.bfloat16, "lower_bound": -4, "conv_bias": False},
]
# What the CuTe kernels take.
FP32_LAYOUTS = [{}, {"engine_layout": True, "conv_dim_first": False, "heads": 1}, {"act": torch.float16, "width": 6}]


def make_pool(target, **changes):
    """Twenty rows of two layers, whose convolutions are those of q, k and v."""
    shape = target.shape(rows=20, slots=24, **changes)
    return Pool(target, replace(shape, conv_dim=3 * shape.heads * shape.head_dim))


def every_call(pool):
    """Every operation of a context and its layers, in several sizes, from tensors of every kind that they allow."""
    for count in SIZES:
        rows = [Row(1 + b, b, pool.shape.query_len) for b in range(count)]
        # Three elements between two tokens: only the first starts on 16 bytes.
        for gap in (0, 3):
            batch = Batch(pool, rows, gap=gap, wide=gap > 0, tail=gap)
            verifies(pool, batch)
            for tokens in batch.tokens:
                tokens.raw_beta = tokens.raw_beta.float()
            verifies(pool, batch)
            commits(pool, batch)


def verifies(pool, batch):
    """The verifies of both layers: stock and deferred, alone and with the convolution in front, and it alone."""
    shape, params = pool.shape, pool.params[0]
    tokens = batch.tokens[0]
    steps = (batch.query_start_loc, batch.state_indices, shape.query_len)
    for deferred in (False, True):
        for layer in range(shape.layers):
            core_verify(batch, layer, deferred=deferred)
            conv_verify(batch, layer, deferred=deferred)
            state = pool.layers[layer].kv_cache[0]
            conv = FusedConv(state, pool.params[layer].conv_weight, pool.params[layer].conv_bias, shape.conv_dim_first)
            core_verify(batch, layer, deferred=deferred, conv=conv)
    # q, k and v as views of one projection.
    q, k, v = tokens.x[None].unflatten(-1, (3, shape.heads, shape.head_dim)).unbind(2)
    inputs = (q, k, v, tokens.raw_g[None], tokens.raw_beta[None], params.A_log, params.dt_bias, params.lower_bound)
    kda_deferred_verify(
        *inputs, pool.checkpoint(0), pool.records(0), *steps, record_rows=batch.record_rows, pending=pool.pending,
        backend=pool.target.backend,
    )  # fmt: skip


def commits(pool, batch):
    """Commits of every kind, flush and drain, and the helpers of align mode."""
    count, context, size = len(batch.rows), pool.context, 2 * pool.shape.query_len
    accepted, rows, pending = pool.int32([2] * count), batch.record_rows, pool.pending
    table, computed = pool.int32([3] * count, wide=True)[:, None].expand(-1, 1), pool.int32([5] * count)
    requests, mask = pool.int32(range(count)), torch.ones(count, dtype=torch.bool, device=pool.device)
    where = (batch.state_indices, batch.query_start_loc)
    generation = pool.int32([0] * pool.shape.rows)
    owners = Owners(generation[:count], generation)
    for align in ({}, {"block_table": table, "num_computed_tokens": computed, "mamba_block_size": size}):
        context.commit(accepted, *where, **align)
        context.commit(accepted, *where, requests, record_rows=rows, **align)
        for eager in (None, mask, mask.view(torch.uint8)):
            context.commit(accepted, *where, record_rows=rows, pending=pending, eager=eager, owners=owners, **align)
    context.flush(batch.state_indices, rows, pending)
    context.drain(batch.state_indices, rows, pending, owners)
    KDARecoverSSMDeferred(rows, pending, None, context, batch.state_indices).flush()
    for indices in (None, requests):
        align_eager_mask(computed, batch.query_start_loc, size, None, indices)
    align_state_indices(table, computed, size)


def warm_up(pool):
    """What `create` runs on a device."""
    context = pool.context
    warmup.run_variants(context.stack, context.choice.backend, context._run_commit, context._run_fold_pending)


def variant_of(kernel, arguments):
    """What Triton compiles for a launch, by its own rules."""
    names = inspect.signature(kernel.fn).parameters
    skipped = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    yield kernel.fn.__name__
    for name, value in arguments.items():
        is_constant = name not in names or "constexpr" in str(names[name].annotation)
        if isinstance(value, torch.Tensor):
            yield name, value.dtype, name in unaligned or value.data_ptr() % 16 == 0
        elif is_constant or value is None:
            yield name, value
        elif isinstance(value, int):
            yield name, abs(value) < 2**31, name in skipped or (value == 1, value % 16 == 0)
        else:
            yield name, type(value)


@contextmanager
def launches_kept(monkeypatch):
    """The variants that are launched in the block, none of which runs."""
    from triton.runtime.interpreter import InterpretedFunction

    seen = set()

    def keep(kernel, *args, grid, warmup, **kwargs):
        named = dict(zip(inspect.signature(kernel.fn).parameters, args, strict=False))
        seen.add(tuple(variant_of(kernel, named | kwargs)))

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", keep)
        patch.setattr(backends, "by_device", lambda device: backends.load("triton"))
        yield seen


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS, ids=["FP32", "engine's layout", "BF16"])
def test_every_launch_is_of_a_variant_that_the_warm_up_ran(layout, monkeypatch):
    """The arguments of every call specialise the kernels as those of the warm-up did, and it runs none in vain."""
    pool = make_pool(Target("triton", "cpu"), **layout)
    with launches_kept(monkeypatch) as ready:
        warm_up(pool)
    with launches_kept(monkeypatch) as used:
        every_call(pool)
    assert len(ready) > 15
    assert used - ready == set()
    assert ready - used == set()


ODD = {"conv_dim": 20}
"""Channels of which no two tokens start on 16 bytes, unless there are gaps between them."""


def odd_convolutions(pool):
    """Convolution verifies of so many channels: tokens and outputs with gaps or without, on 16 bytes or not."""
    x = torch.zeros(8, 48, dtype=pool.shape.act, device=pool.device)
    batch = Batch(pool, [Row(1, 0, 4), Row(2, 1, 4)])
    places = [x[:, :20], x[:, 20:40], x.view(-1)[: 8 * 20].view(8, 20), x.view(-1)[1 : 1 + 8 * 20].view(8, 20)]
    for place in places:
        batch.tokens[0].x = place
        for out in (None, x.clone()[:, :20]):
            for deferred in (True, False):
                conv_verify(batch, 0, deferred=deferred, out=out)


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS, ids=["FP32", "engine's layout", "BF16"])
def test_channels_that_are_no_multiple_of_16_have_their_variants(layout, monkeypatch):
    """With gaps between the tokens each starts on 16 bytes: the fast variant, for a number of channels of its own."""
    target = Target("triton", "cpu")
    pool = Pool(target, target.shape(**(layout | ODD)))
    with launches_kept(monkeypatch) as ready:
        warm_up(pool)
    with launches_kept(monkeypatch) as used:
        odd_convolutions(pool)
    assert len(used) == 2 and used - ready == set()
    assert {variant for variant in ready - used if variant[0] == "graphrt_verify_conv_kernel"} == set()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", pytest.param(FP32_DEFERRED, marks=pytest.mark.sm90)])
def test_no_convolution_of_an_odd_number_of_channels_compiles_after_create(backend, monkeypatch):
    """The same of the compiler itself."""
    target = Target(backend, "cuda")
    pool = Pool(target, target.shape(**ODD))
    compiled = Compiled(monkeypatch)
    odd_convolutions(pool)
    torch.cuda.synchronize()
    assert compiled.names == []


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.bool])
def test_weights_that_no_convolution_takes_are_not_compiled_for(dtype):
    """An engine may keep its weights packed: what runs is then in the state's dtype, with a bias or without."""
    pool = make_pool(Target("torch", "cpu"))
    for layer in pool.layers:
        layer.conv_weight = torch.zeros(pool.shape.conv_dim, pool.shape.width, dtype=dtype)
    stack = LayerStack.build(pool.layers, spec_query_len=pool.shape.query_len, max_num_reqs=4)
    state = pool.layers[0].kv_cache[0].dtype
    assert stack.conv_kinds == {(state, True), (state, False)}


@interpreted
def test_the_warm_up_changes_no_state():
    """Every byte of checkpoints, convolution states, records (scratch row aside) and pending is as it was."""
    pool = Pool(Target("triton", "cpu"), Target("triton", "cpu").shape())
    before = Snapshot(pool)
    warm_up(pool)
    assert before.changed() == []
    assert pool.errors() == {}


def test_what_was_compiled_is_said_once(caplog, monkeypatch):
    """How many kernels and how long it took; nothing where all were there. A hook of others is called, and stays."""
    from triton import knobs

    heard = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **info: heard.append(info["fn"]))
    earlier = knobs.runtime.jit_post_compile_hook
    with warmup._timed():
        pass
    assert not caplog.text
    with warmup._timed():
        for name in "ab":
            knobs.runtime.jit_post_compile_hook(fn=name)
    assert caplog.text.count("2 Triton kernels compiled in") == 1
    assert heard == ["a", "b"] and knobs.runtime.jit_post_compile_hook is earlier


class Compiled:
    """Kernels of either kind that were compiled since it was made."""

    def __init__(self, monkeypatch):
        from triton import knobs

        self.triton = []
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **info: self.triton.append(info["repr"]))
        self.before = self._cute()

    @staticmethod
    def _cute():
        try:
            from graphrt.kernels.cute import commit, deferred
        except ImportError:
            return 0
        return commit.KERNELS.count() + deferred.KERNELS.count()

    @property
    def names(self):
        """Of Triton's, and the number of the others."""
        return self.triton + ["CuTe DSL"] * (self._cute() - self.before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "layout"),
    [("triton", layout) for layout in LAYOUTS]
    + [pytest.param(FP32_DEFERRED, layout, marks=pytest.mark.sm90) for layout in FP32_LAYOUTS],
)
def test_nothing_compiles_after_create(backend, layout, monkeypatch, caplog):
    """Every operation of the context, of its layers and of a recorded step, in sizes that specialise otherwise."""
    with caplog.at_level(logging.WARNING, "graphrt"):
        pool = make_pool(Target(backend, "cuda"), **layout)
    times = [record.args[1] for record in caplog.records if "compiled in" in record.message]
    assert sum(times) < 60
    shape, most = pool.shape, pool.shape.rows
    inputs = StepInputs(most, shape.query_len, torch.device("cuda"), block_table_width=1)
    tokens = Batch(pool, [Row(1 + b, b, shape.query_len) for b in range(most)])

    def verify(rows):
        return [core_verify(replace_rows(tokens, rows), layer, deferred=True, pending=rows.pending) for layer in (0, 1)]

    counts = pool.int32([2] * most)
    sampled = lambda rows, outputs: Sampled(counts[: len(rows.eager)], counts[: len(rows.eager)])  # noqa: E731
    step = DecodeStep(pool.context, pool.pending, inputs, verify, sampled, capture_sizes=SIZES, mamba_block_size=64)
    runner = CommitRunner(pool.context, pool.pending, inputs, SIZES, mamba_block_size=64)
    compiled = Compiled(monkeypatch)
    every_call(pool)
    for count in SIZES:
        values = {"state_indices": [1] * count, "record_rows": list(range(count)), "num_computed_tokens": [5] * count}
        offsets = list(range(0, 4 * count + 1, 4))
        inputs.stage(num_reqs=count, query_start_loc=offsets, block_table=[[1]] * count, **values)
        values = {name: pool.int32(entries, wide=True) for name, entries in values.items()}
        inputs.stage(num_reqs=count, query_start_loc=pool.int32(offsets), **values)
        step.run(count)
    step.capture(progress=False)
    step.replay(16)
    runner.capture(progress=False)
    runner.commit(16)
    torch.cuda.synchronize()
    assert compiled.names == []


def replace_rows(batch, rows):
    """The batch with the static rows of a step."""
    batch.query_start_loc, batch.state_indices = rows.query_start_loc, rows.state_indices
    batch.record_rows = rows.record_rows
    return batch
