"""Random traces: requests come, skip steps, accept a prefix of their window, and leave."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step.

    request   its number, counted from 0 through the whole trace
    slot      state slot, 1 or above: the request's own as long as it lives
    row       record row, likewise
    length    tokens of the window, 0 to Q
    accepted  how many of them the step accepts
    """

    request: int
    slot: int
    row: int
    length: int
    accepted: int


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step: who comes before it, who is in it, who leaves after it.

    arrivals    requests that a prefill has just put into their slots (length and accepted are 0)
    rows        in random order; a request that is alive may be absent
    departures  their slots and record rows may be taken by the next arrivals: drain them first
    """

    arrivals: tuple[Row, ...]
    rows: tuple[Row, ...]
    departures: tuple[Row, ...]


def traces(
    *,
    spec_query_len: int,
    max_rows: int,
    num_slots: int,
    max_num_reqs: int,
    max_steps: int = 6,
    min_accepted: int = 0,
) -> Any:
    """A hypothesis strategy for tuples of TraceStep; it shrinks towards few steps, rows and tokens.

    Args:
        spec_query_len: Q. max_rows: most rows of a step.
        num_slots: of the state pool, slot 0 included. max_num_reqs: R, record rows.
        min_accepted: 1 for the convolution layout in which a row with tokens accepts at least one.
    """
    from hypothesis import strategies

    sizes = (spec_query_len, max_rows, num_slots, max_num_reqs, min_accepted)

    @strategies.composite
    def build(draw: Callable[[Any], Any]) -> tuple[TraceStep, ...]:
        def pick(low: int, high: int) -> int:
            return int(draw(strategies.integers(low, high)))

        return _trace(pick, pick(1, max_steps), *sizes)

    return build()


def random_trace(
    seed: int,
    *,
    spec_query_len: int,
    max_rows: int,
    num_slots: int,
    max_num_reqs: int,
    steps: int = 6,
    min_accepted: int = 0,
) -> tuple[TraceStep, ...]:
    """One trace that depends on the seed alone; arguments as in `traces`."""
    pick = random.Random(seed).randint
    return _trace(pick, steps, spec_query_len, max_rows, num_slots, max_num_reqs, min_accepted)


def _trace(
    pick: Callable[[int, int], int],
    steps: int,
    window: int,
    max_rows: int,
    num_slots: int,
    max_num_reqs: int,
    min_accepted: int,
) -> tuple[TraceStep, ...]:
    if min(window, max_rows, num_slots - 1, max_num_reqs, steps) < 1:
        raise ValueError("traces: expected at least one token, row, live slot, record row and step")
    free_slots, free_rows = list(range(1, num_slots)), list(range(max_num_reqs))
    alive: list[Row] = []
    found, count = [], 0
    for _ in range(steps):
        room = min(len(free_slots), len(free_rows), max_rows)
        arrivals = []
        for _ in range(pick(0 if alive else 1, room) if room else 0):
            slot, row = (free.pop(pick(0, len(free) - 1)) for free in (free_slots, free_rows))
            arrivals.append(Row(count, slot, row, 0, 0))
            count += 1
        alive += arrivals
        rows = tuple(_member(pick, one, window, min_accepted) for one in _some(pick, alive, max_rows))
        departures = tuple(one for one in alive if pick(0, 3) == 3)
        for one in departures:
            alive.remove(one)
            free_slots.append(one.slot)
            free_rows.append(one.row)
        found.append(TraceStep(tuple(arrivals), rows, departures))
    return tuple(found)


def _member(pick: Callable[[int, int], int], one: Row, window: int, min_accepted: int) -> Row:
    length = pick(0, window)
    return Row(one.request, one.slot, one.row, length, pick(min(min_accepted, length), length))


def _some(pick: Callable[[int, int], int], alive: list[Row], most: int) -> list[Row]:
    """Some of the living in random order; at least one."""
    rest = list(alive)
    count = pick(1, min(most, len(rest))) if rest else 0
    return [rest.pop(pick(0, len(rest) - 1)) for _ in range(count)]
