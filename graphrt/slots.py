"""The host ledger of record rows: which request owns which row of the records."""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from .call_order import forget_row
from .checks import INT32_MAX, check_count, check_kind, check_several, check_step_device, fail, plain_int
from .fixed import Fixed
from .launch import refuse_in_recording
from .state import StateAccess, check_slot

MOST_BITS = 2048
"""Of a request id that is an int."""


class RecordSlots(Fixed):
    """Record rows 0..R-1 handed out to requests, and the per-row device counts that go with them.

    A request's life:

        admit                   a clean row: nothing pending, a new generation
        (absent)                any number of steps without it: row, records and pending count stay
        preempt ... resume      its row goes to others meanwhile; its state waits in its slot, or is dropped
        release                 it is gone; what it had pending is dropped

    On the device, allocated once:

        pending      [R] int32: records of the row that are accepted and not yet in its checkpoint
        generation   [R] int32: another one whenever the row gets or loses an owner; odd while it has one, 0 before
                     the first

    Rows are plain ints. The ledger knows nothing of state slots, which may change from step to step: where one is
    needed the caller names it. All of this happens between two steps; inside a recording it is refused.
    """

    def __init__(self, max_num_reqs: int, device: torch.device | str) -> None:
        refuse_in_recording("RecordSlots")
        max_num_reqs = check_count("max_num_reqs", max_num_reqs, 1)
        self.pending, self.generation = allocate_counts(max_num_reqs, check_step_device("device", device))
        self._rows: dict[Hashable, int] = {}
        self._preempted: set[Hashable] = set()
        self._free = list(range(max_num_reqs - 1, -1, -1))
        self._generations = [0] * max_num_reqs

    def __repr__(self) -> str:
        owned, device = f"{len(self)} of {len(self._generations)} rows owned", self.pending.device
        return f"RecordSlots({owned}, {self.num_preempted} preempted, on {device})"

    def __len__(self) -> int:
        """Requests that own a row."""
        return len(self._rows)

    @property
    def num_preempted(self) -> int:
        """Requests that wait for a row."""
        return len(self._preempted)

    @property
    def num_free(self) -> int:
        """Rows left to admit."""
        return len(self._free)

    def admit(self, request_id: Hashable) -> int:
        """Give a new request a clean row: pending zero, a new generation. Enqueues two small device writes.

        Raises:
            ValueError: if the request owns a row already, or was preempted; for an int of more than 2048 bits.
            RuntimeError: if no row is free.
        """
        refuse_in_recording("admit")
        _check_id(request_id)
        if request_id in self._preempted:
            raise ValueError(f"request_id: {request_id!r} was preempted; resume it, or release it first")
        return self._take(request_id)

    def resume(self, request_id: Hashable) -> int:
        """Give a preempted request a clean row, as `admit` does. Its state is in the slot that it was drained to.

        Raises:
            ValueError: if the request was not preempted.
            RuntimeError: if no row is free; it stays preempted.
        """
        refuse_in_recording("resume")
        _check_id(request_id)
        if request_id not in self._preempted:
            state = "owns a row, and needs none" if request_id in self._rows else "was never preempted; admit it"
            raise ValueError(f"request_id: {request_id!r} {state}")
        row = self._take(request_id)
        self._preempted.discard(request_id)
        return row

    def preempt(self, request_id: Hashable, context: StateAccess | None = None, slot: int | None = None) -> None:
        """Take the row back and remember the request. Between a commit and the next verify only.

        Args:
            context, slot: drain what is pending into the checkpoint in this state slot, which then holds the request's
                whole state and may be copied elsewhere. Without them what is pending is dropped, and the caller must
                compute the state anew.

        Raises:
            KeyError: if the request owns no row.
            ValueError: for a context without a slot, or a slot that is null or not there; the request keeps its row.
            RuntimeError: in checked mode, if the row's last verify was not committed.
        """
        refuse_in_recording("preempt")
        row = self.row(request_id)
        if (context is None) != (slot is None):
            fail("slot" if slot is None else "context", "context and slot together, or neither", None)
        if context is not None and slot is not None:
            check_kind("context", context, StateAccess)
            slot, device = check_slot("slot", slot, context.stack.geometry.num_slots), self.pending.device
            slots, rows = (torch.full((1,), i, dtype=torch.int32, device=device) for i in (slot, row))
            context.drain(slots, rows, self.pending)
        self._give_back(request_id)
        self._preempted.add(_kept(request_id))

    def release(self, request_id: Hashable) -> None:
        """Forget the request, preempted or not, and take its row back. What it had pending is dropped.

        Drain first whatever must reach the checkpoint (`context.drain`, or `preempt` with a slot).

        Raises:
            KeyError: if there is no such request.
        """
        refuse_in_recording("release")
        _check_id(request_id)
        if request_id in self._preempted:
            self._preempted.discard(request_id)
            return
        if request_id not in self._rows:
            raise KeyError(f"request {request_id!r} is not in the ledger: it was released already, or never admitted")
        self._give_back(request_id)

    def reset(self) -> None:
        """Release every request, as after an abort."""
        refuse_in_recording("reset")
        for request_id in list(self._rows):
            self._give_back(request_id)
        self._preempted.clear()

    def row(self, request_id: Hashable) -> int:
        """The request's record row.

        Raises:
            KeyError: if it owns none.
        """
        try:
            return self._rows[request_id]
        except KeyError:
            _check_id(request_id)
            way_out = "it was preempted, resume it first" if request_id in self._preempted else "admit it first"
            raise KeyError(f"request {request_id!r} owns no record row: {way_out}") from None
        except TypeError:
            _check_id(request_id)
            raise

    def rows(self, request_ids: Iterable[Hashable]) -> list[int]:
        """The record rows of several requests, in order."""
        return [self.row(request_id) for request_id in check_several("request_ids", request_ids, "ids of requests")]

    def generations(self, request_ids: Iterable[Hashable]) -> list[int]:
        """The generations of their rows, in order: what `StepInputs.stage` takes, so that a late step is skipped."""
        return [self._generations[row] for row in self.rows(request_ids)]

    def contents(self) -> dict[str, Any]:
        """The host side as plain values: `requests` to rows, `preempted`, `free` rows, `generations` (`save_state`)."""
        return {
            "requests": dict(self._rows),
            "preempted": list(self._preempted),
            "free": list(self._free),
            "generations": list(self._generations),
        }

    def restore(self, contents: dict[str, Any]) -> None:
        """Take over the `contents` of a ledger of the same size; pending becomes zero.

        A row whose generation here is as late as the restored one goes on to the next that tells an owner, or none:
        what was staged for an owner that this ledger had before stays late.

        Raises:
            ValueError: if they do not make a ledger of this size; nothing is changed then.
        """
        refuse_in_recording("restore")
        owned, waiting, free, saved = _checked_contents(contents, len(self._generations))
        moved = [_restored(now, g) for now, g in zip(self._generations, saved, strict=True)]
        self._rows, self._preempted, self._free, self._generations = owned, waiting, free, moved
        self.generation.copy_(torch.tensor(moved, dtype=torch.int32, device="cpu"))
        self.pending.zero_()
        for row in range(len(moved)):
            forget_row(row, self.pending)

    def _take(self, request_id: Hashable) -> int:
        if request_id in self._rows:
            raise ValueError(
                f"request_id: {request_id!r} owns record row {self._rows[request_id]} already; release it first"
            )
        if not self._free:
            raise RuntimeError(f"no record row is free: all {len(self._rows)} are owned; release a request first")
        row = self._free.pop()
        self._rows[_kept(request_id)] = row
        self._change_owner(row)
        return row

    def _give_back(self, request_id: Hashable) -> None:
        row = self.row(request_id)
        del self._rows[request_id]
        self._change_owner(row)
        self._free.append(row)

    def _change_owner(self, row: int) -> None:
        self._generations[row] = _after(self._generations[row])
        self.pending[row].zero_()
        self.generation[row].fill_(self._generations[row])
        forget_row(row, self.pending)


