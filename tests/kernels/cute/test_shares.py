"""How the deferred verify's blocks share out the items: by stride, by ticket, and what the early ones do for others."""

import fp32_steps as steps
import pytest
import torch
from fp32_steps import int32

from graphrt.errors import NUM_KINDS

pytest.importorskip("cutlass")
from graphrt.kernels.cute import deferred

SMS, HEADS, Q = 132, 12, 8


@pytest.mark.parametrize(
    "batch, split, groups, helpers, fixed",
    [
        (1, 2, 12, 0, 12),
        (5, 2, 60, 0, 60),
        (8, 1, 96, 36, 96),
        (12, 1, 132, 0, 144),
        (20, 1, 132, 0, 240),
        (16, 1, 132, 0, 192),
        (64, 1, 132, 24, 768),
        (128, 1, 132, 0, 1536),
        (256, 1, 132, 0, 11 * 132),
    ],
)
def test_every_multiprocessor_gets_a_share(batch, split, groups, helpers, fixed):
    """As many groups as items or multiprocessors; helpers where few are free early; tickets where rounds are many."""
    assert deferred.share_out(batch * HEADS, SMS, split) == (groups, helpers, fixed)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("blocks", [2, 7, 132])
def test_shares_stay_within_the_launch(blocks, split):
    """Whatever the number of items: groups fit, helpers are some of them, and no ticket is for an item before."""
    for items in range(5 * blocks * deferred.TICKETS_FROM):
        groups, helpers, fixed = deferred.share_out(items, blocks, split)
        assert 1 <= groups * split <= blocks and groups <= max(items, 1)
        assert 0 <= helpers < blocks and 0 <= fixed <= items
        assert fixed == items or (split == 1 and fixed % groups == 0 and fixed >= groups)


def run(case, tokens, loc, slots, rows, pending):
    errors = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device="cuda")
    deferred.deferred_verify_f32(
        tokens.q, tokens.k, tokens.v, tokens.raw_g, tokens.raw_beta, case.a_log, case.dt_bias, steps.LOWER_BOUND,
        case.state, case.records, loc, slots, Q, tokens.out, errors, record_rows=rows, pending=pending, split=1,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("batch", [5, 29, 64])
@pytest.mark.parametrize("dead", [1, 3], ids=["all live", "every third null or idle"])
def test_tickets_and_helpers_change_no_bit(monkeypatch, dead, batch):
    """A chain of early layers, all by ticket but the first round and all with helpers: as one by one without either."""
    layers, heads, replays = 3, 11, 6
    cases = [steps.make_case(batch + 1, batch, heads, Q) for _ in range(layers)]
    lengths = [0 if dead > 1 and b % dead == 1 else Q for b in range(batch)]
    loc = int32([sum(lengths[:b]) for b in range(batch + 1)])
    slots = int32([0 if dead > 1 and b % dead == 0 else b + 1 for b in range(batch)])
    rows, pending = int32(list(range(batch))), int32([b % (Q + 1) for b in range(batch)])
    tokens = [steps.make_tokens(sum(lengths), heads) for _ in range(layers)]

    def step(mine):
        for case, t in zip(mine, tokens, strict=True):
            run(case, t, loc, slots, rows, pending)

    plain, shared = [c.clone() for c in cases], [c.clone() for c in cases]
    for _ in range(replays):
        step(plain)
    want = [t.out.clone() for t in tokens]
    taken, share_out = [], deferred.share_out

    def all_shared(items, blocks, split):
        groups, _, _ = share_out(items, blocks, split)
        groups = min(groups, 60)
        return groups, groups, min(groups, items)

    ask = deferred.tickets
    monkeypatch.setattr(deferred, "share_out", all_shared)
    monkeypatch.setattr(deferred, "tickets", lambda device: taken.append(ask(device)) or taken[-1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(shared)
    assert batch * heads <= 60 or (all(taken) and len(set(taken)) == layers), "a counter of its own for every launch"
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, t.out) for x, t in zip(want, tokens, strict=True))
    for a, b in zip(plain, shared, strict=True):
        assert torch.equal(a.state, b.state)
        assert torch.equal(a.correction, b.correction) and torch.equal(a.key_gate, b.key_gate)
