"""Equality of bytes."""

from torch import Tensor

from graphrt.capture import bits


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "tensors") -> None:
    """AssertionError unless `actual` and `expected`, both [any shape], have the same shape, dtype and bytes.

    They may be on different devices.

    The error names the first differing element and both values; NaN equals NaN of the same bits only.
    """
    for name, a, b in (("shape", list(actual.shape), list(expected.shape)), ("dtype", actual.dtype, expected.dtype)):
        if a != b:
            raise AssertionError(f"{what}: expected {name} {b}, got {a}")
    expected = expected.to(actual.device)
    index = bits.first_difference(actual, expected)
    if index is None:
        return
    got, want = bits.both_values(actual, expected, index)
    count = bits.count_differences(actual, expected)
    raise AssertionError(
        f"{what}: expected {want} at {list(index)}, got {got} ({count} of {actual.numel()} elements differ)"
    )
