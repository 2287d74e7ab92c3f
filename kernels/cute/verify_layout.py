"""Where everything of the deferred verify lies in shared memory, and the rings its warpgroups hand it on through.

A ring's place i % depth is filled when its `full` barrier completes and free again when its `empty` barrier does. Two
notices travel with every item: one with the raw inputs (two places, freed early) and one with u and v (three places,
freed when the item is finished).
"""

from . import tile
from .tile import K, V

END = -1
PROBES = 16  # p_0..p_7 and r_0..r_7
INPUTS, VALUES, STAGES = 2, 3, 2  # depth of the rings: raw inputs; u and v; coefficients
PROJECTION_BYTES = 17 * 4  # a row of projections, one float of padding against bank conflicts
PARTIAL = 9  # floats in a padded row of partial couplings
NOTICE_BYTES = 64
ITEMS = 4  # places for what warp 12 tells warp 13; never more than three are taken
# Byte offsets in the notice of the raw inputs ...
N, LENGTH, HEAD, FIRST, KEY_GATE = 0, 4, 8, 12, 16
# ... in the notice of u and v ...
CORRECTION, OUT, STATE, BETA = 16, 24, 32, 40
# ... and in both: the slot's convolution state, and whether the row may write it.
CONV, WRITES = 48, 56


def swizzled(row, channel_byte):
    """Byte offset of a channel in a [rows, K] FP32 matrix of coefficients."""
    return row * (K * 4) + (channel_byte ^ ((row & 1) << 6))


class VerifyLayout:
    """Static facts of one variant: sizes, and where everything lies in shared memory."""

    def __init__(self, heads, q, dtype, a_log_dtype, dt_bias_dtype, width, keeps, split):
        self.split, self.tile, self.depth = split, tile.Tile(split), 2 * split
        self.heads, self.q, self.dtype = heads, q, dtype
        self.a_log_dtype, self.dt_bias_dtype = a_log_dtype, dt_bias_dtype
        # Width of the convolution, 0 if q, k and v come convolved, and whether its state keeps the history.
        self.width, self.keeps = width, keeps
        self.size = dtype.width // 8
        # Columns that a full window leaves in a channel of the convolution's state.
        self.columns = q + max(width - 1, 0) - (not keeps)
        self.token_bytes = K * self.size  # one head's q, k, v or gate of a token
        self.key_gate_bytes = 2 * self.token_bytes
        self.window_bytes = q * self.token_bytes
        self.matrix_bytes = PROBES * K * 4
        self._at = 0
        take = self._take
        self.tiles = take(self.depth * self.tile.bytes)
        self.records = take(INPUTS * q * self.key_gate_bytes)
        self.keys = take(INPUTS * self.window_bytes)
        self.gates = take(INPUTS * self.window_bytes)
        self.queries = take(INPUTS * self.window_bytes)
        self.corrections = take(VALUES * q * V * 4)
        self.values = take(VALUES * self.window_bytes)
        self.replay_bytes = (q + 1) * K * 4
        self.replays = take(STAGES * self.replay_bytes)
        self.high = take(STAGES * self.matrix_bytes)
        self.low = take(STAGES * self.matrix_bytes)
        self.inverse = take(STAGES * self.matrix_bytes // 2)  # k̂_i exp(-L_i); later the partial couplings
        self.couplings = take(STAGES * PROBES * 32)
        self.projections = take(V * PROJECTION_BYTES)
        self.window_norms = take(STAGES * PROBES * 16)
        self.replay_norms = take(STAGES * tile.MAX_Q * 16)
        self.input_notices = take(INPUTS * NOTICE_BYTES)
        self.value_notices = take(VALUES * NOTICE_BYTES)
        self.told = take(4 * ITEMS)
        self._barriers = []
        bar, warps = self._barrier, tile.ARRIVING_LANES  # arrivals of one lane, or so many of each warp
        self.tile_full, self.tile_empty = bar(self.depth, 1), bar(self.depth, 1)
        self.tile_folded = bar(self.depth, 4 * warps)
        self.record_full, self.input_empty = bar(INPUTS, 1), bar(INPUTS, 8 * warps)
        self.token_full, self.value_full = bar(INPUTS, 32), bar(VALUES, 32)
        self.correction_full = bar(VALUES, 1)
        self.value_empty = bar(VALUES, 9 * warps)
        self.replay_full, self.replay_empty = bar(STAGES, 4 * warps), bar(STAGES, 4 * warps)
        self.window_full, self.window_empty = bar(STAGES, 4 * warps), bar(STAGES, 8 * warps)
        self.peer_read = bar(STAGES, 4)
        self.item_full = bar(ITEMS, 1)
        self.projection_full, self.projection_empty = bar(1, 4 * warps), bar(1, 4 * warps)
        self.shared_bytes = self._at

    def _take(self, size):
        at = self._at
        self._at += (size + 15) // 16 * 16
        return at

    def _barrier(self, depth, count):
        at = self._take(8 * depth)
        self._barriers += [(at + 8 * i, count) for i in range(depth)]
        return at
