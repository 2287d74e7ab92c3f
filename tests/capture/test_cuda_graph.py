"""Recordings on a CUDA device: graphs keep the rules that the CPU tape promises, also after a failure."""

import gc
import json
import threading

import pytest
import torch
import torch.nn.functional as F

from graphrt.capture import CaptureError, record

pytestmark = pytest.mark.gpu


@pytest.fixture
def x():
    return torch.zeros(256, device="cuda")


in_shared_pools = []


def assert_cuda_works_on(pool=None):
    """Nothing is capturing, and capturing, replaying, random numbers and memory all work as ever."""
    assert not torch.cuda.is_current_stream_capturing()
    t = torch.zeros(64, device="cuda")
    recording = record(lambda: t.add_(1) * 2, device="cuda", warmup=0, pool=pool)
    recording.replay()
    assert recording.outputs.tolist() == [2.0] * 64
    # torch retires a shared pool with its last recording.
    recording.close() if pool is None else in_shared_pools.append(recording)
    assert torch.rand(4, device="cuda").max().item() < 1


def test_replay_reads_what_was_staged_after_capture():
    """Each replay sees the buffers of its own step; capture itself changes none of them."""
    w, inputs, state = (torch.randn(32, 32, device="cuda") for _ in range(3))
    before = state.clone()
    # The library makes its handle at the first product, which no capture survives.
    inputs @ w

    def step():
        state.add_(F.silu(inputs @ w))
        return state.argmax(-1)

    recording = record(step, device="cuda", warmup=0)
    assert torch.equal(state, before)
    for _ in range(3):
        inputs.normal_()
        want = before + F.silu(inputs @ w)
        recording.replay()
        assert torch.equal(state, want)
        assert torch.equal(recording.outputs, want.argmax(-1))
        before = want
    assert recording.num_nodes >= 4
    assert recording.pool_bytes > 0


def test_warmup_and_capture_share_one_stream_and_replay_takes_any(x):
    """Warm-up and capture run on the same side stream; the caller's stream is ordered behind the warm-up."""
    streams = []

    def step():
        streams.append(torch.cuda.current_stream().cuda_stream)
        x.add_(1)

    recording = record(step, device="cuda", warmup=2)
    assert len(set(streams)) == 1 and streams[0] != torch.cuda.current_stream().cuda_stream
    assert x.tolist() == [2.0] * 256
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        recording.replay()
    torch.cuda.current_stream().wait_stream(side)
    assert x.tolist() == [3.0] * 256


# What a value on the host or a shape made of values looks like; the CPU tape refuses each of these too.
WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: 1 if x.sum() > 0 else 2,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x + 1),
    "index by a tensor": lambda x: x[torch.zeros((), dtype=torch.int64, device="cuda")],
    "masked_fill": lambda x: x.masked_fill(x > 0, x[0]),
    "host list": lambda x: x[[0, 1]],
    "host data": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("shared", [False, True], ids=["own pool", "shared pool"])
def test_a_host_wait_fails_the_capture_and_leaves_cuda_usable(x, wait, shared):
    """The error names the recording; stream and state are as before, and the pool takes the next graph."""
    pool = torch.cuda.graph_pool_handle() if shared else None

    def step():
        x.add_(1)
        return wait(x * 2)

    with pytest.raises(CaptureError, match=r"^recording 'step'"):
        record(step, device="cuda", warmup=0, pool=pool, name="step")
    assert x.tolist() == [0.0] * 256
    assert_cuda_works_on(pool)


def test_a_retired_pool_is_refused_in_words(x):
    """A pool whose last recording was closed or collected is named as the reason, before anything begins."""
    for end in (lambda r: r.close(), lambda r: None):
        pool = torch.cuda.graph_pool_handle()
        end(record(lambda: x.add_(1), device="cuda", pool=pool))
        gc.collect()
        with pytest.raises(CaptureError, match="has retired this pool"):
            record(lambda: x.add_(1), device="cuda", pool=pool)
        assert_cuda_works_on()


def test_a_python_error_in_the_function_leaves_cuda_usable(x):
    """An error unknown to CUDA ends the capture cleanly and is the cause of the CaptureError."""
    pool = torch.cuda.graph_pool_handle()

    def step():
        x.add_(1)
        raise KeyError("layer 3")

    with pytest.raises(CaptureError, match="layer 3") as caught:
        record(step, device="cuda", warmup=0, pool=pool)
    assert isinstance(caught.value.__cause__, KeyError)
    assert x.tolist() == [0.0] * 256
    assert_cuda_works_on(pool)


def test_an_unjoined_stream_fails_the_capture(x):
    """Work forked to another stream and never joined is an error, not a graph with a hole."""
    side = torch.cuda.Stream()

    def step():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(CaptureError, match="forked stream"):
        record(step, device="cuda", warmup=0)
    assert_cuda_works_on()


def test_a_failed_capture_gives_its_memory_back(x):
    """After a capture that CUDA invalidated, reserved memory returns to its level before."""

    def step():
        big = torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(1)
        return big.sum().item()

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        with pytest.raises(CaptureError):
            record(step, device="cuda", warmup=0)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)


