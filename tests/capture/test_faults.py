"""Faults of the kinds FROZEN, PAD, ORDER, CAPTURE and ADDR, each as its scenario: on the tape, and on real graphs.

Those not here have their ids in the other files of this folder.
"""

import gc
import random
import threading
from itertools import cycle

import pytest
import torch
from engine import WINDOW, Batch, Engine, assert_same, int32
from toy import Toy

from graphrt import (
    KDARecoverSSMDeferred,
    RecordSlots,
    RequestState,
    allocate_records,
    launch,
    load_state,
    reset_errors,
    save_state,
)
from graphrt.capture import CaptureError, CommitRunner, DecodeStep, StepInputs, dummy_inputs, record

BLOCK = 8


def make(engine, sizes=None, width=0, **options):
    inputs = StepInputs(engine.rows, WINDOW, engine.device, block_table_width=width)
    return CommitRunner(engine.context, engine.pending, inputs, sizes, **options)


def zero_slot(toy, slot):
    for layer in toy.engine.layers:
        for state in layer.kv_cache:
            state[slot].zero_()


def test_a_new_request_with_a_full_window_decodes_from_its_own_zero_state(device):
    """B07: a prompt of exactly one window looks like a decode step; beside an old row of the same shape both are right.

    The step serves any row of a window's length alike: its state is that of its slot, zero for a new one.
    """
    toy, reference = Toy(device), Toy(device)
    toy.step.capture(progress=False)
    requests = {0: ([1, 2], 9), 1: ([3, 0, 1, 2], 4)}
    assert len(requests[1][0]) == WINDOW
    zero_slot(toy, 1)
    toy.admit(0, *requests[0])
    toy.stage({0: (1, 1, 2)})
    toy.step.replay(3, steps=2)
    assert toy.inputs.query_start_loc.diff().tolist()[0] == WINDOW
    zero_slot(toy, 2)
    toy.admit(1, *requests[1])
    toy.stage({1: (2, 2, WINDOW)})
    assert toy.inputs.query_start_loc.diff().tolist() == [WINDOW, WINDOW, 0]
    toy.step.replay(3, steps=9)
    for b, (prompt, new_tokens) in requests.items():
        zero_slot(reference, b + 1)
        assert toy.text[b, : toy.target[b]].tolist() == reference.decode_one_by_one(b + 1, prompt, new_tokens)


def test_a_live_record_row_over_the_null_slot_changes_nothing(device):
    """B17: block 0 with a real record row changes nothing, and checked mode names it; record row 0 is as others."""
    engine, rng = Engine(device), random.Random(1)
    runner = make(engine, [2])
    runner.capture(progress=False)
    batch = Batch(rng, engine, 2, least_rows=2, tokens=WINDOW)
    batch.record_rows, batch.accepted = [0, 3], [2, 3]
    batch.state_indices = [5, 0]
    before = engine.state()
    batch.verify(engine, engine.window_inputs(rng))
    runner.inputs.stage(**batch.host())
    # What belongs to the live row is row 0 of the records and counts, and slot 5; null is slot 0.
    others = {name: slice(0, 1) if name.startswith(("conv", "checkpoint")) else slice(1, None) for name in before}
    for call in (runner.commit, runner.drain, runner.flush):
        call(2)
        after = engine.state()
        for name, part in others.items():
            assert torch.equal(after[name][part], before[name][part]), (call, name)
        assert engine.pending[0].item() == (2 if call == runner.commit else 0)
    checked = Engine(device)
    checked_context = type(checked.context).create(
        checked.layers, spec_query_len=WINDOW, max_num_reqs=6, backend=checked.backend, check=True
    )
    runner = CommitRunner(checked_context, checked.pending, StepInputs(6, WINDOW, device), [2])
    runner.capture(progress=False)
    runner.inputs.stage(**batch.host())
    with pytest.raises(ValueError, match=r"^state_indices, row 1: expected a live slot, since its record row is 3"):
        runner.commit(2)


