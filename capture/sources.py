"""What may be staged: plain ints, host tensors, device tensors. Everything here reads metadata of tensors only."""

from array import array
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphrt.checks import fail

Source = Tensor | Sequence[int] | Sequence[bool] | Sequence[Sequence[int]] | None
"""A value of `StepInputs.stage`: a tensor on any device, plain ints, or nothing."""

# In the order in which `check_sources` and a staging header take them.
NAMES = (
    "state_indices", "record_rows", "query_start_loc", "num_accepted_tokens", "eager", "request_indices",
    "num_computed_tokens", "block_table", "generation",
)  # fmt: skip
OFFSETS, EAGER, REQUESTS, TABLE = (
    NAMES.index(name) for name in ("query_start_loc", "eager", "request_indices", "block_table")
)
BY_REQUEST = tuple(name in ("num_accepted_tokens", "num_computed_tokens", "block_table") for name in NAMES)
_BYTES = (torch.uint8, torch.bool)


def check_sources(values: tuple[Source, ...], num_reqs: int, device: torch.device, static: Tensor) -> list[Any]:
    """The values, tensors of them int32 (uint8 for eager) on the host or on `device`; a table is always a tensor.

    Runs at every staging, so it asks each tensor as little as it can.

    Args:
        values: in the order of NAMES.
        num_reqs: rows that are staged.
        static: the block of static buffers, of which no source may be a part.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    requests = num_reqs if values[REQUESTS] is None else min(num_reqs, 1)
    first = static.data_ptr()
    end = first + static.nbytes
    checked: list[Any] = list(values)
    for i, value in enumerate(values):
        if value is None:
            continue
        if isinstance(value, Tensor):
            t = value
            dtype, shape = t.dtype, t.shape
            if (dtype is not torch.int32 if i != EAGER else dtype not in _BYTES) or len(shape) != 1 + (i == TABLE):
                _fail_form(i, t)
            if t.device == device:
                if first <= t.data_ptr() < end:
                    fail(NAMES[i], "a tensor of the caller's", "a view of the static buffers", "clone() it")
            elif not t.is_cpu:
                fail(NAMES[i], f"a tensor on {device} or on the host", f"one on {t.device}")
            length = shape[0]
            if dtype is torch.bool:
                checked[i] = t.view(torch.uint8)
        else:
            length = _length(i, value)
            if i == TABLE:
                checked[i] = as_tensor(i, value)
        least = requests if BY_REQUEST[i] else num_reqs + (i == OFFSETS)
        if length < least:
            fail(NAMES[i], f"at least {least} {'requests' if BY_REQUEST[i] else 'entries'}", length)
    return checked


def as_tensor(i: int, value: Any) -> Tensor | None:
    """A checked value as a tensor: nothing of plain ints is rounded, and nothing wraps."""
    if value is None or isinstance(value, Tensor):
        return value
    try:
        if i == TABLE:
            rows = [array("i", row).tolist() for row in value]
            return torch.tensor(rows, dtype=torch.int32).view(len(rows), len(rows[0]) if rows else 0)
        ints = array("B" if i == EAGER else "i", value)
    except (TypeError, OverflowError, ValueError) as error:
        _fail_ints(i, value, error)
    if not ints:
        return torch.empty(0, dtype=torch.uint8 if i == EAGER else torch.int32)
    return torch.frombuffer(ints, dtype=torch.uint8 if i == EAGER else torch.int32)


def _length(i: int, value: Any) -> int:
    try:
        return len(value)
    except TypeError as error:
        _fail_ints(i, value, error)


def _fail_ints(i: int, value: object, error: Exception) -> NoReturn:
    fail(NAMES[i], "a tensor or a sequence of 32-bit ints", f"{type(value).__name__} ({error})")


def _fail_form(i: int, t: Tensor) -> NoReturn:
    kinds = "bool or uint8" if i == EAGER else "int32"
    shape = "[requests, width]" if i == TABLE else "[requests]" if BY_REQUEST[i] else "[rows]"
    fail(NAMES[i], f"{shape} {kinds}", f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}")
