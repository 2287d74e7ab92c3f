"""The host ledger of record rows: which request owns which row of the records."""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from .checked import forget_row
from .checks import check_count


class RecordSlots:
    """Record rows 0..R-1 handed out to requests, and the per-row device counts that go with them.

    A request keeps its row, its records and its pending count while it is absent from a batch. Rows are plain ints.
    """

    def __init__(self, max_num_reqs: int, device: torch.device | str) -> None:
        check_count("max_num_reqs", max_num_reqs, 1)
        with torch.inference_mode(False):  # the counts outlive the caller's mode
            pending, generation = (torch.zeros(max_num_reqs, dtype=torch.int32, device=device) for _ in range(2))
        self.pending: Tensor = pending
        """[R] int32: records of the row that are accepted and not yet in its checkpoint."""
        self.generation: Tensor = generation
        """[R] int32: how many owners the row has had."""
        self._rows: dict[Hashable, int] = {}
        self._free = list(range(max_num_reqs - 1, -1, -1))

    def __len__(self) -> int:
        """Requests that own a row."""
        return len(self._rows)

    @property
    def num_free(self) -> int:
        """Rows left to admit."""
        return len(self._free)

    def admit(self, request_id: Hashable) -> int:
        """Give the request a clean row: pending zero, a new generation. Enqueues two small device writes.

        Raises:
            ValueError: if the request owns a row already.
            RuntimeError: if no row is free.
        """
        if request_id in self._rows:
            raise ValueError(
                f"request_id: {request_id!r} owns record row {self._rows[request_id]} already; release it first"
            )
        if not self._free:
            raise RuntimeError(f"no record row is free: all {len(self._rows)} are owned; release a request first")
        row = self._free.pop()
        self._rows[request_id] = row
        self.pending[row].zero_()
        self.generation[row].add_(1)
        forget_row(row)
        return row

    def row(self, request_id: Hashable) -> int:
        """The request's record row.

        Raises:
            KeyError: if it owns none.
        """
        try:
            return self._rows[request_id]
        except KeyError:
            raise KeyError(f"request {request_id!r} owns no record row; admit it first") from None

    def rows(self, request_ids: Iterable[Hashable]) -> list[int]:
        """The record rows of several requests, in order."""
        return [self.row(request_id) for request_id in request_ids]

    def release(self, request_id: Hashable) -> None:
        """Take the row back. What it had pending is dropped: drain first whatever must reach the checkpoint.

        Raises:
            KeyError: if the request owns no row.
        """
        row = self.row(request_id)
        del self._rows[request_id]
        self.pending[row].zero_()
        self._free.append(row)
