"""What may be staged: plain ints, host tensors, device tensors. Everything here reads metadata of tensors only."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from graphrt.checks import fail
from graphrt.steps import HEADER_WORDS, SOURCES

if TYPE_CHECKING:
    # In collections.abc from Python 3.12 on.
    from typing_extensions import Buffer

Source: TypeAlias = "Tensor | Sequence[int] | Sequence[bool] | Sequence[Sequence[int]] | Buffer | None"
"""A value of `StepInputs.stage`: a tensor on any device, plain ints, an array with a buffer (NumPy's), or nothing."""

OFFSETS, EAGER, REQUESTS, TABLE = (
    SOURCES.index(name) for name in ("query_start_loc", "eager", "request_indices", "block_table")
)
BY_REQUEST = tuple(name in ("num_accepted_tokens", "num_computed_tokens", "block_table") for name in SOURCES)
# More requests than any tensor holds: nothing by request was staged.
_ANY = 2**31 - 1
_NOTHING = [0, _ANY] + [0] * (HEADER_WORDS - 2)

Copy = tuple[int, Any, int, int]
"""A value to copy to where the device reaches it: the header word that gets its new address; bytes, or a host tensor;
the tensor's address; number of bytes."""

_DTYPES = tuple((torch.uint8, torch.bool) if name == "eager" else (torch.int32,) for name in SOURCES)
_DIMENSIONS = tuple(2 if name == "block_table" else 1 for name in SOURCES)


def check_sources(
    values: list[Any], num_reqs: int, device: torch.device, static: range, ints_at: int = 0
) -> tuple[list[int], list[Sequence[int]], list[Copy]]:
    """Check the values that were given, and make the header that says where a staging finds them.

    Runs at every staging: it goes through the values once, and asks each tensor as little as it can.

    Args:
        values: in the order of SOURCES. What is no list, tuple or tensor is replaced by a plainer form of it, a table
            by a tensor.
        num_reqs: rows that are staged.
        static: addresses of the static buffers, of which no source may be a part.
        ints_at: address where the lists are going to lie, one behind the other.

    Returns:
        The header (`graphrt.kernels.stage`), in which the addresses of the copies are missing; the lists, as far as
        they are read, at whose ints nobody has looked yet; the copies to make.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    words = _NOTHING.copy()
    words[0] = num_reqs
    requests = num_reqs if values[REQUESTS] is None else min(num_reqs, 1)
    lists: list[Sequence[int]] = []
    copies: list[Copy] = []
    for i, value in enumerate(values):
        if value is None:
            continue
        plain = type(value) is list or type(value) is tuple
        if not plain and not isinstance(value, Tensor):
            value = values[i] = _plain(i, value)
            plain = True
        if plain and i == TABLE:
            value = values[i] = as_tensor(i, value)
            plain = False
        if plain:
            length = len(value)
        else:
            shape = value.shape
            if len(shape) != _DIMENSIONS[i] or value.dtype not in _DTYPES[i]:
                _fail_form(i, value)
            length = shape[0]
            on_host = value.is_cpu
            if not on_host and value.device != device:
                fail(SOURCES[i], f"a tensor on {device} or on the host", f"one on {value.device}")
            try:
                address = value.data_ptr()
            except RuntimeError as error:
                fail(SOURCES[i], "a dense tensor", f"one without memory of its own ({error})")
            if address in static:
                fail(SOURCES[i], "a tensor of the caller's", "a view of the static buffers", "clone() it")
        if BY_REQUEST[i]:
            if length < requests:
                fail(SOURCES[i], f"at least {requests} requests", length)
            if length < words[1]:
                words[1] = length
            entries = length
        else:
            entries = num_reqs + 1 if i == OFFSETS else num_reqs
            if length < entries:
                fail(SOURCES[i], f"at least {entries} entries", length)
        at = 4 + 3 * i
        words[at + 2] = entries
        if plain:
            words[at + 1] = 1
            if i == EAGER:
                copies.append((at, _flags(value[:entries]), 0, entries))
            elif type(value) is memoryview:
                copies.append((at, (value if length == entries else value[:entries]).tobytes(), 0, 4 * entries))
            else:
                words[at] = ints_at
                ints_at += 4 * entries
                lists.append(value if length == entries else value[:entries])
        elif on_host:
            num_bytes = entries if i == EAGER else 4 * entries
            words[at + 1] = 1
            if i == TABLE:
                words[2] = words[at + 1] = shape[1]
                words[3] = 1
                num_bytes *= shape[1]
            copies.append((at, value, address, num_bytes))
        else:
            words[at] = address
            words[at + 1] = 1 if i != TABLE and value.is_contiguous() else value.stride(0)
            if i == TABLE:
                words[2], words[3] = shape[1], value.stride(1)
    return words, lists, copies


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


def _plain(i: int, value: Any) -> Any:
    """Any other sequence, or an array of another library, as a list; a vector of 32-bit ints as a view of its memory.

    What has no order or no ints is refused.
    """
    if isinstance(value, (str, bytes, bytearray)):
        _fail_ints(i, value)
    try:
        if not isinstance(value, (array, memoryview)) and isinstance(value, Sequence):
            return list(value)
        view = memoryview(value)
        if view.format == "i" and view.ndim == 1 and i not in (EAGER, TABLE):
            return view
        return list(view.tolist())
    except (TypeError, ValueError, NotImplementedError) as error:
        _fail_ints(i, value, error)


def _flags(value: Sequence[int]) -> bytes:
    try:
        return bytes(value)
    except (TypeError, ValueError) as error:
        _fail_ints(EAGER, value, error)


def _fail_ints(i: int, value: object, error: Exception | None = None) -> NoReturn:
    why = "" if error is None else f" ({error})"
    fail(SOURCES[i], "a tensor or a sequence of 32-bit ints", f"{type(value).__name__}{why}")


def _fail_form(i: int, t: Tensor) -> NoReturn:
    kinds = "bool or uint8" if i == EAGER else "int32"
    shape = "[requests, width]" if i == TABLE else "[requests]" if BY_REQUEST[i] else "[rows]"
    fail(SOURCES[i], f"{shape} {kinds}", f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}")
