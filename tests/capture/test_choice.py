"""Eager or deferred by capture size: the measured table, the user's word, and what runner and step make of it."""

import json
import logging
import random
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from engine import WINDOW, Batch, Engine, assert_same, int32
from toy import Toy

from graphrt.capture import CommitRunner, DecodeStep, StepInputs
from graphrt.choice import TABLE, CommitChoice, StepShape, choose_commit, first_deferred, load_table

ROOT = Path(__file__).parents[2]
K3 = StepShape("NVIDIA H200", "fp32_deferred", 69, 12, 128, 8)


def table_for(shape, deferred_from):
    return [asdict(K3) | {"deferred_from": 9}, asdict(shape) | {"deferred_from": deferred_from}]


def test_the_shipped_table_answers_for_the_h200():
    """No size commits eagerly, with launches that overlap; the sentence has device, shape and numbers."""
    choice = choose_commit(K3)
    assert not any(choice.eager(n) for n in (1, 2, 64, 256))
    assert choice.reason.startswith("deferred at every size: measured for fp32_deferred on NVIDIA H200")
    assert "69 layers of 12 heads of 128, window 8 (the shipped table)" in choice.reason


@pytest.mark.parametrize("window", [4, 8])
def test_the_triton_backend_commits_few_rows_eagerly_on_the_h200(window):
    """Its replay walks the pending tokens in every verify, which costs more than a fold below 32 rows."""
    choice = choose_commit(StepShape(**asdict(K3) | {"backend": "triton", "spec_query_len": window}))
    assert [n for n in (1, 16, 31, 32, 256) if choice.eager(n)] == [1, 16, 31]


@pytest.mark.parametrize(
    "change",
    [{"device": "NVIDIA H100"}, {"backend": "torch"}, {"layers": 20}, {"heads": 24}, {"spec_query_len": 3}],
    ids=lambda change: next(iter(change)),
)
def test_what_was_not_measured_is_deferred(change):
    """Another device, backend or shape is deferred at every size, and the reason says so."""
    choice = choose_commit(StepShape(**asdict(K3) | change))
    assert not any(choice.eager(n) for n in (1, 2, 256))
    assert choice.reason.startswith("deferred at every size: the shipped table has no measurement of")


@pytest.mark.parametrize(
    ("asked", "eager_sizes", "reason"),
    [
        ("eager", [1, 4, 9], "eager at every size, as asked for"),
        ("deferred", [], "deferred at every size, as asked for"),
        (table_for(K3, 5), [1, 4], "eager below 9 rows"),
        ([asdict(K3) | {"deferred_from": None}], [1, 4, 9], "eager at every size: measured for"),
        ([asdict(K3) | {"deferred_from": 1}], [], "deferred at every size: measured for"),
        ([], [], "deferred at every size: the given table has no measurement of"),
        (CommitChoice(4, "a test"), [1], "a test"),
    ],
    ids=["eager", "deferred", "first entry", "never", "always", "empty", "settled"],
)
def test_the_user_has_the_last_word(asked, eager_sizes, reason):
    choice = choose_commit(K3, asked)
    if asked and isinstance(asked, list) and asked[0]["deferred_from"] == 9:
        eager_sizes = [1, 4]
    assert [n for n in (1, 4, 9) if choice.eager(n)] == eager_sizes
    assert choice.reason.startswith(reason)


def test_a_table_is_read_from_a_path(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(table_for(K3, 2)[1:]))
    assert choose_commit(K3, path) == CommitChoice(
        2, f"eager below 2 rows, deferred from there on: measured for {K3} (mine.json)"
    )


@pytest.mark.parametrize(
    "asked", ["sometimes", 3, {"eager": 1}, [1], [{"device": "x"}], [{"deferred_from": 0}], [{"deferred_from": True}]]
)
def test_a_choice_that_is_none_is_refused(asked):
    with pytest.raises(ValueError, match=r"^choice"):
        choose_commit(K3, asked)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "broken.json"
    for text in ("{", "{}", '[{"deferred_from": "2"}]'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"^choice"):
            choose_commit(K3, path)


@pytest.mark.parametrize(
    ("measured", "first"),
    [
        ([(1, 2.0, 1.0), (2, 1.0, 2.0), (4, 1.0, 2.0)], 2),
        ([(4, 1.0, 2.0), (2, 2.0, 1.0), (1, 1.0, 2.0)], 4),
        ([(1, 1.0, 2.0), (8, 1.0, 1.0)], 1),
        ([(1, 1.0, 2.0), (8, 2.0, 1.0)], None),
    ],
    ids=["above the last loss", "any order", "no loss", "lost at the largest"],
)
def test_deferring_begins_above_the_last_loss(measured, first):
    assert first_deferred(measured) == first


def test_the_shipped_table_is_what_the_kept_results_say(tmp_path, monkeypatch):
    """The tools derive the entries of the H200 from their committed results, and keep entries of other devices."""
    path = tmp_path / "choice.json"
    other = asdict(K3) | {"device": "another", "deferred_from": 3}
    path.write_text(json.dumps([other, asdict(K3) | {"deferred_from": 77}]))
    kept = ROOT / "tools" / "results" / "h200"
    monkeypatch.syspath_prepend(ROOT / "tools")
    for tool, given in (
        ("bench_peers.py", ["--read", kept / "peers.csv", "--facts", kept / "peers.json"]),
        ("bench_step.py", ["--from", kept / "step.json"]),
    ):
        monkeypatch.setattr(sys, "argv", [tool, *map(str, given), "--choose", str(path)])
        runpy.run_path(str(ROOT / "tools" / tool))["main"]()
    derived = load_table(path)
    assert derived[0] == other
    assert derived[1:] == [entry for entry in load_table(TABLE) if entry["device"] == "NVIDIA H200"]


