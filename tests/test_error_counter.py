"""The device error counter: counts and first rows by kind, read without a wait, in words, and reset."""

import pytest
import torch
from rig import Pool, Target
from steps import Batch, Row, commit, core_verify, verify
from truth import start

from graphrt import ErrorKind, RecordSlots, error_counter, error_counts, error_report, reset_errors
from graphrt.capture import StepInputs
from graphrt.errors import NUM_KINDS, _seen_from

HUGE = 1 << 30
CPU = torch.device("cpu")


def first_rows(device):
    """The first row of each kind that was met."""
    return {entry.kind: entry.first_row for entry in error_report(device, wait=True).entries}


def test_each_kind_names_the_first_row_that_met_it(backend_device):
    """Plan and verify note the batch row; a later launch adds to the count and leaves the row."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    start(pool, {0: 3, 1: 4, 2: 5})
    core_verify(Batch(pool, [Row(3, 0, 1), Row(HUGE, 1, 1), Row(5, 77, 1)]), 0, deferred=True)
    assert first_rows(pool.device) == {"slot": 1, "row": 2}
    batch = Batch(pool, [Row(3, 0, 1), Row(4, 1, 1), Row(5, 2, 1)])
    commit(batch, [1, 7, 9])
    commit(batch, [-1, 1, 1])
    assert first_rows(pool.device) == {"slot": 1, "row": 2, "accepted": 1}
    assert pool.errors() == {"slot": 1, "row": 1, "accepted": 3}
    pool.context.drain(pool.int32([HUGE, 4]), pool.int32([0, 1]), pool.pending)
    assert first_rows(pool.device)["slot"] == 1
    assert pool.errors()["slot"] == 2


def test_the_report_is_a_sentence(backend_device):
    """It names the device, and of each kind how often, the first row, and what became of the value."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    device = pool.pending.device
    assert not error_report(device, wait=True)
    assert str(error_report(device)) == f"no bad value was met on {device}"
    pool.pending[2] = 9
    pool.context.drain(pool.int32([3, 4]), pool.int32([0, 2]), pool.pending)
    report = error_report(device, wait=True)
    assert report
    assert str(report) == f"bad values on {device}: pending once, first in batch row 1: {ErrorKind.PENDING.meaning}"


def test_a_reset_forgets_counts_and_rows(backend_device):
    """Afterwards the next bad value is the first again; the memory stays where it is."""
    pool = Pool(backend_device, backend_device.shape(layers=1, heads=1))
    device, address = pool.pending.device, error_counter(pool.device).data_ptr()
    for rows in ([0, 9], [9, 0]):
        pool.context.drain(pool.int32([3, 4]), pool.int32(rows), pool.pending)
        assert error_counts(device)["row"] == 1
        assert first_rows(device) == {"row": rows.index(9)}
        reset_errors(device)
        assert not any(error_counts(device, wait=False).values()) and not error_report(device)
    assert error_counter(pool.device).data_ptr() == address


def test_a_plain_align_commit_into_an_unallocated_block_is_counted(backend_device):
    """Its final block is null inside the table: nothing is folded, and that is not silent."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    start(pool, {0: 3})
    verify(batch := Batch(pool, [Row(3, 0, 2)]), deferred=False)
    align = {"block_table": pool.int32([3, 0]).view(1, 2), "num_computed_tokens": pool.int32([16])}
    commit(batch, [2], deferred=False, mamba_block_size=16, **align)
    assert pool.context.commit_lens.tolist()[0] == 0
    assert pool.errors() == {"eager_null": 1}


def test_one_piece_of_memory_has_two_names():
    """What is written under the device's name is read under the host's."""
    host = torch.arange(6, dtype=torch.int32)
    seen = _seen_from(CPU, host)
    assert seen.data_ptr() == host.data_ptr() and seen.shape == host.shape and seen.dtype == host.dtype
    seen[2] += 40
    assert host.tolist() == [0, 1, 42, 3, 4, 5]


def test_kinds_have_a_place_and_a_meaning():
    """The counter holds a count and a first row of every kind, and every kind says what was done."""
    assert error_counter(CPU).shape == (2 * NUM_KINDS,)
    assert sorted(ErrorKind) == list(range(NUM_KINDS))
    assert all(kind.meaning for kind in ErrorKind)


@pytest.mark.gpu
def test_the_counter_is_read_while_the_device_is_busy():
    """What earlier launches counted is seen without a synchronisation, behind work that still runs."""
    pool = Pool(Target("triton", "cuda"), Target("triton", "cuda").shape(layers=1, heads=1))
    slots, rows = pool.int32([HUGE]), pool.int32([0])
    pool.context.drain(slots, rows, pool.pending)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    report = error_report("cuda")
    assert not busy.query(), "the read waited for the device"
    assert [(entry.kind, entry.count, entry.first_row) for entry in report.entries] == [("slot", 1, 0)]
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_replay_counts_into_the_same_memory():
    """A captured launch holds the counter's address, which is one for the life of the process."""
    pool = Pool(Target("triton", "cuda"), Target("triton", "cuda").shape(layers=1, heads=1))
    slots, rows = pool.int32([HUGE]), pool.int32([0])
    graph = torch.cuda.CUDAGraph()
    pool.context.drain(slots, rows, pool.pending)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        pool.context.drain(slots, rows, pool.pending)
    reset_errors("cuda")
    for _ in range(3):
        graph.replay()
    assert error_counts("cuda")["slot"] == 3


def test_a_device_has_one_counter_whatever_it_is_called():
    """ "cpu" and "cpu:0" are one place: what a staging counts under one name is read under the other."""
    reset_errors("cpu")
    inputs = StepInputs(1, 4, "cpu:0", ledger=RecordSlots(1, "cpu"))
    inputs.stage(num_reqs=1, state_indices=[1], record_rows=[0], generation=[7])
    assert error_counts("cpu")["stale_generation"] == error_counts("cpu:0")["stale_generation"] == 1
