"""Staging from the host without a wait: a ring of pinned blocks, each with its own recorded launch.

A block holds the host values of one step and a header that says where all of the step's sources are: in the block
itself, or anywhere on the device. The staging kernel reads the header when it runs, so one recording per block serves
every step: the host writes the block, replays one node, and goes on. Nothing is copied by a node of its own, and no
argument of a launch is built in Python.

An event behind every GROUP of steps keeps their blocks until the device has read them: to record one and to ask it
takes 1.5 us, so one does for several, for a stream reads its blocks in order. When stagings go on with another stream,
the old one gets an event too. It gets none if it captures by then; but then the caller has ordered the two, for
stagings without an order would overwrite each other's rows.

Where the host's microseconds go (H200, device idle): 2.9 the graph launch, of which the driver has 2 (a kernel launched
by the driver, without a graph, takes 5.7), 0.4 a quarter of an event, 0.9 a tensor to check, 0.8 a host tensor to
copy, 9 ns an int of a list.
"""

import contextlib
import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from graphrt import backends
from graphrt.capture import driver
from graphrt.capture.recorder import record
from graphrt.capture.sources import EAGER, TABLE, Copy, as_tensor, check_sources
from graphrt.errors import error_counter
from graphrt.steps import HEADER_WORDS, Staged, StageSources

NUM_BLOCKS = 8
GROUP = 4
# Entries of a list from which on a call of its own is the cheaper.
LONG = 64
_pack_header = struct.Struct(f"={HEADER_WORDS}q").pack
# Half the price of `ctypes.memmove`: it lets no other thread in, and makes no object of what it returns.
_copy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.pythonapi))


@lru_cache(1024)
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"={count}i").pack


def _pack(lists: list[Sequence[int]]) -> bytes:
    """The ints of all lists. Several short lists are packed at once, a long one is copied once less on its own."""
    if len(lists[0]) >= LONG:
        return b"".join([_packer(len(ints))(*ints) for ints in lists])
    joined: list[int] = []
    for ints in lists:
        joined += ints
    return _packer(len(joined))(*joined)


class _Room:
    """Pinned memory that the host writes; what it must hold beyond its size makes a new, larger one."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self._pin = pin
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
        self.begin = self.bytes.data_ptr()
        self.end = self.begin + num_bytes
        self.view = _view(self.bytes)


def _view(t: Tensor) -> memoryview:
    """The bytes of a host tensor, which the view does not keep alive."""
    return memoryview((ctypes.c_char * t.nbytes).from_address(t.data_ptr())).cast("B")


class PinnedBlock:
    """One step's host values on their way to the device: the header, plain ints, and copies of everything else."""

    def __init__(self, max_num_reqs: int, pin: bool = True) -> None:
        # Room for the vectors that every step has; the rest grows when it is first needed.
        num_bytes = 16 * (max_num_reqs + 1)
        self.header = torch.zeros(HEADER_WORDS, dtype=torch.int64, device="cpu", pin_memory=pin)
        self._header = _view(self.header)
        self._words: list[int] = []
        self._ints, self._copies = _Room(num_bytes, pin), _Room(num_bytes, pin)

    @property
    def nbytes(self) -> int:
        """Bytes of the block as it is now."""
        return self.header.nbytes + self._ints.bytes.nbytes + self._copies.bytes.nbytes

    def write(self, num_reqs: int, values: list[Any], device: torch.device, static: range) -> None:
        """Put a step's values into the block, and say in the header where they are. Arguments as `check_sources` has.

        Raises:
            ValueError: as `check_sources`, and naming the argument that is no list of 32-bit ints.
        """
        room = self._ints
        words, lists, copies = check_sources(values, num_reqs, device, static, room.begin)
        if lists:
            try:
                packed = _pack(lists)
            except struct.error:
                _blame(values, words)
                raise
            if len(packed) > len(room.view):
                room.grow(2 * len(packed))
                return self.write(num_reqs, values, device, static)
            room.view[: len(packed)] = packed
        if copies:
            self._copy(words, copies)
        if words != self._words:
            self._header[:] = _pack_header(*words)
            self._words = words

    def _copy(self, words: list[int], copies: list[Copy]) -> None:
        room = self._copies
        free = room.begin
        for at, value, address, num_bytes in copies:
            end = free + num_bytes
            if end > room.end:
                room.grow(2 * (end - room.begin))
                return self._copy(words, copies)
            words[at] = free
            if type(value) is bytes:
                room.view[free - room.begin : end - room.begin] = value
            elif value.is_contiguous():
                _copy(free, address, num_bytes)
            else:
                dense = value[: words[at + 2]].contiguous()
                _copy(free, dense.data_ptr(), num_bytes)
            # The next one starts on four bytes as well.
            free = end + (-num_bytes & 3)


