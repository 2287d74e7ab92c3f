"""The two hooks of a CPU tape: what the user calls, and the operators these calls come down to."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.capture.nodes import Tape
from graphrt.capture.refusals import (
    MAKE_BEFORE,
    REBINDS,
    SENDS,
    Refusal,
    masked_write,
    refused_call,
    refused_operator,
)
from graphrt.capture.shadow import Shadow, map_tensors, poisoned_like, storage_key, tensors_in

# These reserve memory and run nothing.
_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_ASSIGN = (Tensor.__setitem__,)
_INDEX = (Tensor.__getitem__, Tensor.__setitem__)


class CallHook(TorchFunctionMode):
    """Refuses host reads by the name the user wrote, and remembers that name for the operator hook."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        refusal = refused_call(func, args, kwargs)
        if refusal is not None:
            self.tape.refuse(refusal)
        outer, self.tape.user_call = self.tape.user_call, func
        try:
            return func(*args, **kwargs)
        finally:
            self.tape.user_call = outer


class OperatorHook(TorchDispatchMode):
    """Puts every operator that computes on the tape instead of running it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        # Host numbers that an indexed assignment turned into tensors; kept alive, so the ids stay theirs.
        self._constants: list[Tensor] = []
        self._constant_ids: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self._refuse(Refusal(str(func), "is not a plain operator", "unfold it into tensor operations"))
        if torch.is_grad_enabled():
            self._refuse(Refusal(str(func), "runs with gradients enabled", "leave gradients off in the function"))
        if func._schema.name == "aten::lift_fresh":
            return self._host_data(args[0])
        refusal = refused_operator(func, args, kwargs) or masked_write(func, args, self._constant_ids)
        if refusal is not None:
            self._refuse(refusal)
        self._check_placed(func, args, kwargs)
        # Composites come down to this hook whole in inference mode.
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if torch.Tag.inplace_view in func.tags:
            return self._view_in_place(func, args, kwargs)
        if _is_view(func) or not _has_tensor_results(func):
            # A view runs nothing, and a question about shapes (`is_same_size`) is answered by them.
            return func(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shadow = self._shadow(func, args, kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, shadow)
        fresh = tensors_in(shadow.result)
        aliased = [shadow.aliases_argument(t) for t in fresh]
        if any(aliased):
            return self._unannounced_view(func, args, kwargs, all(aliased))
        result = map_tensors(poisoned_like, shadow.result)
        results = tensors_in(result)
        self.tape.own(results)
        if func._schema.name not in _ALLOCATIONS:
            self.tape.add_fresh(func, args, kwargs, results)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shadow: Shadow) -> Any:
        schema = func._schema
        if any(r.alias_info is None for r in schema.returns):
            self._refuse(
                Refusal(
                    str(func),
                    "writes an argument and returns a new tensor as well",
                    "split it into two calls",
                )
            )
        if shadow.resized_argument():
            self._refuse(Refusal(f"{func} with an out= of another shape", REBINDS, "give out= the result's shape"))
        written = _written(func, args, kwargs)
        self.tape.add_write(func, args, kwargs, written)
        by_alias = {next(iter(a.alias_info.before_set), ""): value for a, value in written}
        returned = tuple(by_alias[next(iter(r.alias_info.before_set), "")] for r in schema.returns)
        if len(returned) == 1:
            return returned[0]
        return returned or None

    def _shadow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shadow:
        try:
            return Shadow(func, args, kwargs)
        except NotImplementedError as error:
            self._refuse(
                Refusal(
                    str(func),
                    "has no shape rule (meta kernel)",
                    "register one with torch.library.register_fake, or use another operation",
                ),
                error,
            )

    def _view_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if storage_key(args[0]) not in self.tape.owned:
            self._refuse(
                Refusal(str(func), "reshapes a tensor that lives outside", "use the view without the underscore")
            )
        return func(*args, **kwargs)

    def _unannounced_view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], all_views: bool) -> Any:
        if all_views:
            result = func(*args, **kwargs)
            homes = {storage_key(t) for t in tensors_in(args, kwargs)}
            if all(storage_key(t) in homes for t in tensors_in(result)):
                return result
        self._refuse(Refusal(str(func), "returns views and new tensors together", "split it into two calls"))

    def _host_data(self, t: Tensor) -> Tensor:
        """Torch lifts every tensor that it makes from host data; only the number of `x[i] = 1.0` may pass."""
        call = self.tape.user_call
        if call in _ASSIGN and t.dim() == 0:
            self._constants.append(t)
            self._constant_ids.add(id(t))
            return t
        if call in _INDEX:
            self._refuse(Refusal("indexing by a Python list", SENDS, MAKE_BEFORE))
        self.tape.refuse(
            Refusal("a tensor made of host data (torch.from_numpy, torch.Tensor(data))", SENDS, MAKE_BEFORE)
        )

    def _check_placed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for t in tensors_in(args, kwargs):
            if t.device.type != "cpu" or t.layout != torch.strided or t.is_quantized:
                self._refuse(
                    Refusal(
                        f"{func} on a {t.layout} tensor on {t.device}",
                        "is outside a CPU tape",
                        "use CPU tensors",
                    )
                )
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            self._refuse(
                Refusal(f"{func} on {device}", "leaves the device of the recording", "keep the work on the CPU")
            )

    def _refuse(self, refusal: Refusal, cause: Exception | None = None) -> NoReturn:
        """Refuse an operator under the name of the call that led to it, if there was one."""
        call = self.tape.user_call
        if call is None:
            self.tape.refuse(refusal, cause)
        spelled = _spelled(call)
        if refusal.call.rpartition("::")[2].partition(".")[0] in spelled:
            self.tape.refuse(refusal._replace(call=spelled), cause)
        self.tape.refuse(refusal._replace(call=f"{spelled} ({refusal.call})"), cause)


def _spelled(call: Callable[..., Any]) -> str:
    """The call as a user writes it: `torch.where`, `.nonzero()`, `tensor[...]`."""
    if call in _INDEX:
        return "tensor[...] = ..." if call in _ASSIGN else "tensor[...]"
    name = resolve_name(call) or getattr(call, "__name__", str(call))
    return f".{name.removeprefix('torch.Tensor.')}()" if name.startswith("torch.Tensor.") else name


def _is_view(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def _has_tensor_results(func: Any) -> bool:
    schema = func._schema
    return not schema.returns or any("Tensor" in str(r.type) for r in schema.returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The schema arguments that the operator writes, each with the value given for it."""
    pairs = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            pairs.append((argument, value))
    return pairs
