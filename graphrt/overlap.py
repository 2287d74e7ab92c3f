"""Do two layers write the same memory? Slots and rows of one allocation may interleave, bytes may not meet."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .checks import fail


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes of a tensor's entries along its first dimension."""

    name: str
    begin: int
    end: int
    step: int
    """From one entry to the next."""
    width: int
    """Of one entry, holes included."""

    @classmethod
    def of(cls, name: str, t: Tensor, entries_before: int) -> "_Span":
        size = t.element_size()
        step = t.stride(0) * size
        inner = zip(t.shape[1:], t.stride()[1:], strict=True)
        width = (1 + sum((n - 1) * stride for n, stride in inner)) * size
        begin = t.data_ptr() - entries_before * step
        return cls(name, begin, t.data_ptr() + (t.shape[0] - 1) * step + width, step, width)

    def meets(self, other: "_Span") -> bool:
        """Whether some byte may belong to both."""
        if self.begin >= other.end or other.begin >= self.end:
            return False
        if self.step != other.step or self.step == 0:
            return True
        ahead = (other.begin - self.begin) % self.step
        return ahead < self.width or self.step - ahead < other.width


def check_apart(tensors: Iterable[tuple[str, Tensor, int]]) -> None:
    """No tensor shares bytes with another one.

    Args:
        tensors: name, tensor, and how many entries of its first dimension lie before it and are its own (a scratch
            row is one).

    Raises:
        ValueError: naming both.
    """
    # Tensors on torch's meta device, which sizes are asked of, have no memory.
    spans = [_Span.of(name, t, before) for name, t, before in tensors if t.numel() and not t.is_meta]
    nearby: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        nearby = [other for other in nearby if other.end > span.begin]
        for other in nearby:
            if span.meets(other):
                first, second = sorted((other, span), key=spans.index)
                fail(second.name, "memory of its own", f"that of {first.name}", "a step writes the state and records")
        nearby.append(span)


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
