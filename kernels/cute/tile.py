"""What fold and verify share: the state tile of one (layer, row, head), its fold, and the coefficients of a replay.

Both kernels call these functions and no others for the fold, so replay in the verify, commit, flush and drain of the
same records give bit-equal checkpoints: same token order, same fused multiply-adds, same reduction tree of the norms.

    S_n = S_0 * e[None, :] + Σ_{t < n} u_t κ_tᵀ        e = Π_{j < n} exp(g_j),  κ_t = k̂_t Π_{t < j < n} exp(g_j)

The decays are running products from the last token backwards: an exponential of a difference of two sums would lose
as many ulps as the sum is large.

Tile in shared memory: rows of V times K, FP32, in two halves, the second 16 banks further on. A thread (warp w, lane)
of the fold warpgroup owns a few rows and in each of them 8 x 4 channels, so that what it reads is at once a
bank-conflict-free 16-byte access and, with channels permuted, an A fragment of `mma.m16n8k8`. With 128 rows:

    rows       64 (gq & 1) + 16 w + (gq >> 1) + 4 x      x = 0..3,  gq = lane >> 2
    channels   16 j + 4 tq + 0..3                        j = 0..7,  tq = lane & 3

A warp's rows are two contiguous runs, one in each half: it can store its share without waiting for the others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx

K = V = 128
STATE_BYTES = V * K * 4
ROW_BYTES = K * 4
NORM_EPS = 1e-6
MAX_Q = 8
# Lanes that arrive at a barrier for their warp. 32 only under a race checker, which does not see that a warp's
# barrier orders the other lanes before the one that arrives (tools/sanitize.py).
ARRIVING_LANES = 1


class Tile:
    """Geometry of the share of a head's state that one block holds: all 128 rows of V, or with split 2 a half."""

    def __init__(self, split):
        self.split = split
        self.rows = V // split
        self.half_rows = self.rows // 2
        self.run_rows = self.half_rows // 4
        self.thread_rows = 4 // split
        self.values = 32 * self.thread_rows  # of a thread
        self.half_bytes = self.half_rows * ROW_BYTES + 64
        self.bytes = 2 * self.half_bytes
        self.state_bytes = self.rows * ROW_BYTES

    def place(self, warp, lane):
        """First row of the thread, and the byte offset of its first value in the tile."""
        gq, tq = lane >> 2, lane & 3
        run = self.run_rows * warp + (gq >> 1)
        return self.half_rows * (gq & 1) + run, (gq & 1) * self.half_bytes + run * ROW_BYTES + tq * 16

    def load(self, state, address):
        """state[32 x + 4 j + c] <- shared memory; `address` already holds the thread's offset."""
        for x in range(self.thread_rows):
            for j in range(8):
                values = ptx.load_shared(address + (4 * x * ROW_BYTES + 64 * j), count=4)
                for c in range(4):
                    state[32 * x + 4 * j + c] = values[c]

    def store(self, state, address):
        for x in range(self.thread_rows):
            for j in range(8):
                at = 32 * x + 4 * j
                ptx.store_shared(address + (4 * x * ROW_BYTES + 64 * j), *(state[at + c] for c in range(4)))

    def store_global(self, state, address, warp, lane):
        """Registers straight to global memory, for the rare second copy at a block boundary."""
        first, _ = self.place(warp, lane)
        base = address + Int64(first * ROW_BYTES + (lane & 3) * 16)
        for x in range(self.thread_rows):
            for j in range(8):
                at = 32 * x + 4 * j
                ptx.store_global(base + (4 * x * ROW_BYTES + 64 * j), *(state[at + c] for c in range(4)))

    @cute.jit
    def fold(self, state: cute.Tensor, n: Int32, decay: Int32, keys: Int32, corrections: Int32):
        """state <- state * e + Σ_{t<n} u_t κ_tᵀ.

        `decay` and `keys` address e [K] and κ [Q, K] at the thread's channels, `corrections` u [Q, V] at its first row.
        """
        for j in cutlass.range_constexpr(8):
            e = ptx.load_shared(decay + 64 * j, count=4)
            for x in cutlass.range_constexpr(self.thread_rows):
                for c in cutlass.range_constexpr(4):
                    at = 32 * x + 4 * j + c
                    state[at] = state[at] * e[c]
        for t in cutlass.range(n):
            u = [ptx.load_shared(corrections + (t * (V * 4) + 16 * x)) for x in range(self.thread_rows)]
            for j in cutlass.range_constexpr(8):
                key = ptx.load_shared(keys + (t * ROW_BYTES + 64 * j), count=4)
                for x in cutlass.range_constexpr(self.thread_rows):
                    for c in cutlass.range_constexpr(4):
                        at = 32 * x + 4 * j + c
                        state[at] = ptx.fma(u[x], key[c], state[at])

    def start_store_runs(self, address, tile, warp):
        """Bulk-store the warp's two runs of rows as one group. One lane calls this."""
        run = warp * (self.run_rows * ROW_BYTES)
        size = Int32(self.run_rows * ROW_BYTES)
        ptx.bulk_store(address + Int64(run), tile + run, size)
        ptx.bulk_store(address + Int64(self.half_rows * ROW_BYTES + run), tile + (self.half_bytes + run), size)
        ptx.bulk_commit()

    def start_store(self, address, tile):
        """Bulk-store the whole tile as one group. One lane calls this."""
        size = Int32(self.half_rows * ROW_BYTES)
        ptx.bulk_store(address, tile, size)
        ptx.bulk_store(address + Int64(self.half_rows * ROW_BYTES), tile + self.half_bytes, size)
        ptx.bulk_commit()

    def start_load(self, tile, address, barrier):
        """Expect and start the two halves. One lane calls this."""
        ptx.mbar_expect(barrier, Int32(self.state_bytes))
        size = Int32(self.half_rows * ROW_BYTES)
        ptx.bulk_load(tile, address, size, barrier)
        ptx.bulk_load(tile + self.half_bytes, address + Int64(self.half_rows * ROW_BYTES), size, barrier)


