"""What an operator would return, without running it: shapes from the meta device, memory full of poison."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphrt.capture.bindings import argument_tensors

META = torch.device("meta")


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same arguments with each tensor changed; operators nest tensors in lists and tuples only."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    return value


def tensors_in(*values: Any) -> list[Tensor]:
    """Every tensor in the values, in order; also inside of mappings, named tuples and dataclasses."""
    return [t for _, t in argument_tensors(values, "")]


def storage_key(t: Tensor) -> int:
    """Two live tensors have the same key exactly if they share a storage (also when it holds no bytes)."""
    return int(t.untyped_storage()._cdata)


class Shadow:
    """One operator call on shapes alone.

    result   what the call returned, with meta tensors
    aliases  keys of the storages that the results share with an argument
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments: list[Tensor] = []
        shadow_args = map_tensors(self._stand_in, tuple(_on_meta(a) for a in args))
        shadow_kwargs = map_tensors(self._stand_in, {key: _on_meta(a) for key, a in kwargs.items()})
        if takes_device(func) and not self._arguments:
            shadow_kwargs["device"] = META
        self._sizes = [t.shape for t in self._arguments]
        self.result = func(*shadow_args, **shadow_kwargs)

    def _stand_in(self, t: Tensor) -> Tensor:
        twin = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META)
        self._arguments.append(twin)
        return twin

    def aliases_argument(self, t: Tensor) -> bool:
        """Whether this result lives in the storage of an argument, whatever the schema says."""
        return storage_key(t) in {storage_key(a) for a in self._arguments}

    def resized_argument(self) -> bool:
        """Whether the call gave one of its arguments another shape, as `out=` of a wrong shape does."""
        return any(t.shape != size for t, size in zip(self._arguments, self._sizes, strict=True))


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return META
    # A shape needs no random numbers, and a generator must not move.
    return None if isinstance(value, torch.Generator) else value


def takes_device(func: Any) -> bool:
    """Whether the operator has a `device` argument (factories and conversions)."""
    return any(a.name == "device" for a in func._schema.arguments)


def poisoned_like(shape_of: Tensor) -> Tensor:
    """A CPU tensor with the shape, strides and dtype of a meta tensor, full of values that stand out."""
    # An inference tensor could not be written by a replay outside inference mode.
    with torch.inference_mode(False):
        t = torch.empty_like(shape_of, device="cpu")
        return t.fill_(poison(t.dtype))


def poison(dtype: torch.dtype) -> float | complex | int | bool:
    """NaN; the smallest integer, but the largest if unsigned, where 0 passes for a value; True for bool."""
    if dtype.is_complex:
        return complex(float("nan"), float("nan"))
    if dtype.is_floating_point:
        return float("nan")
    if dtype == torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return int(limits.min if limits.min < 0 else limits.max)