def flushes_at_every_replay(device, capture):
    """Whether a step object that a warm-up flushed is flushed by each replay too; `capture` gives the replay."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(5)
    inputs = StepInputs(6, WINDOW, device)
    rows = inputs.rows(3)
    step = KDARecoverSSMDeferred(rows.record_rows, engine.pending, None, engine.context, rows.state_indices)

    def work():
        step.flush()
        step.flush()

    replay = capture(work)
    for _ in range(3):
        batch = Batch(rng, engine, 3, least_rows=3)
        x = engine.window_inputs(rng)
        for one in (engine, twin):
            one.pending.zero_()
            batch.verify(one, x)
            one.pending.copy_(int32([2, 1, 3, 0, 2, 1], device))
        inputs.stage(**batch.host())
        replay()
        twin.context.flush(int32(batch.state_indices, device), int32(batch.record_rows, device), twin.pending)
        assert_same(engine.state(), twin.state(), "after a replay")


def test_a_step_object_of_the_warmup_is_flushed_by_every_replay(device):
    """B01: that a step was flushed is a flag of Python's, set in the warm-up; the recording has its flush, and one."""
    recordings = []

    def capture(work):
        recordings.append(record(work, device=device))
        return recordings[0].replay

    flushes_at_every_replay(device, capture)
    if device.type == "cpu":
        assert [node.name for node in recordings[0].nodes] == ["graphrt.flush"]


def test_a_recording_in_the_middle_of_a_step_lets_nothing_be_flushed_twice(device):
    """A second flush that runs would fold the same records again (B01)."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(6)
    batch = Batch(rng, engine, 3, least_rows=3)
    x = engine.window_inputs(rng)
    slots, record_rows = int32(batch.state_indices, device), int32(batch.record_rows, device)
    for one in (engine, twin):
        one.pending.zero_()
        batch.verify(one, x)
        one.pending.copy_(int32([2, 1, 3, 0, 2, 1], device))
    step = KDARecoverSSMDeferred(record_rows, engine.pending, None, engine.context, slots)
    step.flush()
    record(step.flush, device=device, warmup=0)
    step.flush()
    twin.context.flush(slots, record_rows, twin.pending)
    assert_same(engine.state(), twin.state(), "after the second flush")


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_a_step_object_is_flushed_in_each_graph_that_somebody_else_captures(number):
    """As in a recording of ours, for an engine that captures by itself: once in every graph of a step (B01)."""

    def capture(work):
        work()
        torch.cuda.synchronize()
        graphs = [torch.cuda.CUDAGraph() for _ in range(number)]
        for graph in graphs:
            with torch.cuda.graph(graph):
                work()
        turns = cycle(graphs)
        return lambda: next(turns).replay()

    flushes_at_every_replay(torch.device("cuda", 0), capture)


ONE_SHOT = {
    "admit": lambda e, ledger: ledger.admit("b"),
    "release": lambda e, ledger: ledger.release("a"),
    "preempt": lambda e, ledger: ledger.preempt("a"),
    "restore": lambda e, ledger: ledger.restore(ledger.contents()),
    "zero_state": lambda e, ledger: e.context.zero_state(2),
    "copy_state": lambda e, ledger: e.context.copy_state(1, 2, 0, ledger.pending),
    "read_state": lambda e, ledger: e.context.read_state(1, 0, ledger.pending),
    "write_state": lambda e, ledger: e.context.write_state(
        1, RequestState([t[1] for t in e.context.checkpoints], [t[1, :, :2] for t in e.context.conv_states], 3), 0,
        ledger.pending,
    ),
    "reset_errors": lambda e, ledger: reset_errors(e.device),
    # What lives as long as the service: in a graph's memory pool it would be overwritten (B73).
    "RecordSlots": lambda e, ledger: RecordSlots(2, e.device),
    "StepInputs": lambda e, ledger: StepInputs(2, WINDOW, e.device),
    "CommitRunner": lambda e, ledger: CommitRunner(e.context, ledger.pending, e.inputs),
    "DecodeStep": lambda e, ledger: DecodeStep(e.context, ledger.pending, e.inputs, print, print),
    "create": lambda e, ledger: type(e.context).create(e.layers, spec_query_len=WINDOW, max_num_reqs=6),
    "allocate_records": lambda e, ledger: allocate_records(2, 2, WINDOW, 16, torch.float32, e.device),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_SHOT)
def test_an_order_for_once_is_refused_in_a_recording(device, name):
    """B08: a replay would clear that slot, or zero that row's count, again in every step."""
    engine, ledger, count = Engine(device), RecordSlots(6, device), torch.zeros(1, device=device)
    engine.inputs = StepInputs(6, WINDOW, device)
    ledger.admit("a")
    state, contents = engine.state(), ledger.contents()
    with pytest.raises(CaptureError, match=rf"RuntimeError: {name}\b.* call it between two replays"):
        record(lambda: (count.add_(1), ONE_SHOT[name](engine, ledger)), device=device, warmup=0)
    assert_same(engine.state(), state, name)
    assert ledger.contents() == contents
    ONE_SHOT[name](engine, ledger)


