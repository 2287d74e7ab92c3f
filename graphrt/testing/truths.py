"""The float64 oracle of all record rows at once: the recurrence of `oracle`, batched over rows and layers.

For long runs: a step costs the same few operations however many rows it has, and runs where the pool is. One row of
it is `Oracle`, token by token; the tests compare the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pools import Pool

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Activations of a step, [L, T, ...]; the tokens of a row lie one behind the other."""

    q: Tensor  # [L, T, H, K]
    k: Tensor  # [L, T, H, K]
    v: Tensor  # [L, T, H, V]
    raw_g: Tensor  # [L, T, H, K]
    raw_beta: Tensor  # [L, T, H]
    x: Tensor  # [L, T, conv_dim]

    @classmethod
    def allocate(cls, pool: Pool, num_tokens: int) -> "Tokens":
        """Memory for a step of that many tokens; NaN, in the activation dtype of the pool."""
        first = pool.layers[0]
        heads, dim, dtype = first.local_num_heads, first.head_dim, first.recoverssm_records.key_gate.dtype
        sizes = [(heads, dim)] * 4 + [(heads,), (pool.conv_dim,)]
        return cls(
            *(torch.full((len(pool.layers), num_tokens, *size), NAN, dtype=dtype, device=pool.device) for size in sizes)
        )

    def parts(self) -> tuple[Tensor, ...]:
        """All six, as the fields stand."""
        return self.q, self.k, self.v, self.raw_g, self.raw_beta, self.x


class Truths:
    """State and convolution history of whoever owns each record row, after its accepted tokens."""

    def __init__(self, pool: Pool) -> None:
        layers, rows = pool.layers, pool.pending.shape[0]
        heads, dim = layers[0].local_num_heads, layers[0].head_dim
        self.window, self.lower_bound = pool.spec_query_len, layers[0].gate_lower_bound
        self.gate_scale = torch.stack([layer.A_log.double().exp() for layer in layers])  # [L, H]
        self.dt_bias = torch.stack([layer.dt_bias.double().view(heads, dim) for layer in layers])
        weights, biases = [], []
        for i, layer in enumerate(layers):
            if layer.conv_weight is None or layer.conv_bias is None:
                raise ValueError(f"layers[{i}].conv_weight: expected weights and a bias of the convolution, got None")
            weights.append(layer.conv_weight.double())
            biases.append(layer.conv_bias.double())
        self.conv_weight, self.conv_bias = torch.stack(weights), torch.stack(biases)  # [L, D, W], [L, D]

        def nan(*shape: int) -> Tensor:
            return torch.full((rows, len(layers), *shape), NAN, dtype=torch.float64, device=pool.device)

        self.state = nan(heads, dim, dim)
        """[R, L, H, V, K]"""
        self.history = nan(pool.conv_dim, pool.hist)
        """[R, L, conv_dim, W - 1]"""

    def step(
        self,
        rows: Sequence[int],
        begins: Sequence[int],
        lengths: Sequence[int],
        accepted: Sequence[int],
        tokens: Tokens,
    ) -> tuple[Tensor, Tensor]:
        """Outputs of a window of each of these record rows, which then advance by their accepted tokens.

        Args:
            rows, begins, lengths, accepted: [B]: record row, first token, tokens (0..Q) and how many of them stand.

        Returns:
            [L, B, Q, H, V] and [L, B, Q, conv_dim] float64; entries past a row's length mean nothing.
        """
        device = self.state.device
        index, first, count = (torch.tensor(values, device=device) for values in (rows, begins, accepted))
        at = (first[:, None] + torch.arange(self.window, device=device)).clamp(max=tokens.q.shape[1] - 1)
        q, k, v, raw_g, raw_beta, x = (part[:, at].double() for part in tokens.parts())
        state = self.state[index].transpose(0, 1)  # [L, B, H, V, K]
        kept, outs = state, [torch.zeros_like(v[:, :, 0])] * self.window
        decay, beta = self._log_decay(raw_g).exp(), torch.sigmoid(raw_beta)
        key, query = _unit(k), _unit(q) * q.shape[-1] ** -0.5
        for t in range(max(lengths, default=0)):
            state = state * decay[:, :, t, :, None]
            u = beta[:, :, t, :, None] * (v[:, :, t] - _apply(state, key[:, :, t]))
            state = state + u[..., None] * key[:, :, t, :, None]
            outs[t] = _apply(state, query[:, :, t])
            # A draft that was rejected may hold anything.
            kept = torch.where((t < count)[:, None, None, None], state, kept)
        self.state[index] = kept.transpose(0, 1)
        return torch.stack(outs, 2), self._convolve(index, x, count)

    def _log_decay(self, raw_g: Tensor) -> Tensor:
        a, x = self.gate_scale[:, None, None, :, None], raw_g + self.dt_bias[:, None, None]
        if self.lower_bound is None:
            return -a * (torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0))
        return self.lower_bound * torch.sigmoid(a * x)

    def _convolve(self, index: Tensor, x: Tensor, count: Tensor) -> Tensor:
        inputs = torch.cat((self.history[index].transpose(0, 1), x.transpose(2, 3)), 3)  # [L, B, D, hist + Q]
        width = self.conv_weight.shape[2]
        y = self.conv_bias[:, None, :, None].expand(*inputs.shape[:3], self.window)
        for w in range(width):
            y = y + self.conv_weight[:, None, :, w, None] * inputs[..., w : w + self.window]
        column = count[:, None] + torch.arange(width - 1, device=x.device)
        kept = inputs.gather(3, column[None, :, None].expand(*inputs.shape[:3], width - 1))
        self.history[index] = kept.transpose(0, 1)
        return (y * torch.sigmoid(y)).transpose(2, 3)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _apply(state: Tensor, vector: Tensor) -> Tensor:
    """[..., V] of state [..., V, K] times vector [..., K]."""
    return (state @ vector[..., None])[..., 0]
