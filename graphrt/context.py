"""Commit contexts: the accepted prefix of a step becomes state, now or with the next verify.

A step is the deferred verify of all layers, then one `commit`. With `pending` the commit only notes each row's
accepted count, and the next verify replays that many records in the pass in which it reads the checkpoint anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from . import backends, call_order, checked
from .checks import (
    check_block_size,
    check_count,
    check_entries_apart,
    check_flag,
    check_index,
    check_is_tensor,
    check_tensor,
    fail,
    plain_int,
)
from .errors import error_counter
from .launch import launch, refuse_in_recording
from .layers import KDALayerLike, LayerStack
from .sentinels import FP32_DEFERRED
from .state import StateAccess
from .steps import Commit, Owners, Plan
from .warmup import compile_variants


@dataclass(frozen=True, repr=False, eq=False)
class KDARecoverSSMCommitContext(StateAccess):
    """The layers of a model, the static plan of a commit, and the kernels that run it.

    Make one with `create`, before any capture. All methods only enqueue launches on the current stream: they allocate
    nothing and read nothing back (in checked mode they do read the values, and raise).
    """

    stack: LayerStack
    plan: Plan
    """[max_num_reqs] int32 vectors, rewritten by every commit, flush and drain."""
    choice: backends.Choice
    check: bool | None = None
    """True: read the values before every launch and raise. None: as `GRAPHRT_CHECK=1` says."""

    @classmethod
    def create(
        cls,
        layers: Sequence[KDALayerLike],
        *,
        spec_query_len: int,
        max_num_reqs: int,
        backend: str = "auto",
        conv_dim_first: bool = True,
        conv_width: int | None = None,
        check: bool | None = None,
    ) -> Self:
        """Build a context over `layers` and compile every kernel variant it can need.

        Args:
            layers: KDALayer, or any objects with its first seven attributes. They agree in sizes and dtypes.
            spec_query_len: Q, 1 + the most draft tokens.
            max_num_reqs: most rows of a step; the records have at least as many record rows.
            backend: "auto" and "fp32_deferred" take the fastest that can run, `backend_reason` says why; "triton" and
                "torch" are taken as asked.
            conv_dim_first: convolution states are [slots, conv_dim, C], else [slots, C, conv_dim].
            conv_width: W; else `layer.conv_weight.shape[1]`, else C - Q + 2 (the engine's layout).
            check: True reads and checks all values before each launch; None leaves it to GRAPHRT_CHECK.

        Raises:
            ValueError: naming the layer and field that does not fit, or the backend that cannot run.
        """
        refuse_in_recording("create")
        spec_query_len = check_count("spec_query_len", spec_query_len, 1)
        max_num_reqs = check_count("max_num_reqs", max_num_reqs, 1)
        check_flag("conv_dim_first", conv_dim_first)
        if check is not None:
            check_flag("check", check)
        stack = LayerStack.build(
            layers,
            spec_query_len=spec_query_len,
            max_num_reqs=max_num_reqs,
            conv_dim_first=conv_dim_first,
            conv_width=conv_width,
        )
        facts = (stack.lower_bound, spec_query_len, stack.key_gates[0].dtype, stack.aligned)
        choice = backends.choose(backend, backends.Facts.of(stack.checkpoints[0], *facts))
        now = stack.tensors_now()
        for i, checkpoint in enumerate(stack.checkpoints):
            checked.note_layer(now[f"layers[{i}].kv_cache[0]"], checkpoint)
        plan = Plan.allocate(max_num_reqs, stack.device)
        error_counter(stack.device)
        context = cls(stack=stack, plan=plan, choice=choice, check=check)
        compile_variants(stack, choice.backend, context._run_commit, context._run_fold_pending)
        return context

    def __repr__(self) -> str:
        """Its sizes: the tensors would be read from the device."""
        layers, capacity = len(self.checkpoints), self.commit_lens.shape[0]
        sizes = f"{layers} layers, spec_query_len={self.spec_query_len}, max_num_reqs={capacity}"
        return f"{type(self).__name__}({self.backend!r}, {sizes}, on {self.stack.device})"

    @property
    def backend(self) -> str:
        """Name of the backend that runs: "fp32_deferred", "triton" or "torch"."""
        return self.choice.backend.name

    @property
    def backend_reason(self) -> str:
        """One sentence: why this backend, and not the one asked for."""
        return self.choice.reason

    @property
    def checkpoints(self) -> list[Tensor]:
        """[slots, H, V, K] of each layer."""
        return self.stack.checkpoints

    @property
    def conv_states(self) -> list[Tensor]:
        """[slots, conv_dim, C] views of each layer."""
        return self.stack.conv_states

    @property
    def lower_bound(self) -> float | None:
        """Of the gate; None for the softplus gate."""
        return self.stack.lower_bound

    @property
    def spec_query_len(self) -> int:
        """Q, 1 + the most draft tokens."""
        return self.stack.spec_query_len

    @property
    def conv_history_len(self) -> int:
        """hist = W - 1."""
        return self.stack.hist

    @property
    def commit_lens(self) -> Tensor:
        """[max_num_reqs] int32: records that the last commit, flush or drain folded, by batch row."""
        return self.plan.commit_lens

    @property
    def final_state_indices(self) -> Tensor:
        """[max_num_reqs] int32: slot that got the folded state."""
        return self.plan.final_state_indices

    @property
    def boundary_state_indices(self) -> Tensor:
        """[max_num_reqs] int32: align mode, block that got the state at a block boundary; 0 for none."""
        return self.plan.boundary_state_indices

    @property
    def boundary_recovery_lens(self) -> Tensor:
        """[max_num_reqs] int32: align mode, records up to that boundary; 0 for none."""
        return self.plan.boundary_recovery_lens

    def commit(
        self,
        num_accepted_tokens: Tensor,
        state_indices: Tensor,
        query_start_loc: Tensor,
        request_indices: Tensor | None = None,
        block_table: Tensor | None = None,
        num_computed_tokens: Tensor | None = None,
        mamba_block_size: int | None = None,
        record_rows: Tensor | None = None,
        pending: Tensor | None = None,
        eager: Tensor | None = None,
        owners: Owners | None = None,
    ) -> None:
        """Advance every row of a step by its accepted tokens: `a = clamp(accepted, 0, min(query length, Q))`.

        Without `pending` the first `a` records are folded now. With it, `pending[record row] = a` and the next verify
        (or flush) folds; rows of `eager` are folded now and left with pending 0.

        Args:
            num_accepted_tokens: [>= requests] int32.
            state_indices: [B] int32 slots; null changes nothing. In align mode the block that holds the state at
                `num_computed_tokens`.
            query_start_loc: [B + 1] int32.
            request_indices: [>= B] int32, request of each row; row b is request b without it.
            block_table, num_computed_tokens, mamba_block_size: align mode, all three or none: [requests, width] int32,
                [requests] int32, tokens a block. The state goes to the block of the last committed token, and at a
                block boundary also to the block that ends there. With `pending`, rows that can reach a boundary are
                folded now whether or not `eager` has them (and counted if it has not: pass `align_eager_mask`). Which
                blocks were written at their boundary is in `boundary_blocks`. A step that starts from such a block
                leaves it as it is; in the convolution layout without room for the history (C = W - 1 + Q - 1) its
                verify shifts the block's history all the same, so copy the block first where it is shared.
            record_rows: [>= B] int32, -1 changes nothing; row b has record row b without it.
            pending: [R] int32, needs `record_rows`.
            eager: [B] bool or uint8, needs `pending`.
            owners: whom each row was staged for, needs `record_rows`. A row that is late, its record row having a new
                owner, changes nothing and is counted.

        Not checked, for a commit does not know T: that the query offsets stay within the tokens of the verify.

        Raises:
            ValueError: naming the argument, before anything is launched.
        """
        check_index("state_indices", state_indices, 0, self.stack.device)
        if state_indices.shape[0] == 0:
            return
        # What is no int is refused by its name, with the other arguments.
        commit = Commit(
            num_accepted_tokens, state_indices, query_start_loc, request_indices, block_table, num_computed_tokens,
            plain_int(mamba_block_size) or mamba_block_size, record_rows, pending, _as_bytes(eager), owners,
        )  # fmt: skip
        self._check_commit(commit)
        if checked.enabled(self.check):
            checked.bound(self.stack)
            checked.commit_values(commit, self.stack.geometry)
            call_order.check_verified(self.stack.corrections, commit)
            call_order.close_step(self.stack.corrections, commit)
        else:
            call_order.unseen("commit", self.stack.corrections)
        launch("graphrt.commit", self._run_commit, commit)

    def flush(self, state_indices: Tensor, record_rows: Tensor, pending: Tensor, owners: Owners | None = None) -> None:
        """Fold the pending records of the rows in place, and compact their convolution history, before a stock verify.

        `pending` is left as it is, for the commit of the same step rewrites it: every flushed row must be in that
        commit, and its convolution verify gets no `pending`. Called twice it folds twice; for anything but a stock
        verify of the same step use `drain`.

        Args:
            state_indices: [B] int32. record_rows: [>= B] int32. pending: [R] int32.
            owners: as in `commit`.
        """
        self._fold_pending("graphrt.flush", state_indices, record_rows, pending, owners, zero=False)

    def drain(self, state_indices: Tensor, record_rows: Tensor, pending: Tensor, owners: Owners | None = None) -> None:
        """Fold the pending records of the rows in place and set their pending to zero: safe to run any number of times.

        For whoever reads the checkpoint next: a request that leaves or is copied, plain decode, export.

        Args:
            state_indices: [B] int32. record_rows: [>= B] int32. pending: [R] int32.
            owners: as in `commit`.
        """
        self._fold_pending("graphrt.drain", state_indices, record_rows, pending, owners, zero=True)

    def _fold_pending(
        self,
        name: str,
        state_indices: Tensor,
        record_rows: Tensor,
        pending: Tensor,
        owners: Owners | None,
        zero: bool,
    ) -> None:
        check_index("state_indices", state_indices, 0, self.stack.device)
        if state_indices.shape[0] == 0:
            return
        check_is_tensor("record_rows", record_rows)
        check_is_tensor("pending", pending)
        self._check_rows(state_indices, record_rows, pending, owners)
        if checked.enabled(self.check):
            checked.bound(self.stack)
            live = checked.flush_values(state_indices, record_rows, pending, owners, self.stack)
            call_order.note_fold(live, self.stack.corrections, zero)
        elif not zero:
            call_order.unseen("flush", self.stack.corrections)
        launch(name, self._run_fold_pending, state_indices, record_rows, pending, zero, owners)

    def _run_commit(self, commit: Commit) -> None:
        backend, stack = self.choice.backend, self.stack
        backend.plan_commit(self.plan, commit, stack.geometry, error_counter(stack.device))
        if commit.pending is not None and commit.eager is None and not commit.align:
            return
        backend.compact_conv(stack, self.plan, commit.state_indices, commit.align)
        backend.fold(stack, self.plan, commit.state_indices, commit.record_rows, commit.align)

    def _run_fold_pending(
        self, state_indices: Tensor, record_rows: Tensor, pending: Tensor, zero: bool, owners: Owners | None = None
    ) -> None:
        backend, stack = self.choice.backend, self.stack
        errors = error_counter(stack.device)
        backend.plan_flush(self.plan, state_indices, record_rows, pending, zero, owners, stack.geometry, errors)
        backend.compact_conv(stack, self.plan, state_indices, False)
        backend.fold(stack, self.plan, state_indices, record_rows, False)

    def _check_rows(
        self, state_indices: Tensor, record_rows: Tensor | None, pending: Tensor | None, owners: Owners | None
    ) -> None:
        device, batch, capacity = self.stack.device, state_indices.shape[0], self.commit_lens.shape[0]
        if batch > capacity:
            fail("state_indices", f"at most {capacity} rows (max_num_reqs)", batch)
        if record_rows is not None:
            check_index("record_rows", record_rows, batch, device)
        if pending is not None:
            check_index("pending", pending, self.stack.geometry.num_rows, device, exactly=True)
            check_entries_apart("pending", pending)
            call_order.check_not_taken(pending)
        if owners is not None:
            if not isinstance(owners, Owners):
                fail("owners", "an Owners(staged, current)", type(owners).__name__)
            if record_rows is None:
                fail("record_rows", "the record row of each row, since owners is given", None)
            check_index("owners.staged", owners.staged, batch, device)
            check_index("owners.current", owners.current, self.stack.geometry.num_rows, device, exactly=True)

    def _check_commit(self, c: Commit) -> None:
        device, batch = self.stack.device, c.batch
        if c.pending is not None and c.record_rows is None:
            fail("record_rows", "the record row of each row, since pending is given", None)
        if c.eager is not None and c.pending is None:
            fail(
                "pending",
                "the pending counts, since eager is given",
                None,
                "an eager row is the exception of a deferred commit",
            )
        self._check_rows(c.state_indices, c.record_rows, c.pending, c.owners)
        check_index("query_start_loc", c.query_start_loc, batch + 1, device, exactly=True)
        requests = batch
        if c.request_indices is not None:
            check_index("request_indices", c.request_indices, batch, device)
            requests = 1
        check_index("num_accepted_tokens", c.num_accepted_tokens, requests, device)
        if c.eager is not None:
            check_tensor("eager", c.eager, (batch,), (torch.bool, torch.uint8), device)
        self._check_align(c, requests)

    def _check_align(self, c: Commit, requests: int) -> None:
        align = {
            "block_table": c.block_table,
            "num_computed_tokens": c.num_computed_tokens,
            "mamba_block_size": c.mamba_block_size,
        }
        missing = [name for name, value in align.items() if value is None]
        if len(missing) == len(align):
            return
        if missing:
            fail(missing[0], "the align arguments all together (" + ", ".join(align) + ")", None)
        if c.block_table is None or c.num_computed_tokens is None or c.mamba_block_size is None:
            return  # unreachable; the three are narrowed for the type checker
        check_tensor("block_table", c.block_table, (None, None), (torch.int32,), self.stack.device)
        if c.block_table.shape[0] < requests:
            fail("block_table", f"at least {requests} requests", c.block_table.shape[0])
        check_index("num_computed_tokens", c.num_computed_tokens, requests, self.stack.device)
        check_block_size(c.mamba_block_size, self.spec_query_len)


class KDADeferredCommitContext(KDARecoverSSMCommitContext):
    """The commit context of deferred steps: as its base, with `fp32_deferred` kernels by default.

    Where those cannot run it falls back to the next backend that can; `backend_reason` says which and why.
    """

    @classmethod
    def create(
        cls,
        layers: Sequence[KDALayerLike],
        *,
        spec_query_len: int,
        max_num_reqs: int,
        backend: str = FP32_DEFERRED,
        conv_dim_first: bool = True,
        conv_width: int | None = None,
        check: bool | None = None,
    ) -> Self:
        """As `KDARecoverSSMCommitContext.create`."""
        return super().create(
            layers,
            spec_query_len=spec_query_len,
            max_num_reqs=max_num_reqs,
            backend=backend,
            conv_dim_first=conv_dim_first,
            conv_width=conv_width,
            check=check,
        )


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as the bytes it is stored in: kernels take one kind."""
    return mask.view(torch.uint8) if isinstance(mask, Tensor) and mask.dtype == torch.bool else mask
