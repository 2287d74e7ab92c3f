"""A state machine of everything a service does, against the float64 oracle (`graphrt.testing.Service`).

On the CPU the torch backend runs in float64, where a wrong count, slot or token shows at 1e-10; Triton's interpreter
runs a short trace. On a GPU the real kernels run the long form; `tools/soak.py` runs it longer still.
"""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from graphrt.testing import Oracle, Service, poisoned_pool
from graphrt.testing.members import FAULTS
from graphrt.testing.service import DRIVERS
from graphrt.testing.truths import Tokens, Truths

DOUBLE = {"dtype": torch.float64, "pool_dtype": torch.float64}
LIVE = precondition(lambda self: self.service.live)


class Life(RuleBasedStateMachine):
    """Each rule is one action; hypothesis draws what it needs and shrinks it."""

    @initialize(lower_bound=st.sampled_from([-5.0, None]), seed=st.integers(0, 99))
    def begin(self, lower_bound, seed):
        pool = poisoned_pool(num_layers=1, num_heads=1, lower_bound=lower_bound, conv_dim=6, seed=seed, **DOUBLE)
        self.service = Service(pool, backend="torch", seed=seed)
        self.service.admit(lambda low, high: low)

    def request(self, data):
        return self.service.live[data.draw(st.integers(0, len(self.service.live) - 1))]

    @rule(data=st.data())
    def admit(self, data):
        self.service.admit(picker(data))

    @LIVE
    @rule(data=st.data(), drivers=st.lists(st.sampled_from(DRIVERS), min_size=1, max_size=5))
    def steps(self, data, drivers):
        for driver in drivers:
            self.service.step(picker(data), driver=driver)

    @LIVE
    @rule(data=st.data(), driver=st.sampled_from(DRIVERS), faults=st.lists(st.sampled_from(FAULTS), max_size=2))
    def hostile_step(self, data, driver, faults):
        self.service.step(picker(data), driver=driver, faults=faults)

    @LIVE
    @rule(data=st.data())
    def drain(self, data):
        self.service.drain(self.service.live[data.draw(st.integers(0, len(self.service.live) - 1)) :])

    @LIVE
    @rule(data=st.data(), way=st.sampled_from(["finish", "abort", "preempt"]))
    def leave(self, data, way):
        getattr(self.service, way)(self.request(data))

    @rule(data=st.data())
    def resume(self, data):
        self.service.resume(picker(data))

    @LIVE
    @rule(data=st.data())
    def fork(self, data):
        self.service.fork(self.request(data), picker(data))

    @rule()
    def save_and_load(self):
        with TemporaryDirectory() as folder:
            self.service.save_and_load(Path(folder) / "state.safetensors")

    @rule(data=st.data())
    def idle(self, data):
        self.service.idle(picker(data))

    @rule(size=st.integers(1, 4), dcp=st.booleans())
    def capture(self, size, dcp):
        self.service.capture([size], dcp=dcp)

    @invariant()
    def all_that_holds_at_any_time(self):
        self.service.check()


def picker(data):
    return lambda low, high: data.draw(st.integers(low, high))


def test_no_sequence_of_actions_parts_from_the_oracle():
    """Admit, step in four ways, absent rows, eager rows, flush, drain, preempt, resume, fork, save and load, reuse,
    dummies, lazy capture, late rows and hostile values: outputs, states, histories, pending and strangers' memory hold
    (B12, B20, B23, B33, B35, B91).
    """
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def run(service, actions, seed):
    pick = random.Random(seed).randint
    for _ in range(actions):
        service.act(pick)
        service.check()
    service.finish_all(pick)
    service.check()
    service.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels compile here: see the long form")
def test_a_short_life_under_the_interpreter_is_the_oracles():
    """The Triton kernels themselves, a few actions of each kind."""
    run(Service(poisoned_pool(num_layers=1, num_heads=1, conv_dim=6), backend="triton", max_rows=2), 8, seed=4)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["torch", "triton", pytest.param("fp32_deferred", marks=pytest.mark.sm90)])