@pytest.mark.parametrize("move", [save_state, load_state])
def test_a_run_is_not_moved_inside_a_recording(device, tmp_path, move):
    """A file is of one moment: it is not opened."""
    engine, ledger, count = Engine(device), RecordSlots(6, device), torch.zeros(1, device=device)
    with pytest.raises(CaptureError, match=rf"RuntimeError: {move.__name__} is for one time"):
        record(lambda: (count.add_(1), move(tmp_path / "run", engine.context, ledger)), device=device, warmup=0)
    assert list(tmp_path.iterdir()) == []


def test_counts_go_by_record_row_while_batch_rows_move(device):
    """B53: behind a busy device, rows are compacted and one is reused; each step's counts stay its requests' own."""
    engine, rng, ledger = Engine(device), random.Random(2), RecordSlots(6, device)
    inputs = StepInputs(6, WINDOW, device, ledger=ledger)
    runner = CommitRunner(engine.context, ledger.pending, inputs)
    runner.capture(progress=False, modes=["commit"])
    x = [engine.window_inputs(rng) for _ in range(2)]
    for name in "abc":
        ledger.admit(name)

    def step(names, accepted):
        rows = ledger.rows(names)
        inputs.stage(
            num_reqs=len(names), state_indices=[row + 1 for row in rows], record_rows=rows,
            query_start_loc=[b * WINDOW for b in range(len(names) + 1)], num_accepted_tokens=accepted,
            generation=ledger.generations(names),
        )  # fmt: skip
        engine.verify(inputs.rows(len(names)), x[len(names) % 2], ledger.pending)
        runner.commit(len(names))
        # What an engine copies to its host, enqueued at once and read later.
        return ledger.pending.clone()

    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
    first = step(["a", "b", "c"], [4, 1, 3])
    owners = dict(zip("abc", ledger.rows(["a", "b", "c"]), strict=True))
    ledger.release("b")
    owners["d"] = ledger.admit("d")
    assert owners["d"] == owners["b"]
    second = step(["d", "c", "a"], [2, 0, 1])
    assert [first[owners[name]].item() for name in "abc"] == [4, 1, 3]
    assert [second[owners[name]].item() for name in "dca"] == [2, 0, 1]


@pytest.mark.parametrize("rows", [3, 1], ids=["3 rows", "1 row"])
def test_windows_shorter_and_longer_than_what_is_pending_agree(device, rows):
    """B57: everything starts as zero; verifies with fewer and more tokens than pending counts equal eager commits."""
    records = allocate_records(4, 2, WINDOW, 16, torch.float32, device)
    for t in (records.correction, records.key_gate):
        home = torch.empty(0, dtype=t.dtype, device=device).set_(t.untyped_storage())
        assert home.numel() == t.numel() // 4 * 5 and not home.any()
    engine, eager, rng = Engine(device), Engine(device), random.Random(rows)
    assert not engine.context.commit_lens.any() and not engine.context.final_state_indices.any()
    assert not engine.pending.any()
    for tokens, accepted in ((4, 4), (2, 1), (4, 3), (1, 0), (3, 3)):
        batch = Batch(rng, engine, rows, least_rows=rows, tokens=tokens)
        batch.record_rows, batch.state_indices = list(range(rows)), list(range(1, rows + 1))
        batch.accepted, x = [accepted] * rows, engine.window_inputs(rng)
        assert_same({"out": batch.verify(engine, x)}, {"out": batch.verify(eager, x)}, f"{tokens} tokens")
        batch.commit(engine)
        batch.eager = [True] * rows
        batch.commit(eager, eager=True)
    everything = int32(range(1, 7), device), int32(range(6), device)
    engine.context.drain(*everything, engine.pending)
    for mine, theirs in zip(engine.layers, eager.layers, strict=True):
        assert torch.equal(mine.kv_cache[1], theirs.kv_cache[1])


