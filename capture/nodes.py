"""The tape's list of launches, and how each is called again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphrt.capture.bindings import launch_tensors
from graphrt.capture.errors import CaptureError
from graphrt.capture.refusals import Refusal
from graphrt.capture.shadow import map_tensors, storage_key, tensors_in


@dataclass(frozen=True, slots=True)
class Node:
    """One launch.

    name     the operator, or the name that graphrt's entry point gave its launch
    call     runs it on the recorded memory
    inputs   the tensors it was given, as the caller's own objects: a later check can see that one was rebound
    outputs  the tensors it writes; an opaque launch does not tell, so all its tensors are inputs
    """

    name: str
    call: Callable[[], object]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Tape:
    """Collects the launches of one recording (a `graphrt.launch.Recorder`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.pool_bytes = 0
        self.user_call: Callable[..., Any] | None = None
        self.refusal: CaptureError | None = None
        # Storages of fresh results, kept alive with their tensors so that a key stays theirs.
        self.owned: dict[int, Tensor] = {}

    def launch(self, name: str, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Keep one opaque launch of graphrt's own; a replay calls `run(*args)`."""
        tensors = tuple(t for _, t in launch_tensors(run, args))
        self.nodes.append(Node(name, partial(run, *args), tensors, ()))

    def own(self, results: list[Tensor]) -> None:
        """Count fresh results as the recording's memory."""
        for t in results:
            self.owned[storage_key(t)] = t
            self.pool_bytes += t.untyped_storage().nbytes()

    def add_fresh(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
        """Keep an operator whose results are new tensors; a replay writes into `results`."""
        # Fixed aliases: a later `unsqueeze_` of a result must not reach the recorded call.
        fixed_args, fixed_kwargs = map_tensors(Tensor.detach, (args, kwargs))
        fixed_results = tuple(t.detach() for t in results)
        call = _into(func, fixed_args, fixed_kwargs, fixed_results)
        self.nodes.append(Node(str(func), call, tuple(tensors_in(args, kwargs)), tuple(results)))

    def add_write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[tuple[Any, Any]]
    ) -> None:
        """Keep an operator that writes its own arguments (in place, or `out=`)."""
        fixed_args, fixed_kwargs = map_tensors(Tensor.detach, (args, kwargs))
        call = partial(func, *fixed_args, **fixed_kwargs)
        outputs = tensors_in([value for _, value in written])
        self.nodes.append(Node(str(func), call, tuple(tensors_in(args, kwargs)), tuple(outputs)))

    def refuse(self, refusal: Refusal, cause: Exception | None = None) -> NoReturn:
        """Raise what cannot be recorded; it is raised again at the end, should the function swallow it."""
        self.refusal = CaptureError(f"recording {self.name!r}: {refusal.call} {refusal.why}; {refusal.fix}")
        raise self.refusal from cause


def _into(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Tensor, ...]
) -> Callable[[], object]:
    """A call that computes `func(*args, **kwargs)` into `results`, by an out= form or a copy."""
    if func._schema.name in ("aten::clone", "aten::_to_copy"):
        return partial(results[0].copy_, args[0])
    names = _out_form(func)
    if names is not None and len(names[1]) == len(results):
        return partial(names[0], *args, **kwargs, **dict(zip(names[1], results, strict=True)))
    return partial(_copy_into, func, args, kwargs, results)


def _out_form(func: Any) -> tuple[Any, list[str]] | None:
    """The overload with the same arguments plus an output for each result, and the outputs' names."""
    # Random operators keep the one form that eager execution uses, so both draw the same numbers.
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    packet = func.overloadpacket
    for overload in packet.overloads():
        form = getattr(packet, overload)
        outs = [a.name for a in form._schema.arguments if a.is_out]
        given = [(a.name, str(a.type)) for a in form._schema.arguments if not a.is_out]
        types = [str(a.type) for a in form._schema.arguments if a.is_out]
        if given == wanted and len(outs) == len(func._schema.returns) > 0 and set(types) == {"Tensor"}:
            return form, outs
    return None


def _copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Tensor, ...]) -> None:
    for target, source in zip(results, tensors_in(func(*args, **kwargs)), strict=True):
        if target.shape != source.shape:
            raise RuntimeError(f"{func} replayed with shape {list(source.shape)}, recorded with {list(target.shape)}")
        target.copy_(source)
