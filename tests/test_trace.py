"""Traces of torch's profiler: phases, steps and lanes."""

import gzip
import json

import pytest
import torch

from graphrt.testing import assert_bitwise_equal
from graphrt.trace import OTHER, Slice, load_trace, rows_of, slices_of, steps_of, with_lanes
from graphrt.workload import Sizes, Workload


def kernel(name, ts, dur, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7}


STEP = [
    kernel("graphrt_stage_kernel", 0, 2),
    kernel("graphrt_verify_conv_kernel", 2, 3),
    kernel("graphrt_verify_f32_0", 4, 6),
    kernel("Memcpy DtoD", 10, 1, "gpu_memcpy"),
    kernel("graphrt_commit_plan_kernel", 11, 2),
]


def trace(*events):
    return {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mul", "ts": 0, "dur": 9}, *events]}


def test_gpu_work_has_the_phase_of_its_name():
    """Copies and library kernels are others; what ran on the host does not count."""
    phases = [one.phase for one in slices_of(trace(*reversed(STEP)))]
    assert phases == ["stage", "verify", "verify", OTHER, "commit"]


def test_a_step_begins_with_its_staging():
    """What precedes the first staging belongs to no step."""
    later = [dict(event, ts=event["ts"] + 100) for event in STEP]
    early = kernel("graphrt_commit_plan_kernel", -5, 1)
    steps = steps_of(slices_of(trace(*later, early, *STEP)))
    assert [len(step) for step in steps] == [5, 5] and steps[1][0].start == 100


def test_overlapping_kernels_get_a_row_of_their_own():
    """The convolution still runs when the verify begins: a viewer would hide one of them."""
    a, b, c = Slice("a", "verify", 0, 4), Slice("b", "verify", 3, 4), Slice("c", "verify", 7, 1)
    assert rows_of([a, b, c]) == [[a, c], [b]]
    events = with_lanes(trace(*STEP))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["stage", "verify", "verify (overlapping)", "commit", OTHER]
    lanes = {e["name"]: e["tid"] for e in events if e.get("cat") == "graphrt"}
    assert lanes["graphrt_verify_conv_kernel"] != lanes["graphrt_verify_f32_0"]


def test_traces_are_read_plain_and_compressed(tmp_path):
    """A file that is no trace is named."""
    plain, packed, wrong = tmp_path / "a.json", tmp_path / "a.json.gz", tmp_path / "b.json"
    plain.write_text(json.dumps(trace(*STEP)))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    wrong.write_text("[1, 2")
    assert load_trace(plain) == load_trace(packed) == trace(*STEP)
    with pytest.raises(ValueError, match=r"b\.json"):
        load_trace(wrong)


def replayed(device, steps):
    """A small workload after so many replays."""
    workload = Workload(Sizes(2, 2, 32, 4, 3, 2), torch.device(device))
    workload.capture()
    workload.replay(steps)
    return workload


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_replays_under_a_profiler_are_those_without_one(device, tmp_path):
    """B99: replays finish with the same bits while each node is traced, and each step shows its phases."""
    steps = 20 if device == "cuda" else 3
    plain = replayed(device, steps)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profiler:
        traced = replayed(device, steps)
        if device == "cuda":
            torch.cuda.synchronize()
    for ours, theirs in zip(traced.layers, plain.layers, strict=True):
        assert_bitwise_equal(ours.kv_cache[1], theirs.kv_cache[1])
        assert_bitwise_equal(ours.recoverssm_records.correction, theirs.recoverssm_records.correction)
    if device == "cuda":
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        # The warm-up of the capture is a step as well.
        found = steps_of(slices_of(load_trace(tmp_path / "trace.json")))[-steps:]
        assert len(found) == steps
        assert all({"stage", "verify", "commit"} <= {one.phase for one in step} for step in found)
