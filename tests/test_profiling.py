"""NVTX ranges: on the host, around replays, with numbers as payload, and never inside what is captured."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphrt import KDADeferredCommitContext, profiling
from graphrt.capture import CommitRunner, StepInputs, record
from graphrt.capture.guards import CaptureWatch
from graphrt.profiling import CATEGORIES, LAUNCH_CATEGORIES, Work, commit_work, phase_of, stage_work
from graphrt.testing import deferred_step, dummy_batch, poisoned_pool

ROOT = Path(__file__).parents[1]


class Domain:
    """An NVTX domain that keeps its events: ("push", category, message, payload) and ("pop",)."""

    def __init__(self):
        self.events = []

    def get_event_attributes(self, message=None, color=None, category=None, payload=None):
        fields = None if payload is None else dict(zip(payload.dtype.names, payload.item(), strict=True))
        return SimpleNamespace(message=message, category=category, payload=fields)

    def push_range(self, attributes):
        self.events.append(("push", attributes.category, attributes.message, attributes.payload))

    def pop_range(self):
        self.events.append(("pop",))

    def pushed(self):
        return [event[1:] for event in self.events if event[0] == "push"]


@pytest.fixture
def domain(monkeypatch):
    """A tool is attached, and this is what it sees."""
    pytest.importorskip("numpy")
    found = Domain()
    monkeypatch.setattr(profiling, "ranges", profiling.Ranges(found))
    return found


def payload(batch=-1, deferred=-1, eager=-1):
    return {"batch": batch, "deferred": deferred, "eager": eager}


def make_context(rows=4):
    pool = poisoned_pool()
    context = KDADeferredCommitContext.create(
        pool.layers, spec_query_len=pool.spec_query_len, max_num_reqs=rows, backend="torch"
    )
    return pool, context


def test_without_a_tool_no_range_is_made():
    """Nothing is attached to a test run, and the block is the same empty one each time (B99)."""
    assert profiling.ranges is None
    assert profiling.annotated("replay", "a") is profiling.annotated("stage", "b", Work(3))


def test_launches_without_a_recording_have_ranges_with_their_numbers(domain):
    """An eager deferred step shows its verifies and its commit, each a pair of push and pop, with its rows."""
    pool, context = make_context()
    batch = dummy_batch(pool, size=3)
    deferred_step(context, pool, batch, backend="torch")
    assert domain.pushed() == [
        *[
            ("verify", "graphrt.conv_verify", payload(3, 3)),
            ("verify", "graphrt.deferred_verify", payload(3, 3)),
        ]
        * len(pool.layers),
        ("commit", "graphrt.commit", payload(3, 3, 0)),
    ]
    assert [event[0] for event in domain.events] == ["push", "pop"] * (2 * len(pool.layers) + 1)


def test_a_capture_has_one_range_and_none_inside(domain):
    """Ranges of captured launches would fire at the capture only; with warm-up 0 there is the capture's alone (B99)."""
    pool, context = make_context()
    batch = dummy_batch(pool, size=2)
    recording = record(lambda: deferred_step(context, pool, batch, backend="torch"), device="cpu", warmup=0, name="s")
    assert domain.events == [("push", "capture", "s", None), ("pop",)]
    domain.events.clear()
    recording.replay()
    assert domain.events == [("push", "replay", "s", None), ("pop",)]


def test_a_runner_shows_what_it_replays(domain):
    """Stage, commit, flush and drain each enclose the replay that they make; a mask on the host is counted."""
    pool, context = make_context()
    pending = torch.zeros(context.stack.geometry.num_rows, dtype=torch.int32)
    inputs = StepInputs(4, pool.spec_query_len, torch.device("cpu"))
    runner = CommitRunner(context, pending, inputs, [4])
    runner.capture(progress=False)
    domain.events.clear()
    inputs.stage(num_reqs=1, state_indices=[0], record_rows=[-1], query_start_loc=[0, 0])
    for act in (runner.commit, runner.flush, runner.drain):
        act(1)
    assert domain.pushed() == [
        ("stage", "graphrt.stage", payload(1)),
        ("commit", "graphrt.commit", payload(1, 1, 0)),
        ("replay", "commit/4", None),
        ("flush", "graphrt.flush", payload(1, 1, 0)),
        ("replay", "flush/4", None),
        ("fold", "graphrt.drain", payload(1, 1, 0)),
        ("replay", "drain/4", None),
    ]
    assert [event[0] for event in domain.events[2:6]] == ["push", "push", "pop", "pop"]


def test_a_range_closes_when_its_block_raises(domain):
    """An error in a launch leaves the ranges balanced."""
    with pytest.raises(ZeroDivisionError), profiling.annotated("replay", "a"):
        raise ZeroDivisionError
    assert [event[0] for event in domain.events] == ["push", "pop"]


def test_no_range_is_made_while_a_stream_captures(domain, monkeypatch):
    """Also in a capture that somebody else began: the host range would belong to no replay."""
    monkeypatch.setattr(profiling, "is_capturing", lambda: True)
    with profiling.annotated("replay", "a"), profiling.annotated_launch("graphrt.commit", ()):
        pass
    assert domain.events == []


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (commit_work(8, deferred=False, chosen_on_device=False), Work(8, 0, 8)),
        (commit_work(8, deferred=True, chosen_on_device=False), Work(8, 8, 0)),
        (commit_work(8, deferred=True, chosen_on_device=True), Work(8, -1, -1)),
        (stage_work(3, None), Work(3, 3, 0)),
        (stage_work(3, [True, False, True, True]), Work(3, 1, 2)),
        (stage_work(2, torch.tensor([1, 0, 1], dtype=torch.uint8)), Work(2, 1, 1)),
        (stage_work(2, torch.ones(2, dtype=torch.uint8, device="meta")), Work(2, -1, -1)),
    ],
)
def test_the_payload_says_how_many_rows_are_deferred_and_eager(got, want):
    """-1 where only the device knows."""
    assert got == want


