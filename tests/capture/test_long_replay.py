"""Random traffic over the recorded step: it is the float64 oracle's, and byte for byte that of eager launches.

Traffic and oracle are those of `tools/long_replay.py`. A pair runs one trace on two copies of the pools.
"""

from dataclasses import replace

import pytest
from replay_step import RecordedStep
from replay_traffic import LongReplay
from replay_truths import STATE_TOLERANCE

from graphrt.testing import assert_bitwise_equal

SMALL = {"num_layers": 1, "num_heads": 1, "head_dim": 16, "spec_query_len": 4, "conv_dim": 8}
FP32_DEFERRED = pytest.param("cuda", "fp32_deferred", marks=pytest.mark.sm90)
TARGETS = [
    pytest.param("cpu", "torch"),
    pytest.param("cuda", "torch", marks=pytest.mark.gpu),
    pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    FP32_DEFERRED,
]
each_target = pytest.mark.parametrize(("device", "backend"), TARGETS)


def traffic_on(device, backend, **options):
    """Random traffic; on the CPU over the smallest of pools."""
    traffic = LongReplay(device, backend, **options, **(SMALL if device == "cpu" else {}))
    context = traffic.recorded.context
    assert context.backend == backend, context.backend_reason
    return traffic


def launch_steps(traffic):
    """Have the steps launched one by one from Python, in the sizes that would be replayed."""
    recorded = traffic.recorded

    def run(count, steps=1):
        for _ in range(steps):
            recorded.decode.run(recorded.padded(count))

    recorded.decode.replay = run
    return traffic


def assert_twins(one, other, what):
    """All that outlives a step has the same bytes in both."""
    all_of = [twin.recorded.pool.tensors() | {"pending": twin.recorded.slots.pending} for twin in (one, other)]
    for name, mine in all_of[0].items():
        theirs = all_of[1][name]
        for a, b in zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]:
            assert_bitwise_equal(a, b, f"{what}: {name}")


def assert_same_outputs(one, other, what):
    """What the last step wrote for its live rows; what a dummy row gets depends on who folds its slot meanwhile."""
    assert one.replays == other.replays and one.last_tokens == other.last_tokens
    for name, mine, theirs in zip(("out", "conv"), one.last_outputs(), other.last_outputs(), strict=True):
        assert_bitwise_equal(mine, theirs, f"{what}: {name}")


@pytest.mark.parametrize("options", [{}, {"block_size": 6, "flush": True}], ids=["plain", "align, flush"])
def test_replays_of_random_steps_are_the_oracles(options):
    """Chains of replays under random traffic, in short; the long form needs a GPU."""
    report = traffic_on("cpu", "torch", batch=4, seed=3, **options).run(60)
    assert report.worst_state_error < STATE_TOLERANCE
    events = ("admitted", "released", "drained", "finished_in_chain", "eager_rows", "dummy_rows", "idle_steps")
    assert all(getattr(report, event) for event in events), report
    assert bool(report.boundaries_compared) == bool(options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{}, {"block_size": 16, "flush": True}], ids=["plain", "align, flush"])
