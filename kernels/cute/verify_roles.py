"""What the three computing warpgroups of the deferred verify do; the kernel around them is verify.py.

Shared memory and mbarriers are laid out in verify_layout.py. Numbers behind the layout:
- The window's 16 probe columns p_t, r_t stand in shared memory split into TF32 parts, hi and lo, so that the fold
  warpgroup multiplies without splitting them again. Neighbouring rows are 16 floats apart by an exclusive or
  (`swizzled`): rows gq and gq + 1 of a fragment would else meet in the same banks.
- x y is formed as hi hi + (hi lo + lo hi) in two accumulators; lo lo, at most 2^-20 of the product, is left out.
- exp(-L_i) may stand alone only while it and its TF32 remainder are normal numbers: `supported` bounds Q |g|.
"""

# A test of the trace and a test of the kernel do not melt into one `if`.
# ruff: noqa: SIM102

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx, tile
from .tile import K, V
from .verify_conv import VerifyConv
from .verify_layout import (
    BETA,
    CONV,
    CORRECTION,
    HEAD,
    KEY_GATE,
    LENGTH,
    NOTICE_BYTES,
    OUT,
    PARTIAL,
    PROBES,
    PROJECTION_BYTES,
    STAGES,
    STATE,
    VALUES,
    WRITES,
    N,
    swizzled,
)

_BAR_WINDOW, _BAR_SOLVE = 1, 2


