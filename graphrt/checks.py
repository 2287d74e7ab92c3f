"""Host checks: what metadata shows is refused before anything is launched. No tensor value is read here."""

import math
import operator
import os
from collections.abc import Iterable
from functools import lru_cache
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fail(name: str, expected: object, got: object, hint: str = "") -> NoReturn:
    """Raise the one form of argument error: name, what was expected, what came, and the way out if there is one."""
    raise ValueError(f"{name}: expected {expected}, got {got}" + (f" ({hint})" if hint else ""))


def plain_int(value: object) -> int | None:
    """An int of any kind, NumPy's too, as one of Python's; None for a bool, a tensor, and all else that is no int."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, Tensor)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_count(name: str, value: object, at_least: int) -> int:
    """An int that kernels take as one of 32 bits, as one of Python's own."""
    count = plain_int(value)
    if count is None:
        fail(name, f"an int of at least {at_least}", type(value).__name__)
    if not at_least <= count <= INT32_MAX:
        fail(name, f"at least {at_least}" if count < at_least else f"at most {INT32_MAX}", count)
    return count


def check_flag(name: str, value: object) -> None:
    """True or False, and nothing that merely passes for one of them."""
    if not isinstance(value, bool):
        fail(name, "True or False", repr(value))


def check_callable(name: str, value: object) -> None:
    """A function, or what is called like one."""
    if not callable(value):
        fail(name, "a function", type(value).__name__)


def check_kind(name: str, value: object, kind: type) -> None:
    """An object of one of our classes."""
    if not isinstance(value, kind):
        fail(name, f"a {kind.__name__}", type(value).__name__)


def check_several(name: str, value: object, of: str) -> list[Any]:
    """Several things in some order, as a list."""
    if not isinstance(value, Iterable):
        fail(name, of, type(value).__name__)
    return list(value)


def check_path(name: str, path: object, expected: str) -> str:
    """The name of a file, given as str or as a path of one."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        fail(name, expected, type(path).__name__)
    return text


def check_device(name: str, device: object) -> torch.device:
    """A device, or its name."""
    if not isinstance(device, (str, torch.device)):
        fail(name, "a device, such as 'cpu' or 'cuda'", type(device).__name__)
    try:
        place = torch.device(device)
    except RuntimeError:
        fail(name, "a device, such as 'cpu' or 'cuda'", repr(device))
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        fail(name, f"a device of this machine, which has {torch.cuda.device_count()} for CUDA", repr(str(place)))
    return place


def check_step_device(name: str, device: object) -> torch.device:
    """A device that steps can run on, or its name."""
    place = check_device(name, device)
    if place.type not in ("cpu", "cuda"):
        fail(name, "cpu or cuda", place)
    return place


def check_block_size(size: object, spec_query_len: int) -> int:
    """Align mode: a window reaches one block boundary at most."""
    count = plain_int(size)
    if count is not None and count < spec_query_len:
        fail("mamba_block_size", f"at least one window, spec_query_len {spec_query_len}", size)
    return check_count("mamba_block_size", size, 1)


def check_head_dim(name: str, dim: object) -> int:
    count = plain_int(dim)
    if count is None or count < 16 or count & (count - 1):
        fail(name, "a power of two of at least 16", dim)
    return count


def check_lower_bound(name: str, lower_bound: object) -> None:
    number = isinstance(lower_bound, Real) and math.isfinite(lower_bound) and lower_bound < 0
    if lower_bound is not None and not number:
        fail(name, "a number below 0, or None for the softplus gate", lower_bound)


def check_is_tensor(name: str, t: object) -> None:
    """For what is asked about before its shape is checked."""
    if not isinstance(t, Tensor):
        fail(name, "a tensor", type(t).__name__)


def check_tensor(
    name: str, t: object, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Shape (None: any size), dtype and device of a required tensor."""
    if not isinstance(t, Tensor):
        fail(name, f"a tensor {_told(shape, dtypes)}", type(t).__name__)
    sizes_match = t.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, t.shape, strict=True))
    if not sizes_match or t.dtype not in dtypes:
        fail(name, _told(shape, dtypes), _told(tuple(t.shape), (t.dtype,)))
    if t.device != device:
        fail(name, f"a tensor on {device}, like the checkpoints", f"one on {t.device}")
    if t.layout is not torch.strided:
        fail(name, "a dense tensor", t.layout)


