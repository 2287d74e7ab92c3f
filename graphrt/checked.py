"""Checked mode: read the values of a step before it is launched, and raise where a kernel would clamp and count.

On with `GRAPHRT_CHECK=1` or `check=True`. It synchronises, so it steps aside while a graph or a tape records.
"""

import itertools
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import call_order
from .call_order import live_rows, read
from .checks import check_flag, fail
from .environment import CHECK
from .launch import runs_at_once
from .layers import LayerStack
from .steps import Commit, Geometry, Owners, Rows, Staged, StageSources

# Addresses of the checkpoints that go with a convolution state.
_checkpoints: Any = WeakIdKeyDictionary()


def enabled(check: bool | None) -> bool:
    """Whether this call reads values: `check`, or the environment where it is None; never inside a recording."""
    if check is not None:
        check_flag("check", check)
    wanted = CHECK.is_on() if check is None else check
    return wanted and runs_at_once()


def row_values(rows: Rows, num_tokens: int, num_slots: int, num_rows: int) -> None:
    """Raise ValueError for the first bad value of a verify's rows."""
    record_rows = None if rows.record_rows is None else read(rows.record_rows, rows.batch)
    _slots_and_rows(read(rows.state_indices), record_rows, num_slots, num_rows)
    _query_offsets(read(rows.query_start_loc), num_tokens, rows.spec_query_len)
    if rows.pending is not None:
        _pending_counts(read(rows.pending), record_rows or [], rows.spec_query_len)


def written_states(rows: Rows, checkpoint: Tensor) -> None:
    """Raise ValueError for a live row whose state is not finite: nobody wrote its slot, or NaN was accepted."""
    record_rows = range(rows.batch) if rows.record_rows is None else read(rows.record_rows, rows.batch)
    for b, (slot, row) in enumerate(zip(read(rows.state_indices), record_rows, strict=True)):
        if slot > 0 and row >= 0 and not bool(checkpoint[slot].isfinite().all()):
            hint = "a prefill, write_state or zero_state comes before the first verify"
            _fail("checkpoint_state", b, f"a finite state in slot {slot}", f"NaN or infinity ({hint})")


def state_columns(num_computed_tokens: Tensor, block_size: int, width: int) -> None:
    """Raise ValueError for the first request whose state lies in no column of a block table."""
    for b, computed in enumerate(read(num_computed_tokens)):
        if computed < 0 or max(computed - 1, 0) // block_size >= width:
            _fail("num_computed_tokens", b, f"0..{width * block_size}, the tokens of {width} columns", computed)


def flush_values(
    state_indices: Tensor, record_rows: Tensor, pending: Tensor, owners: Owners | None, stack: LayerStack
) -> list[int]:
    """Raise for the first bad value of a flush or drain, else list the record rows that it folds.

    ValueError; RuntimeError for a row whose verify or flush has no commit yet.
    """
    geometry, batch = stack.geometry, state_indices.shape[0]
    rows, slots = read(record_rows, batch), read(state_indices)
    _slots_and_rows(slots, rows, geometry.num_slots, geometry.num_rows)
    _generations(owners, slots, rows)
    counts = read(pending)
    _pending_counts(counts, rows, geometry.spec_query_len)
    live = live_rows(rows, slots)
    call_order.check_committed(live, stack.corrections)
    call_order.check_unflushed(live, counts, stack.corrections)
    return live


def bound(stack: LayerStack) -> None:
    """Raise ValueError for a layer's tensor that is not where the tables of `create` have it: folds would miss it."""
    addresses = {
        "kv_cache[0]": stack.conv_addrs,
        "kv_cache[1]": stack.checkpoint_addrs,
        "recoverssm_records.correction": stack.correction_addrs,
        "recoverssm_records.key_gate": stack.key_gate_addrs,
        "A_log": stack.A_log_addrs,
        "dt_bias": stack.dt_bias_addrs,
    }
    now = stack.tensors_now()
    for field_name, table in addresses.items():
        for i, address in enumerate(read(table)):
            name = f"layers[{i}].{field_name}"
            if now[name].data_ptr() != address:
                hint = "write into it (copy_), or create the context again"
                fail(name, "the memory that it had when the context was created", "other memory", hint)