REPLAYS = """
import torch
from graphrt.workload import Sizes, Workload

workload = Workload(Sizes(1, 1, 16, 2, 3, 1, torch.float32), torch.device("cpu"))
workload.capture()
print("captured", flush=True)
workload.replay(2)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the tool")
def test_a_tool_that_listens_gets_the_domain_the_ranges_and_their_payload(tmp_path):
    """Through the real nvtx: registered messages, named categories, numbers, and nothing from inside a capture."""
    tool = tmp_path / "tool.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", tool, ROOT / "tests" / "nvtx_tool.c"], check=True)
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tool), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", REPLAYS], env=environment, capture_output=True, text=True, check=True)
    before, after = done.stdout.split("captured\n")
    assert "domain graphrt" in before and "push 0 step/3 capture" in before
    # The capture's warm-up runs a step for real; the recording of it shows nothing.
    assert before.count("push 1 graphrt.deferred_verify verify 3 3 -1") == 1
    step = "push 0 graphrt.step replay 3 -1 -1\npush 1 step/3 replay\npop\npop\n"
    assert after == 2 * step


def calls_of(function):
    """Texts that are the first argument of `function(...)` anywhere in the package."""
    for folder in ("graphrt", "capture", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == function and node.args:
                    yield from (n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant))


def test_every_launch_of_graphrt_has_a_category():
    """A new entry point must say which phase it is."""
    named = {name for name in calls_of("launch") if isinstance(name, str)}
    assert named and named <= set(LAUNCH_CATEGORIES)
    assert set(LAUNCH_CATEGORIES.values()) <= set(CATEGORIES)


def launched_kernels():
    """Names of the Triton kernels that a launcher starts (`kernel[grid](...)`), and prefixes of the CuTe kernels."""
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
                yield node.func.value.id
            if getattr(node.func, "attr", "") == "set_name_prefix":
                yield node.args[0].value


def test_every_kernel_name_carries_its_phase():
    """A node-level trace groups by name: `graphrt_<phase>_...` (B99)."""
    phases = {name: phase_of(name) for name in launched_kernels() if name.startswith("graphrt")}
    assert len(phases) >= 11 and None not in phases.values(), phases
    assert set(phases.values()) == {"stage", "verify", "commit", "flush", "fold"}


def test_other_kernels_have_no_phase():
    """A library's kernel is nobody's phase, whatever its name contains."""
    assert phase_of("nvjet_tst_128x8_64x12_2x1_v_bz_TNT") is None
    assert phase_of("void at::native::vectorized_elementwise_kernel<4, verify>") is None
    assert phase_of("graphrt_verify_f32_0") == "verify"
    assert phase_of("graphrt_verification") is None


class FakeAnnotations:
    """`torch.cuda._graph_annotations`, as a list of what is called on it."""

    def __init__(self):
        self.calls = []

    def enable_annotations(self):
        self.calls.append("enable")

    def mark_kernels(self, annotation):
        self.calls.append(annotation)
        return profiling.nullcontext()

    def resolve_pending_annotations(self):
        self.calls.append("resolve")

    def remap_to_exec_graph(self, graph):
        self.calls.append(graph)


def watch():
    return CaptureWatch("step", is_capturing=lambda: True, num_nodes=lambda: None)


def test_captured_launches_are_marked_for_torch_where_it_is_wanted(monkeypatch):
    """Each launch of a capture is marked with its name and its recording, and the marks follow the graph."""
    fake = FakeAnnotations()
    monkeypatch.setenv("GRAPHRT_ANNOTATE", "1")
    monkeypatch.setitem(sys.modules, "torch.cuda._graph_annotations", fake)
    seen = watch()
    seen.launch("graphrt.commit", lambda: fake.calls.append("run"), ())
    seen.marks.resolve()
    seen.marks.follow("graph")
    assert fake.calls == ["enable", {"name": "graphrt.commit", "recording": "step"}, "run", "resolve", "graph"]


def test_nothing_is_marked_unless_it_is_wanted_and_there(monkeypatch, caplog):
    """Without the variable, and with a torch that has no annotations, a capture does not care; that is said once."""
    profiling._say_that_torch_has_none.cache_clear()
    monkeypatch.delenv("GRAPHRT_ANNOTATE", raising=False)
    fake = FakeAnnotations()
    monkeypatch.setitem(sys.modules, "torch.cuda._graph_annotations", fake)
    watch().launch("graphrt.commit", lambda: None, ())
    monkeypatch.setenv("GRAPHRT_ANNOTATE", "1")
    monkeypatch.setitem(sys.modules, "torch.cuda._graph_annotations", None)
    seen = watch()
    seen.launch("graphrt.commit", lambda: None, ())
    seen.marks.resolve()
    seen.marks.follow("graph")
    watch().launch("graphrt.commit", lambda: None, ())
    assert fake.calls == []
    assert [record.message for record in caplog.records] == [
        f"GRAPHRT_ANNOTATE=1: torch {torch.__version__} has no annotations of captured kernels; 2.12 and later have"
    ]
