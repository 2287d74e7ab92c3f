"""What a recording holds by address, and whether the tensors still live there: the check mode of a replay.

A graph reads the memory that a tensor had when it was recorded. If the tensor gets other memory later (`.data`
swapped, storage resized) or its owner makes a new one, a replay goes on with the old memory, without an error.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.capture.errors import CaptureError
from graphrt.checks import fail
from graphrt.environment import CHECK

StaticTensors = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]

_FIX = "write into the recorded tensor instead (copy_, fill_), or record again"


def wanted(check: bool | None) -> bool:
    """Whether a recording checks its addresses at each replay: `check`, or GRAPHRT_CHECK=1 where it is None."""
    return CHECK.is_on() if check is None else check


def check_named(tensors: object) -> Mapping[str, Tensor]:
    """The argument `tensors` of a recording, or what its function gave: a mapping of tensors with memory.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(tensors, Mapping):
        fail("tensors", "tensors by name, or a function that gives them", type(tensors).__name__)
    for name, t in tensors.items():
        if not _has_address(t):
            what = f"{t.layout} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            fail("tensors", "dense tensors by name, with memory", f"{what} for {name!r}")
    return tensors


def _has_address(t: object) -> TypeGuard[Tensor]:
    return isinstance(t, Tensor) and t.layout is torch.strided and not t.is_meta


def argument_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in an argument with the way to it; also inside of containers and dataclasses."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from argument_tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from argument_tensors(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from argument_tensors(getattr(value, field.name), f"{path}.{field.name}")


def launch_tensors(run: Callable[..., None], args: tuple[Any, ...]) -> list[tuple[str, Tensor]]:
    """The tensors of one launch of graphrt's own: its arguments, and what the object has whose method it is."""
    found = [pair for i, arg in enumerate(args) for pair in argument_tensors(arg, f"argument {i}")]
    owner = getattr(run, "__self__", None)
    return found + list(argument_tensors(owner, type(owner).__name__))


@dataclasses.dataclass(frozen=True, slots=True)
class _Binding:
    """A tensor and its place at the time of the recording; keeps neither alive."""

    where: str
    tensor: weakref.ref[Tensor]
    address: int
    storage: StorageWeakRef
    storage_address: int

    def fault(self) -> str | None:
        """What happened to it since, or None."""
        if self.storage.expired():
            return "was freed"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is not None and storage.data_ptr() != self.storage_address:
            return "was reallocated"
        tensor = self.tensor()
        return "has other memory now" if tensor is not None and tensor.data_ptr() != self.address else None


class Bindings:
    """The memory that one recording reads and writes and that is not its own."""

    def __init__(self, tensors: StaticTensors | None = None) -> None:
        self._seen: dict[tuple[int, int], _Binding] = {}
        self._named: Callable[[], Mapping[str, Tensor]] | None = None
        self._places: dict[str, int] = {}
        if tensors is not None:
            self._named = tensors if callable(tensors) else lambda: tensors
            self._places = {name: t.data_ptr() for name, t in check_named(self._named()).items()}

    def add(self, where: str, t: Tensor) -> None:
        """Note a tensor that a launch takes; views made for one call are noted by their storage."""
        if t.numel() == 0:
            return
        storage = t.untyped_storage()
        key = (id(t), t.data_ptr())
        if key not in self._seen or self._seen[key].tensor() is not t:
            weak = StorageWeakRef(storage)
            self._seen[key] = _Binding(where, weakref.ref(t), t.data_ptr(), weak, storage.data_ptr())

    def drop(self, ranges: list[tuple[int, int]]) -> None:
        """Forget tensors in [begin, end) ranges: the recording's own pool, where intermediate results come and go."""
        for key, binding in list(self._seen.items()):
            if any(begin <= binding.storage_address < end for begin, end in ranges):
                del self._seen[key]

    def __len__(self) -> int:
        return len(self._seen) + len(self._places)

    def check(self, name: str) -> None:
        """CaptureError if a tensor of recording `name` moved, was freed, or is another one now."""
        for binding in self._seen.values():
            fault = binding.fault()
            if fault is not None:
                raise CaptureError(
                    f"replay of {name!r}: the memory of {binding.where} {fault} since it was recorded; {_FIX}"
                )
        if self._named is None:
            return
        try:
            now = self._named()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise CaptureError(f"replay of {name!r}: its static tensors are gone ({what}); record again") from error
        for tensor_name, place in self._places.items():
            t = now.get(tensor_name) if isinstance(now, Mapping) else None
            if not _has_address(t) or t.data_ptr() != place:
                raise CaptureError(
                    f"replay of {name!r}: static tensor {tensor_name!r} is not the one that was recorded; {_FIX}"
                )
