"""Real captures: what the guards refuse, and that everything is usable afterwards."""

import contextlib
import gc

import pytest
import torch
import triton
import triton.language as tl
from test_cuda_graph import assert_cuda_works_on

from graphrt import launch
from graphrt.capture import CaptureError, record

pytestmark = pytest.mark.gpu


@triton.jit
def add_kernel(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.load(x_ptr + o, mask=o < n) + 1, mask=o < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned_add_kernel(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.load(x_ptr + o, mask=o < n) + 1, mask=o < n)


@pytest.fixture
def x():
    return torch.zeros(256, device="cuda")


@pytest.fixture(params=[False, True], ids=["own pool", "shared pool"])
def pool(request):
    return torch.cuda.graph_pool_handle() if request.param else None


def refused(fn, match, x, pool=None):
    """`record` refuses `fn` in these words; state, stream and pool are usable, and the memory is given back."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    before = x.clone()
    with pytest.raises(CaptureError, match=match) as caught:
        record(fn, device="cuda", warmup=0, pool=pool, name="step")
    torch.cuda.synchronize()
    assert torch.equal(x, before)
    assert_cuda_works_on(pool)
    del before
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + (8 << 20)
    return caught.value


def test_a_variant_that_would_compile_is_refused_by_name(x, pool):
    """A kernel not run before, or a variant that the warm-up did not run: kernel and fix are named (B64, B66, B77)."""
    block = 512 if pool is None else 1024

    def step(n):
        add_kernel[(1,)](x, n, BLOCK=block)

    refused(lambda: step(199), r"kernel add_kernel is not ready: .*warmup=1", x, pool)
    recording = record(lambda: step(199), device="cuda", warmup=1, pool=pool)
    recording.replay()
    assert x[:199].eq(2).all() and not x[199:].any()
    # 16 divides 64: another variant than for 199.
    refused(lambda: step(64), r"kernel add_kernel is not ready", x, pool)


def test_a_swallowed_refusal_is_raised_at_the_end(x):
    """A function that catches the error of a kernel does not get a graph without it."""

    def step():
        x.add_(1)
        with contextlib.suppress(CaptureError):
            add_kernel[(1,)](x, 199, BLOCK=2048)

    refused(step, r"add_kernel is not ready", x)


def test_a_kernel_that_tunes_itself_is_refused_by_name(x):
    """Tuning would compile, run and wait inside the capture (B65); once tuned it is recorded like any other."""

    def step():
        tuned_add_kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, 200)

    refused(step, r"tuned_add_kernel", x)
    x.zero_()
    recording = record(step, device="cuda", warmup=1)
    x.zero_()
    recording.replay()
    assert x[:200].eq(1).all()


def test_a_launch_of_ours_on_another_stream_is_refused(x, pool):
    """Before it runs, with the entry point's name (B63)."""
    side = torch.cuda.Stream()

    def step():
        x.mul_(1)
        with torch.cuda.stream(side):
            launch.launch("graphrt.commit", lambda t: t.add_(1), x)

    refused(step, r"graphrt\.commit was called on a stream that is not capturing", x, pool)


def test_a_launch_on_a_forked_and_joined_stream_is_recorded(x):
    """A fork of the capture belongs to it."""
    side, y = torch.cuda.Stream(), torch.zeros(256, device="cuda")

    def step():
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            launch.launch("graphrt.commit", lambda t: t.add_(1), x)
        y.add_(1)
        main.wait_stream(side)
        y.add_(x)

    recording = record(step, device="cuda", warmup=0)
    recording.replay()
    assert x.eq(1).all() and y.eq(2).all()
    topology = recording.topology()
    assert topology.num_branches == 2 and topology.longest_chain == 2


def test_a_launcher_that_remembers_a_stream_is_refused(x):
    """Its kernels would run now, and the replay would be missing them (B63)."""
    old, other = torch.cuda.Stream(), torch.zeros(8, device="cuda")

    def run(t):
        with torch.cuda.stream(old):
            other.add_(1)

    def step():
        x.mul_(1)
        launch.launch("graphrt.fold", run, x)

    refused(step, r"graphrt\.fold left nothing in the graph", x)


def test_memory_outside_the_pool_is_refused(x):
    """Allocated during the capture on a stream that does not capture, and given to a launch of ours or returned."""
    side = torch.cuda.Stream()

    def elsewhere():
        with torch.cuda.stream(side):
            return torch.empty(1 << 20, device="cuda")

    def step():
        launch.launch("graphrt.verify", lambda a, b: a.add_(1), x, elsewhere())

    # Cached memory gets as far as the launch; for fresh memory the driver is asked, and refuses.
    refused(step, r"argument 1 of graphrt\.verify .* was allocated during the recording|memory from the driver", x)
    refused(lambda: (x.mul_(1), elsewhere()), r"result [01] of the function|memory from the driver", x)

    def inside():
        y = torch.empty(1 << 20, device="cuda")
        launch.launch("graphrt.verify", lambda a, b: a.add_(b[0] * 0 + 1), x, y.zero_())
        return y

    recording = record(inside, device="cuda", warmup=0)
    recording.replay()
    assert x.eq(1).all()


def test_a_host_wait_is_named_with_its_place(x, pool):
    """The user's call, file and function, and what to do instead."""

    def layer(t):
        return t.sum().item() + 1

    error = refused(lambda: layer(x), r"`t\.sum\(\)\.item\(\)` \(test_cuda_guards\.py:\d+, in layer\)", x, pool)
    assert "keep the value in a tensor" in str(error)
    refused(lambda: (x.mul_(1), torch.cuda.synchronize()), r"`torch\.cuda\.synchronize\(\)`", x, pool)


def test_tensors_that_moved_are_found_at_replay():
    """Check mode: `.data` swapped, storage freed, buffer replaced; intermediates of the pool never count (B04, B72)."""
    static = {"x": torch.zeros(64, device="cuda"), "y": torch.zeros(64, device="cuda")}

    def step():
        middle = static["y"] * 2
        launch.launch("graphrt.commit", lambda a, b: a.add_(b), static["x"], middle)
        return middle * 2

    def recorded():
        return record(step, device="cuda", name="step", check=True, tensors=lambda: static)

    recording = recorded()
    for _ in range(3):
        gc.collect()
        recording.replay()
    static["x"].data = torch.zeros(64, device="cuda")
    with pytest.raises(CaptureError, match=r"^replay of 'step': the memory of graphrt\.commit argument 0"):
        recording.replay()
    recording = recorded()
    static["y"] = torch.ones(64, device="cuda")
    with pytest.raises(CaptureError, match=r"static tensor 'y'"):
        recording.replay()
    recording = recorded()
    static["x"] = torch.ones(64, device="cuda")
    gc.collect()
    with pytest.raises(CaptureError, match=r"was freed"):
        recording.replay()
