"""Staging and advance: the Triton kernels give the bytes of the torch specification, whatever they are given."""

import random

import pytest
import torch

from graphrt import backends, error_counts, reset_errors
from graphrt.capture.static import allocate_rows, cut_rows
from graphrt.errors import error_counter
from graphrt.kernels.stage import entries, stage_header
from graphrt.steps import HEADER_WORDS, SOURCES, Advance, StageSources, StepBegin

ON_DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def integers(low, high, *shape, dtype=torch.int32):
    return torch.randint(low, high, shape, dtype=dtype)


def offsets(rows):
    return integers(0, 5, rows + 1).cumsum(0).to(torch.int32)


def restrided(rng, t):
    """The tensor itself, or its values as every third row of a larger one."""
    if rng.random() < 0.5:
        return t
    wide = torch.full((3 * t.shape[0], *t.shape[1:]), -77).to(t.dtype)
    wide[::3] = t
    return wide[::3]


def random_sources(rng, rows, device):
    """Sources of any kind: absent, strided, short of requests, with indices out of range."""
    requests = rng.randint(0, rows + 2)

    def maybe(t):
        return restrided(rng, t).to(device) if rng.random() < 0.8 else None

    record_rows = torch.where(torch.rand(rows) < 0.3, -1, torch.randperm(rows + 3)[:rows]).to(torch.int32)
    table = integers(0, 50, rng.choice([0, 2, 50]), requests)
    return StageSources(
        num_reqs=rng.randint(0, rows),
        state_indices=maybe(integers(-1, 12, rows)),
        record_rows=maybe(record_rows),
        query_start_loc=maybe(offsets(rows)),
        num_accepted_tokens=maybe(integers(0, 9, requests)),
        eager=maybe(integers(0, 2, rows, dtype=torch.uint8)),
        request_indices=maybe(integers(-1, requests + 1, rows)),
        num_computed_tokens=maybe(integers(-3, 40, requests)),
        block_table=maybe(table.t() if rng.random() < 0.5 else table.t().contiguous()),
        generation=maybe(integers(0, 3, rows)),
    )


def header_of(sources, device):
    """What the pinned ring writes: where each source is."""
    words = [sources.num_reqs, sources.num_requests, 0, 0]
    for name in SOURCES:
        source = getattr(sources, name)
        if source is None:
            words += [0, 0, 0]
            continue
        words += [source.data_ptr(), source.stride(0), entries(name, source, sources)]
        if name == "block_table":
            words[2:4] = source.shape[1], source.stride(1)
    assert len(words) == HEADER_WORDS
    return torch.tensor(words, device=device)


def staged_by(run, rows, width, seed, block_size, device):
    """Buffers, pending counts and errors after one staging over random old contents."""
    block, staged = allocate_rows(rows, width, torch.device(device))
    block.fill_(123)
    draw = torch.Generator().manual_seed(seed)
    pending, replay = torch.randint(0, 9, (2, rows + 3), dtype=torch.int32, generator=draw).to(device)
    begin = StepBegin(pending, replay, 10, block_size, seed % 3 == 0) if block_size != 0 else None
    reset_errors(device)
    run(staged, begin)
    return [block, pending, replay, error_counts(device)]


def same(a, b):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


@ON_DEVICES
@pytest.mark.parametrize("block_size", [0, None, 4], ids=["inputs", "step", "align step"])
def test_staging_kernels_equal_the_specification(device, block_size):
    """By value and by header, over more rows than a program takes, with and without the move of pending counts."""
    rng, errors = random.Random(block_size), error_counter(device)
    for case in range(12):
        rows, width = rng.choice([1, 3, 8, 130]), rng.choice([0, 1, 5, 40])
        s = random_sources(rng, rows, device)
        arguments = (rows, width, case, block_size, device)
        current = None if rng.random() < 0.3 else integers(1, 3, rows + rng.randint(0, 3)).to(device)

        def spec(staged, begin, s=s, current=current):
            backends.load("torch").stage(staged, s, begin, errors, current)

        def by_value(staged, begin, s=s, current=current):
            backends.load("triton").stage(staged, s, begin, errors, current)

        def by_header(staged, begin, s=s, current=current):
            stage_header(staged, header_of(s, device), errors, current)

        want = staged_by(spec, *arguments)
        assert same(staged_by(by_value, *arguments), want), s
        if block_size == 0:
            assert same(staged_by(by_header, *arguments), want), s


@ON_DEVICES
@pytest.mark.parametrize("block_size", [None, 16], ids=["plain", "align"])
def test_advance_kernel_equals_the_specification(device, block_size):
    """Bad counts, finished rows, missing blocks and fewer rows than the next step has give the same bytes."""
    rng = random.Random(block_size)
    for _ in range(12):
        most = rng.choice([1, 3, 8, 130])
        batch, width = rng.randint(1, most), 5
        rows = cut_rows(allocate_rows(most, width, torch.device(device))[1], batch)
        rows.state_indices.copy_(integers(0, 12, batch))
        rows.record_rows.copy_(integers(-1, 9, batch))
        rows.query_start_loc.copy_(offsets(batch))
        rows.num_computed_tokens.copy_(integers(0, 70, batch))
        rows.block_table.copy_(integers(0, 12, batch, width))
        accepted, lengths = (restrided(rng, integers(-1, 8, batch)).to(device) for _ in range(2))
        finished = integers(0, 2, batch, dtype=torch.uint8).to(device) if rng.random() < 0.7 else None
        old = integers(0, 100, allocate_rows(most, width, torch.device("cpu"))[0].shape[0])
        results = []
        for name in ("torch", "triton"):
            block, following = allocate_rows(most, width, torch.device(device))
            block.copy_(old)
            reset_errors(device)
            advance = Advance(rows, following, accepted, lengths, finished, 4, 10, block_size)
            backends.load(name).advance(advance, error_counter(device))
            results.append([block, error_counts(device)])
        assert same(*results)


