"""RecordSlots: the ledger of record rows, and what a reused row must not bring along."""

import random

import pytest
import torch
from rig import Pool, same_bytes
from steps import Batch, Row, drain
from truth import run_step, start

from graphrt import RecordSlots, error_counts

CPU = torch.device("cpu")


def test_rows_are_distinct_python_integers_that_never_change():
    """Rows handed out stay what they were when others are released and admitted (B27)."""
    slots = RecordSlots(4, CPU)
    a, b = slots.admit("a"), slots.admit("b")
    slots.release("b")
    c, d = slots.admit("c"), slots.admit("d")
    assert all(type(row) is int for row in (a, b, c, d))
    assert (slots.row("a"), slots.row("c"), slots.row("d")) == (a, c, d)
    assert len({a, c, d}) == 3
    assert slots.rows(["d", "a", "c"]) == [d, a, c]
    slots.pending.fill_(3)
    slots.generation.fill_(7)
    assert slots.rows(["d", "a", "c"]) == [d, a, c]


def test_the_ledger_has_a_row_for_every_request_and_no_more():
    """Rows 0..R-1 are each given once; a request too many is refused until another leaves."""
    slots = RecordSlots(3, CPU)
    assert sorted(slots.admit(name) for name in "abc") == [0, 1, 2]
    with pytest.raises((ValueError, RuntimeError), match="3"):
        slots.admit("d")
    slots.release("b")
    assert slots.admit("d") == ({0, 1, 2} - {slots.row("a"), slots.row("c")}).pop()


def test_pending_and_generation_are_static_tensors_of_the_device():
    """Both are [R] and stay the same memory; pending starts at zero."""
    slots = RecordSlots(5, CPU)
    pending, generation = slots.pending.data_ptr(), slots.generation.data_ptr()
    assert slots.pending.dtype == torch.int32 and slots.pending.tolist() == [0] * 5
    assert slots.generation.shape == (5,)
    for name in range(20):
        slots.admit(name)
        slots.release(name)
    assert (slots.pending.data_ptr(), slots.generation.data_ptr()) == (pending, generation)


def test_a_reused_row_starts_with_nothing_pending_and_a_new_generation():
    """The count of the request before is gone, also one committed late, and the generation tells the two
    apart.
    """
    slots = RecordSlots(1, CPU)
    row = slots.admit("a")
    first = slots.generation[row].item()
    slots.pending[row] = 3
    slots.release("a")
    slots.pending[row] = 2
    assert slots.admit("b") == row
    assert slots.pending[row] == 0
    assert slots.generation[row].item() != first


def test_admitting_keeps_the_pending_of_others():
    """Only the admitted row is reset."""
    slots = RecordSlots(3, CPU)
    a, b = slots.admit("a"), slots.admit("b")
    slots.pending[a], slots.pending[b] = 2, 4
    slots.release("b")
    slots.admit("c")
    assert slots.pending[a] == 2


def test_a_printed_ledger_says_who_has_rows():
    """In a log it tells how full the service is."""
    ledger = RecordSlots(4, "cpu")
    ledger.admit("a")
    ledger.admit("b")
    ledger.preempt("b")
    assert repr(ledger) == "RecordSlots(1 of 4 rows owned, 1 preempted, on cpu)"


def test_wrong_requests_are_named():
    """A request admitted twice, released twice or never admitted raises with its name."""
    slots = RecordSlots(3, CPU)
    slots.admit("twice")
    for call in (lambda: slots.admit("twice"), lambda: slots.release("never"), lambda: slots.row("never")):
        with pytest.raises((ValueError, KeyError), match=r"twice|never"):
            call()
    with pytest.raises((ValueError, KeyError), match="never"):
        slots.rows(["twice", "never"])


@pytest.mark.parametrize("verb", ["admit", "resume", "release", "preempt", "row"])
def test_an_id_too_long_to_print_is_refused_by_name(verb):
    """Python prints no int of thousands of digits, so neither an error nor a file could say whose row it is."""
    slots = RecordSlots(3, CPU)
    with pytest.raises(ValueError, match=r"^request_id: expected an id of at most 2048 bits, got an int of 16610"):
        getattr(slots, verb)(10**5000)
    with pytest.raises(ValueError, match=r"^request_id: expected an id of at most 2048 bits"):
        slots.restore(slots.contents() | {"preempted": [-(10**5000)]})
    assert slots.admit(2**2048 - 1) == 0


def test_a_thousand_cycles_leak_no_row():
    """Requests that come and go at random in any order leave every row free at the end."""
    slots, rng, live = RecordSlots(7, CPU), random.Random(1), {}
    for name in range(1000):
        if len(live) == 7 or (live and rng.random() < 0.5):
            gone = rng.choice(list(live))
            assert slots.row(gone) == live.pop(gone)
            slots.release(gone)
        live[name] = slots.admit(name)
        assert len(set(live.values())) == len(live)
    for name in live:
        slots.release(name)
    assert sorted(slots.admit(f"again {i}") for i in range(7)) == list(range(7))


