"""Host side of the FP32 deferred verify: what it supports, its variants, and its launch. The kernel is verify.py."""

import logging
import time
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import product

import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from ...backends import Support
from ..verify import verify as triton_verify
from .build import DTYPES, Kernels, sm_count
from .commit import compile_commit_f32
from .verify import VerifyF32

log = logging.getLogger("graphrt")

_programmatic: ContextVar[bool] = ContextVar("graphrt_programmatic", default=False)


def _longs(count):
    return tuple(Int64(0) for _ in range(count))


_EXAMPLES = (_longs(6), _longs(6), _longs(5), _longs(3), _longs(5), (Int32(0),) * 4, (Int32(0),) * 5, Float32(0.0))
KERNELS = Kernels(VerifyF32, _EXAMPLES, "6q6q5q3q5q4q5qf4x")
# Items (rows times heads) per multiprocessor below which two blocks share one (tools/bench_step.py).
SPLIT_BELOW = 0.5


def compile_variants(stack) -> None:
    """Compile and load every fold and verify of a context's layers, before any capture; says once how long it took.

    Left out, and compiled at their first eager use: a `raw_beta` in another dtype than the keys.
    """
    start = time.perf_counter()
    state, dtype = stack.checkpoints[0], stack.key_gates[0].dtype
    q, a_log, dt_bias = stack.spec_query_len, stack.A_logs[0].dtype, stack.dt_biases[0].dtype
    for align, indexed in product((False, True), repeat=2):
        compile_commit_f32(state, q, a_log, align, indexed, dtype, dt_bias)
    if dtype in (torch.bfloat16, torch.float16):
        for programmatic in (False, True):
            compile_deferred_verify_f32(state, q, a_log, dtype, dtype, dt_bias, programmatic)
    log.info("graphrt: CuTe DSL kernels ready in %.1f s", time.perf_counter() - start)


@contextmanager
def programmatic_launches(enabled: bool = True):
    """Verifies inside the block are launched programmatically: they may start before their predecessor has ended.

    Right where what a verify reads before its wait (checkpoint, records, pending, slots, rows, query offsets) was
    written at least two launches earlier, or before a launch without the attribute: in a step, every verify but one
    that directly follows the staging, a commit or a flush.
    """
    token = _programmatic.set(enabled)
    try:
        yield
    finally:
        _programmatic.reset(token)


def activations_supported(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, out: Tensor, key_gate: Tensor
) -> Support:
    """Whether the kernel reads these tensors: one 16-bit dtype, and tokens on 16 bytes for the copy engine."""
    tensors = {"q": q, "k": k, "v": v, "raw_g": raw_g, "out": out, "records.key_gate": key_gate}
    for name, t in tensors.items():
        if t.dtype != k.dtype or t.dtype not in (torch.bfloat16, torch.float16):
            return Support(False, f"the CuTe DSL verify takes one 16-bit dtype, got {name} {t.dtype} with k {k.dtype}")
    if raw_beta.dtype not in DTYPES:
        return Support(False, f"the CuTe DSL verify takes raw_beta in {list(DTYPES)}, got {raw_beta.dtype}")
    for name, t in tensors.items():
        stride = t.stride(0 if name == "records.key_gate" else 1)
        if t.data_ptr() % 16 or stride % 8:
            return Support(False, f"the CuTe DSL verify takes tokens on 16 bytes, got {name} with strides {t.stride()}")
    return Support(True, "the CuTe DSL verify reads these activations")


def verify_facts(heads, spec_query_len, dtype, beta_dtype, a_log_dtype, dt_bias_dtype, programmatic, split) -> tuple:
    """Key of a variant."""
    kinds = (DTYPES[dtype], DTYPES[beta_dtype], DTYPES[a_log_dtype], DTYPES[dt_bias_dtype])
    return (heads, spec_query_len, *kinds, programmatic, split)


def compile_deferred_verify_f32(
    state_ref: Tensor,
    spec_query_len: int,
    a_log_dtype: torch.dtype,
    dtype: torch.dtype = torch.bfloat16,
    beta_dtype: torch.dtype | None = None,
    dt_bias_dtype: torch.dtype = torch.float32,
    programmatic: bool = False,
) -> None:
    """Compile and load one variant for the device of `state_ref`; stock and deferred verify are the same kernel."""
    heads, beta_dtype = state_ref.shape[1], beta_dtype or dtype
    for split in (1, 2):
        facts = verify_facts(heads, spec_query_len, dtype, beta_dtype, a_log_dtype, dt_bias_dtype, programmatic, split)
        KERNELS.load(facts, state_ref.device)


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
    programmatic: bool | None = None,
    split: int | None = None,
) -> None:
    """One launch on the current stream; without `pending` the stock verify. Shapes as in the public verify functions.

    Args:
        errors: [2 * kinds] int32 device error counter.
        programmatic: as `programmatic_launches`, whose setting None takes.
        split: 1 or 2 blocks on a head; None decides by the amount of work. The bits are the same.
    """
    batch, tokens, heads = state_indices.shape[0], q.shape[1], q.shape[2]
    if batch == 0 and tokens == 0:
        return
    programmatic = _programmatic.get() if programmatic is None else programmatic
    device = checkpoint_state.device
    items, blocks = batch * heads, sm_count(device)
    if split is None:
        split = 2 if items < SPLIT_BELOW * blocks else 1
    facts = verify_facts(
        heads, spec_query_len, k.dtype, raw_beta.dtype, A_log.dtype, dt_bias.dtype, programmatic, split
    )
    sized = (q, k, raw_g, v, raw_beta, out)
    correction, key_gate = records.correction, records.key_gate
    layer = (checkpoint_state, correction, key_gate)
    rows = state_indices if record_rows is None else record_rows
    counts = state_indices if pending is None else pending
    KERNELS.launch(
        facts,
        device,
        *(t.data_ptr() for t in sized),
        *(t.stride(1) * t.element_size() for t in sized),
        *(t.data_ptr() for t in (*layer, A_log, dt_bias)),
        *(t.stride(0) * t.element_size() for t in layer),
        state_indices.data_ptr(),
        0 if record_rows is None else record_rows.data_ptr(),
        query_start_loc.data_ptr(),
        0 if pending is None else pending.data_ptr(),
        errors.data_ptr(),
        state_indices.stride(0),
        rows.stride(0),
        query_start_loc.stride(0),
        counts.stride(0),
        checkpoint_state.shape[0],
        correction.shape[0],
        batch,
        tokens,
        split * max(1, min(blocks // split, items)),
        lower_bound,
    )


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
        _log_once(support.reason)
        triton_verify(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint, records, rows, out, errors)
        return
    deferred_verify_f32(
        q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint, records,
        rows.query_start_loc, rows.state_indices, rows.spec_query_len, out, errors,
        record_rows=rows.record_rows, pending=rows.pending,
    )  # fmt: skip


@cache
def _log_once(reason: str) -> None:
    log.warning("graphrt: the Triton verify runs: %s", reason)
