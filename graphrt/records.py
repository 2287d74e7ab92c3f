"""Verify records: what a window leaves behind so that its accepted prefix can be folded in later."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import FLOATS, check_count, check_device, fail
from .launch import refuse_in_recording


@dataclass(frozen=True, slots=True)
class KDARecoverSSMRecords:
    """The records of one layer. Row -1 of both views is the scratch row: written by rows that own none, never read.

    correction  [R, H, Q, V] float32: u_t = beta_t * (v_t - S k_t)
    key_gate    [R, H, Q, 2K] activation dtype: the raw key, then the raw gate, as the verify received them
    """

    correction: Tensor
    key_gate: Tensor


def allocate_records(
    max_num_reqs: int,
    num_heads: int,
    spec_query_len: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KDARecoverSSMRecords:
    """Zeroed records of one layer for `max_num_reqs` record rows and the scratch row before them.

    Each tensor is a view that starts one row into its allocation, so that index -1 in a kernel is a row of its own:
    dummy requests of a context-parallel capture have live-looking state slots and record row -1.

    Args:
        max_num_reqs: R, record rows.
        num_heads: H, heads on this device.
        spec_query_len: Q, 1 + the most draft tokens.
        head_dim: K = V.
        dtype: of the keys and gates a verify gets. With float64 (torch backend) the corrections are float64 too.

    Returns:
        `correction [R, H, Q, V]` float32 and `key_gate [R, H, Q, 2K]` `dtype`:
        `(1 + R) * H * Q * (4 V + 2 K * dtype bytes)` bytes.

    Raises:
        ValueError: naming the argument.
    """
    refuse_in_recording("allocate_records")
    sizes = {
        "max_num_reqs": max_num_reqs,
        "num_heads": num_heads,
        "spec_query_len": spec_query_len,
        "head_dim": head_dim,
    }
    max_num_reqs, num_heads, spec_query_len, head_dim = (check_count(name, size, 1) for name, size in sizes.items())
    if dtype not in FLOATS:
        fail("dtype", "a floating dtype of 16 bits or more", dtype)
    device = check_device("device", device)
    shape = (1 + max_num_reqs, num_heads, spec_query_len)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.inference_mode(False):  # records outlive the caller's mode
        return KDARecoverSSMRecords(
            correction=torch.zeros((*shape, head_dim), dtype=wide, device=device)[1:],
            key_gate=torch.zeros((*shape, 2 * head_dim), dtype=dtype, device=device)[1:],
        )
