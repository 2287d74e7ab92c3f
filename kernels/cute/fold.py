"""Fold of all layers in one launch: commit, flush and drain of the FP32 backend.

For every layer, live row b and head, with n = commit_lens[b] records of record row r (record_rows[b], or b):

    S_n = S_0 * exp(L_n)[None, :] + Σ_{t <= n} u_t (k̂_t * exp(L_n - L_t))ᵀ        S [V, K]

read from slot state_indices[b], written to slot final_state_indices[b]; in align mode the state after
boundary_recovery_lens[b] records, folded from the same S_0, goes to boundary_state_indices[b] too. A row is skipped,
untouched, unless its source slot is in 1..slots-1, its record row in 0..R-1 and n > 0 with a destination in range.
Everything of the source is in shared memory before anything is written, so the three slots may coincide.

Grid min(SMs, L * B * H), 288 threads, one block an SM: it walks its items with three tiles in flight.
- warp 8 takes live items by ticket (items.py) and issues bulk loads: the n records, then the state.
- warps 4 to 7, one thread a key channel, turn raw keys and gates into the coefficients κ_t and e (tile.py).
- warps 0 to 3 hold the tile in registers, fold it with one fma per element and record, and bulk-store it.

Traffic of a row and head: 128 KiB of state and n * (512 + 2K * size of the activations) bytes of records. The memory
bounds it: at n = 4 the fold warps are busy for about a fifth of the 8200 cycles in which an SM's share of it moves
128 KiB. Measured on an H200, 69 layers of 12 heads, n = 4: 1.07 times the time of the state's 128 KiB at the card's
in-place rate from 64 requests on (of that 1.03 are the records), 35 to 38 µs for one request, the host's launch of the
graph included. Alone under ncu (4 layers, 64 requests, cold) DRAM is at 75 % of its peak, L2 at 83 %, issue slots at
15 %. Multiprocessors do not have the same share of the memory: with the same number of items for each it was 1.12 times
(1850 µs instead of 1765 at 64 requests). Slower, too, in one run each:
- half states as items, for shorter rounds at few requests (42 µs for one request instead of 38);
- `evict_first` on the loads (1935 µs at 64 requests instead of 1850), on the stores (1871), on both (1943), and with
  tickets on both (1853 instead of 1765).

Not checked on the device: slots and record rows unique among live rows.
"""

# A test of the trace and a test of the kernel do not melt into one `if`.
# ruff: noqa: SIM102

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx, tile
from .items import ROWS, Items
from .tile import K, V

THREADS = 288
STAGES = 2
SHARED_BYTES = 227 * 1024  # most that one block gets
_LOADER = 8
_COEFFICIENTS = 1  # named barrier of the four coefficient warps
_END = -1

# Words of an item's notice in shared memory, written by the loader with the records.
_N, _BOUNDARY_N, _FINAL, _BOUNDARY, _A_LOG, _DT_BIAS = 0, 4, 8, 16, 24, 32
_NOTICE_BYTES = 48