def test_a_shape_that_was_not_measured_whole_gets_no_entry(tmp_path, monkeypatch, capsys):
    """A run that ended early has not seen the sizes from which on deferring is faster."""
    kept, path, lacking = ROOT / "tools" / "results" / "h200", tmp_path / "choice.json", tmp_path / "peers.csv"
    lines = (kept / "peers.csv").read_text().splitlines(keepends=True)
    lacking.write_text("".join(line for line in lines if not line.startswith("128,4,2,")))
    monkeypatch.syspath_prepend(ROOT / "tools")
    given = ["--read", lacking, "--facts", kept / "peers.json", "--choose", path]
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *map(str, given)])
    runpy.run_path(str(ROOT / "tools" / "bench_peers.py"))["main"]()
    assert {(entry["backend"], entry["spec_query_len"]) for entry in load_table(path)} == {
        ("fp32_deferred", 8),
        ("triton", 8),
    }
    assert "no entry for triton, window 4: not every batch was measured" in capsys.readouterr().out


def test_a_runner_commits_small_captures_eagerly(device, caplog):
    """By the size that is replayed: 2 rows fold at once, 5 rows defer; a miss follows its own number of rows (B96)."""
    engine, twin, rng = Engine(device), Engine(device), random.Random(4)
    table = [asdict(StepShape.of(engine.context)) | {"deferred_from": 4}]
    inputs = StepInputs(engine.rows, WINDOW, device)
    with caplog.at_level(logging.INFO, logger="graphrt"):
        runner = CommitRunner(engine.context, engine.pending, inputs, [2, 5], choice=table)
    assert f"graphrt commit: {runner.choice.reason}" in caplog.messages
    runner.capture(progress=False, modes=["commit"])
    for n in (1, 2, 3, 6, 2):
        batch = Batch(rng, engine, n, least_rows=n)
        x = engine.window_inputs(rng)
        assert_same({"out": batch.verify(engine, x)}, {"out": batch.verify(twin, x)}, f"{n} rows")
        inputs.stage(**batch.host())
        runner.commit(n)
        batch.eager = [n <= 2] * n
        batch.commit(twin, eager=True)
        assert_same(engine.state(), twin.state(), f"{n} rows")
        pending = engine.pending[batch.record_rows].tolist()
        assert pending == ([0] * n if n <= 2 else batch.accepted)


def test_an_eager_capture_takes_in_what_the_caller_asks(device):
    """In a deferred capture the staged mask still decides; in an eager one every row is folded."""
    engine, rng = Engine(device), random.Random(5)
    for asked, folded in (("deferred", [True, False, True]), ("eager", [True] * 3)):
        runner = CommitRunner(
            engine.context, engine.pending, StepInputs(6, WINDOW, device), [3], eager=True, choice=asked
        )
        runner.capture(progress=False)
        batch = Batch(rng, engine, 3, least_rows=3, tokens=2)
        batch.accepted, batch.eager = [2, 2, 2], [True, False, True]
        batch.verify(engine, engine.window_inputs(rng))
        runner.inputs.stage(**batch.host())
        runner.commit(3)
        assert (engine.pending[batch.record_rows] == 0).tolist() == folded


def test_commit_itself_leaves_the_mask_alone(device):
    """The context folds what `eager` says and writes nothing into it, whatever a table would choose."""
    engine, rng = Engine(device), random.Random(6)
    batch = Batch(rng, engine, 2, least_rows=2, tokens=3)
    batch.verify(engine, engine.window_inputs(rng))
    mask = torch.zeros(2, dtype=torch.uint8, device=device)
    accepted, offsets = int32([3, 3], device), int32(batch.query_start_loc, device)
    slots, rows = int32(batch.state_indices, device), int32(batch.record_rows, device)
    engine.context.commit(accepted, slots, offsets, record_rows=rows, pending=engine.pending, eager=mask)
    assert mask.tolist() == [0, 0] and engine.pending[batch.record_rows].tolist() == [3, 3]


def test_a_step_makes_its_rows_eager_where_that_is_faster(device):
    """Eager and deferred steps decode the same bits; the eager one leaves nothing pending and says so in its rows."""
    texts = {}
    for asked in ("deferred", "eager"):
        toy, seen = Toy(device, choice=asked), []
        verify = toy.step.verify
        toy.step.verify = lambda rows, verify=verify, seen=seen: (seen.append(rows), verify(rows))[1]
        toy.step.capture(progress=False)
        for b, prompt in enumerate(([1, 2, 3], [2], [0, 1])):
            toy.admit(b, prompt, 6)
        toy.stage({0: (1, 1, 3), 1: (2, 2, 1)})
        pending = []
        for _ in range(3):
            toy.step.replay(3)
            pending.append(toy.engine.pending.tolist())
        assert seen[0].eager.tolist() == ([1, 1, 0] if asked == "eager" else [0, 0, 0])
        assert any(map(any, pending)) == (asked == "deferred")
        assert not toy.inputs.eager.any()
        texts[asked] = toy.text.clone()
    assert torch.equal(texts["eager"], texts["deferred"])


def test_a_step_chooses_by_capture_size(device):
    """A table with its shape decides size by size, and the step says why."""
    toy = Toy(device)
    table = [asdict(StepShape.of(toy.engine.context)) | {"deferred_from": 2}]
    step = DecodeStep(toy.engine.context, toy.engine.pending, toy.inputs, toy.verify, toy.sample, choice=table)
    assert step.choice.eager(1) and not step.choice.eager(2)
    assert step.choice.reason.startswith("eager below 2 rows")
    assert DecodeStep(
        toy.engine.context, toy.engine.pending, toy.inputs, toy.verify, toy.sample
    ).choice.reason.startswith("deferred at every size: the shipped table has no measurement of")
