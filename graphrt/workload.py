"""A decode step without a model: KDA layers over static activations, every row accepting the same number of tokens.

What benches, traces and graph dumps run on. The launches of a step are those of a serving engine's, in the same
order: staging, verify of each layer with its convolution, commit, advance. Only the projections between them are
missing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .capture import DecodeStep, Sampled, StepInputs, StepRows
from .checks import fail
from .context import KDADeferredCommitContext
from .fused import FusedConv
from .layers import KDALayer
from .records import allocate_records
from .slots import RecordSlots
from .verify import kda_deferred_verify


@dataclass(frozen=True, slots=True)
class Sizes:
    """A step's shape."""

    layers: int
    heads: int
    """On this device."""
    head_dim: int
    spec_query_len: int
    batch: int
    accepted: int
    """Tokens of a window that every row accepts: what the next verify replays."""
    dtype: torch.dtype = torch.bfloat16
    checkpoint_dtype: torch.dtype = torch.float32
    conv_width: int = 4
    gate_lower_bound: float | None = -5.0

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v of every head."""
        return 3 * self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens of a full step."""
        return self.batch * self.spec_query_len


class StaticLayers:
    """Layers and their context, and the static activations of a full batch.

    Checkpoints, convolution states, records and parameters of each layer lie on pages of their own; the activations
    are shared between the layers, as one layer's are hot when the next begins. All of it is random, fresh records and
    states too: zeros cost a card less power, so its clock would flatter a bench.

    Raises:
        ValueError: naming the size that does not fit.
    """

    def __init__(self, sizes: Sizes, device: torch.device, *, backend: str = "auto", seed: int = 0) -> None:
        if not 0 <= sizes.accepted <= sizes.spec_query_len:
            fail("accepted", f"0 to {sizes.spec_query_len} tokens, the window", sizes.accepted)
        self.sizes, self.device, self._backend = sizes, device, backend
        self._random = torch.Generator(device).manual_seed(seed)
        self.layers = [self._layer() for _ in range(sizes.layers)]
        self.context = KDADeferredCommitContext.create(
            self.layers, spec_query_len=sizes.spec_query_len, max_num_reqs=sizes.batch, backend=backend
        )
        self.x = self._activations(sizes.conv_dim)
        self.raw_g = self._activations(sizes.heads, sizes.head_dim)[None]
        self.raw_beta = self._activations(sizes.heads)[None]

    def qkv(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [1, T, H, K] of a projection or its convolution [T, conv_dim]: views."""
        q, k, v = mixed[None].unflatten(-1, (3, self.sizes.heads, self.sizes.head_dim)).unbind(2)
        return q, k, v

    def counts(self, value: int) -> Tensor:
        """The same number for every row, int32 [batch]."""
        return torch.full((self.sizes.batch,), value, dtype=torch.int32, device=self.device)

    def _layer(self) -> KDALayer:
        s, columns = self.sizes, self.sizes.conv_width - 1 + self.sizes.spec_query_len
        records = allocate_records(s.batch, s.heads, s.spec_query_len, s.head_dim, s.dtype, self.device)
        for values in (records.correction, records.key_gate):
            values.normal_(generator=self._random)
        return KDALayer(
            kv_cache=(
                self._normal(s.batch + 1, s.conv_dim, columns, dtype=s.dtype),
                self._normal(s.batch + 1, s.heads, s.head_dim, s.head_dim, dtype=s.checkpoint_dtype),
            ),
            recoverssm_records=records,
            A_log=self._normal(s.heads),
            dt_bias=self._normal(s.heads * s.head_dim),
            local_num_heads=s.heads,
            head_dim=s.head_dim,
            gate_lower_bound=s.gate_lower_bound,
            conv_weight=self._normal(s.conv_dim, s.conv_width, dtype=s.dtype),
        )

    def _normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=self._random)

    def _activations(self, *shape: int) -> Tensor:
        return self._normal(self.sizes.tokens, *shape, dtype=self.sizes.dtype)


class Workload(StaticLayers):
    """A ledger and a `DecodeStep` over the layers, staged for a full batch.

    Args:
        commit: "deferred" or "eager" in every step, or None for what the measured table chooses.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, *, backend: str = "auto", commit: str | None = None, seed: int = 0
    ) -> None:
        super().__init__(sizes, device, backend=backend, seed=seed)
        self.slots = RecordSlots(sizes.batch, device)
        self.inputs = StepInputs(sizes.batch, sizes.spec_query_len, device)
        self._sampled = Sampled(self.counts(sizes.accepted), self.counts(sizes.spec_query_len))
        self.step = DecodeStep(self.context, self.slots.pending, self.inputs, self._verify, self._sample, choice=commit)
        rows = [self.slots.admit(row) for row in range(sizes.batch)]
        self.inputs.stage(
            num_reqs=sizes.batch,
            state_indices=[row + 1 for row in rows],
            record_rows=rows,
            query_start_loc=[row * sizes.spec_query_len for row in range(sizes.batch + 1)],
        )

    def capture(self) -> None:
        """Record the step; the staged rows stay as they are."""
        self.step.capture(progress=False)

    def replay(self, steps: int = 1) -> None:
        """Run recorded steps, one behind the other."""
        self.step.replay(self.sizes.batch, steps)

    def run(self) -> None:
        """Launch one step from Python: what a recording records."""
        self.step.run(self.sizes.batch)

    def close(self) -> None:
        """Give the recording's memory back."""
        self.step.close()

    def _verify(self, rows: StepRows) -> list[Tensor]:
        return list(self._verify_layers(rows))

    def _verify_layers(self, rows: StepRows) -> Iterator[Tensor]:
        where = (rows.query_start_loc, rows.state_indices, rows.spec_query_len)
        q, k, v = self.qkv(self.x)
        for layer in self.layers:
            conv_state, checkpoint = layer.kv_cache
            yield kda_deferred_verify(
                q, k, v, self.raw_g, self.raw_beta, layer.A_log, layer.dt_bias, layer.gate_lower_bound, checkpoint,
                layer.recoverssm_records, *where, record_rows=rows.record_rows, pending=rows.pending,
                conv=FusedConv(conv_state, cast(Tensor, layer.conv_weight)), backend=self._backend,
            )  # fmt: skip

    def _sample(self, rows: StepRows, outputs: list[Tensor]) -> Sampled:
        return self._sampled
