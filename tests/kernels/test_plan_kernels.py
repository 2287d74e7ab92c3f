"""Plans: the Triton kernels give the numbers and counts of the torch specification, whatever they are given."""

import random

import pytest
import torch

from graphrt import ErrorKind, backends
from graphrt.errors import NUM_KINDS
from graphrt.kernels.plan import BLOCK
from graphrt.steps import Commit, Geometry, Owners, Plan

WINDOW, SLOTS = 4, 12
ON_DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def integers(low, high, *shape):
    return torch.randint(low, high, shape, dtype=torch.int32)


def table_of(requests, width, by_column):
    """A block table [requests, width] with entries out of range; stored row by row, or column by column."""
    table = integers(-3, SLOTS + 5, requests, width)
    return table.t().contiguous().t() if by_column else table


def new_errors(device):
    """A counter of its own: no counts, no rows."""
    return torch.tensor([0] * NUM_KINDS + [-1] * NUM_KINDS, dtype=torch.int32, device=device)


def run(name, plan_of, geometry, pending, device):
    """What one backend writes: the plan, pending counts, and the error counter."""
    plan = Plan(*integers(50, 99, 4, 300).to(device).unbind())
    # Every other entry of a longer tensor.
    pending, errors = torch.stack((pending, pending + 50), -1).flatten().to(device)[::2], new_errors(device)
    plan_of(backends.load(name), plan, pending, errors, geometry)
    written = (plan.commit_lens, plan.final_state_indices, plan.boundary_state_indices, plan.boundary_recovery_lens)
    return [t.tolist() for t in (*written, pending)], errors[:NUM_KINDS].tolist(), errors[NUM_KINDS:].tolist()


def random_commit(rng, batch, device):
    """A commit of any form over `batch` rows: slots, rows, requests, counts and blocks in range and out of it."""
    num_rows, requests = batch + 3, rng.randint(1, batch + 2)

    def placed(t):
        """The tensor, or its values as every other entry of a longer one."""
        if rng.random() < 0.5:
            return t.to(device)
        return torch.stack((t, torch.full_like(t, -77)), -1).flatten().to(device)[::2]

    def maybe(t):
        return placed(t) if rng.random() < 0.7 else None

    rows = torch.where(torch.rand(num_rows) < 0.9, torch.randperm(num_rows), integers(num_rows, num_rows + 3, num_rows))
    rows = torch.where(torch.rand(num_rows) < 0.1, integers(-2, 0, num_rows), rows.int())
    deferred, align, size = rng.random() < 0.7, rng.random() < 0.5, rng.choice([WINDOW, 5, 16])
    offsets = torch.where(torch.rand(batch + 1) < 0.95, integers(0, WINDOW + 1, batch + 1), integers(-3, 7, batch + 1))
    rows = placed(rows[:batch]) if deferred or rng.random() < 0.5 else None
    commit = Commit(
        placed(integers(-1, WINDOW + 2, requests)),
        placed(integers(-1, SLOTS + 1, batch)),
        placed(offsets.cumsum(0).int()),
        maybe(integers(-1, requests + 1, batch)),
        table_of(requests, 5, rng.random() < 0.5).to(device) if align else None,
        placed(integers(-1, 6 * size, requests)) if align else None,
        size if align else None,
        rows,
        None,
        placed(integers(0, 2, batch).to(torch.uint8)) if deferred and rng.random() < 0.5 else None,
        Owners(placed(integers(0, 3, batch)), placed(integers(1, 3, num_rows))) if rows is not None else None,
    )
    return commit, deferred, Geometry(SLOTS, num_rows, WINDOW, rng.random() < 0.5), integers(-1, WINDOW + 2, num_rows)


@ON_DEVICES
def test_plan_kernels_equal_the_specification(device):
    """Commit, flush and drain over fewer and over more rows than a program takes."""
    rng = random.Random(0)
    for _ in range(16 if device == "cpu" else 200):
        batch = rng.choice([1, BLOCK, BLOCK + 1, 2 * BLOCK + 6] + [256] * (device == "cuda"))
        c, deferred, geometry, pending = random_commit(rng, batch, device)
        drains = rng.random() < 0.5

        def commits(backend, plan, pending, errors, geometry, c=c, deferred=deferred):
            fields = {name: getattr(c, name) for name in c.__dataclass_fields__}
            commit = Commit(**fields | {"pending": pending if deferred else None})
            backend.plan_commit(plan, commit, geometry, errors)

        def flushes(backend, plan, pending, errors, geometry, c=c, zero=drains):
            rows = torch.arange(c.batch, dtype=torch.int32, device=device) if c.record_rows is None else c.record_rows
            backend.plan_flush(plan, c.state_indices, rows, pending, zero, c.owners, geometry, errors)

        for plan_of in (commits, flushes):
            torch.manual_seed(batch)
            want, counts, _ = run("torch", plan_of, geometry, pending, device)
            torch.manual_seed(batch)
            got, got_counts, firsts = run("triton", plan_of, geometry, pending, device)
            assert got == want, c
            assert got_counts == counts, c
            assert [first >= 0 for first in firsts] == [count > 0 for count in counts]


