"""Host side of the FP32 deferred verify: what it supports, its variants, and its launch. The kernel is verify.py."""

import logging
import time
from collections.abc import Callable
from functools import cache
from itertools import product

import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from ...backends import Support
from ...capturing import is_capturing
from ...launch import is_programmatic
from ...steps import Convolution
from ..fused import composed
from ..verify import verify as triton_verify
from . import commit, order
from .build import DTYPES, Kernels, sm_count, tickets
from .commit import compile_commit_f32
from .verify import VerifyF32

log = logging.getLogger("graphrt")


def _longs(count):
    return tuple(Int64(0) for _ in range(count))


def _ints(count):
    return tuple(Int32(0) for _ in range(count))


_EXAMPLES = (*map(_longs, (6, 6, 5, 3, 6)), _ints(4), _longs(6), *map(_ints, (6, 3, 2)), Float32(0.0))
KERNELS = Kernels(VerifyF32, _EXAMPLES, "6q6q5q3q6q4q6q6q3q2qf4x")
# Items (rows times heads) per multiprocessor below which two blocks share one (tools/bench_step.py).
SPLIT_BELOW = 0.5
# Items a block from which on those of the second half go by ticket. µs without and with: 4231 and 4283 at 11.6 items a
# block (128 requests), 5292 and 5232 at 14.5, 6366 and 6224 at 17.5, 8495 and 8224 at 23.3.
TICKETS_FROM = 14
# Items a block from which on, besides launches of one item a block, blocks help others if at most so many of the
# multiprocessors have no item in the last round. µs without and with: 422 and 399 at one item (8 requests), 443 and 428
# (9), 836 and 851 at 2 (20), 1157 and 1159 at 3 (32), 1428 and 1432 at 4 (42), 2146 and 2125 at 6 (64).
HELP_FROM, HELPERS = 5, 0.3
# Widths of a convolution that the kernel takes in: its history and weights are registers of one thread.
MAX_WIDTH = 5


def compile_variants(stack) -> None:
    """Compile and load every fold and verify of a context's layers, before any capture; says once how long it took."""
    start = time.perf_counter()
    before = KERNELS.count() + commit.KERNELS.count()
    state, dtype = stack.checkpoints[0], stack.key_gates[0].dtype
    q, a_log, dt_bias = stack.spec_query_len, stack.A_logs[0].dtype, stack.dt_biases[0].dtype
    for align, indexed in product((False, True), repeat=2):
        compile_commit_f32(state, q, a_log, align, indexed, dtype, dt_bias)
    if dtype in (torch.bfloat16, torch.float16):
        heads, width = state.shape[1], stack.hist + 1
        fits = stack.conv_states[0].shape[1] == 3 * heads * state.shape[3] and width <= MAX_WIDTH
        for conv_width in (0, width) if fits else (0,):
            compile_deferred_verify_f32(state, q, a_log, dtype, dt_bias, conv_width, stack.conv_keeps_history)
    compiled = KERNELS.count() + commit.KERNELS.count() - before
    if compiled:
        # A warning, so that it is seen without a handler: `create` took that long.
        log.warning("graphrt: %d CuTe DSL kernels compiled in %.1f s", compiled, time.perf_counter() - start)


def activations_supported(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, out: Tensor, key_gate: Tensor
) -> Support:
    """Whether the kernel reads these tensors: one 16-bit dtype, and tokens on 16 bytes."""
    tensors = {"q": q, "k": k, "v": v, "raw_g": raw_g, "out": out, "records.key_gate": key_gate}
    for name, t in tensors.items():
        if t.dtype != k.dtype or t.dtype not in (torch.bfloat16, torch.float16):
            return Support(False, f"the CuTe DSL verify takes one 16-bit dtype, got {name} {t.dtype} with k {k.dtype}")
    if raw_beta.dtype not in (k.dtype, torch.float32):
        return Support(False, f"the CuTe DSL verify takes raw_beta in {k.dtype} or float32, got {raw_beta.dtype}")
    for name, t in tensors.items():
        stride = t.stride(0 if name == "records.key_gate" else 1)
        if t.data_ptr() % 16 or stride % 8:
            return Support(False, f"the CuTe DSL verify takes tokens on 16 bytes, got {name} with strides {t.stride()}")
    return Support(True, "the CuTe DSL verify reads these activations")