@cute.jit
def warp_arrive(lane: Int32, *barriers: Int32):
    """The warp has done its part: what all its lanes did comes before one arrival at each barrier."""
    cute.arch.sync_warp()
    if lane < ARRIVING_LANES:
        for barrier in barriers:
            ptx.mbar_arrive(barrier)


def owned_sum(lane):
    """Which of the eight sums of `warp_sums` this lane holds."""
    return ((lane >> 4) & 1) * 4 + ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1)


def warp_sums(values, lane):
    """Sum eight values over the warp in 9 shuffles instead of 40; the lane gets the total of value `owned_sum`."""
    held = list(values) + [Float32(0.0)] * (MAX_Q - len(values))
    for offset in (16, 8, 4):
        half = offset >> 2
        upper = (lane & offset) != 0
        held = [
            ptx.select(upper, held[i + half], held[i])
            + cute.arch.shuffle_sync_bfly(ptx.select(upper, held[i], held[i + half]), offset)
            for i in range(half)
        ]
    total = held[0] + cute.arch.shuffle_sync_bfly(held[0], 2)
    return total + cute.arch.shuffle_sync_bfly(total, 1)


def inverse_norm(partials):
    """1 / sqrt(Σ + eps) of a squared norm in four partial sums, one per warp."""
    a, b, c, d = ptx.load_shared(partials, count=4)
    return ptx.rsqrt(a + b + c + d + Float32(NORM_EPS))


def log_decay(raw, scale, bias, lower_bound):
    """g = lower_bound * sigmoid(exp(A_log) * (raw_g + dt_bias)), `scale` = exp(A_log)."""
    return lower_bound * ptx.sigmoid(scale * (raw + bias))


def load_replay(record, c, q, dtype, n, scale, bias, lower_bound):
    """Channel c of the raw records: keys and exp(g), 0 and 1 from token n on, whatever the bytes there say."""
    size = dtype.width // 8
    keys, decays = [], []
    for t in range(q):
        at = record + c * size + t * 2 * K * size
        raw_key = ptx.load_shared(at, dtype).to(Float32)
        raw_gate = ptx.load_shared(at + K * size, dtype).to(Float32)
        accepted = Int32(t) < n
        keys.append(ptx.select(accepted, raw_key, Float32(0.0)))
        decay = ptx.exp(log_decay(raw_gate, scale, bias, lower_bound))
        decays.append(ptx.select(accepted, decay, Float32(1.0)))
    return keys, decays


def store_norm_partials(keys, partials, warp, lane):
    """Each warp's share of the keys' squared norms, [MAX_Q, 4] floats; a barrier must follow.

    Four lanes store the same total to the same place: a branch would keep the shuffles from overlapping what follows.
    """
    total = warp_sums([key * key for key in keys], lane)
    ptx.store_shared(partials + owned_sum(lane) * 16 + warp * 4, total)


def store_replay(keys, decays, partials, out_keys, out_decay, c, lane):
    """κ [Q, K] and e [K] of channel c from the norms' partial sums."""
    inverse = inverse_norm(partials + (lane & 7) * 16)
    product = Float32(1.0)
    for t in reversed(range(len(keys))):
        unit = keys[t] * cute.arch.shuffle_sync(inverse, t)
        ptx.store_shared(out_keys + (t * ROW_BYTES) + c * 4, unit * product)
        product = product * decays[t]
    ptx.store_shared(out_decay + c * 4, product)