@ON_DEVICES
def test_the_first_row_is_the_lowest_that_the_first_program_saw(device):
    """Of a batch over several programs each counts its rows, and one of them notes its lowest; a later launch none."""
    batch = 256 if device == "cuda" else 3 * BLOCK
    everything = torch.arange(batch, dtype=torch.int32, device=device)
    accepted, slots = torch.ones_like(everything), torch.ones_like(everything)
    accepted[BLOCK + 5 : BLOCK + 9], accepted[batch - 3 :], slots[batch - 1] = 9, -1, 99
    plan, geometry, errors = (
        Plan.allocate(batch, accepted.device),
        Geometry(SLOTS, batch, WINDOW, True),
        new_errors(device),
    )
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * WINDOW
    pending = torch.zeros_like(everything)

    def commit():
        rest = (None, None, None, None, everything, pending, None)
        backends.load("triton").plan_commit(plan, Commit(accepted, slots, offsets, *rest), geometry, errors)

    commit()
    first = errors[NUM_KINDS + ErrorKind.ACCEPTED].item()
    assert first in (BLOCK + 5, batch - 3)
    assert errors[NUM_KINDS + ErrorKind.SLOT] == batch - 1
    assert (errors[ErrorKind.ACCEPTED], errors[ErrorKind.SLOT], errors[:NUM_KINDS].sum()) == (6, 1, 7)
    accepted.fill_(1)[0] = 9
    commit()
    assert (errors[ErrorKind.ACCEPTED], errors[ErrorKind.SLOT]) == (7, 2)
    assert errors[NUM_KINDS + ErrorKind.ACCEPTED] == first


@ON_DEVICES
@pytest.mark.parametrize("size", [WINDOW, 16, 2**31 - 1])
def test_any_number_of_computed_tokens_leads_to_the_same_block(device, size):
    """The ends of int32 as well: a negative number is that of a request without tokens."""
    ends = [-(2**31), 1 - 2**31, -1, 0, 1, WINDOW, WINDOW + 1, 17, 2**31 - 2, 2**31 - 1]
    computed = torch.tensor(ends, dtype=torch.int32, device=device)
    table = integers(1, SLOTS, 3, len(ends)).to(device).t()
    starts = torch.arange(len(ends) + 1, dtype=torch.int32, device=device) * WINDOW
    found = []
    for name in ("torch", "triton"):
        slots, mask = (torch.full((len(ends), 2), 9, dtype=t, device=device) for t in (torch.int32, torch.uint8))
        errors = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device=device)
        backends.load(name).align_state_indices(table, computed, size, slots[:, 0], errors)
        backends.load(name).align_eager_mask(computed, starts, size, None, mask[:, 0])
        found.append((slots.tolist(), mask.tolist(), errors.tolist()))
    assert found[0] == found[1]
    assert [slot for slot, _ in found[0][0][:4]] == table[:4, 0].tolist()
    assert all(beside == 9 for written in found[0][:2] for _, beside in written)


@ON_DEVICES
def test_a_row_that_meets_one_kind_twice_counts_once(device):
    """A negative number of computed tokens, and then no column for its first block."""
    ones, geometry = torch.ones(1, dtype=torch.int32, device=device), Geometry(SLOTS, 4, WINDOW, True)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=device)
    table = torch.empty(1, 0, dtype=torch.int32, device=device)
    for name in ("torch", "triton"):
        errors, plan = new_errors(device), Plan(*integers(50, 99, 4, 4).to(device).unbind())
        commit = Commit(ones, ones, offsets, None, table, -5 * ones, 16, ones, None, None)
        backends.load(name).plan_commit(plan, commit, geometry, errors)
        counts = {kind.name: n for kind, n in zip(ErrorKind, errors[:NUM_KINDS].tolist(), strict=True) if n}
        assert counts == {"COLUMN": 1, "EAGER_NULL": 1}, name
