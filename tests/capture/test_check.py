"""check_replay: it finds what a wrong recording does wrong, says where, and puts everything back."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from graphrt import KDADeferredCommitContext
from graphrt.capture import CaptureError, check_replay, record
from graphrt.testing import Row, deferred_step, dummy_batch, make_batch, poisoned_pool, random_trace


class Model:
    """Two layers of state that add their inputs at a slot, and a count of steps."""

    def __init__(self):
        self.inputs, self.slot = torch.zeros(3), torch.zeros(1, dtype=torch.int64)
        self.state = [torch.zeros(4, 3), torch.zeros(4, 3)]
        self.count = torch.zeros(1, dtype=torch.int32)

    def step(self):
        for i, layer in enumerate(self.state):
            layer.index_add_(0, self.slot, (self.inputs * (i + 1))[None])
        self.count.add_(1)
        return self.state[1].sum(0)

    def stage(self, step):
        self.inputs.copy_(torch.arange(3.0) + step + 1)
        self.slot.fill_(step % 4)

    def tensors(self):
        return {"checkpoint": self.state, "count": self.count}

    def check(self, sequence, steps=6):
        return check_replay(sequence, self.step, self.stage, steps, self.tensors())


class Sequence:
    """A replay that is wrong on purpose."""

    def __init__(self, replay):
        self.replay = replay


def test_a_right_recording_passes_and_leaves_no_trace():
    """Every byte of state and results is equal at each step (B10); nothing is left behind."""
    model = Model()
    for t in (*model.state, model.count):
        t.copy_(torch.arange(t.numel()).view(t.shape))
    before, random = [t.clone() for t in model.state], torch.get_rng_state()
    report = model.check(record(model.step, device="cpu", warmup=0, name="step"))
    assert report.ok and report
    assert str(report) == "replay of 'step' equals eager execution: 6 steps, 4 tensors, every byte"
    report.raise_if_different()
    assert report.changed == ("checkpoint[0]", "checkpoint[1]", "count", "result[0]")
    assert all(torch.equal(a, b) for a, b in zip(model.state, before, strict=True)) and model.count.item() == 0
    assert torch.equal(torch.get_rng_state(), random)


def test_inputs_frozen_at_capture_are_found_and_called_by_name():
    """A recording that holds a copy of its inputs is wrong at the first other step, and the report says why (B01)."""
    model = Model()
    model.stage(0)
    frozen = model.inputs.clone(), model.slot.clone()

    def step():
        for i, layer in enumerate(model.state):
            layer.index_add_(0, frozen[1], (frozen[0] * (i + 1))[None])
        model.count.add_(1)

    report = model.check(record(step, device="cpu", warmup=0, name="step"))
    difference = report.difference
    assert not report.ok and report.steps == 2
    assert (difference.step, difference.name, difference.layer, difference.slot) == (1, "checkpoint", 0, 0)
    assert "reads inputs as they were when it was made" in report.hint
    with pytest.raises(CaptureError, match="differs at step 1: checkpoint, layer 0, slot 0, element"):
        report.raise_if_different()


def test_the_first_difference_has_layer_slot_element_and_values():
    """One wrong element at one step is found where it is, with what each run left there."""
    model = Model()

    def replay():
        model.step()
        if model.inputs[0] == 4:
            model.state[1][3, 2] += 0.5

    report = model.check(Sequence(replay))
    assert report.difference.index == (3, 2) and not report.hint
    assert str(report.difference) == (
        "step 3: checkpoint, layer 1, slot 3, element [3, 2]: eager 12.0, replay 12.5 (1 elements of it differ)"
    )


def test_state_that_one_replay_advances_twice_is_found():
    """A commit that a replay does twice shows in the count (B19)."""
    model = Model()

    def replay():
        model.step()
        model.count.add_(1)

    difference = model.check(Sequence(replay)).difference
    assert (difference.step, difference.name, difference.eager, difference.replayed) == (0, "count", "1", "2")


def test_results_are_compared_too():
    """Right state and a wrong result is a difference; another number of results is an error of the call."""
    model = Model()
    sequence = Sequence(model.step)
    sequence.outputs = torch.zeros(3)
    difference = model.check(sequence).difference
    assert (difference.name, difference.layer, difference.index) == ("result", 0, (0,))
    sequence.outputs = [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(ValueError, match=r"^eager_fn: expected the results"):
        model.check(sequence)


def test_a_check_of_nothing_is_not_ok():
    """If no step changes a byte, equality proves nothing, and the report says so."""
    model = Model()
    report = check_replay(Sequence(lambda: None), lambda: None, lambda step: None, 3, model.tensors())
    assert report.difference is None and not report.ok
    with pytest.raises(CaptureError, match="no step changed any of the 3 tensors"):
        report.raise_if_different()


def test_nan_of_other_bits_is_a_difference():
    """Bytes are compared: NaN equals NaN of the same bits only."""
    x = torch.zeros(2)
    report = check_replay(
        Sequence(lambda: x.view(torch.int32).fill_(0x7FC00001)),
        lambda: x.fill_(float("nan")),
        lambda step: None,
        1,
        [x],
    )
    assert "0x7fc00000" in report.difference.eager and "0x7fc00001" in report.difference.replayed


def test_both_runs_draw_the_same_random_numbers():
    """A sampling step passes; the generator is where it was afterwards."""
    x = torch.zeros(5)
    recording = record(lambda: x.copy_(torch.rand(5)), device="cpu", warmup=0)
    report = check_replay(recording, lambda: x.copy_(torch.rand(5)), lambda step: None, 4, {"x": x})
    report.raise_if_different()


def test_an_error_puts_the_state_back():
    """State is restored also when a step raises."""
    model = Model()

    def fails():
        model.step()
        raise KeyError("layer")

    with pytest.raises(KeyError):
        model.check(Sequence(fails))
    assert model.count.item() == 0 and not model.state[0].any()
    with pytest.raises(ValueError, match=r"^steps: expected at least 1"):
        model.check(Sequence(fails), steps=0)


@dataclass
class Choice:
    """Results as `DecodeStep` has them."""

    tokens: torch.Tensor
    lengths: torch.Tensor


class Pair(NamedTuple):
    tokens: torch.Tensor
    lengths: torch.Tensor


@pytest.mark.parametrize("kind", [Choice, Pair, lambda *two: {"two": list(two)}], ids=["dataclass", "named", "nested"])
def test_results_are_compared_in_whatever_holds_them(kind):
    """A result that differs inside of a dataclass, a named tuple or a mapping is found as any other."""
    x, scale = torch.zeros(3), torch.ones(1)

    def step():
        x.add_(1)
        return kind(x * 2, x * scale)

    recording = record(step, device="cpu")
    report = check_replay(recording, step, lambda i: x.fill_(i), 2, {"x": x})
    assert report.ok and report.tensors == 3

    def wrong():
        x.add_(1)
        return kind(x * 2, x * scale * 3)

    report = check_replay(recording, wrong, lambda i: x.fill_(i), 2, {"x": x})
    assert report.difference is not None and (report.difference.name, report.difference.layer) == ("result", 1)


def test_a_check_of_one_step_asks_for_no_other():
    """The inputs of step 0 are all there are: a difference in it is reported, not an error of the caller's list."""
    x, y, inputs = torch.zeros(3), torch.zeros(3), [torch.ones(3)]
    recording = record(lambda: y.copy_(x), device="cpu")
    report = check_replay(recording, lambda: y.copy_(2 * x), lambda i: x.copy_(inputs[i]), 1, {"y": y})
    assert report.difference is not None and report.difference.step == 0 and not report.hint


