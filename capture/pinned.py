"""Staging from the host without a wait: a ring of pinned blocks, each with its own recorded launch.

A block holds the host values of one step and a header that says where all of the step's sources are: in the block
itself, or anywhere on the device. The staging kernel reads the header when it runs, so one recording per block serves
every step: the host writes a block, replays one node, and goes on. Nothing is copied by a node of its own, and no
argument of a launch is built in Python. An event keeps a block until the device has read it.
"""

import contextlib
import ctypes
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphrt import backends
from graphrt.capture.recorder import record
from graphrt.capture.sources import BY_REQUEST, EAGER, NAMES, OFFSETS, TABLE, as_tensor
from graphrt.errors import error_counter
from graphrt.steps import Staged, StageSources

NUM_BLOCKS = 8
HEADER_WORDS = 4 + 3 * len(NAMES)
_HEADER = struct.Struct(f"={HEADER_WORDS}q")
# More requests than any tensor holds: nothing by request was staged.
_ANY = 2**31 - 1
_NOTHING = [0, _ANY] + [0] * (HEADER_WORDS - 2)


class PinnedBlock:
    """One step's host values on their way to the device: the header, then plain ints, plain bytes, and tensors."""

    def __init__(self, max_num_reqs: int, pin: bool = True) -> None:
        self._pin = pin
        # Room for the vectors that every step has; the rest grows when it is first needed.
        ints = 4 * (max_num_reqs + 1)
        self.header = torch.zeros(HEADER_WORDS, dtype=torch.int64, pin_memory=pin)
        self._header = (ctypes.c_char * _HEADER.size).from_address(self.header.data_ptr())
        self._grow_ints(ints)
        self._tensors = torch.empty(ints, dtype=torch.int32, pin_memory=pin)
        self._bytes = torch.empty(max_num_reqs, dtype=torch.uint8, pin_memory=pin)

    def _grow_ints(self, ints: int) -> None:
        self._ints = torch.empty(ints, dtype=torch.int32, pin_memory=self._pin)
        self._ints_at = self._ints.data_ptr()
        self._int_memory = (ctypes.c_int * ints).from_address(self._ints_at)

    def write(self, num_reqs: int, sources: Sequence[Any]) -> None:
        """Put checked sources (in the order of NAMES) into the block, and say in the header where they are.

        Raises:
            ValueError: naming the argument that is no list of 32-bit ints.
        """
        words = _NOTHING.copy()
        words[0] = num_reqs
        ints: list[int] = []
        host: list[tuple[int, Tensor]] = []
        at = self._ints_at
        for i, source in enumerate(sources):
            if source is not None:
                _place(i, source, num_reqs, words, at, ints, host)
        if len(ints) > self._ints.shape[0]:
            self._grow_ints(2 * len(ints))
            self.write(num_reqs, sources)
            return
        self._write_ints(ints, sources)
        if host:
            self._write_host(host, words)
        _HEADER.pack_into(self._header, 0, *words)

    def _write_ints(self, ints: list[int], sources: Sequence[Any]) -> None:
        try:
            struct.pack_into(f"={len(ints)}i", self._int_memory, 0, *ints)
        except struct.error:
            for i, source in enumerate(sources):
                # Raises for the one that is to blame.
                as_tensor(i, source)
            raise

    def _write_host(self, host: list[tuple[int, Tensor]], words: list[int]) -> None:
        """All int32 tensors in one concatenation; the eager mask, if it is among them, by itself."""
        parts, total = [], 0
        for i, source in host:
            entries = words[4 + 3 * i + 2]
            if i == EAGER:
                self._write_eager(source, entries)
                words[4 + 3 * i] = self._bytes.data_ptr()
                continue
            part = source if source.shape[0] == entries else source[:entries]
            parts.append(part.flatten() if i == TABLE else part)
            words[4 + 3 * i] = 4 * total
            total += parts[-1].shape[0]
        if not parts:
            return
        if total > self._tensors.shape[0]:
            self._tensors = torch.empty(2 * total, dtype=torch.int32, pin_memory=self._pin)
        torch.cat(parts, out=self._tensors[:total])
        base = self._tensors.data_ptr()
        for i, _ in host:
            if i != EAGER:
                words[4 + 3 * i] += base

    def _write_eager(self, source: Any, entries: int) -> None:
        mask = as_tensor(EAGER, source)
        if mask is not None:
            self._bytes[:entries].copy_(mask[:entries])


def _place(
    i: int,
    source: Any,
    num_reqs: int,
    words: list[int],
    ints_at: int,
    ints: list[int],
    host: list[tuple[int, Tensor]],
) -> None:
    """Enter one source into the header; plain ints, which will lie at `ints_at`, and host tensors are collected."""
    plain, at = not isinstance(source, Tensor), 4 + 3 * i
    entries = num_reqs + (i == OFFSETS)
    if BY_REQUEST[i]:
        entries = len(source) if plain else source.shape[0]
        words[1] = min(words[1], entries)
    words[at + 1], words[at + 2] = 1, entries
    if plain and i != EAGER:
        words[at] = ints_at + 4 * len(ints)
        ints += source if len(source) == entries else source[:entries]
        return
    on_device = not plain and not source.is_cpu
    if i == TABLE:
        words[2] = source.shape[1]
        words[at + 1], words[3] = source.stride() if on_device else (words[2], 1)
    elif on_device:
        words[at + 1] = source.stride()[0]
    if on_device:
        words[at] = source.data_ptr()
    else:
        host.append((i, source))


class PinnedRing:
    """NUM_BLOCKS steps may be queued before a staging waits for the device."""

    def __init__(self, staged: Staged) -> None:
        # Triton is imported where it runs.
        from graphrt.kernels.stage import stage_header

        device = staged.state_indices.device
        errors = error_counter(device)
        with torch.cuda.device(device):
            # Compiled here, for a staging by value inside a later recording.
            backends.by_device(device).stage(staged, StageSources(0), None, errors)
            self._blocks = [PinnedBlock(staged.state_indices.shape[0]) for _ in range(NUM_BLOCKS)]
            self._recordings = [
                record(partial(stage_header, staged, block.header, errors), device=device, name="graphrt.stage")
                for block in self._blocks
            ]
            self._read = [torch.cuda.Event() for _ in self._blocks]
        self._next = 0

    def stage(self, num_reqs: int, sources: Sequence[Any]) -> None:
        """Stage checked sources (in the order of NAMES) on the current stream."""
        i = self._next
        read = self._read[i]
        if not read.query():
            read.synchronize()
        self._blocks[i].write(num_reqs, sources)
        self._recordings[i].replay()
        read.record()
        self._next = (i + 1) % NUM_BLOCKS

    def __del__(self) -> None:
        # Pinned memory goes back to a cache at once: not while a launch may still read it.
        with contextlib.suppress(Exception):
            for read in self._read:
                read.synchronize()
