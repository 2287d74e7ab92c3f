"""Which items a block of the fold works on: the heads of the rows that have work, layer by layer.

A warp keeps a bit of every row, 32 in each lane, and finds the n-th live row by ballots.

Who takes what: item k of the first round belongs to block k. From then on a block takes the next ticket of the launch's
counter, so that a multiprocessor whose share of the memory is slower takes fewer items; in rounds of a fixed stride all
wait for it. Every item takes one ticket, and with the last the counter wraps to 0. Without a counter (build.py), or
with more rows than the warp has bits, the stride is fixed.

The verify takes tickets for the second half of its items, and only where a block has many (deferred.py): one of its two
loading warps has to tell the other what it took, so tickets from the first item on cost 0.3 µs a launch, 259 µs instead
of 239 for 69 layers of one request, 2166 instead of 2144 at 64.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx

ROWS = 1024
_LOOKS = 4  # rows a lane asks for at once


class Items:
    """`self.lives(rows, facts)` says of each of a few rows, given by index, whether it has work."""

    @cute.jit
    def live_rows(self, start: Int32, batch: Int32, lane: Int32, facts):
        """Of the rows from `start` on: this lane's bits, the number of live rows before them, and of all."""
        count = cutlass.min(batch - start, ROWS)
        bits = Int32(0)
        word = Int32(0)
        while word * 32 < count:
            rows = [(word + k) * 32 + lane for k in range(_LOOKS)]
            inside = [row < count for row in rows]
            # Rows past the end stand in for the first.
            rows = [start + ptx.select(ok, row, Int32(0)) for row, ok in zip(rows, inside, strict=True)]
            lives = self.lives(rows, facts)
            for k in cutlass.range_constexpr(_LOOKS):
                found = cute.arch.vote_ballot_sync(lives[k] & inside[k])
                bits = ptx.select(lane == word + k, found, bits)
            word += _LOOKS
        before = cute.arch.popc(bits)
        for offset in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_up(before, offset)
            before += ptx.select(lane >= offset, other, Int32(0))
        return bits, before - cute.arch.popc(bits), cute.arch.shuffle_sync(before, 31)

    def nth_live(self, n, bits, before, lane):
        """The n-th live row, counted from 0, behind `start`."""
        word = self.lowest(cute.arch.vote_ballot_sync((n >= before) & (n < before + cute.arch.popc(bits))))
        bits, before = cute.arch.shuffle_sync(bits, word), cute.arch.shuffle_sync(before, word)
        below = cute.arch.popc(bits & ((Int32(1) << lane) - 1))
        mine = (((bits >> lane) & 1) != 0) & (below == n - before)
        return 32 * word + self.lowest(cute.arch.vote_ballot_sync(mine))

    def lowest(self, bits):
        return cute.arch.popc((bits & (0 - bits)) - 1)

    @cute.jit
    def claim(self, item: Int32, step: Int32, total: Int32, tickets: Int64, lane: Int32):
        """The block's item after this one, in lane 0; ask early, it comes from far away."""
        following = item + step
        if (tickets != 0) & (lane == 0):
            following = step + ptx.take_ticket(tickets, total - 1)
        return following
