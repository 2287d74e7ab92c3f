"""The oracle: Kimi Delta Attention and its short convolution, one token at a time, over accepted tokens only.

Written from the formulas of the contract alone; it imports nothing of graphrt. A `Request` keeps what one
request keeps in one layer, the state `S [H, V, K]` and the last `hist` convolution inputs `[conv_dim, hist]`.
`step` yields the outputs of a whole window, then advances by its accepted prefix: rejected tokens leave no
trace.

In float64 it is the truth the tests compare with. In float32 the same code is the token-by-token form whose
error sets the tolerance of the promised numbers. `stored` rounds the state once per fold, as a 16-bit pool
does.

Letters: H heads, K and V key and value dimension, W width of the convolution, hist = W - 1, n tokens of a
window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True)
class LayerParams:
    """The constants of one layer; converted to the oracle's dtype where they are used."""

    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H * K]
    lower_bound: float | None
    conv_weight: Tensor  # [conv_dim, W]
    conv_bias: Tensor | None  # [conv_dim]


@dataclass(frozen=True)
class Window:
    """The inputs of one request in one step and one layer, in whatever dtype the runtime gets them."""

    q: Tensor  # [n, H, K]
    k: Tensor  # [n, H, K]
    v: Tensor  # [n, H, V]
    raw_g: Tensor  # [n, H, K]
    raw_beta: Tensor  # [n, H]
    x: Tensor  # [n, conv_dim]

    def __len__(self) -> int:
        return self.q.shape[0]


@dataclass(frozen=True)
class Outputs:
    """What one window yields."""

    out: Tensor  # [n, H, V]
    u: Tensor  # [n, H, V]
    conv: Tensor  # [n, conv_dim]


def gate(raw_g: Tensor, layer: LayerParams) -> Tensor:
    """Log decay `g [..., H, K]`, at most zero, of a raw gate `[..., H, K]`."""
    heads, key_dim = raw_g.shape[-2:]
    scale = layer.A_log.to(raw_g.dtype).exp()[:, None]
    biased = raw_g + layer.dt_bias.to(raw_g.dtype).view(heads, key_dim)
    if layer.lower_bound is None:
        return -scale * softplus(biased, threshold=1e4)
    return layer.lower_bound * torch.sigmoid(scale * biased)


def unit(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x²) + 1e-6)` over the last dimension."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def one_token(state: Tensor, window: Window, t: int, layer: LayerParams) -> tuple[Tensor, Tensor, Tensor]:
    """State `[H, V, K]` after token t, its output `[H, V]` and its correction `u [H, V]`."""
    q, k, v, raw_g, raw_beta = (
        part[t].to(state.dtype) for part in (window.q, window.k, window.v, window.raw_g, window.raw_beta)
    )
    key, query = unit(k), unit(q) * q.shape[-1] ** -0.5
    state = state * gate(raw_g, layer).exp()[:, None, :]
    seen = torch.einsum("hvk,hk->hv", state, key)
    u = torch.sigmoid(raw_beta)[:, None] * (v - seen)
    state = state + u[:, :, None] * key[:, None, :]
    return state, torch.einsum("hvk,hk->hv", state, query), u


def convolve(history: Tensor, x: Tensor, layer: LayerParams, dtype: torch.dtype) -> Tensor:
    """Outputs `[n, conv_dim]` of the causal depthwise convolution and silu; weight `W - 1` meets the newest
    input.
    """
    inputs = torch.cat([history.T, x]).to(dtype)  # [hist + n, conv_dim]
    weight = layer.conv_weight.to(dtype)
    width = weight.shape[1]
    total = torch.zeros(x.shape, dtype=dtype) if layer.conv_bias is None else layer.conv_bias.to(dtype)
    for j in range(width):
        total = total + weight[:, j] * inputs[j : j + x.shape[0]]
    return total * torch.sigmoid(total)


class Request:
    """One request in one layer: its state after the accepted tokens, and the way there."""

    def __init__(
        self,
        layer: LayerParams,
        state: Tensor,
        history: Tensor,
        *,
        dtype: torch.dtype = torch.float64,
        stored: torch.dtype | None = None,
        position: int = 0,
    ):
        self.layer = layer
        self.state = state.detach().cpu().to(dtype)
        self.history = history.detach().cpu().clone()
        self.dtype = dtype
        self.stored = stored
        self.position = position
        self.at: dict[int, tuple[Tensor, Tensor]] = {position: (self.state, self.history)}

    def step(self, window: Window, accepted: int) -> Outputs:
        """Outputs of the whole window from the accepted state; then advance by its first `accepted` tokens."""
        if not 0 <= accepted <= len(window):
            raise ValueError(f"accepted: expected 0..{len(window)}, got {accepted}")
        state, outs, corrections = self.state, [], []
        states = [state]
        for t in range(len(window)):
            state, out, u = one_token(state, window, t, self.layer)
            states.append(state)
            outs.append(out)
            corrections.append(u)
        empty = self.state.new_zeros((0, *window.v.shape[1:]))
        conv = convolve(self.history, window.x, self.layer, self.dtype)
        self._advance(states, window.x, accepted)
        return Outputs(torch.stack(outs) if outs else empty, torch.stack(corrections) if outs else empty, conv)

    def _advance(self, states: list[Tensor], x: Tensor, accepted: int) -> None:
        """Take the first `accepted` tokens; keep the state and history of every position passed."""
        width = self.history.shape[1]
        inputs = torch.cat([self.history, x[:accepted].T.to(self.history.dtype)], dim=1)
        for t in range(1, accepted + 1):
            state = states[t]
            if self.stored is not None:
                state = state.to(self.stored).to(self.dtype)
            self.at[self.position + t] = (state, inputs[:, t : t + width])
        self.position += accepted
        self.state, self.history = self.at[self.position]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`; infinite where `got` is not finite."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    scale = float(want.norm())
    return float((got - want).norm()) / scale if scale > 0 else float((got - want).norm())
