"""graphrt.testing: the tools that an engine tests its own kernels with, tested on graphrt's reference."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from graphrt import KDADeferredCommitContext
from graphrt.capture import check_replay, record
from graphrt.testing import (
    Oracle,
    Row,
    assert_bitwise_equal,
    deferred_step,
    dummy_batch,
    make_batch,
    poisoned_pool,
    random_trace,
    traces,
)

SIZE = 3
SIZES = {"spec_query_len": 4, "max_rows": SIZE, "num_slots": 6, "max_num_reqs": 4}


def double_pool(**changes):
    sizes = {"num_slots": 6, "max_num_reqs": 4, "dtype": torch.float64, "pool_dtype": torch.float64}
    pool = poisoned_pool(**{**sizes, **changes})
    context = KDADeferredCommitContext.create(
        pool.layers, spec_query_len=pool.spec_query_len, max_num_reqs=4, backend="torch"
    )
    return pool, context


def run_against_oracle(pool, context, trace, step_of=deferred_step):
    """Drive a trace; every output, and at the end every state, against the oracle of each request and layer."""
    oracles = {}
    for number, step in enumerate(trace):
        for one in step.arrivals:
            pool.fill(one.slot, one.request)
            pool.pending[one.row] = 0
            oracles[one.request] = [Oracle.of_slot(layer, one.slot) for layer in pool.layers]
        batch = make_batch(pool, step.rows, size=SIZE, seed=number)
        outs, convs = step_of(context, pool, batch)
        for i in range(len(pool.layers)):
            begin = 0
            for row in step.rows:
                end = begin + row.length
                want = oracles[row.request][i].step(*batch.tokens(i, begin, end), row.accepted)
                torch.testing.assert_close(outs[i, begin:end].double(), want.out, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(convs[i, begin:end].double(), want.conv, rtol=1e-9, atol=1e-9)
                begin = end
            assert not outs[i, begin:].any() and not convs[i, begin:].any()
        for one in step.departures:
            context.drain(*(torch.tensor([n], dtype=torch.int32) for n in (one.slot, one.row)), pool.pending)
            for i, layer in enumerate(pool.layers):
                want = oracles[one.request][i]
                conv_state, checkpoint = layer.kv_cache
                torch.testing.assert_close(checkpoint[one.slot].double(), want.state, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(conv_state[one.slot, :, : pool.hist].double(), want.history)
            pool.fill(one.slot, 999)
            for layer in pool.layers:
                layer.kv_cache[0][one.slot] = layer.kv_cache[1][one.slot] = float("nan")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=traces(**SIZES, max_steps=5))
def test_the_deferred_step_equals_the_oracle_on_any_trace(trace):
    """Outputs and states of hypothesis' traces, over a pool that is NaN wherever nothing may be read."""
    run_against_oracle(*double_pool(), trace)


def test_the_oracle_knows_the_softplus_gate():
    """Without a bound the gate is the softplus one."""
    run_against_oracle(*double_pool(lower_bound=None), random_trace(5, **SIZES))


def test_two_oracles_agree():
    """The packaged oracle and that of graphrt's own tests were written apart from the formulas."""
    other = pytest.importorskip("oracle")
    for lower_bound in (-5.0, None):
        pool, _ = double_pool(lower_bound=lower_bound)
        pool.fill(1, 0)
        layer, batch = pool.layers[0], make_batch(pool, [Row(0, 1, 0, 4, 0)], size=1)
        mine = Oracle.of_slot(layer, 1)
        params = other.LayerParams(layer.A_log, layer.dt_bias, lower_bound, layer.conv_weight, layer.conv_bias)
        theirs = other.Request(params, mine.state, mine.history)
        q, k, raw_g, v, raw_beta, x = batch.tokens(0, 0, 4)
        for accepted in (0, 3, 4):
            a = mine.step(q, k, raw_g, v, raw_beta, x, accepted)
            b = theirs.step(other.Window(q=q, k=k, v=v, raw_g=raw_g, raw_beta=raw_beta, x=x), accepted)
            for got, want in ((a.out, b.out), (a.correction, b.u), (a.conv, b.conv), (mine.state, theirs.state)):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            assert torch.equal(mine.history, theirs.history)


def test_the_oracle_finds_a_wrong_step():
    """A step that accepts one token too many is not let through."""

    def wrong(context, pool, batch):
        batch.num_accepted_tokens.add_(1)
        return deferred_step(context, pool, batch)

    with pytest.raises(AssertionError):
        run_against_oracle(*double_pool(), random_trace(5, **SIZES), wrong)


def test_poison_is_read_by_a_step_that_reads_too_much():
    """A row that points to a slot nobody filled gives NaN; one token more in the query offsets does as well."""
    pool, context = double_pool()
    pool.fill(1, 0)
    batch = make_batch(pool, [Row(0, 2, 0, 2, 1)], size=SIZE)
    assert deferred_step(context, pool, batch)[0][:, :2].isnan().all()
    batch = make_batch(pool, [Row(0, 1, 1, 2, 1)], size=SIZE)
    batch.query_start_loc[1:] += 1
    outs, _ = deferred_step(context, pool, batch)
    assert outs[:, 2].isnan().all() and not outs[:, :2].isnan().any()


