"""What the deferred verify reads of a row, and what it writes for the tokens of nobody; the kernel is verify.py.

Hostile values stay inside the buffers: slots and rows out of range count as null and -1, counts and query_start_loc
are clamped.
"""

# A test of the trace and a test of the kernel do not melt into one `if`.
# ruff: noqa: SIM102

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...errors import NUM_KINDS, ErrorKind
from . import ptx


class VerifyRows:
    def slot_of(self, b, step):
        """Slot of row b, 0: null."""
        indices, index_strides, (slots, _, _, _) = step
        slot = ptx.load_global(indices[0] + Int64(b) * index_strides[0] * 4, Int32)
        return ptx.select((slot > 0) & (slot < slots), slot, Int32(0))

    def tokens_of(self, b, step):
        """First token of row b and one past its last."""
        indices, index_strides, (_, _, _, total) = step
        first, last = (ptx.load_global(indices[2] + Int64(b + k) * index_strides[2] * 4, Int32) for k in range(2))
        first = cutlass.min(cutlass.max(first, 0), total)
        return first, cutlass.min(cutlass.max(last, first), total)

    @cute.jit
    def record_of(self, b: Int32, step):
        """Record row of row b, -1: scratch, and its pending count."""
        indices, index_strides, (_, rows, _, _) = step
        row = b
        if indices[1] != 0:
            row = ptx.load_global(indices[1] + Int64(b) * index_strides[1] * 4, Int32)
        row = ptx.select((row >= 0) & (row < rows), row, Int32(-1))
        n = Int32(0)
        if indices[3] != 0:
            if row >= 0:
                n = ptx.load_global(indices[3] + Int64(row) * index_strides[3] * 4, Int32)
        return row, cutlass.min(cutlass.max(n, 0), self.q)

    @cute.jit
    def find_state(self, item: Int32, step):
        """Whether there is anything to do for an item, one (row, head); its head and slot.

        A row with tokens is not asked for its pending count: that is a second way, behind its record row.
        """
        inside, b, h = self.place_of(item, step)
        slot = self.slot_of(b, step)
        first, last = self.tokens_of(b, step)
        alive = inside & (slot > 0)
        if alive & (first == last):
            _, n = self.record_of(b, step)
            alive = n > 0
        return alive, h, slot

    @cute.jit
    def find_item(self, item: Int32, step):
        """All facts of an item, and whether there is anything to do for it."""
        inside, b, h = self.place_of(item, step)
        slot = self.slot_of(b, step)
        first, last = self.tokens_of(b, step)
        row, n = self.record_of(b, step)
        length = cutlass.min(last - first, self.q)
        return inside & (slot > 0) & ((n > 0) | (length > 0)), h, slot, row, n, first, length

    def place_of(self, item, step):
        """Row and head of an item, and whether there is one; else those of the first."""
        inside = item < step[2][2] * self.heads
        item = ptx.select(inside, item, Int32(0))
        return inside, item // self.heads, item % self.heads

    @cute.jit
    def write_zeros(self, lane: Int32, out: Int64, out_stride: Int64, step):
        """Warp 14: zeros for null rows, tokens beyond Q of a row, and tokens before the first or past the last row."""
        indices, index_strides, (_, _, batch, total) = step
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        b = Int32(block)
        while b < batch:
            slot = self.slot_of(b, step)
            first, last = self.tokens_of(b, step)
            if lane == 0:
                self.count_errors(b, step)
            token = ptx.select(slot > 0, first + self.q, first)
            while token < last:
                self.zero_token(lane, out + Int64(token) * out_stride)
                token += 1
            b += blocks
        begin = ptx.load_global(indices[2], Int32)
        begin = cutlass.min(cutlass.max(begin, 0), total)
        token = Int32(block)
        while token < begin:
            self.zero_token(lane, out + Int64(token) * out_stride)
            token += blocks
        end = ptx.load_global(indices[2] + Int64(batch) * index_strides[2] * 4, Int32)
        token = cutlass.min(cutlass.max(end, 0), total) + block
        while token < total:
            self.zero_token(lane, out + Int64(token) * out_stride)
            token += blocks

    @cute.jit
    def count_errors(self, b: Int32, step):
        """Count what row b's values had wrong, once a launch."""
        indices, index_strides, (slots, rows, _, total) = step
        slot = ptx.load_global(indices[0] + Int64(b) * index_strides[0] * 4, Int32)
        self.count(indices[4], b, ErrorKind.SLOT, slot >= slots)
        row = b
        if indices[1] != 0:
            row = ptx.load_global(indices[1] + Int64(b) * index_strides[1] * 4, Int32)
        live = (slot > 0) & (slot < slots)
        self.count(indices[4], b, ErrorKind.ROW, live & ((row < -1) | (row >= rows)))
        if indices[3] != 0:
            if live & (row >= 0) & (row < rows):
                n = ptx.load_global(indices[3] + Int64(row) * index_strides[3] * 4, Int32)
                self.count(indices[4], b, ErrorKind.PENDING, (n < 0) | (n > self.q))
        first = ptx.load_global(indices[2] + Int64(b) * index_strides[2] * 4, Int32)
        last = ptx.load_global(indices[2] + Int64(b + 1) * index_strides[2] * 4, Int32)
        disordered = (first < 0) | (last < first) | (last > total) | (last - first > self.q)
        self.count(indices[4], b, ErrorKind.QUERY_LEN, disordered)

    @cute.jit
    def count(self, errors: Int64, b: Int32, kind: cutlass.Constexpr[int], happened: cutlass.Boolean):
        if happened:
            before = ptx.fetch_add_global(errors + 4 * int(kind), Int32(1))
            if before == 0:
                ptx.store_global(errors + 4 * (NUM_KINDS + int(kind)), b)

    @cute.jit
    def zero_token(self, lane: Int32, address: Int64):
        for start in cutlass.range_constexpr(0, self.heads * self.token_bytes, 32 * 16):
            byte = start + lane * 16
            if byte < self.heads * self.token_bytes:
                ptx.store_global(address + Int64(byte), Int32(0), Int32(0), Int32(0), Int32(0))
