"""The commit runner: replay equals eager bit for bit, capture changes nothing, and misuse says so."""

import logging
import random
import re

import pytest
import torch
from engine import DIM, HEADS, WINDOW, Batch, Engine, assert_same, int32

from graphrt import RecordSlots, align_eager_mask, allocate_records, error_counts, reset_errors
from graphrt.capture import CaptureError, CommitRunner, StepInputs, dummy_inputs
from graphrt.capture import sizes as sizes_module
from graphrt.capture.progress import CaptureProgress

SIZE = 16
WIDTH = 8


def make(engine, sizes=None, width=0, **options):
    inputs = StepInputs(engine.rows, WINDOW, engine.device, block_table_width=width)
    return CommitRunner(engine.context, engine.pending, inputs, sizes, **options)


def steps_equal(device, sizes, steps, *, most=6, eager=False, seed=0, **options):
    """Random steps by replay on one engine, eagerly with the batch's own tensors on its twin; returns the runner."""
    engine, twin, rng = Engine(device, **options), Engine(device, **options), random.Random(seed)
    runner = make(engine, sizes, eager=eager)
    runner.capture(progress=False)
    for step in range(steps):
        batch = Batch(rng, engine, most)
        x = engine.window_inputs(rng)
        assert_same({"out": batch.verify(engine, x)}, {"out": batch.verify(twin, x)}, f"outputs of step {step}")
        runner.inputs.stage(**batch.host())
        runner.commit(batch.n)
        batch.commit(twin, eager=eager)
        assert_same(engine.state(), twin.state(), f"after commit {step}")
        fold = rng.choice(("flush", "drain", None, None))
        if fold == "drain":
            runner.drain(batch.n)
            twin.context.drain(int32(batch.state_indices, device), int32(batch.record_rows, device), twin.pending)
            assert_same(engine.state(), twin.state(), f"after drain {step}")
        elif fold == "flush":
            # The rows of a flush are in the commit of the same step: here with nothing accepted.
            runner.flush(batch.n)
            twin.context.flush(int32(batch.state_indices, device), int32(batch.record_rows, device), twin.pending)
            batch.accepted = [0] * batch.n
            runner.inputs.stage(**batch.host())
            runner.commit(batch.n)
            batch.commit(twin, eager=eager)
            assert_same(engine.state(), twin.state(), f"after flush {step}")
    return runner


@pytest.mark.parametrize("sizes", [None, [6], [1, 2, 6]], ids=["powers of two", "one", "three"])
@pytest.mark.parametrize("eager", [False, True], ids=["deferred", "eager mask"])
def test_replay_equals_eager_over_random_steps(device, sizes, eager):
    """Slots, ragged lengths, counts, requests and batch sizes change at every step (B01, B02, B06, B10, B52)."""
    runner = steps_equal(device, sizes, 14, eager=eager)
    assert runner.last_miss_reason is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_interpreted_kernels_replay_on_the_tape():
    """The Triton backend's launches are what is recorded, as on a GPU, and not what they do inside."""
    assert steps_equal("cpu", [2], 2, most=1, num_layers=1, backend="triton").last_miss_reason is None


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_live_count_fits_its_captured_size(device, size):
    """For each number of live rows up to the size, padding rows behind them touch nothing (B21)."""
    for most in range(1, size + 1):
        runner = steps_equal(device, [size], 3, most=most, seed=most)
        assert runner.last_miss_reason is None


