"""Spans of memory, and whether two layers write the same: slots of one pool may interleave, bytes may not meet."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from .checks import fail


class Span(NamedTuple):
    """Memory of a tensor: so many pieces of `size` bytes, `stride` bytes apart from `start` on."""

    start: int
    stride: int
    pieces: int
    size: int

    @classmethod
    def of(cls, t: Tensor, dim: int = 0, before: int = 0) -> "Span":
        """Of `t`, a piece an index of `dim`, with `before` more in front (a scratch row)."""
        if t.ndim == 0:
            return cls(t.data_ptr(), 0, 1, t.element_size())
        rest = sum((n - 1) * s for i, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)) if i != dim)
        item = t.element_size()
        stride = t.stride(dim) * item
        pieces = t.shape[dim] + before if t.numel() else 0
        return cls(t.data_ptr() - before * stride, stride, pieces, (rest + 1) * item)

    @property
    def end(self) -> int:
        return self.start + max(self.pieces - 1, 0) * self.stride + self.size

    def meets(self, other: "Span") -> bool:
        """Whether the two may share a byte; pieces of one pool that alternate with the other's do not."""
        if not (self.pieces and other.pieces and self.start < other.end and other.start < self.end):
            return False
        if self.stride != other.stride or self.stride == 0:
            return True
        ahead = (other.start - self.start) % self.stride
        return not (self.size <= ahead and ahead + other.size <= self.stride)


def check_apart(tensors: Iterable[tuple[str, Tensor, int]]) -> None:
    """No tensor shares bytes with another one.

    Args:
        tensors: name, tensor, and how many entries of its first dimension lie before it and are its own (a scratch
            row is one).

    Raises:
        ValueError: naming both.
    """
    # Tensors on torch's meta device, which sizes are asked of, have no memory.
    spans = [(name, Span.of(t, 0, before)) for name, t, before in tensors if t.numel() and not t.is_meta]
    nearby: list[tuple[str, Span]] = []
    for named in sorted(spans, key=lambda named: named[1].start):
        span = named[1]
        nearby = [other for other in nearby if other[1].end > span.start]
        for other in nearby:
            if span.meets(other[1]):
                (first, _), (second, _) = sorted((other, named), key=spans.index)
                fail(second, "memory of its own", f"that of {first}", "a step writes the state and records")
        nearby.append(named)


def check_pool_apart(name: str, t: Tensor, pools: dict[str, tuple[Tensor, int]]) -> None:
    """As `check_apart`, of one tensor beside others that are apart. Asked at every verify, so of storages first.

    Args:
        pools: by name, tensor and entries before it.
    """
    home = t.untyped_storage()
    begin, end = home.data_ptr(), home.data_ptr() + home.nbytes()
    for pool, (other, before) in pools.items():
        its_home = other.untyped_storage()
        its_begin = its_home.data_ptr()
        if begin < its_begin + its_home.nbytes() and its_begin < end:
            check_apart([(pool, other, before), (name, t, 0)])
