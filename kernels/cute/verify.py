"""Deferred verify of one layer in one pass over the checkpoint, FP32, K = V = 128, Q <= 8.

For a live row b (slot in 1..slots-1, record row r) and each head, with n = pending[r] (0 without, and for r = -1):

    S_0 <- checkpoint, folded with the row's first n records (formula and bit pattern of fold.py); written back if n > 0
    u_t = β_t (v_t - S_0 p_t - Σ_{i<t} c_ti u_i)         p_t = k̂_t exp(L_t),  c_ti = <k̂_i exp(-L_i), p_t>
    o_t = S_0 r_t + Σ_{i<=t} d_ti u_i                    r_t = q̂_t exp(L_t),  d_ti = <k̂_i exp(-L_i), r_t>

for the row's tokens t < min(length, Q). u_t and the raw k_t, g_t replace the row's records; o_t is the output. A row
without tokens still has its pending folded. Row -1 never writes the checkpoint and records into the scratch row.
Outputs of a null row's tokens, of tokens beyond Q of a row and of tokens past the last row are zero.

Grid at most one block an SM, 512 threads each walking the block's items (verify_roles.py has the arithmetic):
- warps 0 to 3: state tile in registers, fold, 3xTF32 products with the 16 probes.               232 registers
- warps 4 to 7: p, r and k̂ exp(-L) of the window; raw records. With a convolution: its q and k.  104
- warps 8 to 11: replay coefficients one item ahead, couplings, solve, u and o; v's convolution. 104
- warp 12 loads states, 13 all else, two items ahead; 14 writes the zeros, 15 stores the states.  72

Who takes what: item k of the first round belongs to block k, and so on in a fixed stride. A launch with many items has
those of the second half taken by ticket (items.py). Blocks that start early, on the multiprocessors that the launch
before leaves first, may bring the first state of the blocks that start last into L2 (deferred.py says when).

Traffic of an item: 64 KiB in, 64 KiB out if n > 0, n KiB of records in, Q KiB of records out, 1.25 Q KiB of
activations: for n = 4, Q = 8 at 4.2 TB/s 9500 cycles an SM; the fold warps need about 7000. On an H200 with 69 layers
of 12 heads the verifies of 64 requests take 1.10 times that floor, of 256 1.07. No unit was full (one launch alone
under ncu, 64 requests: DRAM at 55 % of its peak, L2 at 71 %, L1 and shared memory at 46 %, issue slots at 33 %;
tools/count_kernels.py). The memory waits for the first window of a layer, and nearly half the cycles between two
instructions of a warp go to what it asked of L1 or shared memory. At one request a layer takes 3.2 µs, the latency of
launch, tokens, coefficients, products and solve; what an early kernel does before its wait is on that path as well. In
between, a block takes the shared memory of a multiprocessor, so the blocks of two layers in a row fit side by side up
to 66 of each: with 48 (2 requests) a layer takes 3.4 µs, with 96 (4 or 8) 4.5 and 5.8, for late blocks load late. So
a block reads global memory past L1, not behind a fence that drops it, the loaders' first look is on its way while the
barriers are set up, and the gate parameters of a block's first head are there before its records: 222 µs instead of
238 at one request, 319 instead of 338 at 4.

Tried for 1, 16 and 64 requests, without a gain of 1 %: a third accumulator in the products, for shorter chains;
`evict_first` on the loads of the states (2188 µs instead of 2142 at 64 requests, though 710 instead of 721 at 16), on
their stores (209 instead of 234 at one request, but only since the states of a bench then stay in L2 from step to
step), on both (8930 instead of 8475 at 256); all Q records of the first item asked for before its pending count is
known (224 instead of 222 at one request, 717 instead of 720 at 16, 2194 instead of 2142 at 64); more than one state
fetched for another block, or later ones for oneself (2143 and 2323 instead of 2131 at 64); one item over two blocks
where a block would have 1 to 3 (830 instead of 684 at 16); fewer blocks than multiprocessors (deferred.py); two fold
warpgroups on 64 rows each, for half the time from a state to its products (692 instead of 684 at 16, 2164 instead of
2139 at 64, 8201 instead of 8241 at 256).

Programmatic launch (order.py): launched `early`, state, records, history and the whole replay come before this kernel's
wait; else every thread waits before its first access. The successor is released after the wait. Every block waits, also
one without items, so that a finished grid means that all before it are finished. All records of an item are in the
shared memory of whoever reads them before the first is overwritten.

Hostile values stay inside the buffers: slots and rows out of range count as null and -1, counts and query_start_loc
are clamped. Not checked on the device: slots and rows unique among live rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx, tile
from . import verify_layout as rings
from .tile import V
from .verify_roles import VerifyRoles
from .verify_rows import VerifyRows

THREADS = 512
_REGISTERS = (232, 104, 104, 72)  # their sum, times 128 threads, is the register file


class VerifyF32(VerifyRoles, VerifyRows):
    """The kernel for one (heads, Q, dtypes, width of a fused convolution, split)."""

    @cute.jit
    def __call__(
        self,
        tokens,  # q, k, raw_g, v, raw_beta, out: addresses of [1, T, H, ...]
        token_strides,  # the same six, bytes from token to token
        layer,  # checkpoint, correction, key_gate, A_log, dt_bias: addresses
        layer_strides,  # checkpoint slot, correction row, key_gate row: bytes
        indices,  # state_indices, record_rows, query_start_loc, pending, errors, ticket counter: addresses, int32, or 0
        index_strides,  # the first four, elements
        conv,  # state, weight, bias (or 0): addresses; slot, dim and column stride: bytes
        limits,  # slots, record rows, batch, T, items that keep to the stride, number of the last ticket
        flags,  # early, raw_beta is FP32, blocks (or pairs) that help others
        launch,  # grid, programmatic
        lower_bound: Float32,
        stream,
    ):
        self.kernel(
            tokens, token_strides, layer, layer_strides, indices, index_strides, conv, limits, flags, lower_bound
        ).launch(
            grid=[launch[0], 1, 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            min_blocks_per_mp=1,
            use_pdl=launch[1],
            cluster=[self.split, 1, 1] if self.split > 1 else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, tokens, token_strides, layer, layer_strides, indices, index_strides, conv, limits, flags,
        lower_bound: Float32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread >> 5)
        lane = thread & 31
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        if thread == 0:
            for at, count in self._barriers:
                ptx.mbar_init(shared + at, count)
            ptx.mbar_init_fence()
        early, wide_beta, helpers = flags
        if early == 0:
            # Nothing of global memory has been read so far.
            cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        step = (indices, index_strides, limits[:4])
        groups = blocks // self.split
        items = (block // self.split, groups, limits[4], limits[5])
        # What the loaders look at first is on its way while the block gets ready.
        facts = (Int32(0),) * 6
        if ((warp & 14) == 12) & (limits[2] > 0):
            facts = self.look(items[0] + lane * groups, limits[4], step)
        share = Int32(0)
        if cutlass.const_expr(self.split == 1):
            cute.arch.sync_threads()
        else:
            # The peer arrives at this block's barriers: not before they stand.
            share = block % self.split
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        parameters = (layer[3], layer[4], lower_bound)
        group = warp >> 2
        if group == 0:
            cute.arch.setmaxregister_increase(_REGISTERS[0])
            self.project(shared, warp, lane, share)
        elif group == 1:
            cute.arch.setmaxregister_decrease(_REGISTERS[1])
            self.prepare_window(shared, thread - 128, warp - 4, lane, share, parameters, conv)
        elif group == 2:
            cute.arch.setmaxregister_decrease(_REGISTERS[2])
            i = Int32(0)
            gate = self.first_gate(thread - 256, parameters)
            n, gate = self.prepare_replay(shared, i, thread - 256, warp - 8, lane, parameters, gate)
            while n >= 0:
                taps = self.value_taps(shared, i, thread - 256, share, conv)
                n, gate = self.prepare_replay(shared, i + 1, thread - 256, warp - 8, lane, parameters, gate)
                strides = token_strides[4], token_strides[5]
                self.solve(shared, i, thread - 256, warp - 8, lane, share, *strides, wide_beta, conv, taps)
                i += 1
        else:
            cute.arch.setmaxregister_decrease(_REGISTERS[3])
            if warp == 12:
                self.load_states(shared, lane, share, layer, layer_strides, step, items, facts)
            elif warp == 13:
                inputs = (tokens, token_strides, layer, layer_strides)
                self.load_inputs(shared, lane, share, *inputs, step, items, facts, conv, wide_beta)
            elif warp == 14:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
                self.write_zeros(lane, tokens[5], token_strides[5], step)
            else:
                if (early != 0) & (items[0] < helpers):
                    self.help(lane, share, layer, layer_strides, step, items)
                self.write_back(shared, lane)

    def state_address(self, slot, h, share, layer, layer_strides):
        """Of the block's share of a head's state."""
        inner = Int64(h) * tile.STATE_BYTES + Int64(share * self.tile.state_bytes)
        return layer[0] + Int64(slot) * layer_strides[0] + inner

    @cute.jit
    def load_states(self, shared: Int32, lane: Int32, share: Int32, layer, layer_strides, step, items, facts):
        """Warp 12: each lane looks at one item; those that found a live one load its state in turn.

        Behind the items of the stride it takes one at a time by ticket, and tells warp 13 of those that are alive.
        """
        base, groups, fixed, last_ticket = items
        total = step[2][2] * self.heads
        counter = step[0][5]
        i = Int32(0)
        told = Int32(0)
        following = Int32(0)
        if (counter != 0) & (lane == 0):
            following = ptx.take_ticket(counter, last_ticket)
        while base < total:
            alive, h, slot = self.find_state(facts, step)
            found = cute.arch.vote_ballot_sync(alive)
            while found != 0:
                if lane == cute.arch.popc((found & (0 - found)) - 1):
                    turns = i // self.depth
                    spot = i - turns * self.depth
                    if i >= self.depth:
                        ptx.mbar_wait(shared + self.tile_empty + 8 * spot, (turns & 1) ^ 1)
                    if base >= fixed:
                        self.tell(shared, told, base)
                    self.tile.start_load(
                        shared + self.tiles + self.tile.bytes * spot,
                        self.state_address(slot, h, share, layer, layer_strides),
                        shared + self.tile_full + 8 * spot,
                    )
                cute.arch.sync_warp()
                told += ptx.select(base >= fixed, Int32(1), Int32(0))
                found = found & (found - 1)
                i += 1
            base += 32 * groups
            limit = fixed
            if base >= fixed:
                base = total
                if counter != 0:
                    base = fixed + cute.arch.shuffle_sync(following, 0)
                    if (base < total) & (lane == 0):
                        following = ptx.take_ticket(counter, last_ticket)
                limit = cutlass.min(base + 1, total)
            facts = self.look(base + lane * groups, limit, step)
        if (counter != 0) & (lane == 0):
            self.tell(shared, told, Int32(rings.END))

    def tell(self, shared, k, item):
        """The block's k-th item by ticket. One lane calls this.

        No place is taken that has not been read: the item two before has left its tile, so warp 13 knew of it.
        """
        place = k & (rings.ITEMS - 1)
        ptx.store_shared(shared + self.told + 4 * place, item)
        ptx.mbar_arrive(shared + self.item_full + 8 * place)

    def hear(self, shared, k):
        """What warp 12 told."""
        place = k & (rings.ITEMS - 1)
        ptx.mbar_wait(shared + self.item_full + 8 * place, (k // rings.ITEMS) & 1)
        return ptx.load_shared(shared + self.told + 4 * place, Int32)

    @cute.jit
    def help(self, lane: Int32, share: Int32, layer, layer_strides, step, items):
        """Bring the first state of a block that starts late, the last for the first, into L2."""
        first, groups, _, _ = items
        alive, h, slot = self.find_state(self.look(groups - 1 - first, step[2][2] * self.heads, step), step)
        if alive & (lane == 0):
            address = self.state_address(slot, h, share, layer, layer_strides)
            ptx.bulk_prefetch(address, Int32(self.tile.state_bytes))

    @cute.jit
    def load_inputs(
        self, shared: Int32, lane: Int32, share: Int32, tokens, token_strides, layer, layer_strides, step, items,
        facts, conv, wide_beta: Int32,
    ):  # fmt: skip
        """Warp 13: notices, records, and after the wait the tokens of each item."""
        base, groups, fixed, _ = items
        total = step[2][2] * self.heads
        i = Int32(0)
        heard = Int32(0)
        while base < total:
            alive, h, slot, row, n, first, length = self.find_item(facts, step)
            found = cute.arch.vote_ballot_sync(alive)
            while found != 0:
                turn = cute.arch.popc((found & (0 - found)) - 1)
                stage = i & 1
                place = i - i // rings.VALUES * rings.VALUES
                self.wait_free(shared, i)
                if lane == turn:
                    at = shared + self.input_notices + rings.NOTICE_BYTES * stage
                    value_at = shared + self.value_notices + rings.NOTICE_BYTES * place
                    record = layer[2] + Int64(row) * layer_strides[2] + Int64(h) * (self.q * self.key_gate_bytes)
                    correction = layer[1] + Int64(row) * layer_strides[1] + Int64(h) * (self.q * V * 4)
                    ptx.store_shared(at + rings.N, n, length, h, first)
                    ptx.store_shared(at + rings.KEY_GATE, record)
                    ptx.store_shared(value_at + rings.N, n, length)
                    if cutlass.const_expr(self.width > 0):
                        conv_state = conv[0] + Int64(slot) * conv[3]
                        ptx.store_shared(value_at + rings.HEAD, h)
                        for notice in (at, value_at):
                            ptx.store_shared(notice + rings.CONV, conv_state)
                            # A dummy row reads a live-looking slot but never writes it.
                            ptx.store_shared(notice + rings.WRITES, ptx.select(row >= 0, Int32(1), Int32(0)))
                        self.fetch_state(conv, conv_state, h)
                    ptx.store_shared(value_at + rings.CORRECTION, correction)
                    out = tokens[5] + Int64(first) * token_strides[5] + Int64(h) * self.token_bytes
                    ptx.store_shared(value_at + rings.OUT, out)
                    beta_bytes = ptx.select(wide_beta != 0, Int64(4), Int64(self.size))
                    beta = tokens[4] + Int64(first) * token_strides[4] + Int64(h) * beta_bytes
                    ptx.store_shared(value_at + rings.BETA, beta)
                    ptx.store_shared(value_at + rings.STATE, self.state_address(slot, h, share, layer, layer_strides))
                    record_full = shared + self.record_full + 8 * stage
                    correction_full = shared + self.correction_full + 8 * place
                    ptx.mbar_expect(record_full, n * self.key_gate_bytes)
                    ptx.mbar_expect(correction_full, n * (V * 4))
                    if n > 0:
                        ptx.bulk_load(
                            shared + self.records + self.q * self.key_gate_bytes * stage,
                            record,
                            n * self.key_gate_bytes,
                            record_full,
                        )
                        ptx.bulk_load(
                            shared + self.corrections + self.q * V * 4 * place, correction, n * (V * 4), correction_full
                        )
                cute.arch.sync_warp()
                self.load_tokens(shared, lane, i, tokens, token_strides)
                found = found & (found - 1)
                i += 1
            base += 32 * groups
            limit = fixed
            if base >= fixed:
                base = total
                if step[0][5] != 0:
                    base = self.hear(shared, heard)
                    base = ptx.select(base >= 0, base, total)
                    heard += 1
                limit = cutlass.min(base + 1, total)
            facts = self.look(base + lane * groups, limit, step)
        self.wait_free(shared, i)
        if lane == 0:
            place = i - i // rings.VALUES * rings.VALUES
            ptx.store_shared(shared + self.input_notices + rings.NOTICE_BYTES * (i & 1) + rings.N, Int32(rings.END))
            ptx.store_shared(shared + self.value_notices + rings.NOTICE_BYTES * place + rings.N, Int32(rings.END))
            ptx.mbar_arrive(shared + self.record_full + 8 * (i & 1))
            ptx.mbar_arrive(shared + self.correction_full + 8 * place)

    @cute.jit
    def wait_free(self, shared: Int32, i: Int32):
        """Until item i's places in the rings of raw inputs and of u and v are free."""
        turn = i // rings.VALUES
        if i >= rings.INPUTS:
            ptx.mbar_wait(shared + self.input_empty + 8 * (i & 1), ((i >> 1) & 1) ^ 1)
        if i >= rings.VALUES:
            ptx.mbar_wait(shared + self.value_empty + 8 * (i - turn * rings.VALUES), (turn & 1) ^ 1)

    @cute.jit
    def load_tokens(self, shared: Int32, lane: Int32, i: Int32, tokens, token_strides):
        """q, k, gate and v of item i's tokens, behind the wait, each lane 16 bytes of every other token.

        Not as one bulk copy a token: a warp starts those one lane after the other, which cost every layer 0.35 µs.
        """
        stage = i & 1
        place = i - i // rings.VALUES * rings.VALUES
        at = shared + self.input_notices + rings.NOTICE_BYTES * stage
        length = ptx.load_shared(at + rings.LENGTH, Int32)
        h = ptx.load_shared(at + rings.HEAD, Int32)
        first = ptx.load_shared(at + rings.FIRST, Int32)
        lanes = self.token_bytes // 16  # of a token
        row = lane // lanes
        byte = lane % lanes * 16
        inner = Int64(h) * self.token_bytes + Int64(byte)
        targets = [shared + (base + self.window_bytes * stage) for base in (self.queries, self.keys, self.gates)]
        targets.append(shared + self.values + self.window_bytes * place)
        if i == 0:
            cute.arch.griddepcontrol_wait()
        for kind in cutlass.range_constexpr(4):
            source = tokens[kind] + Int64(first + row) * token_strides[kind] + inner
            target = targets[kind] + (row * self.token_bytes + byte)
            for t in cutlass.range_constexpr(0, self.q, 32 // lanes):
                if t + row < length:
                    ptx.copy_async(target + t * self.token_bytes, source + Int64(t) * token_strides[kind])
            if cutlass.const_expr(kind == 2):
                ptx.copies_arrive(shared + self.token_full + 8 * stage)
        # Behind the wait also of an item without tokens: its history is compacted then.
        ptx.copies_arrive(shared + self.value_full + 8 * place)


VerifyF32.kernel.set_name_prefix("graphrt_verify_f32", remove_cutlass_symbol=True, keep_mangled_name=False)