def test_a_copy_on_the_side_is_finished_when_a_replay_reads_it(device):
    """B61: what another stream (on the tape another thread) still writes is waited for once the caller says so."""
    engine = Engine(device)
    runner = make(engine, [2])
    slots, offsets = int32([0, 0], device), int32([0, 4, 8], device)
    rows, accepted = int32([-1, -1], device), int32([0, 0], device)

    def write():
        slots.copy_(int32([1, 2], device))
        rows.copy_(int32([4, 5], device))
        accepted.copy_(int32([3, 2], device))

    if device.type == "cuda":
        side, ready = torch.cuda.Stream(), torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            write()
            ready.record()
        torch.cuda.current_stream().wait_event(ready)
    else:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    # The capture's own stream waits for the caller's, and with it for the copy.
    runner.capture(progress=False, modes=["commit"])
    runner.inputs.stage(
        num_reqs=2, state_indices=slots, record_rows=rows, query_start_loc=offsets, num_accepted_tokens=accepted
    )
    runner.commit(2)
    assert engine.pending.tolist() == [0, 0, 0, 0, 3, 2]


def test_work_on_the_side_inside_a_recording_must_be_joined(device):
    """B61: a fork that is left unjoined is refused; on the tape, whose streams are threads, at its start."""
    x = torch.zeros(8, device=device)

    def fork():
        x.mul_(1)
        if device.type == "cuda":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)
        else:
            threading.Thread(target=x.add_, args=(1,)).start()

    side = torch.cuda.Stream() if device.type == "cuda" else None
    with pytest.raises(CaptureError, match=r"forked stream|gives work to another thread"):
        record(fork, device=device, warmup=0)
    recording = record(lambda: x.add_(1), device=device, warmup=0)
    recording.replay()
    assert x.tolist() == [1.0] * 8


