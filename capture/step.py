"""A whole decode step as one recording: k steps are k replays, with no host work between them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphrt import backends, call_order, checked, profiling
from graphrt.capture.inputs import StepInputs, dummy_inputs
from graphrt.capture.recording import Recording
from graphrt.capture.runner import check_parts, proof, settle, static_tensors
from graphrt.capture.sizes import GraphMemory, SizedRecordings, check_sizes
from graphrt.capture.static import allocate_rows, cut_rows
from graphrt.checks import check_callable, check_count, check_flag, check_index, check_tensor, fail
from graphrt.choice import Choice
from graphrt.context import KDARecoverSSMCommitContext
from graphrt.errors import error_counter
from graphrt.fixed import Fixed
from graphrt.launch import launch, refuse_in_recording
from graphrt.sentinels import SCRATCH_ROW
from graphrt.steps import Advance, Staged, StageSources, StepBegin


@dataclass(frozen=True, slots=True)
class StepRows:
    """What the callables of a step receive: static tensors, the same objects in every replay. B rows, R record rows.

    A padding row has slot 0, record row -1 and no tokens; whatever a callable derives from its row must not reach
    anybody's memory.

    state_indices        [B] int32: state slot
    record_rows          [B] int32: record row, -1 in padding rows
    query_start_loc      [B + 1] int32: row b owns tokens `query_start_loc[b] .. [b + 1]`, 0 to Q of them
    pending              [R] int32: what the verifies of this step replay first; pass it as their `pending`. Those that
                         the step was made with are refused until its commit: it has taken them over
    num_computed_tokens  [B] int32: tokens in the state before this step, as staged and advanced by each step
    eager                [B] uint8: rows that this step commits at once
    block_table          [B, width] int32: state blocks of each row
    spec_query_len       Q, most tokens of a row
    """

    state_indices: Tensor
    record_rows: Tensor
    query_start_loc: Tensor
    pending: Tensor
    num_computed_tokens: Tensor
    eager: Tensor
    block_table: Tensor
    spec_query_len: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampling of a step decides, by row.

    num_accepted_tokens  [B] int32: tokens of the row's window that stand
    query_lens           [B] int32: tokens of the row's next window, 0..Q; the callable has put these tokens where
                         verify reads
    finished             [B] bool or uint8: rows that are done: committed in this step, padding from the next one on
    """

    num_accepted_tokens: Tensor
    query_lens: Tensor
    finished: Tensor | None = None


Verify = Callable[[StepRows], Any]
"""Drafts, if they are made here, then the model with its verifies of all layers. Returns what `Sample` needs."""
Sample = Callable[[StepRows, Any], Sampled]
"""Chooses tokens, accepts drafts, stages the next windows' tokens."""


