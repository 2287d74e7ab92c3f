"""How the deferred verify's blocks share out the items: by stride, by ticket, and what the early ones do for others."""

import random

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


def launched(monkeypatch, batch):
    """What a captured verify of so many requests gives its kernel: counter, items by stride, last ticket, groups."""
    handed = []
    monkeypatch.setattr(deferred, "is_capturing", lambda: True)
    monkeypatch.setattr(deferred, "tickets", lambda device: 4096)
    monkeypatch.setattr(deferred, "sm_count", lambda device: SMS)
    monkeypatch.setattr(deferred.KERNELS, "launch", lambda facts, device, *values: handed.append(values))
    case = steps.make_case(1, 1, HEADS, Q, device="cpu")
    token, index = torch.zeros(1, 1, HEADS, 128, dtype=torch.bfloat16), torch.zeros(batch + 1, dtype=torch.int32)
    deferred.deferred_verify_f32(
        token, token, token, token, token[..., 0], case.a_log, case.dt_bias, steps.LOWER_BOUND, case.state,
        case.records, index, index[:-1], Q, token, index, record_rows=index, pending=index, split=1,
        programmatic=False,
    )  # fmt: skip
    [values] = handed
    return values[25], values[-8], values[-7], values[-3]


@pytest.mark.parametrize("batch", [0, 1, 12, 153, 154, 155, 256])
def test_each_replay_takes_every_item_once_and_leaves_the_counter_at_0(monkeypatch, batch):
    """A block walks its stride, then takes tickets one ahead until one is past the end, whoever is faster.

    The counter is `atom.inc`: from the last ticket on it is 0 again. If that one is too high, the next replay goes on
    where this one ended; too low, and an item is worked on twice.
    """
    counter, fixed, last, groups = launched(monkeypatch, batch)
    items, value, rng = batch * HEADS, 0, random.Random(batch)
    assert (counter != 0) == (fixed < items) == (batch >= 154)
    for _ in range(3):
        ready = list(range(groups)) if counter else []
        taken = [item for block in range(groups) for item in range(block, fixed, groups)]
        for _ in range(items - fixed + len(ready)):
            block = rng.choice(ready)
            ticket, value = value, 0 if value >= last else value + 1
            if fixed + ticket < items:
                taken.append(fixed + ticket)
            else:
                ready.remove(block)
        assert sorted(taken) == list(range(items)) and (value, ready) == (0, [])


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
