"""The short convolution as an option of the verifies: what a caller gives, and its checks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checks import (
    FLOATS,
    check_entries_apart,
    check_flag,
    check_inner,
    check_is_tensor,
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
                `dim_first`. Of the layer whose checkpoints the verify gets: memory of its own, beside states, records,
                projections, weights and gates, which is asked for at every call; another layer's of the same sizes is
                told apart in checked mode only
    weight      [conv_dim, W]
    bias        [conv_dim], or None
    dim_first   how the convolution state lies
    """

    conv_state: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dim_first: bool = True


ARGUMENTS = ("conv_state", "conv_weight", "conv_bias", "conv_dim_first")
"""What `kda_conv_verify` calls its convolution."""
FIELDS = ("conv.conv_state", "conv.weight", "conv.bias", "conv.dim_first")


def check_conv(
    conv: FusedConv, channels: int, device: torch.device, spec_query_len: int, names: tuple[str, str, str, str]
) -> Convolution:
    """The checked convolution, its state as [slots, conv_dim, C] whatever the storage order.

    Args:
        channels, device: what the rest of the call has.
        names: of state, weight, bias and order in an error.

    Raises:
        ValueError: naming the argument.
    """
    state_name, weight_name, bias_name, order_name = names
    weight, bias = conv.weight, conv.bias
    check_is_tensor(state_name, conv.conv_state)
    check_flag(order_name, conv.dim_first)
    state = conv.conv_state if conv.dim_first or conv.conv_state.ndim != 3 else conv.conv_state.transpose(1, 2)
    check_tensor(state_name, state, (None, None, None), FLOATS, device)
    if state.shape[1] != channels:
        got = f"{state.shape[1]} in {list(conv.conv_state.shape)}, {order_name}={conv.dim_first}"
        fail(state_name, f"{channels} channels", got)
    check_entries_apart(state_name, state)
    check_tensor(weight_name, weight, (channels, None), FLOATS, device)
    if bias is not None:
        check_tensor(bias_name, bias, (channels,), FLOATS, device)
        check_inner(bias_name, bias, 1)
    hist = weight.shape[1] - 1
    if hist < 1:
        fail(weight_name, "a width of at least 2", weight.shape[1])
    if state.shape[2] not in (hist + spec_query_len, hist + spec_query_len - 1):
        columns = f"{hist + spec_query_len} or {hist + spec_query_len - 1} columns (W - 1 + Q, or one less)"
        note = f"W {hist + 1}, spec_query_len {spec_query_len}, {order_name}={conv.dim_first}"
        fail(state_name, columns, state.shape[2], note)
    return Convolution(state, weight, bias, state.shape[2] == hist + spec_query_len)


def conv_facts(x: Tensor, conv: FusedConv) -> tuple[int, torch.device]:
    """Channels and device that two of input, state and weight have in common, so that an error names the third."""
    for name, t in (("x", x), ("conv_state", conv.conv_state), ("conv_weight", conv.weight)):
        check_is_tensor(name, t)
    state, weight = conv.conv_state, conv.weight
    check_tensor("conv_state", state, (None, None, None), FLOATS, state.device)
    channels = state.shape[1 if conv.dim_first is True else 2]
    if x.ndim == 2 and x.shape[1:] == weight.shape[:1]:
        channels = x.shape[1]
    return channels, x.device if x.device == weight.device else state.device


def check_fused(conv: FusedConv, q: Tensor, k: Tensor, v: Tensor, checkpoint: Tensor, window: int) -> Convolution:
    """The checked `conv` argument of a verify."""
    if not isinstance(conv, FusedConv):
        fail("conv", "a FusedConv, or None for q, k and v that are convolved already", type(conv).__name__)
    num_slots, heads, _, dim = checkpoint.shape
    checked = check_conv(conv, 3 * heads * dim, checkpoint.device, window, FIELDS)
    # A slot past the checkpoints is null for the convolution too.
    if checked.state.shape[0] < num_slots:
        fail("conv.conv_state", f"at least {num_slots} slots, as checkpoint_state", checked.state.shape[0])
    # The records say of which dtype k is, so that a state of another one is itself to blame.
    if checked.state.dtype != k.dtype:
        fail("conv.conv_state", f"{k.dtype}, as k and the records' keys", checked.state.dtype)
    for name, t in (("q", q), ("v", v)):
        check_tensor(name, t, tuple(t.shape), (k.dtype,), checkpoint.device)
    return replace(checked, state=checked.state[:num_slots])