@pytest.mark.parametrize("eager", [False, True], ids=["rule", "eager mask"])
def test_align_mode_equals_eager(device, eager):
    """Blocks, boundaries and rule rows come from the static inputs; the plan folds rule rows by itself (B41, B44)."""
    engine, twin, rng = (Engine(device, slots=6 * WIDTH + 1), Engine(device, slots=6 * WIDTH + 1), random.Random(5))
    tables = torch.arange(1, 6 * WIDTH + 1, dtype=torch.int32).view(6, WIDTH)
    computed = [0, 3, 14, 15, 16, 40]
    runner = make(engine, width=WIDTH, mamba_block_size=SIZE, eager=eager)
    runner.capture(progress=False)
    reset_errors(device)
    crossed = 0
    for step in range(20):
        batch = Batch(rng, engine, 6, slot_of=lambda row: int(tables[row, max(computed[row] - 1, 0) // SIZE]))
        x = engine.window_inputs(rng)
        batch.verify(engine, x), batch.verify(twin, x)
        counts = batch.by_request([computed[row] for row in batch.record_rows], fill=0)
        blocks = batch.by_request([tables[row].tolist() for row in batch.record_rows], fill=[1] * WIDTH)
        align = {"block_table": int32(blocks, device), "num_computed_tokens": int32(counts, device)}
        offsets, requests = int32(batch.query_start_loc, device), int32(batch.requests, device)
        mask = align_eager_mask(align["num_computed_tokens"], offsets, SIZE, request_indices=requests)
        batch.eager = mask.tolist()
        runner.inputs.stage(**batch.host(), **align)
        runner.commit(batch.n)
        batch.commit(twin, eager=eager, mamba_block_size=SIZE, **align)
        assert_same(engine.state(), twin.state(), f"step {step}")
        for row, accepted in zip(batch.record_rows, batch.accepted, strict=True):
            crossed += (computed[row] + accepted) // SIZE > computed[row] // SIZE
            computed[row] += accepted
            if computed[row] > SIZE * (WIDTH - 1):
                computed[row] = 0
    assert crossed >= 4
    counts = error_counts(device)
    assert (counts.pop("eager_missed") == 0) == eager
    assert not any(counts.values())


@pytest.mark.parametrize("dcp", [False, True], ids=["padding", "dcp"])
@pytest.mark.parametrize("align", [False, True], ids=["plain", "align"])
def test_capture_changes_no_byte(device, dcp, align):
    """States full of live values, also in slots 0, 1, ..., are byte-equal after all sizes and modes (B18, B31)."""
    engine = Engine(device)
    engine.pending.copy_(int32([3, 1, 0, 2, 4, 1], device))
    before = engine.state()
    reset_errors(device)
    options = {"mamba_block_size": SIZE, "eager": True} if align else {}
    runner = make(engine, width=2 * align, **options)
    runner.capture(progress=False, dcp=dcp)
    assert_same(engine.state(), before, "after capture")
    assert not any(error_counts(device).values())
    assert runner.capture_sizes == [1, 2, 4, 6]


@pytest.mark.parametrize("mode", ["commit", "flush", "drain"])
@pytest.mark.parametrize("dcp", [False, True], ids=["padding", "dcp"])
def test_a_size_may_be_captured_between_stage_and_replay(device, mode, dcp):
    """A lazy capture with live state and pending counts: the staged step is put back and happens once (B19)."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(3)
    runner = make(engine, [1])
    runner.capture(progress=False)
    batch = Batch(rng, engine, 4, least_rows=3)
    x = engine.window_inputs(rng)
    for one in (engine, twin):
        batch.verify(one, x)
        one.pending.copy_(int32([2, 1, 2, 0, 2, 1], device))
    runner.inputs.stage(**batch.host())
    before = engine.state()
    staged = runner.inputs.rows(6)
    held = [getattr(staged, name).clone() for name in staged.__slots__]
    runner.capture(progress=False, sizes=[4], dcp=dcp)
    assert_same(engine.state(), before, "after the lazy capture")
    for name, want in zip(staged.__slots__, held, strict=True):
        assert torch.equal(getattr(staged, name), want), name
    getattr(runner, mode)(batch.n)
    assert runner.last_miss_reason is None and runner.capture_sizes == [1, 4]
    if mode == "commit":
        batch.commit(twin)
    else:
        slots, rows = int32(batch.state_indices, device), int32(batch.record_rows, device)
        getattr(twin.context, mode)(slots, rows, twin.pending)
    assert_same(engine.state(), twin.state(), "after the step")


def test_replays_of_nothing_accepted_are_stationary(device):
    """50 commits of the same staged step with nothing accepted leave every byte, the plan's too (B09, B31)."""
    engine, rng = Engine(device), random.Random(1)
    runner = make(engine, [4])
    runner.capture(progress=False)
    batch = Batch(rng, engine, 4, least_rows=3)
    batch.verify(engine, engine.window_inputs(rng))
    runner.inputs.stage(**batch.host())
    runner.commit(batch.n)
    runner.drain(batch.n)
    batch.accepted = [0] * batch.n
    runner.inputs.stage(**batch.host())

    def everything():
        plan = engine.context.plan
        return engine.state() | {name: getattr(plan, name).clone() for name in plan.__slots__}

    runner.commit(batch.n)
    before = everything()
    for _ in range(50):
        runner.commit(batch.n)
    assert_same(everything(), before, "after 50 replays")
    assert not engine.pending.any()


@pytest.mark.parametrize("dcp", [False, True], ids=["padding", "dcp"])
def test_dummy_steps_between_real_ones_change_nothing(device, dcp):
    """An idle rank's commit, flush and drain on dummies leave the last real rows alone (B12, B13, B15)."""
    engine, rng = Engine(device), random.Random(2)
    runner = make(engine, [4])
    runner.capture(progress=False)
    batch = Batch(rng, engine, 4, least_rows=3)
    batch.record_rows[0], batch.state_indices[0] = 0, 1
    batch.verify(engine, engine.window_inputs(rng))
    runner.inputs.stage(**batch.host())
    runner.commit(batch.n)
    before = engine.state()
    for _ in range(3):
        dummy_inputs(runner.inputs, 4, dcp=dcp)
        for mode in (runner.commit, runner.flush, runner.drain):
            mode(4)
    assert_same(engine.state(), before, "after dummies")


def test_a_parked_request_keeps_its_records_and_count(device):
    """A request that is absent for ten padded steps returns with its block, records and pending intact (B20)."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(4)
    runner = make(engine, [4])
    runner.capture(progress=False)
    parked = 1
    for step in range(12):
        batch = Batch(rng, engine, 2)
        home = [parked] if step in (0, 11) else []
        rows = home + rng.sample([0, 2], batch.n - len(home))
        batch.record_rows, batch.state_indices = rows, [row + 1 for row in rows]
        x = engine.window_inputs(rng)
        for one in (engine, twin):
            batch.verify(one, x)
        runner.inputs.stage(**batch.host())
        runner.commit(batch.n)
        batch.commit(twin)
        assert_same(engine.state(), twin.state(), f"step {step}")


def test_two_batches_in_flight_have_inputs_of_their_own(device):
    """Commits that arrive late use their own batch's rows and counts, and skip a row freed since (B24, B30)."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(6)
    runners = [make(engine, [2]), make(engine, [2])]
    batches = [Batch(rng, engine, 2, least_rows=2) for _ in range(3)]
    for batch, rows in zip(batches, ([0, 1], [2, 3], [0, 1]), strict=True):
        batch.record_rows, batch.state_indices = rows, [row + 1 for row in rows]
    for runner in runners:
        runner.capture(progress=False)
    x = [engine.window_inputs(rng) for _ in batches]
    batches[0].record_rows = [0, 1]

    def verify(i):
        batches[i].verify(engine, x[i]), batches[i].verify(twin, x[i])

    verify(0)
    runners[0].inputs.stage(**batches[0].host())
    verify(1)
    runners[1].inputs.stage(**batches[1].host())
    # The second request of the first batch was freed meanwhile.
    batches[0].record_rows = [0, -1]
    runners[0].inputs.stage(**batches[0].host())
    runners[0].commit(2)
    batches[0].commit(twin)
    verify(2)
    runners[1].commit(2)
    batches[1].commit(twin)
    runners[0].inputs.stage(**batches[2].host())
    runners[0].commit(2)
    batches[2].commit(twin)
    assert_same(engine.state(), twin.state(), "both batches")


def test_counts_are_those_of_the_time_of_staging(device):
    """The sampler may write its next counts as soon as a step is staged (B54)."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(8)
    runner = make(engine, [4])
    runner.capture(progress=False)
    batch = Batch(rng, engine, 4, least_rows=4, tokens=WINDOW)
    accepted = int32(batch.by_request(batch.accepted), device)
    runner.inputs.stage(**batch.host() | {"num_accepted_tokens": accepted})
    accepted.fill_(0)
    runner.commit(4)
    batch.commit(twin)
    assert torch.equal(engine.pending, twin.pending)


@pytest.mark.gpu
def test_whole_steps_are_queued_behind_a_busy_device():
    """Ten steps, staged from the host and committed without any wait, equal the same steps one by one (B55)."""
    engine, twin, rng = Engine("cuda"), Engine("cuda"), random.Random(9)
    runner = make(engine)
    runner.capture(progress=False)
    batches = [Batch(rng, engine, 6) for _ in range(10)]
    x = [engine.window_inputs(rng) for _ in batches]
    for batch, inputs in zip(batches, x, strict=True):
        batch.verify(twin, inputs)
        batch.commit(twin)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    for batch, inputs in zip(batches, x, strict=True):
        runner.inputs.stage(**batch.host())
        engine.verify(runner.inputs.rows(batch.n), inputs)
        runner.commit(batch.n)
    assert_same(engine.state(), twin.state(), "after ten queued steps")


def test_a_miss_runs_eagerly_and_says_why_once(device, caplog):
    """Over the largest size, or in a mode not captured, the same commit runs without a graph."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(10)
    runner = make(engine, [2])
    runner.capture(progress=False, modes=["commit"])
    batch = Batch(rng, engine, 6, least_rows=5)
    x = engine.window_inputs(rng)
    with caplog.at_level(logging.WARNING, logger="graphrt"):
        for _ in range(2):
            batch.verify(engine, x), batch.verify(twin, x)
            runner.inputs.stage(**batch.host())
            runner.commit(batch.n)
            assert "the largest captured size is 2" in runner.last_miss_reason
            batch.commit(twin)
            runner.drain(2)
            assert "it was not captured (only commit)" in runner.last_miss_reason
            slots, rows = int32(batch.state_indices[:2], device), int32(batch.record_rows[:2], device)
            twin.context.drain(slots, rows, twin.pending)
    assert_same(engine.state(), twin.state(), "after misses")
    assert len([r for r in caplog.records if r.name == "graphrt"]) == 2


def test_an_empty_batch_commits_nothing(device):
    engine = Engine(device)
    engine.pending.fill_(2)
    runner = make(engine, [2])
    runner.capture(progress=False, modes=["commit"])
    before = engine.state()
    runner.inputs.stage(num_reqs=0)
    runner.commit(0)
    runner.flush(0)
    assert_same(engine.state(), before, "after an empty step")


def test_no_rows_of_a_staged_step_are_none(device):
    """Asked for no row, a replay commits no row of what is still staged, as the eager run does."""
    engine = Engine(device)
    runner = make(engine, [1, 2])
    runner.capture(progress=False)
    runner.inputs.stage(**Batch(random.Random(1), engine, 2, 2).host())
    engine.pending.fill_(2)
    before = engine.state()
    for call in (runner.commit, runner.flush, runner.drain):
        call(0)
    assert_same(engine.state(), before, "after no rows")


def test_a_wrong_order_of_calls_is_an_error(device):
    """Replay before capture, and anything but close after close."""
    runner = make(Engine(device), [2])
    with pytest.raises(RuntimeError, match=r"^replay before capture"):
        runner.commit(1)
    runner.capture(progress=False)
    runner.capture(progress=False)
    runner.commit(1)
    runner.close()
    runner.close()
    for call in (lambda: runner.commit(1), lambda: runner.drain(2)):
        with pytest.raises(RuntimeError, match=r"^replay after close"):
            call()
    with pytest.raises(RuntimeError, match=r"^capture after close"):
        runner.capture(progress=False)


def test_bad_arguments_are_named(device):
    engine = Engine(device)
    runner = make(engine, [2])
    for call, message in (
        (lambda: make(engine, [0, 2]), "capture_sizes: expected at least one int, each in 1..6"),
        (lambda: make(engine, [7]), "capture_sizes: expected at least one int, each in 1..6"),
        (lambda: make(engine, mamba_block_size=SIZE), "inputs: expected a block_table_width of at least 1"),
        (lambda: make(engine, width=1, mamba_block_size=3), "mamba_block_size: expected at least one window"),
        (lambda: runner.capture(modes=["verify"]), "modes: expected some of commit, flush, drain, got ['verify']"),
        (lambda: runner.commit(7), "num_reqs: expected 0..6"),
        (lambda: runner.commit(-1), "num_reqs: expected 0..6"),
        (
            lambda: CommitRunner(engine.context, engine.pending, StepInputs(6, 5, device)),
            "inputs: expected spec_query_len 4",
        ),
        (
            lambda: CommitRunner(engine.context, engine.pending, StepInputs(7, 4, device)),
            "inputs: expected at most 6 rows",
        ),
        (
            lambda: CommitRunner(engine.context, engine.pending[:5], StepInputs(6, 4, device)),
            "pending: expected 6 entries",
        ),
        (
            lambda: CommitRunner(engine.context, engine.pending[:1].expand(6), StepInputs(6, 4, device)),
            "pending: expected entries with memory of their own",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call()


def test_checked_mode_reads_what_was_staged(device, monkeypatch):
    """With GRAPHRT_CHECK a replayed commit closes its step, and a bad staged value raises before the replay."""
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    engine, rng = Engine(device), random.Random(12)
    runner = make(engine, [4])
    runner.capture(progress=False)
    batch = Batch(rng, engine, 4, least_rows=2)
    for _ in range(3):
        batch.verify(engine, engine.window_inputs(rng))
        runner.inputs.stage(**batch.host())
        runner.commit(batch.n)
    before = engine.state()
    runner.inputs.stage(**batch.host() | {"num_accepted_tokens": [WINDOW + 1] * 6})
    with pytest.raises(ValueError, match=r"^num_accepted_tokens, row 0: expected 0\.\."):
        runner.commit(batch.n)
    runner.inputs.stage(**batch.host() | {"record_rows": [0] * batch.n})
    for fold in (runner.flush, runner.drain):
        with pytest.raises(ValueError, match=r"^record_rows, row 1: expected a row of its own"):
            fold(batch.n)
    assert_same(engine.state(), before, "after refusals")


@pytest.mark.parametrize("mode", ["commit", "flush", "drain"])
def test_checked_mode_names_a_live_row_behind_the_step(device, monkeypatch, mode):
    """A replay takes along what is staged up to its size, an eager call does not: so many rows are not one step."""
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    engine, rng = Engine(device), random.Random(12)
    runner, batch = make(engine, [4]), Batch(rng, engine, 4, least_rows=4)
    runner.capture(progress=False)
    runner.inputs.stage(**batch.host())
    before = engine.state()
    with pytest.raises(ValueError, match=r"^num_reqs: expected 4, for row 3 is live as well, got 2"):
        getattr(runner, mode)(2)
    assert_same(engine.state(), before, "after the refusal")
    runner.inputs.stage(**batch.host() | {"num_reqs": 2})
    getattr(runner, mode)(2)


def test_a_commit_that_could_not_be_replayed_closes_no_step(device, monkeypatch):
    """Its rows are still between verify and commit: the next verify of them says so, until the commit has run."""
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    engine, rng = Engine(device), random.Random(12)
    runner, batch = make(engine, [4]), Batch(rng, engine, 4, least_rows=2)
    x = engine.window_inputs(rng)
    batch.verify(engine, x)
    runner.inputs.stage(**batch.host())
    with pytest.raises(RuntimeError, match=r"^replay before capture"):
        runner.commit(batch.n)
    with pytest.raises(RuntimeError, match=r"was verified and not committed"):
        batch.verify(engine, x)
    runner.capture(progress=False)
    runner.commit(batch.n)
    batch.verify(engine, x)


def test_memory_is_reported_by_graph_and_in_total(device):
    """Commit, flush and drain allocate nothing in a graph; the forecast agrees (B97)."""
    runner = make(Engine(device), [1, 4])
    runner.capture(progress=False)
    memory = runner.memory()
    assert sorted(memory.per_graph) == sorted(f"{mode}/{n}" for mode in ("commit", "flush", "drain") for n in (1, 4))
    assert memory.total == sum(memory.per_graph.values()) == 0
    assert memory.forecast == (0 if device.type == "cuda" else None)


def test_sizes_are_recorded_largest_first_and_the_smallest_that_fits_is_replayed(device, monkeypatch):
    """All in one pool; a batch between two sizes takes the larger one, also after a size was added, and one of no rows
    none.
    """
    made, replayed = [], []
    make_recording = sizes_module.record

    def record(fn, **options):
        made.append((options["name"], options["pool"]))
        recording = make_recording(fn, **options)
        replay = recording.replay
        recording.replay = lambda: (replayed.append(recording.name), replay())
        return recording

    monkeypatch.setattr(sizes_module, "record", record)
    runner = make(Engine(device), [1, 6])
    runner.capture(progress=False, modes=["commit", "drain"])
    runner.capture(progress=False, sizes=[3, 1], modes=["commit"])
    assert [name for name, _ in made] == ["commit/6", "drain/6", "commit/1", "drain/1", "commit/3"]
    assert len({pool for _, pool in made}) == 1
    for n in range(7):
        runner.commit(n)
    assert replayed == [f"commit/{n}" for n in (1, 3, 3, 6, 6, 6)]


@pytest.mark.parametrize("dcp", [False, True], ids=["padding", "dcp dummies"])
def test_a_capture_can_prove_that_it_changed_nothing(device, dcp):
    """The switch for a first capture in production: silent if all is well, else the changed state is named (B18)."""
    engine, rng = Engine(device), random.Random(11)
    batch = Batch(rng, engine, 4, least_rows=4, tokens=3)
    batch.verify(engine, engine.window_inputs(rng))
    batch.commit(engine)
    runner = make(engine, [2])
    runner.capture(progress=False, dcp=dcp, prove_neutral=True)
    for name, state in {
        "checkpoint[1]": engine.layers[1].kv_cache[1],
        "convolution state[0]": engine.layers[0].kv_cache[0],
        "correction[0]": engine.layers[0].recoverssm_records.correction,
        "key and gate[1]": engine.layers[1].recoverssm_records.key_gate,
        "pending": engine.pending,
    }.items():
        runner = make(engine, [2])
        runner._works["commit"] = lambda n, state=state: state[3:4].add_(1)
        runner._recordings._works["commit"] = runner._works["commit"]
        with pytest.raises(CaptureError, match=rf"state_neutral: {re.escape(name)} changed in entry 3"):
            runner.capture(progress=False, modes=["commit"], dcp=dcp, prove_neutral=True)


def test_a_rebound_tensor_is_found_where_the_context_checks(device):
    """With `check=True` a replay finds that `pending` has other memory than at the capture (B04)."""
    engine = Engine(device)
    context = type(engine.context).create(
        engine.layers, spec_query_len=WINDOW, max_num_reqs=6, backend=engine.backend, check=True
    )
    runner = CommitRunner(context, engine.pending, StepInputs(6, WINDOW, device), [2])
    runner.capture(progress=False)
    runner.commit(1)
    old = engine.pending.data
    engine.pending.data = torch.zeros(6, dtype=torch.int32, device=device)
    for call in (runner.commit, runner.flush, runner.drain):
        with pytest.raises(CaptureError, match=r"has other memory now since it was recorded; write into"):
            call(1)
    engine.pending.data = old
    runner.commit(1)


@pytest.mark.parametrize(
    ("name", "rebind"),
    [
        ("inputs.state_indices", lambda layer, inputs: setattr(inputs.state_indices, "data", inputs.eager.int())),
        ("ledger.pending", lambda layer, inputs: setattr(inputs.ledger, "pending", inputs.ledger.pending.clone())),
        (
            "layers[1].kv_cache[0]",
            lambda layer, inputs: setattr(layer, "kv_cache", [t.clone() for t in layer.kv_cache]),
        ),
        ("layers[1].A_log", lambda layer, inputs: setattr(layer, "A_log", layer.A_log.clone())),
        (
            "layers[1].recoverssm_records.correction",
            lambda layer, inputs: setattr(
                layer, "recoverssm_records", allocate_records(6, HEADS, WINDOW, DIM, torch.float32, inputs.device)
            ),
        ),
    ],
    ids=["static inputs", "ledger", "cache", "parameter", "records"],
)
def test_a_buffer_that_its_owner_replaced_is_found_where_the_context_checks(device, name, rebind):
    """The old tensor is as it was, and a replay would go on with it; the error names what was replaced (B04, B72)."""
    engine = Engine(device)
    context = type(engine.context).create(
        engine.layers, spec_query_len=WINDOW, max_num_reqs=6, backend=engine.backend, check=True
    )
    ledger = RecordSlots(6, device)
    inputs = StepInputs(6, WINDOW, device, ledger=ledger)
    runner = CommitRunner(context, ledger.pending, inputs, [2])
    runner.capture(progress=False)
    runner.commit(1)
    rebind(engine.layers[1], inputs)
    for call in (runner.commit, runner.flush, runner.drain):
        with pytest.raises(CaptureError, match=rf"static tensor '{re.escape(name)}' is not the one that was recorded"):
            call(1)


def test_a_mode_named_twice_is_recorded_once(device):
    """Modes may come in any order and number, as sizes may."""
    engine, calls = Engine(device), []
    runner = make(engine, [2])
    commit = runner._recordings._works["commit"]
    runner._recordings._works["commit"] = lambda n: (calls.append(n), commit(n))
    runner.capture(progress=False, modes=["commit", "commit"])
    assert len(calls) == (3 if device.type == "cuda" else 2)  # the forecast, the warm-up, the recording


def test_counts_of_another_ledger_are_refused(device):
    """A new owner's row starts with nothing pending in its own ledger's counts only (B23)."""
    engine = Engine(device)
    inputs = StepInputs(6, WINDOW, device, ledger=RecordSlots(6, device))
    with pytest.raises(ValueError, match=r"^pending: expected the counts of the inputs' ledger"):
        CommitRunner(engine.context, engine.pending, inputs)


@pytest.mark.gpu
def test_the_forecast_is_what_the_graphs_take(monkeypatch):
    """B97: within a tenth of the measured growth; eight sizes in one pool take at most 1.2 times the largest."""
    # Of this process alone: others on the card come and go.
    monkeypatch.setattr(sizes_module, "_free_bytes", lambda device: -torch.cuda.memory_reserved(device))
    buffer = torch.zeros(64, 1 << 20, device="cuda")

    def work(n):
        return ((buffer[:n] * 2) + 1).sum()

    recordings = sizes_module.SizedRecordings({"work": work}, 64, torch.device("cuda", 0))
    recordings.capture(["work"], [1, 2, 4, 8, 16, 32, 64], lambda n: None, False)
    memory = recordings.memory()
    assert memory.per_graph["work/64"] * 1.2 >= memory.total == sum(memory.per_graph.values())
    assert abs(memory.forecast - memory.total) <= 0.1 * memory.total
    assert memory.device >= memory.total
    recordings.close()
    recordings.close()


def test_the_progress_tells_the_free_memory(monkeypatch, capsys):
    """On a GPU each line has the free device memory; the last one recordings, seconds and both kinds of MiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (345 << 20, 1 << 40))
    with CaptureProgress(2, torch.device("cuda"), True) as progress:
        progress.update("commit, 6 rows")
        progress.advance()
        progress.advance()
        progress.finish(2, 1.25, 3 << 20, 5 << 20)
    shown = capsys.readouterr().out
    assert "captured 2 recordings in 1.2 s, 3.0 MiB in their pool, 5.0 MiB of device memory\n" in shown
    assert "345 MiB free" in shown and "2/2" in shown


def test_capture_shows_its_progress(device, capsys):
    """Largest size first; the last line has the number of recordings, seconds and MiB."""
    runner = make(Engine(device), [1, 2])
    runner.capture(progress=True)
    shown = capsys.readouterr().out
    assert re.search(r"6 recordings in \d+\.\d s, 0\.0 MiB", shown)