def note_layer(conv_state: Tensor, checkpoint: Tensor) -> None:
    """A context has these two as one layer's."""
    _checkpoints.setdefault(conv_state, set()).add(checkpoint.data_ptr())


def same_layer(conv_state: Tensor, checkpoint: Tensor) -> None:
    """Raise ValueError for the convolution state of a context's layer beside another layer's checkpoint."""
    if checkpoint.data_ptr() not in _checkpoints.get(conv_state, {checkpoint.data_ptr()}):
        fail("conv.conv_state", "that of the layer whose checkpoint_state is given", "that of another layer")


def _generations(owners: Owners | None, slots: list[int], rows: list[int] | None) -> None:
    if owners is None or rows is None:
        return
    staged, current = read(owners.staged, len(rows)), read(owners.current)
    for b, row in enumerate(rows):
        if slots[b] > 0 and row >= 0 and staged[b] not in (0, current[row]):
            _fail("owners.staged", b, f"generation {current[row]}, the present owner's of record row {row}", staged[b])


def staged_values(s: StageSources, current: Tensor | None) -> None:
    """Raise ValueError for the first row that a staging would take as late, or stage without its request."""
    slots, rows, staged, requests = (
        default if t is None else read(t, s.num_reqs)
        for t, default in (
            (s.state_indices, [0] * s.num_reqs),
            (s.record_rows, [-1] * s.num_reqs),
            (s.generation, [0] * s.num_reqs),
            (s.request_indices, list(range(s.num_reqs))),
        )
    )
    now = [] if current is None else read(current)
    for b, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        if 0 <= row < len(now) and staged[b] not in (0, now[row]):
            _fail("generation", b, f"{now[row]}, the present owner's of record row {row}", staged[b])
        if (slot > 0 or row >= 0) and not 0 <= requests[b] < s.num_requests:
            _fail("request_indices", b, f"0..{s.num_requests - 1}", requests[b])


def whole_step(rows: Staged, num_reqs: int) -> None:
    """Raise ValueError if a row behind the first `num_reqs` is live: a replay of a larger size would take it along."""
    slots, record_rows = read(rows.state_indices), read(rows.record_rows)
    last = max((b for b, slot in enumerate(slots) if slot > 0 and record_rows[b] >= 0), default=-1)
    if last >= num_reqs:
        fail("num_reqs", f"{last + 1}, for row {last} is live as well", num_reqs)


def step_values(rows: Staged, pending: Tensor, owners: Owners | None, stack: LayerStack) -> list[int]:
    """Raise ValueError for the first bad value of staged rows that a recorded step is to run on, else list its rows.

    RuntimeError for a row whose verify or flush has no commit yet.
    """
    geometry = stack.geometry
    slots, record_rows = read(rows.state_indices), read(rows.record_rows)
    _slots_and_rows(slots, record_rows, geometry.num_slots, geometry.num_rows)
    _generations(owners, slots, record_rows)
    _query_offsets(read(rows.query_start_loc), None, geometry.spec_query_len)
    counts = read(pending)
    _pending_counts(counts, record_rows, geometry.spec_query_len)
    live = live_rows(record_rows, slots)
    call_order.check_committed(live, stack.corrections)
    call_order.check_unflushed(live, counts, stack.corrections)
    return live