def test_an_empty_capture_is_an_error(x):
    """A function that launches nothing on the capture stream is refused, e.g. one that remembers a stream."""
    with pytest.raises(CaptureError, match="is empty"):
        record(lambda: x.view(2, -1), device="cuda")
    assert_cuda_works_on()


def test_random_numbers_are_fresh_and_those_of_eager():
    """Recording leaves the generator where it was; replays draw what eager calls would draw."""
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    recording = record(lambda: torch.rand(8, device="cuda"), device="cuda", warmup=0)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    drawn = []
    for _ in range(2):
        recording.replay()
        drawn.append(recording.outputs.clone())
    torch.cuda.manual_seed(5)
    assert all(torch.equal(t, torch.rand(8, device="cuda")) for t in drawn)


def test_other_threads_may_use_cuda_during_a_capture(x):
    """A thread that allocates pinned memory and copies on its own stream does not spoil the capture."""
    stop, errors = threading.Event(), []

    def work():
        try:
            side = torch.cuda.Stream()
            while not stop.is_set():
                with torch.cuda.stream(side):
                    torch.empty(4096).pin_memory().to("cuda", non_blocking=True)
                side.synchronize()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        recordings = [record(lambda: [x.mul_(1).add_(1) for _ in range(50)], device="cuda") for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    assert not errors
    before = x.clone()
    for recording in recordings:
        recording.replay()
    assert torch.equal(x, before + 250)


def test_an_old_graph_may_die_during_a_capture(x):
    """A dropped cycle around an old recording, and a collection inside the capture, do not spoil it."""
    cycle = [record(lambda: x.add_(1), device="cuda")]
    cycle.append(cycle)
    del cycle

    def step():
        gc.collect()
        x.add_(1)

    was_enabled = gc.isenabled()
    recording = record(step, device="cuda", warmup=0)
    assert gc.isenabled() == was_enabled
    x.zero_()
    recording.replay()
    assert x.tolist() == [1.0] * 256


def test_a_closed_graph_takes_nothing_from_its_neighbour():
    """Of two graphs that share pool and stream one is closed and memory reused; the other stays right."""
    a, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    first = record(lambda: a @ w, device="cuda", pool=pool)
    second = record(lambda: (a @ w) @ w, device="cuda", pool=pool)
    first.replay()
    second.replay()
    want = second.outputs.clone()
    first.close()
    gc.collect()
    noise = [torch.full((64, 64), float("nan"), device="cuda") for _ in range(100)]
    for _ in range(10):
        second.replay()
    assert torch.equal(second.outputs, want)
    assert all(t.isnan().all() for t in noise)


def test_graphs_of_falling_size_share_one_pool():
    """In a shared pool a smaller graph adds next to nothing to the memory of the largest one."""
    pool = torch.cuda.graph_pool_handle()
    buffers = torch.randn(1 << 22, device="cuda")

    def recorded(n):
        return record(lambda: float_sum(buffers[:n]), device="cuda", pool=pool)

    def float_sum(t):
        return (t * 2 + 1).sum()

    recordings = [recorded(1 << (22 - i)) for i in range(4)]
    sizes = [recording.pool_bytes for recording in recordings]
    assert sum(sizes) <= 1.2 * sizes[0]


def test_recordings_and_replays_do_not_nest(x):
    """A record or a replay inside a capture is refused before it touches the stream."""
    inner = record(lambda: x.add_(1), device="cuda", name="inner")
    with pytest.raises(CaptureError, match="inside recording 'outer'"):
        record(inner.replay, device="cuda", name="outer")
    with pytest.raises(CaptureError, match="inside recording 'outer'"):
        record(lambda: record(lambda: x.add_(1), device="cuda"), device="cuda", warmup=0, name="outer")
    assert_cuda_works_on()


def test_replay_after_close_raises(x):
    """Closing waits for running replays, may be done twice, and ends the recording."""
    recording = record(lambda: x.add_(1), device="cuda", warmup=0, name="add")
    recording.replay()
    recording.close()
    recording.close()
    assert x.tolist() == [1.0] * 256
    with pytest.raises(RuntimeError, match=r"^replay after close"):
        recording.replay()


def test_dump_writes_json_and_dot(x, tmp_path):
    """The JSON lists types, kernels and edges, the DOT draws them."""
    recording = record(lambda: x.add_(1).mul_(2), device="cuda")
    recording.dump(tmp_path / "graph.json")
    recording.dump(tmp_path / "graph.dot")
    told = json.loads((tmp_path / "graph.json").read_text())
    assert [n["type"] for n in told["nodes"]] == ["kernel"] * 2
    assert all("elementwise" in n["name"] and n["grid"] for n in told["nodes"])
    assert told["edges"] == [{"from": 0, "to": 1}] and told["pool_bytes"] == recording.pool_bytes
    dot = (tmp_path / "graph.dot").read_text()
    assert dot.startswith("digraph") and "n0 -> n1;" in dot and dot.count("elementwise") >= 2
