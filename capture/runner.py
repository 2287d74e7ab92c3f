"""Commit, flush and drain of a context, recorded for every batch size."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphrt import call_order, checked, profiling
from graphrt.capture.inputs import StepInputs, dummy_inputs
from graphrt.capture.neutral import state_neutral
from graphrt.capture.sizes import GraphMemory, SizedRecordings, check_sizes
from graphrt.checks import check_block_size, check_entries_apart, check_flag, check_index, check_kind, fail
from graphrt.choice import Choice, CommitChoice, StepShape, choose_commit
from graphrt.context import KDARecoverSSMCommitContext
from graphrt.fixed import Fixed
from graphrt.launch import refuse_in_recording
from graphrt.steps import Commit, Staged

log = logging.getLogger("graphrt")

MODES = ("commit", "flush", "drain")
# Category and message of each mode's range.
_RANGES = {mode: (profiling.LAUNCH_CATEGORIES[f"graphrt.{mode}"], f"graphrt.{mode}") for mode in MODES}


def check_parts(
    context: KDARecoverSSMCommitContext, pending: Tensor, inputs: StepInputs, mamba_block_size: int | None
) -> int | None:
    """Whether these parts can work together; returns the block size.

    Raises:
        ValueError: naming the one that does not fit.
    """
    check_kind("context", context, KDARecoverSSMCommitContext)
    check_kind("inputs", inputs, StepInputs)
    stack, capacity = context.stack, context.commit_lens.shape[0]
    check_index("pending", pending, stack.geometry.num_rows, stack.device, exactly=True)
    check_entries_apart("pending", pending)
    if inputs.device != stack.device:
        fail("inputs", f"buffers on {stack.device}, like the checkpoints", f"buffers on {inputs.device}")
    if inputs.spec_query_len != context.spec_query_len:
        fail("inputs", f"spec_query_len {context.spec_query_len}, as the context's", inputs.spec_query_len)
    ledger, num_rows = inputs.ledger, stack.geometry.num_rows
    if ledger is not None and ledger.generation.shape[0] != num_rows:
        fail("inputs", f"a ledger of {num_rows} rows, as the records have", f"one of {ledger.generation.shape[0]}")
    if ledger is not None and pending.data_ptr() != ledger.pending.data_ptr():
        fail(
            "pending",
            "the counts of the inputs' ledger (ledger.pending)",
            "other ones",
            "only there a new owner has none",
        )
    if inputs.max_num_reqs > capacity:
        fail("inputs", f"at most {capacity} rows, the context's max_num_reqs", inputs.max_num_reqs)
    if mamba_block_size is None:
        return None
    block_size = check_block_size(mamba_block_size, context.spec_query_len)
    if inputs.block_table_width < 1:
        fail("inputs", "a block_table_width of at least 1, since mamba_block_size is given", inputs.block_table_width)
    return block_size


def settle(context: KDARecoverSSMCommitContext, choice: Choice) -> CommitChoice:
    """Eager or deferred for a context's steps; the log says which and why."""
    settled = choose_commit(StepShape.of(context), choice)
    log.info("graphrt commit: %s", settled.reason)
    return settled


def proof(context: KDARecoverSSMCommitContext, pending: Tensor, wanted: bool) -> AbstractContextManager[None]:
    """A block in which no checkpoint, convolution state, record or pending count may change, if that is wanted."""
    check_flag("prove_neutral", wanted)
    if not wanted:
        return nullcontext()
    stack = context.stack
    state: dict[str, Tensor | list[Tensor]] = {
        "checkpoint": stack.checkpoints,
        "convolution state": stack.conv_states,
        "correction": stack.corrections,
        "key and gate": stack.key_gates,
        "pending": pending,
    }
    return state_neutral(state, values=False)


def static_tensors(context: KDARecoverSSMCommitContext, inputs: StepInputs) -> dict[str, Tensor]:
    """By name, what a recording reads by address and somebody could replace: as its owners have it now."""
    found = context.stack.tensors_now() | {f"inputs.{name}": getattr(inputs, name) for name in Staged.__slots__}
    if inputs.ledger is not None:
        found |= {"ledger.pending": inputs.ledger.pending, "ledger.generation": inputs.ledger.generation}
    return found


