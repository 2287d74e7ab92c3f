"""What the runtime takes of the memory, from the shape of a model alone.

Every figure is the size of what the package itself would allocate: the same functions run on torch's `meta` device,
which keeps shapes and no bytes. So the plan cannot drift away from the code, and its sum equals the allocated bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .capture.static import allocate_rows
from .checks import fail
from .layers import KDALayer, LayerStack
from .records import allocate_records
from .slots import allocate_counts
from .steps import Plan

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Model:
    """The KDA part of a model, whole; `heads` over all devices."""

    name: str
    layers: int
    heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None


PRESETS = {
    "kimi-k3": Model("Kimi K3", 69, 96, 128, 4, -5.0),
    "kimi-linear": Model("Kimi Linear 48B-A3B", 20, 32, 128, 4, None),
}
"""Kimi K3: 93 layers, 69 of them KDA, 96 heads of 128, 4 taps, gate bound -5 (`text_config` of moonshotai/Kimi-K3; the
bound also in pull request 26185 of ggml-org/llama.cpp). Kimi Linear: 27 layers, 20 of them KDA, 32 heads of 128,
4 taps, no bound (`linear_attn_config` of moonshotai/Kimi-Linear-48B-A3B-Instruct)."""


@dataclass(frozen=True, slots=True)
class Service:
    """How a model is served on one device."""

    spec_query_len: int = 8
    max_num_reqs: int = 256
    num_slots: int = 257
    """State slots, the null slot 0 among them."""
    checkpoint_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    """Of activations, convolution states and the records' keys and gates."""
    tensor_parallel: int = 1
    block_table_width: int = 0
    """Columns of the staged block table; align mode has one at least."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device."""

    parts: dict[str, int]
    """By what they are for. What is allocated before the first capture, that is all but the graphs."""
    host_pinned: int
    """Bytes of pinned host memory of the staging ring, before it grows."""
    graphs: int
    """Estimate of the driver's memory for the recordings that `CommitRunner` makes by default."""
    checkpoint: int
    """One slot's state over all layers, without the convolution."""
    snapshots: int
    """What the peers' way adds instead of the records: a state for every token of every row's window."""
    ring: int
    """Instead of one state a slot and its records: every slot a ring of Q states, the accepted one goes on."""

    @property
    def total(self) -> int:
        """Bytes on the device, the estimate for the graphs included."""
        return sum(self.parts.values()) + self.graphs


# A graph with a handful of kernel nodes: three of them took one 2 MiB block of the driver's on an H200
# (tools/results/h200/host.json, `device_bytes` of the first runner; later runners found room in it).
_GRAPHS_A_BLOCK, _BLOCK_BYTES = 3, 2 << 20


def footprint(model: Model, service: Service) -> Footprint:
    """The plan for one device.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    if service.tensor_parallel < 1 or model.heads % service.tensor_parallel:
        fail("tensor_parallel", f"a divisor of {model.heads} heads", service.tensor_parallel)
    needed = service.max_num_reqs + 1
    if service.num_slots < needed:
        each = f"one for each of {service.max_num_reqs} requests and the null slot"
        fail("num_slots", f"at least {needed}, {each}", service.num_slots)
    heads = model.heads // service.tensor_parallel
    layers = [_layer(model, service, heads) for _ in range(model.layers)]
    stack = LayerStack.build(layers, spec_query_len=service.spec_query_len, max_num_reqs=service.max_num_reqs)
    staged, _ = allocate_rows(service.max_num_reqs, service.block_table_width, META)
    counts = allocate_counts(service.max_num_reqs, META)
    plan = Plan.allocate(service.max_num_reqs, META)
    # commit, flush and drain for every power of two
    recordings = 3 * len({1 << i for i in range(service.max_num_reqs.bit_length())} | {service.max_num_reqs})
    checkpoint = sum(layer.kv_cache[1][0].nbytes for layer in layers)
    return Footprint(
        parts={
            "checkpoints": _bytes(layer.kv_cache[1] for layer in layers),
            "convolution states": _bytes(layer.kv_cache[0] for layer in layers),
            "records": _bytes(
                t for layer in layers for t in (layer.recoverssm_records.correction, layer.recoverssm_records.key_gate)
            ),
            "ledger (pending, generation)": _bytes(iter(counts)),
            "plan": _bytes(getattr(plan, field.name) for field in fields(plan)),
            "tables of addresses": _bytes(_tables(stack)),
            # `StepInputs`, and the rows of a `DecodeStep` with its copy of the pending counts
            "staging": 2 * staged.nbytes + counts[0].nbytes,
        },
        host_pinned=_ring_bytes(service.max_num_reqs),
        graphs=-(-recordings // _GRAPHS_A_BLOCK) * _BLOCK_BYTES,
        checkpoint=checkpoint,
        snapshots=service.max_num_reqs * service.spec_query_len * checkpoint,
        ring=service.num_slots * service.spec_query_len * checkpoint,
    )


def _layer(model: Model, service: Service, heads: int) -> KDALayer:
    window, dim, slots = service.spec_query_len, model.head_dim, service.num_slots
    conv_dim, columns = 3 * heads * dim, model.conv_width - 1 + window
    return KDALayer(
        kv_cache=(
            torch.zeros(slots, conv_dim, columns, dtype=service.dtype, device=META),
            torch.zeros(slots, heads, dim, dim, dtype=service.checkpoint_dtype, device=META),
        ),
        recoverssm_records=allocate_records(service.max_num_reqs, heads, window, dim, service.dtype, META),
        A_log=torch.zeros(heads, device=META),
        dt_bias=torch.zeros(heads * dim, device=META),
        local_num_heads=heads,
        head_dim=dim,
        gate_lower_bound=model.gate_lower_bound,
        conv_weight=torch.zeros(conv_dim, model.conv_width, device=META),
    )


def _tables(stack: LayerStack) -> Iterator[Tensor]:
    values = (getattr(stack, field.name) for field in fields(stack))
    return (value for value in values if isinstance(value, Tensor))


def _bytes(tensors: Iterator[Tensor]) -> int:
    """Of whole allocations, each once: a record's view starts one row into its own."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _ring_bytes(max_num_reqs: int) -> int:
    from .capture.pinned import NUM_BLOCKS, PinnedBlock

    return NUM_BLOCKS * PinnedBlock(max_num_reqs, pin=False).nbytes
