"""A step of the FP32 backend at its kernels' own entry points, for benchmarks and checks on the GPU machine."""

from types import SimpleNamespace

import torch

from graphrt import KDADeferredCommitContext, KDALayer, KDARecoverSSMRecords, error_counter, programmatic_launches
from graphrt.kernels.conv import conv_verify
from graphrt.kernels.cute import commit, deferred
from graphrt.steps import Convolution, Rows

K = 128
WIDTH = 4  # of the short convolution


class Model:
    """Static tensors of L layers for up to `batch` requests, and the kinds of step over them."""

    def __init__(self, layers, heads, q, batch, n, dtype=torch.bfloat16):
        self.q, self.batch, self.n, self.heads = q, batch, n, heads
        device, dim, columns = "cuda", 3 * heads * K, WIDTH - 1 + q

        def scratch(*shape, kind):
            return torch.randn(batch + 1, *shape, device=device, dtype=kind)[1:]

        self.a_log = torch.rand(heads, device=device)
        self.dt_bias = torch.randn(heads * K, device=device)
        self.weight = torch.randn(dim, WIDTH, device=device, dtype=dtype)
        self.layers = [
            KDALayer(
                kv_cache=(
                    torch.randn(batch + 1, dim, columns, device=device, dtype=dtype),
                    torch.randn(batch + 1, heads, K, K, device=device),
                ),
                recoverssm_records=KDARecoverSSMRecords(
                    scratch(heads, q, K, kind=torch.float32), scratch(heads, q, 2 * K, kind=dtype)
                ),
                A_log=self.a_log,
                dt_bias=self.dt_bias,
                local_num_heads=heads,
                head_dim=K,
                gate_lower_bound=-5.0,
                conv_weight=self.weight,
            )
            for _ in range(layers)
        ]
        self.context = KDADeferredCommitContext.create(self.layers, spec_query_len=q, max_num_reqs=batch)
        if self.context.backend != "fp32_deferred":
            raise SystemExit(self.context.backend_reason)
        self.x = torch.randn(batch * q, dim, device=device, dtype=dtype)
        self.mixed = torch.empty_like(self.x)
        self.gates = torch.randn(1, batch * q, heads, K, device=device, dtype=dtype)
        self.beta = torch.randn(1, batch * q, heads, device=device, dtype=dtype)
        self.out = torch.empty_like(self.gates)
        self.loc = torch.arange(batch + 1, device=device, dtype=torch.int32) * q
        self.slots = torch.arange(1, batch + 1, device=device, dtype=torch.int32)
        self.rows = torch.arange(batch, device=device, dtype=torch.int32)
        self.accepted = torch.full((batch,), n, device=device, dtype=torch.int32)
        self.pending, self.mark = self.accepted.clone(), torch.zeros(1, device=device)
        self.errors = error_counter(device)
        zeros = torch.zeros_like(self.slots)
        self.plan = SimpleNamespace(
            commit_lens=self.accepted,
            final_state_indices=self.slots,
            boundary_state_indices=zeros,
            boundary_recovery_lens=zeros,
        )

    def verifies(self, deferred_step: bool, conv: str = "", split: int | None = None):
        """The verifies of all layers; `conv` "inside" or "apart": with their convolutions."""
        pending = self.pending if deferred_step else None
        rows = Rows(self.loc, self.slots, self.rows, pending, self.q)
        source = self.mixed if conv == "apart" else self.x
        q, k, v = source[None].unflatten(-1, (3, self.heads, K)).unbind(2)
        for layer in self.layers:
            state, checkpoint = layer.kv_cache
            if conv == "apart":
                conv_verify(self.x, state, self.weight, None, rows, True, self.batch, self.mixed, self.errors)
            deferred.deferred_verify_f32(
                q, k, v, self.gates, self.beta, self.a_log, self.dt_bias, -5.0, checkpoint, layer.recoverssm_records,
                self.loc, self.slots, self.q, self.out, self.errors, record_rows=self.rows, pending=pending,
                conv=Convolution(state, self.weight, None, True) if conv == "inside" else None, split=split,
            )  # fmt: skip

    def fold(self, align: bool = False):
        commit.fold(self.context.stack, self.plan, self.slots, self.rows, align)

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
