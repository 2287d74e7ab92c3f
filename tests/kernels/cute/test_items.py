"""Which block of the fold takes which item (items.py): by ticket in a recorded launch, else by stride."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import fp32_steps as steps
import pytest
import torch
from fp32_steps import int32

HEADS, Q = 4, 8


def test_a_counter_is_for_one_recorded_launch(monkeypatch):
    """Two captured launches never share one; eagerly, and when none is left, there is none."""
    build = pytest.importorskip("graphrt.kernels.cute.build")
    monkeypatch.setattr(build, "_counters", {1: (None, iter([16, 20]))})
    device, capturing = torch.device("cuda:1"), False
    monkeypatch.setattr(build, "is_capturing", lambda: capturing)
    assert build.tickets(device) == 0
    capturing = True
    assert [build.tickets(device) for _ in range(4)] == [16, 20, 0, 0]
    assert build.tickets(torch.device("cuda:0")) == 0, "a device on which nothing was loaded"


def test_threads_that_make_contexts_at_once_share_counters_and_machine_code(monkeypatch):
    """Made twice, the first would be given back while a captured launch of the other thread still goes there."""
    build = pytest.importorskip("graphrt.kernels.cute.build")
    made, begin, device = [], threading.Barrier(2), torch.device("cuda", 0)

    def slowly(what, value):
        made.append(what)
        time.sleep(0.05)
        return value

    driver = SimpleNamespace(current_stream=lambda index: SimpleNamespace(synchronize=lambda: None), device=nullcontext)
    numbers = torch.zeros(4)
    fakes = {"zeros": lambda *_, **__: slowly("counters", numbers), "cuda": driver}
    monkeypatch.setattr(build, "torch", SimpleNamespace(**vars(torch) | fakes))
    monkeypatch.setattr(build, "_counters", {})
    monkeypatch.setattr(build, "target", lambda device: "sm_90a")
    loaded = SimpleNamespace(to=lambda index: slowly("code", object()))
    kinds = [build.Kernels(None, (), "q") for _ in range(2)]
    for kernels in kinds:
        monkeypatch.setattr(kernels, "_compiled", {((), "sm_90a"): loaded})

    def work(first):
        begin.wait()
        for kernels in kinds[:: 1 if first else -1]:
            kernels.load((), device)

    threads = [threading.Thread(target=work, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == ["code", "code", "counters"]


@pytest.fixture
def taken(monkeypatch):
    """Counters that launches were given."""
    pytest.importorskip("cutlass")
    from graphrt.kernels.cute import build, commit

    found = []

    def tickets(device):
        found.append(build.tickets(device))
        return found[-1]

    monkeypatch.setattr(commit, "tickets", tickets)
    yield found
    assert not build._counters[torch.cuda.current_device()][0].any(), "a counter does not stand at 0 again"


class Fold:
    """A fold of a few layers, and the tensors that a graph of it needs alive."""

    def __init__(self, cases, slots, rows, lens):
        self.cases, self.slots, self.rows, self.lens = cases, slots, rows, lens
        self.stack = steps.stack_of(cases, Q)
        self.plan = steps.plan_of(lens, slots.tolist())

    def clone(self):
        return Fold([case.clone() for case in self.cases], self.slots, self.rows, self.lens)

    def run(self):
        from graphrt.kernels.cute import commit

        commit.fold(self.stack, self.plan, self.slots, self.rows, False)

    def differs(self, other):
        """Layers whose checkpoints are not those of `other`, bit for bit."""
        pairs = zip(self.cases, other.cases, strict=True)
        return [layer for layer, (mine, its) in enumerate(pairs) if not torch.equal(mine.state, its.state)]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("batch", [250, 40, 1])
@pytest.mark.parametrize("dead", [0, 3, 2, 1], ids=["all rows live", "a third dead", "half dead", "all dead"])
def test_a_recorded_fold_has_the_bits_of_an_eager_one(taken, dead, batch):
    """Rows without records too, several rounds of items or not even one; in three replays the counter starts at 0."""
    slots = int32([0 if dead and b % dead == 0 else b + 1 for b in range(batch)])
    lens = [(b + 1) % (Q + 1) for b in range(batch)]
    cases = [steps.make_case(batch + 1, batch, HEADS, Q) for _ in range(2)]
    start = Fold(cases, slots, int32(list(range(batch))[::-1]), lens)
    eager, mine = start.clone(), start.clone()
    eager.run()
    assert taken == [0]
    assert bool(eager.differs(start)) == bool(slots.any())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.run()
    assert taken[-1] != 0
    for _ in range(3):
        for case, first in zip(mine.cases, start.cases, strict=True):
            case.state.copy_(first.state)
        graph.replay()
        assert mine.differs(eager) == []


@pytest.mark.gpu
@pytest.mark.sm90
def test_more_rows_than_a_warp_has_bits():
    """1100 rows, seven of them live, on both sides of the bound: what the seven alone give."""
    pytest.importorskip("cutlass")
    batch, live = 1100, [0, 31, 32, 1023, 1024, 1025, 1099]
    slots, rows = [0] * batch, [-1] * batch
    for i, b in enumerate(live):
        slots[b], rows[b] = i + 1, i
    short = Fold([steps.make_case(8, 7, HEADS, Q)], int32(range(1, 8)), int32(range(7)), [3] * 7)
    wide = Fold([case.clone() for case in short.cases], int32(slots), int32(rows), [3] * batch)
    before = short.clone()
    short.run()
    wide.run()
    assert wide.differs(short) == [] and wide.differs(before) == [0]