class FoldF32(Items):
    """The kernel for one (heads, Q, dtypes, align, indexed)."""

    def __init__(self, heads, q, dtype, a_log_dtype, dt_bias_dtype, align, indexed):
        self.heads, self.q, self.dtype = heads, q, dtype
        self.a_log_dtype, self.dt_bias_dtype = a_log_dtype, dt_bias_dtype
        self.align, self.indexed = align, indexed
        self.tile = tile.Tile(1)
        self.key_gate_bytes = 2 * K * dtype.width // 8  # of one token
        self.set_bytes = (q + 1) * K * 4
        # As many tiles in flight as the block's shared memory takes beside the rest.
        self.depth = 3
        while self.lay_out() > SHARED_BYTES:
            self.depth -= 1

    def lay_out(self):
        """Place everything in shared memory; returns the bytes it takes."""
        sets = 2 if self.align else 1  # coefficients of the final and of the boundary state
        at = 0
        self.tiles, at = at, at + self.depth * self.tile.bytes
        self.key_gates, at = at, at + STAGES * self.q * self.key_gate_bytes
        self.corrections, at = at, at + STAGES * self.q * V * 4
        self.coefficients, at = at, at + sets * STAGES * self.set_bytes
        self.norms, at = at, at + STAGES * tile.MAX_Q * 16
        self.notices, at = at, at + STAGES * _NOTICE_BYTES
        # Barriers: full and empty of tiles, records, coefficients.
        self.tile_full, at = at, at + 8 * self.depth
        self.tile_empty, at = at, at + 8 * self.depth
        self.record_full, at = at, at + 8 * STAGES
        self.record_empty, at = at, at + 8 * STAGES
        self.coefficient_full, at = at, at + 8 * STAGES
        self.coefficient_empty, at = at, at + 8 * STAGES
        self.shared_bytes = at
        return at

    @cute.jit
    def __call__(
        self,
        addresses,  # 15: the tables and vectors below, and the counter of tickets (or 0)
        strides,  # of state_indices and record_rows, elements
        limits,  # slots, record rows, batch, layers, grid
        lower_bound: Float32,
        stream,
    ):
        # addresses: [L] int64 tables checkpoint, its slot stride, correction, its row stride, key_gate, its row
        # stride, A_log, dt_bias (addresses; strides in elements); int32 vectors state_indices, record_rows,
        # commit_lens, final_state_indices, boundary_state_indices, boundary_recovery_lens.
        self.kernel(addresses[:8], addresses[8:14], strides, limits[:4], addresses[14], lower_bound).launch(
            grid=[limits[4], 1, 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tables, vectors, strides, limits, tickets: Int64, lower_bound: Float32):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread >> 5)
        lane = thread & 31
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        if thread == 0:
            self.init_barriers(shared)
        cute.arch.sync_threads()
        if warp == _LOADER:
            self.load(shared, lane, tables, vectors, strides, limits, tickets)
        elif warp >= 4:
            self.prepare(shared, thread - 128, warp - 4, lane, lower_bound)
        else:
            self.fold(shared, warp, lane)

    @cute.jit
    def init_barriers(self, shared: Int32):
        for i in cutlass.range_constexpr(self.depth):
            ptx.mbar_init(shared + (self.tile_full + 8 * i), 1)
            ptx.mbar_init(shared + (self.tile_empty + 8 * i), 4)
        for i in cutlass.range_constexpr(STAGES):
            ptx.mbar_init(shared + (self.record_full + 8 * i), 1)
            ptx.mbar_init(shared + (self.record_empty + 8 * i), 8 * tile.ARRIVING_LANES)
            ptx.mbar_init(shared + (self.coefficient_full + 8 * i), 4 * tile.ARRIVING_LANES)
            ptx.mbar_init(shared + (self.coefficient_empty + 8 * i), 4 * tile.ARRIVING_LANES)
        ptx.mbar_init_fence()

    def read_int(self, base, index):
        return ptx.load_global(base + Int64(index) * 4, Int32)

    def read_long(self, base, index):
        return ptx.load_global(base + Int64(index) * 8, Int64)

    def lives(self, rows, facts):
        """Whether each of a few rows has anything to fold."""
        return [n + boundary_n > 0 for _, _, n, _, boundary_n, _ in (self.row_facts(b, *facts) for b in rows)]

    def row_facts(self, b, vectors, strides, limits):
        """Source, final slot and count, boundary slot and count, record row of row b; counts of a dead row are 0."""
        indices, record_rows, lens, finals, boundaries, boundary_lens = vectors
        slots, rows, _, _ = limits
        slot = self.read_int(indices, b * strides[0])
        final = self.read_int(finals, b)
        n = cutlass.min(cutlass.max(self.read_int(lens, b), 0), self.q)
        row = self.read_int(record_rows, b * strides[1]) if self.indexed else b
        alive = (slot > 0) & (slot < slots) & (row >= 0) & (row < rows)
        n = ptx.select(alive & (final > 0) & (final < slots), n, Int32(0))
        boundary = boundary_n = Int32(0)
        if self.align:
            boundary = self.read_int(boundaries, b)
            boundary_n = cutlass.min(cutlass.max(self.read_int(boundary_lens, b), 0), self.q)
            # The same block as the final one: the final state stands there, and one writer is enough.
            usable = alive & (boundary > 0) & (boundary < slots) & ((boundary != final) | (n == 0))
            boundary_n = ptx.select(usable, boundary_n, Int32(0))
        return slot, final, n, boundary, boundary_n, row

    @cute.jit
    def load(self, shared: Int32, lane: Int32, tables, vectors, strides, limits, tickets: Int64):
        """Warp 8: one lane issues the loads of the block's items."""
        block, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        _, _, batch, layers = limits
        facts = (vectors, strides, limits)
        i = Int32(0)
        start = Int32(0)
        while start < batch:
            bits, before, live = self.live_rows(start, batch, lane, facts)
            total = layers * live * self.heads
            item = Int32(block)
            while item < total:
                following = self.claim(item, step, total, tickets, lane)
                h = item % self.heads
                pair = item // self.heads
                b = start + self.nth_live(pair % live, bits, before, lane)
                l = pair // live
                # Everything that is read comes from far away: all of it at once.
                slot, final, n, boundary, boundary_n, row = self.row_facts(b, *facts)
                state, state_stride, correction, correction_stride, gate, gate_stride, a_log, dt_bias = (
                    self.read_long(table, l) for table in tables
                )
                if lane == 0:
                    count = cutlass.max(n, boundary_n)
                    stage = i & 1
                    if i >= STAGES:
                        ptx.mbar_wait(shared + self.record_empty + 8 * stage, ((i >> 1) & 1) ^ 1)
                    stride = state_stride * 4
                    inner = Int64(h) * tile.STATE_BYTES
                    notice = shared + self.notices + _NOTICE_BYTES * stage
                    ptx.store_shared(notice + _N, n)
                    ptx.store_shared(notice + _BOUNDARY_N, boundary_n)
                    ptx.store_shared(notice + _FINAL, state + Int64(final) * stride + inner)
                    ptx.store_shared(notice + _BOUNDARY, state + Int64(boundary) * stride + inner)
                    ptx.store_shared(notice + _A_LOG, a_log + Int64(h * (self.a_log_dtype.width // 8)))
                    ptx.store_shared(notice + _DT_BIAS, dt_bias + Int64(h * (K * self.dt_bias_dtype.width // 8)))
                    full = shared + self.record_full + 8 * stage
                    ptx.mbar_expect(full, count * (self.key_gate_bytes + V * 4))
                    gate += Int64(row) * gate_stride * (self.dtype.width // 8)
                    ptx.bulk_load(
                        shared + self.key_gates + self.q * self.key_gate_bytes * stage,
                        gate + Int64(h) * (self.q * self.key_gate_bytes),
                        count * self.key_gate_bytes,
                        full,
                    )
                    correction += Int64(row) * correction_stride * 4
                    ptx.bulk_load(
                        shared + self.corrections + self.q * V * 4 * stage,
                        correction + Int64(h) * (self.q * V * 4),
                        count * (V * 4),
                        full,
                    )
                    turns = i // self.depth
                    slot_of_tile = i - turns * self.depth
                    if i >= self.depth:
                        ptx.mbar_wait(shared + self.tile_empty + 8 * slot_of_tile, (turns & 1) ^ 1)
                    self.tile.start_load(
                        shared + self.tiles + self.tile.bytes * slot_of_tile,
                        state + Int64(slot) * stride + inner,
                        shared + self.tile_full + 8 * slot_of_tile,
                    )
                cute.arch.sync_warp()
                i += 1
                item = cute.arch.shuffle_sync(following, 0)
            start += ROWS
        if lane == 0:
            stage = i & 1
            if i >= STAGES:
                ptx.mbar_wait(shared + self.record_empty + 8 * stage, ((i >> 1) & 1) ^ 1)
            ptx.store_shared(shared + self.notices + _NOTICE_BYTES * stage + _N, Int32(_END))
            ptx.mbar_arrive(shared + self.record_full + 8 * stage)

    def notice(self, shared, i):
        """Wait for item i's records; the address of its notice and its number of records (-1: no more items)."""
        stage = i & 1
        ptx.mbar_wait(shared + self.record_full + 8 * stage, (i >> 1) & 1)
        at = shared + self.notices + _NOTICE_BYTES * stage
        return at, ptx.load_shared(at + _N, Int32)

    @cute.jit
    def prepare(self, shared: Int32, c: Int32, warp: Int32, lane: Int32, lower_bound: Float32):
        """Warps 4 to 7: thread c makes channel c of the coefficients."""
        i = Int32(0)
        at, n = self.notice(shared, i)
        while n >= 0:
            stage = i & 1
            boundary_n = ptx.load_shared(at + _BOUNDARY_N, Int32)
            a_log = ptx.load_global(ptx.load_shared(at + _A_LOG, Int64), self.a_log_dtype).to(Float32)
            bias_at = ptx.load_shared(at + _DT_BIAS, Int64) + Int64(c * (self.dt_bias_dtype.width // 8))
            bias = ptx.load_global(bias_at, self.dt_bias_dtype).to(Float32)
            record = shared + self.key_gates + self.q * self.key_gate_bytes * stage
            norms = shared + self.norms + tile.MAX_Q * 16 * stage
            sets = shared + self.coefficients + self.set_bytes * stage
            count = cutlass.max(n, boundary_n)
            keys, decays = tile.load_replay(record, c, self.q, self.dtype, count, ptx.exp(a_log), bias, lower_bound)
            tile.store_norm_partials(keys, norms, warp, lane)
            if i >= STAGES:
                ptx.mbar_wait(shared + self.coefficient_empty + 8 * stage, ((i >> 1) & 1) ^ 1)
            # Partial sums alternate between two places, so one barrier an item keeps writers behind readers.
            cute.arch.barrier(barrier_id=_COEFFICIENTS, number_of_threads=128)
            self.store_set(keys, decays, n, norms, sets, c, lane)
            if cutlass.const_expr(self.align):
                if boundary_n > 0:
                    self.store_set(keys, decays, boundary_n, norms, sets + STAGES * self.set_bytes, c, lane)
            tile.warp_arrive(lane, shared + self.coefficient_full + 8 * stage, shared + self.record_empty + 8 * stage)
            i += 1
            at, n = self.notice(shared, i)

    def store_set(self, keys, decays, n, norms, out, c, lane):
        """κ and e of the first n records; each set as if the later records were not there, bit for bit."""
        kept = [ptx.select(Int32(t) < n, decay, Float32(1.0)) for t, decay in enumerate(decays)]
        tile.store_replay(keys, kept, norms, out, out + self.q * K * 4, c, lane)

    @cute.jit
    def fold(self, shared: Int32, warp: Int32, lane: Int32):
        """Warps 0 to 3: registers <- tile, fold, tile <- registers, bulk store."""
        state = cute.make_rmem_tensor(cute.make_layout(self.tile.values), Float32)
        first_row, offset = self.tile.place(warp, lane)
        i = Int32(0)
        at, n = self.notice(shared, i)
        while n >= 0:
            stage = i & 1
            turns = i // self.depth
            slot_of_tile = i - turns * self.depth
            full = shared + self.tile_full + 8 * slot_of_tile
            place = shared + self.tiles + self.tile.bytes * slot_of_tile
            target = ptx.load_shared(at + _FINAL, Int64)
            corrections = shared + self.corrections + self.q * V * 4 * stage + first_row * 4
            keys = shared + self.coefficients + self.set_bytes * stage + (lane & 3) * 16
            ptx.mbar_wait(full, turns & 1)
            ptx.mbar_wait(shared + self.coefficient_full + 8 * stage, (i >> 1) & 1)
            if cutlass.const_expr(self.align):
                boundary_n = ptx.load_shared(at + _BOUNDARY_N, Int32)
                if boundary_n > 0:
                    self.tile.load(state, place + offset)
                    other = keys + STAGES * self.set_bytes
                    self.tile.fold(state, boundary_n, other + self.q * K * 4, other, corrections)
                    self.tile.store_global(state, ptx.load_shared(at + _BOUNDARY, Int64), warp, lane)
            self.tile.load(state, place + offset)
            if i > 0:
                # The store of the item before has had a whole load to leave shared memory: hand its tile back now.
                if lane == 0:
                    ptx.bulk_wait_read()
                    before = i - 1
                    ptx.mbar_arrive(shared + self.tile_empty + 8 * (before - (before // self.depth) * self.depth))
                cute.arch.sync_warp()
            self.tile.fold(state, n, keys + self.q * K * 4, keys, corrections)
            tile.warp_arrive(lane, shared + self.record_empty + 8 * stage, shared + self.coefficient_empty + 8 * stage)
            if n > 0:
                self.tile.store(state, place + offset)
                ptx.fence_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    self.tile.start_store_runs(target, place, warp)
            i += 1
            at, n = self.notice(shared, i)
        if lane == 0:
            ptx.bulk_wait()


FoldF32.kernel.set_name_prefix("graphrt_fold_f32", remove_cutlass_symbol=True, keep_mangled_name=False)
