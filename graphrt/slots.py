"""The host ledger of record rows: which request owns which row of the records."""

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checked import forget_row
from .checks import check_count, check_device, check_several, fail

if TYPE_CHECKING:
    from .context import KDARecoverSSMCommitContext


class RecordSlots:
    """Record rows 0..R-1 handed out to requests, and the per-row device counts that go with them.

    A request's life:

        admit                   a clean row: nothing pending, a new generation
        (absent)                any number of steps without it: row, records and pending count stay
        preempt ... resume      its row goes to others meanwhile; its state waits in its slot, or is dropped
        release                 it is gone; what it had pending is dropped

    Rows are plain ints. The ledger knows nothing of state slots, which may change from step to step: where one is
    needed the caller names it.
    """

    def __init__(self, max_num_reqs: int, device: torch.device | str) -> None:
        check_count("max_num_reqs", max_num_reqs, 1)
        device = check_device("device", device)
        with torch.inference_mode(False):  # the counts outlive the caller's mode
            pending, generation = (torch.zeros(max_num_reqs, dtype=torch.int32, device=device) for _ in range(2))
        self.pending: Tensor = pending
        """[R] int32: records of the row that are accepted and not yet in its checkpoint."""
        self.generation: Tensor = generation
        """[R] int32: grows whenever the row gets or loses an owner; odd while it has one."""
        self._rows: dict[Hashable, int] = {}
        self._preempted: set[Hashable] = set()
        self._free = list(range(max_num_reqs - 1, -1, -1))
        self._generations = [0] * max_num_reqs

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
            ValueError: if the request owns a row already, or was preempted.
            RuntimeError: if no row is free.
        """
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
        _check_id(request_id)
        if request_id not in self._preempted:
            state = "owns a row, and needs none" if request_id in self._rows else "was never preempted; admit it"
            raise ValueError(f"request_id: {request_id!r} {state}")
        row = self._take(request_id)
        self._preempted.discard(request_id)
        return row

    def preempt(
        self, request_id: Hashable, context: "KDARecoverSSMCommitContext | None" = None, slot: int | None = None
    ) -> None:
        """Take the row back and remember the request. Between a commit and the next verify only.

        Args:
            context, slot: drain what is pending into the checkpoint in this state slot, which then holds the request's
                whole state and may be copied elsewhere. Without them what is pending is dropped, and the caller must
                compute the state anew.

        Raises:
            KeyError: if the request owns no row.
            ValueError: for a context without a slot, or a null slot.
            RuntimeError: in checked mode, if the row's last verify was not committed.
        """
        row = self.row(request_id)
        if (context is None) != (slot is None):
            fail("slot" if slot is None else "context", "context and slot together, or neither", None)
        if context is not None and slot is not None:
            check_count("slot", slot, 1)
            one, device = torch.int32, self.pending.device
            context.drain(
                torch.full((1,), slot, dtype=one, device=device),
                torch.full((1,), row, dtype=one, device=device),
                self.pending,
            )
        self._give_back(request_id)
        self._preempted.add(request_id)

    def release(self, request_id: Hashable) -> None:
        """Forget the request, preempted or not, and take its row back. What it had pending is dropped.

        Drain first whatever must reach the checkpoint (`context.drain`, or `preempt` with a slot).

        Raises:
            KeyError: if there is no such request.
        """
        _check_id(request_id)
        if request_id in self._preempted:
            self._preempted.discard(request_id)
            return
        if request_id not in self._rows:
            raise KeyError(f"request {request_id!r} is not in the ledger: it was released already, or never admitted")
        self._give_back(request_id)

    def reset(self) -> None:
        """Release every request, as after an abort."""
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
        """Take over the `contents` of a ledger of the same size, generations included; pending becomes zero.

        Raises:
            ValueError: if they do not make a ledger of this size.
        """
        fields = ("requests", "preempted", "free", "generations")
        if not isinstance(contents, dict) or any(field not in contents for field in fields):
            fail("contents", f"a dict with {', '.join(fields)}", type(contents).__name__)
        rows, generations = [*contents["requests"].values(), *contents["free"]], contents["generations"]
        if sorted(rows) != list(range(len(self._generations))) or len(generations) != len(rows):
            fail("contents", f"each of {len(self._generations)} rows owned or free, once", sorted(rows))
        self._rows, self._preempted = dict(contents["requests"]), set(contents["preempted"])
        self._free, self._generations = list(contents["free"]), list(generations)
        self.generation.copy_(torch.tensor(generations, dtype=torch.int32))
        self.pending.zero_()
        for row in rows:
            forget_row(row)

    def _take(self, request_id: Hashable) -> int:
        if request_id in self._rows:
            raise ValueError(
                f"request_id: {request_id!r} owns record row {self._rows[request_id]} already; release it first"
            )
        if not self._free:
            raise RuntimeError(f"no record row is free: all {len(self._rows)} are owned; release a request first")
        row = self._free.pop()
        self._rows[request_id] = row
        self._change_owner(row)
        return row

    def _give_back(self, request_id: Hashable) -> None:
        row = self.row(request_id)
        del self._rows[request_id]
        self._change_owner(row)
        self._free.append(row)

    def _change_owner(self, row: int) -> None:
        self._generations[row] += 1
        self.pending[row].zero_()
        self.generation[row].fill_(self._generations[row])
        forget_row(row)


def _check_id(request_id: object) -> None:
    try:
        hash(request_id)
    except TypeError:
        fail("request_id", "an id that can be hashed", f"{type(request_id).__name__} {request_id!r}")
