"""Compile every kernel variant of a context before anything is captured, by running each once on a null row."""

import importlib
from collections.abc import Callable

import torch

from .backends import Backend
from .errors import error_counter
from .layers import LayerStack
from .records import KDARecoverSSMRecords
from .sentinels import FP32_DEFERRED
from .steps import Commit, Rows


def compile_variants(
    stack: LayerStack, backend: Backend, run_commit: Callable[[Commit], None], run_fold_pending: Callable[..., None]
) -> None:
    """Run plan, folds and verify on one null row, in every variant a later call can need. Changes no state.

    Args:
        run_commit, run_fold_pending: how the context launches them.
    """
    if backend.name == "torch":
        return
    device = stack.device
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    none = torch.full((1,), -1, dtype=torch.int32, device=device)
    offsets = torch.zeros(2, dtype=torch.int32, device=device)
    pending = torch.zeros(stack.geometry.num_rows, dtype=torch.int32, device=device)
    for align in (False, True):
        table, computed, size = (zero[:, None], zero, stack.spec_query_len) if align else (None, None, None)
        for eager in (None, torch.ones(1, dtype=torch.uint8, device=device)):
            run_commit(Commit(zero, zero, offsets, None, table, computed, size, none, pending, eager))
    run_fold_pending(zero, none, pending, True)

    if backend.name == FP32_DEFERRED:
        importlib.import_module(".kernels.cute.deferred", "graphrt").compile_variants(stack)
        return
    _, heads, value_dim, key_dim = stack.checkpoints[0].shape
    token = torch.zeros(1, 1, heads, key_dim, dtype=stack.key_gates[0].dtype, device=device)
    backend.verify(
        token, token, token[..., :value_dim], token, token[..., 0], stack.A_logs[0], stack.dt_biases[0],
        stack.lower_bound,
        stack.checkpoints[0], KDARecoverSSMRecords(stack.corrections[0], stack.key_gates[0]),
        Rows(offsets, zero, none, pending, stack.spec_query_len), torch.empty_like(token), error_counter(device),
    )  # fmt: skip
