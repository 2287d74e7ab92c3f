"""Layers in poisoned memory: NaN wherever nothing may be read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers import KDALayer
from ..records import allocate_records


@dataclass(frozen=True, slots=True)
class Pool:
    """The static tensors of a small model, and the pending counts of its record rows.

    layers          `KDALayer`s; their slots and records are NaN until somebody writes them
    pending         [R] int32, zero
    spec_query_len  Q
    conv_dim        channels of the convolution
    """

    layers: list[KDALayer]
    pending: Tensor
    spec_query_len: int
    conv_dim: int

    @property
    def device(self) -> torch.device:
        """Where all of it lives."""
        return self.pending.device

    @property
    def hist(self) -> int:
        """W - 1, convolution inputs that a request keeps."""
        weight = self.layers[0].conv_weight
        return 0 if weight is None else weight.shape[1] - 1

    def fill(self, slot: int, seed: int) -> None:
        """What a prefill leaves in a slot of every layer: a state, and `hist` convolution inputs in front."""
        random = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            conv_state, checkpoint = layer.kv_cache
            for target in (checkpoint[slot], conv_state[slot, :, : self.hist]):
                target.copy_(normal(random, *target.shape))

    def tensors(self) -> dict[str, Tensor | list[Tensor]]:
        """All state by name, one tensor a layer: for `check_replay` and `state_neutral`. Without the scratch rows."""
        layers = self.layers
        return {
            "checkpoint": [layer.kv_cache[1] for layer in layers],
            "conv_state": [layer.kv_cache[0] for layer in layers],
            "correction": [layer.recoverssm_records.correction for layer in layers],
            "key_gate": [layer.recoverssm_records.key_gate for layer in layers],
            "pending": self.pending,
        }


def normal(random: torch.Generator, *shape: int) -> Tensor:
    """Random numbers on the host in FP32: the same on every device, and under any default."""
    return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")


def poisoned_pool(
    *,
    num_layers: int = 2,
    num_heads: int = 2,
    head_dim: int = 16,
    spec_query_len: int = 4,
    num_slots: int = 8,
    max_num_reqs: int = 6,
    conv_dim: int = 12,
    conv_width: int = 4,
    lower_bound: float | None = -5.0,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Pool:
    """Layers with random parameters whose checkpoints, convolution states, records and scratch rows are NaN.

    `Pool.fill` makes a slot live. An output that is NaN after that has read what it may not.

    Args:
        dtype: of activations, keys, gates and convolution states. pool_dtype: of the checkpoints.
        lower_bound: of the gate, None for the softplus gate.
        seed: of the parameters.
    """
    random = torch.Generator().manual_seed(seed)

    def parameter(*shape: int) -> Tensor:
        return normal(random, *shape).to(device)

    def poison(*shape: int, kind: torch.dtype) -> Tensor:
        return torch.full(shape, float("nan"), dtype=kind, device=device)

    layers = []
    for _ in range(num_layers):
        records = allocate_records(max_num_reqs, num_heads, spec_query_len, head_dim, dtype, device)
        for view in (records.correction, records.key_gate):
            # The scratch row lies in front of the view.
            view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0).fill_(float("nan"))
        layers.append(
            KDALayer(
                kv_cache=(
                    poison(num_slots, conv_dim, conv_width - 1 + spec_query_len, kind=dtype),
                    poison(num_slots, num_heads, head_dim, head_dim, kind=pool_dtype),
                ),
                recoverssm_records=records,
                A_log=parameter(num_heads),
                dt_bias=parameter(num_heads * head_dim),
                local_num_heads=num_heads,
                head_dim=head_dim,
                gate_lower_bound=lower_bound,
                conv_weight=parameter(conv_dim, conv_width),
                conv_bias=parameter(conv_dim),
            )
        )
    pending = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
    return Pool(layers, pending, spec_query_len, conv_dim)
