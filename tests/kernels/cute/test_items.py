"""Which block takes which item (items.py): by ticket in a recorded launch, else by stride; always each item once."""

from types import SimpleNamespace

import fp32_steps as steps
import pytest
import torch
from fp32_steps import int32

from graphrt.errors import NUM_KINDS

HEADS, Q = 4, 8


def test_a_counter_is_for_one_recorded_launch(monkeypatch):
    """Two captured launches never share one; eagerly, and when none is left, there is none."""
    build = pytest.importorskip("graphrt.kernels.cute.build")
    monkeypatch.setattr(build, "_counters", {1: (None, iter([16, 20]))})
    device, capturing = torch.device("cuda:1"), False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert build.tickets(device) == 0
    capturing = True
    assert [build.tickets(device) for _ in range(4)] == [16, 20, 0, 0]
    assert build.tickets(torch.device("cuda:0")) == 0, "a device on which nothing was loaded"


@pytest.fixture
def taken(monkeypatch):
    """Counters that launches were given."""
    pytest.importorskip("cutlass")
    from graphrt.kernels.cute import build, commit, deferred

    found = []

    def tickets(device):
        found.append(build.tickets(device))
        return found[-1]

    for module in (commit, deferred):
        monkeypatch.setattr(module, "tickets", tickets)
    yield found
    assert not build._counters[torch.cuda.current_device()][0].any(), "a counter does not stand at 0 again"


class Step:
    """A verify and a fold of the same rows, whose tensors stay alive for a graph."""

    def __init__(self, cases, slots, rows, pending, loc):
        self.cases, self.slots, self.rows, self.pending, self.loc = cases, slots, rows, pending, loc
        self.stack = steps.stack_of(cases, Q)
        self.plan = steps.plan_of(pending.tolist(), slots.tolist())
        self.tokens = steps.make_tokens(int(loc[-1]), HEADS)
        self.errors = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device="cuda")

    def clone(self):
        other = Step([case.clone() for case in self.cases], self.slots, self.rows, self.pending, self.loc)
        other.tokens = SimpleNamespace(**vars(self.tokens) | {"out": self.tokens.out.clone()})
        return other

    def take_from(self, other):
        """Start again with what `other` has."""
        for mine, its in zip(self.results(), other.results(), strict=True):
            mine.copy_(its)

    def verify(self):
        from graphrt.kernels.cute import deferred

        case, t = self.cases[0], self.tokens
        deferred.deferred_verify_f32(
            t.q, t.k, t.v, t.raw_g, t.raw_beta, case.a_log, case.dt_bias, steps.LOWER_BOUND, case.state, case.records,
            self.loc, self.slots, Q, t.out, self.errors, record_rows=self.rows, pending=self.pending,
        )  # fmt: skip

    def fold(self):
        from graphrt.kernels.cute import commit

        commit.fold(self.stack, self.plan, self.slots, self.rows, False)

    def results(self):
        """Everything that a launch may change."""
        return [x for case in self.cases for x in (case.state, case.correction, case.key_gate)] + [self.tokens.out]


def differing(one, other):
    return [i for i, (x, y) in enumerate(zip(one.results(), other.results(), strict=True)) if not torch.equal(x, y)]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("what", ["verify", "fold"])
@pytest.mark.parametrize("dead", [0, 3, 2], ids=["all rows live", "a third dead", "half dead"])
def test_a_recorded_launch_has_the_bits_of_an_eager_one(taken, dead, what):
    """Rows without tokens and without pending records too; in three replays the counter stands at its start."""
    batch = 250
    slots = int32([0 if dead and b % dead == 0 else b + 1 for b in range(batch)])
    rows, pending = int32(list(range(batch))[::-1]), int32([b % (Q + 1) for b in range(batch)])
    lengths = [Q if b % 4 else 0 for b in range(batch)]
    loc = int32([sum(lengths[:b]) for b in range(batch + 1)])
    start = Step([steps.make_case(batch + 1, batch, HEADS, Q) for _ in range(2)], slots, rows, pending, loc)
    start.tokens.out.zero_()
    eager, mine = start.clone(), start.clone()
    getattr(eager, what)()
    assert taken == [0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(mine, what)()
    assert taken[-1] != 0
    for _ in range(3):
        mine.take_from(start)
        graph.replay()
        assert differing(mine, eager) == []
    assert differing(eager, start), "nothing was done"


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("what", ["verify", "fold"])
def test_more_rows_than_a_warp_has_bits(what):
    """1100 rows, seven of them live, on both sides of the bound: what the seven alone give."""
    pytest.importorskip("cutlass")
    batch, live = 1100, [0, 31, 32, 1023, 1024, 1025, 1099]
    slots, rows = [0] * batch, [-1] * batch
    for i, b in enumerate(live):
        slots[b], rows[b] = i + 1, i
    loc = [Q * sum(b < end for b in live) for end in range(batch + 1)]
    pending = int32([3] * batch)
    short = Step(
        [steps.make_case(8, 7, HEADS, Q)], int32(range(1, 8)), int32(range(7)), pending[:7], int32(range(0, 57, Q))
    )
    wide = Step([case.clone() for case in short.cases], int32(slots), int32(rows), pending, int32(loc))
    wide.tokens = SimpleNamespace(**vars(short.tokens) | {"out": short.tokens.out.clone()})
    for step in (short, wide):
        getattr(step, what)()
        step.tokens.out.nan_to_num_()
    assert differing(wide, short) == []
