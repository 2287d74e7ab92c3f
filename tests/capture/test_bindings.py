"""Check mode: a replay whose static tensors have moved since the recording raises instead of using old memory."""

import gc
from dataclasses import dataclass

import pytest
import torch

from graphrt import launch
from graphrt.capture import CaptureError, record
from graphrt.capture.bindings import Bindings, argument_tensors, launch_tensors


@dataclass
class Inputs:
    slots: torch.Tensor
    rows: list


def test_a_swapped_data_pointer_is_detected_at_replay():
    """`.data` of a static tensor exchanged for a new buffer: the replay raises and runs nothing (B04)."""
    x, y = torch.zeros(3), torch.zeros(3)
    recording = record(lambda: y.add_(x), device="cpu", warmup=0, name="step", check=True)
    recording.replay()
    x.data = torch.ones(3)
    with pytest.raises(CaptureError, match=r"^replay of 'step': .*launch 0, aten.add_.*other memory now.*copy_"):
        recording.replay()
    assert y.tolist() == [0, 0, 0]


def test_a_reallocated_storage_is_detected():
    """A buffer that grew has other memory, though it is the same tensor (B72)."""
    x, y = torch.zeros(3), torch.zeros(3)
    recording = record(lambda: y.add_(x[:2].sum()), device="cpu", warmup=0, check=True)
    x.resize_(1 << 20)
    with pytest.raises(CaptureError, match=r"was reallocated|other memory"):
        recording.replay()


def test_a_replaced_buffer_is_detected_through_its_owner():
    """An owner that makes a new buffer leaves the old tensor untouched; only asking the owner shows it."""
    inputs = Inputs(torch.zeros(3), [])
    total = torch.zeros(3)
    recording = record(lambda: total.add_(inputs.slots), device="cpu", check=True, tensors=lambda: vars_of(inputs))
    recording.replay()
    inputs.slots = torch.ones(3)
    with pytest.raises(CaptureError, match="static tensor 'slots' is not the one that was recorded"):
        recording.replay()


def test_an_owner_whose_buffers_are_gone_is_detected():
    """An engine that went to sleep has None where its pools were: no error of Python's own, and nothing runs (B76)."""
    inputs = Inputs(torch.zeros(3), [])
    total = torch.zeros(3)
    recording = record(lambda: total.add_(1), device="cpu", warmup=0, check=True, tensors=lambda: vars_of(inputs))
    for gone in (None, [1.0], torch.eye(2).to_sparse(), torch.zeros(3, device="meta")):
        inputs.slots = gone
        with pytest.raises(CaptureError, match=r"static tensor 'slots' is not the one that was recorded"):
            recording.replay()
    del inputs.slots
    with pytest.raises(CaptureError, match=r"its static tensors are gone \(AttributeError: .*slots"):
        recording.replay()
    assert not total.any()


def vars_of(inputs):
    return {"slots": inputs.slots}


def test_tensors_inside_the_arguments_of_graphrts_launches_are_watched():
    """The fields of a step object and the tensors of the object that launches are bound as well."""
    rows, pool = Inputs(torch.zeros(2), [torch.zeros(2)]), Inputs(torch.zeros(2), [])

    @dataclass
    class Context:
        pool: Inputs

        def commit(self, rows):
            self.pool.slots.add_(rows.slots)

    context = Context(pool)
    names = [name for name, _ in launch_tensors(context.commit, (rows,))]
    assert names == ["argument 0.slots", "argument 0.rows[0]", "Context.pool.slots"]
    for moved in (rows.slots, rows.rows[0], pool.slots):
        recording = record(lambda: launch.launch("commit", context.commit, rows), device="cpu", warmup=0, check=True)
        recording.replay()
        moved.data = torch.zeros(2)
        with pytest.raises(CaptureError, match="launch 0, commit"):
            recording.replay()


def test_check_mode_is_off_by_default_and_on_by_the_environment(monkeypatch):
    """GRAPHRT_CHECK=1 at the time of recording switches it on; check=False wins."""
    x, y = torch.zeros(3), torch.zeros(3)
    plain = record(lambda: y.add_(x), device="cpu", warmup=0)
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    checked = record(lambda: y.add_(x), device="cpu", warmup=0)
    off = record(lambda: y.add_(x), device="cpu", warmup=0, check=False)
    x.data = torch.ones(3)
    plain.replay()
    off.replay()
    with pytest.raises(CaptureError):
        checked.replay()


def test_freed_memory_is_detected_and_nothing_is_kept_alive():
    """Bindings hold no tensor; once the memory behind one is gone, the check says so (B04, B76)."""
    bindings = Bindings()
    x = torch.zeros(4)
    bindings.add("argument 0", x[1:])
    bindings.check("step")
    del x
    gc.collect()
    with pytest.raises(CaptureError, match="the memory of argument 0 was freed"):
        bindings.check("step")


def test_the_memory_of_the_pool_may_come_and_go():
    """Intermediate results live in the recording's own pool and are forgotten."""
    bindings, x = Bindings(), torch.zeros(4)
    bindings.add("result", x)
    begin = x.data_ptr()
    bindings.drop([(begin, begin + 16)])
    assert len(bindings) == 0


def test_arguments_are_walked_with_their_names():
    """Containers, mappings and dataclasses; a dataclass type is not an instance."""
    t = torch.zeros(1)
    value = [t, {"a": (t,)}, Inputs(t, [t]), Inputs, 3, None]
    assert [path for path, _ in argument_tensors(value, "x")] == [
        "x[0]",
        "x[1]['a'][0]",
        "x[2].slots",
        "x[2].rows[0]",
    ]
