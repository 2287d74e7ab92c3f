"""Host checks: what metadata shows is refused before anything is launched. No tensor value is read here."""

from typing import NoReturn

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fail(name: str, expected: object, got: object, hint: str = "") -> NoReturn:
    """Raise the one form of argument error: name, what was expected, what came, and the way out if there is one."""
    raise ValueError(f"{name}: expected {expected}, got {got}" + (f" ({hint})" if hint else ""))


def check_head_dim(name: str, dim: int) -> None:
    if dim < 16 or dim & (dim - 1):
        fail(name, "a power of two of at least 16", dim)


def check_lower_bound(name: str, lower_bound: float | None) -> None:
    if lower_bound is not None and not lower_bound < 0:
        fail(name, "below 0, or None for the softplus gate", lower_bound)


def check_tensor(
    name: str, t: object, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Shape (None: any size), dtype and device of a required tensor."""
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    if not isinstance(t, Tensor):
        fail(name, f"a tensor {wanted} {kinds}", type(t).__name__)
    sizes_match = t.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, t.shape, strict=True))
    if not sizes_match or t.dtype not in dtypes:
        fail(name, f"{wanted} {kinds}", f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}")
    if t.device != device:
        fail(name, f"a tensor on {device}, like the checkpoints", f"one on {t.device}")


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


def check_scratch_row(name: str, t: Tensor) -> None:
    """Row -1 exists: the view starts at least one row into its allocation."""
    if t.storage_offset() < t.stride(0):
        fail(
            name,
            "a view that starts one row into its allocation (its scratch row)",
            "one that does not",
            "see allocate_records",
        )
