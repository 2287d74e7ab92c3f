"""`state_neutral`: proof that a warm-up or a capture changed no byte of the state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from graphrt.capture import bits
from graphrt.capture.bits import Named, TensorGroup
from graphrt.capture.errors import CaptureError
from graphrt.checks import check_flag


@contextmanager
def state_neutral(tensors: TensorGroup, *, values: bool = True) -> Iterator[None]:
    """Raise CaptureError at the end of the block if one byte of `tensors` changed in it.

        with state_neutral({"checkpoint": context.checkpoints, "pending": slots.pending}):
            runner.capture()

    tensors  by name, one tensor or one a layer; or a sequence. Any strides and dtypes; NaN is compared by its bytes
    values   True keeps a copy of the tensors: as many bytes as they have, on their own devices, and two passes over
             them. The error names tensor, element and both values.
             False keeps a checksum of each entry of the first dimension, 8 bytes a state slot: for production, where
             the pools fill the device. The error then names tensor and slot. A change of one element is always seen,
             one of several all but certainly (64 bits).

    Both need up to 128 MiB of temporary memory, and wait for the device at the end. If the block raises, its own error
    comes through, with a note if the state changed as well.
    """
    check_flag("values", values)
    group = bits.named(tensors)
    forms = [_form(entry.tensor) for entry in group]
    saved = bits.snapshot(group) if values else [bits.row_sums(entry.tensor) for entry in group]
    try:
        yield
    except BaseException as error:
        text = _change(group, forms, saved, values)
        if text is not None:
            error.add_note(text)
        raise
    text = _change(group, forms, saved, values)
    if text is not None:
        raise CaptureError(text)


def _form(t: Tensor) -> str:
    return f"{t.dtype} {list(t.shape)}"


def _change(group: list[Named], forms: Sequence[str], saved: list[Tensor], values: bool) -> str | None:
    """What changed since the block began, or None."""
    for entry, form in zip(group, forms, strict=True):
        if _form(entry.tensor) != form:
            return f"state_neutral: {entry.label} had {form}, has {_form(entry.tensor)}: it was rebound"
    now = [entry.tensor if values else bits.row_sums(entry.tensor) for entry in group]
    differing = bits.changed(now, saved)
    if not differing:
        return None
    i = differing[0]
    index = bits.first_difference(now[i], saved[i]) or ()
    others = f"; {len(differing) - 1} more tensors changed" if len(differing) > 1 else ""
    if not values:
        slot = index[0] if group[i].tensor.ndim else 0
        return f"state_neutral: {group[i].label} changed in entry {slot} of its first dimension{others}"
    after, before = bits.both_values(now[i], saved[i], index)
    return f"state_neutral: {group[i].label} changed at {list(index)}: {before} before, {after} after{others}"
