"""Programmatic dependent launch on the device: hostile orders, many replays, the edges of a captured step."""

from contextlib import nullcontext
from dataclasses import replace

import fp32_steps as steps
import pytest
import torch
import triton
import triton.language as tl
from fp32_steps import int32

from graphrt import programmatic_launches
from graphrt.errors import NUM_KINDS
from graphrt.steps import Convolution

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEADS, Q, LAYERS = 4, 8, 4


@triton.jit
def slow_producer(target, source, size, nanoseconds, BLOCK: tl.constexpr, TRIGGER: tl.constexpr):
    """Copies int32 after a delay; with TRIGGER it lets its successors start at once, as a hostile kernel may."""
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    for first in range(0, size, BLOCK):
        o = first + tl.arange(0, BLOCK)
        tl.store(target + o, tl.load(source + o, mask=o < size), mask=o < size)


@pytest.fixture(scope="module")
def deferred():
    pytest.importorskip("cutlass")
    from graphrt.kernels.cute import deferred

    return deferred


class Step:
    """Static tensors of a step over a few layers, and two plans that have nothing in common."""

    def __init__(self, batch=3, conv=False):
        dim = 3 * HEADS * steps.K
        self.convs = [
            Convolution(
                torch.randn(2 * batch + 1, dim, Q + 3, device="cuda").bfloat16(),
                torch.randn(dim, 4, device="cuda").bfloat16(), None, True,
            )
            for _ in range(LAYERS * conv)
        ]  # fmt: skip
        self.cases = [steps.make_case(2 * batch + 1, 2 * batch, HEADS, Q) for _ in range(LAYERS)]
        self.tokens = [steps.make_tokens(Q * batch, HEADS) for _ in range(LAYERS)]
        self.errors = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device="cuda")
        # With a convolution the first of several rows has no tokens: its history is compacted all the same.
        lengths = [0 if conv and b == 0 and batch > 1 else Q for b in range(batch)]
        self.loc = int32([sum(lengths[:b]) for b in range(batch + 1)])
        first, second = list(range(batch)), list(range(batch, 2 * batch))
        counts = [list(range(1, 2 * batch + 1)), [Q] * 2 * batch]
        # slots, record rows and pending counts, one behind the other.
        self.plans = [int32([r + 1 for r in rows] + rows + counts[i]) for i, rows in enumerate((first, second[::-1]))]
        self.staged, self.plan = torch.empty_like(self.plans[0]), torch.empty_like(self.plans[0])
        self.slots, self.rows, self.pending = self.plan[:batch], self.plan[batch : 2 * batch], self.plan[2 * batch :]

    def clone(self):
        """The same content in other memory; tokens are shared."""
        other = object.__new__(Step)
        other.__dict__ |= self.__dict__
        other.cases = [case.clone() for case in self.cases]
        other.convs = [replace(conv, state=conv.state.clone()) for conv in self.convs]
        other.staged, other.plan = torch.empty_like(self.staged), torch.empty_like(self.plan)
        batch = self.slots.shape[0]
        other.slots, other.rows, other.pending = (
            other.plan[:batch],
            other.plan[batch : 2 * batch],
            other.plan[2 * batch :],
        )
        return other

    def verify(self, deferred, layer, **kw):
        t, case = self.tokens[layer], self.cases[layer]
        if self.convs:
            kw["conv"] = self.convs[layer]
        deferred.deferred_verify_f32(
            t.q, t.k, t.v, t.raw_g, t.raw_beta, case.a_log, case.dt_bias, steps.LOWER_BOUND, case.state, case.records,
            self.loc, self.slots, Q, t.out, self.errors, record_rows=self.rows, pending=self.pending, **kw,
        )  # fmt: skip

    def produce(self, nanoseconds=0, trigger=False):
        """The plan becomes what is staged, late."""
        slow_producer[(1,)](self.plan, self.staged, self.plan.numel(), nanoseconds, BLOCK=64, TRIGGER=trigger)

    def results(self):
        """All that the step may change."""
        outputs = [t.out for t in self.tokens] + [conv.state for conv in self.convs]
        return [x.clone() for case in self.cases for x in (case.state, case.correction, case.key_gate)] + outputs


def capture(run):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay(step, deferred, run, replays, programmatic):
    """Capture `run(step)` and replay it with the two plans in turn; what is left then."""
    switch = nullcontext() if programmatic else programmatic_launches(False)
    with switch:
        warm = step.clone()
        warm.staged.copy_(step.plans[0])
        run(warm)
        for t in step.tokens:
            t.out.zero_()
        graph = capture(lambda: run(step))
    for i in range(replays):
        step.staged.copy_(step.plans[i % 2])
        graph.replay()
    torch.cuda.synchronize()
    return [x.clone() for x in step.results()]


def assert_same_with_and_without(deferred, run, replays, batch=3, conv=False):
    """The bytes of `replays` replays do not depend on the attribute."""
    step = Step(batch, conv)
    plain, chained = step.clone(), step.clone()
    want = replay(plain, deferred, run, replays, False)
    got = replay(chained, deferred, run, replays, True)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "with convolution"])