def test_a_long_life_on_the_gpu_is_the_oracles(backend):
    """Captured graphs and real kernels over thousands of actions; more with tools/soak.py."""
    sizes = {"head_dim": 128, "dtype": torch.bfloat16} if backend == "fp32_deferred" else {}
    pool = poisoned_pool(device="cuda", num_slots=12, max_num_reqs=8, **sizes)
    service = Service(pool, backend=backend, max_rows=6)
    assert service.context.backend == backend
    run(service, 1000 if backend == "torch" else 4000, seed=1)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_the_batched_truths_are_the_token_by_token_oracles(lower_bound):
    """Ragged windows of three rows and two layers give the outputs, states and histories of one oracle each."""
    pool = poisoned_pool(lower_bound=lower_bound, **DOUBLE)
    truths, tokens, oracles = Truths(pool), Tokens.allocate(pool, 9), {}
    rows, lengths, accepted = [4, 0, 2], [3, 4, 1], [2, 0, 1]
    for slot, row in enumerate(rows, 1):
        pool.fill(slot, slot)
        oracles[row] = [Oracle.of_slot(layer, slot) for layer in pool.layers]
        for i, layer in enumerate(pool.layers):
            truths.state[row, i] = layer.kv_cache[1][slot]
            truths.history[row, i] = layer.kv_cache[0][slot, :, : pool.hist]
    for _ in range(2):
        for part in tokens.parts():
            part[:, :8].normal_()
        begins = [0, 3, 7]
        out, conv = truths.step(rows, begins, lengths, accepted, tokens)
        for b, row in enumerate(rows):
            for i in range(2):
                q, k, v, raw_g, raw_beta, x = (part[i, begins[b] : begins[b] + lengths[b]] for part in tokens.parts())
                want = oracles[row][i].step(q, k, raw_g, v, raw_beta, x, accepted[b])
                torch.testing.assert_close(out[i, b, : lengths[b]], want.out, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(conv[i, b, : lengths[b]], want.conv, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(truths.state[row, i], oracles[row][i].state, rtol=1e-12, atol=1e-12)
                assert torch.equal(truths.history[row, i], oracles[row][i].history)


@pytest.mark.parametrize("driver", ["now", "commit"])
def test_a_row_too_long_with_too_high_a_count_accepts_one_window(driver):
    """Both faults in one row: what lies behind Q is never accepted, and both are counted."""
    service = Service(poisoned_pool(num_layers=1, num_heads=1, **DOUBLE), backend="torch")
    for _ in range(2):
        service.admit(lambda low, high: low)
    for seed in range(20):
        service.step(random.Random(seed).randint, driver=driver, faults=["query_len", "accepted"])
        service.check()
    service.close()


@pytest.mark.parametrize("wrong", ["accepted", "slot", "pending"])
def test_the_service_finds_a_wrong_step(wrong, monkeypatch):
    """One token too many, a state changed by a bit too much, or a count that was lost fails the next check."""
    service = Service(poisoned_pool(num_layers=1, num_heads=1, **DOUBLE), backend="torch")
    service.admit(lambda low, high: low)
    stage = service.inputs.stage
    if wrong == "accepted":
        bad = lambda **kw: stage(**kw | {"num_accepted_tokens": [n + 1 for n in kw["num_accepted_tokens"]]})  # noqa: E731
        monkeypatch.setattr(type(service.inputs), "stage", lambda self, **kw: bad(**kw))
    service.step(lambda low, high: (low + high) // 2, driver="commit")
    if wrong == "slot":
        service.pool.layers[0].kv_cache[1][service.live[0].slot, 0, 3, 5] += 1e-6
    if wrong == "pending":
        service.slots.pending.zero_()
    with pytest.raises(AssertionError):
        service.finish(service.live[0])
        service.check()
