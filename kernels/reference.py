"""Every operation in plain torch: the readable specification, and the backend of machines without a GPU.

Batched over rows, one Python iteration a token. On a GPU nothing here reads a value on the host, so it can be captured
like any other backend. Arithmetic is FP32, or FP64 where the checkpoint pool is FP64. All reductions over K go through
`tree_sum`, whose bits do not depend on the batch, and commit, flush, drain and replay all use `fold_records`.

A row that must not write is sent to slot 0 (null: holds no state) with the bytes that are there already, or to the
scratch record row.
"""

import torch
from torch import Tensor

from ..errors import NUM_KINDS, ErrorKind
from ..layers import LayerStack
from ..records import KDARecoverSSMRecords
from ..steps import Plan, Rows


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension (a power of two), halving it: the same bits whatever the other dimensions are."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)).

    torch.sigmoid and silu round their vectorised part and its remainder differently, so that a value's bits would
    depend on its place in the batch; exp and log1p do not.
    """
    return 1 / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), for any x."""
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


def normalized(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x / (tree_sum(x * x) + 1e-6).sqrt()[..., None]


def decay(raw_g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """exp(g) of raw gates [..., H, K]; A_log [H], dt_bias [H * K]."""
    a = A_log.flatten().to(raw_g.dtype).exp()[:, None]
    x = raw_g + dt_bias.to(raw_g.dtype).view(raw_g.shape[-2:])
    g = -a * softplus(x) if lower_bound is None else lower_bound * sigmoid(a * x)
    return g.exp()


def fold_records(
    S: Tensor,         # [B, H, V, K]
    u: Tensor,         # [B, H, Q, V]
    key_gate: Tensor,  # [B, H, Q, 2K]
    begin: Tensor, end: Tensor,  # [B]
    A_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
) -> Tensor:  # fmt: skip
    """S after records begin..end-1 of each row, token by token: the one fold of this backend."""
    key_dim = S.shape[-1]
    for t in range(steps_needed(end, u.shape[2])):
        active = (t >= begin) & (t < end)
        # Records past `end` belong to rejected drafts and may hold anything.
        record = torch.where(active[:, None, None], key_gate[:, :, t], 0).to(S.dtype)
        u_t = torch.where(active[:, None, None], u[:, :, t], 0).to(S.dtype)
        k = normalized(record[..., :key_dim])
        d = decay(record[..., key_dim:], A_log, dt_bias, lower_bound)
        folded = S * d[:, :, None, :] + u_t[..., None] * k[:, :, None, :]
        S = torch.where(active[:, None, None, None], folded, S)
    return S


def steps_needed(counts: Tensor, window: int) -> int:
    """How far a loop over tokens has to go: the longest row on the CPU, the whole window where asking would wait."""
    return window if counts.is_cuda or counts.numel() == 0 else int(counts.max())


def add_errors(errors: Tensor, kind: ErrorKind, mask: Tensor) -> None:
    """Count the set entries of `mask` [B] under one kind; the first launch that counts notes its lowest row."""
    # Asking costs nothing on the CPU.
    if mask.shape[0] == 0 or (not mask.is_cuda and not mask.any()):
        return
    count, first = errors[kind], errors[NUM_KINDS + kind]
    row = torch.where((count == 0) & mask.any(), mask.to(torch.int32).argmax(), first)
    first.copy_(row)
    count.add_(mask.sum().to(torch.int32))


def _arithmetic_dtype(pool: Tensor) -> torch.dtype:
    return torch.float64 if pool.dtype == torch.float64 else torch.float32


def _with_scratch(records: Tensor) -> Tensor:
    """[R + 1, ...] view in which row r is entry r + 1 and the scratch row entry 0."""
    return records.as_strided(
        (records.shape[0] + 1, *records.shape[1:]), records.stride(), records.storage_offset() - records.stride(0)
    )


def _query_ranges(rows: Rows, num_tokens: int, errors: Tensor) -> tuple[Tensor, Tensor]:
    """First token and end of each row [B], clamped to 0..T; not yet cut to Q."""
    offsets = rows.query_start_loc.long()
    begin = offsets[:-1].clamp(0, num_tokens)
    end = torch.maximum(offsets[1:].clamp(0, num_tokens), begin)
    changed = (begin != offsets[:-1]) | (end != offsets[1:]) | (end - begin > rows.spec_query_len)
    add_errors(errors, ErrorKind.QUERY_LEN, changed)
    return begin, end


def live_rows(rows: Rows, num_slots: int, num_rows: int, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Slot (0: null) and record row (-1: none) of each batch row, as int64 [B]."""
    slot = rows.state_indices.long()
    add_errors(errors, ErrorKind.SLOT, slot >= num_slots)
    slot = torch.where((slot > 0) & (slot < num_slots), slot, 0)
    if rows.record_rows is None:
        return slot, torch.arange(rows.batch, device=slot.device)
    row = rows.record_rows[: rows.batch].long()
    stray = (row < -1) | (row >= num_rows)
    add_errors(errors, ErrorKind.ROW, stray & (slot > 0))
    return slot, torch.where(stray, -1, row)


def pending_of(rows: Rows, row: Tensor, errors: Tensor) -> Tensor:
    """Records to replay of each row [B], 0 for row -1."""
    if rows.pending is None:
        return torch.zeros_like(row)
    n = torch.where(row >= 0, rows.pending[row.clamp(min=0)].long(), 0)
    add_errors(errors, ErrorKind.PENDING, (n < 0) | (n > rows.spec_query_len))
    return n.clamp(0, rows.spec_query_len)


def _gather_tokens(x: Tensor, begin: Tensor, length: Tensor, window: int) -> Tensor:
    """[B, Q, ...] of the tokens of each row, zero past `length`."""
    o_t = torch.arange(window, device=x.device)
    valid = o_t < length[:, None]
    if x.shape[0] == 0:
        return x.new_zeros(*valid.shape, *x.shape[1:])
    picked = x[(begin[:, None] + o_t).clamp(max=x.shape[0] - 1)]
    return torch.where(valid.view(*valid.shape, *([1] * (x.ndim - 1))), picked, 0)


def _scatter_tokens(out: Tensor, values: Tensor, begin: Tensor, length: Tensor) -> None:
    """out[token] = values[row, t] for the tokens of each row [B, Q, ...], zero for tokens that belong to no row."""
    tokens = torch.arange(out.shape[0], device=out.device)
    owned = (tokens >= begin[:, None]) & (tokens < (begin + length)[:, None])  # [B, T]
    if values.shape[0] == 0:
        out.zero_()
        return
    row = owned.int().argmax(0)
    t = (tokens - begin[row]).clamp(0, values.shape[1] - 1)
    covered = owned.any(0).view(-1, *([1] * (out.ndim - 1)))
    out.copy_(torch.where(covered, values[row, t], 0))


@torch.no_grad()
def verify(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, checkpoint: Tensor, records: KDARecoverSSMRecords, rows: Rows, out: Tensor,
    errors: Tensor,
) -> None:  # fmt: skip
    """Replay pending records, then one window of the recurrence for each row (design sections 2 and 3.1)."""
    dtype, window, num_tokens = _arithmetic_dtype(checkpoint), rows.spec_query_len, q.shape[1]
    begin, end = _query_ranges(rows, num_tokens, errors)
    slot, row = live_rows(rows, checkpoint.shape[0], records.correction.shape[0], errors)
    n = torch.where(slot > 0, pending_of(rows, torch.where(slot > 0, row, -1), errors), 0)
    length = torch.where(slot > 0, (end - begin).clamp(max=window), 0)

    scratch = rows.record_rows is not None
    correction = _with_scratch(records.correction) if scratch else records.correction
    key_gate = _with_scratch(records.key_gate) if scratch else records.key_gate
    entry = torch.where(slot > 0, row + 1, 0) if scratch else row

    S = checkpoint[slot].to(dtype)
    S = fold_records(S, correction[entry], key_gate[entry], torch.zeros_like(n), n, A_log, dt_bias, lower_bound)
    S = S.to(checkpoint.dtype)  # a 16-bit pool rounds once here, and the window reads what the pool holds
    replayed = n > 0
    target = torch.where(replayed, slot, 0)
    checkpoint[target] = torch.where(replayed[:, None, None, None], S, checkpoint[target])

    raw_k, raw_gate = (_gather_tokens(x[0], begin, length, window) for x in (k, raw_g))
    value = _gather_tokens(v[0], begin, length, window).to(dtype)
    beta = sigmoid(_gather_tokens(raw_beta[0], begin, length, window).to(dtype))
    key = normalized(raw_k.to(dtype))
    query = normalized(_gather_tokens(q[0], begin, length, window).to(dtype)) * q.shape[-1] ** -0.5
    S = S.to(dtype)
    outputs, corrections = torch.zeros_like(value), torch.zeros_like(value)  # [B, Q, H, V]
    for t in range(steps_needed(length, window)):
        S = S * decay(raw_gate[:, t].to(dtype), A_log, dt_bias, lower_bound)[:, :, None, :]
        u = beta[:, t, :, None] * (value[:, t] - tree_sum(S * key[:, t, :, None, :]))
        S = S + u[..., None] * key[:, t, :, None, :]
        outputs[:, t] = tree_sum(S * query[:, t, :, None, :])
        corrections[:, t] = u
    _scatter_tokens(out[0], outputs.to(out.dtype), begin, length)

    fresh = (torch.arange(window, device=length.device) < length[:, None])[:, None, :, None]  # [B, 1, Q, 1]
    correction[entry] = torch.where(fresh, corrections.transpose(1, 2).to(correction.dtype), correction[entry])
    kept = torch.cat((raw_k, raw_gate), -1).transpose(1, 2)
    key_gate[entry] = torch.where(fresh, kept, key_gate[entry])


@torch.no_grad()
def conv_verify(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, keeps_history: bool, num_rows: int,
    out: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    """Causal convolution with silu over each row's window, and the convolution state after it (design section 3.2)."""
    window, hist, num_tokens = rows.spec_query_len, weight.shape[1] - 1, x.shape[0]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    begin, end = _query_ranges(rows, num_tokens, errors)
    slot, row = live_rows(rows, conv_state.shape[0], num_rows, errors)
    n = torch.where(slot > 0, pending_of(rows, torch.where(slot > 0, row, -1), errors), 0)
    length = torch.where(slot > 0, (end - begin).clamp(max=window), 0)

    state = conv_state[slot]  # [B, D, C]
    history = _history(state, n, hist, keeps_history)
    inputs = _gather_tokens(x, begin, length, window).transpose(1, 2)  # [B, D, Q]
    sequence = torch.cat((history, inputs), 2).to(dtype)
    y = torch.zeros_like(sequence[..., :window])
    if bias is not None:
        y = y + bias.to(dtype)[:, None]
    for w in range(hist + 1):
        y = y + weight[:, w].to(dtype)[:, None] * sequence[..., w : w + window]
    _scatter_tokens(out, (y * sigmoid(y)).transpose(1, 2).to(out.dtype), begin, length)

    # Column c of the new state is entry c + shift of (history, inputs), up to the last input.
    shift = torch.zeros_like(length) if keeps_history else (length > 0).long()
    column = torch.arange(state.shape[2], device=state.device)
    entry = column + shift[:, None]
    written = (entry < (hist + length)[:, None])[:, None, :]
    entry = entry.clamp(max=hist + window - 1)[:, None, :].expand_as(state)
    state = torch.where(written, torch.cat((history, inputs), 2).gather(2, entry), state)
    writes = (slot > 0) & (row >= 0) if rows.record_rows is not None else slot > 0
    target = torch.where(writes, slot, 0)
    conv_state[target] = torch.where(writes[:, None, None], state, conv_state[target])


def _history(state: Tensor, n: Tensor, hist: int, keeps_history: bool) -> Tensor:
    """[B, D, hist]: the committed history after n accepted tokens, out of state [B, D, C]."""
    start = n if keeps_history else (n - 1).clamp(min=0)
    column = start[:, None] + torch.arange(hist, device=state.device)
    return state.gather(2, column[:, None, :].expand(-1, state.shape[1], -1))


@torch.no_grad()
def compact_conv(stack: LayerStack, plan: Plan, state_indices: Tensor, align: bool) -> None:
    """Move each folded row's history to columns [0, hist) of its final slot, and of its boundary slot."""
    batch = state_indices.shape[0]
    source, _, targets = _destinations(plan, state_indices, align)
    for conv_state in stack.conv_states:
        state = conv_state[source]
        # The final block last: where it is the boundary's block too, the running state stays.
        moves = [(target, _history(state, n, stack.hist, stack.conv_keeps_history)) for target, n in reversed(targets)]
        for target, history in moves:
            written = (target > 0).view(batch, 1, 1)
            old = conv_state[target]
            new = torch.cat((history, old[..., stack.hist :]), 2)
            conv_state[target] = torch.where(written, new, old)


@torch.no_grad()
def fold(stack: LayerStack, plan: Plan, state_indices: Tensor, record_rows: Tensor | None, align: bool) -> None:
    """Fold a written plan into the checkpoints of every layer."""
    batch = state_indices.shape[0]
    source, n, targets = _destinations(plan, state_indices, align)
    row = torch.arange(batch, device=source.device) if record_rows is None else record_rows[:batch].long()
    row = torch.where(n > 0, row, 0)
    for i, checkpoint in enumerate(stack.checkpoints):
        dtype = _arithmetic_dtype(checkpoint)
        u, key_gate = stack.corrections[i][row], stack.key_gates[i][row]
        gate = stack.A_logs[i], stack.dt_biases[i], stack.lower_bound
        S, done, folded = checkpoint[source].to(dtype), torch.zeros_like(n), []
        for target, end in reversed(targets):
            S = fold_records(S, u, key_gate, done, end, *gate)
            folded.append((target, S))
            done = end
        for target, S in folded:
            written = (target > 0).view(batch, 1, 1, 1)
            checkpoint[target] = torch.where(written, S.to(checkpoint.dtype), checkpoint[target])


def _destinations(plan: Plan, state_indices: Tensor, align: bool) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Source slot and records of each row, and (target slot, records) pairs: the final block, then the boundary's."""
    batch = state_indices.shape[0]
    n = plan.commit_lens[:batch].long()
    source = torch.where(n > 0, state_indices.long(), 0)
    targets = [(torch.where(n > 0, plan.final_state_indices[:batch].long(), 0), n)]
    if align:
        targets.append((plan.boundary_state_indices[:batch].long(), plan.boundary_recovery_lens[:batch].long()))
    return source, n, targets
