"""`graphrt profile`: a loop, a trace with lanes, and command lines that can be pasted."""

import json
import shlex

import pytest
import torch
from terminal import refusal, words
from typer.testing import CliRunner

from graphrt import trace
from graphrt.cli import app, profile
from graphrt.trace import load_trace

SMALL = ["--device", "cpu", "-L", "2", "-H", "1", "--head-dim", "16", "-Q", "2", "-B", "2", "--steps", "2"]


def run(*arguments):
    return CliRunner().invoke(app, ["profile", *SMALL, *arguments])


def test_the_commands_profile_the_same_invocation():
    """Node tracing, the capture range, the NVTX filter and the clocks are there, then exactly what was run."""
    result = json.loads(run("--commit", "eager", "--json", "-").stdout)
    same = ["graphrt", "profile", "--layers", "2", "--heads", "1", "--head-dim", "16", "--query-len", "2"]
    same += ["--batch", "2", "--commit", "eager", "--device", "cpu", "--steps", "2"]
    lines = {name: shlex.split(text) for name, text in result["commands"].items()}
    for name in ("timeline", "timeline, by NVTX range", "counters of each kernel"):
        assert lines[name][-len(same) :] == same
    assert {"--cuda-graph-trace=node", "--capture-range=cudaProfilerApi"} <= set(lines["timeline"])
    assert "--nvtx-capture=graphrt.profile@graphrt" in lines["timeline, by NVTX range"]
    counters = set(lines["counters of each kernel"])
    assert {"--nvtx-include=graphrt@graphrt.profile/", "--clock-control=none", "--graph-profiling=node"} <= counters
    assert result["us_per_step"] > 0 and result["commit"].startswith("eager")


def test_a_profiler_is_started_right_before_the_loop_and_stopped_behind_its_end(monkeypatch):
    """The marks enclose the replays, what the device has left to do, and nothing else: not the capture."""
    done = []
    for owner, name in ((torch.cuda.profiler, "start"), (torch.cuda.profiler, "stop"), (torch.cuda, "synchronize")):
        monkeypatch.setattr(owner, name, lambda *place, name=name: done.append(name))
    assert profile._profiled(lambda steps: done.append(f"{steps} replays"), 3, torch.device("cuda")) > 0
    assert done == ["synchronize", "start", "3 replays", "synchronize", "stop"]


def test_a_command_line_is_one_line():
    """However narrow the terminal is, what is to be pasted does not break."""
    lines = run().stdout.splitlines()
    assert sum(line.startswith("  nsys profile") and line.endswith("--steps 2") for line in lines) == 2


def test_the_trace_has_a_lane_for_each_phase(tmp_path):
    """Two steps of two layers: their launches are in the lanes of their phases, besides the profiler's own events."""
    target = tmp_path / "trace.json"
    result = run("--torch", str(target))
    assert result.exit_code == 0, result.output
    events = load_trace(target)["traceEvents"]
    (process,) = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "graphrt by phase"]
    mine = [e for e in events if e.get("pid") == process]
    lanes = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
    found = [(lanes[e["tid"]], e["name"]) for e in mine if e["ph"] == "X"]
    assert found.count(("verify", "graphrt.deferred_verify")) == 4
    assert found.count(("commit", "graphrt.commit")) == 2 and found.count(("stage", "graphrt.advance")) == 2
    assert len(events) > len(mine)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--accepted", "3"], "'--accepted': expected 0 to 2 tokens, the window, got 3"),
        (["--torch", "/nowhere/t.json"], "cannot write"),
        (["--backend", "cuda"], "fp32_deferred"),
    ],
)
def test_a_bad_value_is_one_sentence(arguments, why):
    """Exit status 2, no traceback."""
    assert why in refusal(run(*arguments))


def test_a_profiler_that_saw_nothing_is_no_wrong_option(monkeypatch, tmp_path):
    """Exit status 1 behind a sentence, and no trace without launches is left."""
    monkeypatch.setattr(trace, "slices_of", lambda trace: [])
    result = run("--torch", str(tmp_path / "t.json"))
    assert result.exit_code == 1 and "the profiler saw no launch" in words(result)
    assert list(tmp_path.iterdir()) == []
