"""Whole states of requests: read, copied, moved and cleared, with what is pending folded first.

A request's persistent tensors are its checkpoint and its convolution history, one of each a layer. The records are
work space that every verify rewrites; what they hold beyond the checkpoint is `pending`. So whoever takes a checkpoint
to another place (a copy, an export, a prefix cache) must have it drained, and everything here that reads one does so.
To publish a block in place, `drain` it.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import call_order, checked
from .checks import check_count, check_is_tensor, check_kind, check_several, check_tensor, fail, plain_int
from .fixed import Fixed
from .launch import refuse_in_recording
from .layers import LayerStack
from .sentinels import NULL_BLOCK_ID, SCRATCH_ROW
from .steps import Owners, Plan


@dataclass(frozen=True, slots=True)
class RequestState:
    """The state of one request after its accepted tokens; tensors of its own, one of each a layer.

    checkpoints          [H, V, K]
    histories            [conv_dim, W - 1]: the last accepted inputs of the convolution
    num_computed_tokens  how many tokens are in it, as the caller counts
    """

    checkpoints: list[Tensor]
    histories: list[Tensor]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class BoundaryBlock:
    """A state block that the last commit wrote with the state at exactly its end: a prefix cache may publish it.

    row           batch row
    slot          the block's state slot
    num_accepted  tokens of the row's window up to the boundary: it lies at `num_computed_tokens + num_accepted`
    """

    row: int
    slot: int
    num_accepted: int


def _writing() -> AbstractContextManager[None]:
    """Where torch lets pools be written, wherever the engine allocated them: in inference mode or not."""
    return torch.inference_mode()


class StateAccess(Fixed):
    """What a commit context does with whole states, in stream order. Inside a recording it is refused."""

    stack: LayerStack
    plan: Plan
    check: bool | None

    def drain(self, state_indices: Tensor, record_rows: Tensor, pending: Tensor, owners: Owners | None = None) -> None:
        raise NotImplementedError

    @property
    def persistent(self) -> dict[str, list[Tensor]]:
        """What outlives a step, by name, one tensor a layer: all that a copy of a state slot has to copy.

        `checkpoint` [slots, H, V, K]; `conv_history` [slots, conv_dim, W - 1]. These are the pools themselves: a slot
        holds the state of its request only while nothing is pending, so drain before reading one, or take
        `read_state` or `copy_state`, which do.
        """
        hist = self.stack.hist
        return {
            "checkpoint": self.stack.checkpoints,
            "conv_history": [state[:, :, :hist] for state in self.stack.conv_states],
        }

    @property
    def workspace(self) -> dict[str, list[Tensor]]:
        """What every step rewrites: the records, by record row, the window's convolution inputs, and the plan."""
        stack, plan = self.stack, self.plan
        return {
            "correction": stack.corrections,
            "key_gate": stack.key_gates,
            "conv_window": [state[:, :, stack.hist :] for state in stack.conv_states],
            "plan": [
                plan.commit_lens,
                plan.final_state_indices,
                plan.boundary_state_indices,
                plan.boundary_recovery_lens,
            ],
        }

    def read_state(self, slot: int, row: int, pending: Tensor, num_computed_tokens: int = 0) -> RequestState:
        """A copy of the state in a slot, what its record row has pending folded first. Between commit and verify only.

        Args:
            slot: state slot of the request; in align mode that of the block which holds its state.
            row: its record row, or SCRATCH_ROW for a slot without an owner (a published block).
            pending: [R] int32 (`RecordSlots.pending`).
            num_computed_tokens: how many tokens the state holds, to go with it.

        Raises:
            ValueError: naming the argument.
            RuntimeError: in checked mode, if the row's last verify was not committed.
        """
        refuse_in_recording("read_state")
        slot, row = self._check_slot("slot", slot), self._check_row("row", row, pending)
        self._drain_one(slot, row, pending)
        checkpoints, histories = ([t[slot].clone() for t in tensors] for tensors in self.persistent.values())
        return RequestState(checkpoints, histories, num_computed_tokens)

    def write_state(self, slot: int, state: RequestState, row: int, pending: Tensor) -> None:
        """Put a state that `read_state` gave, here or elsewhere, into a slot.

        Args:
            slot: live state slot. state: of the same sizes and dtypes, on any device.
            row: record row of the request that owns the slot, or SCRATCH_ROW; what it had pending is dropped.
            pending: [R] int32 (`RecordSlots.pending`).

        Raises:
            ValueError: naming the argument.
            RuntimeError: in checked mode, if the row's last verify was not committed.
        """
        refuse_in_recording("write_state")
        slot = self._check_slot("slot", slot)
        check_kind("state", state, RequestState)
        for name, given, tensors in (
            ("state.checkpoints", state.checkpoints, self.stack.checkpoints),
            ("state.histories", state.histories, self.persistent["conv_history"]),
        ):
            if len(check_several(name, given, "a tensor for each layer")) != len(tensors):
                fail(name, f"one tensor for each of {len(tensors)} layers", len(given))
            for i, (one, pool) in enumerate(zip(given, tensors, strict=True)):
                check_is_tensor(f"{name}[{i}]", one)
                check_tensor(f"{name}[{i}]", one, tuple(pool.shape[1:]), (pool.dtype,), one.device)
        row = self._check_row("row", row, pending)
        self._check_committed(row)
        self._forget_pending(row, pending)
        with _writing():
            for given, tensors in zip((state.checkpoints, state.histories), self.persistent.values(), strict=True):
                for one, pool in zip(given, tensors, strict=True):
                    pool[slot].copy_(one)

    def copy_state(self, source: int, target: int, row: int, pending: Tensor, target_row: int = SCRATCH_ROW) -> None:
        """Copy a slot's state to another slot, what is pending folded into the source first.

        Args:
            source, target: state slots.
            row: record row of the request in the source slot, or SCRATCH_ROW for a slot without an owner.
            pending: [R] int32 (`RecordSlots.pending`).
            target_row: likewise of the target slot; what it had pending is dropped.

        Raises:
            ValueError: naming the argument.
            RuntimeError: in checked mode, if the last verify of one of the rows was not committed.
        """
        refuse_in_recording("copy_state")
        source, target = self._check_slot("source", source), self._check_slot("target", target)
        row = self._check_row("row", row, pending)
        target_row = self._check_row("target_row", target_row, pending)
        if 0 <= row == target_row:
            fail("target_row", "another row than the source's", target_row)
        self._check_committed(target_row)
        self._drain_one(source, row, pending)
        self._forget_pending(target_row, pending)
        with _writing():
            for tensors in self.persistent.values():
                for pool in tensors:
                    pool[target].copy_(pool[source])

    def zero_state(self, slot: int) -> None:
        """The state of a request without tokens: zero checkpoint, zero convolution history. In stream order.

        For a request whose record row has nothing pending, as `RecordSlots.admit` gives it: what is pending stays so,
        and would be folded into the zeros.
        """
        refuse_in_recording("zero_state")
        slot = self._check_slot("slot", slot)
        with _writing():
            for tensors in self.persistent.values():
                for pool in tensors:
                    pool[slot].zero_()

    def boundary_blocks(self, num_reqs: int) -> list[BoundaryBlock]:
        """Align mode: the blocks whose boundary state the last commit wrote, in row order. Synchronises.

        A block that is not in the list was not written: it is null in the table, past its end, or the row did not
        reach its end. On the device the same list is `boundary_state_indices[:num_reqs]` (0: none) with
        `boundary_recovery_lens`. Flush, drain, a capture and the next commit overwrite it: after several steps of a
        recording it is that of the last one.

        Args:
            num_reqs: rows of that commit, not padded: entries behind them may be those of an earlier, larger step.
        """
        capacity = self.plan.commit_lens.shape[0]
        num_reqs = check_count("num_reqs", num_reqs, 0)
        if num_reqs > capacity:
            fail("num_reqs", f"0..{capacity} (max_num_reqs)", num_reqs)
        both = torch.stack((self.plan.boundary_state_indices, self.plan.boundary_recovery_lens))[:, :num_reqs]
        slots, lengths = both.tolist()
        return [BoundaryBlock(b, slots[b], lengths[b]) for b in range(num_reqs) if lengths[b] > 0]

    def _drain_one(self, slot: int, row: int, pending: Tensor) -> None:
        if row >= 0:
            device = self.stack.device
            slots, rows = (torch.full((1,), i, dtype=torch.int32, device=device) for i in (slot, row))
            self.drain(slots, rows, pending)

    def _check_committed(self, row: int) -> None:
        if row >= 0 and checked.enabled(self.check):
            call_order.check_committed([row], self.stack.corrections)

    def _forget_pending(self, row: int, pending: Tensor) -> None:
        if row >= 0:
            pending[row].zero_()

    def _check_slot(self, name: str, slot: object) -> int:
        return check_slot(name, slot, self.stack.geometry.num_slots)

    def _check_row(self, name: str, row: object, pending: Tensor) -> int:
        num_rows = self.stack.geometry.num_rows
        check_tensor("pending", pending, (num_rows,), (torch.int32,), self.stack.device)
        number = plain_int(row)
        if number is None or not SCRATCH_ROW <= number < num_rows:
            fail(name, f"a record row, {SCRATCH_ROW}..{num_rows - 1}", repr(row))
        return number


def check_slot(name: str, slot: object, num_slots: int) -> int:
    """A state slot that is not null, as one of Python's ints."""
    number = plain_int(slot)
    if number is None or not NULL_BLOCK_ID < number < num_slots:
        fail(name, f"a live state slot, {NULL_BLOCK_ID + 1}..{num_slots - 1}", repr(slot))
    return number