class DecodeStep(Fixed):
    """One decode step on the device: from staged rows to the staged rows of the next step.

    The launches of a step, in order:

    1. stage: `inputs` are copied to the step's own rows, and `pending` of every live row moves into `rows.pending`
       and becomes zero. A step whose commit never comes has thereby accepted nothing; a step that raises before its
       verifies has lost what was pending, and the state of its rows with it. Rows whose record row has a new owner
       become padding (`StepInputs.ledger`). In align mode rows near a block boundary become eager.
    2. with `flush`: rows whose entry in `flush_rows` is set are drained from `rows.pending` into their checkpoints.
       This is the flush for verifies that replay nothing. Which rows it reaches is a value on the device, so one
       recording serves steps that flush and steps that replay.
    3. `verify(rows)` of the user.
    4. `sample(rows, what verify returned)` of the user.
    5. commit, with the real `pending`.
    6. advance: `inputs` become the next step. Finished rows turn into padding; `num_computed_tokens` grows by what
       was accepted; in align mode the slot is the block that now holds the state (as `align_state_indices`), and a row
       without such a block is retired and counted.

    Everything the callables touch must be static or made by them inside the step, and they must leave what belongs
    to no live row alone: warm-up runs them on padding rows. The host joins in by `inputs.stage(...)` between two
    replays; reading `inputs` tells it which rows are still there. `graphrt.demo` is a worked example.

    Args:
        context, pending, inputs, capture_sizes, mamba_block_size: as for `CommitRunner`; one size, all rows, by
            default.
        verify, sample: the user's part of the step.
        flush: whether the step has part 2.
        choice: eager or deferred by capture size, as for `CommitRunner`: in a size where the eager commit is the
            faster, staging makes every live row eager.
    """

    def __init__(
        self,
        context: KDARecoverSSMCommitContext,
        pending: Tensor,
        inputs: StepInputs,
        verify: Verify,
        sample: Sample,
        *,
        capture_sizes: Iterable[int] | None = None,
        mamba_block_size: int | None = None,
        flush: bool = False,
        choice: Choice = None,
    ) -> None:
        refuse_in_recording("DecodeStep")
        self.mamba_block_size = check_parts(context, pending, inputs, mamba_block_size)
        check_callable("verify", verify)
        check_callable("sample", sample)
        check_flag("flush", flush)
        self.context, self.pending, self.inputs = context, pending, inputs
        self.verify, self.sample = verify, sample
        self.choice = settle(context, choice)
        most, device = inputs.max_num_reqs, inputs.device
        self.capture_sizes = check_sizes([most] if capture_sizes is None else capture_sizes, most)
        with torch.inference_mode(False):  # they outlive the caller's mode
            self.replayed = torch.zeros(pending.shape, dtype=torch.int32, device=device)
            """[R] int32: pending counts of the rows of the step that runs, `StepRows.pending`."""
            self.flush_rows = torch.ones(most, dtype=torch.bool, device=device) if flush else None
            """[max_num_reqs] bool, True where the step drains a row before its verify; write into it at any time."""
            self._drained, self._nobody = (
                torch.full((most,), SCRATCH_ROW, dtype=torch.int32, device=device) for _ in range(2)
            )
        self._staged = allocate_rows(most, inputs.block_table_width, device)[1]
        self._rows: dict[int, StepRows] = {}
        if device.type == "cuda":
            # Compiled here, whichever device is the current one: padding becomes padding.
            nothing = self._staged.num_accepted_tokens
            with torch.cuda.device(device):
                self._advance(self._staged, self._staged, Sampled(nothing, nothing))
        # The verifies of a step are given `replayed`; the rows are those of `pending` all the same.
        call_order.keep_together(context.stack.corrections, pending)
        self._recordings = SizedRecordings({"step": self._run}, most, device, context.check, self._static_tensors)
        self.outputs: tuple[Any, Sampled] | None = None
        """What `verify` and `sample` returned in the step that ran last: static tensors of its recording."""

    def capture(
        self,
        progress: bool = True,
        *,
        sizes: Iterable[int] | None = None,
        dcp: bool = False,
        prove_neutral: bool = False,
    ) -> None:
        """Record what is not recorded yet, largest size first. May run in mid-service, also after `stage`.

        The warm-up runs on dummy rows; the staged step and the random state are put back.

        Args:
            progress: show a bar with the free memory.
            sizes: other sizes than `capture_sizes`, to add to them.
            dcp: use the dummy rows of decode context parallelism (`dummy_inputs`).
            prove_neutral: as for `CommitRunner.capture`; it proves the callables too, as far as they touch the states.

        Raises:
            ValueError: for a size there is not, or a callable that returns something else than it should.
            RuntimeError: after `close`. CaptureError: if the capture changed a state.
        """
        check_flag("dcp", dcp)
        wanted = self.capture_sizes if sizes is None else check_sizes(sizes, self.inputs.max_num_reqs, "sizes")
        proven = proof(self.context, self.pending, prove_neutral)
        ours = call_order.followed(self.context.stack.corrections)
        with proven, ours, self.inputs.kept(), _random_state_kept(self.inputs.device):
            self._recordings.capture(["step"], wanted, lambda n: dummy_inputs(self.inputs, n, dcp=dcp), progress)
        self.capture_sizes = sorted({*self.capture_sizes, *wanted})

    def replay(self, num_reqs: int, steps: int = 1) -> None:
        """Run `steps` steps of the staged batch, each on what the one before left in `inputs`; waits for nothing.

        The smallest captured size that fits is replayed; without one the steps run eagerly.

        Raises:
            RuntimeError: before capture and after close. ValueError: for more rows than the inputs have, or a negative
            number of steps; in checked mode also for a bad value that was staged, or that the step before left.
        """
        steps = check_count("steps", steps, 0)
        if type(num_reqs) is not int:
            num_reqs = self.inputs.check_num_reqs(num_reqs, 0)
        for _ in range(steps):
            if profiling.ranges is None:
                self._replay(num_reqs)
                continue
            with profiling.annotated("replay", "graphrt.step", profiling.Work(num_reqs)):
                self._replay(num_reqs)

    def _replay(self, num_reqs: int) -> None:
        checks, corrections = checked.enabled(self.context.check), self.context.stack.corrections
        live = self._check_values(num_reqs) if checks else []
        recording = self._recordings.replay("step", num_reqs)
        if recording is not None:
            self.outputs = recording.outputs
            if checks:
                call_order.note_step(corrections, live)
            else:
                call_order.lose_track("commit", corrections)
        elif num_reqs > 0:
            self.run(num_reqs)

    def _check_values(self, num_reqs: int) -> list[int]:
        """Checked mode: the step's own launches read no values in a replay, so the rows are read before it.

        Returns:
            The record rows of the step.
        """
        self.inputs.check_num_reqs(num_reqs, 0)
        if num_reqs > 0:
            rows, owners = self.inputs.rows(num_reqs), self.inputs.owners(num_reqs)
            checked.whole_step(self.inputs.rows(self.inputs.max_num_reqs), num_reqs)
            return checked.step_values(rows, self.pending, owners, self.context.stack)
        return []

    def replay_dummy(self, num_reqs: int, *, dcp: bool = False) -> None:
        """Run one step on dummy rows, as an idle rank must; the staged step is put back and nothing else changes."""
        with self.inputs.kept(), _random_state_kept(self.inputs.device):
            dummy_inputs(self.inputs, num_reqs, dcp=dcp)
            self.replay(num_reqs)

    def run(self, num_reqs: int) -> None:
        """Launch one step of the staged batch from Python, without a recording.

        Inside somebody's own recording this is the way to make the step a part of it.
        """
        with torch.no_grad():
            self.outputs = self._run(num_reqs)

    def recording(self, num_reqs: int) -> Recording | None:
        """What `replay` of so many rows replays, to look at: `dump`, `num_nodes`. None where the step runs eagerly.

        Raises:
            ValueError: for more rows than the inputs have.
        """
        return self._recordings.find("step", self.inputs.check_num_reqs(num_reqs, 0))

    @property
    def last_miss_reason(self) -> str | None:
        """Why the last step that found no recording ran eagerly; None as long as none did."""
        return self._recordings.last_miss_reason

    def memory(self) -> GraphMemory:
        """Bytes of each graph and in total, next to the forecast."""
        return self._recordings.memory()

    def close(self) -> None:
        """Give the recordings' memory back. A second call does nothing."""
        self.outputs = None
        self._recordings.close()

    def _run(self, num_reqs: int) -> tuple[Any, Sampled]:
        num_reqs = self.inputs.check_num_reqs(num_reqs, 1)
        rows = self._step_rows(num_reqs)
        self._stage(num_reqs)
        if self.flush_rows is not None:
            flushed, nobody, drained = (t[:num_reqs] for t in (self.flush_rows, self._nobody, self._drained))
            torch.where(flushed, rows.record_rows, nobody, out=drained)
            self.context.drain(rows.state_indices, drained, self.replayed)
        with call_order.taken_over(self.pending):
            outputs = self.verify(rows)
            sampled = self.sample(rows, outputs)
        self._check_sampled(sampled, num_reqs)
        self._commit(rows, sampled)
        self._advance(cut_rows(self._staged, num_reqs), self.inputs.rows(self.inputs.max_num_reqs), sampled)
        return outputs, sampled

    def _static_tensors(self) -> dict[str, Tensor]:
        found = static_tensors(self.context, self.inputs) | {"step.replayed": self.replayed}
        return found if self.flush_rows is None else found | {"step.flush_rows": self.flush_rows}

    def _step_rows(self, num_reqs: int) -> StepRows:
        rows = self._rows.get(num_reqs)
        if rows is None:
            cut = cut_rows(self._staged, num_reqs)
            rows = self._rows[num_reqs] = StepRows(
                state_indices=cut.state_indices,
                record_rows=cut.record_rows,
                query_start_loc=cut.query_start_loc,
                pending=self.replayed,
                num_computed_tokens=cut.num_computed_tokens,
                eager=cut.eager,
                block_table=cut.block_table,
                spec_query_len=self.inputs.spec_query_len,
            )
        return rows

    def _stage(self, num_reqs: int) -> None:
        staged, i = cut_rows(self._staged, num_reqs), self.inputs.rows(num_reqs)
        sources = StageSources(
            num_reqs=num_reqs,
            state_indices=i.state_indices,
            record_rows=i.record_rows,
            query_start_loc=i.query_start_loc,
            eager=i.eager,
            num_computed_tokens=i.num_computed_tokens,
            block_table=i.block_table,
            generation=i.generation,
        )
        num_slots, eager = self.context.stack.geometry.num_slots, self.choice.eager(num_reqs)
        begin = StepBegin(self.pending, self.replayed, num_slots, self.mamba_block_size, eager)
        device = self.inputs.device
        run = backends.by_device(device).stage
        ledger = self.inputs.ledger
        current = None if ledger is None else ledger.generation
        launch("graphrt.stage", run, staged, sources, begin, error_counter(device), current)

    def _commit(self, rows: StepRows, sampled: Sampled) -> None:
        align = self.mamba_block_size is not None
        self.context.commit(
            sampled.num_accepted_tokens,
            rows.state_indices,
            rows.query_start_loc,
            block_table=rows.block_table if align else None,
            num_computed_tokens=rows.num_computed_tokens if align else None,
            mamba_block_size=self.mamba_block_size,
            record_rows=rows.record_rows,
            pending=self.pending,
            eager=rows.eager,
        )

    def _advance(self, rows: Staged, next_rows: Staged, sampled: Sampled) -> None:
        finished = sampled.finished
        advance = Advance(
            rows=rows,
            next_rows=next_rows,
            num_accepted_tokens=sampled.num_accepted_tokens,
            query_lens=sampled.query_lens,
            finished=finished.view(torch.uint8) if finished is not None else None,
            spec_query_len=self.inputs.spec_query_len,
            num_slots=self.context.stack.geometry.num_slots,
            mamba_block_size=self.mamba_block_size,
        )
        run = backends.by_device(self.inputs.device).advance
        launch("graphrt.advance", run, advance, error_counter(self.inputs.device))

    def _check_sampled(self, sampled: object, num_reqs: int) -> None:
        if not isinstance(sampled, Sampled):
            fail("sample", "a Sampled as its result", type(sampled).__name__)
        device = self.inputs.device
        check_index("Sampled.num_accepted_tokens", sampled.num_accepted_tokens, num_reqs, device, exactly=True)
        check_index("Sampled.query_lens", sampled.query_lens, num_reqs, device, exactly=True)
        if sampled.finished is not None:
            check_tensor("Sampled.finished", sampled.finished, (num_reqs,), (torch.bool, torch.uint8), device)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Warm-up and idle steps may draw random numbers; service goes on with those it would have drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