def allocate_counts(max_num_reqs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`pending` and `generation` of a ledger, zeroed: [max_num_reqs] int32 each."""
    with torch.inference_mode(False):  # the counts outlive the caller's mode
        pending, generation = (torch.zeros(max_num_reqs, dtype=torch.int32, device=device) for _ in range(2))
    return pending, generation


def _after(generation: int) -> int:
    """The next one; past the largest int32 again 2, so that odd still tells an owner, and 0 stays "not compared"."""
    return generation + 1 if generation < INT32_MAX else 2


def _restored(now: int, saved: int) -> int:
    """`saved`, or the next one behind `now` that tells the same, where a late step may have been staged with it."""
    if now == 0 or saved > now:
        return saved
    following = _after(now)
    return following if (following - saved) % 2 == 0 else _after(following)


def _checked_contents(contents: Any, num_rows: int) -> tuple[dict[Hashable, int], set[Hashable], list[int], list[int]]:
    """Requests to rows, preempted requests, free rows, generations."""
    fields = ("requests", "preempted", "free", "generations")
    if not isinstance(contents, dict) or any(field not in contents for field in fields):
        fail("contents", f"a dict with {', '.join(fields)}", type(contents).__name__)
    try:
        owned, waiting = dict(contents["requests"]), set(contents["preempted"])
        free, saved = list(contents["free"]), list(contents["generations"])
    except (TypeError, ValueError) as error:
        fail("contents", "requests with their rows, and lists of the rest", error)
    for request_id in (*owned, *waiting):
        _check_id(request_id)
    rows = [*owned.values(), *free]
    if any(type(row) is not int for row in rows) or sorted(rows) != list(range(num_rows)):
        fail("contents", f"each of {num_rows} rows owned or free, once", rows)
    if waiting & owned.keys():
        fail("contents", "requests that own a row or were preempted", f"both for {waiting & owned.keys()}")
    parity = [int(row in owned.values()) for row in range(num_rows)]
    fits = len(saved) == num_rows and all(type(g) is int and 0 <= g <= INT32_MAX for g in saved)
    if not fits or [g % 2 for g in saved] != parity:
        fail("contents", f"{num_rows} generations of 31 bits, odd for a row that is owned", saved)
    return owned, waiting, free, saved


def _kept(request_id: Hashable) -> Hashable:
    """The id that a ledger keeps: NumPy's ints are equal to Python's, but no file can hold them."""
    number = plain_int(request_id)
    return number if number is not None and number == request_id else request_id


def _check_id(request_id: object) -> None:
    # Python may be set to print no int of more than 640 digits: no error and no file could then name it.
    if isinstance(request_id, int) and request_id.bit_length() > MOST_BITS:
        fail("request_id", f"an id of at most {MOST_BITS} bits", f"an int of {request_id.bit_length()}")
    try:
        hash(request_id)
    except TypeError:
        fail("request_id", "an id that can be hashed", f"{type(request_id).__name__} {request_id!r}")
