"""Triton building blocks that every KDA kernel shares, so that replay, commit and flush agree bit for bit.

One token (design section 2), value channels along V, key channels along K:

    S <- S * exp(g)[None, :]          u = beta * (v - S k)          S <- S + u k^T          o = S q

What makes two kernels agree, whatever layout the compiler picks for each of them: sums and products round where
they are written (every launch passes `NO_CONTRACTION`; the one fused multiply-add is explicit), and the sum of
squares of a norm is a binary tree over neighbours, whose every step adds just two numbers.
"""

import triton
import triton.language as tl

from ..errors import NUM_KINDS

NO_CONTRACTION = {"enable_fp_fusion": False}
NORM_EPS = tl.constexpr(1e-6)
_NUM_KINDS = tl.constexpr(NUM_KINDS)


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, N: tl.constexpr):
    """Sum [ROWS, N] over N (a power of two up to 2**20), pairing neighbours: the same bits in every layout."""
    for i in tl.static_range(20):
        if (N >> i) > 1:
            x = tl.sum(tl.reshape(x, (ROWS, N >> (i + 1), 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def inverse_norms(p_x, token_stride, length, o_q, o_k, BLOCK_Q: tl.constexpr, K: tl.constexpr):
    """1 / sqrt(sum(x_t^2) + eps) of the first `length` of BLOCK_Q vectors at `p_x`; later tokens are not read."""
    p = p_x + o_q[:, None].to(tl.int64) * token_stride + o_k[None, :]
    b_x = tl.load(p, mask=(o_q[:, None] < length) & (o_k[None, :] < K), other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tree_sum(b_x * b_x, BLOCK_Q, K) + NORM_EPS)


@triton.jit
def wide(stride):
    """A stride as 64 bits: the product with a token's number must not wrap. Triton passes small ints as 32."""
    return tl.cast(stride, tl.int64)


@triton.jit
def pick(b_x, o_q, t):
    """Element t of a small vector, as a scalar. Exact, and blind to NaN in the other elements."""
    return tl.sum(tl.where(o_q == t, b_x, 0.0), axis=0)


@triton.jit
def decay(b_raw_g, b_bias, a, lower_bound, BOUNDED: tl.constexpr):
    """exp(g) for raw gates, with a = exp(A_log): both gates of design section 2."""
    b_x = b_raw_g + b_bias
    if BOUNDED:
        b_g = lower_bound * (1.0 / (1.0 + tl.exp(-a * b_x)))
    else:
        # log(1 + e) loses a small e altogether; its series does not.
        b_e = tl.exp(-tl.abs(b_x))
        b_log1p = tl.where(b_e < 1e-3, b_e * (1.0 - b_e * (0.5 - b_e * (1.0 / 3.0))), tl.log(1.0 + b_e))
        b_g = -a * (tl.maximum(b_x, 0.0) + b_log1p)
    return tl.exp(b_g)


@triton.jit
def fold_records(
    b_S,         # [BLOCK_V, K] fp32
    p_key_gate,  # [Q, 2K] of this row and head
    p_u,         # [Q, V] of this row and head, at this value block
    start, stop,
    b_inv_norm,  # [BLOCK_Q] of the record keys
    b_bias,      # [K]
    a, lower_bound, o_q, o_k, o_v,
    K: tl.constexpr, V: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """S after records start..stop-1, token by token: the one fold of this backend."""
    for t in range(start, stop):
        b_k = tl.load(p_key_gate + t * 2 * K + o_k).to(tl.float32) * pick(b_inv_norm, o_q, t)  # [K]
        b_raw_g = tl.load(p_key_gate + t * 2 * K + K + o_k).to(tl.float32)  # [K]
        b_u = tl.load(p_u + t * V + o_v)  # [BLOCK_V]
        b_decayed = b_S * decay(b_raw_g, b_bias, a, lower_bound, BOUNDED)[None, :]
        b_S = tl.fma(tl.broadcast_to(b_u[:, None], b_S.shape), tl.broadcast_to(b_k[None, :], b_S.shape), b_decayed)
    return b_S


@triton.jit
def count_error(errors_ptr, KIND: tl.constexpr, condition, row):
    """Add one to the device error counter where the scalar `condition` holds; whoever is first notes its row."""
    if condition:
        # The counter lies in host memory: nothing goes there while all is well.
        before = tl.atomic_add(errors_ptr + KIND, 1, sem="relaxed", scope="gpu")
        if before == 0:
            tl.store(errors_ptr + _NUM_KINDS + KIND, row)
