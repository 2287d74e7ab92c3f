"""Random traces against the oracle: every step's outputs, every fold's state, every bystander's bytes."""

import pytest
import torch
from rig import Pool
from traces import Trace

LAYOUTS = [(False, True), (True, True), (False, False), (True, False)]
LAYOUT_IDS = ["hist+Q", "hist+Q-1", "hist+Q transposed", "hist+Q-1 transposed"]


def steps_for(target, on_torch, elsewhere):
    """Triton's interpreter is slow: fewer steps there."""
    return elsewhere if target.interpreted else on_torch


@pytest.mark.parametrize(("engine_layout", "conv_dim_first"), LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_trace_is_the_oracles(backend_device, engine_layout, conv_dim_first, seed):
    """Requests come, skip steps, accept prefixes, are drained, leave and are replaced, driven in every legal
    way.
    """
    backend_device.spare(seed != LAYOUTS.index((engine_layout, conv_dim_first)) % 3)
    shape = backend_device.shape(
        engine_layout=engine_layout, conv_dim_first=conv_dim_first, lower_bound=None if seed == 1 else -5.0
    )
    Trace(Pool(backend_device, shape), seed).run(steps_for(backend_device, 24, 6))


@pytest.mark.parametrize("engine_layout", [False, True], ids=LAYOUT_IDS[:2])
@pytest.mark.parametrize(("block_size", "seed"), [(4, 0), (8, 1), (6, 2), (16, 3)])
def test_an_align_trace_is_the_oracles(backend_device, engine_layout, block_size, seed):
    """The same with a block table: landings, crossings, and finished blocks that nobody touches again."""
    backend_device.spare(engine_layout != bool(seed % 2))
    shape = backend_device.shape(engine_layout=engine_layout, layers=1, slots=24)
    trace = Trace(Pool(backend_device, shape), seed, block_size=block_size, width=4)
    trace.run(steps_for(backend_device, 24, 7))


@pytest.mark.parametrize(
    ("act", "pool_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_a_trace_with_16_bit_tensors_is_the_oracles(backend_device, act, pool_dtype):
    """Activations, records and checkpoints in 16 bits follow the oracle that rounds where the contract says."""
    shape = backend_device.shape(act=act, pool=pool_dtype, layers=1)
    Trace(Pool(backend_device, shape), 5).run(steps_for(backend_device, 16, 5))


@pytest.mark.parametrize("block_size", [None, 8])
def test_a_float64_trace_is_the_oracles_to_float64_accuracy(backend_device, block_size):
    """With every tensor in float64 the torch backend agrees with the oracle to 1e-11."""
    if backend_device.backend != "torch":
        pytest.skip("float64 is the torch backend's")
    double = torch.float64
    shape = backend_device.shape(act=double, pool=double, param=double, layers=1, slots=24)
    Trace(Pool(backend_device, shape), 7, block_size=block_size).run(16)


@pytest.mark.parametrize("query_len", [1, 8])
def test_a_trace_with_another_window_is_the_oracles(backend_device, query_len):
    """One token per step, and eight."""
    shape = backend_device.shape(layers=1, heads=1, query_len=query_len)
    Trace(Pool(backend_device, shape), 11).run(steps_for(backend_device, 16, 5))
