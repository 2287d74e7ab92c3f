"""The comparison that all tape tests make: replay against eager execution of the same function."""

import pytest
import torch

from graphrt.capture import record

STEPS = 3


def copies(tensors):
    return {key: t.clone() for key, t in tensors.items()}


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value or () for t in flat(item)]


def assert_same(got, want, what):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def _check_replay_equals_eager(program, state, refresh=lambda tensors, step: None):
    """Record on one copy of the state, run on another, and compare every tensor at each step."""
    taped, eager = copies(state), copies(state)
    recording = record(lambda: program(taped), device="cpu", warmup=0)
    for key in state:
        assert_same(taped[key], state[key], f"{key} after recording")
    for step in range(STEPS):
        for tensors in (taped, eager):
            torch.manual_seed(step)
            refresh(tensors, step)
        torch.manual_seed(100 + step)
        with torch.no_grad():
            want = program(eager)
        torch.manual_seed(100 + step)
        recording.replay()
        for key in state:
            assert_same(taped[key], eager[key], f"{key} at step {step}")
        for i, (got_t, want_t) in enumerate(zip(flat(recording.outputs), flat(want), strict=True)):
            assert_same(got_t, want_t, f"result {i} at step {step}")
    return recording


@pytest.fixture
def check_replay_equals_eager():
    return _check_replay_equals_eager


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU tape everywhere, real graphs where there is a GPU."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
