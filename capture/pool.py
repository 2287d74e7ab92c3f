"""The memory of CUDA captures: what a pool holds, and tensors that a capture allocated outside of its own."""

from typing import Any

import torch
from torch import Tensor


def segments(pool: Any) -> list[dict[str, Any]]:
    """The allocator's segments that belong to a memory pool."""
    return [s for s in _all_segments() if _of_pool(s, pool)]


def pool_bytes(pool: Any) -> int:
    """Bytes that a memory pool has reserved."""
    return sum(int(s["total_size"]) for s in segments(pool))


def pool_ranges(pool: Any) -> list[tuple[int, int]]:
    """[begin, end) addresses of a memory pool."""
    return [_range(s) for s in segments(pool)]


class Memory:
    """The allocator at the start of a capture, to tell what is allocated later and elsewhere.

    A tensor is stray if its memory is torch's, in none of the capture's segments, and was not allocated when the
    capture began. Memory of other libraries is not torch's and passes. So does a block that the function frees and
    takes again outside the pool.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._before = {int(b["address"]) for s in _all_segments() for b in _active(s)}
        self._inside: list[tuple[int, int]] = []

    def is_stray(self, t: Tensor) -> bool:
        """Whether the tensor was allocated during the capture and outside of its pool."""
        if not t.is_cuda or t.numel() == 0:
            return False
        address = t.untyped_storage().data_ptr()
        if address in self._before or self._holds(address):
            return False
        snapshot = _all_segments()
        self._inside = [_range(s) for s in snapshot if _of_pool(s, self._pool)]
        if self._holds(address):
            return False
        home = [b for s in snapshot for b in _active(s) if b["address"] <= address < b["address"] + b["size"]]
        return bool(home) and int(home[0]["address"]) not in self._before

    def _holds(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in self._inside)


def _all_segments() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return found


def _of_pool(segment: dict[str, Any], pool: Any) -> bool:
    return tuple(segment["segment_pool_id"]) == tuple(pool)


def _range(segment: dict[str, Any]) -> tuple[int, int]:
    begin = int(segment["address"])
    return begin, begin + int(segment["total_size"])


def _active(segment: dict[str, Any]) -> list[dict[str, Any]]:
    """Blocks that someone holds, with their addresses (older torch versions give only sizes, in order)."""
    blocks, address = [], int(segment["address"])
    for block in segment["blocks"]:
        if block["state"] == "active_allocated":
            blocks.append({"address": address, "size": int(block["size"])})
        address += int(block["size"])
    return blocks
