"""The static inputs of a step, filled by one launch, and the dummy rows that warm-up and capture run on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphrt import backends, checked, profiling
from graphrt.capture.errors import CaptureError
from graphrt.capture.pinned import PinnedRing
from graphrt.capture.recording import is_under_way
from graphrt.capture.sources import Source, as_tensor, check_sources
from graphrt.capture.static import allocate_rows, cut_rows
from graphrt.checks import check_count, check_flag, check_kind, check_step_device, fail, plain_int
from graphrt.errors import canonical, error_counter
from graphrt.fixed import Fixed
from graphrt.launch import is_recording, launch, refuse_in_recording
from graphrt.slots import RecordSlots
from graphrt.steps import SOURCES, Owners, Staged, StageSources


@dataclass(frozen=True, eq=False)
class StepInputs(Fixed):
    """The static inputs of a step, one row per batch row: what recordings read, and `stage` fills.

    Allocated once (one block), never rebound. Every row starts as padding. A batch of n rows owns rows 0..n-1; all
    rows behind it are padding: slot 0, record row -1, no tokens, nothing accepted, null blocks.

    Args:
        max_num_reqs: R, most rows of a step.
        spec_query_len: Q, 1 + the most draft tokens.
        device: where the buffers live.
        block_table_width: columns of the block table; align mode needs at least one.
        ledger: whose generations staged rows are compared with. A row that is late, for its record row has a new
            owner, becomes padding when it is staged, is skipped by a commit, flush or drain afterwards, and is counted.
            The verifies compare nothing: enqueue them right behind the staging, with no other step of the row between.

    state_indices        [R] int32: state slot
    record_rows          [R] int32: record row
    query_start_loc      [R + 1] int32: row b owns tokens `query_start_loc[b] .. [b + 1]`; constant from the last live
                         row on
    num_accepted_tokens  [R] int32, by row: row b is its own request here
    eager                [R] uint8: rows to commit now
    num_computed_tokens  [R] int32, by row
    block_table          [R, block_table_width] int32, by row; null past the width of what was staged
    generation           [R] int32: the generation of its record row that each row was staged for; 0 is not compared
    """

    max_num_reqs: int
    spec_query_len: int
    device: torch.device
    block_table_width: int = 0
    ledger: RecordSlots | None = field(default=None, repr=False)
    state_indices: Tensor = field(init=False, repr=False)
    record_rows: Tensor = field(init=False, repr=False)
    query_start_loc: Tensor = field(init=False, repr=False)
    num_accepted_tokens: Tensor = field(init=False, repr=False)
    eager: Tensor = field(init=False, repr=False)
    num_computed_tokens: Tensor = field(init=False, repr=False)
    block_table: Tensor = field(init=False, repr=False)
    generation: Tensor = field(init=False, repr=False)
    _block: Tensor = field(init=False, repr=False)
    _addresses: range = field(init=False, repr=False)
    _all: Staged = field(init=False, repr=False)
    _rows: dict[int, Staged] = field(init=False, repr=False, default_factory=dict)
    _ring: PinnedRing | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        refuse_in_recording("StepInputs")
        put: Any = object.__setattr__
        for name, least in (("max_num_reqs", 1), ("spec_query_len", 1), ("block_table_width", 0)):
            put(self, name, check_count(name, getattr(self, name), least))
        put(self, "device", canonical(check_step_device("device", self.device)))
        if self.ledger is not None:
            check_kind("ledger", self.ledger, RecordSlots)
        if self.ledger is not None and self.ledger.generation.device != self.device:
            fail("ledger", f"one on {self.device}, like the buffers", f"one on {self.ledger.generation.device}")
        error_counter(self.device)
        block, staged = allocate_rows(self.max_num_reqs, self.block_table_width, self.device)
        put(self, "_block", block)
        put(self, "_addresses", range(block.data_ptr(), block.data_ptr() + block.nbytes))
        put(self, "_all", staged)
        for name in SOURCES:
            if name != "request_indices":
                put(self, name, getattr(staged, name))
        put(self, "_ring", PinnedRing(staged, self._current) if self.device.type == "cuda" else None)

    @property
    def _current(self) -> Tensor | None:
        return None if self.ledger is None else self.ledger.generation

    def owners(self, num_reqs: int) -> Owners | None:
        """Whom the first `num_reqs` rows were staged for, as commit, flush and drain take it; None without a ledger."""
        return None if self.ledger is None else Owners(self.rows(num_reqs).generation, self.ledger.generation)

    def check_num_reqs(self, num_reqs: object, least: int) -> int:
        """It as one of Python's ints. ValueError unless it is an int from `least` to `max_num_reqs`."""
        count = plain_int(num_reqs)
        if count is None or not least <= count <= self.max_num_reqs:
            fail("num_reqs", f"{least}..{self.max_num_reqs} (max_num_reqs)", repr(num_reqs))
        return count

    def rows(self, num_reqs: int) -> Staged:
        """The static tensors cut to `num_reqs` rows: the same objects at every call.

        Raises:
            ValueError: if there are not so many rows.
        """
        num_reqs = self.check_num_reqs(num_reqs, 1)
        cut = self._rows.get(num_reqs)
        if cut is None:
            cut = self._rows[num_reqs] = cut_rows(self._all, num_reqs)
        return cut

    def stage(
        self,
        *,
        num_reqs: int,
        state_indices: Source = None,
        record_rows: Source = None,
        query_start_loc: Source = None,
        num_accepted_tokens: Source = None,
        eager: Source = None,
        request_indices: Source = None,
        num_computed_tokens: Source = None,
        block_table: Source = None,
        generation: Source = None,
    ) -> None:
        """Copy a step's metadata into the static buffers: one launch on the current stream, and no wait.

        Lists of ints, arrays with a buffer (NumPy's, `array("i")`) and host tensors are read now, device tensors in
        stream order; all kinds may be mixed. On a GPU host values travel through a ring of pinned blocks, so that steps
        may be queued.
        What is omitted gets its padding value in every row. What another stream still writes is waited for as always,
        by `torch.cuda.current_stream().wait_event(...)` before.

        Args:
            num_reqs: rows of the step; the rows behind them become padding.
            state_indices, record_rows, request_indices: [>= num_reqs] int32.
            query_start_loc: [>= num_reqs + 1] int32.
            eager: [>= num_reqs] bool or uint8.
            num_accepted_tokens, num_computed_tokens: [requests] int32. block_table: [requests, width] int32. Row b
                receives the values of request `request_indices[b]` (or b); columns past `block_table_width` are
                dropped, for no kernel could reach them.
            generation: [>= num_reqs] int32, of the record rows (`RecordSlots.generations`); 0 is not compared, and
                without a ledger none is.

        Raises:
            ValueError: naming the argument, before anything is launched; also for a tensor that is a view of the
                static buffers themselves. With GRAPHRT_CHECK=1 also for a late row, and a request that there is not.
            CaptureError: for host values inside a recording, which would freeze them.
        """
        # Asked here and not by a call, which every step would pay for.
        if type(num_reqs) is not int or not 0 <= num_reqs <= self.max_num_reqs:
            num_reqs = self.check_num_reqs(num_reqs, 0)
        values: list[Any] = [
            state_indices, record_rows, query_start_loc, num_accepted_tokens, eager, request_indices,
            num_computed_tokens, block_table, generation,
        ]  # fmt: skip
        ring = self._ring
        # Inside a recording, its warm-up included, and inside a capture that somebody else began.
        recording = is_under_way() or (is_recording() if ring is None else ring.is_capturing())
        if recording:
            _refuse_host_values(values, self.device)
        checks = checked.enabled(None)
        if ring is None or recording or checks:
            sources = self._sources(num_reqs, values)
            if checks:
                checked.staged_values(sources, self._current)
            if ring is None or recording:
                run, errors = backends.by_device(self.device).stage, error_counter(self.device)
                launch("graphrt.stage", run, self._all, sources, None, errors, self._current)
                return
        if profiling.ranges is None:
            ring.stage(num_reqs, values, self.device, self._addresses)
            return
        with profiling.annotated("stage", "graphrt.stage", profiling.stage_work(num_reqs, eager)):
            ring.stage(num_reqs, values, self.device, self._addresses)

    def _sources(self, num_reqs: int, values: list[Any]) -> StageSources:
        """The values that were given, checked, as tensors."""
        check_sources(values, num_reqs, self.device, self._addresses)
        given = {SOURCES[i]: as_tensor(i, value) for i, value in enumerate(values) if value is not None}
        return StageSources(num_reqs, **given)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the staged step back, byte for byte, at the end of the block."""
        saved = self._block.clone()
        try:
            yield
        finally:
            self._block.copy_(saved)


def dummy_inputs(inputs: StepInputs, num_reqs: int, *, dcp: bool = False) -> None:
    """Stage rows that change nothing: what warm-up, capture and the steps of an idle rank run on.

    Args:
        inputs: every row of them becomes a dummy or padding.
        num_reqs: rows of the dummy step.
        dcp: False stages padding. True stages the dummy rows of decode context parallelism: state slots 0, 1, ...
            that look live, full windows, and record rows -1. Verifies read these checkpoints and write the scratch
            row only.

    Raises:
        ValueError: for more rows than the inputs have. CaptureError: inside a recording; stage before it.
    """
    check_kind("inputs", inputs, StepInputs)
    check_flag("dcp", dcp)
    num_reqs = inputs.check_num_reqs(num_reqs, 0)
    if not dcp:
        inputs.stage(num_reqs=0)
        return
    window = inputs.spec_query_len
    offsets = [b * window for b in range(num_reqs + 1)]
    inputs.stage(num_reqs=num_reqs, state_indices=list(range(num_reqs)), query_start_loc=offsets)


def _refuse_host_values(values: Sequence[Source], device: torch.device) -> None:
    for value in values:
        if value is None or (isinstance(value, Tensor) and value.device == device):
            continue
        raise CaptureError(
            "StepInputs.stage inside a recording got host values, which a replay would stage again for ever; "
            "call stage before replay(), or give it device tensors that live as long as the recording"
        )
