"""Tensors as bytes: a group with names, comparisons that NaN cannot fool, and the first place that differs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrt.checks import fail

TensorGroup = Mapping[str, Tensor | Sequence[Tensor]] | Sequence[Tensor]
"""Tensors by name; a sequence under a name has one tensor a layer."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Comparing and summing make temporary tensors; a chunk of rows keeps these near 64 MiB.
_CHUNK_ELEMENTS = 1 << 23
# Odd numbers of 64 bits without a pattern, to scatter the bits of a count.
_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


@dataclass(frozen=True, slots=True)
class Named:
    """One tensor of a group."""

    name: str
    layer: int | None
    tensor: Tensor

    @property
    def label(self) -> str:
        return self.name if self.layer is None else f"{self.name}[{self.layer}]"


def named(group: TensorGroup) -> list[Named]:
    """The tensors of a group in order. ValueError if there is none, or something else among them."""
    items = group.items() if isinstance(group, Mapping) else [("tensors", group)]
    found = []
    for name, value in items:
        layers: list[tuple[int | None, object]] = [(None, value)]
        if isinstance(value, Sequence) and not isinstance(value, str):
            layers = list(enumerate(value))
        for layer, tensor in layers:
            if not isinstance(tensor, Tensor):
                fail("tensors", "tensors by name, or a sequence of them", f"{type(tensor).__name__} under {name!r}")
            found.append(Named(str(name), layer, tensor))
    if not found:
        fail("tensors", "at least one tensor", "none")
    return found


def bits(t: Tensor) -> Tensor:
    """The same memory as integers; a complex number is two of them, in one more dimension."""
    t = t.detach()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(_INTEGERS[t.element_size()])


def snapshot(group: Sequence[Named]) -> list[Tensor]:
    """Copies, on the tensors' own devices."""
    return [entry.tensor.detach().clone() for entry in group]


def restore(group: Sequence[Named], saved: Sequence[Tensor]) -> None:
    """Write a snapshot back, byte for byte."""
    # Also for inference tensors, which may not be written anywhere else.
    with torch.inference_mode():
        for entry, old in zip(group, saved, strict=True):
            bits(entry.tensor).copy_(bits(old))


def changed(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[int]:
    """Positions at which two lists of tensors hold different bytes; waits for each device once."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for i, (a, b) in enumerate(zip(tensors, others, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            by_device.setdefault(torch.device("cpu"), []).append((i, torch.tensor(True, device="cpu")))
        elif a.numel():
            flags = [(x != y).any() for _, x, y in _chunks(a, b)]
            by_device.setdefault(a.device, []).append((i, torch.stack(flags).any()))
    differing = []
    for found in by_device.values():
        flags_on_host = torch.stack([flag for _, flag in found]).tolist()
        differing += [i for (i, _), flag in zip(found, flags_on_host, strict=True) if flag]
    return sorted(differing)


def first_difference(a: Tensor, b: Tensor) -> tuple[int, ...] | None:
    """Index of the first element whose bytes differ."""
    for start, x, y in _chunks(a, b):
        unequal = x != y
        if unequal.any():
            flat = int(unequal.flatten().to(torch.uint8).argmax())
            index = [int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), unequal.shape)]
            return (index[0] + start, *index[1:])[: a.ndim]
    return None


def count_differences(a: Tensor, b: Tensor) -> int:
    """How many elements differ (parts of complex numbers count singly)."""
    return sum(int((x != y).sum()) for _, x, y in _chunks(a, b))


def both_values(a: Tensor, b: Tensor, index: tuple[int, ...]) -> tuple[str, str]:
    """Two elements as text; with their bytes where they print alike, as two kinds of NaN do."""
    x, y = a[index], b[index]
    texts = repr(x.item()), repr(y.item())
    if texts[0] != texts[1]:
        return texts
    digits = 2 * x.element_size()
    hexes = [" ".join(f"{part & (1 << 4 * digits) - 1:0{digits}x}" for part in _parts(v)) for v in (x, y)]
    return f"{texts[0]} (0x{hexes[0]})", f"{texts[1]} (0x{hexes[1]})"


def row_sums(t: Tensor) -> Tensor:
    """[rows] int64: a checksum of each entry of the first dimension. One changed element always changes it."""
    sums = []
    for _, rows, _ in _chunks(t, t):
        flat = rows.reshape(rows.shape[0], -1)
        sums.append((flat.to(torch.int64) * _weights(flat.shape[1], t.device)).sum(1))
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device=t.device)


def _weights(count: int, device: torch.device) -> Tensor:
    """[count] int64. Odd, so that one changed element changes a sum modulo 2**64; no small multiples of them cancel."""
    w = torch.arange(1, count + 1, device=device)
    for factor in _MIX:
        w = w * factor
        w = w ^ (w >> 29 & (1 << 35) - 1)  # without the sign that the shift brings along
    return w | 1


def num_bytes(group: Sequence[Named]) -> int:
    """Bytes of all elements: what one snapshot takes."""
    return sum(entry.tensor.numel() * entry.tensor.element_size() for entry in group)


def _parts(element: Tensor) -> list[int]:
    return [int(part) for part in bits(element).flatten().tolist()]


def _chunks(a: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Runs of rows of both tensors as integers, with the first row's number; never without a dimension."""
    x, y = bits(a), bits(b)
    if a.ndim == 0:
        x, y = x[None], y[None]
    if x.numel() == 0:
        return
    rows = max(1, _CHUNK_ELEMENTS * x.shape[0] // x.numel())
    for start in range(0, x.shape[0], rows):
        yield start, x[start : start + rows], y[start : start + rows]
