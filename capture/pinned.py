"""Staging from the host without a wait: a ring of pinned blocks, each with its own recorded launch.

A block holds the host values of one step and a header that says where all of the step's sources are: in the block
itself, or anywhere on the device. The staging kernel reads the header when it runs, so one recording per block serves
every step: the host writes the block, replays one node, and goes on. Nothing is copied by a node of its own, and no
argument of a launch is built in Python. An event keeps a block until the device has read it.

Where the host's microseconds go (H200, 64 rows, device idle): 3.2 the graph launch (a kernel launched by the driver,
without a graph, takes 5.7), 1.5 the event, 1 a tensor to check, 1.5 a host tensor to copy, 13 ns an int of a list.
"""

import contextlib
import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from graphrt import backends
from graphrt.capture.recorder import record
from graphrt.capture.sources import BY_REQUEST, DEVICE, EAGER, HOST, NAMES, PLAIN, TABLE, Checked, as_tensor
from graphrt.errors import error_counter
from graphrt.steps import Staged, StageSources

NUM_BLOCKS = 8
HEADER_WORDS = 4 + 3 * len(NAMES)
_HEADER = struct.Struct(f"={HEADER_WORDS}q")
# More requests than any tensor holds: nothing by request was staged.
_ANY = 2**31 - 1
_NOTHING = [0, _ANY] + [0] * (HEADER_WORDS - 2)


@lru_cache(1024)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"={count}i")


class _Room:
    """Pinned memory that is written by address; what it must hold beyond its size makes a new, larger one."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self._pin = pin
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin)
        self.memory = (ctypes.c_char * num_bytes).from_address(self._bytes.data_ptr())
        self.begin = self._bytes.data_ptr()
        self.end = self.begin + num_bytes


class PinnedBlock:
    """One step's host values on their way to the device: the header, plain ints, and the bytes of host tensors."""

    def __init__(self, max_num_reqs: int, pin: bool = True) -> None:
        # Room for the vectors that every step has; the rest grows when it is first needed.
        num_bytes = 16 * (max_num_reqs + 1)
        self.header = torch.zeros(HEADER_WORDS, dtype=torch.int64, pin_memory=pin)
        self._header = (ctypes.c_char * _HEADER.size).from_address(self.header.data_ptr())
        self._words: list[int] = []
        self._ints, self._tensors = _Room(num_bytes, pin), _Room(num_bytes, pin)

    def write(self, num_reqs: int, sources: Sequence[Checked]) -> None:
        """Put checked sources into the block, and say in the header where they are.

        Raises:
            ValueError: naming the argument that is no list of 32-bit ints.
        """
        words = _NOTHING.copy()
        words[0] = num_reqs
        ints: list[int] = []
        ints_at, free = self._ints.begin, self._tensors.begin
        for i, source, place, address, entries in sources:
            if BY_REQUEST[i] and entries < words[1]:
                words[1] = entries
            at = 4 + 3 * i
            words[at + 2] = entries
            if place == DEVICE:
                words[at] = address
                strides = source.stride()
                words[at + 1] = strides[0]
                if i == TABLE:
                    words[2], words[3] = source.shape[1], strides[1]
                continue
            words[at + 1] = 1
            if place == PLAIN and i != EAGER:
                words[at] = ints_at + 4 * len(ints)
                ints += source if len(source) == entries else source[:entries]
                continue
            num_bytes = 4 * entries
            if i == EAGER:
                num_bytes = entries
            elif i == TABLE:
                words[2] = words[at + 1] = source.shape[1]
                words[3] = 1
                num_bytes *= words[2]
            if free + num_bytes > self._tensors.end:
                self._tensors.grow(2 * (free + num_bytes - self._tensors.begin))
                return self.write(num_reqs, sources)
            words[at] = free
            if place == HOST and source.is_contiguous():
                ctypes.memmove(free, address, num_bytes)
            else:
                dense = as_tensor(i, source)[:entries].contiguous()
                ctypes.memmove(free, dense.data_ptr(), num_bytes)
            # The next one starts on four bytes as well.
            free += num_bytes + (-num_bytes & 3)
        if ints:
            if 4 * len(ints) > self._ints.end - ints_at:
                self._ints.grow(8 * len(ints))
                return self.write(num_reqs, sources)
            self._write_ints(ints, sources)
        if words != self._words:
            _HEADER.pack_into(self._header, 0, *words)
            self._words = words

    def _write_ints(self, ints: list[int], sources: Sequence[Checked]) -> None:
        try:
            _packer(len(ints)).pack_into(self._ints.memory, 0, *ints)
        except struct.error:
            for i, source, *_ in sources:
                # Raises for the one that is to blame.
                as_tensor(i, source)
            raise


class PinnedRing:
    """NUM_BLOCKS steps may be queued before a staging waits for the device."""

    def __init__(self, staged: Staged, current: Tensor | None = None) -> None:
        # Triton is imported where it runs.
        from graphrt.kernels.stage import stage_header

        device = staged.state_indices.device
        errors = error_counter(device)
        with torch.cuda.device(device):
            # Compiled here, for a staging by value inside a later recording.
            backends.by_device(device).stage(staged, StageSources(0), None, errors, current)
            self._device = torch.cuda.current_device()
            self._blocks = [PinnedBlock(staged.state_indices.shape[0]) for _ in range(NUM_BLOCKS)]
            self._recordings = [
                record(
                    partial(stage_header, staged, block.header, errors, current), device=device, name="graphrt.stage"
                )
                for block in self._blocks
            ]
            self._read = [torch.cuda.Event() for _ in self._blocks]
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._next = 0

    def stage(self, num_reqs: int, sources: Sequence[Checked]) -> None:
        """Stage checked sources on the current stream of the ring's device."""
        i = self._next
        read = self._read[i]
        if not read.query():
            read.synchronize()
        self._blocks[i].write(num_reqs, sources)
        self._recordings[i].replay()
        # An event takes five times as long if it has to make the object of the current stream.
        handle = torch._C._cuda_getCurrentRawStream(self._device)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._device)
        read.record(stream)
        self._next = (i + 1) % NUM_BLOCKS

    def __del__(self) -> None:
        # Pinned memory goes back to a cache at once: not while a launch may still read it.
        with contextlib.suppress(Exception):
            for read in self._read:
                read.synchronize()
