"""Thousands of accepted tokens: deferred, eager and one-token decode stay as near to the truth as FP32 can."""

import random

import pytest
import torch
from oracle import Request, relative_error
from rig import Pool, on_cpu
from steps import Batch, Row, Tokens, commit, core_verify, drain
from truth import start


def windows_of(mode, count):
    """Lengths that add up to `count`: random ones, or single tokens."""
    pick, left = random.Random(7), count
    while left:
        length = 1 if mode == "one token" else min(pick.randint(1, 8), left)
        yield length
        left -= length


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["deferred", "eager", "one token"])
def test_the_error_of_a_long_life_does_not_grow(backend_device, mode):
    """4096 tokens with slow decay (512 on a CPU) in random windows: at every eighth of them the state is within twice
    the error of the FP32 token-by-token form, or 1e-5 (B82).
    """
    if backend_device.interpreted:
        pytest.skip("too slow under the interpreter; the fold is the one of the other tests")
    count = 512 if backend_device.device == "cpu" else 4096
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1, query_len=8, conv_dim=3))
    start(pool, {1: 2})
    whole = Tokens.random(pool.shape, count, 0, pool.device)
    whole.raw_g -= 4.0
    state, history = (part.clone() for part in pool.state(2, 0))
    exact, plain = (
        Request(on_cpu(pool.params[0]), state, history, dtype=dtype) for dtype in (torch.float64, torch.float32)
    )
    at, checks = 0, 0
    for length in windows_of(mode, count):
        tokens = Tokens(*(part[at : at + length] for part in vars(whole).values()))
        batch = Batch(pool, [Row(2, 1, length)], tokens=[tokens])
        core_verify(batch, 0, deferred=mode == "deferred")
        # The history is no part of this test; a commit moves it all the same.
        commit(batch, [length], deferred=mode == "deferred")
        (window,) = batch.windows(0)
        exact.step(window, length)
        plain.step(window, length)
        at += length
        if at * 8 // count > checks:
            checks = at * 8 // count
            drain(pool, [2], [1])
            error, allowed = (relative_error(got, exact.state) for got in (pool.state(2, 0)[0], plain.state))
            assert error <= max(1e-5, 2 * allowed), f"{mode}, after {at} tokens: {error:.1e}, FP32 form {allowed:.1e}"
    assert checks == 8
