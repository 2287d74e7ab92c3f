"""What the process has as defaults changes nothing: engines set a default device and dtype while they build a model."""

import contextlib

import pytest
import torch

from graphrt import KDADeferredCommitContext, RecordSlots, error_report
from graphrt.capture import CommitRunner, StepInputs, check_replay, dummy_inputs, record, state_neutral
from graphrt.testing import deferred_step, dummy_batch, make_batch, poisoned_pool, random_trace

SIZES = {"spec_query_len": 4, "max_num_reqs": 4}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# A tensor on the meta device where one of the host was meant is an error at once; with cuda it would be an address.
AMBIENT = {
    "nothing": contextlib.nullcontext,
    "device": lambda: torch.device("meta"),
    "dtype": lambda: default_dtype(torch.bfloat16),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def served():
    """Everything a service makes and calls, from plain lists; the bytes that it leaves."""
    pool = poisoned_pool(num_slots=6, **SIZES)
    for slot in (1, 2):
        pool.fill(slot, slot)
    context = KDADeferredCommitContext.create(pool.layers, **SIZES, backend="torch")
    ledger = RecordSlots(4, "cpu")
    inputs = StepInputs(4, 4, "cpu", block_table_width=2, ledger=ledger)
    runner = CommitRunner(context, ledger.pending, inputs)
    runner.capture(progress=False, prove_neutral=True)
    names = ["first", "second"]
    rows = [ledger.admit(name) for name in names]
    ledger.restore(ledger.contents())
    deferred_step(context, pool, make_batch(pool, random_trace(1, max_rows=2, num_slots=6, **SIZES)[0].rows, size=2))
    inputs.stage(
        num_reqs=2, state_indices=[1, 2], record_rows=rows, query_start_loc=[0, 4, 6], num_accepted_tokens=[2, 1],
        eager=[True, False], request_indices=(1, 0), num_computed_tokens=range(2), block_table=[[1, 2], [3, 4]],
        generation=ledger.generations(names),
    )  # fmt: skip
    runner.commit(2)
    staged = inputs.rows(2)
    left = {name: getattr(staged, name).clone() for name in staged.__slots__}
    runner.drain(2)
    with state_neutral(pool.tensors()), state_neutral(pool.tensors(), values=False):
        dummy_inputs(inputs, 3, dcp=True)
    static = dummy_batch(pool, size=2)

    def step():
        return deferred_step(context, pool, static)

    def stage(i):
        static.copy_(make_batch(pool, random_trace(1, max_rows=2, num_slots=6, **SIZES)[0].rows, size=2, seed=i))

    check_replay(record(step, device="cpu"), step, stage, 2, pool.tensors()).raise_if_different()
    error_report("cpu")
    flat = {f"{name} {i}": t for name, group in pool.tensors().items() for i, t in enumerate(group)}
    return left | {name: t.clone() for name, t in flat.items()}


@pytest.mark.parametrize("ambient", [name for name in AMBIENT if name != "nothing"])
def test_a_service_is_the_same_under_any_default(ambient):
    """Contexts, ledger, static inputs, recordings and the test tools: the same bytes, on the device they were given."""
    with AMBIENT[ambient]():
        found = served()
    for name, want in served().items():
        assert found[name].device == want.device and found[name].dtype == want.dtype, name
        torch.testing.assert_close(found[name], want, rtol=0, atol=0, equal_nan=True, msg=name)
