"""What is not of the right type is refused by name, in every public function of `graphrt.capture`."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine import WINDOW, Engine, int32
from toy import Toy

from graphrt.capture import (
    CommitRunner,
    DecodeStep,
    StepInputs,
    check_replay,
    diff,
    dummy_inputs,
    record,
    state_neutral,
)

NOT_COUNTS = (-1, 1.0, True, None, "1", [1])
NOT_FLAGS = (0, 1, None, "yes")
NOT_SIZES = ([], (), set(), [0], [7], [2.0], [True], [None], ["2"], "2", 3, 2.0, {2: 1}, torch.tensor([2]))


@dataclass
class Parts:
    """One of everything, made once: refused calls change nothing."""

    toy: Toy = field(default_factory=lambda: Toy("cpu"))

    def __post_init__(self) -> None:
        self.engine = Engine("cpu")
        self.inputs = StepInputs(6, WINDOW, "cpu")
        self.runner = CommitRunner(self.engine.context, self.engine.pending, self.inputs, [2])
        self.runner.capture(False, modes=["commit"])
        self.toy.step.capture(False)
        x = torch.zeros(2)
        self.recording = record(lambda: x.add_(1), device="cpu")

    def make_runner(self, **options: Any) -> CommitRunner:
        return CommitRunner(
            **{"context": self.engine.context, "pending": self.engine.pending, "inputs": self.inputs, **options}
        )

    def make_step(self, **options: Any) -> DecodeStep:
        own = {"context": self.toy.engine.context, "pending": self.toy.engine.pending, "inputs": self.toy.inputs}
        return DecodeStep(**{**own, "verify": self.toy.verify, "sample": self.toy.sample, **options})


@pytest.fixture(scope="module")
def parts():
    return Parts()


class Nowhere:
    """A path whose name is none."""

    def __init__(self, name=7):
        self.name = name

    def __fspath__(self):
        return self.name


def nothing():
    """A function to record."""


NO_MEMORY = ({"x": torch.eye(2).to_sparse()}, {"x": torch.zeros(2, device="meta")})

# What the error begins with, the values that are refused, and the call that gets them.
REFUSED = {
    "StepInputs max_num_reqs": (NOT_COUNTS, lambda p, v: StepInputs(v, 4, "cpu")),
    "StepInputs spec_query_len": (NOT_COUNTS, lambda p, v: StepInputs(4, v, "cpu")),
    "StepInputs block_table_width": (NOT_COUNTS, lambda p, v: StepInputs(4, 4, "cpu", v)),
    "StepInputs device": ((None, 0, True, "nowhere", ["cpu"], "meta"), lambda p, v: StepInputs(4, 4, v)),
    "StepInputs ledger": ((3, True, "x", torch.zeros(4)), lambda p, v: StepInputs(4, 4, "cpu", ledger=v)),
    "rows num_reqs": ((*NOT_COUNTS, 0, 7), lambda p, v: p.inputs.rows(v)),
    "stage num_reqs": ((*NOT_COUNTS, 7), lambda p, v: p.inputs.stage(num_reqs=v)),
    "stage state_indices": (({1}, {1: 2}, "1", 1, [1.0], [None], ["1"]), lambda p, v: p.inputs.stage(
        num_reqs=1, state_indices=v)),
    "dummy_inputs inputs": ((None, 3), lambda p, v: dummy_inputs(v, 1)),
    "dummy_inputs num_reqs": ((*NOT_COUNTS, 7), lambda p, v: dummy_inputs(p.inputs, v)),
    "dummy_inputs dcp": (NOT_FLAGS, lambda p, v: dummy_inputs(p.inputs, 1, dcp=v)),
    "record fn": ((None, 3, "f"), lambda p, v: record(v, device="cpu")),
    "record device": ((None, 0, True, "nowhere", "meta"), lambda p, v: record(nothing, device=v)),
    "record warmup": (NOT_COUNTS, lambda p, v: record(nothing, device="cpu", warmup=v)),
    "record name": ((None, 3, b"x"), lambda p, v: record(nothing, device="cpu", name=v)),
    "record check": ((0, 1, "yes"), lambda p, v: record(nothing, device="cpu", check=v)),
    "record tensors": ((3, [torch.zeros(1)], "x", {"x": 3}, {"x": None}, *NO_MEMORY), lambda p, v: record(
        nothing, device="cpu", tensors=v)),
    "function for record tensors": ((3, None, {"x": 3}, {"x": [torch.zeros(1)]}, *NO_MEMORY), lambda p, v: record(
        nothing, device="cpu", check=True, tensors=lambda: v)),
    "record pool": ((3, True, "pool", (1,)), lambda p, v: record(nothing, device="cpu", pool=v)),
    "dump path": ((None, 3, b"x.json", "x.txt", Nowhere(), Nowhere(b"x.json")), lambda p, v: p.recording.dump(v)),
    "diff a": ((None, "x", 3), lambda p, v: diff(v, p.recording)),
    "diff b": ((None, "x", 3), lambda p, v: diff(p.recording, v)),
    "CommitRunner context": ((None, 3), lambda p, v: p.make_runner(context=v)),
    "CommitRunner pending": ((None, [0] * 6, torch.zeros(6), int32([0], "cpu")), lambda p, v: p.make_runner(pending=v)),
    "CommitRunner inputs": ((None, 3, "x"), lambda p, v: p.make_runner(inputs=v)),
    "CommitRunner capture_sizes": (NOT_SIZES, lambda p, v: p.make_runner(capture_sizes=v)),
    "CommitRunner mamba_block_size": ((0, -4, 4.0, True, "4"), lambda p, v: p.make_runner(mamba_block_size=v)),
    "CommitRunner eager": (NOT_FLAGS, lambda p, v: p.make_runner(eager=v)),
    "CommitRunner choice": ((1, True, "maybe", {1: 2}, Nowhere()), lambda p, v: p.make_runner(choice=v)),
    "capture sizes": (NOT_SIZES, lambda p, v: p.runner.capture(False, sizes=v)),
    "capture modes": (("commit", [], None, 3, ["fold"], [3], [[]], {"commit"}), lambda p, v: p.runner.capture(
        False, modes=v)),
    "capture dcp": (NOT_FLAGS, lambda p, v: p.runner.capture(False, dcp=v)),
    "capture progress": (NOT_FLAGS, lambda p, v: p.runner.capture(v)),
    "capture prove_neutral": (NOT_FLAGS, lambda p, v: p.runner.capture(False, prove_neutral=v)),
    "step.capture prove_neutral": (NOT_FLAGS, lambda p, v: p.toy.step.capture(False, prove_neutral=v)),
    "commit num_reqs": ((*NOT_COUNTS, 7), lambda p, v: p.runner.commit(v)),
    "flush num_reqs": ((*NOT_COUNTS, 7), lambda p, v: p.runner.flush(v)),
    "drain num_reqs": ((*NOT_COUNTS, 7), lambda p, v: p.runner.drain(v)),
    "DecodeStep context": ((None, 3), lambda p, v: p.make_step(context=v)),
    "DecodeStep verify": ((None, 3), lambda p, v: p.make_step(verify=v)),
    "DecodeStep sample": ((None, 3), lambda p, v: p.make_step(sample=v)),
    "DecodeStep flush": (NOT_FLAGS, lambda p, v: p.make_step(flush=v)),
    "DecodeStep capture_sizes": (NOT_SIZES, lambda p, v: p.make_step(capture_sizes=v)),
    "step.capture sizes": (NOT_SIZES, lambda p, v: p.toy.step.capture(False, sizes=v)),
    "step.capture dcp": (NOT_FLAGS, lambda p, v: p.toy.step.capture(False, dcp=v)),
    "step.capture progress": (NOT_FLAGS, lambda p, v: p.toy.step.capture(v)),
    "replay num_reqs": ((*NOT_COUNTS, 4), lambda p, v: p.toy.step.replay(v)),
    "replay steps": (NOT_COUNTS, lambda p, v: p.toy.step.replay(1, v)),
    "replay_dummy num_reqs": ((*NOT_COUNTS, 4), lambda p, v: p.toy.step.replay_dummy(v)),
    "replay_dummy dcp": (NOT_FLAGS, lambda p, v: p.toy.step.replay_dummy(1, dcp=v)),
    "run num_reqs": ((*NOT_COUNTS, 4), lambda p, v: p.toy.step.run(v)),
    "check_replay steps": ((*NOT_COUNTS, 0), lambda p, v: check_replay(p.recording, nothing, int, v, [torch.ones(1)])),
    "check_replay sequence": ((None, 3), lambda p, v: check_replay(v, nothing, int, 1, [torch.ones(1)])),
    "check_replay eager_fn": ((None, 3), lambda p, v: check_replay(p.recording, v, int, 1, [torch.ones(1)])),
    "check_replay inputs_of_step": ((None, 3), lambda p, v: check_replay(p.recording, nothing, v, 1, [torch.ones(1)])),
    "check_replay tensors": ((None, 3, [], {}, {"a": 3}, {"a": {torch.ones(1)}}, [None]), lambda p, v: check_replay(
        p.recording, nothing, int, 1, v)),
    "state_neutral tensors": ((None, 3, [], {}, {"a": None}, "x"), lambda p, v: state_neutral(v).__enter__()),
    "state_neutral values": (NOT_FLAGS, lambda p, v: state_neutral([torch.ones(1)], values=v).__enter__()),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_value_of_another_type_is_refused_by_name(parts, what):
    """ValueError: the argument, what was expected, what came; nothing was staged, recorded or launched."""
    values, call = REFUSED[what]
    name = re.escape(what.rpartition(" ")[2])
    before = parts.engine.state()
    for value in values:
        # None is the default of some.
        with pytest.raises(ValueError, match=rf"^{name}[:.\w]*:? .*expected .*got"):
            call(parts, value)
            pytest.fail(f"{what} took {value!r}")
    for key, tensor in parts.engine.state().items():
        assert torch.equal(tensor, before[key]), key


def test_zero_steps_are_none(parts):
    """`replay(n, 0)` runs nothing, as a loop whose budget is used up asks for."""
    before = parts.toy.everything()
    parts.toy.step.replay(2, 0)
    for key, tensor in parts.toy.everything().items():
        assert torch.equal(tensor, before[key]), key


def test_sizes_may_come_in_any_collection(parts):
    """Order and repetition do not matter: a set, a range, a generator."""
    for sizes in ([4, 2, 4], {2, 4}, range(2, 5, 2), (n for n in (4, 2))):
        assert parts.make_runner(capture_sizes=sizes).capture_sizes == [2, 4]
