"""The truth that kernels are compared with: one request in one layer, float64, token by token.

    S <- S * exp(g)[None, :]      u = beta * (v - S k)      S <- S + u k^T      o = S q        (S is [V, K])

with k and q of unit length and q by K ** -0.5. Only accepted tokens ever reach `state`.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..layers import KDALayer


@dataclass(frozen=True, slots=True)
class OracleWindow:
    """What one window yields, accepted or not.

    out         [n, H, V] float64
    correction  [n, H, V] float64: the u of each token, which a verify records
    conv        [n, conv_dim] float64
    """

    out: Tensor
    correction: Tensor
    conv: Tensor | None


class Oracle:
    """A request: its state after the accepted tokens, and its convolution history."""

    def __init__(self, layer: KDALayer, state: Tensor, history: Tensor | None = None) -> None:
        """Start from a checkpoint [H, V, K] and the last W - 1 convolution inputs [conv_dim, W - 1]."""
        self.layer = layer
        self.state = state.detach().double()
        self.history = None if history is None else history.detach().double()

    @classmethod
    def of_slot(cls, layer: KDALayer, slot: int) -> Self:
        """Start from what a prefill left in a state slot (convolution states as [slots, conv_dim, C])."""
        conv_state, checkpoint = layer.kv_cache
        if layer.conv_weight is None:
            return cls(layer, checkpoint[slot])
        return cls(layer, checkpoint[slot], conv_state[slot, :, : layer.conv_weight.shape[1] - 1])

    def step(
        self,
        q: Tensor, k: Tensor, raw_g: Tensor,  # [n, H, K]
        v: Tensor,  # [n, H, V]
        raw_beta: Tensor,  # [n, H]
        x: Tensor | None,  # [n, conv_dim]
        accepted: int,
    ) -> OracleWindow:  # fmt: skip
        """Outputs of a whole window; the state then advances by its first `accepted` tokens.

        q, k and raw_g are [n, H, K], v is [n, H, V], raw_beta [n, H]; x is [n, conv_dim], or None without convolution.
        """
        if not 0 <= accepted <= q.shape[0]:
            raise ValueError(f"accepted: expected 0..{q.shape[0]}, got {accepted}")
        state, outs, corrections, states = self.state, [], [], [self.state]
        decay, beta = self._log_decay(raw_g).exp(), torch.sigmoid(raw_beta.double())
        key, query = _unit(k), _unit(q) * q.shape[-1] ** -0.5
        for t in range(q.shape[0]):
            state = state * decay[t, :, None, :]
            u = beta[t, :, None] * (v[t].double() - _apply(state, key[t]))
            state = state + u[:, :, None] * key[t, :, None, :]
            outs.append(_apply(state, query[t]))
            corrections.append(u)
            states.append(state)
        conv = None if x is None else self._convolve(x, accepted)
        self.state = states[accepted]
        return OracleWindow(_stacked(outs, v), _stacked(corrections, v), conv)

    def _log_decay(self, raw_g: Tensor) -> Tensor:
        layer, shape = self.layer, raw_g.shape[-2:]
        a = layer.A_log.double().flatten().exp()[:, None]
        x = raw_g.double() + layer.dt_bias.double().view(shape)
        if layer.gate_lower_bound is None:
            return -a * torch.log1p(torch.exp(-x.abs())) - a * x.clamp(min=0)
        return layer.gate_lower_bound * torch.sigmoid(a * x)

    def _convolve(self, x: Tensor, accepted: int) -> Tensor:
        """Causal convolution and silu of the window; the history then ends with its last accepted input."""
        weight, bias = self.layer.conv_weight, self.layer.conv_bias
        if weight is None or self.history is None:
            raise ValueError("x: this layer has no convolution")
        inputs = torch.cat((self.history, x.double().T), 1)  # [conv_dim, W - 1 + n]
        n, width = x.shape[0], weight.shape[1]
        y = torch.zeros(n, x.shape[1], dtype=torch.float64, device=x.device)
        for w in range(width):
            y += weight[:, w].double() * inputs[:, w : w + n].T
        if bias is not None:
            y += bias.double()
        self.history = inputs[:, accepted : accepted + width - 1]
        return y * torch.sigmoid(y)


def _unit(x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _apply(state: Tensor, vector: Tensor) -> Tensor:
    """[H, V] of state [H, V, K] times vector [H, K]."""
    return (state @ vector[..., None])[..., 0]


def _stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    """[n, ...] of n tensors, also of none."""
    return torch.stack(parts) if parts else torch.zeros_like(like, dtype=torch.float64)
