"""The CPU tape replays what eager execution does, bit for bit, on what its tensors hold at that time."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphrt import launch
from graphrt.capture import record


def decode_step(s):
    """A small decode step in plain torch: embed, mix, score, pick, and write the picks back in place."""
    x = F.embedding(s["tokens"], s["table"])
    x = x + F.silu(F.linear(x, s["w_in"], s["b_in"]))[..., : x.shape[-1]]
    x = F.rms_norm(x, (x.shape[-1],))
    low = F.linear(x.bfloat16(), s["w_low"])
    x = torch.cat([x, low.float()], dim=-1)
    logits = F.linear(x, s["w_out"]).masked_fill(s["banned"], float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    picks = probs.argmax(-1)
    best, order = probs.topk(3, dim=-1)
    gathered = probs.gather(-1, picks.unsqueeze(-1)).squeeze(-1)
    alive = torch.where(s["lengths"].unsqueeze(-1) > 2, picks, torch.zeros_like(picks))
    position = torch.arange(s["tokens"].shape[0])
    s["history"].index_put_((position, s["lengths"] % s["history"].shape[1]), alive[:, 0])
    s["count"].scatter_add_(0, alive[:, 0], torch.ones_like(alive[:, 0], dtype=torch.int32))
    s["lengths"] += (alive[:, 0] > 0).to(s["lengths"].dtype)
    s["tokens"][:, 0] = alive[:, 1]
    s["tokens"][:, 1:] = alive[:, :1]
    return picks, best, order, gathered, logits.cumsum(-1)


def decode_state():
    return {
        "tokens": torch.randint(0, 11, (4, 2)),
        "table": torch.randn(11, 8),
        "w_in": torch.randn(16, 8),
        "b_in": torch.randn(16),
        "w_low": torch.randn(8, 8, dtype=torch.bfloat16),
        "w_out": torch.randn(11, 16),
        "banned": torch.rand(11) < 0.2,
        "history": torch.zeros(4, 5, dtype=torch.int64),
        "count": torch.zeros(11, dtype=torch.int32),
        "lengths": torch.tensor([0, 3, 5, 9]),
    }


def refresh_decode(s, step):
    s["tokens"].copy_(torch.randint(0, 11, (4, 2)))
    s["table"].normal_()
    s["banned"].copy_(torch.rand(11) < 0.2)


def test_a_decode_step_replays_like_eager(check_replay_equals_eager):
    """A replayed step of a small model equals the eager step on the same tensors, state written in place."""
    recording = check_replay_equals_eager(decode_step, decode_state(), refresh_decode)
    assert recording.num_nodes > 20


UNARY = (torch.relu, torch.neg, torch.exp, lambda t: t.cumsum(0), lambda t: t.t(), lambda t: t.sort(0).values)
BINARY = (torch.add, torch.mul, torch.minimum, lambda a, b: torch.where(a > b, a, b), lambda a, b: a @ b)
WRITES = (
    lambda a, b: a.copy_(b),
    lambda a, b: a.add_(b),
    lambda a, b: a[1:].copy_(b[:-1]),
    lambda a, b: a.t().mul_(b),
    lambda a, b: a.__setitem__((slice(None), 0), b[:, 1]),
    lambda a, b: a.__setitem__(b > 0, 0.25),
)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_programs_replay_like_eager(check_replay_equals_eager, choices):
    """A random mix of fresh results, views and writes into any tensor made so far replays like eager."""

    def program(s):
        made = [s["x"], s["y"], s["z"]]
        for kind, which, i, j in choices:
            a, b = made[i % len(made)], made[j % len(made)]
            if kind == 0:
                made.append(UNARY[which % len(UNARY)](a).tanh())
            elif kind == 1:
                made.append(BINARY[which % len(BINARY)](a, b))
            else:
                # The tape has no say in what an overlapping write does, so the source is its own tensor.
                WRITES[which % len(WRITES)](a, b.clone())
        return made

    state = {key: torch.randn(3, 3) for key in ("x", "y", "z")}
    check_replay_equals_eager(program, state, lambda s, step: s["x"].normal_())


def test_recording_executes_nothing():
    """After recording, every tensor that existed before is bitwise as it was."""
    state = decode_state()
    before = {key: t.clone() for key, t in state.items()}
    record(lambda: decode_step(state), device="cpu", warmup=0)
    for key, t in state.items():
        assert torch.equal(t, before[key]), key


def test_warmup_runs_for_real():
    """The function runs `warmup` times before the recording, which adds no run."""
    x = torch.zeros(3)
    record(lambda: x.add_(1), device="cpu", warmup=2)
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        (torch.int8, -128),
        (torch.int64, -(2**63)),
        (torch.uint8, 255),
        (torch.bool, True),
        (torch.uint32, 2**32 - 1),
    ],
)
def test_fresh_integers_start_as_poison(dtype, poison):
    """Before a replay a result holds the smallest integer, the largest one if unsigned, or True."""
    assert record(lambda: torch.zeros(2, dtype=dtype), device="cpu").outputs.tolist() == [poison] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_fresh_floats_start_as_nan(dtype):
    """Before a replay a floating-point result is NaN in every element."""
    out = record(lambda: torch.zeros(2, dtype=dtype), device="cpu").outputs
    assert torch.view_as_real(out).isnan().all() if dtype.is_complex else out.float().isnan().all()


def test_results_keep_their_memory_over_replays():
    """A replay writes into the recorded results; it makes no new ones."""
    x = torch.randn(4)
    recording = record(lambda: (x * 2, x.clone()), device="cpu")
    addresses = [t.data_ptr() for t in recording.outputs]
    outputs = recording.outputs
    recording.replay()
    assert recording.outputs is outputs
    assert [t.data_ptr() for t in outputs] == addresses
    assert torch.equal(outputs[0], x * 2)


def test_empty_is_memory_but_no_launch():
    """`torch.empty` and views count no node; the fill of the memory does, and its bytes are in the pool."""

    def fn():
        t = torch.empty(6)
        t.view(2, 3)[0].fill_(1.0)
        return t

    recording = record(fn, device="cpu")
    assert (recording.num_nodes, recording.pool_bytes) == (1, 24)
    assert recording.outputs.isnan().all()
    recording.replay()
    assert recording.outputs[:3].tolist() == [1, 1, 1]


def test_an_implicit_view_stays_a_view():
    """A reshape that torch does without a copy still shares its memory after recording."""
    x = torch.randn(2, 3, 4)
    w = torch.randn(4, 5)
    recording = record(lambda: ((y := x @ w), y.reshape(6, 5), x.contiguous(), x.to(x.dtype)), device="cpu")
    product, reshaped, same, converted = recording.outputs
    assert recording.num_nodes == 1
    assert product.data_ptr() == reshaped.data_ptr()
    assert same.data_ptr() == converted.data_ptr() == x.data_ptr()


def test_random_numbers_are_fresh_at_each_replay():
    """A replay advances the generator as the eager call would, and recording leaves it where it was."""
    torch.manual_seed(5)
    state = torch.get_rng_state()
    own = torch.Generator().manual_seed(7)
    own_state = own.get_state()
    recording = record(lambda: (torch.rand(3), torch.rand(3, generator=own)), device="cpu", warmup=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(own.get_state(), own_state)
    drawn = []
    for _ in range(2):
        recording.replay()
        drawn.append([t.clone() for t in recording.outputs])
    torch.manual_seed(5)
    own.set_state(own_state)
    for first, second in drawn:
        assert torch.equal(first, torch.rand(3))
        assert torch.equal(second, torch.rand(3, generator=own))


def test_an_opaque_launch_is_one_node_and_runs_at_replay_only():
    """graphrt's own launch is one node whatever it does inside, host reads included, on the live tensors."""
    x, out = torch.ones(2), torch.zeros(2)

    def run(source, target):
        assert not launch.is_recording()
        target.fill_(source.sum().item())

    def fn():
        launch.launch("sum", run, x, out)
        return out * 2

    recording = record(fn, device="cpu", warmup=0)
    assert recording.num_nodes == 2
    assert out.tolist() == [0, 0]
    x.fill_(3)
    recording.replay()
    assert out.tolist() == [6, 6]
    assert recording.outputs.tolist() == [12, 12]


