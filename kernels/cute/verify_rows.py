"""What the deferred verify reads of a row and a head, and writes for the tokens of nobody; the kernel is verify.py.

Hostile values stay inside the buffers: slots and rows out of range count as null and -1, counts and query_start_loc
are clamped.
"""

# A test of the trace and a test of the kernel do not melt into one `if`.
# ruff: noqa: SIM102

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...errors import NUM_KINDS, ErrorKind
from . import ptx
from .tile import K


class VerifyRows:
    def first_gate(self, c, parameters):
        """`gate_of` the block's first item, asked for before its notice is there."""
        block, _, _ = cute.arch.block_idx()
        return self.gate_of(block // self.split % self.heads, c, parameters)

    def gate_of(self, h, c, parameters):
        """A head, its exp(A_log), and dt_bias of its channel c."""
        a_logs, dt_biases, _ = parameters
        bias = self.load_parameter(dt_biases, h * K + c, self.dt_bias_dtype)
        return h, ptx.exp(self.load_parameter(a_logs, h, self.a_log_dtype)), bias

    def load_parameter(self, base, index, dtype):
        return ptx.load_fresh(base + Int64(index) * (dtype.width // 8), dtype).to(Float32)

    def index(self, which, b, step):
        """Entry b of slots (0), record rows (1), first tokens (2) or pending counts (3)."""
        indices, index_strides, _ = step
        return ptx.load_fresh(indices[which] + Int64(b) * index_strides[which] * 4, Int32)

    def valid_slot(self, slot, step):
        """0: null."""
        return ptx.select((slot > 0) & (slot < step[2][0]), slot, Int32(0))

    def valid_tokens(self, first, last, step):
        """First token of a row and one past its last."""
        total = step[2][3]
        first = cutlass.min(cutlass.max(first, 0), total)
        return first, cutlass.min(cutlass.max(last, first), total)

    def valid_row(self, row, step):
        """-1: scratch."""
        return ptx.select((row >= 0) & (row < step[2][1]), row, Int32(-1))

    @cute.jit
    def pending_of(self, row: Int32, step):
        """Pending count of a record row."""
        n = Int32(0)
        if step[0][3] != 0:
            if row >= 0:
                n = self.index(3, row, step)
        return cutlass.min(cutlass.max(n, 0), self.q)

    @cute.jit
    def look(self, item: Int32, limit: Int32, step):
        """Ask for what a first look tells of an item, one (row, head): whether it lies below `limit` (0 or 1; else the
        facts are those of the first), head, and as they stand there slot, first token, one past the last, record row.

        Nothing here waits for the answers.
        """
        inside = item < limit
        item = ptx.select(inside, item, Int32(0))
        b = item // self.heads
        row = b
        if step[0][1] != 0:
            row = self.index(1, b, step)
        facts = (self.index(0, b, step), self.index(2, b, step), self.index(2, b + 1, step), row)
        return ptx.select(inside, Int32(1), Int32(0)), item % self.heads, *facts

    @cute.jit
    def find_state(self, facts, step):
        """Whether there is anything to do for an item; its head and slot.

        A row with tokens is not asked for its pending count: that is a second way, behind its record row.
        """
        inside, h, slot, first, last, row = facts
        slot = self.valid_slot(slot, step)
        first, last = self.valid_tokens(first, last, step)
        alive = (inside != 0) & (slot > 0)
        if alive & (first == last):
            alive = self.pending_of(self.valid_row(row, step), step) > 0
        return alive, h, slot

    @cute.jit
    def find_item(self, facts, step):
        """All facts of an item, and whether there is anything to do for it."""
        inside, h, slot, first, last, row = facts
        slot, row = self.valid_slot(slot, step), self.valid_row(row, step)
        first, last = self.valid_tokens(first, last, step)
        n = self.pending_of(row, step)
        length = cutlass.min(last - first, self.q)
        return (inside != 0) & (slot > 0) & ((n > 0) | (length > 0)), h, slot, row, n, first, length

    @cute.jit
    def write_zeros(self, lane: Int32, out: Int64, out_stride: Int64, step):
        """Warp 14: zeros for null rows, tokens beyond Q of a row, and tokens before the first or past the last row."""
        _, _, (_, _, batch, total) = step
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        b = Int32(block)
        while b < batch:
            slot = self.valid_slot(self.index(0, b, step), step)
            first, last = self.valid_tokens(self.index(2, b, step), self.index(2, b + 1, step), step)
            if lane == 0:
                self.count_errors(b, step)
            token = ptx.select(slot > 0, first + self.q, first)
            while token < last:
                self.zero_token(lane, out + Int64(token) * out_stride)
                token += 1
            b += blocks
        begin = self.index(2, Int32(0), step)
        begin = cutlass.min(cutlass.max(begin, 0), total)
        token = Int32(block)
        while token < begin:
            self.zero_token(lane, out + Int64(token) * out_stride)
            token += blocks
        end = self.index(2, batch, step)
        token = cutlass.min(cutlass.max(end, 0), total) + block
        while token < total:
            self.zero_token(lane, out + Int64(token) * out_stride)
            token += blocks

    @cute.jit
    def count_errors(self, b: Int32, step):
        """Count what row b's values had wrong, once a launch."""
        indices, _, (slots, rows, _, total) = step
        slot = self.index(0, b, step)
        self.count(indices[4], b, ErrorKind.SLOT, slot >= slots)
        row = b
        if indices[1] != 0:
            row = self.index(1, b, step)
        live = (slot > 0) & (slot < slots)
        self.count(indices[4], b, ErrorKind.ROW, live & ((row < -1) | (row >= rows)))
        if indices[3] != 0:
            if live & (row >= 0) & (row < rows):
                n = self.index(3, row, step)
                self.count(indices[4], b, ErrorKind.PENDING, (n < 0) | (n > self.q))
        first = self.index(2, b, step)
        last = self.index(2, b + 1, step)
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
