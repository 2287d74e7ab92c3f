"""Compile every kernel variant of a context before anything is captured, by running each once on a null row.

What a Triton kernel is compiled for, beside the sizes of the layers, and where it is settled:

    sizes of a step, strides of its index tensors, absent arguments: at run time (`do_not_specialize`), but for the
        eager mask of a commit and the requests of `align_eager_mask`, with and without
    where a tensor starts: index tensors anywhere; tokens on 16 bytes, or anywhere in a variant of its own
        (kernels/verify.py)
    dtypes: activations have that of the records' keys, raw_beta also FP32; the weights of the convolution that of the
        layers'

Activations, outputs or weights of another dtype compile at their first use. What staging and the advance of a step
need depends on their static rows, and is compiled where these are made (`StepInputs`, `DecodeStep`).
"""

import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .backends import Backend, load
from .errors import unread_counter
from .layers import LayerStack
from .records import KDARecoverSSMRecords
from .sentinels import FP32_DEFERRED
from .steps import Commit, Rows

log = logging.getLogger("graphrt")


def compile_variants(
    stack: LayerStack, backend: Backend, run_commit: Callable[[Commit], None], run_fold_pending: Callable[..., None]
) -> None:
    """Compile what a later call on these layers can need. Changes no state.

    Args:
        run_commit, run_fold_pending: how the context launches them.
    """
    # On a CPU kernels are interpreted.
    if backend.name == "torch" or stack.device.type != "cuda":
        return
    if backend.name == FP32_DEFERRED:
        importlib.import_module(".kernels.cute.deferred", "graphrt").compile_variants(stack)
    with torch.cuda.device(stack.device), _timed():
        run_variants(stack, backend, run_commit, run_fold_pending)


def run_variants(
    stack: LayerStack, backend: Backend, run_commit: Callable[[Commit], None], run_fold_pending: Callable[..., None]
) -> None:
    """Run plans, folds, convolutions and Triton verifies in every variant, on one null row that has a token."""
    device = stack.device
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    none, offsets = zero - 1, torch.tensor([0, 1], dtype=torch.int32, device=device)
    flag = torch.ones(1, dtype=torch.uint8, device=device)
    pending = torch.zeros(stack.geometry.num_rows, dtype=torch.int32, device=device)
    for align in (False, True):
        table, computed, size = (zero[:, None], zero, stack.spec_query_len) if align else (None, None, None)
        for eager in (None, flag):
            run_commit(Commit(zero, zero, offsets, None, table, computed, size, none, pending, eager))
    run_fold_pending(zero, none, pending, True)
    for requests in (None, zero):
        backend.align_eager_mask(zero, offsets, 1, requests, flag.clone())
    backend.align_state_indices(zero[:, None], zero, 1, zero.clone(), unread_counter(device))

    rows = Rows(offsets, zero, none, pending, stack.spec_query_len)
    for shift in (0, 1):
        # The CuTe verify leaves only tokens that are not aligned to Triton's.
        if shift or backend.name != FP32_DEFERRED:
            for layer in range(len(stack.checkpoints)):
                _run_verifies(stack, layer, rows, shift)
        for state in stack.conv_states:
            _run_convolutions(stack, state, rows, backend, shift)


def _run_verifies(stack: LayerStack, layer: int, rows: Rows, shift: int) -> None:
    """The Triton verify of a layer on tokens that start `shift` elements off 16 bytes."""
    checkpoint, key_gate = stack.checkpoints[layer], stack.key_gates[layer]
    heads, dim, device = checkpoint.shape[1], checkpoint.shape[3], stack.device
    token, out = (
        torch.zeros(shift + heads * dim, dtype=key_gate.dtype, device=device)[shift:].view(1, 1, heads, dim)
        for _ in range(2)
    )
    records = KDARecoverSSMRecords(stack.corrections[layer], key_gate)
    for dtype in {key_gate.dtype, torch.float32}:
        beta = torch.zeros(1, 1, heads, dtype=dtype, device=device)
        load("triton").verify(
            token, token, token, token, beta, stack.A_logs[layer], stack.dt_biases[layer], stack.lower_bound,
            checkpoint, records, rows, out, unread_counter(device),
        )  # fmt: skip


def _run_convolutions(stack: LayerStack, state: Tensor, rows: Rows, backend: Backend, shift: int) -> None:
    """The convolutions of a layer on tokens that start `shift` elements off 16 bytes."""
    channels, device = state.shape[1], stack.device
    # A multiple of 16 elements from token to token, as gaps make it where the channels do not.
    width = -(-(shift + channels) // 16) * 16
    x, out = (torch.zeros(1, width, dtype=state.dtype, device=device)[:, shift : shift + channels] for _ in range(2))
    for dtype, has_bias in stack.conv_kinds:
        weight = torch.zeros(channels, stack.hist + 1, dtype=dtype, device=device)
        bias = weight[:, 0].contiguous() if has_bias else None
        backend.conv_verify(
            x, state, weight, bias, rows, stack.conv_keeps_history, stack.geometry.num_rows, out,
            unread_counter(device),
        )  # fmt: skip


@contextmanager
def _timed() -> Iterator[None]:
    """Say once how many Triton kernels were made in the block, and how long it took."""
    # Of the process, and Triton is imported where it runs.
    from triton import knobs

    made, earlier, start = [], knobs.runtime.jit_post_compile_hook, time.perf_counter()

    def on_compiled(**info: object) -> bool | None:
        made.append(info["fn"])
        return bool(earlier(**info)) if earlier is not None else None

    knobs.runtime.jit_post_compile_hook = on_compiled
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = earlier
    if made:
        # A warning, so that it is seen without a handler: `create` took that long.
        log.warning("graphrt: %d Triton kernels compiled in %.1f s", len(made), time.perf_counter() - start)
