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
PLAIN, HOST, DEVICE = range(3)

Checked = tuple[int, Any, int, int, int]
"""One source that was given: index in NAMES; tensor or list; PLAIN, HOST or DEVICE; address; entries that are read."""

_BYTES = (torch.uint8, torch.bool)


def check_sources(values: tuple[Source, ...], num_reqs: int, device: torch.device, static: range) -> list[Checked]:
    """The values that were given, with what a staging needs to know of them; a table is always a tensor.

    Runs at every staging, so it asks each tensor as little as it can.

    Args:
        values: in the order of NAMES.
        num_reqs: rows that are staged.
        static: addresses of the static buffers, of which no source may be a part.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    requests = num_reqs if values[REQUESTS] is None else min(num_reqs, 1)
    checked: list[Checked] = []
    for i, value in enumerate(values):
        if value is None:
            continue
        place, address = PLAIN, 0
        if isinstance(value, Tensor):
            dtype, shape = value.dtype, value.shape
            if (dtype is not torch.int32 if i != EAGER else dtype not in _BYTES) or len(shape) != 1 + (i == TABLE):
                _fail_form(i, value)
            place = HOST if value.is_cpu else DEVICE
            if place == DEVICE and value.device != device:
                fail(NAMES[i], f"a tensor on {device} or on the host", f"one on {value.device}")
            try:
                address = value.data_ptr()
            except RuntimeError as error:
                fail(NAMES[i], "a dense tensor", f"one without memory of its own ({error})")
            if address in static:
                fail(NAMES[i], "a tensor of the caller's", "a view of the static buffers", "clone() it")
            length = shape[0]
        else:
            if type(value) is not list and type(value) is not tuple:
                value = _plain(i, value)
            length = len(value)
            if i == TABLE:
                value = as_tensor(i, value)
                place, address = HOST, value.data_ptr()
        if BY_REQUEST[i]:
            if length < requests:
                fail(NAMES[i], f"at least {requests} requests", length)
        else:
            least = num_reqs + (i == OFFSETS)
            if length < least:
                fail(NAMES[i], f"at least {least} entries", length)
            length = least
        checked.append((i, value, place, address, length))
    return checked


def as_tensor(i: int, value: Any) -> Tensor:
    """A checked value as a tensor, eager as bytes: nothing of plain ints is rounded, and nothing wraps."""
    if isinstance(value, Tensor):
        return value.view(torch.uint8) if value.dtype is torch.bool else value
    try:
        if i == TABLE:
            rows = [array("i", row).tolist() for row in value]
            return torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(rows), len(rows[0]) if rows else 0)
        ints = array("B" if i == EAGER else "i", value)
    except (TypeError, OverflowError, ValueError) as error:
        _fail_ints(i, value, error)
    dtype = torch.uint8 if i == EAGER else torch.int32
    # On the host whatever the default device: a staging copies from its address.
    with torch.device("cpu"):
        return torch.frombuffer(ints, dtype=dtype) if ints else torch.empty(0, dtype=dtype)


def _plain(i: int, value: Any) -> list[Any]:
    """Any other sequence, or an array of another library, as a list; what has no order or no ints is refused."""
    if isinstance(value, (str, bytes, bytearray)):
        _fail_ints(i, value)
    try:
        return list(value) if isinstance(value, Sequence) else list(memoryview(value).tolist())
    except (TypeError, ValueError, NotImplementedError) as error:
        _fail_ints(i, value, error)


def _fail_ints(i: int, value: object, error: Exception | None = None) -> NoReturn:
    why = "" if error is None else f" ({error})"
    fail(NAMES[i], "a tensor or a sequence of 32-bit ints", f"{type(value).__name__}{why}")


def _fail_form(i: int, t: Tensor) -> NoReturn:
    kinds = "bool or uint8" if i == EAGER else "int32"
    shape = "[requests, width]" if i == TABLE else "[requests]" if BY_REQUEST[i] else "[rows]"
    fail(NAMES[i], f"{shape} {kinds}", f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}")