def test_replay_follows_memory_and_not_a_swapped_data_pointer():
    """As a CUDA graph does, a replay reads the memory it was recorded with after `.data` was swapped."""
    x = torch.ones(2)
    recording = record(lambda: x + 1, device="cpu")
    old = x.detach()
    x.data = torch.full((2,), 50.0)
    old.fill_(5)
    recording.replay()
    assert recording.outputs.tolist() == [6, 6]


def test_parameters_are_read_and_written_without_gradients():
    """Tensors that require gradients take part like any others; no result requires a gradient."""
    w = torch.nn.Parameter(torch.ones(2))
    recording = record(lambda: (w * 2, w.add_(1)), device="cpu", warmup=0)
    recording.replay()
    assert not recording.outputs[0].requires_grad
    assert w.tolist() == [2, 2]


def test_a_recording_made_in_inference_mode_replays_outside_it():
    """A recording made under inference mode is as good as any, on tensors made outside."""
    x, w, out = torch.randn(2, 4), torch.randn(4, 4), torch.zeros(2, 4)
    with torch.inference_mode():
        recording = record(lambda: out.copy_(F.linear(x, w)).reshape(-1) + 1, device="cpu")
    x.normal_()
    recording.replay()
    assert torch.equal(out, F.linear(x, w))
    assert torch.equal(recording.outputs, F.linear(x, w).reshape(-1) + 1)
