"""Real captures: what the guards refuse, what a graph looks like inside, and checks of replays on the device."""

import contextlib
import gc
import json

import pytest
import torch
import triton
import triton.language as tl
from test_cuda_graph import assert_cuda_works_on
from triton.language.extra.cuda import gdc_wait

from graphrt import KDADeferredCommitContext, launch
from graphrt.capture import CaptureError, check_replay, diff, record, state_neutral
from graphrt.testing import deferred_step, dummy_batch, make_batch, poisoned_pool, random_trace

pytestmark = pytest.mark.gpu

# Kernels whose first global access follows a wait for the launch before: only these may end a programmatic edge.
KERNELS_THAT_WAIT = ("waiting_add_kernel",)


@triton.jit
def add_kernel(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.load(x_ptr + o, mask=o < n) + 1, mask=o < n)


@triton.jit
def waiting_add_kernel(x_ptr, n, BLOCK: tl.constexpr):
    gdc_wait()
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

    refused(step, r"argument 1 of graphrt\.verify .* was allocated during the recording", x)
    refused(lambda: (x.mul_(1), elsewhere()), r"result 0 of the function|result 1 of the function", x)

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


def kda(layers=2, size=3):
    pool = poisoned_pool(num_layers=layers, num_slots=8, max_num_reqs=6, device="cuda")
    context = KDADeferredCommitContext.create(
        pool.layers, spec_query_len=pool.spec_query_len, max_num_reqs=6, backend="triton"
    )
    batch = dummy_batch(pool, size=size)
    return pool, context, batch, lambda: deferred_step(context, pool, batch, backend="triton")


def test_a_deferred_step_is_one_chain_of_named_kernels(tmp_path):
    """Kernels carry graphrt's names and stages; no host copy; chain and branches as the layers demand (B75, B98)."""
    topologies = {}
    for layers in (2, 4):
        _, _, _, step = kda(layers)
        recording = record(step, device="cuda", name="deferred step")
        topology = topologies[layers] = recording.topology()
        stages = [n.stage for n in topology.nodes if n.stage]
        assert stages.count("graphrt.deferred_verify") == layers and stages.count("graphrt.conv_verify") == layers
        assert "graphrt.commit" in stages
        kernels = [n.name for n in topology.nodes if n.stage == "graphrt.deferred_verify"]
        assert set(kernels) == {"graphrt_verify_kernel"}
        assert not [n for n in topology.nodes if n.type in ("memcpy", "host") and "host" in n.name]
        assert topology.num_branches == 1 and topology.longest_chain == len(topology.nodes)
        assert all(target in KERNELS_THAT_WAIT for _, target in topology.programmatic())
        recording.dump(tmp_path / "step.json")
        assert json.loads((tmp_path / "step.json").read_text())["branches"] == 1
    assert len(topologies[4].nodes) <= 2 * len(topologies[2].nodes)


def test_one_program_has_one_topology_and_a_stray_copy_shows():
    """Two captures of one step are alike; a copy more is one added node."""
    _, _, batch, step = kda()
    first, second = (record(step, device="cuda", name="step") for _ in range(2))
    assert not diff(first, second), str(diff(first, second))
    target = torch.empty_like(batch.state_indices)
    third = record(lambda: (step(), target.copy_(batch.state_indices)), device="cuda", name="step with a copy")
    found = diff(first, third)
    assert len(found.nodes_added) == 1 and not found.nodes_removed, str(found)


def test_copies_and_fills_are_told_apart(x):
    """Memory nodes have direction and bytes, so a copy from the host can be found (B75)."""
    host, y = torch.ones(256).pin_memory(), torch.empty_like(x)

    def step():
        x.copy_(host, non_blocking=True)
        y.copy_(x)
        y.zero_()

    nodes = record(step, device="cuda", warmup=0).topology().nodes
    assert nodes[0].type == "memcpy" and nodes[0].name == "host to device" and nodes[0].facts["bytes"] == 1024
    rest = [(n.type, n.name) for n in nodes[1:]]
    assert rest[0][0] in ("memcpy", "kernel") and rest[1][0] in ("memset", "kernel"), rest


