"""Convolution and verify of one layer in two launches, behind the one signature of the fused verify."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import unread_counter


def composed(
    verify: Callable[..., None], conv_verify: Callable[..., None], q: Tensor, k: Tensor, v: Tensor, *arguments: Any,
) -> None:  # fmt: skip
    """Run `conv_verify` on the raw projections q, k, v [1, T, H, K], then `verify` on what it made of them.

    Both meet the same rows; what is wrong with them is counted by `verify`.

    Args:
        arguments: of the verify behind q, k and v: raw_g to records, rows, the convolution, out and errors.
    """
    *inputs, records, rows, conv, out, errors = arguments
    x = projections(q, k, v)
    mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = records.correction.shape[0]
    uncounted = unread_counter(errors.device)
    conv_verify(x, conv.state, conv.weight, conv.bias, rows, conv.keeps_history, num_rows, mixed, uncounted)
    parts = mixed[None].unflatten(-1, (3, *q.shape[2:])).unbind(2)
    verify(*parts, *inputs, records, rows, out, errors)


def projections(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, conv_dim]: a view where q, k and v lie one behind the other in each token, else a copy."""
    tokens, width = q.shape[1], q.shape[2] * q.shape[3]
    step = width * q.element_size()
    apart = [(t.data_ptr() - q.data_ptr(), t.stride(1)) for t in (q, k, v)]
    if apart == [(i * step, q.stride(1)) for i in range(3)]:
        return q.as_strided((tokens, 3 * width), (q.stride(1), 1))
    return torch.cat([t[0].flatten(1) for t in (q, k, v)], 1)