class VerifyRoles(VerifyConv):
    def value_notice(self, shared, i):
        """Wait for item i's notice of u and v; its address, its place and its pending count (-1: no more items)."""
        turn = i // VALUES
        place = i - turn * VALUES
        ptx.mbar_wait(shared + self.correction_full + 8 * place, turn & 1)
        at = shared + self.value_notices + NOTICE_BYTES * place
        return at, place, ptx.load_shared(at + N, Int32)

    @cute.jit
    def project(self, shared: Int32, warp: Int32, lane: Int32, share: Int32):
        """Warpgroup 0: fold the tile in registers, write it back to its place, multiply it with the window's probes."""
        state = cute.make_rmem_tensor(cute.make_layout(self.tile.values), Float32)
        sums = cute.make_rmem_tensor(cute.make_layout(self.tile.values // 4), Float32)
        gq, tq = lane >> 2, lane & 3
        first_row, offset = self.tile.place(warp, lane)
        i = Int32(0)
        _, place, n = self.value_notice(shared, i)
        while n >= 0:
            stage = i & 1
            phase = (i >> 1) & 1
            turn = i // self.depth
            slot = i - turn * self.depth
            here = shared + self.tiles + self.tile.bytes * slot
            replay = shared + self.replays + self.replay_bytes * stage + tq * 16
            ptx.mbar_wait(shared + self.tile_full + 8 * slot, turn & 1)
            self.tile.load(state, here + offset)
            ptx.mbar_wait(shared + self.replay_full + 8 * stage, phase)
            if n > 0:
                corrections = shared + self.corrections + self.q * V * 4 * place
                corrections += (share * self.tile.rows + first_row) * 4
                self.tile.fold(state, n, replay + self.q * K * 4, replay, corrections)
                self.tile.store(state, here + offset)
                ptx.fence_async_shared()
            folded = shared + self.tile_folded + 8 * slot
            replay_empty = shared + self.replay_empty + 8 * stage
            tile.warp_arrive(lane, folded, replay_empty, shared + self.value_empty + 8 * place)
            ptx.mbar_wait(shared + self.window_full + 8 * stage, phase)
            self.multiply(state, sums, shared + self.matrix_bytes * stage, gq, tq)
            tile.warp_arrive(lane, shared + self.window_empty + 8 * stage)
            if i > 0:
                ptx.mbar_wait(shared + self.projection_empty, (i - 1) & 1)
            for m in cutlass.range_constexpr(self.tile.thread_rows // 2):
                for r in cutlass.range_constexpr(2):
                    row = shared + self.projections + (first_row + 8 * m + 4 * r) * PROJECTION_BYTES + tq * 8
                    for p in cutlass.range_constexpr(2):
                        for e in cutlass.range_constexpr(2):
                            ptx.store_shared(row + (32 * p + 4 * e), sums[8 * m + 4 * p + 2 * r + e])
            tile.warp_arrive(lane, shared + self.projection_full)
            i += 1
            _, place, n = self.value_notice(shared, i)

    @cute.jit
    def write_back(self, shared: Int32, lane: Int32):
        """Warp 15: bulk-store every folded tile, and free its place as soon as the store has read it.

        A warp of its own, because the fold warps go on to the products, which wait for the window: the next state
        could not be loaded meanwhile.
        """
        i = Int32(0)
        at, place, n = self.value_notice(shared, i)
        while n >= 0:
            turn = i // self.depth
            slot = i - turn * self.depth
            target = ptx.load_shared(at + STATE, Int64)
            ptx.mbar_wait(shared + self.tile_folded + 8 * slot, turn & 1)
            tile.warp_arrive(lane, shared + self.value_empty + 8 * place)
            if lane == 0:
                if n > 0:
                    self.tile.start_store(target, shared + self.tiles + self.tile.bytes * slot)
                    ptx.bulk_wait_read()
                ptx.mbar_arrive(shared + self.tile_empty + 8 * slot)
            cute.arch.sync_warp()
            i += 1
            at, place, n = self.value_notice(shared, i)
        if lane == 0:
            ptx.bulk_wait()

    def multiply(self, state, sums, matrices, gq, tq):
        """sums[8 m + 4 p + ...] = the warp's rows of S x probes: m a group of 16 rows, p the p_t or the r_t."""
        groups = self.tile.thread_rows // 2
        d = [[[Float32(0.0)] * 4 for _ in range(2 * groups)] for _ in range(2)]  # [hi hi, cross terms][2 m + p]
        for j in range(8):
            at = swizzled(gq, tq * 16 + 64 * j)
            high = [ptx.load_shared(matrices + self.high + at + 8 * K * 4 * p, Int32, 4) for p in range(2)]
            low = [ptx.load_shared(matrices + self.low + at + 8 * K * 4 * p, Int32, 4) for p in range(2)]
            for m in range(groups):
                upper = [ptx.split_tf32(state[32 * (2 * m) + 4 * j + c]) for c in range(4)]
                lower = [ptx.split_tf32(state[32 * (2 * m + 1) + 4 * j + c]) for c in range(4)]
                for c in (0, 2):
                    a = [[upper[c][s], lower[c][s], upper[c + 1][s], lower[c + 1][s]] for s in range(2)]
                    for p in range(2):
                        b_high, b_low = high[p][c : c + 2], low[p][c : c + 2]
                        o = 2 * m + p
                        d[0][o] = ptx.mma_tf32(d[0][o], a[0], b_high)
                        d[1][o] = ptx.mma_tf32(d[1][o], a[0], b_low)
                        d[1][o] = ptx.mma_tf32(d[1][o], a[1], b_high)
        for o in range(2 * groups):
            for e in range(4):
                sums[4 * o + e] = d[0][o][e] + d[1][o][e]

    @cute.jit
    def prepare_window(self, shared: Int32, c: Int32, warp: Int32, lane: Int32, share: Int32, parameters, conv):
        """Warpgroup 1, thread c = channel c: p, r, k̂ exp(-L) of the window, and its raw records."""
        known, scale, bias = self.first_gate(c, parameters)
        i = Int32(0)
        ptx.mbar_wait(shared + self.record_full, 0)
        n = ptx.load_shared(shared + self.input_notices + N, Int32)
        while n >= 0:
            stage = i & 1
            phase = (i >> 1) & 1
            at = shared + self.input_notices + NOTICE_BYTES * stage
            length = ptx.load_shared(at + LENGTH, Int32)
            h = ptx.load_shared(at + HEAD, Int32)
            if cutlass.const_expr(self.width > 0):
                conv_state = ptx.load_shared(at + CONV, Int64)
                channels = [self.channel(kind, h, c) for kind in range(2)]
                taps = [self.load_taps(conv, conv_state, channel, n) for channel in channels]
            if cutlass.const_expr(self.split > 1):
                # This block has its copy of the raw records, and of the history: the peer may overwrite them.
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.mbar_arrive_peer(shared + self.peer_read + 8 * stage, share ^ 1)
            record = ptx.load_shared(at + KEY_GATE, Int64)
            if h != known:
                known, scale, bias = self.gate_of(h, c, parameters)
            # From here on the predecessor's outputs are there: the loader waited before it asked for tokens.
            ptx.mbar_wait(shared + self.token_full + 8 * stage, phase)
            inputs = shared + self.window_bytes * stage
            queries, keys, gates = (
                self.load_column(inputs + base + c * self.size) for base in (self.queries, self.keys, self.gates)
            )
            if cutlass.const_expr(self.width > 0):
                writes = ptx.load_shared(at + WRITES, Int32)
                raw = (queries, keys)
                queries, keys = (self.convolve(conv, taps[kind], raw[kind]) for kind in range(2))
                # The records keep the keys as the window sees them.
                for t in cutlass.range_constexpr(self.q):
                    ptx.store_shared(inputs + self.keys + c * self.size + t * self.token_bytes, keys[t])
            queries, keys, gates = ([x.to(Float32) for x in column] for column in (queries, keys, gates))
            norms = shared + self.window_norms + PROBES * 16 * stage
            tile.store_norm_partials(keys, norms, warp, lane)
            tile.store_norm_partials(queries, norms + 128, warp, lane)
            forward, backward = self.running_products([tile.log_decay(g, scale, bias, parameters[2]) for g in gates])
            if i >= STAGES:
                ptx.mbar_wait(shared + self.window_empty + 8 * stage, phase ^ 1)
            cute.arch.barrier(barrier_id=_BAR_WINDOW, number_of_threads=128)
            self.store_window(shared, stage, norms, keys, queries, forward, backward, c, lane)
            tile.warp_arrive(lane, shared + self.window_full + 8 * stage)
            if cutlass.const_expr(self.split > 1):
                ptx.mbar_wait_peer(shared + self.peer_read + 8 * stage, phase)
            self.copy_record(inputs, record, c, length, share)
            if cutlass.const_expr(self.width > 0):
                if (writes != 0) & (share == 0):
                    self.store_state(conv, conv_state, channels[0], length, taps[0], raw[0])
                    self.store_state(conv, conv_state, channels[1], length, taps[1], raw[1])
            tile.warp_arrive(lane, shared + self.input_empty + 8 * stage)
            i += 1
            ptx.mbar_wait(shared + self.record_full + 8 * (i & 1), (i >> 1) & 1)
            n = ptx.load_shared(shared + self.input_notices + NOTICE_BYTES * (i & 1) + N, Int32)

    def load_column(self, address):
        """One channel of the window's tokens, in their dtype."""
        return [ptx.load_shared(address + t * self.token_bytes, self.dtype) for t in range(self.q)]

    def running_products(self, logs):
        """Π exp(g_j) and Π exp(-g_j) over j <= t."""
        forward, backward = [], []
        for t, log in enumerate(logs):
            up, down = ptx.exp(log), ptx.exp(-log)
            forward.append(forward[t - 1] * up if t else up)
            backward.append(backward[t - 1] * down if t else down)
        return forward, backward

    @cute.jit
    def copy_record(self, inputs: Int32, record: Int64, c: Int32, length: Int32, share: Int32):
        """Raw keys and gates of the window's tokens into the row's records, 16 bytes a thread at a time.

        Of two blocks on a head the first writes the keys and the second the gates.
        """
        chunks = self.token_bytes // 16
        for turn in cutlass.range_constexpr((self.q * chunks + 127) // 128):
            t = (c + 128 * turn) // chunks
            byte = (c + 128 * turn) % chunks * 16
            if t < cutlass.min(length, self.q):
                source = inputs + t * self.token_bytes + byte
                target = record + Int64(t * self.key_gate_bytes + byte)
                if cutlass.const_expr(self.split == 1):
                    ptx.store_global(target, *ptx.load_shared(source + self.keys, Int32, 4))
                    ptx.store_global(target + self.token_bytes, *ptx.load_shared(source + self.gates, Int32, 4))
                else:
                    source += ptx.select(share == 0, Int32(self.keys), Int32(self.gates))
                    ptx.store_global(target + Int64(share * self.token_bytes), *ptx.load_shared(source, Int32, 4))

    def store_window(self, shared, stage, norms, keys, queries, forward, backward, c, lane):
        """p_t = k̂_t Π exp(g) and r_t = q̂_t Π exp(g) in two TF32 parts each, and k̂_t Π exp(-g)."""
        inverse = tile.inverse_norm(norms + (lane & 15) * 16)
        inverse = inverse * ptx.select((lane & 15) >= 8, Float32(K**-0.5), Float32(1.0))
        high = shared + self.high + self.matrix_bytes * stage
        low = shared + self.low + self.matrix_bytes * stage
        backward_at = shared + self.inverse + self.matrix_bytes // 2 * stage
        for t in range(self.q):
            key = keys[t] * cute.arch.shuffle_sync(inverse, t)
            query = queries[t] * cute.arch.shuffle_sync(inverse, 8 + t)
            at = swizzled(t, c * 4)
            ptx.store_shared(backward_at + at, key * backward[t])
            for row, probe in ((0, key * forward[t]), (8, query * forward[t])):
                parts = ptx.split_tf32(probe)
                ptx.store_shared(high + at + row * K * 4, parts[0])
                ptx.store_shared(low + at + row * K * 4, parts[1])

    @cute.jit
    def prepare_replay(self, shared: Int32, i: Int32, c: Int32, warp: Int32, lane: Int32, parameters, gate):
        """Warpgroup 2, thread c = channel c: the replay's coefficients of item i.

        Returns its n (-1: no item i), and its gate, which is `gate` if that is of the same head.
        """
        known, scale, bias = gate
        stage = i & 1
        phase = (i >> 1) & 1
        at = shared + self.input_notices + NOTICE_BYTES * stage
        ptx.mbar_wait(shared + self.record_full + 8 * stage, phase)
        n = ptx.load_shared(at + N, Int32)
        if n >= 0:
            norms = shared + self.replay_norms + tile.MAX_Q * 16 * stage
            out = shared + self.replays + self.replay_bytes * stage
            if i >= STAGES:
                ptx.mbar_wait(shared + self.replay_empty + 8 * stage, phase ^ 1)
            if n > 0:
                h = ptx.load_shared(at + HEAD, Int32)
                if h != known:
                    known, scale, bias = self.gate_of(h, c, parameters)
                record = shared + self.records + self.q * self.key_gate_bytes * stage
                keys, decays = tile.load_replay(record, c, self.q, self.dtype, n, scale, bias, parameters[2])
                tile.store_norm_partials(keys, norms, warp, lane)
                cute.arch.barrier(barrier_id=_BAR_SOLVE, number_of_threads=128)
                tile.store_replay(keys, decays, norms, out, out + self.q * K * 4, c, lane)
            tile.warp_arrive(lane, shared + self.input_empty + 8 * stage, shared + self.replay_full + 8 * stage)
        return n, (known, scale, bias)

    def couple(self, shared, stage, warp, gq, tq):
        """A warp's share, 32 channels, of c_ti = <p_t, k̂_i exp(-L_i)> and d_ti with r_t: an m16n8 fragment."""
        d, e = [Float32(0.0)] * 4, [Float32(0.0)] * 4
        high = shared + self.high + self.matrix_bytes * stage
        low = shared + self.low + self.matrix_bytes * stage
        for j in range(2):
            at = swizzled(gq, (2 * warp + j) * 64 + tq * 16)
            p_high, r_high = (ptx.load_shared(high + at + 8 * K * 4 * p, Int32, 4) for p in range(2))
            p_low, r_low = (ptx.load_shared(low + at + 8 * K * 4 * p, Int32, 4) for p in range(2))
            weights = ptx.load_shared(shared + self.inverse + self.matrix_bytes // 2 * stage + at, count=4)
            w = [ptx.split_tf32(x) for x in weights]
            for c in (0, 2):
                a_high = [p_high[c], r_high[c], p_high[c + 1], r_high[c + 1]]
                a_low = [p_low[c], r_low[c], p_low[c + 1], r_low[c + 1]]
                d = ptx.mma_tf32(d, a_high, [w[c][0], w[c + 1][0]])
                e = ptx.mma_tf32(e, a_high, [w[c][1], w[c + 1][1]])
                e = ptx.mma_tf32(e, a_low, [w[c][0], w[c + 1][0]])
        return [x + y for x, y in zip(d, e, strict=True)]

    def load_couplings(self, table, row):
        return ptx.load_shared(table + 32 * row, count=4) + ptx.load_shared(table + (32 * row + 16), count=4)

    @cute.jit
    def solve(
        self,
        shared: Int32,
        i: Int32,
        c: Int32,
        warp: Int32,
        lane: Int32,
        share: Int32,
        beta_stride: Int64,
        out_stride: Int64,
        wide_beta: Int32,
        conv,
        taps,
    ):
        """Warpgroup 2, thread c = value channel c: couplings, then u and o of the window, token by token."""
        stage = i & 1
        phase = (i >> 1) & 1
        at, place, _ = self.value_notice(shared, i)
        turn = i // VALUES
        length = ptx.load_shared(at + LENGTH, Int32)
        tokens = length
        channel = self.value_channel(c, share)
        if cutlass.const_expr(self.split > 1):
            # The other half of the threads has no row of the tile.
            length = ptx.select(c < self.tile.rows, length, Int32(0))
        record = ptx.load_shared(at + CORRECTION, Int64) + Int64(channel * 4)
        out = ptx.load_shared(at + OUT, Int64) + Int64(channel * self.size)
        values = shared + self.values + self.window_bytes * place + channel * self.size
        ptx.mbar_wait(shared + self.value_full + 8 * place, turn & 1)
        if cutlass.const_expr(self.width > 0):
            v = self.convolve(conv, taps, self.load_column(values))
        # Lane t fetches β_t behind the wait for v, which came after the predecessor; the couplings hide its latency.
        beta = Float32(0.0)
        if lane < tokens:
            at_beta = ptx.load_shared(at + BETA, Int64) + Int64(lane) * beta_stride
            if wide_beta != 0:
                beta = ptx.load_fresh(at_beta, Float32)
            else:
                beta = ptx.load_fresh(at_beta, self.dtype).to(Float32)
        ptx.mbar_wait(shared + self.window_full + 8 * stage, phase)
        gq, tq = lane >> 2, lane & 3
        parts = self.couple(shared, stage, warp, gq, tq)
        partial = shared + self.inverse + self.matrix_bytes // 2 * stage
        cute.arch.barrier(barrier_id=_BAR_SOLVE, number_of_threads=128)
        mine = partial + (warp * PROBES + gq) * (PARTIAL * 4) + tq * 8
        for e in cutlass.range_constexpr(4):
            ptx.store_shared(mine + (e >> 1) * (8 * PARTIAL * 4) + (e & 1) * 4, parts[e])
        cute.arch.barrier(barrier_id=_BAR_SOLVE, number_of_threads=128)
        shares = [ptx.load_shared(partial + ((c >> 3) + PROBES * w) * (PARTIAL * 4) + (c & 7) * 4) for w in range(4)]
        table = shared + self.couplings + PROBES * 32 * stage
        ptx.store_shared(table + c * 4, shares[0] + shares[1] + shares[2] + shares[3])
        cute.arch.barrier(barrier_id=_BAR_SOLVE, number_of_threads=128)
        raw = self.load_column(values)
        if cutlass.const_expr(self.width == 0):
            v = raw
        else:
            conv_channel = self.channel(2, ptx.load_shared(at + HEAD, Int32), channel)
            if (ptx.load_shared(at + WRITES, Int32) != 0) & (c < self.tile.rows):
                self.store_state(conv, ptx.load_shared(at + CONV, Int64), conv_channel, length, taps, raw)
        v = [x.to(Float32) for x in v]
        ptx.mbar_wait(shared + self.projection_full, i & 1)
        row = shared + self.projections + c * PROJECTION_BYTES
        from_p = [ptx.load_shared(row + 4 * t) for t in range(self.q)]
        from_r = [ptx.load_shared(row + 32 + 4 * t) for t in range(self.q)]
        tile.warp_arrive(lane, shared + self.projection_empty)
        beta = ptx.sigmoid(beta)
        u = []
        for t in cutlass.range_constexpr(self.q):
            # u_t = β_t (v_t - S_0 p_t - Σ_{i<t} c_ti u_i)
            x = v[t] - from_p[t]
            weights = self.load_couplings(table, t)
            for j in cutlass.range_constexpr(t):
                x = ptx.fma(-weights[j], u[j], x)
            u.append(cute.arch.shuffle_sync(beta, t) * x)
            if t < length:
                ptx.store_global(record + t * (V * 4), u[t])
        for t in cutlass.range_constexpr(self.q):
            # o_t = S_0 r_t + Σ_{i<=t} d_ti u_i
            y = from_r[t]
            weights = self.load_couplings(table, 8 + t)
            for j in cutlass.range_constexpr(t + 1):
                y = ptx.fma(weights[j], u[j], y)
            if t < length:
                ptx.store_global(out + Int64(t) * out_stride, y.to(self.dtype))
        tile.warp_arrive(lane, shared + self.value_empty + 8 * place, shared + self.window_empty + 8 * stage)