def _blame(values: list[Any], words: list[int]) -> None:
    """Raise for the list that is to blame."""
    for i, value in enumerate(values):
        if type(value) in (list, tuple) and i not in (EAGER, TABLE):
            as_tensor(i, value[: words[6 + 3 * i]])


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
            self._blocks = [PinnedBlock(staged.state_indices.shape[0]) for _ in range(NUM_BLOCKS)]
            self._recordings = [
                record(
                    partial(stage_header, staged, block.header, errors, current), device=device, name="graphrt.stage"
                )
                for block in self._blocks
            ]
        self._launches = [recording.launcher() for recording in self._recordings]
        self._handle_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._begin(torch.cuda.current_device() if device.index is None else device.index)

    def _begin(self, device_index: int) -> None:
        self._device, self._next = device_index, 0
        # By group, and by stream on which blocks of it were staged.
        self._read: list[dict[int, torch.cuda.Event]] = [{} for _ in range(NUM_BLOCKS // GROUP)]
        self._stream: torch.cuda.Stream | None = None
        self._handle, self._outlives = -1, False

    def is_capturing(self) -> bool:
        """Whether the current stream captures, which the legacy default stream never does."""
        return self._handle_of(self._device) != 0 and torch.cuda.is_current_stream_capturing()

    def stage(self, num_reqs: int, values: list[Any], device: torch.device, static: range) -> None:
        """Stage values, as `check_sources` takes them, on the current stream of the ring's device."""
        handle = self._handle_of(self._device)
        if handle != self._handle:
            self._change_stream(handle)
        i = self._next
        if i % GROUP == 0:
            self._wait(i // GROUP)
        self._blocks[i].write(num_reqs, values, device, static)
        self._launches[i]()
        if i % GROUP == GROUP - 1 or not self._outlives:
            self._mark(i // GROUP)
        self._next = (i + 1) % NUM_BLOCKS

    def _wait(self, group: int) -> None:
        """Until the device has read every block of a group."""
        events = self._read[group]
        for event in events.values():
            if not event.query():
                event.synchronize()
        if len(events) > 1:
            events.clear()

    def _mark(self, group: int) -> None:
        """Record an event behind what was staged on the present stream."""
        events = self._read[group]
        event = events.get(self._handle)
        if event is None:
            event = events[self._handle] = torch.cuda.Event()
        event.record(self._stream)

    def _leave_stream(self) -> None:
        """Mark what was staged on the present stream and has no event yet, unless that stream captures by now."""
        if not self._outlives or self._next % GROUP == 0:
            return
        # The legacy default stream never captures, and must not be asked while another one does.
        if self._handle == 0 or driver.capturing_graph(self._handle) is None:
            self._mark(self._next // GROUP)

    def _change_stream(self, handle: int) -> None:
        self._leave_stream()
        # An event takes five times as long if it has to make the object of the current stream.
        stream = torch.cuda.current_stream(self._device)
        # Torch's own streams live as long as the process. One from elsewhere, whose handle is its number, is never
        # touched once a staging has returned: every staging there has its event.
        self._outlives = handle == 0 or stream.stream_id != handle
        self._handle, self._stream = handle, stream

    def __del__(self) -> None:
        # Pinned memory goes back to a cache at once: not while a launch may still read it.
        with contextlib.suppress(Exception):
            self._leave_stream()
            for group in range(len(self._read)):
                self._wait(group)
