"""The short convolution inside the verify: one thread a channel, for q and k in warpgroup 1, for v in warpgroup 2.

    y_t = silu(bias + Σ_w weight_w x_{t - W + 1 + w})        rounded to the activations' dtype

with the same order of products and sums, the same silu and the same rounding as the Triton convolution (conv.py), so
that what the window sees, and keeps as its records, is what two launches would have given it. Channels of a slot's
state are those of q, then k, then v, head by head.

A thread reads its channel's committed history, W - 1 inputs from column `start` on, before it waits for the window,
and writes the state after it: history to the front, the window's inputs behind it. Nobody else has this channel; only
where two blocks share a head do both read the history of q and k, and then each says so before the other writes.
The loader brings a head's channels into L2 up to two items ahead, where they are whole 16 bytes: 787 µs instead of 796
for 16 requests of 69 layers, 2598 instead of 2648 for 64.

Accesses are narrow, 2 or 4 bytes of a channel. Tried for 64 requests, without a gain: the state written 16 bytes a
thread by way of shared memory (2718 µs instead of 2662), history read so as well (2767), an item's history asked for
before the item in front of it is written (2748 instead of 2648).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx
from .tile import K
from .verify_layout import CONV, HEAD, VerifyLayout


class VerifyConv(VerifyLayout):
    def channel(self, kind, h, c):
        """Index in conv_dim of channel c of head h in q (0), k (1) or v (2)."""
        return (kind * self.heads + h) * K + c

    @cute.jit
    def fetch_state(self, conv, state: Int64, h: Int32):
        """Bring a head's channels into L2 if its slot of the state is dense. One lane calls this."""
        _, _, _, _, dim_stride, column_stride = conv
        if (column_stride == self.size) & (dim_stride == self.columns * self.size) & ((state & Int64(15)) == Int64(0)):
            for kind in cutlass.range_constexpr(3):
                at = state + Int64(self.channel(kind, h, 0)) * dim_stride
                ptx.bulk_prefetch(at, Int32(K * self.columns * self.size))

    def load_taps(self, conv, state, channel, n):
        """Of one channel, in the activations' dtype: history after n committed tokens, weights, and the bias.

        The history is as it stands in the state; the weights of a channel lie together (`conv_supported`).
        """
        _, weights, biases, _, dim_stride, column_stride = conv
        start = n if self.keeps else cutlass.max(n - 1, 0)
        at = state + Int64(channel) * dim_stride + Int64(start) * column_stride
        history = [ptx.load_fresh(at + w * column_stride, self.dtype) for w in range(self.width - 1)]
        at = weights + Int64(channel) * (self.width * self.size)
        taps = ptx.load_fresh(at, self.dtype, 4) if self.width == 4 else self.load_row(at)
        # Without a bias the first weight stands in for its address, and zero for its value.
        at = ptx.select(biases != 0, biases + Int64(channel) * self.size, at)
        return (*history, *taps, ptx.load_fresh(at, self.dtype))

    def load_row(self, at):
        return [ptx.load_fresh(at + w * self.size, self.dtype) for w in range(self.width)]

    def convolve(self, conv, taps, inputs):
        """The window's outputs in the activations' dtype."""
        history = self.width - 1
        x = [value.to(Float32) for value in (*taps[:history], *inputs)]
        weights = [value.to(Float32) for value in taps[history:-1]]
        bias = ptx.select(conv[2] != 0, taps[-1].to(Float32), Float32(0.0))
        outputs = []
        for t in range(self.q):
            y = bias
            for w in range(self.width):
                y = y + weights[w] * x[t + w]
            outputs.append(ptx.divide(y, Float32(1.0) + ptx.exp(-y)).to(self.dtype))
        return outputs

    @cute.jit
    def store_state(self, conv, state: Int64, channel: Int32, length: Int32, taps, inputs):
        """History to the front of the channel's columns, the window's inputs behind it; else no column changes."""
        _, _, _, _, dim_stride, column_stride = conv
        at = state + Int64(channel) * dim_stride
        if (column_stride == self.size) & (length >= self.q):
            # The layout without a column to spare drops the oldest input of the history.
            self.store_run(at, (*taps[0 if self.keeps else 1 : self.width - 1], *inputs))
        else:
            if cutlass.const_expr(not self.keeps):
                if length > 0:
                    at -= column_stride
                else:
                    ptx.store_global(at, taps[0])
            for w in cutlass.range_constexpr(0 if self.keeps else 1, self.width - 1):
                ptx.store_global(at + w * column_stride, taps[w])
            for t in cutlass.range_constexpr(self.q):
                if t < length:
                    ptx.store_global(at + (self.width - 1 + t) * column_stride, inputs[t])

    def store_run(self, at, values):
        """Neighbouring 2-byte values, as many as possible two at a time, whether `at` is on 4 bytes or 2 behind."""
        odd = (at & Int64(2)) != Int64(0)
        count = len(values)
        words = (count - 1) // 2
        first = at + ptx.select(odd, Int64(2), Int64(0))
        for i in range(words):
            a, b, c = values[2 * i : 2 * i + 3]
            ptx.store_global(first + 4 * i, ptx.select(odd, ptx.pack(b, c), ptx.pack(a, b)))
        if count % 2 == 0:
            ptx.store_global(at + 2 * (count - 1), values[-1])
            rest = count - 2
        else:
            rest = count - 1
        ptx.store_global(at + ptx.select(odd, Int64(0), Int64(2 * rest)), ptx.select(odd, values[0], values[rest]))

    def value_channel(self, c, share):
        """Value channel of thread c: a row of the block's share; the threads that have none stay inside the head."""
        if self.split == 1:
            return c
        return ptx.select(c < self.tile.rows, share * self.tile.rows + c, c)

    def value_taps(self, shared, i, c, share, conv):
        """`load_taps` of item i's v, asked for before the next replay is prepared; nothing without convolution."""
        if self.width == 0:
            return ()
        at, _, n = self.value_notice(shared, i)
        channel = self.channel(2, ptx.load_shared(at + HEAD, Int32), self.value_channel(c, share))
        return self.load_taps(conv, ptx.load_shared(at + CONV, Int64), channel, n)