class CommitRunner(Fixed):
    """Replays the commit, flush or drain of a staged step, from the static inputs alone.

    A step is `inputs.stage(...)`, the engine's verify and sampling, then `commit`. Every replay writes the context's
    plan before it folds by it, so all recordings may share that plan as long as they, and the context's eager
    methods, run in one stream order. Batches in flight at the same time need a `StepInputs` and a runner each.

    Args:
        context: whose layers are folded.
        pending: [record rows] int32, by record row: `RecordSlots.pending`, of the inputs' ledger where they have one.
        inputs: what every recording reads.
        capture_sizes: batch sizes to record; powers of two up to `inputs.max_num_reqs` by default.
        mamba_block_size: align mode, with the staged block table and computed counts. Rows near a block boundary are
            folded now by the plan itself; pass `eager=True` and stage `align_eager_mask` to keep them uncounted.
        eager: whether the staged eager mask takes part in the commit.
        choice: eager or deferred by capture size, as `graphrt.choice.choose_commit` takes it. By default the measured
            table decides, and what nobody measured is deferred; the captures that it makes eager commit all their
            rows at once. `runner.choice` says what came of it, and why.

    Raises:
        ValueError: for parts that do not fit each other.
    """

    def __init__(
        self,
        context: KDARecoverSSMCommitContext,
        pending: Tensor,
        inputs: StepInputs,
        capture_sizes: Iterable[int] | None = None,
        mamba_block_size: int | None = None,
        eager: bool = False,
        choice: Choice = None,
    ) -> None:
        refuse_in_recording("CommitRunner")
        self.mamba_block_size = check_parts(context, pending, inputs, mamba_block_size)
        check_flag("eager", eager)
        self.context, self.pending, self.inputs = context, pending, inputs
        self.capture_sizes = check_sizes(capture_sizes, inputs.max_num_reqs)
        self.eager = eager
        self.choice = settle(context, choice)
        with torch.inference_mode(False):  # it outlives the caller's mode
            self._all_eager = torch.ones(inputs.max_num_reqs, dtype=torch.uint8, device=inputs.device)
        self._works: dict[str, Callable[[int], None]] = {
            "commit": self._commit,
            "flush": self._flush,
            "drain": self._drain,
        }
        self._recordings = SizedRecordings(
            self._works, inputs.max_num_reqs, inputs.device, context.check, lambda: static_tensors(context, inputs)
        )

    def capture(
        self,
        progress: bool = True,
        *,
        sizes: Iterable[int] | None = None,
        modes: Sequence[str] = MODES,
        dcp: bool = False,
        prove_neutral: bool = False,
    ) -> None:
        """Record what is not recorded yet, largest size first. May run in mid-service, also after `stage`.

        The warm-up runs on dummy rows and the staged step is put back, so no checkpoint, convolution state, record
        or pending count changes.

        Args:
            progress: show a bar with the free memory.
            sizes: other sizes than `capture_sizes`, to add to them.
            modes: some of "commit", "flush" and "drain"; what is left out runs eagerly.
            dcp: use the dummy rows of decode context parallelism (`dummy_inputs`).
            prove_neutral: make sure of it, by checksums of all states before and after (`state_neutral`); waits for the
                device, and takes as long as reading the pools twice. For the first capture of a service.

        Raises:
            ValueError: for a size or mode there is not.
            RuntimeError: after `close`. CaptureError: if the capture changed a state after all.
        """
        check_flag("dcp", dcp)
        listed = isinstance(modes, Sequence) and not isinstance(modes, str) and len(modes) > 0
        if not listed or not all(mode in MODES for mode in modes):
            fail("modes", f"some of {', '.join(MODES)}", repr(modes))
        wanted = self.capture_sizes if sizes is None else check_sizes(sizes, self.inputs.max_num_reqs, "sizes")
        proven, ours = proof(self.context, self.pending, prove_neutral), self.context.stack.corrections
        with self.inputs.kept(), proven, call_order.followed(ours):
            self._recordings.capture(modes, wanted, lambda n: dummy_inputs(self.inputs, n, dcp=dcp), progress)
        self.capture_sizes = sorted({*self.capture_sizes, *wanted})

    def commit(self, num_reqs: int) -> None:
        """Commit the staged step: `pending` is rewritten for its rows, rows to fold now are folded.

        The smallest captured size that fits is replayed; without one the commit runs eagerly.

        Raises:
            RuntimeError: before capture and after close.
            ValueError: for more rows than the inputs have; in checked mode also for a bad value that was staged.
        """
        self._run("commit", num_reqs)

    def flush(self, num_reqs: int) -> None:
        """Fold what the staged rows have pending, once, before a stock verify of the same step."""
        self._run("flush", num_reqs)

    def drain(self, num_reqs: int) -> None:
        """Fold what the staged rows have pending and zero it; may run any number of times."""
        self._run("drain", num_reqs)

    @property
    def last_miss_reason(self) -> str | None:
        """Why the last call that found no recording ran eagerly; None as long as none did."""
        return self._recordings.last_miss_reason

    def memory(self) -> GraphMemory:
        """Bytes of each graph and in total, next to the forecast."""
        return self._recordings.memory()

    def close(self) -> None:
        """Give the recordings' memory back. A second call does nothing."""
        self._recordings.close()

    def _run(self, mode: str, num_reqs: int) -> None:
        if type(num_reqs) is not int:
            num_reqs = self.inputs.check_num_reqs(num_reqs, 0)
        checks = checked.enabled(self.context.check)
        note = self._check_values(mode, num_reqs) if checks else None
        if profiling.ranges is None:
            self._replay(mode, num_reqs)
        else:
            with profiling.annotated(*_RANGES[mode], self._work(mode, num_reqs)):
                self._replay(mode, num_reqs)
        if note is not None:
            note()
        elif mode != "drain" and not checks:
            call_order.lose_track(mode, self.context.stack.corrections)

    def _replay(self, mode: str, num_reqs: int) -> None:
        if self._recordings.replay(mode, num_reqs) is None and num_reqs > 0:
            with torch.no_grad():
                self._works[mode](num_reqs)

    def _work(self, mode: str, num_reqs: int) -> profiling.Work:
        """The payload of a mode's range."""
        if mode != "commit":
            return profiling.Work(num_reqs, num_reqs, 0)
        if self.choice.eager(self._recordings.size_of(mode, num_reqs) or num_reqs):
            return profiling.Work(num_reqs, 0, num_reqs)
        return profiling.commit_work(num_reqs, True, self.eager or self.mamba_block_size is not None)

    def _check_values(self, mode: str, num_reqs: int) -> Callable[[], None] | None:
        """Checked mode: what the context's own methods do before a launch, for a replay does not pass through them.

        Returns:
            What notes the call once it has run.
        """
        self.inputs.check_num_reqs(num_reqs, 0)
        if num_reqs == 0:
            return None
        rows, stack = self.inputs.rows(num_reqs), self.context.stack
        checked.whole_step(self.inputs.rows(self.inputs.max_num_reqs), num_reqs)
        if mode != "commit":
            owners = self.inputs.owners(num_reqs)
            live = checked.flush_values(rows.state_indices, rows.record_rows, self.pending, owners, stack)
            return partial(call_order.note_fold, live, stack.corrections, mode == "drain")
        size = self._recordings.size_of(mode, num_reqs) or num_reqs
        commit = Commit(request_indices=None, **self._commit_arguments(rows, self.choice.eager(size)))
        checked.commit_values(commit, stack.geometry)
        call_order.check_verified(stack.corrections, commit)
        return partial(call_order.close_step, stack.corrections, commit)

    def _commit_arguments(self, rows: Staged, all_eager: bool) -> dict[str, Any]:
        align = self.mamba_block_size is not None
        eager = rows.eager if self.eager else None
        if all_eager:
            eager = self._all_eager[: rows.eager.shape[0]]
        return {
            "num_accepted_tokens": rows.num_accepted_tokens,
            "state_indices": rows.state_indices,
            "query_start_loc": rows.query_start_loc,
            "block_table": rows.block_table if align else None,
            "num_computed_tokens": rows.num_computed_tokens if align else None,
            "mamba_block_size": self.mamba_block_size,
            "record_rows": rows.record_rows,
            "pending": self.pending,
            "eager": eager,
            "owners": self.inputs.owners(rows.state_indices.shape[0]),
        }

    def _commit(self, num_reqs: int) -> None:
        arguments = self._commit_arguments(self.inputs.rows(num_reqs), self.choice.eager(num_reqs))
        self.context.commit(**arguments)

    def _flush(self, num_reqs: int) -> None:
        rows = self.inputs.rows(num_reqs)
        self.context.flush(rows.state_indices, rows.record_rows, self.pending, self.inputs.owners(num_reqs))

    def _drain(self, num_reqs: int) -> None:
        rows = self.inputs.rows(num_reqs)
        self.context.drain(rows.state_indices, rows.record_rows, self.pending, self.inputs.owners(num_reqs))
