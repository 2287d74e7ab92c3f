"""A state machine of everything a service does, against the float64 oracle (`graphrt.testing.Service`).

On the CPU the torch backend runs in float64, where a wrong count, slot or token shows at 1e-10, and Triton's
interpreter runs a few short lives. On a GPU captured graphs and real kernels run the long form; `tools/soak.py` is one
life that is longer still.
"""

import random
from collections import Counter
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
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


def action(**drawn):
    """A rule that has `data` to draw from. As many steps follow it as the class says, some of them hostile."""

    def decorate(act):
        @rule(data=st.data(), **drawn)
        @wraps(act)
        def act_and_go_on(self, data, **values):
            act(self, data, **values)
            self.take_steps(data, self.between, FAULTS)

        return act_and_go_on

    return decorate


class Life(RuleBasedStateMachine):
    """Each rule is one action; hypothesis draws what it needs and shrinks it. A subclass says on what it runs."""

    backend, max_rows, captured = "torch", 4, (1,)
    lower_bounds = (-5.0, None)
    sizes: ClassVar = {"num_layers": 1, "num_heads": 1, "conv_dim": 6}
    in_a_row, between = (1, 5), (0, 0)
    """Least and most steps one after the other: as an action, and behind every action."""
    driven: ClassVar[Counter]

    @initialize(data=st.data(), seed=st.integers(0, 99))
    def begin(self, data, seed):
        lower_bound = data.draw(st.sampled_from(self.lower_bounds))
        pool = poisoned_pool(lower_bound=lower_bound, seed=seed, **self.sizes)
        self.service = Service(pool, backend=self.backend, max_rows=self.max_rows, sizes=self.captured, seed=seed)
        assert self.service.context.backend == self.backend
        self.service.admit(lambda low, high: low)

    def teardown(self):
        """The recordings' memory goes back, and what was driven is counted."""
        service = getattr(self, "service", None)
        if service is None:
            return
        counts = service.counts
        self.driven.update(lives=1, steps=counts.steps, replays=counts.replays, rows=counts.rows)
        self.driven.update(faults=sum(counts.faults.values()), comparisons=service.comparisons.done)
        service.close()

    def request(self, data):
        return self.service.live[data.draw(st.integers(0, len(self.service.live) - 1))]

    def take_steps(self, data, limits, faults=()):
        least, most = limits
        for driver in data.draw(st.lists(st.sampled_from(DRIVERS), min_size=least, max_size=most)):
            wrong = data.draw(st.lists(st.sampled_from(faults), max_size=1)) if faults else ()
            self.service.step(picker(data), driver=driver, faults=wrong)

    @action()
    def admit(self, data):
        self.service.admit(picker(data))

    @LIVE
    @action()
    def steps(self, data):
        self.take_steps(data, self.in_a_row)

    @LIVE
    @action(driver=st.sampled_from(DRIVERS), faults=st.lists(st.sampled_from(FAULTS), max_size=2))
    def hostile_step(self, data, driver, faults):
        self.service.step(picker(data), driver=driver, faults=faults)

    @LIVE
    @action()
    def drain(self, data):
        self.service.drain(self.service.live[data.draw(st.integers(0, len(self.service.live) - 1)) :])

    @LIVE
    @action(way=st.sampled_from(["finish", "abort", "preempt"]))
    def leave(self, data, way):
        getattr(self.service, way)(self.request(data))

    @action()
    def resume(self, data):
        self.service.resume(picker(data))

    @LIVE
    @action()
    def fork(self, data):
        self.service.fork(self.request(data), picker(data))

    @action()
    def save_and_load(self, data):
        with TemporaryDirectory() as folder:
            self.service.save_and_load(Path(folder) / "state.safetensors")

    @action()
    def idle(self, data):
        self.service.idle(picker(data))

    @action(dcp=st.booleans())
    def capture(self, data, dcp):
        self.service.capture([data.draw(st.integers(1, self.max_rows))], dcp=dcp)

    @invariant()
    def all_that_holds_at_any_time(self):
        self.service.check()


def picker(data):
    return lambda low, high: data.draw(st.integers(low, high))


def drive(record_property, lives, rules, start=0, **facts):
    """Drive so many lives of so many rules each, the same ones for every `start`; the counts go into the report."""
    machine = seed(start)(type("DrivenLife", (Life,), {**facts, "driven": Counter()}))
    limits = settings(max_examples=lives, stateful_step_count=rules, deadline=None, database=None)
    run_state_machine_as_test(machine, settings=settings(limits, suppress_health_check=list(HealthCheck)))
    for what, count in machine.driven.items():
        record_property(what, count)
    print(f"{machine.backend}: {dict(machine.driven)}")
    return machine.driven


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels compile here: see the long form")
def test_short_lives_under_the_interpreter_are_the_oracles(record_property):
    """The Triton kernels themselves, a few actions of each kind."""
    driven = drive(record_property, 4, 6, backend="triton", max_rows=2, in_a_row=(1, 2), between=(1, 1))
    assert driven["steps"] > 10


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("backend", ["torch", "triton", pytest.param("fp32_deferred", marks=pytest.mark.sm90)])
def test_long_lives_on_the_gpu_are_the_oracles(backend, part, record_property):
    """Captured graphs and real kernels, more than 10,000 steps each in eight parts; one long life: tools/soak.py."""
    sizes = {"device": "cuda", "num_slots": 12, "max_num_reqs": 8}
    facts = {"max_rows": 6, "captured": (1, 4), "in_a_row": (3, 6), "between": (6, 10)}
    if backend == "fp32_deferred":
        sizes |= {"head_dim": 128, "dtype": torch.bfloat16}
        facts["lower_bounds"] = (-5.0,)
    few = backend == "torch"
    driven = drive(record_property, 2 if few else 14, 40, part, backend=backend, sizes=sizes, **facts)
    assert driven["steps"] > (50 if few else 1_250)


def test_no_sequence_of_actions_parts_from_the_oracle(record_property):
    """Admit, step in four ways, absent rows, eager rows, flush, drain, preempt, resume, fork, save and load, reuse,
    dummies, lazy capture, late rows and hostile values: outputs, states, histories, pending and strangers' memory hold
    (B12, B20, B23, B33, B35, B91).
    """
    driven = drive(record_property, 12, 20, sizes=Life.sizes | DOUBLE)
    assert driven["steps"] > 50


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
    for number in range(20):
        service.step(random.Random(number).randint, driver=driver, faults=["query_len", "accepted"])
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
