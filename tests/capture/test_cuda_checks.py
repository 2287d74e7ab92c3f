"""Real graphs: what they consist of, and checks of their replays on the device."""

import json

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from graphrt import KDADeferredCommitContext
from graphrt.capture import check_replay, diff, record, state_neutral
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


@pytest.fixture
def x():
    return torch.zeros(256, device="cuda")


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
        assert set(stages) == {"graphrt.deferred_verify", "graphrt.conv_verify", "graphrt.commit"}
        kernels = [n.name for n in topology.nodes if n.stage]
        assert all(name.startswith("graphrt_") for name in kernels)
        for name in ("graphrt_verify_kernel", "graphrt_verify_conv_kernel"):
            assert kernels.count(name) == layers
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
    """A graph of another batch's buffers is wrong from the first step that differs, and the report names it (B01)."""
    pool, context, batch, step = kda()
    other = dummy_batch(pool, size=3)
    stage = staged(pool, batch, 6)
    stage(0)
    other.copy_(batch)
    recording = record(
        lambda: deferred_step(context, pool, other, backend="triton"), device="cuda", warmup=0, name="frozen"
    )
    report = check_replay(recording, step, stage, 6, pool.tensors())
    assert not report.ok and "replay of 'frozen' differs at step" in str(report)


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