@pytest.mark.sm90
def test_a_programmatic_edge_is_seen(x):
    """A launch with the PDL attribute makes a programmatic edge, which ends in a kernel that waits (B59)."""

    def step(pdl):
        add_kernel[(1,)](x, 256, BLOCK=256)
        waiting_add_kernel[(1,)](x, 256, BLOCK=256, launch_pdl=pdl)

    plain, programmatic = (record(lambda p=p: step(p), device="cuda", name=str(p)) for p in (False, True))
    assert plain.topology().programmatic() == []
    edges = programmatic.topology().programmatic()
    assert edges == [("add_kernel", "waiting_add_kernel")]
    assert all(target in KERNELS_THAT_WAIT for _, target in edges)
    found = diff(plain, programmatic)
    assert len(found.edges_added) == len(found.edges_removed) == 1 and "(programmatic)" in found.edges_added[0]
    x.zero_()
    for _ in range(100):
        programmatic.replay()
    assert x.eq(200).all()


def staged(pool, static, steps):
    trace = random_trace(3, spec_query_len=pool.spec_query_len, max_rows=3, num_slots=8, max_num_reqs=6, steps=steps)

    def stage(step):
        for one in trace[step].arrivals:
            pool.fill(one.slot, one.request)
            pool.pending[one.row] = 0
        static.copy_(make_batch(pool, trace[step].rows, size=3, seed=step))

    return stage


def test_replays_of_a_random_trace_equal_eager_execution():
    """Other slots, lengths and counts at every step; zero bytes differ (B01, B10)."""
    pool, _, batch, step = kda()
    recording = record(step, device="cuda", name="deferred step")
    check_replay(recording, step, staged(pool, batch, 20), 20, pool.tensors()).raise_if_different()


def test_a_graph_with_frozen_inputs_is_found():
    """A graph of another batch's buffers is wrong from the first step that differs, and the report says why (B01)."""
    pool, context, batch, step = kda()
    other = dummy_batch(pool, size=3)
    stage = staged(pool, batch, 6)
    stage(0)
    other.copy_(batch)
    recording = record(
        lambda: deferred_step(context, pool, other, backend="triton"), device="cuda", warmup=0, name="frozen"
    )
    report = check_replay(recording, step, stage, 6, pool.tensors())
    assert not report.ok and "reads inputs as they were" in str(report)


def test_a_sampling_graph_draws_what_eager_steps_draw(x):
    """Replay and eager run from one state of the generator."""
    recording = record(lambda: x.copy_(torch.rand(256, device="cuda")), device="cuda", warmup=1)
    report = check_replay(recording, lambda: x.copy_(torch.rand(256, device="cuda")), lambda step: None, 4, [x])
    report.raise_if_different()


def test_capture_is_neutral_in_mid_service():
    """With live state and dummy rows that look live, warm-up and capture change no byte (B18, B19)."""
    for values in (True, False):
        pool, _, batch, step = kda()
        pool.fill(1, 1)
        batch.copy_(dummy_batch(pool, size=3, dcp=True))
        with state_neutral(pool.tensors(), values=values):
            record(step, device="cuda", warmup=2)


def test_what_is_allocated_after_a_capture_is_safe_from_replays():
    """A hundred tensors of the sizes used keep their canaries over ten replays (B73)."""
    _, _, batch, step = kda()
    recording = record(step, device="cuda")
    sizes = [t.shape for t in (batch.q, batch.x, batch.state_indices, *recording.outputs)]
    canaries = [torch.full(sizes[i % len(sizes)], 3.25, device="cuda") for i in range(100)]
    for _ in range(10):
        recording.replay()
    assert all(t.eq(3.25).all() for t in canaries)
