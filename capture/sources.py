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
    "num_computed_tokens", "block_table",
)  # fmt: skip
OFFSETS, EAGER, REQUESTS, TABLE = (
    NAMES.index(name) for name in ("query_start_loc", "eager", "request_indices", "block_table")
)
BY_REQUEST = tuple(map(NAMES.index, ("num_accepted_tokens", "num_computed_tokens", "block_table")))
_BYTES = (torch.uint8, torch.bool)


def check_sources(
    values: tuple[Source, ...], num_reqs: int, device: torch.device, static: Tensor
) -> list[Tensor | None]:
    """The values as int32 tensors (uint8 for eager) on the host or on `device`.

    Args:
        values: in the order of NAMES.
        num_reqs: rows that are staged.
        static: the block of static buffers, of which no source may be a part.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    requests = num_reqs if values[REQUESTS] is None else min(num_reqs, 1)
    first = static.data_ptr()
    end = first + static.numel() * 4
    checked: list[Tensor | None] = []
    for i, value in enumerate(values):
        if value is None:
            checked.append(None)
            continue
        t = value if isinstance(value, Tensor) else _from_ints(i, value)
        dtype = t.dtype
        if t.dim() != (2 if i == TABLE else 1) or (dtype is not torch.int32 if i != EAGER else dtype not in _BYTES):
            _fail_form(i, t)
        least = requests if i in BY_REQUEST else num_reqs + (i == OFFSETS)
        if t.shape[0] < least:
            fail(NAMES[i], f"at least {least} {'requests' if i in BY_REQUEST else 'entries'}", t.shape[0])
        if t.device == device:
            if first <= t.data_ptr() < end:
                fail(NAMES[i], "a tensor of the caller's", "a view of the static buffers", "clone() it")
        elif t.device.type != "cpu":
            fail(NAMES[i], f"a tensor on {device} or on the host", f"one on {t.device}")
        checked.append(t.view(torch.uint8) if dtype is torch.bool else t)
    return checked


def _from_ints(i: int, value: Any) -> Tensor:
    """Plain ints as a host tensor; nothing is rounded and nothing wraps."""
    try:
        if i == TABLE:
            rows = [array("i", row) for row in value]
            return torch.tensor([row.tolist() for row in rows], dtype=torch.int32).view(len(rows), -1)
        ints = array("B" if i == EAGER else "i", value)
    except (TypeError, OverflowError, ValueError) as error:
        fail(NAMES[i], "a tensor or a sequence of 32-bit ints", f"{type(value).__name__} ({error})")
    if not ints:
        return torch.empty(0, dtype=torch.uint8 if i == EAGER else torch.int32)
    return torch.frombuffer(ints, dtype=torch.uint8 if i == EAGER else torch.int32)


def _fail_form(i: int, t: Tensor) -> NoReturn:
    kinds = "bool or uint8" if i == EAGER else "int32"
    shape = "[requests, width]" if i == TABLE else "[requests]" if i in BY_REQUEST else "[rows]"
    fail(NAMES[i], f"{shape} {kinds}", f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}")
