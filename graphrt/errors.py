"""The device error counter: what kernels clamped or skipped, by kind, and the first row of each kind.

A kernel never leaves its buffers because of a bad value: it clamps the value or skips the row, and counts the event
here. Counting costs nothing while nothing is wrong. One counter per device, shared by all contexts and verifies. It
lies in pinned host memory that the device writes through: the host reads it without a synchronisation. Only the device
adds to it, so its atomics have the scope of the device; most hosts have no atomics that a device could join.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from .capturing import is_capturing
from .checks import check_device, check_step_device
from .launch import refuse_in_recording


class ErrorKind(IntEnum):
    """Index into the counter. Each call that meets a bad value counts it once per row."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        kind = int.__new__(cls, value)
        kind._value_, kind.meaning = value, meaning
        return kind

    SLOT = 0, "a state slot past the pool, taken as null"
    ROW = 1, "a record row outside -1..R-1, taken as -1"
    REQUEST = 2, "a request index out of range, taken as accepted 0"
    ACCEPTED = 3, "an accepted count outside 0..query length, clamped"
    PENDING = 4, "a pending count outside 0..Q, clamped"
    QUERY_LEN = 5, "query offsets that decrease, leave 0..T or span more than Q tokens, clamped"
    COLUMN = 6, "a block-table column past the table or a negative number of computed tokens, taken as null"
    EAGER_MISSED = 7, "a row near a block boundary that the eager mask missed, folded at once"
    EAGER_NULL = (
        8,
        "a row to fold at once whose destination block is null, not folded (a deferred commit keeps it pending)",
    )
    CONV_ZERO_ACCEPT = (
        9,
        "a verified row that accepted nothing, in the convolution layout that cannot take its shift back",
    )
    STALE_GENERATION = 10, "a row of an earlier owner of its record row, skipped"


NUM_KINDS = len(ErrorKind)


@dataclass(frozen=True, slots=True)
class _Counter:
    """int32 counts [NUM_KINDS], then the first row of each kind, -1 for none; `device` and `host` name one memory."""

    device: Tensor
    host: Tensor
    unread: Tensor
    """Another one, which nobody reads."""


_counters: dict[torch.device, _Counter] = {}


def canonical(device: torch.device | str) -> torch.device:
    """The device as its tensors name it, so that equal devices compare equal."""
    if not isinstance(device, torch.device):
        device = check_device("device", device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def error_counter(device: torch.device | str) -> Tensor:
    """The [2 * len(ErrorKind)] int32 counter that kernels on `device` write: counts by kind, then first rows.

    Allocated at the first call, at one address for the life of the process.

    Raises:
        RuntimeError: if the first call falls inside a CUDA capture, whose pool must not own it.
    """
    return _counter(device).device


def unread_counter(device: torch.device | str) -> Tensor:
    """As `error_counter`, for a launch whose rows another launch of the same call counts."""
    return _counter(device).unread


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """One kind of bad value that kernels met.

    kind       its name, as in `error_counts`
    count      how many rows of how many calls
    first_row  batch row of the first launch that met it: the lowest of those that the program which counted first saw.
               A program of a plan sees 128 rows, one of a staging 32, one of a verify a single row
    meaning    what was wrong and what was done, in words
    """

    kind: str
    count: int
    first_row: int
    meaning: str

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{self.kind} {times}, first in batch row {self.first_row}: {self.meaning}"


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What kernels met since the last reset. True if there was anything; its text is a sentence for each kind.

    device   whose counter was read
    entries  an `ErrorEntry` for each kind that was met: kind, count, first_row, meaning
    """

    device: torch.device
    entries: tuple[ErrorEntry, ...]

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __str__(self) -> str:
        if not self.entries:
            return f"no bad value was met on {self.device}"
        return f"bad values on {self.device}: " + "; ".join(map(str, self.entries))


def error_report(device: torch.device | str, *, wait: bool = False) -> ErrorReport:
    """Kinds, counts and first rows of the bad values met on `device` since the last reset.

    Args:
        wait: False reads what the device has written so far, and waits for nothing: cheap enough for every step. True
            synchronises first, so that every launch before the call is in the report.
    """
    device = canonical(device)
    values = _read(device, wait)
    return ErrorReport(
        device,
        tuple(
            ErrorEntry(kind.name.lower(), values[kind], values[NUM_KINDS + kind], kind.meaning)
            for kind in ErrorKind
            if values[kind]
        ),
    )


def error_counts(device: torch.device | str, *, wait: bool = True) -> dict[str, int]:
    """How often each kind of bad value was met on `device` since the last reset.

    Args:
        wait: True synchronises first. False reads what the device has written so far, and waits for nothing.
    """
    values = _read(canonical(device), wait)
    return {kind.name.lower(): values[kind] for kind in ErrorKind}


def reset_errors(device: torch.device | str) -> None:
    """Set every count of `device` to zero and forget the first rows. Synchronises: what ran before is not counted.

    Raises:
        RuntimeError: inside a recording, which every replay would repeat.
    """
    refuse_in_recording("reset_errors")
    counter = _counter(device)
    _wait(canonical(device))
    counter.host[:NUM_KINDS].zero_()
    counter.host[NUM_KINDS:].fill_(-1)


def _read(device: torch.device, wait: bool) -> list[int]:
    host = _counter(device).host
    if wait:
        _wait(device)
    values: list[int] = host.tolist()
    return values


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _counter(device: torch.device | str) -> _Counter:
    device = canonical(device)
    counter = _counters.get(device)
    if counter is None:
        check_step_device("device", device)
        if device.type == "cuda" and is_capturing():
            raise RuntimeError(
                f"the error counter of {device} does not exist yet: run the step once before the capture"
            )
        with torch.inference_mode(False):  # it outlives the caller's mode
            counter = _counters[device] = _allocate(device)
        counter.host[NUM_KINDS:].fill_(-1)
    return counter


def _allocate(device: torch.device) -> _Counter:
    unread = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device=device)
    if device.type != "cuda":
        values = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device=device)
        return _Counter(values, values, unread)
    with torch.cuda.device(device):
        host = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device="cpu", pin_memory=True)
        return _Counter(_seen_from(device, host), host, unread)


def _seen_from(device: torch.device, host: Tensor) -> Tensor:
    """The memory of a host tensor as a tensor of `device`: under unified addressing pinned memory has one address.

    Keeps nothing alive.
    """
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), device, host.nbytes)
    view = torch.empty(0, dtype=host.dtype, device=device)
    return view.set_(storage, 0, host.shape, host.stride())
