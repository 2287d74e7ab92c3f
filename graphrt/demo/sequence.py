"""The mix over whole sequences: causal convolution, silu, and KDA in chunks, in plain torch with gradients.

Within a chunk of C tokens that starts from state S (one head, `k̂, q̂` normalised, `L_t = g_1 + ... + g_t`):

    p_t = k̂_t exp(L_t)      r_t = q̂_t exp(L_t)      m_t = k̂_t exp(-L_t)
    (I + diag(β) tril(p mᵀ, -1)) u = diag(β) (v - p Sᵀ)
    o = r Sᵀ + tril(r mᵀ) u
    S = S diag(exp(L_C)) + uᵀ (k̂ exp(L_C - L))

The triangular systems of all chunks are solved at once, for the right sides `β v` and `β p`; only three small
products per chunk remain sequential. `exp(-L)` needs `C * |gate_lower_bound| <= 80`: C = 16 for a bound of -5.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Block

CHUNK = 16
L2_EPSILON = 1e-6


def sequence_mix(layer: int, block: Block, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor) -> Tensor:
    """Mix [batch, T, ...] sequences that all start from an empty state; returns [batch, T, H*V]."""
    c = block.config
    qkv = F.silu(causal_convolution(qkv.float(), block.conv_weight))
    q, k, v = (x.unflatten(-1, (c.num_heads, c.head_dim)) for x in qkv.chunk(3, dim=-1))
    gain = block.A_log.exp().repeat_interleave(c.head_dim)
    g = c.gate_lower_bound * torch.sigmoid(gain * (raw_g.float() + block.dt_bias))
    g = g.unflatten(-1, (c.num_heads, c.head_dim))
    q = l2_normalise(q) * c.head_dim**-0.5
    return chunk_kda(q, l2_normalise(k), v, g, torch.sigmoid(raw_beta.float())).flatten(-2)


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution over time: x [batch, T, D], weight [D, W]; the last tap is the current token."""
    taps = weight.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    y = padded[:, : x.shape[1]] * weight[:, 0]
    for j in range(1, taps):
        y = y + padded[:, j : j + x.shape[1]] * weight[:, j]
    return y


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x²) + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs [batch, T, H, V] float32 from an empty state.

    q, k (normalised, q scaled), g (log decay) [batch, T, H, K]; v [batch, T, H, V]; beta [batch, T, H] in (0, 1);
    all float32, T any length.
    """
    length = q.shape[1]
    q, k, v, g = (_into_chunks(x) for x in (q, k, v, g))
    beta = _into_chunks(beta.unsqueeze(-1))
    L = g.cumsum(-2)
    p, r, m = k * L.exp(), q * L.exp(), k * (-L).exp()
    coupling = beta * (p @ m.mT).tril(-1)
    reads = (r @ m.mT).tril()
    solved = torch.linalg.solve_triangular(coupling, beta * torch.cat((v, p), -1), upper=False, unitriangular=True)
    free, through_state = solved.split((v.shape[-1], p.shape[-1]), -1)
    end = L[..., -1:, :]
    tail = k * (end - L).exp()
    out = _run_chunks(free, through_state, r, reads, tail, end.exp())
    return out.permute(0, 1, 3, 2, 4).flatten(1, 2)[:, :length]


def _into_chunks(x: Tensor) -> Tensor:
    """[batch, T, H, D] -> [batch, chunks, H, CHUNK, D]; tokens added at the end are zero and change no state."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    chunks: Tensor = x.unflatten(1, (-1, CHUNK))
    return chunks.permute(0, 1, 3, 2, 4)


def _run_chunks(
    free: Tensor,  # [batch, chunks, H, C, V]
    through_state: Tensor,  # [batch, chunks, H, C, K]
    r: Tensor,  # [batch, chunks, H, C, K]
    reads: Tensor,  # [batch, chunks, H, C, C]
    tail: Tensor,  # [batch, chunks, H, C, K]
    decay: Tensor,  # [batch, chunks, H, 1, K]
) -> Tensor:
    """The sequential part; the state is kept transposed, [batch, H, K, V]."""
    batch, chunks, heads, _, values = free.shape
    state = free.new_zeros(batch, heads, r.shape[-1], values)
    outputs = []
    for i in range(chunks):
        u = free[:, i] - through_state[:, i] @ state
        outputs.append(r[:, i] @ state + reads[:, i] @ u)
        state = decay[:, i].mT * state + tail[:, i].mT @ u
    return torch.stack(outputs, 1)
