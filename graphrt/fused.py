"""The short convolution as an option of the verifies: what a caller gives, and its checks."""

from dataclasses import dataclass, replace

from torch import Tensor

from .checks import (
    FLOATS,
    check_count,
    check_flag,
    check_inner,
    check_is_tensor,
    check_not_expanded,
    check_tensor,
    fail,
)
from .steps import Convolution


@dataclass(frozen=True, slots=True)
class FusedConv:
    """The convolution of a layer, as the `conv` argument of a verify whose q, k and v are raw projections.

    conv_dim = 3 * H * K: the channels of q, then k, then v, each head by head. The verify does what `kda_conv_verify`
    with the same rows and `pending` followed by itself would do, silu, convolution state and history included, bit for
    bit: in one launch on `fp32_deferred` (K = V = 128, width up to 5, weights in the dtype of q), in two elsewhere.

    conv_state  [slots, conv_dim, C] in the dtype of q, C = W - 1 + Q or one less; [slots, C, conv_dim] without
                `dim_first`. Of the layer whose checkpoints the verify gets: memory of its own, which is asked for at
                every call; another layer's of the same sizes is told apart in checked mode only
    weight      [conv_dim, W]
    bias        [conv_dim], or None
    dim_first   how the convolution state lies
    """

    conv_state: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dim_first: bool = True


def check_conv(
    conv_state: Tensor, weight: Tensor, bias: Tensor | None, dim_first: bool, spec_query_len: int,
    prefix: str = "conv_",
) -> Convolution:  # fmt: skip
    """The checked convolution, its state as [slots, conv_dim, C] whatever the storage order.

    Raises:
        ValueError: naming the argument, which for weight and bias starts with `prefix`.
    """
    check_is_tensor("conv_state", conv_state)
    check_count("spec_query_len", spec_query_len, 1)
    check_flag(f"{prefix}dim_first", dim_first)
    state = conv_state if dim_first or conv_state.ndim != 3 else conv_state.transpose(1, 2)
    check_tensor("conv_state", state, (None, None, None), FLOATS, conv_state.device)
    check_not_expanded("conv_state", state)
    check_tensor(f"{prefix}weight", weight, (state.shape[1], None), FLOATS, state.device)
    if bias is not None:
        check_tensor(f"{prefix}bias", bias, (state.shape[1],), FLOATS, state.device)
        check_inner(f"{prefix}bias", bias, 1)
    hist = weight.shape[1] - 1
    if hist < 1:
        fail(f"{prefix}weight", "a width of at least 2", weight.shape[1])
    if state.shape[2] not in (hist + spec_query_len, hist + spec_query_len - 1):
        columns = f"{hist + spec_query_len} or {hist + spec_query_len - 1} columns (W - 1 + Q, or one less)"
        note = f"W {hist + 1}, spec_query_len {spec_query_len}, conv_dim_first={dim_first}"
        fail("conv_state", columns, state.shape[2], note)
    return Convolution(state, weight, bias, state.shape[2] == hist + spec_query_len)


def check_fused(conv: FusedConv, q: Tensor, k: Tensor, v: Tensor, checkpoint: Tensor, window: int) -> Convolution:
    """The checked `conv` argument of a verify."""
    if not isinstance(conv, FusedConv):
        fail("conv", "a FusedConv, or None for q, k and v that are convolved already", type(conv).__name__)
    checked = check_conv(conv.conv_state, conv.weight, conv.bias, conv.dim_first, window, "conv.")
    _, heads, _, dim = checkpoint.shape
    columns, device, dtype = checked.state.shape[2], checkpoint.device, conv.conv_state.dtype
    check_tensor("conv.conv_state", checked.state, (None, 3 * heads * dim, columns), FLOATS, device)
    # A slot past the checkpoints is null for the convolution too.
    if checked.state.shape[0] < checkpoint.shape[0]:
        slots = f"at least {checkpoint.shape[0]} slots, as checkpoint_state"
        fail("conv.conv_state", slots, checked.state.shape[0])
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t, tuple(t.shape), (dtype,), device)
    return replace(checked, state=checked.state[: checkpoint.shape[0]])