def test_a_reused_record_row_folds_nothing_of_its_last_owner(backend_device):
    """A leaves with three accepted tokens pending; B takes its row and another slot and is the oracle's from
    zero (B23).
    """
    pool = Pool(backend_device, backend_device.shape(layers=1))
    slots = RecordSlots(pool.shape.rows, torch.device(pool.device))
    pool.pending = slots.pending
    row = slots.admit("A")
    run_step(Batch(pool, [Row(5, row, 4)]), start(pool, {row: 5}), [3])
    slots.release("A")
    left = [part.clone() for part in pool.layers[0].kv_cache]
    while slots.admit(object()) != row:
        pass
    truths = start(pool, {row: 8}, zero=True)
    run_step(Batch(pool, [Row(8, row, 4)]), truths, [2])
    drain(pool, [8], [row])
    truths[row].assert_state(pool, 8)
    for before, now in zip(left, pool.layers[0].kv_cache, strict=True):
        assert same_bytes(before[5], now[5])


def test_generations_start_again_past_the_largest_int32():
    """Every owner has a generation of its own that is odd, and no row loses its owner's on the way (B27)."""
    slots = RecordSlots(1, CPU)
    slots.restore({"requests": {}, "preempted": [], "free": [0], "generations": [2**31 - 4]})
    seen = []
    for name in range(4):
        row = slots.admit(name)
        assert [slots.generation[row].item()] == slots.generations([name])
        seen.append(slots.generation[row].item())
        slots.release(name)
        assert slots.generation[row].item() % 2 == 0 and slots.generation[row].item() > 0
    assert seen == [2**31 - 3, 2**31 - 1, 3, 5]
    assert slots.num_free == 1


@pytest.mark.parametrize("saved", [1, 3, 5])
def test_a_step_staged_before_a_ledger_was_restored_stays_late(saved):
    """Its generation is nobody's afterwards, whatever the restored ledger had reached; the owners stay odd."""
    slots = RecordSlots(2, CPU)
    row = slots.admit("old")
    slots.release("old")
    slots.admit("old")
    (staged,) = slots.generations(["old"])
    assert staged == 3
    slots.reset()
    owned = {"requests": {"new": row}, "preempted": [], "free": [1 - row]}
    slots.restore(owned | {"generations": [saved if r == row else 0 for r in range(2)]})
    (now,) = slots.generations(["new"])
    assert now not in (1, 3) and now % 2 == 1
    assert slots.generation.tolist() == [now if r == row else 0 for r in range(2)]


def test_what_makes_no_ledger_is_refused_and_changes_nothing():
    """Rows owned twice, ids owned and preempted, generations of the wrong kind, and things that are no contents."""
    slots = RecordSlots(2, CPU)
    slots.admit("a")
    good, before = slots.contents(), slots.contents()
    for change in (
        {"requests": {"a": 1}},
        {"requests": {"a": "0"}},
        {"requests": [1]},
        {"preempted": ["a"]},
        {"preempted": [[1]]},
        {"free": 1},
        {"generations": [1]},
        {"generations": [1, None]},
        {"generations": [2**40 + 1, 0]},
        {"generations": [2, 0]},
        {"generations": [1, -2]},
        {"free": [1, 1]},
        {"free": []},
    ):
        with pytest.raises(ValueError, match=r"^contents: expected"):
            slots.restore(good | change)
        assert slots.contents() == before
    for other in ([], {name: value for name, value in good.items() if name != "free"}):
        with pytest.raises(ValueError, match=r"^contents: expected a dict with requests, preempted, free, generations"):
            slots.restore(other)
    assert slots.contents() == before


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "mps", 3, None, "nowhere"])
def test_a_ledger_is_on_a_device_that_steps_run_on(device):
    """ValueError with the argument and what came: counts without memory would be lost without a word."""
    with pytest.raises(ValueError, match=r"^device: expected .*cpu.*, got"):
        RecordSlots(2, device)
    with pytest.raises(ValueError, match=r"^device: expected .*cpu.*, got"):
        error_counts(device)


def test_an_id_that_has_an_index_and_is_no_int_stays_itself():
    """Two of one index are two requests, and each is found again."""

    class Id:
        def __index__(self):
            return 5

    ledger, first, second = RecordSlots(4, "cpu"), Id(), Id()
    rows = [ledger.admit(first), ledger.admit(second), ledger.admit(5)]
    assert rows == [ledger.row(first), ledger.row(second), ledger.row(5)] == [0, 1, 2]
    ledger.preempt(first)
    ledger.release(first)
    assert len(ledger) == 2 and ledger.num_free == 2