def test_a_null_slot_keeps_what_its_record_row_has_pending():
    """The move of pending counts reaches live rows only: neither null slots, nor slots past the pool, nor row -1."""
    _, staged = allocate_rows(5, 0, torch.device("cpu"))
    pending, replay = torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    slots, rows = ([3, 0, 10, 4], [2, 1, 0, -1])
    sources = StageSources(4, *(torch.tensor(values, dtype=torch.int32) for values in (slots, rows)))
    backends.load("torch").stage(staged, sources, StepBegin(pending, replay, 10, None, False), error_counter("cpu"))
    assert pending.tolist() == [1, 2, 0, 4]
    assert replay.tolist() == [9, 9, 3, 9]


def test_a_row_without_a_block_is_retired():
    """Past its block table a row turns into padding and is counted; its neighbour goes on (B44)."""
    rows = cut_rows(allocate_rows(2, 2, torch.device("cpu"))[1], 2)
    _, following = allocate_rows(2, 2, torch.device("cpu"))
    rows.state_indices.copy_(torch.tensor([5, 6]))
    rows.record_rows.copy_(torch.tensor([0, 1]))
    rows.query_start_loc.copy_(torch.tensor([0, 4, 8]))
    rows.num_computed_tokens.copy_(torch.tensor([30, 30]))
    rows.block_table.copy_(torch.tensor([[4, 5], [6, 7]]))
    reset_errors("cpu")
    two = torch.tensor([4, 1], dtype=torch.int32)
    backends.load("torch").advance(Advance(rows, following, two, two, None, 4, 10, 16), error_counter("cpu"))
    assert following.state_indices.tolist() == [0, 7]
    assert following.record_rows.tolist() == [-1, 1]
    assert following.query_start_loc.tolist() == [0, 0, 1]
    assert error_counts("cpu")["column"] == 1


@ON_DEVICES
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_row_that_leaves_int32_is_retired_and_counted(device, name):
    """Its computed count would wrap to a column in front of the table, whose block does not hold its state."""
    rows = cut_rows(allocate_rows(2, 2, torch.device(device))[1], 2)
    _, following = allocate_rows(2, 2, torch.device(device))
    rows.state_indices.copy_(torch.tensor([5, 6]))
    rows.record_rows.copy_(torch.tensor([0, 1]))
    rows.query_start_loc.copy_(torch.tensor([0, 4, 8]))
    rows.num_computed_tokens.copy_(torch.tensor([2**31 - 2, 0]))
    rows.block_table.copy_(torch.tensor([[4, 5], [6, 7]]))
    reset_errors(device)
    three = torch.tensor([3, 3], dtype=torch.int32, device=device)
    backends.load(name).advance(Advance(rows, following, three, three, None, 4, 10, 16), error_counter(device))
    assert following.record_rows.tolist() == [-1, 1] and following.state_indices.tolist() == [0, 6]
    assert error_counts(device)["column"] == 1


@ON_DEVICES
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_what_a_sampling_says_is_clamped_to_the_window(device, name):
    """Accepted counts to the row's tokens, which the commit counts; next windows to 0..Q, which are counted here."""
    rows = cut_rows(allocate_rows(3, 0, torch.device(device))[1], 3)
    _, following = allocate_rows(3, 0, torch.device(device))
    rows.state_indices.copy_(torch.tensor([5, 6, 7]))
    rows.record_rows.copy_(torch.tensor([0, 1, 2]))
    rows.query_start_loc.copy_(torch.tensor([0, 2, 4, 8]))
    rows.num_computed_tokens.copy_(torch.tensor([10, 20, 30]))
    reset_errors(device)
    accepted, lengths = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([3, -1, 9], [5, -2, 3]))
    backends.load(name).advance(Advance(rows, following, accepted, lengths, None, 4, 10, None), error_counter(device))
    assert following.num_computed_tokens.tolist() == [12, 20, 34]
    assert following.query_start_loc.tolist() == [0, 4, 4, 7]
    assert {kind: count for kind, count in error_counts(device).items() if count} == {"query_len": 2}


@ON_DEVICES
def test_offsets_and_counts_at_the_ends_of_int32_do_not_wrap(device):
    """A span of more than 2^31 tokens is a full window, not none; the least computed count is none."""
    least, most = -(2**31), 2**31 - 1
    results = []
    for name in ("torch", "triton"):
        backend, int32 = backends.load(name), lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        block, staged = allocate_rows(3, 2, torch.device(device))
        sources = StageSources(
            num_reqs=3, state_indices=int32([1, 2, 3]), record_rows=int32([0, 1, 2]),
            query_start_loc=int32([least, most, least, most]), num_computed_tokens=int32([0, 5, least]),
            block_table=int32([[4, 5]] * 3),
        )  # fmt: skip
        counts = int32([0, 0, 0])
        begin = StepBegin(counts, counts.clone(), 10, 8, False)
        backend.stage(staged, sources, begin, error_counter(device))
        following_block, following = allocate_rows(3, 2, torch.device(device))
        lengths = int32([1, 1, 1])
        advance = Advance(cut_rows(staged, 3), following, int32([3, 3, 0]), lengths, None, 4, 10, 8)
        backend.advance(advance, error_counter(device))
        results.append([block, following_block])
        assert staged.eager.tolist() == [1, 0, 1]
        assert following.num_computed_tokens.tolist() == [3, 5, least]
        assert following.state_indices.tolist() == [4, 4, 4]
    assert same(*results)