def conv_supported(conv: Convolution, k: Tensor) -> Support:
    """Whether the kernel takes this convolution in."""
    width = conv.weight.shape[1]
    if width > MAX_WIDTH:
        return Support(False, f"the CuTe DSL verify fuses convolutions of width up to {MAX_WIDTH}, got {width}")
    for name, t in (("weight", conv.weight), ("bias", conv.bias)):
        if t is not None and t.dtype != k.dtype:
            return Support(False, f"the CuTe DSL verify fuses a convolution in {k.dtype}, got {name} {t.dtype}")
    if not conv.weight.is_contiguous() or conv.weight.data_ptr() % 8:
        return Support(False, f"the CuTe DSL verify fuses contiguous weights, got strides {conv.weight.stride()}")
    return Support(True, "the CuTe DSL verify fuses this convolution")


def verify_facts(heads, spec_query_len, dtype, a_log_dtype, dt_bias_dtype, conv_width, keeps_history, split) -> tuple:
    """Key of a variant; `conv_width` is 0 without a fused convolution, and then its layout does not matter."""
    kinds = (DTYPES[dtype], DTYPES[a_log_dtype], DTYPES[dt_bias_dtype])
    return (heads, spec_query_len, *kinds, conv_width, bool(conv_width and keeps_history), split)


def compile_deferred_verify_f32(
    state_ref: Tensor,
    spec_query_len: int,
    a_log_dtype: torch.dtype,
    dtype: torch.dtype = torch.bfloat16,
    dt_bias_dtype: torch.dtype = torch.float32,
    conv_width: int = 0,
    keeps_history: bool = False,
) -> None:
    """Compile and load one variant for the device of `state_ref`; stock and deferred verify are the same kernel."""
    for split in (1, 2):
        kinds = (dtype, a_log_dtype, dt_bias_dtype)
        facts = verify_facts(state_ref.shape[1], spec_query_len, *kinds, conv_width, keeps_history, split)
        KERNELS.load(facts, state_ref.device)


