"""A step of the FP32 backend at its kernels' own entry points, for benchmarks and checks on the GPU machine."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from graphrt import error_counter, programmatic_launches
from graphrt.kernels.conv import compact_conv, conv_verify
from graphrt.kernels.cute import commit, deferred
from graphrt.kernels.fold import fold as fold_triton
from graphrt.steps import Convolution, Rows
from graphrt.workload import Sizes, StaticLayers


class Model(StaticLayers):
    """L layers of up to `batch` requests with n records pending, and the kinds of step over them."""

    def __init__(self, layers: int, heads: int, q: int, batch: int, n: int):
        super().__init__(Sizes(layers, heads, 128, q, batch, n), torch.device("cuda"))
        if self.context.backend != "fp32_deferred":
            raise SystemExit(self.context.backend_reason)
        self.q, self.mixed, self.out = q, torch.empty_like(self.x), torch.empty_like(self.raw_g)
        self.rows = torch.arange(batch, device=self.device, dtype=torch.int32)
        self.loc = torch.arange(batch + 1, device=self.device, dtype=torch.int32) * q
        self.slots = self.rows + 1
        self.accepted, self.pending = self.counts(n), self.counts(n)
        self.mark, self.errors = torch.zeros(1, device=self.device), error_counter(self.device)
        self.plan = SimpleNamespace(
            commit_lens=self.accepted,
            final_state_indices=self.slots,
            boundary_state_indices=self.counts(0),
            boundary_recovery_lens=self.counts(0),
        )

    def verifies(self, deferred_step: bool, conv: str = "", split: int | None = None):
        """The verifies of all layers; `conv` "inside" or "apart": with their convolutions."""
        pending = self.pending if deferred_step else None
        rows = Rows(self.loc, self.slots, self.rows, pending, self.q)
        q, k, v = self.qkv(self.mixed if conv == "apart" else self.x)
        for layer in self.layers:
            (state, checkpoint), weight = layer.kv_cache, layer.conv_weight
            if conv == "apart":
                conv_verify(self.x, state, weight, None, rows, True, len(self.slots), self.mixed, self.errors)
            deferred.deferred_verify_f32(
                q, k, v, self.raw_g, self.raw_beta, layer.A_log, layer.dt_bias, layer.gate_lower_bound, checkpoint,
                layer.recoverssm_records, self.loc, self.slots, self.q, self.out, self.errors,
                record_rows=self.rows, pending=pending,
                conv=Convolution(state, weight, None, True) if conv == "inside" else None, split=split,
            )  # fmt: skip

    def fold(self, align: bool = False):
        commit.fold(self.context.stack, self.plan, self.slots, self.rows, align)

    def fold_in_order(self, triton: bool = False, layers: int | None = None, batch: int | None = None):
        """The fold of the first layers and requests without record rows, by either backend's kernel."""
        stack = replace(self.context.stack, checkpoints=self.context.stack.checkpoints[:layers])
        (fold_triton if triton else commit.fold)(stack, self.plan, self.slots[:batch], None, False)

    def compact(self):
        compact_conv(self.context.stack, self.plan, self.slots, False)

    def flush(self):
        self.context.flush(self.slots, self.rows, self.pending)

    def commit(self, deferred_step: bool = True):
        pending = self.pending if deferred_step else None
        self.context.commit(self.accepted, self.slots, self.loc, record_rows=self.rows, pending=pending)

    def step(self, deferred_step: bool, conv: str = "", split: int | None = None):
        self.verifies(deferred_step, conv, split)
        self.commit(deferred_step)

    def plain_step(self):
        with programmatic_launches(False):
            self.step(True)
