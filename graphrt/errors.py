"""The device error counter: what kernels clamped or skipped, by kind.

A kernel never leaves its buffers because of a bad value: it clamps the value or skips the row, and counts the event
here. Counting costs nothing while nothing is wrong. One counter per device, shared by all contexts and verifies.
"""

from enum import IntEnum

import torch
from torch import Tensor


class ErrorKind(IntEnum):
    """Index into the counter. Each launch that meets a bad value counts it once per row."""

    SLOT = 0
    """A state slot past the pool: counted as null."""
    ROW = 1
    """A record row outside -1..R-1: counted as -1."""
    REQUEST = 2
    """A request index out of range: counted as accepted 0."""
    ACCEPTED = 3
    """An accepted count outside 0..query length: clamped."""
    PENDING = 4
    """A pending count outside 0..Q: clamped."""
    QUERY_LEN = 5
    """Query offsets that decrease, leave 0..T, or span more than Q tokens: clamped."""
    COLUMN = 6
    """A block-table column past the table, or a negative number of computed tokens: null."""
    EAGER_MISSED = 7
    """Align mode: a row near a block boundary that the eager mask missed: folded now."""
    EAGER_NULL = 8
    """An eager row whose destination block is null: kept pending."""
    CONV_ZERO_ACCEPT = 9
    """A verified row accepted nothing, in the convolution layout that cannot take its shift back."""


_counters: dict[torch.device, Tensor] = {}


def canonical(device: torch.device | str) -> torch.device:
    """The device with its index, so that equal devices compare equal."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def error_counter(device: torch.device | str) -> Tensor:
    """The [len(ErrorKind)] int32 counter that kernels on `device` add to; allocated at the first call.

    Raises:
        RuntimeError: if the first call falls inside a CUDA capture, whose pool must not own it.
    """
    device = canonical(device)
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the error counter of {device} does not exist yet: run the step once before the capture"
            )
        with torch.inference_mode(False):  # it outlives the caller's mode
            _counters[device] = torch.zeros(len(ErrorKind), dtype=torch.int32, device=device)
    return _counters[device]


def error_counts(device: torch.device | str) -> dict[str, int]:
    """How often each kind of bad value was met on `device` since the last reset. Synchronises."""
    return {kind.name.lower(): n for kind, n in zip(ErrorKind, error_counter(device).tolist(), strict=True)}


def reset_errors(device: torch.device | str) -> None:
    """Set every count of `device` to zero, in stream order."""
    error_counter(device).zero_()
