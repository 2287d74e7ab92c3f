"""state_neutral: one changed byte is an error that names it, and nothing else is."""

import pytest
import torch

from graphrt import KDADeferredCommitContext
from graphrt.capture import CaptureError, record, state_neutral
from graphrt.testing import Row, deferred_step, dummy_batch, make_batch, poisoned_pool

STATES = {
    "float": lambda: torch.randn(4, 3),
    "bfloat16": lambda: torch.randn(4, 3).bfloat16(),
    "bool": lambda: torch.zeros(4, 3, dtype=torch.bool),
    "int32": lambda: torch.zeros(4, dtype=torch.int32),
    "int64 scalar": lambda: torch.zeros((), dtype=torch.int64),
    "double": lambda: torch.randn(4, 3).double(),
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64),
    "strided view": lambda: torch.randn(6, 5)[1:5, ::2].T,
    "scratch view": lambda: torch.randn(5, 3)[1:],
    "NaN": lambda: torch.full((4, 3), float("nan")),
}


@pytest.mark.parametrize("values", [True, False], ids=["copy", "checksum"])
@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_an_untouched_state_passes_and_one_changed_element_does_not(make, values):
    """Whatever the dtype and strides: rewriting the same bytes is neutral, the last element alone is not (B18)."""
    state = make()
    with state_neutral({"state": state}, values=values):
        state.copy_(state.clone())
    with (
        pytest.raises(CaptureError, match=r"^state_neutral: state changed"),
        state_neutral({"state": state}, values=values),
    ):
        last = state.reshape(-1)[-1] if state.ndim == 0 else state[-1].reshape(-1)[-1]
        changed = ~last if state.dtype == torch.bool else torch.nan_to_num(last) + 1
        state[(-1,) * state.ndim] = changed


def test_the_error_names_tensor_element_and_both_values():
    """Key, layer, index, the value before and after, and how many other tensors changed."""
    checkpoints, pending = [torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)], torch.zeros(4, dtype=torch.int32)
    text = r"checkpoint\[1\] changed at \[2, 0, 1\]: 0.0 before, 7.5 after; 1 more"
    with (
        pytest.raises(CaptureError, match=text),
        state_neutral({"checkpoint": checkpoints, "pending": pending}),
    ):
        checkpoints[1][2, 0, 1] = 7.5
        checkpoints[1][2, 1, 1] = 1
        pending[3] = 1


def test_a_checksum_names_tensor_and_slot():
    """Without copies the error still says which entry of the pool changed."""
    pool = torch.zeros(5, 3)
    with (
        pytest.raises(CaptureError, match=r"tensors\[0\] changed in entry 3"),
        state_neutral([pool], values=False),
    ):
        pool[3, 1] = 1


@pytest.mark.parametrize("change", [(3, 0, -1), (1, 0, -2, 0, 1), (2, -1), (0, 5, 0, 0, 0, -2, 0, 0, 0, 0, 0, 0, 0)])
def test_changes_that_outweigh_each_other_do_not_hide_in_a_checksum(change):
    """Small whole steps of the bits, as rounding makes them, in a ratio that weights in rising order would cancel."""
    state = torch.zeros(2, 16, dtype=torch.int32)
    with pytest.raises(CaptureError, match="changed in entry 1"), state_neutral([state], values=False):
        state[1, : len(change)] += torch.tensor(change, dtype=torch.int32)


def test_nan_is_compared_by_its_bytes():
    """One NaN in place of another is a change, and the error shows the bytes; so is the sign of a zero."""
    state = torch.tensor([0.0, float("nan")])
    with (
        pytest.raises(CaptureError, match=r"nan \(0x7fc00000\) before, nan \(0x7fc00001\) after"),
        state_neutral([state]),
    ):
        state.view(torch.int32)[1] += 1
    with pytest.raises(CaptureError, match=r"0.0 before, -0.0 after"), state_neutral([state]):
        state[0] = -0.0


def test_an_error_of_the_block_comes_through_with_a_note():
    """The block's own error is the one raised; that the state changed as well is added to it."""
    state = torch.zeros(2)
    with pytest.raises(KeyError) as caught, state_neutral({"state": state}):
        state[1] = 3
        raise KeyError("layer")
    assert "state changed at [1]" in caught.value.__notes__[0]
    with pytest.raises(KeyError) as caught, state_neutral([state]):
        raise KeyError("layer")
    assert not hasattr(caught.value, "__notes__")


def test_a_state_that_got_another_shape_is_an_error():
    """A tensor whose memory was exchanged in the block is not neutral."""
    state = torch.zeros(2)
    with pytest.raises(CaptureError, match="it was rebound"), state_neutral([state]):
        state.data = torch.zeros(3)


@pytest.mark.parametrize("values", [True, False])
def test_a_state_that_got_another_dtype_is_an_error(values):
    """The same zeros as another kind of number are no longer what a recording reads."""
    x = torch.zeros(4)
    message = r"had torch.float32 \[4\], has torch.int32 \[4\]: it was rebound"
    with pytest.raises(CaptureError, match=message), state_neutral([x], values=values):
        x.data = torch.zeros(4, dtype=torch.int32)


def test_recording_is_neutral_and_its_warmup_is_not():
    """The check sees what it is there for: a warm-up that runs on live state (B19)."""
    state = torch.zeros(4)
    with state_neutral([state]):
        record(lambda: state.add_(1), device="cpu", warmup=0)
    with pytest.raises(CaptureError, match="changed at"), state_neutral([state]):
        record(lambda: state.add_(1), device="cpu", warmup=1)


def test_pools_larger_than_a_chunk_are_compared_whole(monkeypatch):
    """Rows are compared in chunks; a change in any of them is found at its own index."""
    monkeypatch.setattr("graphrt.capture.bits._CHUNK_ELEMENTS", 8)
    pool = torch.zeros(9, 3)
    for values in (True, False):
        with pytest.raises(CaptureError, match=r"\[8, 2\]|entry 8"), state_neutral([pool], values=values):
            pool[8, 2] += 1


@pytest.mark.parametrize("group", [{}, [], {"a": 3}, {"a": [torch.zeros(1), None]}])
def test_what_is_no_group_of_tensors_is_refused(group):
    """An empty group would prove nothing; the error names the argument."""
    with pytest.raises((ValueError, TypeError), match=r"tensors|iterable"), state_neutral(group):
        pass


@pytest.mark.parametrize("dcp", [False, True], ids=["padding", "dcp dummies"])
@pytest.mark.parametrize("values", [True, False], ids=["copy", "checksum"])
def test_warmup_and_recording_on_dummy_rows_are_neutral_in_mid_service(dcp, values):
    """With pending records in the pool, dummy rows change no checkpoint, history, record or count (B18, B19)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pool = poisoned_pool(device=device)
    window = pool.spec_query_len
    context = KDADeferredCommitContext.create(pool.layers, spec_query_len=window, max_num_reqs=6, backend="auto")
    pool.fill(1, 1)
    live = make_batch(pool, [Row(0, 1, 2, window, 2)], size=3)
    deferred_step(context, pool, live)
    assert pool.pending.tolist() == [0, 0, 2, 0, 0, 0]
    batch = dummy_batch(pool, size=3, dcp=dcp)
    with state_neutral(pool.tensors(), values=values):
        recording = record(lambda: deferred_step(context, pool, batch), device=device, warmup=2)
        recording.replay()
    with pytest.raises(CaptureError, match="state_neutral"), state_neutral(pool.tensors(), values=values):
        batch.copy_(live)
        recording.replay()