def share_out(items: int, blocks: int, split: int) -> tuple[int, int, int]:
    """How a launch divides its items among at most `blocks` blocks, `split` of them on an item.

    Returns:
        groups: of `split` blocks, as many as fit. Fewer, for even rounds, would leave no multiprocessor early to the
            next launch's first blocks (12 requests: 72 blocks take 663 µs, 132 take 542; 16: 96 take 722, 132 683).
        helpers: groups that fetch the state of another. Where few multiprocessors are free a round before the others,
            the next launch's first blocks start there, and find the memory idle.
        fixed: items that are not taken by ticket, where there is a counter.
    """
    groups = max(1, min(blocks // split, items))
    rounds, spare = items / groups, blocks - ((items - 1) % groups + 1)
    helpful = rounds <= 1 or (rounds > HELP_FROM and spare <= HELPERS * blocks)
    ticketed = split == 1 and rounds >= TICKETS_FROM
    return groups, spare if split == 1 and helpful else 0, items // groups // 2 * groups if ticketed else items


def deferred_verify_f32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    checkpoint_state: Tensor,
    records,
    query_start_loc: Tensor,
    state_indices: Tensor,
    spec_query_len: int,
    out: Tensor,
    errors: Tensor,
    *,
    record_rows: Tensor | None = None,
    pending: Tensor | None = None,
    conv: Convolution | None = None,
    programmatic: bool | None = None,
    early: bool | None = None,
    split: int | None = None,
) -> None:
    """One launch on the current stream; without `pending` the stock verify. Shapes as in the public verify functions.

    Args:
        errors: [2 * kinds] int32 device error counter.
        conv: q, k and v are raw, and this convolution is run on them first (`conv_supported`).
        programmatic: as `graphrt.programmatic_launches`, whose setting None takes.
        early: read before the wait; None leaves it to order.py. For tests: True is a promise that it is safe.
        split: 1 or 2 blocks on a head; None decides by the amount of work. The bits are the same.
    """
    batch, tokens, heads = state_indices.shape[0], q.shape[1], q.shape[2]
    if batch == 0 and tokens == 0:
        return
    programmatic = is_programmatic() if programmatic is None else programmatic
    device = checkpoint_state.device
    items, blocks = batch * heads, sm_count(device)
    if split is None:
        split = 2 if items < SPLIT_BELOW * blocks else 1
    groups, helpers, fixed = share_out(items, blocks, split)
    counter = tickets(device) if fixed < items else 0
    fixed = fixed if counter else items
    width, keeps = (0, False) if conv is None else (conv.weight.shape[1], conv.keeps_history)
    facts = verify_facts(heads, spec_query_len, k.dtype, A_log.dtype, dt_bias.dtype, width, keeps, split)
    sized = (q, k, raw_g, v, raw_beta, out)
    layer = (checkpoint_state, records.correction, records.key_gate)
    indices = (state_indices, record_rows, query_start_loc, pending)
    note = None
    if programmatic and is_capturing():
        stream = torch.cuda.current_stream(device).cuda_stream
        note = (stream, touched(sized, layer, indices, (A_log, dt_bias), conv))
        programmatic = order.has_one_predecessor(stream)
        early = order.may_start_early(*note) if early is None else early
    conv_values = (0,) * 6
    if conv is not None:
        strides = (x * k.element_size() for x in conv.state.stride())
        bias = 0 if conv.bias is None else conv.bias.data_ptr()
        conv_values = (conv.state.data_ptr(), conv.weight.data_ptr(), bias, *strides)
    KERNELS.launch(
        facts,
        device,
        *(t.data_ptr() for t in sized),
        *(t.stride(1) * t.element_size() for t in sized),
        *(t.data_ptr() for t in (*layer, A_log, dt_bias)),
        *(t.stride(0) * t.element_size() for t in layer),
        *(0 if t is None else t.data_ptr() for t in indices),
        errors.data_ptr(),
        counter,
        *(0 if t is None else t.stride(0) for t in indices),
        *conv_values,
        checkpoint_state.shape[0],
        records.correction.shape[0],
        batch,
        tokens,
        fixed,
        items - fixed + groups - 1,
        int(programmatic and bool(early)),
        int(raw_beta.dtype == torch.float32),
        helpers,
        split * groups,
        int(programmatic),
        lower_bound,
    )
    if note is not None:
        order.launched(*note)


def touched(sized, layer, indices, parameters, conv: Convolution | None) -> order.Touched:
    """What a launch reads before its wait, after it, and writes."""
    *inputs, out = (order.Span.of(t, 1) for t in sized)
    # Records have their scratch row in front.
    state, *records = (order.Span.of(t, 0, int(i > 0)) for i, t in enumerate(layer))
    others = [order.Span.of(t) for t in (*indices, *parameters) if t is not None]
    written = (state, *records, out)
    if conv is not None:
        conv_state = order.Span.of(conv.state)
        written = (*written, conv_state)
        others += [conv_state, *(order.Span.of(t) for t in (conv.weight, conv.bias) if t is not None)]
    return order.Touched((state, *records, *others), tuple(inputs), written)


def verify(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float, checkpoint: Tensor, records, rows, out: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    """The signature of the Triton verify; `rows` holds query_start_loc, state_indices, record_rows, pending.

    Activations that the kernel does not read (`activations_supported`) go to the Triton verify: same contract and
    promise of accuracy, other bits than this backend's fold.
    """
    support = activations_supported(q, k, v, raw_g, raw_beta, out, records.key_gate)
    if not support:
        _log_once(f"the Triton verify runs: {support.reason}")
        triton_verify(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint, records, rows, out, errors)
        return
    deferred_verify_f32(
        q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint, records,
        rows.query_start_loc, rows.state_indices, rows.spec_query_len, out, errors,
        record_rows=rows.record_rows, pending=rows.pending,
    )  # fmt: skip


def fused_verify(
    conv_verify: Callable[..., None],
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float, checkpoint: Tensor, records, rows, conv: Convolution, out: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    """`verify` of raw q, k and v with the convolution in the same launch; else `conv_verify`, then `verify`."""
    inputs = (q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint, records)
    support = activations_supported(q, k, v, raw_g, raw_beta, out, records.key_gate) and conv_supported(conv, k)
    if not support:
        _log_once(f"the convolution has a launch of its own: {support.reason}")
        composed(verify, conv_verify, *inputs, rows, conv, out, errors)
        return
    deferred_verify_f32(
        *inputs, rows.query_start_loc, rows.state_indices, rows.spec_query_len, out, errors,
        record_rows=rows.record_rows, pending=rows.pending, conv=conv,
    )  # fmt: skip


@cache
def _log_once(reason: str) -> None:
    log.warning("graphrt: %s", reason)