@pytest.mark.parametrize("trigger", [False, True], ids=["silent", "releases at once"])
@pytest.mark.parametrize("split", [1, 2])
def test_a_slow_producer_right_before_is_waited_for(deferred, trigger, conv, split):
    """B58: slots, rows and pending are written by the launch just before, late; two plans in turn, 1000 replays.

    Layers after the first read them early, on multiprocessors whose L1 has seen the other plan.
    """

    def run(step):
        step.produce(20_000, trigger)
        for layer in range(LAYERS):
            step.verify(deferred, layer, split=split)

    assert_same_with_and_without(deferred, run, 1000, conv=conv)


def test_a_verify_that_reads_too_early_would_be_seen(deferred):
    """The control of the test above: told to read early behind a producer that releases at once, it reads stale."""
    step = Step()
    plain, hasty = step.clone(), step.clone()
    results = []
    for mine, early in ((plain, False), (hasty, True)):

        def run(mine=mine, early=early):
            mine.produce(200_000, True)
            mine.verify(deferred, 0, early=early)

        warm = mine.clone()  # so that the kernel is there when the capture needs it
        warm.plan.copy_(warm.plans[0])
        warm.verify(deferred, 0)
        mine.plan.copy_(mine.plans[1])
        mine.staged.copy_(mine.plans[0])
        torch.cuda.synchronize()
        graph = capture(run)
        graph.replay()
        torch.cuda.synchronize()
        results.append(mine.cases[0].state.clone())
    assert not torch.equal(*results)


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "with convolution"])
@pytest.mark.parametrize("batch, split", [(1, 2), (3, 2), (3, 1)])
def test_the_same_layer_twice_without_a_commit_is_ordered(deferred, batch, split, conv):
    """Every verify replays what the one before wrote: records, and the checkpoint it folded into."""

    def run(step):
        step.produce()
        for layer in (0, 0, 1, 0, 1, 1):
            step.verify(deferred, layer, split=split)

    assert_same_with_and_without(deferred, run, 100, batch, conv)


def test_a_checkpoint_copied_in_just_before_is_seen(deferred):
    """A fold, a copy and a change of pending between two verifies of a chain."""

    def run(step):
        step.produce()
        step.verify(deferred, 0)
        step.cases[1].state.copy_(step.cases[0].state)
        step.verify(deferred, 1)
        step.pending.add_(1).clamp_(max=Q)
        step.verify(deferred, 2)
        step.verify(deferred, 3)

    assert_same_with_and_without(deferred, run, 200)


def test_a_verify_behind_a_join_waits_for_both_streams(deferred):
    """Its plan comes late from another stream; the layer before it ends on its own."""
    side = torch.cuda.Stream()

    def run(step):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step.produce(20_000, True)
        step.tokens[0].out.add_(0)
        torch.cuda.current_stream().wait_stream(side)
        for layer in range(LAYERS):
            step.verify(deferred, layer)

    assert_same_with_and_without(deferred, run, 200)


def test_which_verifies_of_a_capture_read_early(deferred, monkeypatch):
    """Behind the producer and behind themselves they wait; behind another layer's verify they do not."""
    seen, ask = [], deferred.order.may_start_early
    monkeypatch.setattr(deferred.order, "may_start_early", lambda *args: seen.append(ask(*args)) or seen[-1])
    step = Step()

    def run():
        step.produce()
        for layer in (0, 1, 1, 2):
            step.verify(deferred, layer)
        step.pending.add_(0)
        step.verify(deferred, 3)

    step.staged.copy_(step.plans[0])
    run()
    assert seen == [], "outside a capture nobody asks"
    capture(run)
    assert seen == [False, True, False, True, False]


def test_every_programmatic_edge_ends_in_a_kernel_that_waits(deferred):
    """B59: in the dump of a captured step; none ends in staging or commit, and the switch takes all of them away."""
    from rig import Pool, Target
    from steps import Batch, Row, verify

    from graphrt.capture import record

    target = Target("fp32_deferred", "cuda")
    pool = Pool(target, target.shape(layers=3))
    for slot in (3, 5):
        pool.fill(slot)
    batch, accepted = Batch(pool, [Row(3, 1, 4), Row(5, 0, 2)]), int32([1, 1])
    rows = {"record_rows": batch.record_rows, "pending": pool.pending}

    def step():
        for _ in range(2):
            verify(batch)
        pool.context.commit(accepted, batch.state_indices, batch.query_start_loc, **rows)

    edges = []
    for enabled in (True, False):
        with programmatic_launches(enabled):
            recording = record(step, device="cuda", warmup=1)
        edges.append(recording.topology().programmatic())
        recording.close()
    assert len(edges[0]) == 6 and not edges[1]
    assert all("graphrt_verify_f32" in target for _, target in edges[0]), edges[0]
