"""One request in every layer beside the runtime, and the assertions that compare the two."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Outputs, Request, Window, relative_error
from rig import Pool, Target, on_cpu, same_bytes
from steps import Batch, Verified, commit, verify
from torch import Tensor

# Relative norm of a state, correction or FP32 output against float64, per window. A state in 16 bits is
# rounded at the oracle's points, but a last bit may fall the other way.
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def tolerance(want: Tensor, plain: Tensor, floor: float) -> float:
    """`floor`, or twice the error of the FP32 token-by-token form on the same data."""
    return max(floor, 2 * relative_error(plain, want))


def assert_near(got: Tensor, want: Tensor, plain: Tensor, floor: float, what: str) -> None:
    """The relative norm of `got - want` is within the tolerance."""
    if want.numel() == 0:
        return
    error, allowed = relative_error(got, want), tolerance(want, plain, floor)
    assert error <= allowed, f"{what}: relative error {error:.2e}, allowed {allowed:.2e}"


def assert_rounded(got: Tensor, want: Tensor, what: str, target: Target) -> None:
    """Every element of a 16-bit tensor is its float64 value rounded, but for FP32 noise before the rounding."""
    if want.numel() == 0:
        return
    got, ulp = got.detach().cpu(), torch.finfo(got.dtype).eps
    # Triton's interpreter cuts BF16 off where a GPU rounds to nearest.
    share = 1.0 if target.interpreted and got.dtype == torch.bfloat16 else 0.5
    allowed = want.abs() * ulp * share + 1e-4 * want.pow(2).mean().sqrt()
    excess = (got.double() - want.double()).abs() - allowed.double()
    assert bool((excess <= 0).all()), f"{what}: off by {float(excess.max()):.2e} beyond rounding"


class Truth:
    """The float64 oracle of one request in every layer and, beside it, the FP32 token-by-token form."""

    def __init__(self, pool: Pool, slot: int, position: int = 0):
        self.pool_dtype, self.windows = pool.shape.pool, 0
        self.cuts_bf16 = pool.target.interpreted
        stored = pool.shape.pool if pool.shape.pool in SIXTEEN_BIT else None
        self.exact, self.plain = (
            [
                Request(on_cpu(p), *pool.state(slot, i), dtype=dtype, stored=stored, position=position)
                for i, p in enumerate(pool.params)
            ]
            for dtype in (torch.float64, torch.float32)
        )

    @property
    def position(self) -> int:
        """Tokens accepted so far."""
        return self.exact[0].position

    @property
    def floor(self) -> float:
        """Tolerance of the state: the promise per window, growing to 1e-5 and no further."""
        floor = self._floor(self.pool_dtype)
        return min(floor * max(1, self.windows), 5 * floor)

    def _floor(self, dtype: torch.dtype) -> float:
        return FLOOR[dtype] * (2.0 if self.cuts_bf16 and dtype == torch.bfloat16 else 1.0)

    def step(self, windows: list[Window], accepted: int) -> list[tuple[Outputs, Outputs]]:
        """Outputs of a window per layer, exact and in FP32; then advance."""
        self.windows += accepted > 0
        pairs = zip(self.exact, self.plain, windows, strict=True)
        return [(exact.step(w, accepted), plain.step(w, accepted)) for exact, plain, w in pairs]

    def assert_state(self, pool: Pool, slot: int, *, position: int | None = None, history: bool = True) -> None:
        """Slot `slot` holds the request's state, and byte for byte its history, after `position` tokens."""
        position = self.position if position is None else position
        for layer, (exact, plain) in enumerate(zip(self.exact, self.plain, strict=True)):
            state, inputs = pool.state(slot, layer)
            want, kept = exact.at[position]
            where = f"layer {layer}, slot {slot}, position {position}"
            assert_near(state, want, plain.at[position][0], self.floor, f"checkpoint, {where}")
            if history:
                assert same_bytes(inputs, kept), f"history, {where}: got {inputs}, want {kept}"

    def assert_outputs(self, got: Verified, b: int, batch: Batch, layer: int, pair: tuple[Outputs, Outputs]) -> None:
        """Row b's outputs of one layer are the oracle's."""
        exact, plain = pair
        where = f"layer {layer}, row {b} of {batch.rows}"
        out, conv = got.out[batch.span(b)], got.conv[batch.span(b)]
        floor = max(self.floor, FLOOR[torch.float64 if out.dtype == torch.float64 else torch.float32])
        if out.dtype in SIXTEEN_BIT and self.pool_dtype not in SIXTEEN_BIT:
            assert_rounded(out, exact.out, f"out, {where}", batch.pool.target)
        else:
            assert_near(out, exact.out, plain.out, max(floor, self._floor(out.dtype)), f"out, {where}")
        if conv.dtype in SIXTEEN_BIT:
            assert_rounded(conv, exact.conv, f"conv, {where}", batch.pool.target)
        else:
            assert_near(conv, exact.conv, plain.conv, FLOOR[conv.dtype], f"conv, {where}")


