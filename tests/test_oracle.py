"""The oracle itself: two closed forms of the contract, and what a token-by-token recurrence must do."""

import pytest
import torch
from oracle import Request, Window, gate, relative_error, unit
from rig import Shape, make_params
from steps import Tokens


def request_and_window(lower_bound, n=6):
    shape = Shape(lower_bound=lower_bound, act=torch.float64, param=torch.float64)
    params = make_params(shape, "cpu")
    state = torch.randn(shape.heads, shape.head_dim, shape.head_dim, dtype=torch.float64)
    history = torch.randn(shape.conv_dim, shape.history, dtype=torch.float64)
    return Request(params, state, history), Tokens.random(shape, n, 0, "cpu").window(0, n)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("n", [0, 1, 4, 6])
def test_advancing_is_the_fold_of_the_accepted_prefix(lower_bound, n):
    """The accepted state is S_0 exp(L_n) + Σ u_t (k̂_t exp(L_n - L_t))ᵀ."""
    request, window = request_and_window(lower_bound)
    first = request.state
    u = request.step(window, n).u
    logs = torch.cat([first.new_zeros(1, *window.k.shape[1:]), gate(window.raw_g, request.layer).cumsum(0)])
    want = first * logs[n].exp()[:, None, :]
    for t in range(n):
        decayed = unit(window.k[t]) * (logs[n] - logs[t + 1]).exp()
        want = want + u[t][:, :, None] * decayed[:, None, :]
    assert relative_error(request.state, want) < 1e-14


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_outputs_are_those_of_the_window_form(lower_bound):
    """The last output of a window is S_0 r + Σ d u with couplings over the window."""
    request, window = request_and_window(lower_bound)
    first = request.state
    got = request.step(window, 0)
    logs, t = gate(window.raw_g, request.layer).cumsum(0), len(window) - 1
    query = unit(window.q[t]) * window.q.shape[-1] ** -0.5
    want = torch.einsum("hvk,hk->hv", first, query * logs[t].exp())
    for i in range(t + 1):
        coupling = (unit(window.k[i]) * (logs[t] - logs[i]).exp() * query).sum(-1)
        want = want + coupling[:, None] * got.u[i]
    assert relative_error(got.out[t], want) < 1e-13


def test_a_rejected_token_leaves_no_trace():
    """Two windows with one accepted prefix lead to one state and one history, whatever follows the prefix."""
    request, window = request_and_window(-5.0)
    twin = Request(request.layer, request.state, request.history)
    other = Window(*(torch.cat([part[:2], torch.randn_like(part[2:])]) for part in vars(window).values()))
    first, second = request.step(window, 2), twin.step(other, 2)
    assert torch.equal(request.state, twin.state)
    assert torch.equal(request.history, twin.history)
    assert torch.equal(first.out[:2], second.out[:2])


def test_the_convolution_is_causal_over_history_and_window():
    """Windows of any size give the outputs of one convolution over the whole sequence."""
    request, window = request_and_window(-5.0)
    twin = Request(request.layer, request.state, request.history)
    want = twin.step(window, 6).conv
    parts = [Window(*(part[a:b] for part in vars(window).values())) for a, b in ((0, 1), (1, 1), (1, 4), (4, 6))]
    got = torch.cat([request.step(part, len(part)).conv for part in parts])
    torch.testing.assert_close(got, want)
    assert torch.equal(request.history, twin.history)
    padded = torch.cat([torch.zeros_like(request.history), window.x.T], dim=1)[None]
    layer = request.layer
    plain = torch.nn.functional.conv1d(padded, layer.conv_weight[:, None], layer.conv_bias, groups=padded.shape[1])
    torch.testing.assert_close(want[3:], torch.nn.functional.silu(plain[0].T[3:]))


def test_positions_are_kept():
    """`at` holds state and history after every accepted token."""
    request, window = request_and_window(-5.0)
    request.step(window, 4)
    assert sorted(request.at) == [0, 1, 2, 3, 4]
    assert torch.equal(request.at[4][0], request.state)
    assert torch.equal(request.at[2][1][:, -1], window.x[1])