def commit_values(c: Commit, geometry: Geometry) -> None:
    """Raise ValueError for the first bad value of a commit."""
    slots = read(c.state_indices)
    rows = None if c.record_rows is None else read(c.record_rows, c.batch)
    _slots_and_rows(slots, rows, geometry.num_slots, geometry.num_rows)
    _generations(c.owners, slots, rows)
    offsets = read(c.query_start_loc)
    _query_offsets(offsets, None, geometry.spec_query_len)
    requests = list(range(c.batch)) if c.request_indices is None else read(c.request_indices, c.batch)
    accepted = read(c.num_accepted_tokens)
    for b in range(c.batch):
        if slots[b] <= 0 or (rows is not None and rows[b] < 0):
            continue
        request, length = requests[b], offsets[b + 1] - offsets[b]
        if not 0 <= request < c.num_requests:
            _fail("request_indices", b, f"0..{c.num_requests - 1}", request)
        a = accepted[request]
        if not 0 <= a <= length:
            _fail("num_accepted_tokens", b, f"0..{length}, its query length", a)
        if not geometry.conv_keeps_history and length > 0 and a == 0:
            _fail("num_accepted_tokens", b, "at least 1 (this convolution layout cannot take a verify back)", a)
        _align_values(c, b, request, length, a, geometry)


def _align_values(c: Commit, b: int, request: int, length: int, a: int, geometry: Geometry) -> None:
    table, counts, size = c.block_table, c.num_computed_tokens, c.mamba_block_size
    if table is None or counts is None or size is None:
        return
    computed = int(counts[request])
    if computed < 0:
        _fail("num_computed_tokens", b, "at least 0", computed)
    must = computed % size + length >= size or (computed > 0 and computed % size == 0)
    eager = c.eager is not None and bool(c.eager[b])
    if c.pending is not None and must and not eager:
        _fail("eager", b, "set, for the window can reach a block boundary or starts on one (align_eager_mask)", eager)
    if a == 0 or (c.pending is not None and not must and not eager):
        return
    column = (computed + a - 1) // size
    if column >= table.shape[1]:
        _fail("block_table", b, f"a column below {table.shape[1]} for the last committed token", column)
    block = int(table[request, column])
    if not 0 < block < geometry.num_slots:
        _fail("block_table", b, f"an allocated block 1..{geometry.num_slots - 1} in column {column}", block)


def _slots_and_rows(slots: list[int], rows: list[int] | None, num_slots: int, num_rows: int) -> None:
    slot_owner: dict[int, int] = {}
    row_owner: dict[int, int] = {}
    for b, slot in enumerate(slots):
        row = b if rows is None else rows[b]
        if slot >= num_slots:
            _fail("state_indices", b, f"below {num_slots}", slot)
        if not -1 <= row < num_rows:
            _fail("record_rows", b, f"-1..{num_rows - 1}", row)
        if rows is not None and row >= 0 and slot <= 0:
            _fail("state_indices", b, f"a live slot, since its record row is {row}", f"{slot}, the null slot")
        if slot <= 0 or row < 0:
            continue
        if row in row_owner:
            _fail("record_rows", b, f"a row of its own (batch row {row_owner[row]} has it)", row)
        if slot in slot_owner:
            _fail("state_indices", b, f"a slot of its own (batch row {slot_owner[slot]} has it)", slot)
        row_owner[row], slot_owner[slot] = b, b


def _query_offsets(offsets: list[int], num_tokens: int | None, window: int) -> None:
    if offsets[0] != 0:
        _fail("query_start_loc", 0, "0", offsets[0])
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if not begin <= end <= begin + window:
            _fail("query_start_loc", b, f"0..{window} tokens", end - begin)
        if num_tokens is not None and end > num_tokens:
            _fail("query_start_loc", b, f"an end of at most {num_tokens}, the tokens given", end)


def _pending_counts(pending: list[int], rows: list[int], window: int) -> None:
    for b, row in enumerate(rows):
        if row >= 0 and not 0 <= pending[row] <= window:
            _fail("pending", b, f"0..{window} in record row {row}", pending[row])


def _fail(name: str, row: int, expected: object, got: object) -> None:
    raise ValueError(f"{name}, row {row}: expected {expected}, got {got}")