def check_step(
    batch: Batch, results: list[Verified], truths: dict[int, Truth], accepted: list[int]
) -> dict[int, list[tuple[Outputs, Outputs]]]:
    """Outputs of rows with a truth are the oracle's, then these advance; the other rows and the tail are
    zero.

    Returns the oracle's outputs by batch row. `truths` is keyed by batch row. A dummy row (record row -1 on a
    live slot) has finite but unspecified outputs.
    """
    pairs = {}
    for b, row in enumerate(batch.rows):
        if b in truths:
            pairs[b] = truths[b].step(batch.windows(b), accepted[b])
            for layer, (got, pair) in enumerate(zip(results, pairs[b], strict=True)):
                truths[b].assert_outputs(got, b, batch, layer, pair)
        elif row.slot <= 0:
            for got in results:
                assert_zero(got, batch.span(b), f"row {b}")
    for got in results:
        assert_zero(got, slice(batch.starts[-1], None), "tail")
    return pairs


def assert_zero(got: Verified, span: slice, what: str) -> None:
    """Outputs of these tokens are exactly zero."""
    for name, tensor in (("out", got.out), ("conv", got.conv)):
        assert not bool(tensor[span].ne(0).any()), f"{name} of {what} is not zero: {tensor[span]}"


def start(pool: Pool, slots: dict[int, int], *, zero: bool = False) -> dict[int, Truth]:
    """Requests in these slots, keyed by record row: `slots` maps record row to slot."""
    for slot in slots.values():
        pool.fill(slot, zero=zero)
    return {row: Truth(pool, slot) for row, slot in slots.items()}


def run_step(
    batch: Batch, truths: dict[int, Truth], accepted: list[int], *, deferred: bool = True, **kw: Any
) -> list[Verified]:
    """Verify, compare the outputs with the truths of the batch's record rows, commit."""
    results = verify(batch, deferred=deferred)
    known = {b: truths[r.row] for b, r in enumerate(batch.rows) if r.slot > 0 and r.row in truths}
    check_step(batch, results, known, accepted)
    commit(batch, accepted, **kw)
    return results


def check_records(batch: Batch, b: int, pairs: list[tuple[Outputs, Outputs]]) -> None:
    """Row b's records are its raw keys and gates, bit for bit, and the oracle's corrections."""
    row, n = batch.rows[b].row, batch.rows[b].tokens
    for layer, (exact, plain) in enumerate(pairs):
        records, tokens = batch.pool.records(layer), batch.tokens[layer]
        got = records.correction[row, :, :n].transpose(0, 1)
        floor = FLOOR[torch.float64 if got.dtype == torch.float64 else torch.float32]
        assert_near(got, exact.u, plain.u, floor, f"correction of row {b}, layer {layer}")
        raw = torch.cat([tokens.k[batch.span(b)], tokens.raw_g[batch.span(b)]], dim=-1)
        assert same_bytes(records.key_gate[row, :, :n].transpose(0, 1), raw), f"key_gate of row {b}"