@pytest.mark.parametrize(
    ("backend", "steps"),
    [
        pytest.param("fp32_deferred", 10_000, marks=pytest.mark.sm90),
        pytest.param("triton", 10_000, marks=pytest.mark.gpu),
        pytest.param("torch", 1_000, marks=pytest.mark.gpu),
    ],
)
def test_ten_thousand_replays_of_random_steps_are_the_oracles(backend, steps, options):
    """CUDA graphs, two layers of two heads of 128, windows of up to 8 tokens, 16 rows (B10, B20)."""
    report = traffic_on("cuda", backend, **options).run(steps if not options else steps // 5)
    print(report)
    assert report.worst_state_error < STATE_TOLERANCE


@pytest.mark.parametrize("fault", ["accepted", "pending", "stranger", "boundary"])
def test_a_step_that_leaves_the_oracle_is_found(fault, monkeypatch):
    """One accepted token lost, a count lost, a byte of a free slot or of a finished block written: each is named."""
    whole = RecordedStep.sample

    def lossy(self, rows, outputs):
        sampled = whole(self, rows, outputs)
        fewer = sampled.num_accepted_tokens - (sampled.num_accepted_tokens > 2).int()
        return replace(sampled, num_accepted_tokens=fewer)

    if fault == "accepted":
        monkeypatch.setattr(RecordedStep, "sample", lossy)
    traffic = traffic_on("cpu", "torch", batch=4, seed=3, block_size=6 if fault == "boundary" else None)
    for _ in range(12):
        traffic.traffic()
        traffic.chain()
    if fault == "accepted":
        message = "checkpoint of request"
    elif fault == "pending":
        traffic.recorded.slots.pending.zero_()
        message = "pending after|checkpoint of request|history of request"
    elif fault == "stranger":
        traffic.recorded.pool.layers[0].kv_cache[1][0, 0, 3, 5] = 0
        message = "nobody's slots"
    else:
        one = next(one for one in traffic.live if one.published and one.column(6) > one.published[0])
        traffic.recorded.pool.layers[0].kv_cache[1][one.table[one.published[0]]] *= 1.001
        message = f"checkpoint of block {one.published[0]} of request {one.name}"
    with pytest.raises(AssertionError, match=message):
        traffic.settle()


@each_target
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_one_trace_is_the_same_bytes_by_replay_and_eagerly(device, backend, batch):
    """40 steps of random windows and counts on two copies of the pools: outputs, records, pending, states (B10)."""
    replayed = traffic_on(device, backend, batch=batch, seed=batch)
    eager = launch_steps(traffic_on(device, backend, batch=batch, seed=batch))
    while replayed.report.steps < 40:
        steps = 1 if replayed.report.steps < 20 else None
        for one in (replayed, eager):
            one.traffic()
            one.chain(steps=steps)
        assert_twins(replayed, eager, f"step {replayed.report.steps}")
        assert_same_outputs(replayed, eager, f"step {replayed.report.steps}")
    replayed.settle()


@each_target
def test_idle_steps_between_real_ones_change_nothing(device, backend):
    """Two identical traces, one with a dummy replay between every two steps: the same bytes to the end (B12)."""
    alone, disturbed = (traffic_on(device, backend, batch=4, seed=5) for _ in range(2))
    for step in range(30):
        for one in (alone, disturbed):
            one.traffic()
            one.chain(steps=1)
        assert_same_outputs(alone, disturbed, f"step {step}")
        disturbed.recorded.decode.replay_dummy(1 + step % 4, dcp=step % 2 == 0)
        assert_twins(alone, disturbed, f"step {step}")
    disturbed.settle()


@each_target
def test_a_size_captured_at_its_first_step_advances_it_once(device, backend):
    """Lazy capture in mid-service gives the bytes of a run whose sizes were all recorded before (B19)."""
    early = traffic_on(device, backend, batch=4, sizes=[1, 2, 3, 4], seed=6)
    late = traffic_on(device, backend, batch=4, sizes=[1], lazy=True, seed=6)
    while len(late.recorded.decode.capture_sizes) < 4 or late.report.steps < 20:
        for one in (early, late):
            one.traffic()
            one.chain()
        assert_twins(early, late, f"step {late.report.steps}")
        assert_same_outputs(early, late, f"step {late.report.steps}")
    late.settle()


@each_target
def test_an_absent_request_comes_back_as_it_left(device, backend):
    """A and C run ten chains in a padded graph, B waits with tokens pending; then all three are the oracle's (B20)."""
    traffic = traffic_on(device, backend, batch=4, seed=7)
    a, b, c = (traffic.admit() for _ in range(3))
    while not b.pending:
        traffic.chain([a, b, c], count=4)
    slot, pool, count = b.table[0], traffic.recorded.pool, b.pending
    records = [layer.recoverssm_records for layer in pool.layers]
    kept = [state for layer in pool.layers for state in (layer.kv_cache[0][slot], layer.kv_cache[1][slot])]
    kept += [part[b.row] for record in records for part in (record.correction, record.key_gate)]
    before = [part.clone() for part in kept]
    for _ in range(10):
        traffic.chain([a, c], count=4)
    for got, want in zip(kept, before, strict=True):
        assert_bitwise_equal(got, want, "what B left")
    assert traffic.recorded.slots.pending[b.row] == count > 0
    traffic.chain([a, b, c], count=4)
    traffic.settle()


@each_target
def test_every_number_of_live_rows_in_every_size_is_the_oracles(device, backend):
    """Three steps each, the other rows padding, null slots and dummies: live rows right, outputs finite (B21)."""
    traffic = traffic_on(device, backend, batch=4, seed=8)
    live = [traffic.admit() for _ in range(4)]
    for size in traffic.recorded.decode.capture_sizes:
        for count in range(1, size + 1):
            traffic.chain(live[:count], count=size, steps=3)
            traffic.chain(live[-count:], count=count, steps=3)
            traffic.settle()