def _told(shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> str:
    """In words; made for an error alone, for a verify asks about a dozen tensors."""
    sizes = ", ".join("any" if n is None else str(n) for n in shape)
    return f"[{sizes}] " + " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_index(name: str, t: object, at_least: int, device: torch.device, *, exactly: bool = False) -> None:
    """A 1-D int32 vector of `at_least` entries (or exactly that many), any stride."""
    check_tensor(name, t, (None,), (torch.int32,), device)
    if isinstance(t, Tensor) and (t.shape[0] != at_least if exactly else t.shape[0] < at_least):
        fail(name, f"{'' if exactly else 'at least '}{at_least} entries", t.shape[0])


def check_inner(name: str, t: Tensor, dims: int) -> None:
    """The last `dims` dimensions lie contiguous; the stride before them is free."""
    expected = 1
    for size, stride in list(zip(t.shape, t.stride(), strict=True))[: -dims - 1 : -1]:
        if size != 1 and stride != expected:
            fail(name, f"the last {dims} dimensions contiguous", f"strides {t.stride()}", "call .contiguous() on it")
        expected *= size


def check_entries_apart(name: str, t: Tensor) -> None:
    """Entries do not share memory, for they are written. They may lie in any order, with any gaps."""
    if _entries_meet(t.shape, t.stride()):
        got = f"strides {t.stride()} of {list(t.shape)}, an expanded or overlapping tensor"
        fail(name, "entries with memory of their own", got, "as .contiguous() gives them")


@lru_cache(maxsize=1024)
def _entries_meet(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two entries have one address: steps along the dimensions then lead from the one to the other."""
    dims = sorted(((s, n) for n, s in zip(shape, strides, strict=True) if n > 1), reverse=True)
    return 0 not in shape and _steps_close(dims, 0, False)


def _steps_close(dims: list[tuple[int, int]], gap: int, moved: bool) -> bool:
    """Whether steps along `dims` (stride and size, by falling stride) close a gap; no step at all only if `moved`."""
    if not dims:
        return moved and gap == 0
    (stride, size), *rest = dims
    if stride == 0:
        return gap == 0
    # Only so many steps that the shorter ones can make up for the rest: none, where dimensions are nested.
    reach = sum(s * (n - 1) for s, n in rest)
    least, most = max(1 - size, -((reach - gap) // stride)), min(size - 1, (reach + gap) // stride)
    return any(_steps_close(rest, gap - i * stride, moved or i != 0) for i in range(least, most + 1))


def check_own_memory(name: str, t: Tensor, others: dict[str, Tensor], dim: int) -> None:
    """No token of `t` lies over a token of the others; tokens are dimension `dim`, contiguous within."""
    check_entries_apart(name, t)
    begin, step, width, end = _token_bytes(t, dim)
    for other, o in others.items():
        other_begin, other_step, other_width, other_end = _token_bytes(o, dim)
        if begin >= other_end or other_begin >= end:
            continue
        # Tokens of one packed buffer lie side by side: same step, and columns that do not meet.
        ahead = (other_begin - begin) % step if step else 0
        if step != other_step or ahead < width or step - ahead < other_width:
            fail(name, "its own memory", f"that of {other}", "kernels read the inputs while they write it")


def check_apart(name: str, t: Tensor, dim: int, pools: dict[str, Tensor]) -> None:
    """No token of `t`, along `dim`, lies between the first and the last slot or row of a pool."""
    begin, _, _, end = _token_bytes(t, dim)
    for pool, o in pools.items():
        pool_begin, _, _, pool_end = _token_bytes(o, 0)
        if begin < pool_end and pool_begin < end:
            fail(name, "its own memory", f"that of {pool}", "states and records of other requests lie there")


def _token_bytes(t: Tensor, dim: int) -> tuple[int, int, int, int]:
    """Address of the first token, bytes to the next, bytes of one, and the end."""
    size, tokens = t.element_size(), t.shape[dim]
    begin, step = t.data_ptr(), t.stride(dim) * size
    width = t.numel() // max(tokens, 1) * size
    return begin, step, width, begin + ((tokens - 1) * step + width if width else 0)


def check_scratch_row(name: str, t: Tensor) -> None:
    """Row -1 exists: the view starts at least one row into its allocation."""
    if t.storage_offset() < t.stride(0):
        fail(
            name,
            "a view that starts one row into its allocation (its scratch row)",
            "one that does not",
            "see allocate_records",
        )