SIZE = 4


def kda():
    pool = poisoned_pool(max_num_reqs=5)
    context = KDADeferredCommitContext.create(pool.layers, spec_query_len=pool.spec_query_len, max_num_reqs=5)
    return pool, context, dummy_batch(pool, size=SIZE)


def kda_inputs(pool, static, steps):
    """Stages steps of a random trace; a request's slot is filled when it comes."""
    trace = random_trace(3, spec_query_len=pool.spec_query_len, max_rows=SIZE, num_slots=8, max_num_reqs=5, steps=steps)

    def stage(step):
        for one in trace[step].arrivals:
            pool.fill(one.slot, one.request)
            pool.pending[one.row] = 0
        static.copy_(make_batch(pool, trace[step].rows, size=SIZE, seed=step))

    return stage


def test_a_recorded_deferred_step_equals_the_eager_one():
    """One recording replays a trace of other slots, lengths and counts at each step (B01, B02, B05, B06, B10)."""
    pool, context, static = kda()

    def step():
        return deferred_step(context, pool, static)

    recording = record(step, device="cpu", name="deferred")
    stage = kda_inputs(pool, static, 8)
    check_replay(recording, step, stage, 8, pool.tensors()).raise_if_different()


def test_a_recorded_step_with_frozen_slots_is_found():
    """If only the slot indices stay those of the capture, the report names frozen inputs (B01)."""
    pool, context, static = kda()
    pool.fill(1, 0)
    static.copy_(make_batch(pool, [Row(0, 1, 0, 2, 1)], size=SIZE))
    other = dummy_batch(pool, size=SIZE)
    other.copy_(static)
    recording = record(lambda: deferred_step(context, pool, other), device="cpu", warmup=0, name="frozen")
    stage = kda_inputs(pool, static, 4)
    report = check_replay(recording, lambda: deferred_step(context, pool, static), stage, 4, pool.tensors())
    assert report.difference is not None and "frozen" not in report.difference.name
    assert "reads inputs as they were" in str(report)
