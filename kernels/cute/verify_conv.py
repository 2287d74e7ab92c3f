"""The short convolution inside the verify: one thread a channel, for q and k in warpgroup 1, for v in warpgroup 2.

    y_t = silu(bias + Σ_w weight_w x_{t - W + 1 + w})        rounded to the activations' dtype

with the same order of products and sums, the same silu and the same rounding as the Triton convolution (conv.py), so
that what the window sees, and keeps as its records, is what two launches would have given it. Channels of a slot's
state are those of q, then k, then v, head by head.

A thread reads its channel's committed history, W - 1 inputs from column `start` on, before it waits for the window,
and writes the state after it: history to the front, the window's inputs behind it. Nobody else has this channel; only
where two blocks share a head do both read the history of q and k, and then each says so before the other writes.
"""

# A test of the trace and a test of the kernel do not melt into one `if`.
# ruff: noqa: SIM102

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx
from .tile import K
from .verify_layout import VerifyLayout


class VerifyConv(VerifyLayout):
    def channel(self, kind, h, c):
        """Index in conv_dim of channel c of head h in q (0), k (1) or v (2)."""
        return (kind * self.heads + h) * K + c

    def load_taps(self, conv, state, channel, n):
        """Of one channel: the history after n committed tokens as it stands in the state, the weights, the bias."""
        _, weights, biases, _, dim_stride, column_stride, weight_stride, tap_stride, keeps = conv
        start = ptx.select(keeps != 0, n, cutlass.max(n - 1, 0))
        at = state + Int64(channel) * dim_stride + Int64(start) * column_stride
        history = [ptx.load_global(at + w * column_stride, self.dtype) for w in range(self.width - 1)]
        at = weights + Int64(channel) * weight_stride
        taps = [ptx.load_global(at + w * tap_stride, self.dtype).to(Float32) for w in range(self.width)]
        # Without a bias the first weight stands in for the address, and zero for the value.
        at = ptx.select(biases != 0, biases + Int64(channel) * self.size, at)
        bias = ptx.select(biases != 0, ptx.load_global(at, self.dtype).to(Float32), Float32(0.0))
        return history, taps, bias

    def convolve(self, history, inputs, taps, bias):
        """The window's outputs in the activations' dtype."""
        x = [value.to(Float32) for value in history + inputs]
        outputs = []
        for t in range(self.q):
            y = bias
            for w in range(self.width):
                y = y + taps[w] * x[t + w]
            outputs.append(ptx.divide(y, Float32(1.0) + ptx.exp(-y)).to(self.dtype))
        return outputs

    @cute.jit
    def store_state(self, conv, state: Int64, channel: Int32, n: Int32, length: Int32, history, inputs):
        """History to the front of the channel's columns, the window's inputs behind it; else no column changes."""
        _, _, _, _, dim_stride, column_stride, _, _, keeps = conv
        at = state + Int64(channel) * dim_stride
        # The layout without a column to spare drops the oldest input of the history.
        if keeps == 0:
            if length > 0:
                at -= column_stride
        if (n > 0) | (keeps == 0):
            for w in cutlass.range_constexpr(self.width - 1):
                if cutlass.const_expr(w > 0):
                    ptx.store_global(at + w * column_stride, history[w])
                else:
                    if (keeps != 0) | (length == 0):
                        ptx.store_global(at, history[0])
        for t in cutlass.range_constexpr(self.q):
            if t < length:
                ptx.store_global(at + (self.width - 1 + t) * column_stride, inputs[t])