def test_traces_keep_the_rules():
    """Slots and record rows belong to one living request each; a step has each request once; sizes hold."""
    for seed in range(50):
        slots, rows = {}, {}
        for step in random_trace(seed, **SIZES, steps=8, min_accepted=1):
            for one in step.arrivals:
                assert one.slot not in slots and one.row not in rows
                slots[one.slot] = rows[one.row] = one.request
            assert len(step.rows) <= SIZE and len({one.request for one in step.rows}) == len(step.rows)
            for one in step.rows:
                assert slots[one.slot] == rows[one.row] == one.request
                assert min(one.length, 1) <= one.accepted <= one.length <= 4
            for one in step.departures:
                assert slots.pop(one.slot) == rows.pop(one.row) == one.request
    assert random_trace(3, **SIZES) == random_trace(3, **SIZES) != random_trace(4, **SIZES)
    with pytest.raises(ValueError, match=r"^traces: expected at least one"):
        random_trace(0, **{**SIZES, "num_slots": 1})


def test_dummy_batches_have_no_live_row():
    """Padding is slot 0 and row -1 without tokens; the dummies of a context-parallel capture look live (PAD)."""
    pool, _ = double_pool()
    padding, dummies = dummy_batch(pool, size=3), dummy_batch(pool, size=3, dcp=True)
    assert padding.state_indices.tolist() == [0, 0, 0] and padding.query_start_loc.tolist() == [0] * 4
    assert dummies.state_indices.tolist() == [0, 1, 2] and dummies.query_start_loc.tolist() == [0, 4, 8, 12]
    for batch in (padding, dummies):
        assert batch.record_rows.tolist() == [-1] * 3 and not batch.num_accepted_tokens.any()
    assert padding.q.isnan().all() and not dummies.q.isnan().any()
    with pytest.raises(ValueError, match=r"^rows: expected at most 0"):
        make_batch(pool, [Row(0, 1, 0, 1, 1)], size=0)


def test_an_engine_can_check_its_own_step():
    """The tools together: record a step once, replay a trace of other batches, compare with eager execution."""
    pool, context = double_pool()
    static, trace = dummy_batch(pool, size=SIZE), random_trace(7, **SIZES)

    def stage(step):
        for one in trace[step].arrivals:
            pool.fill(one.slot, one.request)
            pool.pending[one.row] = 0
        static.copy_(make_batch(pool, trace[step].rows, size=SIZE, seed=step))

    def step():
        return deferred_step(context, pool, static)

    report = check_replay(record(step, device="cpu"), step, stage, len(trace), pool.tensors())
    report.raise_if_different()


def test_assert_bitwise_equal_names_element_and_values():
    """Coordinates and both values; shape and dtype first; NaN by its bytes."""
    a = torch.zeros(2, 3)
    assert_bitwise_equal(a, a.clone())
    b = a.clone()
    b[1, 2] = 1.5
    with pytest.raises(AssertionError, match=r"^out: expected 1.5 at \[1, 2\], got 0.0 \(1 of 6 elements differ\)"):
        assert_bitwise_equal(a, b, "out")
    with pytest.raises(AssertionError, match="expected shape"):
        assert_bitwise_equal(a, a[:1])
    with pytest.raises(AssertionError, match="expected dtype"):
        assert_bitwise_equal(a, a.double())
    nan = torch.tensor([float("nan")])
    assert_bitwise_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match="0x7fc00001"):
        assert_bitwise_equal((nan.view(torch.int32) + 1).view(torch.float32), nan)


def run_python(*args, cwd=None):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=environment, cwd=cwd, check=False
    )


def test_loading_the_plugin_imports_neither_torch_nor_graphrt():
    """A test run that does not use the fixtures pays nothing for the plugin."""
    code = "import sys, graphrt_pytest; print([m for m in ('torch', 'graphrt', 'triton', 'numpy') if m in sys.modules])"
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


PLUGIN_TEST = """
import graphrt
import pytest
import torch


def test_poison(graphrt_poison):
    assert torch.empty(3).isnan().all() and torch.zeros(2).new_empty(2).isnan().all()
    assert torch.empty(1, dtype=torch.int32).item() < 0


def test_poison_passes_what_has_no_plain_memory(graphrt_poison):
    assert torch.empty(2, requires_grad=True).isnan().all()
    assert torch.empty(2, 2, layout=torch.sparse_coo)._nnz() == 0
    assert torch.empty(2, device="meta").shape == (2,)


def test_no_poison():
    torch.empty(3).fill_(1)
    assert torch.empty.__module__ != "graphrt_pytest"


def test_pool(graphrt_pool, graphrt_device):
    pool = graphrt_pool(num_layers=1)
    assert pool.device.type == graphrt_device and pool.layers[0].kv_cache[1].isnan().all()


def test_no_errors(graphrt_no_errors):
    pass


def test_errors(graphrt_no_errors, graphrt_device):
    graphrt.error_counter(graphrt_device)[0] += 1
"""


def test_the_fixtures_come_with_the_installation(tmp_path):
    """A project that has graphrt installed gets the fixtures; the one test that counts an error fails at its end."""
    (tmp_path / "test_engine.py").write_text(PLUGIN_TEST)
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path), cwd=tmp_path)
    assert "6 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "kernels met bad values" in done.stdout and "'slot': 1" in done.stdout
