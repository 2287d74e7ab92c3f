"""What a recording refuses, in the user's words: the call as written, why, and the way out.

A recording is a list of launches. It cannot hold a value that the host reads, a shape that values decide, or
data that the host sends. Most such calls reach the operator hook (`ops`); those listed here by function would
not, or would reach it under a name that the user did not write.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Refusal(NamedTuple):
    """`call` is what the user wrote; `why` and `fix` complete the sentence."""

    call: str
    why: str
    fix: str


READS = "reads values on the host, which a recording cannot do"
KEEP = "keep the value in a tensor (torch.where instead of if), or read it after replay()"
SENDS = "copies host data to the device, which a recording cannot do"
MAKE_BEFORE = "make the tensor before the recording, or use torch.full, torch.zeros or torch.arange in it"
SHAPE = "has a result whose shape depends on values, which a recording cannot have"
REBINDS = "changes the memory of a tensor, which a recording holds by address"
WRITE_INTO = "write into the tensor instead: copy_, fill_, out=, or an indexed assignment"


def _reads(call: str, fix: str = KEEP) -> Refusal:
    return Refusal(call, READS, fix)


def _sends(call: str) -> Refusal:
    return Refusal(call, SENDS, MAKE_BEFORE)


# By the function object that a function mode sees. On CPU tensors several of these run no operator at all.
BY_FUNCTION: dict[Callable[..., Any], Refusal] = {
    Tensor.item: _reads(".item()"),
    Tensor.tolist: _reads(".tolist()"),
    Tensor.cpu: _reads(".cpu()"),
    Tensor.numpy: _reads(".numpy()"),
    Tensor.__array__: _reads("numpy.asarray(tensor)"),
    Tensor.__dlpack__: _reads("__dlpack__()", "exchange tensors before the recording; it sees later writes"),
    Tensor.__bool__: _reads("bool(tensor), or a tensor as a condition,"),
    Tensor.__int__: _reads("int(tensor)"),
    Tensor.__float__: _reads("float(tensor)"),
    Tensor.__complex__: _reads("complex(tensor)"),
    Tensor.__index__: _reads("a tensor used as a Python index (range(tensor), list[tensor])"),
    Tensor.__contains__: _reads("`in` on a tensor"),
    Tensor.__repr__: _reads("printing a tensor (repr, str, print)", "print it after replay()"),
    Tensor.__format__: _reads("formatting a tensor (an f-string)", "format it after replay()"),
    Tensor.__deepcopy__: _reads("copy.deepcopy(tensor)", "use clone()"),
    Tensor.is_nonzero: _reads(".is_nonzero()"),
    torch.is_nonzero: _reads("torch.is_nonzero"),
    torch.equal: _reads("torch.equal", "use (a == b).all(), which stays a tensor"),
    Tensor.equal: _reads(".equal()", "use (a == b).all(), which stays a tensor"),
    torch.allclose: _reads("torch.allclose", "use torch.isclose(a, b).all(), which stays a tensor"),
    Tensor.allclose: _reads(".allclose()", "use torch.isclose(a, b).all(), which stays a tensor"),
    Tensor.map_: _reads(".map_()", "use tensor operations"),
    Tensor.apply_: _reads(".apply_()", "use tensor operations"),
    torch.nn.functional.one_hot: _reads(
        "one_hot", "compare with a range: (x[..., None] == torch.arange(classes)).long()"
    ),
    torch.tensor: _sends("torch.tensor(data)"),
    torch.as_tensor: _sends("torch.as_tensor(data)"),
    torch.asarray: _sends("torch.asarray(data)"),
    Tensor.new_tensor: _sends(".new_tensor(data)"),
    # The setter of `tensor.data`.
    Tensor.data.__set__: Refusal("assigning tensor.data", REBINDS, WRITE_INTO),  # type: ignore[attr-defined]
    Tensor.share_memory_: Refusal(".share_memory_()", REBINDS, "call it before the recording"),
}

# Refused for some arguments only; these operators read a tensor argument on the host, on CUDA at least.
_OUTPUT_SIZE = "pass output_size=, the total"
_FIXED_SHAPE = "use a fixed shape: torch.where(mask, a, b), or a mask that is carried along"
BY_OPERATOR: dict[str, Refusal] = {
    "aten::_local_scalar_dense": _reads("an implicit .item()"),
    "aten::masked_fill.Tensor": _reads("masked_fill with a tensor as value", "use torch.where(mask, value, x)"),
    "aten::masked_fill_.Tensor": _reads(
        "masked_fill_ with a tensor as value", "use x.copy_(torch.where(mask, value, x))"
    ),
    "aten::index_fill.int_Tensor": _reads("index_fill with a tensor as value", "use index_copy"),
    "aten::index_fill_.int_Tensor": _reads("index_fill_ with a tensor as value", "use index_copy_"),
}
BY_PACKET: dict[str, Refusal] = {
    "aten::resize_": Refusal(".resize_()", REBINDS, WRITE_INTO),
    "aten::resize_as_": Refusal(".resize_as_()", REBINDS, WRITE_INTO),
    "aten::_linalg_check_errors": _reads("its check for singular matrices", "use the form without one: inv_ex"),
    "aten::set_": Refusal(".set_()", REBINDS, WRITE_INTO),
}


# Who asks for a tensor's storage to read it; everybody else may ask where it is.
_SERIALIZERS = {"torch._tensor": ("_reduce_ex_internal",), "safetensors.torch": ("storage_ptr", "storage_size")}


def _serialized(frame: FrameType | None) -> Refusal | None:
    """The refusal of pickle, torch.save, copy.copy and safetensors, which read a tensor without any operator."""
    for _ in range(3):
        if frame is not None:
            if frame.f_code.co_name in _SERIALIZERS.get(str(frame.f_globals.get("__name__")), ()):
                return _reads("saving a tensor (pickle, torch.save, safetensors, copy.copy)", "save it after replay()")
            frame = frame.f_back
    return None


def refused_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
    """The refusal of a call to a torch function or a tensor method, or None if it may go on."""
    try:
        known = BY_FUNCTION.get(func)
    except TypeError:
        return None
    if known is not None:
        return known
    if func is Tensor.untyped_storage:
        # This function, the hook, and then whoever called the method.
        return _serialized(sys._getframe(2))
    if func is Tensor.to:
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        # A device object says "where the recording runs", the spelled-out host says "bring it here".
        if isinstance(target, str) and target.partition(":")[0] == "cpu":
            return _reads('.to("cpu")', "drop it, or read the tensor after replay(); for its own device use x.device")
    if func in (torch.tensor_split, Tensor.tensor_split):
        where = [*args[1:2], *kwargs.values()]
        if any(isinstance(value, Tensor) for value in where):
            return _reads("tensor_split with a tensor of indices", "pass the indices as a tuple of ints")
    return None


def refused_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
    """The refusal of an operator call, named after the operator, or None if it may go on."""
    schema = func._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    known = BY_OPERATOR.get(name) or BY_PACKET.get(schema.name)
    if known is not None:
        return known
    if schema.name in ("aten::linspace", "aten::logspace") and "Tensor" in schema.overload_name:
        return _reads(f"torch.{schema.name[6:]} with a tensor as end", "pass the ends as numbers")
    if torch.Tag.data_dependent_output in func.tags:
        return _reads(name)
    if schema.name == "aten::index":
        return Refusal("indexing by a mask", SHAPE, _FIXED_SHAPE) if _has_mask(args[1]) else None
    if schema.name == "aten::repeat_interleave":
        sized = kwargs.get("output_size", args[1] if len(args) > 1 else None) is not None
        return None if sized else Refusal("repeat_interleave with tensor repeats", SHAPE, _OUTPUT_SIZE)
    if torch.Tag.dynamic_output_shape in func.tags:
        return Refusal(name, SHAPE, _FIXED_SHAPE)
    return None


def _has_mask(indices: Any) -> bool:
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)


def masked_write(func: Any, args: tuple[Any, ...], constants: set[int]) -> Refusal | None:
    """`x[mask] = value` keeps its shape only for a single mask and a number, which it turns into a fill."""
    if func._schema.name not in ("aten::index_put_", "aten::index_put") or not _has_mask(args[1]):
        return None
    value, accumulate = args[2], args[3] if len(args) > 3 else False
    if id(value) in constants and not accumulate and sum(i is not None for i in args[1]) == 1:
        return None
    return Refusal("assigning tensor values through a mask", SHAPE, "use torch.where(mask, value, x) and copy_")