def test_the_plan_of_ragged_rows_is_the_same_every_time(device):
    """B62: long rows before short ones, planned again and again: in range, no overlap, equal to the host's plan."""
    lengths, rows = [3] * 20 + [2] * 5, 25
    engine, rng = Engine(device, rows=rows, slots=rows + 1), random.Random(3)
    runner = make(engine, [rows], eager=True)
    runner.capture(progress=False, modes=["commit"])
    offsets = [sum(lengths[:b]) for b in range(rows + 1)]
    accepted = [rng.randint(0, n) for n in lengths]
    slots = rng.sample(range(1, rows + 1), rows)
    runner.inputs.stage(
        num_reqs=rows, state_indices=slots, record_rows=list(range(rows)), query_start_loc=offsets,
        num_accepted_tokens=accepted, eager=[1] * rows,
    )  # fmt: skip
    want = int32(accepted, device), int32([s if n else 0 for s, n in zip(slots, accepted, strict=True)], device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    context = engine.context
    for _ in range(10_000 if device.type == "cuda" else 20):
        context.commit_lens.fill_(-7)
        context.final_state_indices.fill_(-7)
        runner.commit(rows)
        moved = context.final_state_indices.where(want[0] > 0, 0)
        wrong += (context.commit_lens != want[0]).sum() + (moved != want[1]).sum()
    assert wrong.item() == 0
    assert torch.equal(runner.inputs.query_start_loc, int32(offsets, device))


@pytest.mark.gpu
def test_the_device_has_finished_the_warmup_before_the_capture():
    """B62: a capture begins on an idle device; nothing that the warm-up started runs on."""
    x, seen = torch.ones(1, device="cuda"), torch.zeros(1).pin_memory()
    at_start = []

    def step():
        at_start.append(seen.item())
        if torch.cuda.is_current_stream_capturing():
            x.add_(1)
            return
        torch.cuda._sleep(200_000_000)
        seen.copy_(x, non_blocking=True)

    record(step, device="cuda", warmup=1)
    assert at_start == [0.0, 1.0]


@pytest.mark.parametrize("enabled", [True, False], ids=["collector on", "collector off"])
def test_old_recordings_may_die_while_a_new_one_is_made(device, enabled):
    """B67: a dropped cycle around an old recording, collected inside the new one; the collector is left as it was."""
    x = torch.zeros(8, device=device)
    cycle = [record(lambda: x.add_(1), device=device)]
    cycle.append(cycle)
    del cycle

    def step():
        gc.collect()
        launch.launch("graphrt.test", lambda t: t.add_(1), x)

    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        recording = record(step, device=device, warmup=0)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    # The recording alone keeps what it launches.
    del step
    gc.collect()
    x.zero_()
    recording.replay()
    assert x.tolist() == [1.0] * 8


def test_warmup_and_recording_find_the_same_work_space(device):
    """B69: a work space keyed by stream (on the tape by thread) that the warm-up filled is there while recording."""
    spaces, made, x = {}, [], torch.zeros(4, device=device)

    def step():
        key = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else threading.get_ident()
        if key not in spaces:
            made.append(key)
            spaces[key] = torch.ones(4, device=device)
        x.add_(spaces[key])

    first = record(step, device=device)
    second = record(step, device=device, warmup=0)
    assert len(made) == 1
    x.zero_()
    first.replay()
    second.replay()
    assert x.tolist() == [2.0] * 4


KINDS = {"no verify rows": [0, 0, 0], "only verify rows": [4, 4, 4], "mixed": [4, 0, 2]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prefixes", "align"), [(True, True), (True, False), (False, True), (False, False)])
def test_every_kind_of_step_runs_in_every_phase(device, kind, prefixes, align):
    """B70: {no verify rows, only such, mixed} x prefix caching x align mode: profiling run, capture and step."""
    engine, rng = Engine(device, slots=20), random.Random(kind)
    width = 4 if prefixes or align else 0
    runner = make(engine, [3], width=width, mamba_block_size=BLOCK if align else None)
    lengths = KINDS[kind]
    offsets = [sum(lengths[:b]) for b in range(4)]
    metadata = {
        "num_reqs": 3, "state_indices": [1, 5, 9], "record_rows": [2, 0, 4], "query_start_loc": offsets,
        "num_accepted_tokens": [min(n, 2) for n in lengths], "num_computed_tokens": [1, 1, 1],
    }  # fmt: skip
    if width:
        # With prefix caching the rows share their second block, which none of them reaches.
        table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
        if prefixes:
            table[:, 3] = 13
        metadata["block_table"] = table
    x = engine.window_inputs(rng)
    before = engine.state()

    # The profiling run: dummy rows, launched from Python before anything is captured.
    dummy_inputs(runner.inputs, 3)
    rows = runner.inputs.rows(3)
    engine.verify(rows, x)
    engine.context.commit(
        rows.num_accepted_tokens, rows.state_indices, rows.query_start_loc, record_rows=rows.record_rows,
        pending=engine.pending,
    )  # fmt: skip
    assert_same(engine.state(), before, "after the profiling run")
    runner.capture(progress=False)
    assert_same(engine.state(), before, "after the capture")

    runner.inputs.stage(**metadata)
    out = engine.verify(rows, x)
    runner.commit(3)
    assert torch.isfinite(out).all()
    assert engine.pending[[2, 0, 4]].tolist() == metadata["num_accepted_tokens"]
    runner.drain(3)
    assert not engine.pending.any()
    assert runner.last_miss_reason is None


def test_a_replay_asks_the_driver_nothing(device, monkeypatch):
    """B71: whether a stream captures is asked while recording only; replays of a step make no such query."""
    toy = Toy(device)
    toy.step.capture(progress=False)
    toy.admit(0, [1, 2, 3], 4)
    toy.stage({0: (0, 1, 3)})
    asked = []
    for name in ("is_current_stream_capturing", "synchronize", "mem_get_info", "memory_snapshot"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: asked.append(name))
    for _ in range(3):
        toy.step.replay(3)
    assert asked == []


def test_a_device_that_refuses_early_launches_runs_without_them(monkeypatch, caplog):
    """B71: where programmatic launch cannot be had, plain kernels are chosen once, with one warning and the reason."""
    from graphrt import backends
    from graphrt.kernels import conv, fold, plan, stage, verify

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(backends, "_choices", {})
    backends._log_once.cache_clear()
    facts = backends.Facts(torch.device("cuda", 0), torch.float32, 128, True, -5.0, 8, torch.bfloat16)
    chosen = [backends.choose("fp32_deferred", facts) for _ in range(3)]
    assert [choice.backend.name for choice in chosen] == ["triton"] * 3
    assert len([r for r in caplog.records if r.name == "graphrt"]) == 1
    for module in (conv, fold, plan, stage, verify):
        with open(module.__file__) as file:
            assert "launch_pdl" not in file.read()


def test_a_later_larger_capture_moves_nothing_under_an_earlier_one(device):
    """B72: larger steps and captures after a small one use what was reserved before it; more is refused."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(5)
    runner = make(engine, [2])
    runner.capture(progress=False)

    def places():
        plan = engine.context.plan
        tensors = [getattr(plan, name) for name in plan.__slots__] + [runner.inputs.query_start_loc, engine.pending]
        return [t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)]

    before = places()
    for number, n in enumerate((2, 6, 2, 6, 1)):
        if number == 3:
            runner.capture(progress=False, sizes=[6])
        batch, x = Batch(rng, engine, n, least_rows=n), engine.window_inputs(rng)
        batch.verify(engine, x), batch.verify(twin, x)
        runner.inputs.stage(**batch.host())
        runner.commit(n)
        batch.commit(twin)
        assert_same(engine.state(), twin.state(), f"step {number}")
    assert places() == before
    with pytest.raises(ValueError, match=r"^sizes: expected"):
        runner.capture(progress=False, sizes=[7])
    with pytest.raises(ValueError, match=r"^num_reqs: expected 0\.\.6"):
        runner.commit(7)


def test_a_closed_recording_takes_nothing_from_its_neighbour(device):
    """B74: A and B are replayed, B is closed, memory is reused; A's results stay right ten times over."""
    a, w = torch.randn(2, 16, 16, device=device)
    first, second = (record(lambda n=n: (a @ w) @ w * n, device=device) for n in (1, 2))
    for recording in (first, second):
        recording.replay()
    second.close()
    gc.collect()
    noise = [torch.full((16, 16), float("nan"), device=device) for _ in range(50)]
    for step in range(10):
        a.mul_(0.5 + step / 10)
        first.replay()
        torch.testing.assert_close(first.outputs, (a @ w) @ w)
    assert all(t.isnan().all() for t in noise)


def test_what_was_released_raises_and_launches_nothing(device):
    """B76: after `close` every replay, flush, drain and dummy raises; what is pending is kept for a new runner."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(6)
    runner = make(engine, [3])
    runner.capture(progress=False)
    batch, x = Batch(rng, engine, 3, least_rows=3, tokens=3), engine.window_inputs(rng)
    batch.accepted = [2, 3, 1]
    batch.verify(engine, x), batch.verify(twin, x)
    runner.inputs.stage(**batch.host())
    runner.commit(3)
    batch.commit(twin)
    runner.close()
    before = engine.state()
    for call in (runner.commit, runner.flush, runner.drain):
        for n in (0, 1, 3, 6):
            with pytest.raises(RuntimeError, match=r"^replay after close"):
                call(n)
    assert_same(engine.state(), before, "after refused calls")
    again = make(engine, [3])
    again.capture(progress=False)
    again.inputs.stage(**batch.host())
    again.drain(3)
    twin.context.drain(int32(batch.state_indices, device), int32(batch.record_rows, device), twin.pending)
    assert_same(engine.state(), twin.state(), "drained by the new runner")
    assert not RecordSlots(6, device).pending.any()


def test_an_idle_rank_cannot_replay_what_was_released(device):
    """B76: the dummy step of an idle rank raises after `close` as well, and the staged step is as it was."""
    toy = Toy(device)
    toy.step.capture(progress=False)
    toy.admit(0, [1, 2, 3], 4)
    toy.stage({0: (0, 1, 3)})
    toy.step.close()
    before = toy.everything()
    for call in (
        lambda: toy.step.replay(3),
        lambda: toy.step.replay_dummy(2),
        lambda: toy.step.replay_dummy(2, dcp=True),
    ):
        with pytest.raises(RuntimeError, match=r"^replay after close"):
            call()
    assert_same(toy.everything(), before, "after refused calls")


def test_memory_that_went_to_sleep_is_found_before_a_replay(device):
    """B76: with checks on, a state pool whose memory was released raises at the replay, which then launches nothing."""
    state, out = torch.ones(64, device=device), torch.zeros(64, device=device)
    recording = record(
        lambda: launch.launch("graphrt.test", lambda a, b: b.copy_(a), state, out), device=device, check=True
    )
    out.zero_()
    state.untyped_storage().resize_(0)
    with pytest.raises(CaptureError, match=r"the memory of graphrt\.test argument 0|a tensor of launch 0"):
        recording.replay()
    assert not out.any()
