"""Staging from the host without a wait: a ring of pinned blocks, each with its own recorded launch.

A block holds the host values of one step and a header that says where all of the step's sources are: in the block
itself, or anywhere on the device. The staging kernel reads the header when it runs, so one recording per block serves
every step: the host writes a block, replays one node, and goes on. Nothing is copied by a node of its own, and no
argument of a launch is built in Python. An event keeps a block until the device has read it.
"""

import contextlib
import ctypes
import struct

import torch
from torch import Tensor

from graphrt import backends
from graphrt.capture.recorder import record
from graphrt.capture.sources import BY_REQUEST, NAMES, OFFSETS, TABLE
from graphrt.errors import error_counter
from graphrt.steps import Staged, StageSources

NUM_BLOCKS = 8
_HEADER = struct.Struct(f"={4 + 3 * len(NAMES)}q")
_ABSENT = (0, 0, 0)
# More requests than any tensor holds: nothing by request was staged.
_ANY = 2**31 - 1


class PinnedBlock:
    """One step's host values on their way to the device."""

    def __init__(self, staged: Staged) -> None:
        capacity = 4 * (staged.state_indices.shape[0] + 1)
        self.header = torch.zeros(_HEADER.size // 8, dtype=torch.int64, pin_memory=True)
        # Block tables are on the device as a rule: theirs is made when the first one comes from the host.
        self._areas = [_pinned(0 if i == TABLE else capacity) for i in range(len(NAMES))]
        self._addresses = [area.data_ptr() for area in self._areas]
        self._words = (ctypes.c_char * _HEADER.size).from_address(self.header.data_ptr())
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Triton is imported where it runs.
        from graphrt.kernels.stage import stage_header

        errors = error_counter(staged.state_indices.device)
        self.recording = record(
            lambda: stage_header(staged, self.header, errors), device=errors.device, name="graphrt.stage"
        )

    def put(self, i: int, source: Tensor, entries: int) -> int:
        """Copy the first entries of a host tensor into the block; returns their address."""
        size = entries * source.element_size() * (source.shape[1] if i == TABLE else 1)
        if size > self._areas[i].shape[0]:
            self._areas[i] = _pinned(2 * size)
            self._addresses[i] = self._areas[i].data_ptr()
        if source.is_contiguous():
            ctypes.memmove(self._addresses[i], source.data_ptr(), size)
        else:
            part = source[:entries]
            self._areas[i][:size].view(source.dtype).view(part.shape).copy_(part)
        return self._addresses[i]

    def write_header(self, words: list[int]) -> None:
        _HEADER.pack_into(self._words, 0, *words)


class PinnedRing:
    """NUM_BLOCKS steps may be queued before a staging waits for the device."""

    def __init__(self, staged: Staged) -> None:
        device = staged.state_indices.device
        with torch.cuda.device(device):
            # Compiled here, for a staging by value inside a later recording.
            backends.by_device(device).stage(staged, StageSources(0), None, error_counter(device))
            self._blocks = [PinnedBlock(staged) for _ in range(NUM_BLOCKS)]
        self._next = 0

    def stage(self, num_reqs: int, sources: list[Tensor | None]) -> None:
        """Stage checked sources (in the order of NAMES) on the current stream."""
        block = self._blocks[self._next]
        self._next = (self._next + 1) % NUM_BLOCKS
        if not block.read.query():  # type: ignore[no-untyped-call]
            block.read.synchronize()
        num_requests = _ANY
        words = [num_reqs, 0, 0, 0]
        for i, source in enumerate(sources):
            if source is None:
                words += _ABSENT
                continue
            if i in BY_REQUEST:
                entries = source.shape[0]
                num_requests = min(num_requests, entries)
            else:
                entries = num_reqs + (i == OFFSETS)
            on_device = source.is_cuda
            address = source.data_ptr() if on_device else block.put(i, source, entries)
            stride = source.stride(0) if on_device else 1
            if i == TABLE:
                words[2], words[3] = source.shape[1], source.stride(1) if on_device else 1
                stride = stride if on_device else source.shape[1]
            words += (address, stride, entries)
        words[1] = num_requests
        block.write_header(words)
        block.recording.replay()
        block.read.record()

    def __del__(self) -> None:
        # Pinned memory goes back to a cache at once: not while a launch may still read it.
        with contextlib.suppress(Exception):
            for block in self._blocks:
                block.read.synchronize()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
